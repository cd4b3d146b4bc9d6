"""Reading Protocol Buffers without their schema: numbered fields, as far as two trackers' files need them.

Source: the encoding of Protocol Buffers, https://protobuf.dev/programming-guides/encoding. Their library would do
too, but the schemas come only with all of wandb or TensorBoard, which need not be where the files are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: an integer for varints, bytes for all else.

    Raises ``ValueError`` where ``data`` is no message.
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
    """The unsigned integer of 64 bits that begins at ``at``, and where it ends. Raises ``ValueError``."""
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
    """An ``int64`` that was read as unsigned.

    >>> signed((1 << 64) - 1), signed(7)
    (-1, 7)
    """
    if not isinstance(value, int):
        raise ValueError("an integer was expected")
    return value - (1 << 64) if value >= 1 << 63 else value


def zigzag(value: int | bytes) -> int:
    """An ``sint64`` that was read as unsigned.

    >>> [zigzag(n) for n in (0, 1, 2, 3)]
    [0, -1, 1, -2]
    """
    return ((unsigned := signed(value) & ((1 << 64) - 1)) >> 1) ^ -(unsigned & 1)


def floating(value: int | bytes) -> float:
    """A ``float`` (4 bytes) or ``double`` (8 bytes). Raises ``ValueError`` for anything else."""
    if isinstance(value, int) or len(value) not in (4, 8):
        raise ValueError("a number was expected")
    (number,) = struct.unpack("<f" if len(value) == 4 else "<d", value)
    return float(number)


def message(value: int | bytes) -> bytes:
    """A nested message or a string, as bytes. Raises ``ValueError`` for an integer."""
    if isinstance(value, int):
        raise ValueError("a message was expected")
    return value


def text(value: int | bytes) -> str:
    """A string."""
    return message(value).decode("utf-8", "replace")
