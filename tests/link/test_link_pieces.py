"""Moments, frames, addresses: what the ranks of a run say to each other."""

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.errors import ConfigError
from rlwatch.link.address import LOOPBACK, Address, address_of
from rlwatch.link.frames import LARGEST, Frame, FrameError, Inflow, Kind
from rlwatch.link.pace import Moment, Pace
from rlwatch.link.sockets import LinkError, listen

steps = st.lists(st.integers(0, 5), max_size=30)
frames = st.lists(
    st.builds(
        Frame,
        st.sampled_from(Kind),
        st.builds(Moment, st.integers(0, 2**32 - 1), st.integers(0, 2**63), st.integers(0, 2**32 - 1)),
        st.binary(max_size=50),
    ),
    max_size=6,
)


@given(steps)
def test_moments_are_ordered_as_they_happen_and_never_repeat(sequence):
    """Whatever the trainer counts: steps repeated, skipped or begun anew."""
    pace = Pace()

    moments = [pace.next(step) for step in sequence]

    assert moments == sorted(set(moments))
    assert [m.step for m in moments] == sequence


@given(steps)
def test_ranks_that_see_the_same_steps_name_the_same_moments(sequence):
    """No message is needed to agree on where we are."""
    one, other = Pace(), Pace()

    assert [one.next(step) for step in sequence] == [other.next(step) for step in sequence]


def test_a_rank_that_missed_a_step_is_in_step_again_at_the_next():
    """Moments are told by the step, not by counting calls."""
    complete, gappy = Pace(), Pace()
    for step in (1, 2, 3):
        complete.next(step)
    for step in (1, 3):
        gappy.next(step)

    assert complete.next(4) == gappy.next(4)


@given(frames, st.integers(1, 40))
def test_frames_come_out_as_they_went_in_however_the_network_cuts_them(sent, size):
    """TCP knows no messages."""
    stream = b"".join(frame.packed() for frame in sent)
    inflow = Inflow()

    got = [frame for i in range(0, len(stream), size) for frame in inflow.feed(stream[i : i + size])]

    assert got == sent


def test_what_is_no_frame_is_refused_before_it_is_stored():
    """A stranger's bytes, or a length nobody would send."""
    with pytest.raises(FrameError, match="not a message"):
        list(Inflow().feed(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"))
    with pytest.raises(FrameError, match="2000 bytes"):
        list(Inflow(largest=1000).feed(Frame(Kind.STEP, body=bytes(2000)).packed()))


def test_a_body_that_is_too_long_is_not_sent(monkeypatch):
    """The limit is the sender's too, so that a receiver never gives up on an honest rank."""
    monkeypatch.setattr("rlwatch.link.frames.LARGEST", 10)

    with pytest.raises(FrameError, match="11 bytes"):
        Frame(Kind.STEP, body=bytes(11)).packed()
    assert LARGEST == 256 * 2**20


def test_an_address_survives_the_journey():
    """As text, through whatever store the trainer has."""
    address = address_of(4711, alone=False)

    assert Address.from_text(address.to_text()) == address
    assert len(address.token) >= 32


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}", json.dumps({"here": "a", "hosts": 1, "port": "x"})])
def test_what_is_no_address_says_so(text):
    """One clear error with what was got."""
    with pytest.raises(ConfigError, match="not the address of rank 0"):
        Address.from_text(text)


def test_on_one_machine_the_loopback_is_tried_first():
    """Names that only the network knows are for other machines."""
    here = Address(socket.gethostname(), ("far.example",), 1, "t")
    there = Address("another-machine", ("far.example",), 1, "t")

    assert here.candidates == (LOOPBACK, "far.example")
    assert there.candidates == ("far.example",)


@pytest.mark.parametrize("dualstack", [True, False])
def test_rank_0_listens_also_where_ipv6_is_known_but_switched_off(monkeypatch, dualstack):
    """On every interface, by the protocol there is."""
    real = socket.create_server

    def create(address, *, family=socket.AF_INET, **kwargs):
        if family == socket.AF_INET6:
            raise OSError("address family not supported")
        return real(address, family=family, **kwargs)

    monkeypatch.setattr(socket, "create_server", create)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dualstack)
    with listen(alone=False) as listener:
        assert listener.family == socket.AF_INET
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_machine_that_lets_nobody_listen_says_so(monkeypatch):
    """One clear error, at set-up."""

    def refuse(*args, **kwargs):
        raise OSError("not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(LinkError, match="cannot listen for the other ranks: not permitted"):
        listen(alone=False)


def test_ranks_of_one_machine_are_told_of_the_loopback_only():
    """Nobody else could connect anyway."""
    assert address_of(1, alone=True).hosts == (LOOPBACK,)


def test_the_address_of_the_process_group_is_tried_before_others(monkeypatch):
    """``MASTER_ADDR`` is how the trainer's own ranks find rank 0."""
    monkeypatch.setenv("MASTER_ADDR", "node-0.cluster")

    assert address_of(1, alone=False).hosts[0] == "node-0.cluster"
