"""Records of binary logs: the framing of TensorBoard's and wandb's files, and the wire format of Protocol Buffers."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Protocol

from rlwatch.importers.lines import LONGEST_RECORD

CHECKED = 1 << 16
"""Number of bytes of a TFRecord up to which its checksum is verified; larger ones hold pictures and the like."""
WANDB = b":W&B"
_BLOCK = 32768
_HEAD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_PREAMBLE = 7


class Frames(Protocol):
    """Interface of a parser that receives the bytes of a binary log and returns complete records."""

    damage: str
    """Description of damage in the bytes read so far; empty if there was none. A caller that reported it may clear
    it.
    """

    def feed(self, data: bytes) -> list[bytes]:
        """Return the records that are complete after the next bytes ``data``."""
        ...


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _crc_table()


def masked_crc32c(data: bytes | bytearray) -> int:
    """Return the masked CRC-32C checksum of ``data``, as TFRecords carry it.

    >>> hex(masked_crc32c(b"123456789"))  # CRC-32C is 0xe3069283
    '0xc78ab0e5'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _too_long(longest: int) -> str:
    return f"a record of more than {longest:,} bytes"


class TfRecords:
    """Parser of TFRecords. Reading ends at a damaged record, because the start of the next one is unknown.

    A record of more than ``longest`` bytes is skipped without being held in memory.
    """

    def __init__(self, *, longest: int = LONGEST_RECORD) -> None:
        self._longest = longest
        self.damage = ""
        self._lost = False
        self._buffer = bytearray()
        self._pass = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the records that are complete after the next bytes ``data``."""
        if self._lost:
            return []
        passed = min(self._pass, len(data))
        self._pass -= passed
        self._buffer += memoryview(data)[passed:]
        found: list[bytes] = []
        at = 0
        while not self._lost and len(self._buffer) - at >= 12:
            length, check = struct.unpack_from("<QI", self._buffer, at)
            end = at + 12 + length + 4
            if masked_crc32c(self._buffer[at : at + 8]) != check:
                self._lose("a record whose length is damaged; nothing after it can be read")
            elif length > self._longest:
                self.damage = _too_long(self._longest)
                self._pass = max(0, end - len(self._buffer))
                at = min(end, len(self._buffer))
            elif end > len(self._buffer):
                break
            else:
                self._take(bytes(self._buffer[at + 12 : end - 4]), bytes(self._buffer[end - 4 : end]), found)
                at = end
        del self._buffer[: len(self._buffer) if self._lost else at]
        return found

    def _take(self, body: bytes, check: bytes, found: list[bytes]) -> None:
        if len(body) > CHECKED or masked_crc32c(body) == int.from_bytes(check, "little"):
            found.append(body)
        else:
            self._lose("a record whose checksum is wrong; nothing after it was read")

    def _lose(self, why: str) -> None:
        self.damage, self._lost = why, True


class LevelDbLog:
    """Parser of the LevelDB log that wandb and SwanLab write.

    Damage loses the rest of its block; reading continues with the next one. A record of more than ``longest`` bytes is
    dropped.
    """

    def __init__(self, *, longest: int = LONGEST_RECORD) -> None:
        self._longest = longest
        self.damage = ""
        self._buffer = bytearray()
        self._before = 0
        self._parts: bytearray | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Return the records that are complete after the next bytes ``data``."""
        self._buffer += data
        found: list[bytes] = []
        at = _PREAMBLE if self._before == 0 else 0
        while (end := self._end_of_next(at)) <= len(self._buffer):
            at = end if self._padding(at, end) else self._record(at, end, found)
        if self._before or len(self._buffer) >= _PREAMBLE:
            at = min(at, len(self._buffer))
            self._before += at
            del self._buffer[:at]
        return found

    def _left(self, at: int) -> int:
        """Return the number of bytes up to the end of the block that contains ``at``."""
        return _BLOCK - (self._before + at) % _BLOCK

    def _end_of_next(self, at: int) -> int:
        """Return the end of the next record, or of the padding of this block."""
        left = self._left(at)
        if left < _HEAD.size:
            return at + left
        if len(self._buffer) < at + _HEAD.size:
            return at + _HEAD.size
        check, length, kind = _HEAD.unpack_from(self._buffer, at)
        empty = check == length == kind == 0  # not written yet, or never
        return at + left if empty or length > left - _HEAD.size else at + _HEAD.size + length

    def _padding(self, at: int, end: int) -> bool:
        return end - at < _HEAD.size or not any(self._buffer[at:end])

    def _record(self, at: int, end: int, found: list[bytes]) -> int:
        check, length, kind = _HEAD.unpack_from(self._buffer, at)
        body = bytes(self._buffer[at + _HEAD.size : at + _HEAD.size + length])
        if at + _HEAD.size + length != end or zlib.crc32(body, zlib.crc32(bytes((kind,)))) != check:
            self.damage, self._parts = "a damaged block; what it held is lost", None
            return at + self._left(at)
        if kind in (_FULL, _FIRST):
            self._parts = bytearray()
        if self._parts is not None:
            self._parts += body
            if len(self._parts) > self._longest:
                self.damage, self._parts = _too_long(self._longest), None
            elif kind in (_FULL, _LAST):
                found.append(bytes(self._parts))
                self._parts = None
        return end


# Reading Protocol Buffers without their schema: numbered fields, as far as trackers' files need them.
#
# Source: the encoding of Protocol Buffers, https://protobuf.dev/programming-guides/encoding. Their library could read
# them, too, but the schemas come only with all of wandb or TensorBoard, which may not be installed here.


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field in the message ``data``: an integer for varints, bytes for other types.

    Raises ``ValueError`` if ``data`` is no message.
    """
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value: int | bytes
        match key & 7:
            case 0:
                value, at = varint(data, at)
                yield key >> 3, value
                continue
            case 1:
                end = at + 8
            case 2:
                length, at = varint(data, at)
                end = at + length
            case 5:
                end = at + 4
            case kind:
                raise ValueError(f"wire type {kind} at byte {at}")
        if end > len(data):
            raise ValueError(f"a field ends at byte {end} of {len(data)}")
        yield key >> 3, data[at:end]
        at = end


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned 64-bit integer that begins at index ``at``, and the index at which it ends.

    Raises ``ValueError`` if the integer does not end within 10 bytes.
    """
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError(f"an integer has no end at byte {at}")


def signed(value: int | bytes) -> int:
    """Return an ``int64`` that was read as unsigned. Raises ``ValueError`` if ``value`` is no integer.

    >>> signed((1 << 64) - 1), signed(7)
    (-1, 7)
    """
    if not isinstance(value, int):
        raise ValueError("an integer was expected")
    return value - (1 << 64) if value >= 1 << 63 else value


def zigzag(value: int | bytes) -> int:
    """Return an ``sint64`` that was read as unsigned. Raises ``ValueError`` if ``value`` is no integer.

    >>> [zigzag(n) for n in (0, 1, 2, 3)]
    [0, -1, 1, -2]
    """
    return ((unsigned := signed(value) & ((1 << 64) - 1)) >> 1) ^ -(unsigned & 1)


def floating(value: int | bytes) -> float:
    """Return a ``float`` (4 bytes) or ``double`` (8 bytes) from its bytes.

    Raises ``ValueError`` for any other value.
    """
    if isinstance(value, int) or len(value) not in (4, 8):
        raise ValueError("a number was expected")
    (number,) = struct.unpack("<f" if len(value) == 4 else "<d", value)
    return float(number)


def message(value: int | bytes) -> bytes:
    """Return the bytes of a nested message or a string. Raises ``ValueError`` for an integer."""
    if isinstance(value, int):
        raise ValueError("a message was expected")
    return value


def text(value: int | bytes) -> str:
    """Return the string in the bytes of a field. Raises ``ValueError`` for an integer."""
    return message(value).decode("utf-8", "replace")
