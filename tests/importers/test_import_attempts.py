"""When a row begins a new attempt."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rlwatch.importers.assemble import Attempts

rows = st.lists(st.tuples(st.integers(0, 12), st.frozensets(st.sampled_from("abc"), min_size=1)), max_size=40)


def attempts_of(stream: list[tuple[int, frozenset[str]]]) -> list[int]:
    attempts = Attempts()
    return [attempts.of(step, names) for step, names in stream]


def test_a_step_back_that_repeats_a_metric_is_a_rewind():
    """The trainer resumed from the checkpoint of step 2."""
    assert attempts_of([(s, frozenset("a")) for s in (1, 2, 3, 4, 3, 4, 5)]) == [1, 1, 1, 1, 2, 2, 2]


def test_a_step_back_with_other_metrics_is_a_late_record():
    """An evaluation that took its time."""
    assert attempts_of([(1, frozenset("a")), (2, frozenset("a")), (1, frozenset("b"))]) == [1, 1, 1]


def test_the_same_step_again_is_no_rewind():
    """Several log calls, or several ranks, of one step."""
    assert attempts_of([(1, frozenset("a")), (1, frozenset("a")), (1, frozenset("ab"))]) == [1, 1, 1]


def test_a_second_rewind_is_a_third_attempt():
    """Also to a step before the first one's."""
    assert attempts_of([(s, frozenset("a")) for s in (5, 6, 5, 6, 7, 5)]) == [1, 1, 2, 2, 2, 3]


def test_a_restart_begins_an_attempt_whatever_the_step():
    """The file was truncated: it is a new process, though it goes on where the old one ended."""
    attempts = Attempts()
    attempts.restart()
    first = attempts.of(1, "a")
    attempts.restart()

    assert (first, attempts.of(2, "a"), attempts.of(3, "a")) == (1, 2, 2)


@given(rows)
def test_attempts_only_ever_go_up_by_one(stream):
    """From 1."""
    found = attempts_of(stream)

    assert found[:1] in ([], [1])
    assert all(b - a in (0, 1) for a, b in pairwise(found))


@given(rows)
def test_an_attempt_depends_only_on_what_came_before(stream):
    """Reading on changes nothing."""
    whole = attempts_of(stream)

    assert all(attempts_of(stream[:cut]) == whole[:cut] for cut in range(len(stream)))


@given(rows)
def test_steps_that_never_go_back_are_one_attempt(stream):
    """However many metrics are repeated."""
    assert set(attempts_of(sorted(stream, key=lambda row: row[0]))) <= {1}
