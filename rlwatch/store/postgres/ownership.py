"""Own a run by a session lock of the server, which ends with the connection that took it.

Every login to the database may take any advisory lock of it, by its number. So a lock counts only if its holder may do,
by the server's own grants and row-level security, what the lock is for. If another login holds the number, a substitute
is taken: any number of 32 bits in a range of the lock's own. A process that takes either checks both afterwards, so
that of two permitted processes at least one sees the other.
"""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass

from rlwatch.errors import RunLockedError, StoreBusyError
from rlwatch.store.postgres.address import PostgresAddress
from rlwatch.store.postgres.connection import Connection, Row
from rlwatch.store.postgres.rows import plain
from rlwatch.store.sqlite.layout import is_gone

AMENDED_S, LET_GO_S = 30.0, 5.0
"""Seconds that a new attempt waits for a process that completes what the last attempt left, and for the server to
notice that the last attempt's process is gone.
"""

_MAY_WRITE_RUN = """coalesce(has_table_privilege(a.usesysid, to_regclass('run'), 'UPDATE') AND (
    NOT (SELECT relrowsecurity FROM pg_class WHERE oid = to_regclass('run'))
    OR pg_has_role(a.usesysid, (SELECT relowner FROM pg_class WHERE oid = to_regclass('run')), 'USAGE')
    OR (SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE oid = a.usesysid)
    OR coalesce((SELECT project FROM run WHERE run_id = %s), %s) IS NULL
    OR EXISTS (SELECT 1 FROM member AS m JOIN pg_roles AS r ON r.rolname = m.role_name
               WHERE m.project IN ('*', coalesce((SELECT project FROM run WHERE run_id = %s), %s))
               AND pg_has_role(a.usesysid, r.oid, 'MEMBER'))), false)"""
_MAY_DELIVER = "coalesce(has_table_privilege(a.usesysid, to_regclass('outbox'), 'UPDATE'), true)"
_MAY_MAKE_TABLES = """coalesce(
    (SELECT has_schema_privilege(a.usesysid, n.oid, 'CREATE') FROM pg_namespace AS n WHERE n.nspname = %s),
    has_database_privilege(a.usesysid, current_database(), 'CREATE'))"""


@dataclass(frozen=True, slots=True)
class Lock:
    """An advisory lock of the PostgreSQL server, and the condition under which a holder counts.

    ``number``: the lock's key, 64 bits. ``may``: SQL condition on a login ``a.usesysid``, with parameters ``values``,
    that is true if the login has the right that the lock needs: others who hold the key are ignored.
    """

    number: int
    may: str
    values: tuple[object, ...] = ()

    @property
    def room(self) -> int:
        """First of the two 32-bit numbers of the substitute locks."""
        return self.number >> 32


@dataclass(frozen=True, slots=True)
class Holder:
    """A connection that holds a lock: process id on the server, and login."""

    pid: int
    login: str

    def __str__(self) -> str:
        return f"a connection of login {self.login!r} (process {self.pid} of the server)"


def lock_of(address: PostgresAddress, run_id: str, project: str | None = None) -> Lock:
    """Return the lock of a run's writer. ``project``: of the run, in case the run is not stored yet."""
    of = None if project is None else plain(project)
    values = (run_id, of, run_id, of)
    return Lock(address.key("run", run_id), _MAY_WRITE_RUN, values)


def amending(address: PostgresAddress, run_id: str) -> Lock:
    """Return the second lock of a run, for a process that only completes what a dead process left undone."""
    return Lock(address.key("amends", run_id), _MAY_WRITE_RUN, (run_id, None, run_id, None))


def exclusive(address: PostgresAddress) -> Lock:
    """Return the lock that only one process of the store holds: the one that composes the messages about all runs."""
    return Lock(address.key("exclusive"), _MAY_DELIVER)


def making(address: PostgresAddress) -> Lock:
    """Return the lock of the process that creates or upgrades the tables."""
    return Lock(address.key(), _MAY_MAKE_TABLES, (address.schema,))


def locked(db: Connection, lock: Lock) -> bool:
    """Try to take the lock; return True if it was taken, False if another permitted process holds it."""
    numbers: tuple[int, ...] = (lock.number,)
    asked = "advisory_lock(%s)"
    if not _done(db, f"pg_try_{asked}", numbers):
        if holders_of(db, lock):
            return False
        asked = "advisory_lock(%s::integer, %s::integer)"
        while not _done(db, f"pg_try_{asked}", numbers := (lock.room, secrets.randbits(32) - (1 << 31))):
            pass
    if holders_of(db, lock):
        _done(db, f"pg_{asked.replace('lock', 'unlock')}", numbers)
        return False
    return True


def _done(db: Connection, call: str, numbers: tuple[int, ...]) -> bool:
    row = db.execute(f"SELECT {call}", numbers).fetchone()
    return bool(row and row[0])


def wait_for(db: Connection, lock: Lock, most_s: float) -> None:
    """Wait for the lock and take it. Raises ``StoreBusyError`` after ``most_s`` seconds."""
    until = time.monotonic() + most_s
    while not locked(db, lock):
        if time.monotonic() >= until:
            held = holders_of(db, lock)
            raise StoreBusyError(f"the store is held by {held[0] if held else 'another connection'}; try again")
        time.sleep(random.uniform(0.005, 0.02))


def lock_patiently(
    db: Connection, address: PostgresAddress, run_id: str, project: str | None = None, *, let_go_s: float = LET_GO_S
) -> None:
    """Take the lock of a run's writer; wait up to ``let_go_s`` seconds for holders that release it soon.

    Those are processes that only complete what a dead one left, and connections of a dead process. Raises
    ``RunLockedError`` for any other holder. ``project``: of the run, in case it is not stored yet.
    """
    began, lock = time.monotonic(), lock_of(address, run_id, project)
    while not locked(db, lock):
        row = db.execute("SELECT writer, host, pid FROM run WHERE run_id = %s", (run_id,)).fetchone()
        waited = time.monotonic() - began
        amended = bool(holders_of(db, amending(address, run_id))) and waited < AMENDED_S
        ended = row is None or is_gone(row[0].partition("#")[0])
        if not amended and not (ended and waited < let_go_s):
            raise _refused(run_id, row, holders_of(db, lock), ended=ended)
        time.sleep(random.uniform(0.01, 0.03))


def _refused(run_id: str, row: Row | None, held: list[Holder], *, ended: bool) -> RunLockedError:
    """Return the error for a run that is locked. It does not name a process that has ended as the writer."""
    who = str(held[0]) if held else "another connection"
    if ended:
        last = "" if row is None else f", not by process {row[2]} on {row[1] or 'another host'}, which has ended"
        return RunLockedError(
            f"run {run_id!r} is held by {who}{last}; wait for it to end, or give this run another run_id"
        )
    holder = f"process {row[2]} on {row[1] or 'another host'}" if row is not None else "another process"
    return RunLockedError(
        f"run {run_id!r} is already being written by {holder}; "
        "wait for it to end, stop it, or give this run another run_id"
    )


def holders_of(db: Connection, lock: Lock) -> list[Holder]:
    """Return the other connections that hold the lock, or a substitute, and have the right to."""
    rows = db.execute(
        "SELECT a.pid, a.usename FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid) "
        "WHERE l.locktype = 'advisory' AND l.granted AND a.pid <> pg_backend_pid() "
        "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND ("
        "l.objsubid = 1 AND l.classid::bigint = %s AND l.objid::bigint = %s "
        "OR l.objsubid = 2 AND l.classid::bigint = %s) "
        f"AND {lock.may}",
        ((lock.number >> 32) & 0xFFFFFFFF, lock.number & 0xFFFFFFFF, lock.room & 0xFFFFFFFF, *lock.values),
    ).fetchall()
    return [Holder(int(pid), str(login)) for pid, login in rows]
