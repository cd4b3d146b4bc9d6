"""A connection to the PostgreSQL server whose waits all have a time limit."""

from __future__ import annotations

from typing import Any

import psycopg

Row = tuple[Any, ...]


class Connection(psycopg.Connection[Row]):
    """A connection that gives up waiting for the server after ``patience_s`` seconds (None: never) and is then
    closed.
    """

    patience_s: float | None = None
    made: bool = False
    """True once the tables are known to exist."""
    placed: bool = False
    """True once the database records where series are stored, in PostgreSQL or in ClickHouse."""
    by_policy: bool = False
    """True if row-level security applies to this role."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait as psycopg does, but at most ``patience_s`` seconds where psycopg would wait for ever.

        Raises ``psycopg.OperationalError`` and closes the connection if no answer came in that time.
        """
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, self.patience_s)
        except psycopg.errors._WaitTimeout as error:  # noqa: SLF001  (there is no public name for it)
            self.close()
            raise psycopg.OperationalError(f"no answer within {self.patience_s} s") from error
