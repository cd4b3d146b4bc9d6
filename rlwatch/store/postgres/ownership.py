"""Own a run: a session lock of the server, which goes with the connection that took it."""

from __future__ import annotations

import time

from rlwatch.errors import RunLockedError
from rlwatch.store.postgres.address import Address
from rlwatch.store.postgres.connection import Connection, Row
from rlwatch.store.sqlite.ownership import is_gone

AMENDED_S, LET_GO_S = 30.0, 5.0
"""How long a new attempt waits for somebody who judges what the last one left, and for the server to notice that the
last one's process is gone, in seconds."""


def lock_of(address: Address, run_id: str) -> int:
    """The lock of a run's writer."""
    return address.key("run", run_id)


def amending(address: Address, run_id: str) -> int:
    """Held beside it by who only completes what a dead process left undone."""
    return address.key("amends", run_id)


def locked(db: Connection, key: int) -> bool:
    """Take the lock, if nobody has it; whether it is ours."""
    row = db.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchone()
    return bool(row and row[0])


def lock_patiently(db: Connection, address: Address, run_id: str) -> None:
    """Wait for who only amends, and for the server to notice the end of a process that is gone; refuse otherwise."""
    began = time.monotonic()
    while not locked(db, lock_of(address, run_id)):
        row = db.execute("SELECT writer, host, pid FROM run WHERE run_id = %s", (run_id,)).fetchone()
        waited = time.monotonic() - began
        amended = holder_of(db, amending(address, run_id)) is not None and waited < AMENDED_S
        gone = (row is None or is_gone(row[0].partition("#")[0])) and waited < LET_GO_S
        if not amended and not gone:
            raise _refused(run_id, row)
        time.sleep(0.02)


def _refused(run_id: str, row: Row | None) -> RunLockedError:
    holder = f"process {row[2]} on {row[1] or 'another host'}" if row is not None else "another process"
    return RunLockedError(
        f"run {run_id!r} is already being written by {holder}; "
        "wait for it to end, stop it, or give this run another run_id"
    )


def holder_of(db: Connection, key: int) -> int | None:
    """Process of the server whose client has the lock; None: nobody has it."""
    row = db.execute(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        "AND classid::bigint = %s AND objid::bigint = %s",
        ((key >> 32) & 0xFFFFFFFF, key & 0xFFFFFFFF),
    ).fetchone()
    return None if row is None else int(row[0])
