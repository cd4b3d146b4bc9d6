"""A connection to the PostgreSQL server whose waits all have a time limit, and psycopg's errors as ``StoreError``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import errors

from rlwatch.errors import StoreBusyError, StoreCorruptError, StoreError, StoreFullError
from rlwatch.store.postgres.address import PostgresAddress

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


# Convert psycopg's errors to ``StoreError``: what was wrong with which database, and what to do.

_BUSY = (
    errors.LockNotAvailable,
    errors.QueryCanceled,
    errors.SerializationFailure,
    errors.DeadlockDetected,
    errors.TooManyConnections,
)
_LOST = ("08", "57P")
"""Prefixes of the codes of errors after which the same call may succeed on a new connection."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""First and longest pause of a trainer between two attempts to reach a server, in seconds; each is twice the last."""


class UnreachableError(StoreError):
    """The server cannot be reached now, or the connection broke: the same call may be made again."""


@contextmanager
def explained(address: PostgresAddress) -> Iterator[None]:
    """Convert errors of the server, and parse errors of stored values, to ``StoreError``.

    ``address``: the database, for the message.
    """
    try:
        yield
    except psycopg.Error as error:
        raise explain(error, address) from error
    except (ValueError, KeyError) as error:
        raise StoreCorruptError(f"{address.where} holds what cannot be read: {error!r}") from error


def explain(error: psycopg.Error, address: PostgresAddress) -> StoreError:
    """Return the ``StoreError`` (busy, full disk, no access, missing tables, unreachable) that describes ``error``."""
    where, reason = address.where, _words(error)
    if isinstance(error, _BUSY):
        return StoreBusyError(f"{where} is busy ({reason}); try again")
    if isinstance(error, errors.DiskFull | errors.OutOfMemory):
        return StoreFullError(f"no room in {where} ({reason}); free disk space there: nothing was half-written")
    if isinstance(error, errors.InsufficientPrivilege | errors.ReadOnlySqlTransaction):
        return StoreError(f"{where} refuses ({reason}); use a role that may, see docs/team-store.md")
    if isinstance(error, errors.UndefinedTable | errors.UndefinedColumn | errors.InvalidSchemaName):
        return StoreCorruptError(
            f"{where} lacks tables of rlwatch in schema {address.schema!r} ({reason}); restore them from a copy"
        )
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and _is_lost(error):
        return UnreachableError(f"{where} cannot be reached ({reason})")
    return StoreError(f"{where}: {reason}")


def refusal(error: psycopg.Error, address: PostgresAddress) -> StoreError:
    """Return the ``StoreError`` that describes a failed attempt to connect, with advice.

    libpq gives its reason as text only, in English or the server's language.
    """
    where, reason = address.where, _words(error)
    user = address.settings.get("user") or "the default role"
    advice = {
        "28P01": f"the password of {user} is wrong or missing: set PGPASSWORD, or keep it in ~/.pgpass",
        "28000": f"the server's pg_hba.conf does not let {user} in from here, or asks for TLS: see sslmode=",
        "3D000": "create the database first (createdb), or correct its name",
        "42501": f"{user} may not connect to it",
        "53300": "all its connections are taken; raise max_connections, or put a pool in front (session mode)",
    }
    code = error.sqlstate or _guessed(reason)
    if code in ("53300", "57P03"):
        return UnreachableError(f"{where} cannot be reached ({reason})")
    if code in advice:
        return StoreError(f"cannot open {where} ({reason}); {advice[code]}")
    if any(word in reason for word in ("SSL", "certificate", "TLS")):
        return StoreError(f"cannot open {where} ({reason}); check sslmode=, sslrootcert= and the server's certificate")
    return UnreachableError(f"{where} cannot be reached ({reason}); check host, port and that the server runs")


def _guessed(reason: str) -> str:
    """Derive the code of a connection error from its text; libpq does not pass the code on."""
    for words, code in (
        ("password authentication failed", "28P01"),
        ("no password supplied", "28P01"),
        ("pg_hba.conf", "28000"),
        ("Peer authentication failed", "28000"),
        ("too many clients", "53300"),
        ("remaining connection slots", "53300"),
        ("starting up", "57P03"),
        ("shutting down", "57P03"),
    ):
        if words in reason:
            return code
    if "does not exist" in reason:
        return "3D000" if "database" in reason and "role" not in reason else "28000"
    return "42501" if "permission denied" in reason else ""


def _is_lost(error: psycopg.Error) -> bool:
    return error.sqlstate is None or error.sqlstate.startswith(_LOST)


def _words(error: psycopg.Error) -> str:
    """Return the error's first line; never a statement or its values."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = error.diag.message_primary or (lines[0] if lines else type(error).__name__)
    return text.removeprefix("connection failed: ")[:300]
