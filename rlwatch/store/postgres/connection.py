"""A connection to the server, each of whose waits ends."""

from __future__ import annotations

from typing import Any

import psycopg

Row = tuple[Any, ...]


class Connection(psycopg.Connection[Row]):
    """A connection each of whose waits for the server ends after ``patience_s``; then it is of no more use."""

    patience_s: float | None = None
    made: bool = False
    """True once the tables are known to be there."""
    placed: bool = False
    """True once it is noted where series lie."""
    by_policy: bool = False
    """True where row-level security holds for this role."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait like psycopg, but at most ``patience_s`` where psycopg would wait for ever."""
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, self.patience_s)
        except psycopg.errors._WaitTimeout as error:  # noqa: SLF001  (there is no public name for it)
            self.close()
            raise psycopg.OperationalError(f"no answer within {self.patience_s} s") from error
