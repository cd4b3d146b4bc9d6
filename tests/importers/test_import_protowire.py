"""Protocol Buffers read without a schema, against messages put together by hand; their framing in files."""

import math
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.importers.binary_records import (
    WANDB,
    LevelDbLog,
    TfRecords,
    fields,
    floating,
    masked_crc32c,
    message,
    signed,
    text,
    varint,
    zigzag,
)

NUMBERS = st.integers(1, 2**29 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
BLOCK = 32768


def packed(value):
    """An unsigned integer, seven bits a byte, the lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number, kind, body):
    return packed(number << 3 | kind) + body


FIELDS = st.lists(
    st.tuples(NUMBERS, st.just(0), st.integers(0, 2**64 - 1))
    | st.tuples(NUMBERS, st.just(1), st.binary(min_size=8, max_size=8))
    | st.tuples(NUMBERS, st.just(2), st.binary(max_size=40))
    | st.tuples(NUMBERS, st.just(5), st.binary(min_size=4, max_size=4)),
    max_size=6,
)


def encoded(parts):
    bodies = {0: packed, 1: bytes, 2: lambda value: packed(len(value)) + value, 5: bytes}
    return b"".join(field(number, kind, bodies[kind](value)) for number, kind, value in parts)


@given(FIELDS)
def test_fields_come_out_as_they_were_written(parts):
    """Every wire type in use, in order, numbers kept."""
    assert list(fields(encoded(parts))) == [(number, value) for number, _, value in parts]


@given(FIELDS.filter(bool), st.integers(1, 60))
def test_a_message_cut_short_is_no_message(parts, lost):
    """Unless the cut falls between two fields: what is read then are the fields before it."""
    whole = encoded(parts)
    cut = whole[: max(0, len(whole) - lost)]
    ends = [len(encoded(parts[:n])) for n in range(len(parts) + 1)]

    if len(cut) in ends:
        assert list(fields(cut)) == [(number, value) for number, _, value in parts[: ends.index(len(cut))]]
    else:
        with pytest.raises(ValueError, match=r"ends at byte \d+ of \d+|has no end at byte \d+"):
            list(fields(cut))


@pytest.mark.parametrize("kind", [3, 4, 6, 7])
def test_wire_types_that_are_none_are_refused(kind):
    """Groups are long gone; 6 and 7 never were."""
    with pytest.raises(ValueError, match=f"^wire type {kind} at byte 1$"):
        list(fields(field(1, kind, b"")))


@given(INT64)
def test_negative_numbers_come_back(value):
    """As int64 (two's complement) and as sint64 (zigzag: the sign in the lowest bit)."""
    unsigned = value % 2**64
    turned = 2 * value if value >= 0 else -2 * value - 1

    assert signed(varint(packed(unsigned), 0)[0]) == value
    assert zigzag(varint(packed(turned), 0)[0]) == value


@given(st.integers(64, 69), st.integers(0, 2**64 - 1))
def test_bits_beyond_64_are_dropped(bit, low):
    """As the encoding demands of a parser: a step stays a number that a store can hold."""
    value, _ = varint(packed(1 << bit | low), 0)

    assert value == low
    assert -(2**63) <= signed(value) < 2**63


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9, b"\xff" * 11])
def test_an_integer_without_end_is_refused(data):
    """Too short, or longer than any integer is written."""
    with pytest.raises(ValueError, match=f"^an integer has no end at byte {min(len(data), 10)}$"):
        varint(data, 0)


@given(st.floats(), st.floats(width=32))
def test_floats_keep_their_value(double, single):
    """NaN and the infinities too; a float of four bytes is not rounded again."""
    for value, form in ((double, "<d"), (single, "<f")):
        read = floating(struct.pack(form, value))

        assert read == value or (math.isnan(read) and math.isnan(value))


@pytest.mark.parametrize(
    ("read", "value", "says"),
    [
        (floating, 7, "a number was expected"),
        (floating, b"abc", "a number was expected"),
        (signed, b"abcd", "an integer was expected"),
        (zigzag, b"abcd", "an integer was expected"),
        (message, 7, "a message was expected"),
        (text, 7, "a message was expected"),
    ],
)
def test_a_field_of_another_type_says_what_was_expected(read, value, says):
    """Where a schema changed, not a wrong number."""
    with pytest.raises(ValueError, match=f"^{says}$"):
        read(value)


def test_bytes_that_are_no_text_are_replaced():
    """A name that is half there is better than none."""
    assert text(b"loss\xff") == "loss\ufffd"


def tf_record(body):
    length = struct.pack("<Q", len(body))
    return b"".join([length, struct.pack("<I", masked_crc32c(length)), body, struct.pack("<I", masked_crc32c(body))])


def fed(frames, data, size):
    return [record for at in range(0, len(data), size) for record in frames.feed(data[at : at + size])]


@given(st.lists(st.binary(max_size=60), max_size=6), st.integers(1, 50))
def test_event_files_may_grow_by_any_piece(bodies, size):
    """Records come once and in order, however the writer flushed."""
    frames = TfRecords()

    assert fed(frames, b"".join(map(tf_record, bodies)), size) == bodies
    assert frames.damage == ""


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=4), st.data())
def test_one_flipped_bit_is_noticed_and_costs_nothing_before_it(bodies, data):
    """Nothing wrong is ever read; what came before the damage is kept."""
    whole = bytearray(b"".join(map(tf_record, bodies)))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    ends = [sum(len(tf_record(body)) for body in bodies[: n + 1]) for n in range(len(bodies))]
    intact = sum(end <= bit // 8 for end in ends)
    frames = TfRecords()

    assert frames.feed(bytes(whole)) == bodies[:intact]
    assert "damaged" in frames.damage or "wrong" in frames.damage
    assert frames.feed(tf_record(b"later")) == []


def leveldb_log(bodies):
    """As LevelDB writes it: cut at blocks of 32 KiB, a rest of under 7 bytes left zero."""
    out = bytearray(WANDB + b"\x00\x00\x00")
    for body in bodies:
        left, first = body, True
        while True:
            room = BLOCK - len(out) % BLOCK
            if room < 7:
                out += bytes(room)
                room = BLOCK
            part, left = left[: room - 7], left[room - 7 :]
            kind = (1 if first else 4) if not left else (2 if first else 3)
            out += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            first = False
            if not left:
                break
    return bytes(out)


@given(
    st.lists(st.sampled_from([0, 1, 100, BLOCK - 21, BLOCK - 14, BLOCK, 70_000]), max_size=5), st.integers(1000, 40_000)
)
def test_records_of_a_wandb_file_may_span_blocks(sizes, piece):
    """Short ones and ones over several blocks, with and without a rest at the end of a block."""
    bodies = [bytes([65 + n]) * size for n, size in enumerate(sizes)]
    frames = LevelDbLog()

    assert fed(frames, leveldb_log(bodies), piece) == bodies
    assert frames.damage == ""


def test_a_damaged_block_costs_itself_only():
    """The next block is read again."""
    bodies = [b"a" * 20_000, b"b" * 5_000, b"c" * 30_000, b"d" * 100]
    log = bytearray(leveldb_log(bodies))
    log[25_000] ^= 1  # in b: the rest of its block, with the head of c, is lost
    frames = LevelDbLog()

    assert frames.feed(bytes(log)) == [bodies[0], bodies[3]]
    assert frames.damage == "a damaged block; what it held is lost"
