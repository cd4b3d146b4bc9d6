"""Steps on their way to rank 0, over real connections."""

import errno
import json
import logging
import socket
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linked_ranks import Other, at, ranks, until

from rlwatch.link.frames import Frame, FrameError, Kind
from rlwatch.link.hub import Hub
from rlwatch.link.sockets import LinkError, connect, send_all
from rlwatch.link.spoke import Spoke


def taken(world, step):
    """What rank 0 gets of ``step`` once nobody is waited for."""
    assert until(lambda: not world.hub.inbox.awaited(at(step)))
    return world.hub.inbox.take(at(step))


def test_what_every_rank_sends_arrives_whole_and_in_order():
    """Also payloads larger than any buffer of the system."""
    big = bytes(range(256)) * 40_000
    with ranks(4) as world:
        for other in world.others:
            other.send(1, b"small")
            other.send(2, big + bytes([other.rank]))

        assert taken(world, 1) == {1: b"small", 2: b"small", 3: b"small"}
        assert taken(world, 2) == {rank: big + bytes([rank]) for rank in (1, 2, 3)}


def test_what_still_waits_is_sent_before_a_rank_leaves(caplog):
    """Leaving in good order is no loss, and said by nobody."""
    with ranks(2) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):
        other = world.others[0]
        for step in range(25):
            other.send(step)
        assert other.spoke.close(10.0)

        assert taken(world, 24) == {1: b"x"}
        assert other.lost == []
    assert caplog.messages == []


def test_a_rank_that_dies_is_no_longer_awaited_and_is_named_once(caplog):
    """Its connections close with it."""
    with ranks(3) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):
        assert world.hub.inbox.awaited(at(1)) == {1, 2}
        world.others[0].die()

        assert until(lambda: world.hub.inbox.awaited(at(1)) == {2})
        assert until(lambda: any("rank 1 is gone" in message for message in caplog.messages))
    assert sum("is gone" in message for message in caplog.messages) == 1


def test_a_rank_goes_on_when_rank_0_is_gone(caplog):
    """What it measured is dropped and counted, with one warning."""
    with ranks(2) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):
        other = world.others[0]
        for peer in world.hub.linked().values():
            peer.lose()  # as if the process had died: no farewell
        for step in range(20):
            other.send(step)

        assert until(lambda: sum(other.lost) >= 19)
    assert sum("takes no more" in message for message in caplog.messages) == 1


def test_the_end_of_rank_0_in_good_order_is_no_warning(caplog):
    """The run is over: what comes after is not missed."""
    with ranks(2) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):
        other = world.others[0]
        world.hub.close()
        for step in range(20):
            other.send(step)

        assert until(lambda: sum(other.lost) >= 19)
    assert caplog.messages == []


def test_a_step_that_cannot_be_read_does_not_end_the_sending(caplog):
    """An error of ours is counted, and the next step goes out."""

    def explode():
        raise RuntimeError("device lost")

    with ranks(2) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):
        other = world.others[0]
        other.queue.offer((at(1), explode))
        other.send(2)

        assert taken(world, 2) == {1: b"x"}
        assert other.lost == [1]
    assert "device lost" in caplog.text


GREETINGS = [
    {"rank": 1, "role": "steps", "token": "guessed"},
    {"rank": 2, "role": "steps"},
    {"rank": 7, "role": "steps", "token": None},
    {"rank": 0, "role": "steps", "token": None},
    [],
]


@pytest.mark.parametrize("greeting", GREETINGS)
def test_nobody_without_the_secret_or_with_a_wrong_rank_gets_in(greeting):
    """The door closes; the run's own ranks notice nothing."""
    with ranks(2) as world:
        if isinstance(greeting, dict) and greeting.get("token", "") is None:
            greeting = {**greeting, "token": world.hub.address.token}
        stranger = connect(world.hub.address)
        send_all(stranger, Frame(Kind.HELLO, body=json.dumps(greeting).encode()).packed(), 5.0)
        stranger.settimeout(10.0)

        assert stranger.recv(100) == b""
        world.others[0].send(1)
        assert taken(world, 1) == {1: b"x"}
        stranger.close()


def test_a_scan_of_the_port_gets_nothing_and_does_no_harm():
    """Bytes that are no message close the connection, and no more than a few are stored."""
    with ranks(2) as world:
        stranger = connect(world.hub.address)
        stranger.sendall(b"\x00" * 4096)
        stranger.settimeout(10.0)
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
        stranger.close()

        assert set(world.hub.linked()) == {1}


def test_a_rank_that_cannot_connect_says_what_it_tried():
    """The host and port of rank 0."""
    hub = Hub(2, alone=True)
    address = hub.address
    hub._listener.close()

    with pytest.raises(LinkError, match=rf"port {address.port} \(127.0.0.1: "):
        Spoke(1, address, list, lambda n: None)


def test_a_rank_too_many_for_the_systems_limit_does_not_make_the_hub_spin(monkeypatch, caplog):
    """It stops listening, says how many ranks it has, and serves those."""
    with ranks(2) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):

        class Full:
            def accept(self):
                raise OSError(errno.EMFILE, "too many open files")

        let_go, listener = [], world.hub._listener
        monkeypatch.setattr(world.hub._selector, "unregister", let_go.append)
        monkeypatch.setattr(world.hub, "_listener", Full())
        world.hub._accept()
        monkeypatch.undo()
        world.others[0].send(1)

        assert [type(one) for one in let_go] == [Full]
        assert taken(world, 1) == {1: b"x"}
        assert world.hub._listener is listener
    assert "ranks beyond 1 are not linked" in caplog.text


def test_a_rank_that_restarts_is_taken_in_again():
    """An elastic trainer starts a dead rank anew."""
    with ranks(2) as world:
        world.others[0].die()
        assert until(lambda: 1 not in world.hub.linked())
        again = Other(1, world.hub.address)
        again.send(1)

        assert taken(world, 1) == {1: b"x"}
        assert set(world.hub.linked()) == {1}
        again.spoke.close(5.0)


def test_a_forked_child_lets_go_without_ending_the_parents_connections():
    """Closing a copy is not shutting the connection down."""
    with ranks(2) as world:
        ours = world.others[0].spoke._connection
        socket.fromfd(ours.fileno(), ours.family, ours.type).close()
        world.others[0].send(1)

        assert taken(world, 1) == {1: b"x"}


GREETING_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rank", "role", "token"]), inner),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def one_hub():
    hub = Hub(3, alone=True)
    hub.start()
    yield hub
    hub.close(5.0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(GREETING_JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60) | st.just(b"[" * 1020))
def test_no_greeting_of_a_stranger_gets_in_or_stops_the_hub(one_hub, said):
    """Whatever it says: not one rank is known by it, and the run's own ranks are still served."""
    with pytest.raises(FrameError):
        one_hub._identified(Frame(Kind.HELLO, body=said))


def test_the_hub_lives_through_a_storm_of_strangers():
    """Each is shown the door; the rank that belongs here goes on sending."""
    with ranks(2) as world:
        for said in (b"[" * 1000, b'{"rank": 1e999, "role": 1, "token": "\xc3\xa9"}', b"\xff", b"null"):
            stranger = connect(world.hub.address)
            send_all(stranger, Frame(Kind.HELLO, body=said).packed(), 5.0)
            stranger.settimeout(10.0)
            assert stranger.recv(10) == b""
            stranger.close()
        world.others[0].send(1)

        assert taken(world, 1) == {1: b"x"}


def test_the_number_of_a_lost_connection_is_not_given_away_while_it_may_be_written_to():
    """Else a late message of the training thread could end up in whatever file is opened next."""
    with ranks(2) as world:
        peer = world.hub.peers[1]
        number = peer.control.fileno()
        world.others[0].die()
        assert until(lambda: peer.gone)

        assert peer.control.fileno() == number
        assert not peer.tell(Frame(Kind.OFFER))
