"""Moments, frames, addresses: what the ranks of a run say to each other."""

import json
import socket
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.errors import ConfigError
from rlwatch.link.hub import Hub
from rlwatch.link.wire import (
    LARGEST,
    LOOPBACK,
    Caller,
    Frame,
    FrameDecoder,
    FrameError,
    FrameKind,
    HubAddress,
    LinkError,
    ListenAddress,
    StepKey,
    StepKeyCounter,
    asking,
    challenge,
    identified,
    listen,
    names_of,
    this_machine,
)

steps = st.lists(st.integers(0, 5), max_size=30)
frames = st.lists(
    st.builds(
        Frame,
        st.sampled_from(FrameKind),
        st.builds(StepKey, st.integers(0, 2**32 - 1), st.integers(0, 2**63), st.integers(0, 2**32 - 1)),
        st.binary(max_size=50),
        st.integers(0, 2**32 - 1),
    ),
    max_size=6,
)


@given(steps)
def test_moments_are_ordered_as_they_happen_and_never_repeat(sequence):
    """Whatever the trainer counts: steps repeated, skipped or begun anew."""
    pace = StepKeyCounter()

    moments = [pace.next(step) for step in sequence]

    assert moments == sorted(set(moments))
    assert [m.step for m in moments] == sequence


@given(steps)
def test_ranks_that_see_the_same_steps_name_the_same_moments(sequence):
    """No message is needed to agree on where we are."""
    one, other = StepKeyCounter(), StepKeyCounter()

    assert [one.next(step) for step in sequence] == [other.next(step) for step in sequence]


def test_a_rank_that_missed_a_step_is_in_step_again_at_the_next():
    """Moments are told by the step, not by counting calls."""
    complete, gappy = StepKeyCounter(), StepKeyCounter()
    for step in (1, 2, 3):
        complete.next(step)
    for step in (1, 3):
        gappy.next(step)

    assert complete.next(4) == gappy.next(4)


@given(frames, st.integers(1, 40))
def test_frames_come_out_as_they_went_in_however_the_network_cuts_them(sent, size):
    """TCP knows no messages."""
    stream = b"".join(frame.packed() for frame in sent)
    inflow = FrameDecoder()

    got = [frame for i in range(0, len(stream), size) for frame in inflow.feed(stream[i : i + size])]

    assert got == sent


def test_what_is_no_frame_is_refused_before_it_is_stored():
    """A stranger's bytes, or a length nobody would send."""
    with pytest.raises(FrameError, match="not a message"):
        list(FrameDecoder().feed(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"))
    with pytest.raises(FrameError, match="2000 bytes"):
        list(FrameDecoder(largest=1000).feed(Frame(FrameKind.STEP, body=bytes(2000)).packed()))


def test_a_body_that_is_too_long_is_not_sent():
    """The limit is the sender's too, so that a receiver never gives up on an honest rank."""
    with pytest.raises(FrameError, match="11 bytes"):
        Frame(FrameKind.STEP, body=bytes(11)).packed(largest=10)
    assert LARGEST == 256 * 2**20


@given(st.binary(min_size=25, max_size=60), st.integers(1, 8))
def test_any_bytes_are_frames_or_refused(noise, cut):
    """However a stranger's bytes are cut: frames of known kinds, a clear refusal, or waiting for more."""
    inflow, got = FrameDecoder(largest=16), []
    with suppress(FrameError):
        for start in range(0, len(noise), cut):
            got.extend(inflow.feed(noise[start : start + cut]))

    assert all(frame.kind in FrameKind and len(frame.body) <= 16 for frame in got)
    assert noise.startswith(b"".join(frame.packed() for frame in got))


def test_frames_before_a_bad_one_are_not_lost():
    """What a rank said before its connection broke counts."""
    good = Frame(FrameKind.STEP, StepKey(0, 7, 0), b"numbers")
    inflow, got = FrameDecoder(), []
    with pytest.raises(FrameError, match=r"^not a message of rlwatch: kind 99, 0 bytes$"):
        got.extend(inflow.feed(good.packed() + good.packed() + bytes([99]) + bytes(24)))

    assert got == [good, good]


def test_a_rank_that_comes_late_counts_laps_from_where_the_others_are():
    """Its first step is in the lap rank 0 is in; joining again changes nothing."""
    pace = StepKeyCounter()
    pace.join(2)
    assert [tuple(pace.next(step)) for step in (5, 5, 3)] == [(2, 5, 0), (2, 5, 1), (3, 3, 0)]
    pace.join(1)
    assert tuple(pace.next(3)) == (3, 3, 1)


def test_an_address_survives_the_journey():
    """As text, through whatever store the trainer has. The secret cannot be guessed, and is another each time."""
    hubs = [Hub(2), Hub(2)]
    addresses = [hub.address for hub in hubs]
    for hub in hubs:
        hub.forked()

    assert [HubAddress.from_text(address.to_text()) for address in addresses] == addresses
    assert len({address.token for address in addresses}) == 2
    assert all(len(address.token) >= 64 for address in addresses)


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}", json.dumps({"machine": "a", "hosts": 1, "port": "x"})])
def test_what_is_no_address_says_so(text):
    """One clear error with what was got."""
    with pytest.raises(ConfigError, match="not the address of rank 0"):
        HubAddress.from_text(text)


@pytest.mark.parametrize(
    "change",
    [{"port": float("inf")}, {"port": "ssh"}, {"port": None}, {"hosts": 3}, {"machine": ...}],
    ids=["infinite port", "named port", "no port", "hosts that are none", "nothing of the machine"],
)
def test_an_address_with_one_wrong_part_is_refused_in_one_line(change):
    """With what was got, cut; never a traceback of numbers."""
    right = json.loads(HubAddress("node1", ("10.0.0.1",), 4711, "t0k3n").to_text())
    wrong = {name: value for name, value in {**right, **change}.items() if value is not ...}

    with pytest.raises(ConfigError, match=r"^not the address of rank 0: '\{.*' \("):
        HubAddress.from_text(json.dumps(wrong))


def test_on_one_machine_the_loopback_is_tried_first():
    """Names that only the network knows are for other machines; a loopback elsewhere leads nowhere."""
    here = HubAddress(this_machine(), ("far.example",), 1, "t")
    there = HubAddress("another-machine", ("far.example",), 1, "t")
    shut = HubAddress("another-machine", (LOOPBACK,), 1, "t")

    assert here.candidates == (LOOPBACK, "far.example")
    assert there.candidates == ("far.example",)
    assert (here.within_reach, there.within_reach, shut.within_reach) == (True, True, False)


def test_rank_0_listens_on_the_loopback_unless_it_is_told_or_needed_elsewhere():
    """No port is open to the network for ranks of one machine."""
    with listen(ListenAddress()) as listener:
        assert listener.getsockname()[0] == LOOPBACK
        assert names_of(ListenAddress(), listener) == (LOOPBACK,)


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
    with listen(ListenAddress(), everywhere=True) as listener:
        assert listener.family == socket.AF_INET
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_machine_that_lets_nobody_listen_says_so(monkeypatch):
    """One clear error, at set-up."""

    def refuse(*args, **kwargs):
        raise OSError("not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(LinkError, match=r"cannot listen for the other ranks at \*:4711: not permitted"):
        listen(ListenAddress(port=4711), everywhere=True)


def test_the_address_of_the_process_group_is_tried_before_others(monkeypatch):
    """``MASTER_ADDR`` is how the trainer's own ranks find rank 0."""
    monkeypatch.setenv("MASTER_ADDR", "node-0.cluster")
    with listen(ListenAddress(), everywhere=True) as listener:
        assert names_of(ListenAddress(), listener)[0] == "node-0.cluster"


SAID = {
    "10.1.2.3:4711": ListenAddress("10.1.2.3", 4711),
    "node-0": ListenAddress("node-0"),
    ":4711": ListenAddress(port=4711),
    "[fd00::1]:4711": ListenAddress("fd00::1", 4711),
    "": ListenAddress(),
}


@pytest.mark.parametrize("link", SAID)
def test_where_rank_0_listens_can_be_said_in_the_call(link, monkeypatch):
    """It goes before the environment."""
    monkeypatch.setenv("RLWATCH_LINK_PORT", "1234")

    assert ListenAddress.of(link) == SAID[link]


def test_where_rank_0_listens_can_be_said_in_the_environment(monkeypatch):
    """As a pod or a firewall wants it."""
    assert ListenAddress.of(None) == ListenAddress()
    monkeypatch.setenv("RLWATCH_LINK_HOST", "0.0.0.0")
    monkeypatch.setenv("RLWATCH_LINK_PORT", "4711")

    assert ListenAddress.of(None) == ListenAddress("0.0.0.0", 4711)


@pytest.mark.parametrize("port", ["http", "0", "65536", "-1", "4.5", "٤"])
def test_what_is_no_port_is_refused_with_the_value(port, monkeypatch):
    """At set-up, before anything listens."""
    monkeypatch.setenv("RLWATCH_LINK_PORT", port)

    with pytest.raises(ConfigError, match=f"must be a port between 1 and 65535, got '{port}'"):
        ListenAddress.of(None)
    with pytest.raises(ConfigError, match="link= must be a port"):
        ListenAddress.of(f"node-0:{port}")


def test_a_secret_that_could_be_guessed_is_refused(monkeypatch):
    """The value itself is not repeated."""
    monkeypatch.setenv("RLWATCH_LINK_SECRET", "hunter2")

    with pytest.raises(ConfigError, match=r"^RLWATCH_LINK_SECRET must have at least 16 characters, got 7$"):
        Hub(2)


def test_a_secret_of_the_environment_is_not_sent_anywhere(monkeypatch):
    """Every rank has it from its own; one that has not says so."""
    monkeypatch.setenv("RLWATCH_LINK_SECRET", "correct horse battery")
    hub = Hub(2)
    hub.forked()

    assert "correct horse" not in hub.address.to_text()
    assert hub.address.secret == hub.secret == "correct horse battery"
    monkeypatch.delenv("RLWATCH_LINK_SECRET")
    with pytest.raises(LinkError, match="set it on every rank"):
        _ = hub.address.secret


def test_both_sides_prove_that_they_know_the_secret_and_neither_sends_it():
    """Rank 0 learns who calls, the caller where rank 0 is."""
    secret, asked = "the secret of the run", challenge()
    caller = Caller(2, "control", challenge())
    answer = caller.answer(asked, secret)
    welcome = caller.welcome(asked, secret, lap=3, orders=1)

    assert identified(answer, asked, secret, 4) == caller
    assert caller.welcomed(welcome, asked, secret) == (3, 1)
    assert secret.encode() not in answer.packed() + welcome.packed()


@pytest.mark.parametrize("change", [{"rank": 1}, {"role": "steps"}, {"nonce": "0" * 64}, {"proof": "0" * 64}])
def test_a_proof_is_for_what_was_said_and_for_nothing_else(change):
    """Rank, role and challenge cannot be exchanged by somebody in between."""
    secret, asked = "s" * 32, challenge()
    said = json.loads(Caller(2, "control", challenge()).answer(asked, secret).body)

    with pytest.raises(FrameError, match="a stranger"):
        identified(Frame(FrameKind.ANSWER, body=json.dumps({**said, **change}).encode()), asked, secret, 4)


def test_a_proof_cannot_be_used_twice_nor_sent_back():
    """A challenge is new each time, and each side's words differ from the other's."""
    secret, asked = "s" * 32, challenge()
    caller = Caller(2, "control", challenge())
    answer = caller.answer(asked, secret)

    with pytest.raises(FrameError, match="a stranger"):
        identified(answer, challenge(), secret, 4)
    proof = json.loads(answer.body)["proof"]
    echo = Frame(FrameKind.WELCOME, body=json.dumps({"proof": proof, "lap": 0, "orders": 0}).encode())
    with pytest.raises(FrameError, match="does not know the secret"):
        caller.welcomed(echo, asked, secret)


@pytest.mark.parametrize("rank", [0, -1, 4, 10**30])
def test_a_rank_there_is_not_is_no_rank(rank):
    """Even with the secret."""
    asked = challenge()
    with pytest.raises(FrameError, match="there is no rank"):
        identified(Caller(rank, "steps", challenge()).answer(asked, "s" * 32), asked, "s" * 32, 4)


WORDS = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rank", "role", "nonce", "proof", "lap", "orders"]), inner)
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(FrameKind),
    WORDS.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60) | st.just(b"[" * 1020),
)
def test_nothing_a_stranger_says_is_a_greeting_or_raises_anything_else(kind, said):
    """To rank 0, and to a rank that has connected to something else."""
    frame, caller = Frame(kind, body=said), Caller(1, "steps", challenge())
    with pytest.raises(FrameError):
        identified(frame, challenge(), "s" * 32, 3)
    with pytest.raises(FrameError):
        caller.welcomed(frame, challenge(), "s" * 32)
    with pytest.raises(FrameError):
        asking(frame)
