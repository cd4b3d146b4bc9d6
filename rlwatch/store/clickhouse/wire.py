"""ClickHouse's RowBinary, as far as rows here need it: numbers are little-endian and keep their bits, NaN too."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from rlwatch.store.fields import plain

if TYPE_CHECKING:
    import numpy as np


def literal(text: str) -> str:
    r"""``text`` within a statement, whatever is in it.

    >>> literal("o'clock")
    "unhex('6f27636c6f636b')"
    """
    return f"unhex('{plain(text).encode().hex()}')"


def varint(number: int) -> bytes:
    r"""Length of what follows.

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
    """A String; of text, its UTF-8."""
    raw = plain(value).encode() if isinstance(value, str) else value
    return varint(len(raw)) + raw


def floats(packed: bytes) -> bytes:
    """An Array(Float64) out of packed values."""
    return varint(len(packed) // 8) + packed


def strings(values: tuple[str, ...]) -> bytes:
    """An Array(String)."""
    return varint(len(values)) + b"".join(map(string, values))


class RowStream:
    """Rows of an answer, read from front to end. False once all is read.

    >>> answer = RowStream(string("é") + struct.pack("<q", 7))
    >>> answer.text(), answer.numbers(struct.Struct("<q")), bool(answer)
    ('é', (7,), False)
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def numbers(self, packed: struct.Struct) -> tuple[Any, ...]:
        """Numbers one after the other."""
        at, self._at = self._at, self._at + packed.size
        return packed.unpack_from(self._data, at)

    def blob(self, width: int = 1) -> bytes:
        """A String; or an Array of numbers of ``width`` bytes."""
        size = self._length() * width
        at, self._at = self._at, self._at + size
        return self._data[at : self._at]

    def text(self) -> str:
        """A String of text."""
        return self.blob().decode()

    def array(self, kind: str) -> np.ndarray:
        """An Array of ``kind``, numpy's little-endian code of eight bytes."""
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
