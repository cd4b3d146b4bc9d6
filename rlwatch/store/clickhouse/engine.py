"""Send requests to a ClickHouse server: with a time limit, its errors as ``StoreError``, and rarely while it is
away.
"""

from __future__ import annotations

import logging
import os
import random
import re
import struct
import time
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from rlwatch.errors import StoreBusyError, StoreCorruptError, StoreError, StoreFullError
from rlwatch.store.clickhouse.address import ClickHouseAddress
from rlwatch.store.fields import plain
from rlwatch.store.postgres.connection import FIRST_PAUSE_S, LONGEST_PAUSE_S, UnreachableError

if TYPE_CHECKING:
    import numpy as np

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

logging.getLogger("clickhouse_connect").addHandler(logging.NullHandler())  # our errors report what it would print
_T = TypeVar("_T")
_Key = tuple[tuple[tuple[str, str | int | bool], ...], tuple[tuple[str, str], ...], int]
CONNECT_S = 5
_REFUSED = {
    516: "the password is wrong or missing: set CLICKHOUSE_PASSWORD",
    192: "there is no such user: set CLICKHOUSE_USER",
    497: "this user may not do that; see docs/team-store.md",
    81: "create the database first, or correct its name",
    60: "tables of rlwatch are missing: have their owner run `rlwatch db migrate`",
}
_LATER = {159, 160, 202, 203, 209, 210, 225, 242, 252, 279, 285, 286, 319, 425, 999}
"""Codes of timeouts, too many queries or parts, networks, keepers and quorums: the same request may succeed later."""
_SYSTEM = re.compile(
    r"(?<=\[Errno )-?\d+\] [\w ]+|[Rr]ead timed out|connect timeout|Connection aborted|Temporary failure"
)
_BESIDE = re.compile(r" \(for url .*| In scope .*|: While (executing|processing) .*")
_FULL = {243, 241}


class ClickHouseClient:
    """Client of the server at ``place``; may be used from many threads, and from forked children.

    Parameters
    ----------
    place
        Host, database and login.
    patience_s
        Longest wait for an answer, in seconds.
    hurried
        For a trainer: while the server cannot be reached, try only now and then, and fail at once in between.
    """

    def __init__(self, place: ClickHouseAddress, *, patience_s: float, hurried: bool) -> None:
        self.place = place
        self._hurried = hurried
        self._key = (tuple(place.client.items()), tuple(place.settings.items()), int(patience_s) or 1)
        self._away_until, self._pause_s, self._away_because = 0.0, FIRST_PAUSE_S, ""

    def read(self, statement: str) -> RowStream:
        """Return the rows of a SELECT statement. Raises ``StoreError`` if the server refuses or cannot be reached."""
        return RowStream(self._asked(lambda client: client.raw_query(statement, fmt="RowBinary")))

    def insert(self, table: str, columns: str, block: bytes) -> None:
        """Insert ``block``, rows in RowBinary, into ``table``; they are stored once this returns.

        ``columns``: names separated by ``", "``. Raises ``StoreError`` if the server refuses or cannot be reached.
        """
        names = columns.split(", ")
        self._asked(lambda client: client.raw_insert(table, names, block, fmt="RowBinary"))

    def do(self, statement: str) -> None:
        """Execute a statement that returns no rows. Raises ``StoreError`` if the server refuses or cannot be
        reached.
        """
        self._asked(lambda client: client.command(statement))

    def _asked(self, ask: Callable[[Client], _T]) -> _T:
        from clickhouse_connect.driver.exceptions import ClickHouseError
        from urllib3.exceptions import HTTPError

        if self._hurried and time.monotonic() < self._away_until:
            raise UnreachableError(self._away_because)
        try:
            answer = ask(_client(os.getpid(), self._key))
        except (ClickHouseError, HTTPError, OSError) as error:
            explained = self._explained(error)
            if isinstance(explained, UnreachableError):
                self._away_because = str(explained)
                self._away_until = time.monotonic() + self._pause_s * random.uniform(0.7, 1.0)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            raise explained from None  # the driver's text may hold statements
        self._pause_s, self._away_until = FIRST_PAUSE_S, 0.0
        return answer

    def _explained(self, error: Exception) -> StoreError:
        where, code = self.place.where, getattr(error, "code", None)
        reason = _words(error)
        if code in _REFUSED:
            return StoreError(f"{where} refuses ({reason}); {_REFUSED[code]}")
        if code in _FULL:
            return StoreFullError(f"no room in {where} ({reason}); free some there: nothing was half-written")
        if code == 164:
            return StoreError(f"{where} is read-only for this user ({reason}); see docs/team-store.md")
        if code == 394:
            return StoreBusyError(f"{where} is busy ({reason}); try again")
        if code is None or code in _LATER:
            return UnreachableError(f"{where} cannot be reached ({reason}); check host, port and that the server runs")
        if code in (33, 49, 246, 271):
            return StoreCorruptError(f"{where} holds what cannot be read ({reason})")
        return StoreError(f"{where}: {reason}")


@lru_cache(maxsize=8)
def _client(pid: int, key: _Key) -> Client:  # noqa: ARG001  (a forked child has one of its own)
    """Return the client of a place; stores of a process share it, because its hand-shake takes long."""
    import clickhouse_connect

    arguments, settings, patience_s = key
    client: dict[str, Any] = dict(arguments)
    return clickhouse_connect.get_client(
        **client,
        settings=dict(settings),
        connect_timeout=CONNECT_S,
        send_receive_timeout=patience_s,
        query_retries=0,
        client_name="rlwatch",
        autogenerate_session_id=False,
    )


def tables(name: str) -> list[str]:
    """Return the SQL statements that create the tables of a store; ``name``: prefix of the tables' names."""
    text = (resources.files("rlwatch.store.clickhouse") / "sql" / "tables.sql").read_text(encoding="utf-8")
    lines = [line for line in text.replace("{name}", name).splitlines() if not line.startswith("--")]
    return [statement.strip() for statement in "\n".join(lines).split(";") if statement.strip()]


def _words(error: Exception) -> str:
    """Return the server's or the system's message, without statements, addresses or passwords."""
    text = " ".join(str(error).split())
    found = _SYSTEM.search(text)
    if found is not None:
        return found[0].strip(" :]")
    text = text.partition("DB::Exception:")[2].strip()
    return _BESIDE.sub("", text)[:200] or type(error).__name__


# Encode and decode ClickHouse's RowBinary, as far as needed here: little-endian numbers that keep their bits, NaN
# too.


def literal(text: str) -> str:
    """Return ``text`` as an SQL expression that is safe within a statement, whatever characters it has.

    >>> literal("o'clock")
    "unhex('6f27636c6f636b')"
    """
    return f"unhex('{plain(text).encode().hex()}')"


def varint(number: int) -> bytes:
    r"""Return ``number`` as a variable-length integer, which precedes strings and arrays as their length.

    >>> varint(5), varint(300)
    (b'\x05', b'\xac\x02')
    """
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def string(value: str | bytes) -> bytes:
    """Return ``value`` encoded as a ClickHouse String; text as UTF-8."""
    raw = plain(value).encode() if isinstance(value, str) else value
    return varint(len(raw)) + raw


def floats(packed: bytes) -> bytes:
    """Return packed little-endian float64 values encoded as a ClickHouse Array(Float64)."""
    return varint(len(packed) // 8) + packed


def strings(values: tuple[str, ...]) -> bytes:
    """Return ``values`` encoded as a ClickHouse Array(String)."""
    return varint(len(values)) + b"".join(map(string, values))


class RowStream:
    """Reader of the rows in a RowBinary answer, from front to end. It is false once all is read.

    >>> answer = RowStream(string("é") + struct.pack("<q", 7))
    >>> answer.text(), answer.numbers(struct.Struct("<q")), bool(answer)
    ('é', (7,), False)
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def numbers(self, packed: struct.Struct) -> tuple[Any, ...]:
        """Read the next numbers, which are packed as ``packed`` describes."""
        at, self._at = self._at, self._at + packed.size
        return packed.unpack_from(self._data, at)

    def blob(self, width: int = 1) -> bytes:
        """Read a String as bytes, or an Array of numbers that are ``width`` bytes wide."""
        size = self._length() * width
        at, self._at = self._at, self._at + size
        return self._data[at : self._at]

    def text(self) -> str:
        """Read a String as text."""
        return self.blob().decode()

    def array(self, kind: str) -> np.ndarray:
        """Read an Array of eight-byte numbers; ``kind``: numpy's little-endian code of their type."""
        import numpy as np

        return np.frombuffer(self.blob(8), dtype=kind)

    def _length(self) -> int:
        number = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
