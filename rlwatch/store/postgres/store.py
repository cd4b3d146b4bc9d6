"""The store of a team: runs, commands and alerts in one schema of a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import RunNotFoundError
from rlwatch.ports import RunWriter, Topic
from rlwatch.records import RunInfo
from rlwatch.store import check_run_id
from rlwatch.store.postgres import writer
from rlwatch.store.postgres.address import read_address
from rlwatch.store.postgres.alerts import Alerts
from rlwatch.store.postgres.carrier import SeriesBackend
from rlwatch.store.postgres.commands import CommandQueries
from rlwatch.store.postgres.connection import Connection
from rlwatch.store.postgres.curating import Curating
from rlwatch.store.postgres.failures import UnreachableError
from rlwatch.store.postgres.news import PostgresNews, tell
from rlwatch.store.postgres.reading import RunQueries
from rlwatch.store.postgres.server import Server
from rlwatch.store.postgres.unavailable import begin_away

PATIENCE_S, TRAINER_PATIENCE_S = 60.0, 20.0
"""Longest wait for an answer of the server, in seconds: of other programs, and of a trainer."""
SHORTEST_LOCK_WAIT_S = 0.2


class PostgresStore(RunQueries, CommandQueries, Alerts, Curating):
    """A team's store of runs in one schema of a PostgreSQL database.

    Parameters
    ----------
    url
        ``postgresql://user@host:5432/database?sslmode=verify-full&schema=team``: options of libpq, ``schema``,
        and ``series=clickhouse://...`` if rows, tokens and completions are stored in ClickHouse.
    control_timeout_s
        Seconds that calls about commands, alerts and outgoing messages wait for another process before they raise
        ``StoreBusyError``. A trainer passes 0; an unreachable server is then tried only now and then.
    clock
        Source of creation times; the machine's clock by default.
    """

    def __init__(self, url: str, *, control_timeout_s: float = 2.0, clock: Clock | None = None) -> None:
        hurried = control_timeout_s == 0
        address = read_address(url)
        self.url = address.url
        self._clock = clock or SystemClock()
        self._control_timeout_s = control_timeout_s
        self.server = Server(
            address,
            patience_s=TRAINER_PATIENCE_S if hurried else PATIENCE_S,
            lock_wait_s=max(SHORTEST_LOCK_WAIT_S, control_timeout_s),
            hurried=hurried,
        )

    def usage(self) -> dict[str, dict[str, int]]:
        """Return table -> its bytes on the server, by ``rows`` and ``indexes``."""
        with self.server.reading() as db:
            if db is None:
                return {}
            rows = db.execute(
                "SELECT c.relname, pg_table_size(c.oid), pg_indexes_size(c.oid) FROM pg_class c "
                "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relkind IN ('r', 'p')",
                (self.server.address.schema,),
            ).fetchall()
        own = {str(name): {"rows": int(table), "indexes": int(indexes)} for name, table, indexes in rows}
        return own | self._carrier.usage()

    def open_run(self, run: RunInfo) -> RunWriter:
        """Create the run, or begin its next attempt if it exists, and return its writer.

        If the server cannot be reached, a trainer's attempt begins on this node alone. Raises ``RunLockedError`` while
        another process writes the run.
        """
        check_run_id(run.run_id)
        try:
            return writer.open_run(self.server, run, self._clock.now())
        except UnreachableError as error:
            if not self.server.hurried:
                raise
            return begin_away(self.server, run, error)

    def amend_run(self, run_id: str) -> RunWriter | None:
        """Return a writer for a run whose process is gone, without a new attempt.

        None if a process writes the run, or if this role may not write it.
        """
        return writer.amend_run(self.server, run_id)

    def news(self, topic: Topic, run_id: str | None = None) -> PostgresNews:
        """Return notifications of a topic from now on; ``run_id``: the run to watch, None for all."""
        return PostgresNews(self.server, topic, run_id)

    def close(self) -> None:
        """Close connections that are not in use; idempotent."""
        self.server.close()

    @property
    def _carrier(self) -> SeriesBackend:
        return self.server.carrier

    def _reading(self) -> AbstractContextManager[Connection | None]:
        return self.server.reading()

    @contextmanager
    def snapshot(self, run_id: str) -> Iterator[Connection]:
        """Give a connection with a read-only snapshot of the store, if it holds the run. Raises
        ``RunNotFoundError``.
        """
        with self.server.reading() as db:
            if db is None or db.execute("SELECT 1 FROM run WHERE run_id = %s", (run_id,)).fetchone() is None:
                raise RunNotFoundError(f"no run {run_id!r} in {self.url}; `rlwatch runs` lists what there is")
            yield db

    @contextmanager
    def _changing(self, run_id: str) -> Iterator[Connection]:
        """Open a transaction on a run that exists. Raises ``RunNotFoundError``."""
        with self.server.connection() as db:
            made = self.server.is_made(db)
            if not made or db.execute("SELECT 1 FROM run WHERE run_id = %s", (run_id,)).fetchone() is None:
                raise RunNotFoundError(f"no run {run_id!r} in {self.url}; `rlwatch runs` lists what there is")
            with db.transaction():
                yield db
                tell(db, self.server.address, "pages", run_id)
