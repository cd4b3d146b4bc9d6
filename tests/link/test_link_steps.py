"""Steps on their way to rank 0, over real connections, and everybody else who connects there."""

import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from linked_ranks import Other, at, ranks, together, until

from rlwatch.link.hub import STRANGERS, Hub
from rlwatch.link.spoke import NobodyError, introduced
from rlwatch.link.wire import (
    LOOPBACK,
    Caller,
    Frame,
    FrameDecoder,
    FrameKind,
    LinkError,
    ListenAddress,
    challenge,
    connect,
    send_all,
)


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
        other.find = lambda: None
        for peer in world.hub.peers.values():
            peer.lose()  # no farewell, as a killed process
        world.hub.close()
        assert until(lambda: any("takes no more" in message for message in caplog.messages))
        for step in range(20):
            other.send(step)

        assert other.spoke.live  # for a while: the connection alone may have failed
        assert not other.spoke.close(0.05)
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


def proven(hub, rank=1, role="steps", *, secret=None, change=()):
    """What somebody gets who answers the challenge of ``hub``: the connection, closed or not, is returned."""
    stranger = connect(hub.address)
    stranger.settimeout(10.0)
    (frame,) = FrameDecoder().feed(stranger.recv(200))
    answer = Caller(rank, role, challenge()).answer(frame.body.decode(), secret or hub.secret)
    said = {**json.loads(answer.body), **dict(change)}
    send_all(stranger, Frame(FrameKind.ANSWER, body=json.dumps(said).encode()).packed(), 5.0)
    return stranger


GUESSES = {
    "a wrong secret": {"secret": "guessed" * 10},
    "no proof": {"change": {"proof": ""}},
    "another rank than it proves": {"change": {"rank": 2}},
    "a rank there is not": {"rank": 7},
    "rank 0": {"rank": 0},
    "another part": {"role": "ruler"},
}


@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES)
def test_nobody_without_the_secret_or_with_a_wrong_rank_gets_in(guess):
    """The door closes; the run's own ranks notice nothing."""
    with ranks(2) as world:
        stranger = proven(world.hub, **guess)

        assert stranger.recv(100) == b""
        world.others[0].send(1)
        assert taken(world, 1) == {1: b"x"}
        assert set(world.hub.linked()) == {1}
        stranger.close()


def test_a_rank_with_another_secret_says_so_and_goes_on_alone(caplog):
    """Two runs that meet at one port by mistake."""
    with ranks(2) as world:
        with pytest.raises(LinkError, match="did not take rank 1 in: it closed the connection"):
            introduced(1, replace(world.hub.address, token="another" * 8), "steps")
        world.others[0].send(1)

        assert taken(world, 1) == {1: b"x"}


def test_a_rank_does_not_take_somebody_elses_word_for_rank_0():
    """Whoever listens at that port must prove that it knows the secret, too."""
    with socket.create_server((LOOPBACK, 0)) as listener, ranks(2) as world:
        impostor = replace(world.hub.address, port=listener.getsockname()[1])

        def listening():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(Frame(FrameKind.CHALLENGE, body=challenge().encode()).packed())
                (answer,) = FrameDecoder().feed(connection.recv(2000))
                proof = json.loads(answer.body)["proof"]
                words = json.dumps({"proof": proof, "lap": 0, "orders": 0})
                connection.sendall(Frame(FrameKind.WELCOME, body=words.encode()).packed())
                assert world.hub.secret not in answer.body.decode()

        def calling():
            with pytest.raises(LinkError, match="does not know the secret of this run"):
                introduced(1, impostor, "steps")

        together(listening, calling)


NOISE = {
    "nothing known": b"\x00" * 4096,
    "a web browser": b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 9,
    "brackets": Frame(FrameKind.ANSWER, body=b"[" * 1000).packed(),
    "numbers": Frame(FrameKind.ANSWER, body=b'{"rank": 1e999, "role": 1, "nonce": 0, "proof": "\xc3\xa9"}').packed(),
    "no text": Frame(FrameKind.ANSWER, body=b"\xff").packed(),
    "a pickle": Frame(FrameKind.ANSWER, body=b"cos\nsystem\n(S'touch /tmp/owned'\ntR.").packed(),
    "a step": Frame(FrameKind.STEP, at(1), b"x").packed(),
    "too much": Frame(FrameKind.ANSWER, body=bytes(1025)).packed(),
}


def test_the_hub_lives_through_a_storm_of_strangers():
    """Each is shown the door; the rank that belongs here goes on sending."""
    with ranks(2) as world:
        for said in NOISE.values():
            stranger = connect(world.hub.address)
            send_all(stranger, said, 5.0)
            stranger.settimeout(10.0)
            with suppress(ConnectionResetError):
                while stranger.recv(100):
                    pass
            stranger.close()
        world.others[0].send(1)

        assert taken(world, 1) == {1: b"x"}
        assert set(world.hub.linked()) == {1}


@contextmanager
def idle(address, number):
    """So many connections on which nobody says anything."""
    with ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(socket.create_connection((address.candidates[0], address.port), 10.0))
        yield


def test_idle_strangers_do_not_take_the_trainers_files_nor_keep_ranks_out():
    """300 connections that say nothing: few are held, a file can be opened, and a rank that comes then is let in."""
    with ranks(3, missing=1) as world, idle(world.hub.address, 300):
        late = world.comes()

        assert world.hub.strangers <= STRANGERS + 2
        late.send(1)
        world.others[0].send(1)
        assert taken(world, 1) == {1: b"x", 2: b"x"}


def test_a_stranger_may_not_stay():
    """Whoever proves nothing is sent away in time, also if nobody else comes."""
    with ranks(2, greeting_s=0.5) as world, idle(world.hub.address, 3):
        assert until(lambda: world.hub.strangers)
        assert until(lambda: not world.hub.strangers)


def test_running_out_of_files_is_survived(tmp_path):
    """The process may open no more, whoever took them: rank 0 goes on, and listens again when it can. In a process of its
    own, with a limit of its own.
    """
    script = textwrap.dedent(f"""
        import os, resource, socket, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from linked_ranks import ranks, until
        from rlwatch.link import hub
        hub.FULL_S = 0.05
        with ranks(3, missing=1) as world:
            callers = [socket.socket() for _ in range(5)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
            held = []
            try:
                while True:
                    held.append(open(os.devnull))
            except OSError:
                pass
            for caller in callers:
                caller.connect(("127.0.0.1", world.hub.address.port))
            assert until(lambda: world.hub.resting)
            world.others[0].send(1)
            assert until(lambda: not world.hub.inbox.awaited((0, 1, 0)) - {{2}})
            for file in held:
                file.close()
            world.comes()
        print("served")
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)

    assert done.stdout.strip() == "served", done.stderr
    assert done.stderr.count("rank 0 may not open more files") == 1


def test_a_rank_that_cannot_connect_says_what_it_tried():
    """The host and port of rank 0."""
    hub = Hub(2)
    hub.forked()

    with pytest.raises(LinkError, match=rf"port {hub.address.port} \(127.0.0.1: "):
        introduced(1, hub.address, "steps")


def test_rank_0_opens_up_when_a_rank_of_another_machine_is_there():
    """On the same port; ranks that are linked stay so, and ranks of its own machine still come over the loopback."""
    with ranks(3, missing=1) as world:
        before = world.hub.address
        assert before.hosts == (LOOPBACK,)
        assert world.hub.open_up()
        assert world.hub.open_up()

        assert world.hub.listens_at[0] in ("::", "0.0.0.0")
        assert world.hub.address.port == before.port
        assert world.hub.address.hosts != (LOOPBACK,)
        late = world.comes(lambda: before)
        world.others[0].send(1)
        late.send(1)
        assert taken(world, 1) == {1: b"x", 2: b"x"}


def test_rank_0_listens_where_it_is_told_only():
    """A fixed interface and port are not exchanged for others."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        port = probe.getsockname()[1]
    hub = Hub(2, ListenAddress("localhost", port))
    hub.start()

    assert hub.open_up()
    assert hub.listens_at == (LOOPBACK, port)
    with pytest.raises(LinkError, match=rf"cannot listen for the other ranks at localhost:{port}: "):
        Hub(2, ListenAddress("localhost", port))
    hub.close(5.0)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "x" * 300])
def test_an_interface_that_is_not_here_is_named(host):
    """One clear error."""
    with pytest.raises(LinkError, match=f"at {host}:"):
        Hub(2, ListenAddress(host))


def test_a_rank_finds_rank_0_however_late_it_comes(caplog):
    """It looks again and again; meanwhile what it measures waits, and nothing is said of it."""
    with ranks(3, missing=1) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):
        found = []
        late = world.comes(lambda: found[0] if found else None)
        late.send(1)
        world.others[0].send(1)
        assert late.spoke.live
        assert not late.spoke.settled(0.2)
        found.append(world.hub.address)

        assert taken(world, 1) == {1: b"x", 2: b"x"}
    assert caplog.messages == []


def test_where_there_is_no_rank_0_nothing_is_looked_for_nor_measured(caplog):
    """It does not record: the others know at once, and end at once."""

    def nobody():
        raise NobodyError("rank 0 does not record")

    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        other = Other(1, nobody)
        assert not other.spoke.settled(20.0)
        assert not other.spoke.live
        other.send(1)
        assert until(lambda: other.lost == [1])
        assert other.member.ordered() == b""
        assert other.spoke.close(5.0)
    assert caplog.messages == []


def test_a_rank_whose_connection_breaks_connects_again(caplog):
    """A switch restarts: one warning on each side, and the next steps are whole again."""
    with ranks(2) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):
        other, before = world.others[0], world.hub.peers[1]
        world.hub.peers[1].lose()
        assert until(lambda: world.hub.peers[1] is not before and 1 in world.hub.linked())
        assert until(lambda: other.member.open)
        other.send(5)

        assert taken(world, 5) == {1: b"x"}
        assert world.boundary(1, wanted=False) is None
        assert other.boundary(1) is None
        assert together(lambda: world.boundary(2, None), lambda: _arrive(other, 2)) == [(b"x", None)] * 2


def _arrive(other, step):
    assert until(lambda: other.member.called)
    return other.boundary(step, None)


def test_a_rank_that_restarts_is_taken_in_again():
    """An elastic trainer starts a dead rank anew."""
    with ranks(2) as world:
        world.others[0].die()
        assert until(lambda: 1 not in world.hub.linked())
        again = Other(1, world.hub.address)
        world.others[0] = again
        assert again.spoke.settled(20.0)
        again.send(1)

        assert taken(world, 1) == {1: b"x"}
        assert set(world.hub.linked()) == {1}


def test_a_rank_that_restarts_before_its_end_was_seen_replaces_itself():
    """Its machine vanished: the old connections look alive, and are ended."""
    with ranks(2) as world:
        old = world.hub.peers[1]
        world.others[0].find = lambda: None
        again = Other(1, world.hub.address)
        world.others.append(again)
        assert again.spoke.settled(20.0)
        assert until(lambda: world.hub.peers[1] is not old and world.hub.peers[1].reachable)
        again.send(1)

        assert old.gone
        assert taken(world, 1) == {1: b"x"}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_lets_go_without_ending_the_parents_connections():
    """Closing a copy is not shutting the connection down."""
    with ranks(2) as world:
        child = os.fork()
        if child == 0:
            world.hub.forked()
            world.others[0].spoke.forked()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
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
        assert not peer.send(Frame(FrameKind.OFFER))


def test_what_a_rank_says_that_cannot_be_taken_ends_its_connection_alone(caplog):
    """A failure of ours on the hub's thread: the other ranks are served on."""
    with ranks(3) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):

        def broken(rank, moment, payload):
            raise MemoryError("full")

        put, world.hub.inbox.put = world.hub.inbox.put, broken
        world.others[0].die()
        world.others[1].send(1)
        assert until(lambda: any("MemoryError: full" in message for message in caplog.messages))
        world.hub.inbox.put = put
        assert until(lambda: 2 in world.hub.linked())
        world.others[1].send(2)

        assert until(lambda: 2 not in world.hub.inbox.awaited(at(2)))
        assert world.hub.inbox.take(at(2)) == {2: b"x"}
