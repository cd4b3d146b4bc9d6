"""Commands between ranks: everybody acts, or nobody does, and nobody waits for the dead."""

import logging

import pytest
from linked_ranks import at, ranks, together, until

from rlwatch.link.frames import Frame, Kind
from rlwatch.link.member import UNDECIDED


def round_of(world, step, body=b"", refusals=()):
    """One boundary on every rank: (what was heard, verdict) of each, rank 0 first."""

    def first():
        world.offer(step, body)
        return (body, world.chair.decide(dict(refusals).get(0)) if body else None)

    def other(one):
        heard = one.member.offered(at(step))
        return (heard, one.member.vote(dict(refusals).get(one.rank)) if heard else None)

    return together(first, *(lambda one=one: other(one) for one in world.others))


def test_nothing_to_do_is_heard_by_all_as_nothing():
    """A few bytes each way round, at every boundary."""
    with ranks(4) as world:
        for step in range(1, 50):
            assert round_of(world, step) == [(b"", None)] * 4


def test_all_agree_or_all_refuse_with_the_same_words():
    """Rank 2's objection is everybody's verdict."""
    with ranks(4) as world:
        assert round_of(world, 1, b"reset") == [(b"reset", None)] * 4
        refused = round_of(world, 2, b"reset", {2: "no reference"}.items())
        assert refused == [(b"reset", "rank 2: no reference")] * 4
        assert round_of(world, 3, b"reset", {0: "a collapse"}.items()) == [(b"reset", "a collapse")] * 4
        assert round_of(world, 4, b"reset") == [(b"reset", None)] * 4


def test_a_command_may_be_voted_on_more_than_once():
    """Can you? Did you? Each question has its own answer."""
    with ranks(3) as world:

        def first():
            world.offer(1, b"x")
            return [world.chair.decide(None), world.chair.decide(None), world.chair.decide("failed")]

        def other(one):
            one.member.offered(at(1))
            return [one.member.vote(None), one.member.vote(None), one.member.vote(None)]

        answers = together(first, *(lambda one=one: other(one) for one in world.others))

    assert answers == [[None, None, "failed"]] * 3


def test_a_dead_rank_hangs_nobody_and_no_command_is_carried_out_without_it():
    """The others go on, at this boundary and at all later ones."""
    with ranks(3) as world:
        world.others[0].die()
        assert until(lambda: 1 not in world.hub.linked())
        del world.others[0]

        reason = "rank 1 is not connected, and all ranks must act together"
        assert round_of(world, 1) == [(b"", None)] * 2
        assert round_of(world, 2, b"reset") == [(b"reset", reason)] * 2


def test_a_rank_that_dies_before_it_votes_is_a_refusal():
    """Rank 0 learns it from the closed connection, not by waiting."""
    with ranks(2) as world:

        def first():
            world.offer(1, b"reset")
            return world.chair.decide(None)

        def other():
            assert world.others[0].member.offered(at(1)) == b"reset"
            world.others[0].die()

        verdict, _ = together(first, other)

    assert verdict == "rank 1 does not answer"


def test_the_other_ranks_go_on_when_rank_0_dies():
    """At once, and ever after."""
    with ranks(3) as world:
        for peer in world.hub.linked().values():
            peer.lose()

        for other in world.others:
            assert until(lambda other=other: not other.member.offered(at(1)) and not other.member.open)
            assert other.member.offered(at(2)) == b""
            assert other.member.vote(None) == UNDECIDED
            assert other.member.vote("no") == "no"


def test_rank_0_dying_before_the_verdict_releases_who_said_yes():
    """They must not act: nobody told them to."""
    with ranks(2) as world:

        def first():
            world.offer(1, b"reset")
            assert until(lambda: not world.hub.peers[1]._heard.empty())
            world.hub.peers[1].lose()

        def other():
            world.others[0].member.offered(at(1))
            return world.others[0].member.vote(None)

        _, verdict = together(first, other)

    assert verdict == UNDECIDED


def test_a_rank_is_let_go_where_rank_0_does_not_ask():
    """Rank 0 cannot carry out the command and asks nobody: who votes on it learns so at once, and acts on nothing."""
    with ranks(2) as world:
        member = world.others[0].member

        def first():
            world.offer(1, b"reset")
            assert until(lambda: not world.hub.peers[1]._heard.empty())
            world.chair.over()

        _, (heard, verdict) = together(first, lambda: (member.offered(at(1)), member.vote(None)))
        assert (heard, verdict) == (b"reset", UNDECIDED)
        assert round_of(world, 2, b"again") == [(b"again", None)] * 2


def test_rank_0_is_over_without_a_word_where_nothing_was_asked():
    """A boundary without commands costs one message each way and no more."""
    with ranks(2) as world:
        world.offer(1)
        world.chair.over()
        world.offer(2)
        world.chair.over()

        member = world.others[0].member
        assert [member.offered(at(step)) for step in (1, 2)] == [b"", b""]
        assert not member._heard


def test_acting_may_take_longer_than_agreeing_to_act():
    """Rank 1 writes a large checkpoint: rank 0 waits for its word."""
    with ranks(2) as world:
        world.chair._patience_s, member = 20.0, world.others[0].member

        def first():
            world.offer(1, b"save")
            able = world.chair.decide(None)
            world.chair._patience_s = 0.0
            return able, world.chair.decide(None)

        def other():
            member.offered(at(1))
            able = member.vote(None)
            assert until(lambda: world.chair._patience_s == 0.0)
            return able, member.vote("disk full")

        answers = together(first, other)

    assert answers == [(None, "rank 1: disk full"), (None, "rank 1: disk full")]


def test_a_rank_waits_for_a_late_rank_0_once_and_then_not_until_it_is_heard_again(caplog):
    """Something else may keep rank 0 away for ever; training is not ours to stop."""
    with ranks(2, patience_s=0.05) as world, caplog.at_level(logging.WARNING, logger="rlwatch"):
        member = world.others[0].member
        assert member.offered(at(1)) == b""  # waited in vain
        assert member.offered(at(2)) == b""  # did not wait
        world.offer(1)
        world.offer(2)
        world.offer(3)
        assert until(lambda: member.offered(at(3)) == b"" and member._waiting)
        member._patience_s = 20.0
        heard, _ = together(lambda: member.offered(at(4)), lambda: world.offer(4, b"reset"))

    assert heard == b"reset"
    assert sum("did not come to step 1" in message for message in caplog.messages) == 1


def test_an_offer_that_comes_too_late_is_refused_not_acted_upon():
    """The rank has passed that step: rank 0 must not act there either."""
    with ranks(2, patience_s=0.05) as world:
        member = world.others[0].member
        member.offered(at(1))
        world.chair._patience_s = 20.0
        world.offer(1, b"reset")
        verdict, heard = together(lambda: world.chair.decide(None), lambda: until(lambda: member.offered(at(2)) == b""))

        assert heard
        assert until(lambda: member.offered(at(3)) == b"") or True
    assert verdict == "rank 1 had gone on already"


def test_a_rank_that_is_behind_meets_rank_0_where_it_is():
    """An offer for a later step waits until this rank comes there."""
    with ranks(2) as world:
        member = world.others[0].member
        world.offer(5, b"reset")

        assert member.offered(at(4)) == b""
        heard, verdict = together(lambda: (member.offered(at(5)), member.vote(None)), lambda: world.chair.decide(None))
    assert heard == (b"reset", None)
    assert verdict is None


def test_a_rank_that_does_not_answer_in_time_is_not_asked_again_until_it_speaks():
    """One command may wait for it; the next is refused at once."""
    with ranks(2, patience_s=0.05) as world:
        world.offer(1, b"reset")
        assert world.chair.decide(None) == "rank 1 does not answer"
        world.chair._patience_s = 1000.0
        world.offer(2, b"reset")
        assert world.chair.decide(None) == "rank 1 does not answer"

        member = world.others[0].member
        member.offered(at(1))
        member.vote(None)
        assert until(lambda: not world.hub.peers[1].silent)
        heard, *_ = together(lambda: round_of(world, 3, b"reset"))
    assert heard == [(b"reset", None)] * 2


def test_a_rank_that_never_connected_stands_in_the_way_of_commands_only():
    """Rank 0 does not wait for it: the reason says which it is."""
    with ranks(2) as world:
        world.hub.world_size = 3
        answers = round_of(world, 1, b"reset")

    assert answers == [(b"reset", "rank 2 is not connected, and all ranks must act together")] * 2


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[1]", b'{"a": 1}', b"[null, null]"])
def test_a_vote_that_cannot_be_read_is_no_yes(body):
    """Garbage is waited out and counts as silence."""
    with ranks(2, patience_s=0.2) as world:
        world.offer(1, b"reset")
        member = world.others[0].member
        member.offered(at(1))
        member._tell(Frame(Kind.VOTE, at(1), body))

        assert world.chair.decide(None) == "rank 1 does not answer"
