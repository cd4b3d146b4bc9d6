"""Open connections to the database of a store when needed, keep them for reuse, and limit the time of each wait.

A pool of psycopg's would hide why no connection can be had (it tries in threads of its own, which a trainer would have,
too) behind a timeout; here the caller gets the server's own reason at once. In a forked child the parent's connections
are left alone.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from rlwatch.errors import StoreError
from rlwatch.store.postgres import migrations
from rlwatch.store.postgres.address import PostgresAddress
from rlwatch.store.postgres.carrier import SeriesBackend
from rlwatch.store.postgres.connection import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Connection,
    Row,
    UnreachableError,
    explained,
    refusal,
)
from rlwatch.store.postgres.tables import Tables
from rlwatch.store.sqlite.layout import keep_forever

MOST_IDLE = 8
FRESH_S = 2.0
"""Seconds. A connection used more recently counts as alive; an older one is tested first."""


class Server:
    """The database at ``address``, with its open connections.

    Parameters
    ----------
    address
        Host, database, schema and login.
    patience_s
        Longest wait for an answer, in seconds.
    lock_wait_s
        Longest wait for a row that another process holds, in seconds, > 0.
    hurried
        For a trainer: while the server cannot be reached, try only now and then, and fail at once in between.
    """

    def __init__(self, address: PostgresAddress, *, patience_s: float, lock_wait_s: float, hurried: bool) -> None:
        self.address = address
        self.patience_s = patience_s
        self._lock_wait_s = lock_wait_s
        self.hurried = hurried
        self.carrier = _carrier(address, patience_s=patience_s, hurried=hurried)
        self._idle: deque[tuple[float, Connection]] = deque()
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._away_until, self._pause_s, self._away_because = 0.0, FIRST_PAUSE_S, ""

    def connect(self, *, checked: bool = True) -> Connection:
        """Return a new connection that belongs to the caller, in autocommit mode.

        ``checked``: verify that the tables, if there are any, have this program's format. Raises ``StoreError`` with
        the server's reason.
        """
        if self.hurried and time.monotonic() < self._away_until:
            raise UnreachableError(self._away_because)
        settings: dict[str, Any] = self.address.settings
        try:
            db = Connection.connect(autocommit=True, **settings)
        except psycopg.Error as error:
            refused = refusal(error, self.address)
            self._away_because = str(refused)
            self._away_until = time.monotonic() + self._pause_s * random.uniform(0.7, 1.0)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            raise refused from None
        self._pause_s, self._away_until = FIRST_PAUSE_S, 0.0
        with ExitStack() as undo:
            undo.callback(db.close)
            self._set_up(db, checked=checked)
            undo.pop_all()
        return db

    def _set_up(self, db: Connection, *, checked: bool) -> None:
        db.patience_s = self.patience_s
        parameters = {
            "search_path": f'"{self.address.schema}"',
            "statement_timeout": f"{int(1000 * self.patience_s)}",
            "lock_timeout": f"{max(1, int(1000 * self._lock_wait_s))}",
            "idle_in_transaction_session_timeout": "600000",
            "tcp_keepalives_idle": "30",
            "tcp_keepalives_interval": "10",
            "tcp_keepalives_count": "3",
        }
        with explained(self.address):
            calls = ", ".join("set_config(%s, %s, false)" for _ in parameters)
            db.execute(f"SELECT {calls}", [part for pair in parameters.items() for part in pair])
            if checked and migrations.check(db, self.address):
                self._note_made(db)

    def take(self) -> Connection:
        """Return a connection for the caller alone, until :meth:`give_back`. Raises ``StoreError`` if there is none."""
        self._look_whose()
        while True:
            with self._guard:
                used, db = self._idle.pop() if self._idle else (0.0, None)
            if db is None:
                return self.connect()
            if time.monotonic() - used < FRESH_S or self._lives(db):
                return db
            db.close()

    def give_back(self, db: Connection) -> None:
        """Return a connection for reuse; it is closed if it is broken or enough are idle."""
        if self._pid != os.getpid():
            return
        with suppress(psycopg.Error):
            if not db.closed and db.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                db.execute("ROLLBACK")
        fit = not db.closed and db.info.transaction_status == TransactionStatus.IDLE
        with self._guard:
            if fit and len(self._idle) < MOST_IDLE:
                self._idle.append((time.monotonic(), db))
                return
        db.close()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Give a connection until the block is left; errors become ``StoreError``, and an open transaction is rolled
        back.
        """
        db = self.take()
        try:
            with explained(self.address):
                yield db
        finally:
            self.give_back(db)

    @contextmanager
    def reading(self) -> Iterator[Connection | None]:
        """Give a connection with a read-only snapshot, also on a standby server; None if the tables do not exist
        yet.
        """
        with self.connection() as db:
            if not self.is_made(db):
                yield None
                return
            db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield db
            db.execute("COMMIT")

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Give a connection with an open transaction; the tables are created first if there are none."""
        with self.connection() as db:
            self.make(db)
            with db.transaction():
                yield db

    def migrate(self) -> int:
        """Create the tables or bring them to this program's format; return the number of migrations that were
        missing.
        """
        db = self.connect(checked=False)
        try:
            with explained(self.address):
                done = migrations.migrate(db, self.address)
                self._note_made(db)
                self.carrier.make()
                self._place(db)
                return done
        finally:
            db.close()

    def make(self, db: Connection) -> None:
        """Create the tables if they do not exist, and record where series are stored."""
        if not self.is_made(db):
            migrations.migrate(db, self.address)
            self._note_made(db)
        if not db.placed:
            self.carrier.make()
            self._place(db)

    def close(self) -> None:
        """Close idle connections; those in use are closed when they are given back."""
        with self._guard:
            idle, self._idle = self._idle, deque()
        if self._pid == os.getpid():
            for _, db in idle:
                db.close()

    def is_made(self, db: Connection) -> bool:
        """Return True if the tables exist. Raises ``StoreVersionError`` if they have another format."""
        if not db.made and migrations.check(db, self.address):
            self._note_made(db)
        return db.made

    def _note_made(self, db: Connection) -> None:
        row = db.execute("SELECT row_security_active('record')").fetchone()
        by_policy = bool(row and row[0])
        place = db.execute("SELECT place FROM series_place").fetchone()
        db.placed = (place is not None) == (self.address.series is not None)
        if not db.placed:
            self._look_where(db, place)
        db.made, db.by_policy = True, by_policy

    def _look_where(self, db: Connection, place: Row | None) -> None:
        """Raise ``StoreError``: the series of this database are stored elsewhere than the URL gives."""
        where = self.address.where
        if place is not None:
            raise StoreError(f"series of {where} lie elsewhere: add series={place[0]} to the store's URL")
        if db.execute("SELECT 1 FROM run LIMIT 1").fetchone() is not None:
            raise StoreError(
                f"{where} holds runs whose series lie in PostgreSQL itself: leave series= out, or copy them to a store "
                "with another schema= by `rlwatch db copy`"
            )

    def _place(self, db: Connection) -> None:
        """Record where series are stored from now on."""
        if not db.placed and self.address.series is not None:
            db.execute(
                "INSERT INTO series_place (place) VALUES (%s) ON CONFLICT DO NOTHING", (self.address.series.url,)
            )
        db.placed = True

    def _lives(self, db: Connection) -> bool:
        try:
            db.execute("")
        except psycopg.Error:
            return False
        return not db.closed

    def _look_whose(self) -> None:
        """In a forked child: start without connections, and never close those of the parent."""
        if self._pid != os.getpid():
            for _, db in self._idle:
                keep_forever(db)
            self._idle, self._pid, self._guard = deque(), os.getpid(), threading.Lock()


def _carrier(address: PostgresAddress, *, patience_s: float, hurried: bool) -> SeriesBackend:
    if address.series is None:
        return Tables()
    from rlwatch.store.clickhouse.carrier import ClickHouse
    from rlwatch.store.clickhouse.engine import ClickHouseClient

    return ClickHouse(ClickHouseClient(address.series, patience_s=patience_s, hurried=hurried), address.schema)
