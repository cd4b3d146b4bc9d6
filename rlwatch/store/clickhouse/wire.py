"""Encode and decode ClickHouse's RowBinary, as far as needed here: little-endian numbers that keep their bits, NaN
too.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from rlwatch.store.fields import plain

if TYPE_CHECKING:
    import numpy as np


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
