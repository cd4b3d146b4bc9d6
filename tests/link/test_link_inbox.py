"""What waits for rank 0: bounded, ordered, and never waited for in vain twice."""

from hypothesis import given
from hypothesis import strategies as st
from linked_ranks import at

from rlwatch.link.hub import Inbox


def inbox(*ranks):
    box = Inbox()
    for rank in ranks:
        box.join(rank)
    return box


def test_a_step_is_complete_when_every_present_rank_has_sent_it():
    """Then all of it is taken at once."""
    box = inbox(1, 2)
    assert box.awaited(at(5)) == {1, 2}

    box.put(1, at(5), b"one")
    assert box.awaited(at(5)) == {2}
    box.put(2, at(5), b"two")

    assert box.awaited(at(5)) == frozenset()
    assert box.take(at(5)) == {1: b"one", 2: b"two"}
    assert box.take(at(5)) == {}


def test_a_rank_is_awaited_before_it_has_come():
    """Setting up may take one rank longer than another; who never comes is excused like anybody else."""
    box = Inbox([1, 2])
    box.join(1)
    assert box.awaited(at(1)) == {1, 2}

    box.mark_absent([2])
    assert box.awaited(at(1)) == {1}
    box.join(2)
    assert box.awaited(at(1)) == {1, 2}


def test_a_rank_that_left_is_not_awaited():
    """What it sent before it left still counts."""
    box = inbox(1)
    box.put(1, at(3), b"x")
    box.leave(1)

    assert box.awaited(at(3)) == frozenset()
    assert box.awaited(at(4)) == frozenset()
    assert box.take(at(3)) == {1: b"x"}


def test_a_rank_that_sent_a_later_step_will_not_send_the_earlier_one():
    """Connections keep the order, so the gap is final."""
    box = inbox(1)
    box.put(1, at(8), b"x")

    assert box.awaited(at(7)) == frozenset()
    assert box.awaited(at(9)) == {1}


def test_an_excused_rank_is_awaited_again_once_it_keeps_up():
    """What comes too late does not count as keeping up."""
    box = inbox(1)
    box.mark_absent([1])
    box.take(at(1))

    box.put(1, at(1), b"late")
    assert box.awaited(at(2)) == frozenset()
    assert box.dropped == 1
    box.put(1, at(2), b"in time")

    assert box.awaited(at(3)) == {1}


def test_what_comes_after_its_step_was_recorded_is_dropped():
    """It must not be merged into another step."""
    box = inbox(1)
    box.take(at(4))
    box.put(1, at(3), b"x")
    box.put(1, at(4), b"x")

    assert box.take(at(4)) == {}
    assert box.dropped == 2


def test_steps_nobody_asked_for_go_when_a_later_one_is_taken():
    """Rank 0 may have lost a step of its own."""
    box = inbox(1)
    for step in (1, 2, 3):
        box.put(1, at(step), b"x")

    assert box.take(at(3)) == {1: b"x"}
    assert box.dropped == 2


@given(st.integers(1, 300), st.integers(0, 60))
def test_memory_is_bounded_when_rank_0_never_asks(steps, size):
    """The oldest go first."""
    box = Inbox([1], most_steps=64, most_bytes=1000)
    for step in range(steps):
        box.put(1, at(step), bytes(size))
    dropped = box.dropped

    kept = [step for step in range(steps) if box.take(at(step))]
    assert kept == list(range(dropped, steps))
    assert 1 <= len(kept) <= 64
    assert size * len(kept) <= 1000
