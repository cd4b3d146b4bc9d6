"""POSIX drops every lock of a process on a file when any descriptor of it is closed: we must not close one."""

import sqlite3
import subprocess
import sys

from rlwatch.records import Command, RunInfo
from rlwatch.store.sqlite.layout import touch_private
from rlwatch.store.url import open_store

TRY = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=0.0, isolation_level=None)
try:
    db.execute("BEGIN IMMEDIATE")
    print("got in")
except sqlite3.OperationalError as error:
    print(error)
"""


def other_process_gets_in(path):
    out = subprocess.run([sys.executable, "-c", TRY, str(path)], capture_output=True, text=True, check=True)
    return out.stdout.strip()


def test_touching_a_file_that_is_written_keeps_its_locks(tmp_path):
    """Another thread of this process is in the middle of a transaction."""
    path = tmp_path / "control.db"
    touch_private(path)
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("CREATE TABLE t (x)")
    db.execute("BEGIN IMMEDIATE")

    touch_private(path)

    assert other_process_gets_in(path) == "database is locked"
    db.close()


def test_using_the_store_keeps_the_locks_of_the_control_file(tmp_path):
    """Commands, alerts and the outbox of one process, while one of its threads writes."""
    store = open_store(tmp_path, control_timeout_s=0.0)
    store.open_run(RunInfo("r"))
    store.submit(Command("c", "r", "reset-reference", idempotency_key="k", expires_at=1e12))
    path = tmp_path / "r" / "control.db"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")

    store.commands("r")
    store.outbox("r")
    store.alerts("r")
    store.runs()

    assert other_process_gets_in(path) == "database is locked"
    db.close()


def test_a_new_file_is_private_and_leaves_nothing_beside_it(tmp_path):
    """0600 from the first moment, under its own name only."""
    path = tmp_path / "control.db"
    touch_private(path)
    touch_private(path)

    assert [p.name for p in tmp_path.iterdir()] == ["control.db"]
    assert path.stat().st_mode & 0o777 == 0o600
