"""Commands, acknowledgements, silences and alerts on a network file system: a file a node, and no lock but the node's."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlwatch.clock import ManualClock
from rlwatch.errors import RunNotFoundError, StoreError
from rlwatch.records import Acknowledgement, AuditEntry, CommandStatus, Severity, Silence
from rlwatch.store.sqlite.shared import SharedStore
from rlwatch.testing.store_run_contract import alert, command, fill, message, steps

ROOT = Path(__file__).parents[2]
NO_LOCKS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
/* No lock is to be had on any file below a directory called nfs. */
static int far(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strstr(path, "/nfs/") != NULL;
}
static int locks(int how) { return how == F_SETLK || how == F_SETLKW || how == F_OFD_SETLK || how == F_OFD_SETLKW; }
#define WRAP(name) int name(int fd, int how, ...) { \
    va_list rest; va_start(rest, how); void *arg = va_arg(rest, void *); va_end(rest); \
    if (locks(how) && far(fd)) { errno = ENOLCK; return -1; } \
    int (*real)(int, int, ...) = dlsym(RTLD_NEXT, #name); return real(fd, how, arg); }
WRAP(fcntl)
WRAP(fcntl64)
int flock(int fd, int how) {
    if (far(fd)) { errno = ENOLCK; return -1; }
    int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
    return real(fd, how);
}
"""
TRAINER = """
import sys, time, rlwatch
run = rlwatch.init(store=sys.argv[1], run_id="run", project="p")
run.log({"kl": 1.0}, step=0)
print("begun", flush=True)
end, answered = time.monotonic() + 60, 0
while answered < int(sys.argv[2]) and time.monotonic() < end:
    for asked in run.commands():
        asked.done({"by": asked.command.requested_by})
        answered += 1
    time.sleep(0.05)
run.finish()
"""
ASKER = """
import fcntl, sqlite3, sys, time
from contextlib import closing
from rlwatch.records import Command, CommandStatus
from rlwatch.store.url import open_store
with open(f"{sys.argv[1]}/run/run.lock") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        pass
    else:
        print("a lock was to be had")
with closing(sqlite3.connect(f"{sys.argv[1]}/run/run.db")) as db:
    try:
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.Error:
        pass
    else:
        print("SQLite could lock")
store, who = open_store(sys.argv[1]), sys.argv[2]
for k in range(5):
    store.submit(Command(f"{who}-{k}", "run", "save-checkpoint", requested_by=who, created_at=time.time()))
end = time.monotonic() + 60
while time.monotonic() < end:
    mine = [c for c in store.commands("run") if c.requested_by == who]
    if len(mine) == 5 and all(c.status is CommandStatus.DONE for c in mine):
        break
    time.sleep(0.1)
print([(c.command_id, c.status.value) for c in mine])
"""


def node(tmp_path: Path, name: str, now: float = 1000.0) -> SharedStore:
    return SharedStore(tmp_path / "nfs", "nfs4", local_root=tmp_path / name / "local", clock=ManualClock(now))


@pytest.fixture
def two(tmp_path):
    """The trainer's node, which holds the run, and another."""
    here = node(tmp_path, "a")
    fill(here, steps(1), finish=False)
    return here, node(tmp_path, "b")


def test_a_command_from_another_node_is_claimed_once_and_answered(two):
    """Asked twice under one key it is one; the answer is seen where it was asked, and stays."""
    here, there = two
    asked = there.submit(command("c1", key="k"))
    assert there.submit(command("c2", key="k")) == asked
    assert here.submit(command("c3", key="k")) == asked
    assert here.commands("run", CommandStatus.QUEUED) == [asked]
    with pytest.raises(StoreError, match="claim it before"):
        here.settle("run", "c1", CommandStatus.DONE, 4.0, step=1, result="")
    [claimed] = here.claim("run", 5.0)
    assert here.claim("run", 6.0) == []
    assert there.commands("run") == [claimed]
    settled = here.settle("run", "c1", CommandStatus.DONE, 7.0, step=3, result="it is done")
    assert here.settle("run", "c1", CommandStatus.FAILED, 8.0, step=4, result="no") == settled
    assert there.commands("run") == [settled]
    assert there.cancel("run", "c1", 9.0, result="too late") == settled
    assert (settled.claimed_at, settled.finished_at, settled.finished_step, settled.result) == (
        5.0,
        7.0,
        3,
        "it is done",
    )


def test_the_trainer_alone_decides_what_a_cancellation_comes_to(two):
    """Before the claim, after it, and too late; what is overdue expires."""
    here, there = two
    for name, until in (("early", 0.0), ("late", 0.0), ("overdue", 5.0)):
        there.submit(replace(command(name), expires_at=until, created_at=float(len(name))))
    assert there.cancel("run", "early", 1.0, result="by ann").status is CommandStatus.CANCELLING
    assert [each.command_id for each in here.claim("run", 6.0)] == ["late"]
    assert there.cancel("run", "late", 7.0, result="by ann").status is CommandStatus.CANCELLING
    assert here.commands("run", CommandStatus.CANCELLING)[0].claimed_at == 6.0
    here.settle("run", "late", CommandStatus.CANCELLED, 8.0, step=1, result="let go")
    assert {each.command_id: each.status.value for each in there.commands("run")} == {
        "early": "cancelled",
        "late": "cancelled",
        "overdue": "expired",
    }
    with pytest.raises(StoreError, match="no command 'absent'"):
        there.cancel("run", "absent", 1.0, result="")
    with pytest.raises(RunNotFoundError):
        there.submit(command("c", "absent"))


def test_alerts_are_seen_and_acknowledged_from_elsewhere(two):
    """The trainer's node composes knowing it; messages stay there."""
    here, there = two
    here.publish("run", [alert("a1")], lambda _: [message("m1")])
    assert there.alerts("run") == here.alerts("run") == there.alerts()
    assert there.outbox() == []
    there.acknowledge(Acknowledgement("a1", "run", "ann", "seen", 2.0, Severity.WARNING))
    assert there.acknowledge(Acknowledgement("a1", "run", "bob", "", 3.0, Severity.WARNING)).by == "ann"
    known = []
    here.publish("run", [], lambda ledger: known.extend(ledger.acknowledgements) or [])
    assert [each.by for each in known] == ["ann"]
    assert [each.by for each in here.acknowledgements("run")] == ["ann"]
    assert [each.by for each in there.ledger("run").acknowledgements] == ["ann"]
    assert there.acknowledge(Acknowledgement("a1", "run", "bob", "", 4.0, Severity.CRITICAL)).by == "bob"
    assert [each.by for each in here.ledger("run").acknowledgements] == ["bob"]


def test_silences_and_the_audit_are_those_of_all_nodes(tmp_path, two):
    """The newest word on a silence counts, from whichever node it comes."""
    here, there = two
    silence = Silence("s1", "ann", "", 1.0, 50.0, labels={"team": "a"}, alerts=("a1",), up_to=Severity.WARNING)
    here.put_silence(silence)
    assert there.silences() == [silence]
    node(tmp_path, "b", 2000.0).put_silence(replace(silence, until=5.0))
    assert [each.until for each in here.silences()] == [5.0]
    entries = [AuditEntry("e1", 2.0, "ann", "note", "x ❄", "run", "a1"), AuditEntry("e2", 1.0, "bob", "silence", "all")]
    here.put_entry(entries[0])
    there.put_entry(entries[1])
    there.put_entry(replace(entries[1], text="again"))
    assert node(tmp_path, "c").audit() == entries[::-1]
    assert there.audit("run") == entries[:1]


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"commands": []}', '{"commands": {"x": 1}}', '{"answers": {"c1": 3}}', "[" * 9000]
)
def test_a_file_that_is_damaged_costs_itself(tmp_path, two, text):
    """Half of one, of another program, nested without end, a link into somebody's home: the others are read."""
    here, there = two
    asked = there.submit(command("c1"))
    (tmp_path / "nfs" / "run" / ".people" / "bad.json").write_text(text)
    (tmp_path / "nfs" / "run" / ".people" / "link.json").symlink_to("/etc/passwd")
    assert here.commands("run") == [asked]
    assert [each.command_id for each in here.claim("run", 1.0)] == ["c1"]


@pytest.mark.thorough
def test_processes_without_any_lock_on_the_share_lose_no_command(tmp_path):
    """A trainer and askers on two other nodes, two on one of them; whoever tries to lock a file of the share is refused."""
    (tmp_path / "shim.c").write_text(NO_LOCKS)
    shim = tmp_path / "shim.so"
    made = ["cc", "-shared", "-fPIC", "-o", str(shim), str(tmp_path / "shim.c"), "-ldl"]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"FAILING LOCKS WERE NOT TRIED: no C compiler ({error})")

    def started(code: str, local: str, *args: str) -> subprocess.Popen[str]:
        environment = os.environ | {
            "LD_PRELOAD": str(shim),
            "RLWATCH_SHARED_STORE": "1",
            "RLWATCH_LOCAL_DIR": str(tmp_path / local),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "nfs" / "store"), *args]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    (tmp_path / "nfs").mkdir()
    trainer = started(TRAINER, "one", "15")
    assert trainer.stdout.readline() == "begun\n"
    askers = [started(ASKER, local, who) for local, who in (("two", "ann"), ("two", "bob"), ("three", "cid"))]
    said = [asker.communicate(timeout=120) for asker in askers]
    _, err = trainer.communicate(timeout=120)

    assert trainer.returncode == 0, err
    for who, (out, err) in zip(("ann", "bob", "cid"), said, strict=True):
        assert out.strip() == str([(f"{who}-{k}", "done") for k in range(5)]), err
    files = sorted((tmp_path / "nfs" / "store" / "run" / ".people").iterdir())
    assert len(files) == 3
    assert all(json.loads(file.read_text()) for file in files)
    assert all(time.time() > file.stat().st_mtime and file.stat().st_mode & 0o777 == 0o600 for file in files)
