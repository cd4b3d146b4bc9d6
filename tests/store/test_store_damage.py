"""Damaged, foreign, newer and full: each says what happened, and the other runs do not suffer."""

import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from rlwatch.errors import StoreBusyError, StoreCorruptError, StoreError, StoreFullError, StoreVersionError
from rlwatch.records import CommandStatus, RunInfo, SpikeBatch
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import alert, command, fill, message, steps


def _garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xffthis is no database" * 500)


def _half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _stump(path: Path) -> None:
    os.truncate(path, 10)


def _emptied(path: Path) -> None:
    os.truncate(path, 0)


def _foreign(path: Path) -> None:
    path.unlink()
    sqlite3.connect(path).executescript("CREATE TABLE recipes (cake TEXT)")


def _no_run_row(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM run")


def _bad_json(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE run SET config = '{oops'")


def _bad_state(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE run SET state = 'sleeping'")


_DAMAGES = [_garbage, _half, _stump, _emptied, _foreign, _no_run_row, _bad_json, _bad_state]


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_run_says_so_and_the_others_stay_listed(tmp_path: Path, damage):
    """From ``run``, in ``unreadable`` and when somebody wants to resume it."""
    store = open_store(tmp_path)
    for run_id in ("good", "bad"):
        fill(store, steps(*range(300)), run_id, finish=True)
    damage(tmp_path / "bad" / "run.db")

    with pytest.raises(StoreCorruptError, match="bad"):
        store.run("bad")
    assert [run.run_id for run in store.runs()] == ["good"]
    assert list(store.unreadable()) == ["bad"]
    assert store.unreadable()["bad"]


@pytest.mark.parametrize("damage", [_garbage, _half, _stump])
def test_a_damaged_run_is_not_written_over(tmp_path: Path, damage):
    """Resuming raises, changes nothing and leaves the lock free."""
    store = open_store(tmp_path)
    fill(store, steps(*range(300)), finish=True)
    damage(tmp_path / "run" / "run.db")
    for _ in range(2):
        before = (tmp_path / "run" / "run.db").read_bytes()
        with pytest.raises(StoreCorruptError, match="run"):
            store.open_run(RunInfo("run"))
        assert (tmp_path / "run" / "run.db").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("UPDATE record SET v = x'0011'", lambda store: store.records("run")),
        ("UPDATE record SET v = x'0011'", lambda store: store.series("run", ["kl"])),
        ("UPDATE record SET v = x'0011'", lambda store: store.last_values("run")),
        ("UPDATE record SET mset = 77", lambda store: store.records("run")),
        ("UPDATE metric_set SET names = '['", lambda store: store.metric_names("run")),
        ("UPDATE spike_batch SET v = x'789c'", lambda store: store.spikes("run")),
        ("UPDATE spike_batch SET v = substr(v, 1, length(v) - 6)", lambda store: store.spikes("run")),
        ("DROP TABLE event", lambda store: store.events("run")),
    ],
)
def test_damage_inside_a_readable_file_is_an_error_of_rlwatch(tmp_path: Path, change: str, read):
    """Never a bare struct, numpy, zlib or sqlite3 error."""
    store = open_store(tmp_path)
    fill(store, [*steps(1), SpikeBatch(1, {"logp": np.zeros(50)})], finish=True)
    with sqlite3.connect(tmp_path / "run" / "run.db") as db:
        db.execute(change)

    with pytest.raises(StoreError, match=r"run\.db"):
        read(store)


def test_damaged_control_tables_do_not_touch_the_measurements(tmp_path: Path):
    """Asking this run for commands fails; asking all runs for messages passes it over."""
    store = open_store(tmp_path)
    for run_id in ("run", "other"):
        fill(store, steps(1), run_id)
        store.put_alerts([alert(f"a-{run_id}", run_id)], [message(f"m-{run_id}", run_id)])
    _garbage(tmp_path / "run" / "control.db")

    assert len(store.records("run")) == 1
    for ask in (lambda: store.commands("run"), lambda: store.alerts("run"), lambda: store.submit(command())):
        with pytest.raises(StoreCorruptError, match=r"control\.db"):
            ask()
    assert [each.alert_id for each in store.alerts()] == ["a-other"]
    assert [each.message_id for each in store.outbox()] == ["m-other"]
    assert [each.message_id for each in store.lease_messages(1.0, lease_s=1.0)] == ["m-other"]


@pytest.mark.parametrize("name", ["run.db", "control.db"])
def test_a_newer_file_is_refused_with_both_versions_and_the_way_out(tmp_path: Path, name: str):
    """By readers, by the writer, by commands."""
    store = open_store(tmp_path)
    fill(store, steps(1), finish=True)
    store.submit(command())
    with sqlite3.connect(tmp_path / "run" / name) as db:
        db.execute("PRAGMA user_version = 99")

    asks = [lambda: store.run("run"), lambda: store.open_run(RunInfo("run"))]
    if name == "control.db":
        asks = [lambda: store.submit(command()), lambda: store.commands("run"), lambda: store.claim("run", 1.0)]
    for ask in asks:
        with pytest.raises(StoreVersionError, match=r"99.*up to \d:.*install a newer"):
            ask()


def test_a_full_disk_leaves_no_half_batch_and_passes(tmp_path: Path):
    """The batch that did not fit is not there; written again with room it is; numbers have no gap."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    writer.write(steps(1))
    pages = writer.db.execute("PRAGMA page_count").fetchone()[0]
    writer.db.execute(f"PRAGMA max_page_count = {pages + 2}")
    batch = [
        *steps(2, name="new metric"),
        SpikeBatch(2, {"logp": np.random.default_rng(0).normal(size=9000)}),
        *steps(3),
    ]
    for _ in range(2):
        with pytest.raises(StoreFullError, match=r"run\.db"):
            writer.write(batch)
    assert (writer.last_seq, [record.seq for record in store.records("run")]) == (1, [1])
    assert (store.metric_names("run"), store.spikes("run")) == (["kl"], [])

    writer.db.execute("PRAGMA max_page_count = 1000000")
    writer.write(batch)
    assert [(record.seq, list(record.metrics)) for record in store.records("run")] == [
        (1, ["kl"]),
        (2, ["new metric"]),
        (3, ["kl"]),
    ]
    writer.close()


def test_a_file_size_limit_is_a_full_disk_too(tmp_path: Path, run_child):
    """What a quota looks like from inside a process; small writes may go on afterwards."""
    out = run_child(
        """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_store(sys.argv[1])
writer = store.open_run(RunInfo("run"))
writer.write(records(1))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
try:
    writer.write(records(*range(2, 20000)))
except StoreFullError as error:
    print(type(error).__name__)
print(len(store.records("run")))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
writer.write(records(*range(2, 20000)))
writer.finish(RunState.FINISHED, "", 1.0)
print(len(store.records("run")), store.run("run").last_step)
""",
        tmp_path,
    )
    assert out.splitlines() == ["StoreFullError", "1", "19999 19999"]


def test_a_trainer_does_not_wait_for_busy_control_tables(tmp_path: Path):
    """``StoreBusyError`` at once; when the other is gone the same call works."""
    trainer = open_store(tmp_path, control_timeout_s=0.0)
    for run_id in ("run", "other"):
        fill(trainer, run_id=run_id)
        trainer.put_alerts([], [message(f"m-{run_id}", run_id)])
    trainer.submit(command())
    other = sqlite3.connect(tmp_path / "run" / "control.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    asks = [
        lambda: trainer.claim("run", 1.0),
        lambda: trainer.commands("run"),
        lambda: trainer.submit(command("c2")),
        lambda: trainer.settle("run", "c1", CommandStatus.DONE, 1.0, step=1, result=""),
        lambda: trainer.put_alerts([alert()], []),
    ]
    for ask in asks:
        with pytest.raises(StoreBusyError, match="try again"):
            ask()
    assert [each.message_id for each in trainer.lease_messages(1.0, lease_s=9.0)] == ["m-other"]

    other.execute("COMMIT")
    other.close()
    assert [each.command_id for each in trainer.claim("run", 1.0)] == ["c1"]
    assert [each.message_id for each in trainer.lease_messages(1.0, lease_s=9.0)] == ["m-run"]
