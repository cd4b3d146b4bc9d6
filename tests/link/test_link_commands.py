"""Commands between ranks: everybody acts at one boundary, or nobody does, and nobody waits where nothing is asked."""

import itertools
import json
import logging
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linked_ranks import Other, at, ranks, together, until

from rlwatch.link.hub import Hub
from rlwatch.link.rounds import UNDECIDED
from rlwatch.link.wire import Frame, FrameKind, read_ballot

HUNDREDS = itertools.count(1)
NO_WAIT_S = 5.0
"""Far below every patience in these tests: whoever took longer has waited for somebody."""


def round_of(world, step, *refusals, of=None):
    """A boundary at which every rank arrives with a command waiting: what each heard and was told, rank 0 first."""
    words = dict(of or {})
    mine = words.get(0, refusals)
    others = [lambda one=one: arrive(one, step, words.get(one.rank, refusals)) for one in world.others]
    return together(lambda: world.boundary(step, *mine), *others)


def arrive(one, step, refusals):
    """Come to the boundary only when rank 0 has asked, so that all meet at it."""
    assert until(lambda: one.member.called)
    return one.boundary(step, *refusals)


def test_with_nothing_to_do_nobody_hears_of_anybody_and_nobody_waits():
    """Whoever is first, and however far ahead: not a byte is sent."""
    with ranks(4, patience_s=1000.0) as world:
        begin = time.monotonic()
        for other, steps in zip(world.others, (50, 3, 1), strict=True):
            assert [other.boundary(step) for step in range(steps)] == [None] * steps
        assert [world.boundary(step, wanted=False) for step in range(5)] == [None] * 5

        assert time.monotonic() - begin < NO_WAIT_S
        assert not any(other.member.called for other in world.others)
        assert not any(peer.waiting for peer in world.hub.peers.values())


def test_all_agree_or_all_refuse_with_the_same_words():
    """Rank 2's objection is everybody's verdict."""
    with ranks(4) as world:
        assert round_of(world, 1, None) == [(b"x", None)] * 4
        assert round_of(world, 2, None, of={2: ["no reference"]}) == [(b"x", "rank 2: no reference")] * 4
        assert round_of(world, 3, None) == [(b"x", None)] * 4


def test_a_rank_that_has_been_welcomed_is_linked(monkeypatch):
    """It may come to a boundary before rank 0's thread has noted the connection, and must not be taken for missing."""

    send = socket.socket.send

    def send_and_rest(self, *args):
        sent = send(self, *args)
        if threading.current_thread().name == "rlwatch-hub":
            time.sleep(0.3)
        return sent

    monkeypatch.setattr(socket.socket, "send", send_and_rest, raising=False)
    hub = Hub(2)
    hub.start()
    one = Other(1, hub.address)
    try:
        assert one.spoke.settled(20.0)
        assert list(hub.linked()) == [1]
    finally:
        one.spoke.close(1.0)
        hub.close()


def test_what_rank_0_refuses_itself_keeps_nobody():
    """It asks nobody first: the others hear of it in time or not, and none acts."""
    with ranks(3, patience_s=1000.0) as world:
        assert world.boundary(1, "a collapse") == (b"x", "a collapse")
        for other in world.others:
            assert other.boundary(1, None) in (None, (b"x", "a collapse"))


def test_a_command_may_be_voted_on_more_than_once():
    """Can you? Did you? Each question has its own answer."""
    with ranks(3) as world:
        words = {0: [None, None, "failed"], 1: [None] * 3, 2: [None] * 3}

        assert round_of(world, 1, of=words) == [(b"x", None, None, "failed")] * 3


@pytest.mark.parametrize("ahead", list(itertools.product(range(4), repeat=3)), ids=str)
def test_all_act_at_one_boundary_whoever_has_passed_how_many(ahead, shared):
    """Rank 0 and two others, each 0 to 3 boundaries ahead when the command comes: all meet at the first that nobody
    has passed, and none waits at one before it.
    """
    world, first = shared
    mine, *theirs = ahead
    for step in range(mine):
        assert world.boundary(first + step, wanted=False) is None
    for other, steps in zip(world.others, theirs, strict=True):
        assert [other.boundary(first + step) for step in range(steps)] == [None] * steps

    def walk(boundary, begin):
        return next((first + step, found) for step in range(begin, 9) if (found := boundary(first + step)) is not None)

    def walked(other, begin):
        assert until(lambda: other.member.called)
        return walk(lambda step: other.boundary(step, None), begin)

    met = together(
        lambda: walk(lambda step: world.boundary(step, None), mine),
        *(lambda o=other, s=steps: walked(o, s) for other, steps in zip(world.others, theirs, strict=True)),
    )

    passed = ahead if first else (mine, *(steps or 0 for steps in theirs))
    assert met == [(first + max(passed), (b"x", None))] * 3


def test_what_is_due_on_every_rank_is_done_at_that_very_boundary():
    """Each rank knows it by itself: whoever comes first waits there for rank 0, which finds that nobody has passed."""
    with ranks(3) as world:
        done = together(
            lambda: time.sleep(0.2) or world.boundary(1, None),
            *(lambda one=one: one.boundary(1, None, wanted=True) for one in world.others),
        )
        assert done == [(b"x", None)] * 3


def test_what_is_due_on_one_rank_alone_is_waited_for_once():
    """Rank 0 knows nothing of it."""
    with ranks(2, patience_s=0.05) as world:
        other = world.others[0]
        assert other.boundary(1, wanted=True) is None
        other.member.patience_s = 1000.0
        assert other.boundary(2, wanted=True) is None


def test_ranks_called_early_meet_at_their_next_boundary():
    """A command that comes within a step is done at its end, whoever gets there first."""
    with ranks(3, patience_s=1000.0) as world:
        world.boundary(1, wanted=False)
        for other in world.others:
            other.boundary(1)
        world.chair.call()
        world.chair.call()

        assert all(world.heard_of(other) for other in world.others)
        assert round_of(world, 2, None) == [(b"x", None)] * 3
        assert [one.boundary(3) for one in world.others] == [None, None]


def test_a_call_in_vain_is_made_once_and_answered_at_the_boundary():
    """A rank is missing: nobody is kept, and the training thread gets the reason as it is then."""
    with ranks(3, patience_s=1000.0, missing=1) as world:
        world.chair.call()
        world.chair.call()
        assert world.chair.rounds == 1
        assert world.others[0].boundary(1) is None
        assert world.boundary(1, wanted=False) is None
        world.comes()
        world.others[1].boundary(1)

        assert round_of(world, 2, None) == [(b"x", None)] * 3


@pytest.fixture(scope="module")
def world_of_three():
    with ranks(3) as world:
        yield world


@pytest.fixture
def shared(world_of_three):
    """The same three ranks, at steps of their own; the first boundary is behind them."""
    world, first = world_of_three, 100 * next(HUNDREDS)
    world.boundary(first - 1, wanted=False)
    for other in world.others:
        other.boundary(first - 1)
    return world, first


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=5, max_size=40))
def test_whatever_the_order_every_command_is_done_at_one_step_by_all(world_of_three, moves):
    """Ranks go from boundary to boundary as the moves say, rank 0 with a command or without, and then go on until
    all are at the same: what each heard, and where, is the same for all.
    """
    world, log = world_of_three, ([], [], [])
    base = 100 * next(HUNDREDS)
    world.boundary(base, wanted=False)
    for other in world.others:
        other.boundary(base)
    script = [[], [], []]
    for rank, wanted in moves:
        script[rank].append(wanted)
    longest = max(map(len, script)) + 4

    def first():
        for number in range(longest):
            wanted = number < len(script[0]) and script[0][number]
            found = world.boundary(base + 1 + number, None, wanted=wanted)
            log[0].extend([(number, found)] * (found is not None))

    def other(one):
        for number in range(longest):
            found = one.boundary(base + 1 + number, None)
            log[one.rank].extend([(number, found)] * (found is not None))

    together(first, *(lambda one=one: other(one) for one in world.others))

    done = [[entry for entry in lines if entry[1][1:] == (None,)] for lines in log]
    assert done[0] == done[1] == done[2]


def test_a_dead_rank_hangs_nobody_and_no_command_is_carried_out_without_it():
    """The others go on, at this boundary and at all later ones."""
    with ranks(3, patience_s=1000.0) as world:
        world.others[0].die()
        assert until(lambda: 1 not in world.hub.linked())

        reason = "rank 1 is not connected, and all ranks must act together"
        assert world.boundary(1, None) == (b"x", reason)
        assert world.others[1].boundary(1, None) is None


def test_a_rank_that_dies_before_it_votes_is_a_refusal():
    """Rank 0 learns it from the closed connection, not by waiting."""
    with ranks(2, patience_s=1000.0) as world:

        def other():
            assert until(lambda: world.others[0].member.called)
            assert world.others[0].member.meets(1)
            assert world.others[0].member.offered() == b"x"
            world.others[0].die()

        verdict, _ = together(lambda: world.boundary(1, None), other)

    assert verdict == (b"x", "rank 1 does not answer")


def test_the_other_ranks_go_on_when_rank_0_dies():
    """At once, and ever after, wherever they were waiting for it."""
    with ranks(3, patience_s=1000.0) as world:
        world.calls(1)
        world.hub.close()
        for other in world.others:
            assert until(lambda other=other: not other.member.open)
            assert other.boundary(1, None) is None
            assert other.member.ordered() == b""
            assert other.member.vote(None) == UNDECIDED
            assert other.member.vote("no") == "no"


@pytest.mark.parametrize("where", ["meets", "offered", "vote", "ordered"])
def test_a_rank_that_waits_is_released_by_the_death_of_rank_0(where):
    """It must not act: nobody told it to."""
    with ranks(2, patience_s=1000.0) as world:
        member = world.others[0].member

        def first():
            if where == "meets":
                world.hub.peers[1].send(Frame(FrameKind.ASK, turn=9))
                assert until(lambda: member.here is not None)
            elif where != "ordered":
                world.calls(1)
                assert until(lambda: member.taking_part)
            if where == "vote":
                world.chair.offer(b"x")
                assert until(lambda: world.hub.peers[1].waiting)
            world.hub.close()

        def other():
            if where == "ordered":
                return member.ordered()
            if where == "meets":
                assert until(lambda: member.called)
                return member.meets(1)
            assert until(lambda: member.meet is not None)
            assert member.meets(1)
            return member.offered() if where == "offered" else (member.offered(), member.vote(None))

        _, found = together(first, other)

    assert found == {"meets": False, "offered": b"", "ordered": b"", "vote": (b"x", UNDECIDED)}[where]


def test_a_rank_is_let_go_where_rank_0_does_not_ask():
    """Rank 0 cannot carry out the command and asks nobody: who votes on it learns so at once, and acts on nothing."""
    with ranks(2, patience_s=1000.0) as world:

        def first():
            world.calls(1)
            world.chair.offer(b"x")
            assert until(lambda: world.hub.peers[1].waiting)
            world.chair.over()

        _, heard = together(first, lambda: arrive(world.others[0], 1, [None]))
        assert heard == (b"x", UNDECIDED)
        assert round_of(world, 2, None) == [(b"x", None)] * 2


def test_a_rank_that_leaves_a_round_lets_rank_0_go():
    """An interrupt on another rank, between hearing and voting."""
    with ranks(2, patience_s=1000.0) as world:

        def other():
            assert until(lambda: world.others[0].member.called)
            world.others[0].member.meets(1)
            world.others[0].member.offered()
            world.others[0].member.over()
            world.others[0].member.leave()

        verdict, _ = together(lambda: world.boundary(1, None), other)

    assert verdict == (b"x", "rank 1 had gone on already")


def test_acting_may_take_longer_than_agreeing_to_act():
    """Rank 1 writes a large checkpoint: rank 0 waits for its word."""
    with ranks(2) as world:
        member = world.others[0].member

        def first():
            world.calls(1)
            world.chair.offer(b"x")
            able = world.chair.decide(None)
            world.chair.patience_s = 0.0
            return able, world.chair.decide(None)

        def other():
            assert until(lambda: member.called)
            member.meets(1)
            member.offered()
            able = member.vote(None)
            assert until(lambda: world.chair.patience_s == 0.0)
            return able, member.vote("disk full")

        assert together(first, other) == [(None, "rank 1: disk full")] * 2


def test_a_rank_that_was_asked_to_a_boundary_rank_0_does_not_come_to_goes_on(caplog):
    """And is not taken to act there later; the next command finds it again."""
    with ranks(2, patience_s=0.05) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):
        other = world.others[0]
        world.calls(1)
        assert world.heard_of(other)
        assert other.boundary(1, None) == (b"", UNDECIDED)
        other.member.patience_s = world.chair.patience_s = 20.0
        world.chair.offer(b"x")

        assert world.chair.decide(None) == "rank 1 had gone on already"
        world.chair.over()
        world.chair.leave()
        assert round_of(world, 2, None) == [(b"x", None)] * 2
    assert sum("did not come to it" in message for message in caplog.messages) == 1


def test_a_boundary_left_in_the_middle_of_a_round_is_not_acted_at():
    """An interrupt at the meeting boundary: at the next one, neither side takes it for that."""
    with ranks(2) as world:
        other = world.others[0]
        world.calls(1)
        assert world.heard_of(other)
        other.member.meets(1)
        other.member.leave()
        world.chair.offer(b"x")

        assert other.member.meets(2) is False
        assert world.chair.decide(None) == "rank 1 had gone on already"
        world.chair.leave()
        assert round_of(world, 3, None) == [(b"x", None)] * 2


def test_a_rank_that_does_not_come_is_waited_for_once():
    """One command may wait for it; the next is refused at once, until it has come to a boundary."""
    with ranks(2, patience_s=0.05) as world:
        assert world.boundary(1, None) == (b"x", "rank 1 does not answer")
        world.chair.patience_s = 1000.0
        reason = "rank 1 has not come to a boundary since it was last waited for"
        assert world.boundary(1, None) == (b"x", reason)

        world.others[0].member.patience_s = 20.0
        assert world.others[0].boundary(1) is None
        world.chair.leave()
        assert round_of(world, 3, None) == [(b"x", None)] * 2


def test_a_rank_that_never_comes_to_a_boundary_keeps_nobody_waiting():
    """Its loop does not obey: rank 0 has gone on without a word, and commands are refused at once with the reason."""
    with ranks(3, patience_s=1000.0) as world:
        world.boundary(1, wanted=False)
        world.others[0].boundary(1)

        verdict = world.boundary(2, None)
        assert verdict == (b"x", "rank 2 has not come to its first boundary yet (every rank must call obey)")
        assert world.others[0].boundary(2, None) is None


def test_a_rank_that_never_connected_stands_in_the_way_of_commands_only():
    """Rank 0 does not wait for it: the reason says which it is."""
    with ranks(3, patience_s=1000.0, missing=1) as world:
        assert world.boundary(1, None) == (b"x", "rank 2 is not connected, and all ranks must act together")
        assert world.others[0].boundary(1, None) is None


def test_a_rank_whose_thread_is_dead_is_not_waited_for_twice():
    """It answers nothing: once it is waited for, shortly; then no more until it says something."""
    with ranks(2, missing=1) as world:
        with world.mute() as dead:
            world.chair.place_s = 0.05
            assert world.boundary(1, None) == (b"x", "rank 1 does not answer")
            world.chair.place_s = 1000.0
            assert world.boundary(2, None) == (b"x", "rank 1 does not answer")

            dead.say(FrameKind.PLACE)
            assert until(lambda: not world.hub.peers[1].silent)
        assert until(lambda: not world.hub.linked())
        assert world.comes().boundary(0) is None
        assert round_of(world, 3, None) == [(b"x", None)] * 2


def test_paused_ranks_meet_where_they_are():
    """They stay at their boundary, each looking now and then whether it goes on."""
    with ranks(3) as world:

        def first():
            assert not world.chair.meets(5, wanted=False, staying=True)
            return world.boundary(5, None)

        def other(one):
            while not one.member.meets(5, staying=True):
                time.sleep(0.01)
            return one.member.offered(), one.member.vote(None)

        assert together(first, *(lambda one=one: other(one) for one in world.others)) == [(b"x", None)] * 3


def test_a_rank_that_comes_late_is_where_the_others_are():
    """Training began anew twice before it: its steps are those of rank 0 all the same."""
    with ranks(3, missing=1) as world:
        for step in (7, 3, 1):
            world.boundary(step, wanted=False)
            world.others[0].boundary(step)
        late = world.comes()
        assert late.boundary(1) is None

        assert round_of(world, 2, None) == [(b"x", None)] * 3
        assert late.member.earliest == world.chair.earliest == at(2, lap=2, again=1)


def test_an_order_is_heard_by_all_and_by_whoever_comes_late_as_over():
    """A place where only rank 0 knows whether something is to be done."""
    with ranks(2, patience_s=1000.0) as world:
        other = world.others[0]

        def first():
            world.chair.order(b"")
            world.chair.over()
            world.chair.order(b"restore")
            verdict = world.chair.decide(None)
            world.chair.over()
            return b"restore", verdict

        def second():
            assert other.member.ordered() == b""
            return other.member.ordered(), other.member.vote(None)

        assert together(first, second) == [(b"restore", None)] * 2
        world.hub.world_size = 3
        late = world.comes()
        assert [late.member.ordered(), late.member.ordered()] == [b"", b""]


def test_an_order_waits_for_ranks_that_are_about_to_link():
    """A resume is the first thing a loop does: a rank that links a moment later takes part."""
    with ranks(3, missing=1) as world:
        late_may_come = []
        world.comes(lambda: world.hub.address if late_may_come else None)

        def first():
            world.chair.order(b"restore")
            return b"restore", world.chair.decide(None)

        def other(one):
            late_may_come.append(1)
            return one.member.ordered(), one.member.vote(None)

        assert together(first, *(lambda one=one: other(one) for one in world.others)) == [(b"restore", None)] * 3


def test_an_order_between_a_command_and_its_boundary_disturbs_neither():
    """A checkpoint is saved after the command came and before the boundary where all meet."""
    with ranks(2) as world:
        other = world.others[0]
        world.boundary(0, wanted=False)
        other.boundary(0)
        other.boundary(1)
        assert world.boundary(1, None) is None

        def order():
            world.chair.order(b"keep")
            try:
                return b"keep", world.chair.decide(None)
            finally:
                world.chair.over()

        def ordered():
            found = other.member.ordered(), other.member.vote(None)
            other.member.over()
            return found

        assert together(order, ordered) == [(b"keep", None)] * 2
        assert together(lambda: world.boundary(2, None), lambda: other.boundary(2, None)) == [(b"x", None)] * 2


def test_an_order_that_rank_0_never_gives_is_waited_for_once(caplog):
    """Rank 0 does not come there; from then on nobody waits for it, until it is heard."""
    with ranks(2, patience_s=0.05) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):
        member = world.others[0].member
        assert member.ordered() == b""
        member.patience_s = 1000.0
        assert member.ordered() == b""
        world.chair.patience_s = 20.0
        world.chair.order(b"restore")
        assert world.chair.decide(None) == "rank 1 had gone on already"
        world.chair.over()
        world.chair.order(b"")
        world.chair.over()

        heard, _ = together(lambda: (member.ordered(), member.vote(None)), lambda: _ordered(world.chair))
    assert heard == (b"again", None)
    assert sum("did not come to where" in message for message in caplog.messages) == 1


def _ordered(chair):
    chair.order(b"again")
    return chair.decide(None)


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[1]", b'{"a": 1}', b"[null, null]"])
def test_a_vote_that_cannot_be_read_is_no_yes(body):
    """Garbage is waited out and counts as silence."""
    with ranks(2, patience_s=0.2, missing=1) as world, world.mute() as other:

        def votes():
            asked = other.hear(FrameKind.ASK)
            other.say(FrameKind.PLACE, moment=asked.moment, turn=asked.turn)
            assert other.hear(FrameKind.MEET).moment == asked.moment
            other.say(FrameKind.VOTE, body=body, turn=asked.turn)

        together(lambda: world.calls(1), votes)
        assert world.chair.decide(None) == "rank 1 does not answer"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NOTHING = (0, None)


@settings(max_examples=40)
@given(VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30))
def test_what_is_no_ballot_raises_nothing_and_says_nothing(body):
    """It is read in the training thread of rank 0: only [whole number, text or null] is a ballot."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    genuine = isinstance(found, list) and len(found) == 2 and type(found[0]) is int
    genuine = genuine and (found[1] is None or isinstance(found[1], str))

    assert read_ballot(body) == (tuple(found) if genuine else NOTHING)


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
