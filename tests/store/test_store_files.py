"""Runs as files: who may read them, in which state, and where."""

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from rlwatch.ports import Checkpoint, Progress
from rlwatch.records import RunInfo, RunState, StepRecord
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import command, fill, steps

_READ_ALL = """
become_nobody()
store = open_store(sys.argv[1])
print([r.step for r in store.records("run")], [r.run_id for r in store.runs()], dict(store.unreadable()),
      store.commands("run") and store.commands("run")[0].command_id, store.series("run", ["kl"])["kl"].steps.tolist())
try:
    open(sys.argv[1] + "/run/x", "w")
except PermissionError:
    print("not writable")
"""
_DIE_WRITING = """
writer = open_store(sys.argv[1]).open_run(RunInfo("run"))
writer.write(records(1, 2, 3))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_directories_and_files_are_the_owners_only(tmp_path: Path):
    """0700 and 0600, side files of a live run included."""
    store = open_store(tmp_path / "runs")
    writer = store.open_run(RunInfo("run"))
    writer.write(steps(1))
    store.submit(command())

    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "runs" / "run").iterdir()}
    assert modes == dict.fromkeys(
        [
            *("run.db", "run.db-wal", "run.db-shm", "run.lock", "control.db"),
            *("run.journal-1", "run.journal.end", "run.journal.reserve"),
        ],
        0o600,
    )
    assert [(tmp_path / part).stat().st_mode & 0o777 for part in ("runs", "runs/run")] == [0o700, 0o700]
    writer.close()


def test_opening_a_store_creates_nothing(tmp_path: Path):
    """Nor does asking it."""
    store = open_store(tmp_path / "runs")
    assert (store.runs(), dict(store.unreadable()), store.lease_messages(1.0, lease_s=1.0)) == ([], {}, [])
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_one_plain_file(tmp_path: Path):
    """No log beside it, none needed; it can be copied as it stands."""
    fill(open_store(tmp_path), steps(1, 2), finish=True)

    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["run.db", "run.lock"]
    assert sqlite3.connect(tmp_path / "run" / "run.db").execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_finished_run_that_is_amended_is_one_plain_file_again(tmp_path: Path):
    """It opens from a directory that cannot be written, as before."""
    store = open_store(tmp_path)
    fill(store, steps(1, 2), finish=True)
    for judged in (1, 2):
        writer = store.amend_run("run")
        writer.write([], Progress(judged=judged))
        writer.close()

        assert store.judged("run")[0] == judged
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["run.db", "run.lock"]
        assert sqlite3.connect(tmp_path / "run" / "run.db").execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_the_file_of_a_finished_run_has_no_unused_pages(tmp_path: Path):
    """Rows that became columns left their pages; a short run's checkpoint is not kept: its rows are judged anew."""
    store = open_store(tmp_path)
    checkpoint = Checkpoint(1000, 1, 1000, "judge 1", bytes(100_000))
    sizes = {}
    for run, ends in ("killed", False), ("finished", True):
        writer = store.open_run(RunInfo(run))
        for first in range(1, 1001, 100):
            rows = [StepRecord(s, {f"m{k}": s / (k + 1) for k in range(60)}) for s in range(first, first + 100)]
            writer.write(rows, Progress((), first + 99, checkpoint if first == 901 else None))
        if ends:
            writer.finish(RunState.FINISHED, "", 5.0)
        writer.close()
        sizes[run] = (tmp_path / run / "run.db").stat().st_size
        free = sqlite3.connect(tmp_path / run / "run.db").execute("PRAGMA freelist_count").fetchone()[0]
        assert not (ends and free)
        assert (store.checkpoint(run, "judge 1") is None) is ends
        assert [record.step for record in store.records(run)] == [*range(1, 1001)]

    assert sizes["finished"] < sizes["killed"]


def test_what_ctrl_c_left_open_is_rolled_back_and_the_end_is_written(tmp_path: Path):
    """Interrupted right after a transaction began, the writer still stores, and ends the run durably."""
    writer = open_store(tmp_path).open_run(RunInfo("r"))
    for left_open in range(2):
        writer.db.execute("BEGIN IMMEDIATE")
        writer.db.execute("DELETE FROM record")
        if left_open == 0:
            writer.write(steps(1, 2))
    writer.finish(RunState.FINISHED, "the watch ended", 5.0)
    writer.close()

    store = open_store(tmp_path)
    assert (store.run("r").state, store.run("r").state_reason) == (RunState.FINISHED, "the watch ended")
    assert [record.step for record in store.records("r")] == [1, 2]
    assert not list((tmp_path / "r").glob("run.db-*"))


def test_finish_waits_for_a_reader_to_leave_and_does_not_insist(tmp_path: Path, caplog):
    """A snapshot held open keeps the log file; the run is finished all the same and says so."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    writer.readers_leave_s = 0.0
    writer.write(steps(1))
    reader = sqlite3.connect(tmp_path / "run" / "run.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM record").fetchone()
    writer.finish(RunState.FINISHED, "", 5.0)
    writer.close()

    assert "is being read" in caplog.text
    assert store.run("run").state is RunState.FINISHED
    reader.close()


def test_a_long_reader_does_not_stop_the_writer(tmp_path: Path):
    """And goes on seeing what was there when it began."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    writer.write(steps(1))
    with store.snapshot("run") as snapshot:
        writer.write(steps(*range(2, 500)))
        assert snapshot.execute("SELECT count(*) FROM record").fetchone() == (1,)
    assert len(store.records("run")) == 499
    writer.close()


def test_a_run_whose_writer_was_killed_is_readable(tmp_path: Path, child):
    """Its rows are still in the log file; reading does not change them, resuming goes on from there."""
    process = child(_DIE_WRITING, tmp_path)
    process.communicate()
    assert process.returncode == -9
    assert (tmp_path / "run" / "run.db-wal").stat().st_size > 0
    store = open_store(tmp_path)
    before = (tmp_path / "run" / "run.db").read_bytes()

    assert [record.step for record in store.records("run")] == [1, 2, 3]
    assert (tmp_path / "run" / "run.db").read_bytes() == before
    writer = store.open_run(RunInfo("run"))
    assert (writer.run.attempt, writer.last_seq) == (2, 3)
    writer.close()


@pytest.mark.parametrize("state", ["finished", "closed", "killed", "killed, index lost", "copied without log"])
def test_runs_open_where_nothing_can_be_written(open_dir: Path, lock_away, run_child, child, state: str):
    """Read-only directories, for another user: every state a run can be left in."""
    if state.startswith("killed"):
        child(_DIE_WRITING, open_dir).communicate()
    else:
        fill(open_store(open_dir), steps(1, 2, 3), finish=state == "finished")
    open_store(open_dir).submit(command())
    if state == "killed, index lost":
        (open_dir / "run" / "run.db-shm").unlink()
    if state == "copied without log":
        (open_dir / "run" / "run.lock").unlink()
        shutil.move(open_dir / "run", open_dir / "copy")
        shutil.copytree(open_dir / "copy", open_dir / "run")
        shutil.rmtree(open_dir / "copy")
    lock_away(open_dir)

    out = run_child(_READ_ALL, open_dir)

    assert out.splitlines() == ["[1, 2, 3] ['run'] {} c1 [1, 2, 3]", "not writable"]


def test_a_directory_that_cannot_be_written_is_named(open_dir: Path, lock_away, run_child):
    """With what to do about it; nothing is left behind."""
    lock_away(open_dir)

    out = run_child(
        """
become_nobody()
try:
    open_store(sys.argv[1] + "/runs").open_run(RunInfo("run"))
except StoreError as error:
    print(type(error).__name__, error)
""",
        open_dir,
    )

    assert out.startswith("StoreError")
    assert str(open_dir) in out
    assert "RLWATCH_STORE" in out


def test_another_users_run_is_listed_as_unreadable(open_dir: Path, run_child):
    """The other runs of a shared root stay listed."""
    for run_id in ("run", "private"):
        fill(open_store(open_dir), steps(1), run_id, finish=True)
    for path in [open_dir / "run", *(open_dir / "run").iterdir()]:
        path.chmod(0o755)
    (open_dir / "private").chmod(0o000)

    out = run_child(
        "become_nobody()\n"
        "s = open_store(sys.argv[1]); print([r.run_id for r in s.runs()], s.unreadable(), s.alerts(), s.outbox(),"
        " s.lease_messages(1.0, lease_s=1.0))",
        open_dir,
    )

    assert out.startswith("['run'] {'private': 'cannot open")
    assert out.endswith("[] [] []")


def test_things_that_are_no_runs_are_passed_over(tmp_path: Path):
    """Files, hidden directories, directories of somebody else, a run just being made."""
    (tmp_path / "notes.txt").write_text("hello")
    for name in (".git", "checkpoints", "being-made"):
        (tmp_path / name).mkdir()
    (tmp_path / ".git" / "run.db").write_text("")
    (tmp_path / "being-made" / ".run.db.new").write_text("")
    store = open_store(tmp_path)
    fill(store, steps(1))

    assert ([run.run_id for run in store.runs()], dict(store.unreadable())) == (["run"], {})


def test_the_directory_is_the_run(tmp_path: Path):
    """Renamed or copied elsewhere it is a run of that name, commands and alerts included."""
    store = open_store(tmp_path / "a")
    fill(store, steps(1, 2), finish=True)
    store.submit(command())
    shutil.copytree(tmp_path / "a" / "run", tmp_path / "b" / "moved")

    moved = open_store(tmp_path / "b")
    assert [run.run_id for run in moved.runs()] == ["moved"]
    assert len(moved.records("moved")) == 2
    assert moved.commands("moved") == [replace(command(), run_id="moved")]


def test_a_name_no_run_can_have_is_unreadable_not_fatal(tmp_path: Path):
    """Such as what a file manager makes of a copy."""
    store = open_store(tmp_path)
    fill(store, steps(1))
    shutil.copytree(tmp_path / "run", tmp_path / "run (copy)")

    assert [run.run_id for run in store.runs()] == ["run"]
    assert "letters, digits" in store.unreadable()["run (copy)"]


def test_an_interrupted_creation_is_begun_anew(tmp_path: Path):
    """Killed between making the file and naming it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.db.new").write_bytes(b"half a file")
    store = open_store(tmp_path)

    assert fill(store, steps(1)).attempt == 1
    assert [run.run_id for run in store.runs()] == ["run"]


def test_listing_asks_the_same_however_long_the_runs(tmp_path: Path):
    """Every query of a listing goes through an index or the end of the table, never over the rows."""
    store = open_store(tmp_path)
    fill(store, [StepRecord(step, {"kl": 0.0}) for step in range(3000)])
    asked: list[str] = []
    with store.snapshot("run") as db:
        db.set_trace_callback(asked.append)
        from rlwatch.store.sqlite import runrow

        runrow.load(db, "run")
        db.set_trace_callback(None)
        plans = [row[3] for query in asked for row in db.execute(f"EXPLAIN QUERY PLAN {query}")]

    assert len(asked) == 2
    assert [plan for plan in plans if "TEMP B-TREE" in plan] == []
    assert "LIMIT 1" in asked[1]


def test_last_values_find_a_metric_logged_once_long_ago_by_index(tmp_path: Path):
    """One look-up a metric set; a scan back through a long run would make the run table slow."""
    store = open_store(tmp_path)
    fill(store, [StepRecord(0, {"eval": 1.0}), *steps(*range(1, 50))])
    with store.snapshot("run") as db:
        query = "SELECT seq, step, v FROM record WHERE mset = 1 ORDER BY seq DESC LIMIT 1"
        plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {query}")]

    assert plan == ["SEARCH record USING INDEX record_by_set (mset=?)"]
