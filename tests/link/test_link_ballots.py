"""Votes and verdicts as bytes: what was not written by a rank of ours is no ballot, and never a yes."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.errors import ConfigError
from rlwatch.link.address import Address
from rlwatch.link.chair import ballot_body, read_ballot
from rlwatch.link.frames import Frame, FrameError, Inflow, Kind
from rlwatch.link.pace import Moment

NOTHING = (0, None)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.integers(1, 2**40), st.none() | st.text())
def test_a_ballot_is_read_as_it_was_written(ballot, refusal):
    """The number of the question, and yes (None) apart from a refusal without words."""
    assert read_ballot(ballot_body(ballot, refusal)) == (ballot, refusal)


@given(VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30))
def test_what_is_no_ballot_raises_nothing_and_says_nothing(body):
    """It is read in the training thread of rank 0: only [whole number, text or null] is a ballot."""
    ballot, refusal = read_ballot(body)
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    genuine = isinstance(found, list) and len(found) == 2 and type(found[0]) is int
    genuine = genuine and (found[1] is None or isinstance(found[1], str))

    assert (ballot, refusal) == (tuple(found) if genuine else NOTHING)


@pytest.mark.parametrize(
    "body",
    [
        b"[Infinity, null]",
        b"[NaN, null]",
        b"[true, null]",
        b"[1.0, null]",
        b'["1", null]',
        b"[1, false]",
        b"[" * 100_000,
    ],
    ids=["infinite", "not a number", "a truth value", "a float", "text", "a refusal that is none", "endless"],
)
def test_nothing_that_only_resembles_a_vote_is_a_yes(body):
    """A yes lets every rank act: it must be the very words."""
    assert read_ballot(body) == NOTHING


@pytest.mark.parametrize(
    "change",
    [{"port": float("inf")}, {"port": "ssh"}, {"port": None}, {"hosts": 3}, {"here": ...}],
    ids=["infinite port", "named port", "no port", "hosts that are none", "nothing of here"],
)
def test_an_address_with_one_wrong_part_is_refused_in_one_line(change):
    """With what was got, cut; never a traceback of numbers."""
    right = json.loads(Address("node1", ("10.0.0.1",), 4711, "t0k3n").to_text())
    wrong = {name: value for name, value in {**right, **change}.items() if value is not ...}

    with pytest.raises(ConfigError, match=r"^not the address of rank 0: '\{.*' \("):
        Address.from_text(json.dumps(wrong))


@given(st.binary(min_size=21, max_size=60), st.integers(1, 8))
def test_any_bytes_are_frames_or_refused(noise, cut):
    """However a stranger's bytes are cut: frames of known kinds, a clear refusal, or waiting for more."""
    inflow, got = Inflow(largest=16), []
    with suppress(FrameError):
        for start in range(0, len(noise), cut):
            got.extend(inflow.feed(noise[start : start + cut]))

    assert all(frame.kind in Kind and len(frame.body) <= 16 for frame in got)
    assert noise.startswith(b"".join(frame.packed() for frame in got))


def test_frames_before_a_bad_one_are_not_lost():
    """What a rank said before its connection broke counts."""
    good = Frame(Kind.STEP, Moment(0, 7, 0), b"numbers")
    inflow, got = Inflow(), []
    with pytest.raises(FrameError, match=r"^not a message of rlwatch: kind 99, 0 bytes$"):
        got.extend(inflow.feed(good.packed() + good.packed() + bytes([99]) + bytes(20)))

    assert got == [good, good]
