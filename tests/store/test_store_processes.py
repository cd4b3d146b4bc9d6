"""More than one process: killed writers, forked children, two at one run."""

import os
import random
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlwatch.errors import RunLockedError, RunNotFoundError, StoreBusyError
from rlwatch.records import OutboxStatus, RunInfo, RunState
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import command, fill, message, steps

_WRITE_UNTIL_KILLED = """
store = open_store(sys.argv[1])
writer = store.open_run(RunInfo("run"))
step = writer.last_seq
while True:
    step += 1
    writer.write([StepRecord(step, {f"m{i}": float(step) for i in range(60)}, attempt=writer.run.attempt)])
    os.write(1, b"%d\\n" % step)
"""
_HOLD = """
writer = open_store(sys.argv[1]).open_run(RunInfo("run"))
print("open", flush=True)
sys.stdin.readline()
"""
_TAKE = """
store = open_store(sys.argv[1], control_timeout_s=float(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
taken, quiet = [], 0
while quiet < 3:
    try:
        got = [c.command_id for c in store.claim("run", 1.0)]
        got += [m.message_id for m in store.lease_messages(1.0, lease_s=99.0, limit=3)]
    except StoreBusyError:
        continue
    taken += got
    quiet = 0 if got else quiet + 1
print(*taken, flush=True)
sys.stdin.readline()  # what a process holds that has ended is free
"""
_FORK = """
store = open_store(sys.argv[1])
writer = store.open_run(RunInfo("run"))
writer.write(records(1, 2))
if os.fork() == 0:
    said = []
    try:
        writer.write(records(3))
    except StoreError as error:
        said.append("forked" in str(error))
    writer.heartbeat(5.0)
    writer.finish(RunState.CRASHED, "child", 5.0)
    if sys.argv[2] == "go on":
        writer.close()  # else it is left open: the lock must be gone without that
    said += [store.run("run").state.value, len(store.records("run"))]
    os.write(1, " ".join(map(str, said)).encode() + b"\\n")
    os.read(0, 1)  # outlive the parent
    sys.exit()  # with all of the interpreter's cleaning up
if sys.argv[2] == "go on":
    writer.write(records(3))
    os.write(1, b"parent wrote\\n")
os.read(0, 1)
os._exit(0)
"""

_FORK_IN_THE_MIDST = """
import signal, sqlite3, threading
store = open_store(sys.argv[2])
writer = store.open_run(RunInfo("run"))
busy = {"on": True}
def write():
    step = 0
    while busy["on"]:
        step += 1
        writer.write(records(step))
thread = threading.Thread(target=write)
thread.start()
for number in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        sqlite3.connect(":memory:").close()
        os._exit(0)
    if status := os.waitpid(child, 0)[1]:
        break
busy["on"] = False
thread.join()
writer.close()
print(number, status, len(store.records("run")) > number, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_writer_loses_no_acknowledged_step(tmp_path: Path, child, seed: int):
    """SIGKILL at a random moment, three lives in a row; the file is sound and no number is missing."""
    lives = random.Random(seed)
    acknowledged = 0
    for _ in range(3):
        process = child(_WRITE_UNTIL_KILLED, tmp_path)
        for _ in range(lives.randrange(1, 400)):
            acknowledged = int(process.stdout.readline())
        process.kill()
        rest = process.communicate()[0].split()
        acknowledged = int(rest[-1]) if rest else acknowledged

    store = open_store(tmp_path)
    records = store.records("run")
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= acknowledged
    assert all(set(record.metrics.values()) == {float(record.step)} for record in records)
    store.open_run(RunInfo("run")).close()
    db = sqlite3.connect(tmp_path / "run" / "run.db")
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert store.run("run").attempt == 4


def test_a_second_process_is_told_who_holds_the_run(tmp_path: Path, child):
    """Its process id and host; killing the holder frees the run."""
    holder = child(_HOLD, tmp_path)
    assert holder.stdout.readline() == "open\n"
    store = open_store(tmp_path)
    before = (tmp_path / "run" / "run.db").read_bytes()

    with pytest.raises(RunLockedError, match=f"process {holder.pid} on {os.uname().nodename}"):
        store.open_run(RunInfo("run"))
    assert (tmp_path / "run" / "run.db").read_bytes() == before
    assert store.run("run").attempt == 1

    holder.kill()
    holder.wait()
    assert fill(store).attempt == 2


def test_two_processes_never_take_the_same_command_or_message(tmp_path: Path, child):
    """One waits for the other, one does not; between them they get everything, once."""
    store = open_store(tmp_path)
    fill(store)
    wanted = [store.submit(command(f"c{number}")).command_id for number in range(20)]
    store.put_alerts([], [message(f"m{number}") for number in range(60)])
    wanted += [each.message_id for each in store.outbox("run")]

    takers = [child(_TAKE, tmp_path, patience) for patience in (0.0, 5.0)]
    for taker in takers:
        assert taker.stdout.readline() == "ready\n"
    for taker in takers:
        taker.stdin.write("go\n")
        taker.stdin.flush()
    taken = [name for taker in takers for name in taker.stdout.readline().split()]
    for taker in takers:
        _, err = taker.communicate(timeout=600)
        assert taker.returncode == 0, err

    assert sorted(taken) == sorted(wanted)


def test_many_processes_may_be_first_to_need_the_control_tables(tmp_path: Path, child):
    """Created once, nobody fails."""
    fill(open_store(tmp_path))
    ask = """
print("ready", flush=True)
number = sys.stdin.readline().strip()
open_store(sys.argv[1], control_timeout_s=30.0).submit(Command("c" + number, "run", "note"))
"""
    processes = [child(ask, tmp_path) for _ in range(4)]
    for process in processes:
        process.stdout.readline()
    for number, process in enumerate(processes):
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
    for process in processes:
        assert process.wait(timeout=600) == 0, process.stderr.read()

    assert {each.command_id for each in open_store(tmp_path).commands("run")} == {"c0", "c1", "c2", "c3"}


def test_a_forked_child_has_no_writer_and_the_parent_keeps_its_own(tmp_path: Path, child):
    """Data loaders fork in the middle of training."""
    parent = child(_FORK, tmp_path, "go on")
    assert {parent.stdout.readline(), parent.stdout.readline()} <= {
        "parent wrote\n",
        "True running 2\n",
        "True running 3\n",
    }
    store = open_store(tmp_path)
    assert [record.step for record in store.records("run")] == [1, 2, 3]
    with pytest.raises(RunLockedError):
        store.open_run(RunInfo("run"))


def test_a_forked_child_does_not_keep_the_run_and_does_no_harm_by_ending(tmp_path: Path, child):
    """The parent is gone, another writer has been and finished: the child's exit must not bring old pages back."""
    parent = child(_FORK, tmp_path, "die")
    assert parent.stdout.readline() == "True running 2\n"
    os.kill(parent.pid, 9)
    parent.wait()
    store = open_store(tmp_path)

    fill(store, steps(*range(3, 400)), finish=True)
    size = (tmp_path / "run" / "run.db").stat().st_size
    parent.stdin.write("x")
    parent.stdin.close()
    parent.stdout.read()  # ends when the child has

    assert (tmp_path / "run" / "run.db").stat().st_size == size
    assert [record.step for record in store.records("run")] == [1, 2, *range(3, 400)]
    assert sqlite3.connect(tmp_path / "run" / "run.db").execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_child_forked_while_a_thread_is_inside_sqlite_can_use_sqlite(tmp_path: Path, child):
    """The writer's thread may be taking memory for a row just then; a data loader's worker has a cache of its own."""
    process = child(_FORK_IN_THE_MIDST, 200, tmp_path)
    out, err = process.communicate(timeout=120)

    assert out == "199 0 True\n", err


def test_an_outbox_seen_empty_is_looked_at_again_when_it_changes(tmp_path: Path, monkeypatch):
    """Hundreds of runs are polled every second: their files are opened only when they changed."""
    store, other = open_store(tmp_path), open_store(tmp_path)
    fill(store)
    store.put_alerts([], [message()])
    control = tmp_path / "run" / "control.db"
    [leased] = store.lease_messages(1.0, lease_s=1.0)
    store.settle_message(replace(leased, status=OutboxStatus.SENT))
    long_ago = time.time() - 60
    os.utime(control, (long_ago, long_ago))
    assert store.lease_messages(2.0, lease_s=1.0) == []
    opened = []
    monkeypatch.setattr(sqlite3, "connect", opened.append)
    assert store.lease_messages(3.0, lease_s=1.0) == []
    assert opened == []
    monkeypatch.undo()

    other.put_alerts([], [message("m2")])
    assert [each.message_id for each in store.lease_messages(4.0, lease_s=1.0)] == ["m2"]


def test_a_run_seen_before_is_read_again_only_when_its_files_change(tmp_path: Path, monkeypatch):
    """The run table is asked for every few seconds, and most runs ended long ago."""
    store = open_store(tmp_path)
    fill(store, finish=True)
    writer = store.open_run(RunInfo("run", config={"lr": [1]}))
    writer.finish(RunState.FINISHED, "", 1.0)
    writer.close()
    long_ago = time.time() - 60
    os.utime(tmp_path / "run" / "run.db", (long_ago, long_ago))
    store.run("run").config["lr"].append(2)
    with monkeypatch.context() as blind:
        blind.setattr(sqlite3, "connect", None)
        assert store.run("run").config == {"lr": [1]}
        assert [run.run_id for run in store.runs()] == ["run"]

    writer = open_store(tmp_path).open_run(RunInfo("run"))
    for step in (1, 2, 3):
        writer.write(steps(step))
        assert store.run("run").last_step == step
    writer.close()
    (tmp_path / "run" / "run.db").unlink()
    with pytest.raises(RunNotFoundError):
        store.run("run")


def test_a_child_ending_in_the_middle_of_a_write_does_not_disturb_it(tmp_path: Path, run_child):
    """Closing the inherited connection would undo, in memory shared with the parent, what the parent is writing."""
    run_child(
        """
writer = open_store(sys.argv[1]).open_run(RunInfo("run"))
writer.write(records(0))
writer.db.execute("PRAGMA cache_size = 2")  # rows reach the log before they are committed
writer.db.execute("BEGIN IMMEDIATE")
rows = [(seq, 1, 0, seq - 1, 0.0, 1, bytes(8)) for seq in range(2, 5000)]
writer.db.executemany("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
if os.fork() == 0:
    sys.exit()
os.wait()
writer.db.execute("COMMIT")
writer.close()
""",
        tmp_path,
    )
    store = open_store(tmp_path)

    assert [record.step for record in store.records("run")] == list(range(4999))
    db = sqlite3.connect(tmp_path / "run" / "run.db")
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_what_was_leased_reaches_the_caller_whatever_comes_after(tmp_path: Path, monkeypatch):
    """A file held by somebody else right after the lease must not cost the messages their turn."""
    store = open_store(tmp_path, control_timeout_s=0.0)
    fill(store)
    store.put_alerts([], [message()])

    def busy(db: sqlite3.Connection) -> bool:
        raise StoreBusyError("held")

    monkeypatch.setattr("rlwatch.store.sqlite.control.has_pending", busy)
    assert [each.message_id for each in store.lease_messages(1.0, lease_s=9.0)] == ["m1"]
