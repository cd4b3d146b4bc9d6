"""Files that were put into a store to hold it up, and runs whose database is gone: nobody waits, and no row is lost."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rlwatch.errors import StoreCorruptError, StoreError
from rlwatch.records import RunInfo, RunState, StepRecord
from rlwatch.store.sqlite import connection
from rlwatch.store.sqlite.journal import SQLiteJournal
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import fill, steps

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"


def _changed(*statements: str):
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as db:
            db.executescript(";".join(statements))

    return change


def _view_of(table: str):
    columns = "1 AS id, 'a' AS project, 'b' AS name, '' AS source, 0 AS created_at, '{}' AS config, '[]' AS tags, 1 AS attempt"
    more = "'running' AS state, '' AS state_reason, 0 AS heartbeat_at, '' AS host, 0 AS pid"
    return _changed(
        f"ALTER TABLE {table} RENAME TO old_{table}",
        f"CREATE VIEW {table} AS {ENDLESS} SELECT {columns}, {more}, x AS seq, 0 AS step, 0.0 AS ts FROM c WHERE x < 0",
    )


def _computed(path: Path) -> None:
    _changed("CREATE TABLE more (a TEXT, b BLOB AS (zeroblob(1000000000)))")(path)


def _pipe(name: str):
    def change(path: Path) -> None:
        place = path.with_name(name)
        place.unlink(missing_ok=True)
        os.mkfifo(place)

    return change


HOSTILE = {
    "endless view of the run": _view_of("run"),
    "endless view of the records": _view_of("record"),
    "endless view of the attempts": _view_of("attempt"),
    "trigger": _changed("CREATE TRIGGER t AFTER INSERT ON record BEGIN DELETE FROM record; END"),
    "virtual table": _changed("CREATE VIRTUAL TABLE words USING fts5(a)"),
    "computed column": _computed,
    "named pipe": _pipe("run.db"),
    "named pipe in place of its log": _pipe("run.db-wal"),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_run_is_unreadable_at_once_and_the_others_stay_listed(tmp_path: Path, hostile):
    """Whoever lists, shows or watches it, or would go on with it."""
    store = open_store(tmp_path)
    for run_id in ("good", "bad"):
        fill(store, steps(1, 2), run_id, finish=True)
    hostile(tmp_path / "bad" / "run.db")

    fresh = open_store(tmp_path)
    assert [run.run_id for run in fresh.runs()] == ["good"]
    assert fresh.unreadable().keys() == {"bad"}
    for look in (fresh.run, fresh.records, fresh.findings, fresh.damage, fresh.configs):
        with pytest.raises(StoreCorruptError):
            look("bad")
    with pytest.raises(StoreError):
        fresh.open_run(RunInfo("bad"))


@pytest.mark.parametrize("name", ["control.db", "alerts.db"])
@pytest.mark.parametrize("pipe", [True, False])
def test_hostile_control_tables_hold_nobody_up(tmp_path: Path, name: str, *, pipe: bool):
    """Commands and alerts say what is wrong; measurements are read."""
    store = open_store(tmp_path)
    fill(store, steps(1, 2), "run", finish=True)
    place = tmp_path / name if name == "alerts.db" else tmp_path / "run" / name
    (_pipe(name) if pipe else _changed(f"CREATE VIEW v AS {ENDLESS} SELECT x FROM c"))(place)

    with pytest.raises(StoreCorruptError):
        store.silences() if name == "alerts.db" else store.commands("run")
    assert len(store.records("run")) == 2


@pytest.mark.parametrize("name", [".runs.jsonl", "run/run.lock"])
def test_other_named_pipes_of_a_store_hold_nobody_up(tmp_path: Path, name: str):
    """The list of runs at rest, a lock."""
    store = open_store(tmp_path)
    fill(store, steps(1, 2), "run", finish=True)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    os.utime(tmp_path / "run" / "run.db", (1, 1))

    assert [run.run_id for run in open_store(tmp_path).runs()] == ["run"]


def test_a_question_of_constant_time_does_not_go_on_for_ever():
    """Whatever makes it: what is asked of every run of a list is bounded in instructions, not in time."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute(f"CREATE VIEW run AS {ENDLESS} SELECT x FROM c WHERE x < 0")
        with (
            pytest.raises(StoreCorruptError, match="does not end"),
            connection.explained("run.db"),
            connection.bounded(db),
        ):
            db.execute("SELECT x FROM run").fetchone()
        assert db.execute("SELECT 1").fetchone() == (1,)


# A database that is gone or damaged, with its journal beside it.


def _killed(root: Path, stored: int, journaled: int) -> Path:
    """A run whose process stored some rows and died with more in its journal; a part of them in both."""
    store = open_store(root)
    writer = store.open_run(RunInfo("run", project="p", name="n", config={"lr": 1.0}))
    writer.write(steps(*range(stored)))
    for step in range(max(0, stored - 5), stored + journaled):
        writer.journal.append_record(step, float(step), {"m": float(step)})
    writer.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    dead = root.with_name("dead")
    shutil.copytree(root, dead)  # as a kill leaves it: the copy has no writer
    writer.close()
    return dead


def _unlinked(path: Path) -> None:
    for each in path.parent.glob("run.db*"):
        each.unlink()


def _emptied(path: Path) -> None:
    os.truncate(path, 0)


def _stump(path: Path) -> None:
    os.truncate(path, 2 * 4096)


def _half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xffthis is no database" * 500)


@pytest.mark.parametrize("damage", [_unlinked, _emptied, _stump, _half, _garbage, HOSTILE["endless view of the run"]])
@pytest.mark.parametrize("stored", [0, 600])
def test_the_journal_is_read_where_the_database_is_gone_or_damaged(tmp_path: Path, damage, stored: int):
    """By who lists or shows the run; what is damaged is kept beside it."""
    dead = _killed(tmp_path / "live", stored, 40)
    damage(dead / "run" / "run.db")
    store = open_store(dead)

    assert [run.run_id for run in store.runs()] == ["run"]
    found = [record.step for record in store.records("run")]
    assert found == sorted(set(found))
    assert set(range(max(0, stored - 5), stored + 40)) <= set(found)
    assert bool(list((dead / "run").glob("run.db.damaged-1"))) is (damage is not _unlinked)
    assert store.damage("run") == []
    assert store.judged("run")[0] <= len(found)


def test_what_can_be_read_of_a_damaged_database_is_kept(tmp_path: Path):
    """Its name and settings, and the rows before the damage."""
    dead = _killed(tmp_path / "live", 600, 40)
    path = dead / "run" / "run.db"
    os.truncate(path, path.stat().st_size - 4096)
    run = open_store(dead).run("run")

    assert (run.project, run.name, run.config["lr"], run.last_step) == ("p", "n", 1.0, 639)
    assert len(open_store(dead).records("run")) > 45


@pytest.mark.parametrize("damage", [_unlinked, _garbage])
def test_a_run_whose_database_is_gone_goes_on_from_its_journal(tmp_path: Path, damage):
    """As its next attempt; how the last one ended is told by the journal, too."""
    dead = _killed(tmp_path / "live", 0, 40)
    journal = SQLiteJournal(tmp_path)
    journal.note_end(RunState.FINISHED, "it was over", 7.0)
    with (tmp_path / "run.journal-1").open("rb") as said, (dead / "run" / "run.journal-1").open("ab") as file:
        file.write(said.read()[16:])
    damage(dead / "run" / "run.db")

    store = open_store(dead)
    assert (store.run("run").state, store.run("run").state_reason) == (RunState.FINISHED, "it was over")
    with closing(store.open_run(RunInfo("run"))) as writer:
        assert writer.run.attempt == 2
        writer.write([StepRecord(40, {"m": 40.0}, 40.0, attempt=2, seq=writer.last_seq + 1)])
    assert [record.step for record in store.records("run")] == list(range(41))


def test_what_to_do_about_damage_is_never_to_remove_the_journal(tmp_path: Path):
    """Without a journal, too."""
    store = open_store(tmp_path)
    fill(store, steps(1, 2), "run", finish=True)
    _garbage(tmp_path / "run" / "run.db")
    with pytest.raises(StoreCorruptError) as said:
        store.run("run")

    assert "restore it from a copy, or move run.db out of the store" in str(said.value)
    (tmp_path / "run" / "run.journal-1").write_bytes(b"rlwatch1")
    with pytest.raises(StoreCorruptError) as said:
        store.run("run")
    assert "or move run.db away: what its journal holds is read without it" in str(said.value)
    assert "remove" not in str(said.value)


def test_where_no_new_database_can_be_made_the_damaged_one_stays_in_its_place(tmp_path: Path):
    """It is made anew once that is possible."""
    dead = _killed(tmp_path / "live", 600, 40)
    _garbage(dead / "run" / "run.db")
    before = sorted(path.name for path in (dead / "run").iterdir())

    (dead / "run" / ".run.db.new").mkdir()
    assert open_store(dead).unreadable().keys() == {"run"}
    (dead / "run" / ".run.db.new").rmdir()
    assert sorted(path.name for path in (dead / "run").iterdir()) == before
    assert open_store(dead).run("run").last_step == 639


def test_a_database_whose_end_is_still_in_its_log_is_whole(tmp_path: Path):
    """As a full disk leaves it in the middle of a checkpoint."""
    store = open_store(tmp_path)
    running = store.open_run(RunInfo("run"))
    running.write(steps(*range(600)))
    running.journal.append_record(600, 600.0, {"kl": 60.0})
    dead = tmp_path.with_name("dead")
    shutil.copytree(tmp_path, dead)
    running.close()
    with (dead / "run" / "run.db").open("r+b") as file:
        file.seek(28)
        file.write((10_000).to_bytes(4, "big"))

    assert [record.step for record in open_store(dead).records("run")] == list(range(601))
    assert list((dead / "run").glob("run.db.damaged*")) == []
