"""Steps of rows that do not say them, from the bars around them: what was logged against what is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.importers.console import MOST_WAITING, StepClock, bars


def bar_text(n, total, title=""):
    share = f"{100 * n // total}%".rjust(4)
    return f"{title}{share}|{'#' * 5:10}| {n}/{total} [01:02<31:12,  5.16s/it]"


@given(st.integers(1, 20), st.integers(1, 40))
def test_a_bar_after_each_row_tells_its_step(every, rows):
    """As tqdm redraws it right after the row: exact at any logging interval."""
    clock, total = StepClock(), every * rows + 3
    given_ = []
    for n in range(1, rows + 1):
        given_ += clock.row(n, trains=True)
        given_ += clock.bar(every * n, total, directly=True)
    given_ += clock.flush()

    assert given_ == [(n, every * n) for n in range(1, rows + 1)]
    assert not clock.counted
    assert clock.pace == every


@given(st.integers(2, 30), st.lists(st.integers(2, 8), min_size=1, max_size=8))
def test_rows_of_a_buffered_log_are_spread_over_their_steps(every, batches):
    """They come together, before the bar that stands at the last of them: each was a fixed number of steps apart."""
    clock, row, given_ = StepClock(), 0, []
    total = every * (sum(batches) + 1)
    clock.bar(0, total, directly=False)  # tqdm draws itself when it begins
    for size in batches:
        for _ in range(size):
            row += 1
            given_ += clock.row(row, trains=True)
        given_ += clock.bar(every * row, total, directly=True)

    assert given_ == [(n, every * n) for n in range(1, row + 1)]


@given(st.integers(1, 30))
def test_without_any_bar_rows_are_numbered(rows):
    """And it is remembered that nothing told their step."""
    clock, given_ = StepClock(), []
    for n in range(1, rows + 1):
        given_ += clock.row(n, trains=True)
    given_ += clock.flush()

    assert given_ == [(n, n) for n in range(1, rows + 1)]
    assert clock.counted


def test_an_evaluation_stands_at_the_step_of_the_row_before():
    """At once where nothing waits, else with the row it came after."""
    clock = StepClock()
    assert clock.row("early", trains=False) == [("early", 0)]
    assert clock.row("train", trains=True) == []
    assert clock.row("eval", trains=False) == []

    assert clock.bar(20, 100, directly=True) == [("train", 20), ("eval", 20)]
    assert clock.row("later", trains=False) == [("later", 20)]


def test_a_row_that_says_its_own_step_settles_those_before_it():
    """And the pace goes on from it."""
    clock = StepClock()
    clock.bar(0, 100, directly=False)
    clock.row("a", trains=True)

    assert clock.at(20) == [("a", 1)]
    assert clock.last == 20
    clock.row("b", trains=True)
    assert [row for row, _ in clock.flush()] == ["b"]
    assert clock.last > 20


def test_a_bar_of_something_else_tells_nothing():
    """An evaluation's, with another total, that is not drawn after the rows."""
    clock = StepClock()
    clock.bar(0, 100, directly=False)
    clock.row("a", trains=True)

    assert clock.bar(1, 6, directly=False) == []
    assert clock.bar(10, 100, directly=True) == [("a", 10)]


def test_a_trainer_that_was_started_again_counts_from_its_own_bar():
    """The bar went back: so do the steps."""
    clock = StepClock()
    for n in (10, 20, 30):
        clock.row(n, trains=True)
        clock.bar(n, 100, directly=True)
    clock.bar(0, 100, directly=False)
    clock.row("again", trains=True)

    assert clock.bar(10, 100, directly=True) == [("again", 10)]


def test_no_more_rows_wait_than_a_limit():
    """A bar may never come again: memory is bounded, nothing is lost, order is kept."""
    clock, given_ = StepClock(), []
    clock.bar(0, 10**6, directly=False)
    for n in range(MOST_WAITING + 5):
        given_ += clock.row(n, trains=True)
    held = MOST_WAITING + 5 - len(given_)
    given_ += clock.flush()

    assert held <= MOST_WAITING
    assert [row for row, _ in given_] == list(range(MOST_WAITING + 5))


EVENTS = st.lists(
    st.tuples(st.just("row"), st.booleans(), st.integers(0, 60))
    | st.tuples(st.just("bar"), st.booleans(), st.integers(0, 60))
    | st.tuples(st.just("at"), st.booleans(), st.integers(1, 60)),
    max_size=40,
)


def played(clock, events):
    given_ = []
    for n, (kind, flag, number) in enumerate(events):
        if kind == "row":
            given_ += clock.row(n, trains=flag, bar_before=(number, 60) if number else (0, 0))
        elif kind == "bar":
            given_ += clock.bar(number, 60, directly=flag)
        else:
            given_ += clock.at(number)
    return given_


@given(EVENTS)
def test_whatever_a_log_holds_every_row_comes_once_in_order_with_a_step(events):
    """Torn logs, two processes in one file: steps are whole numbers from 0."""
    clock = StepClock()
    given_ = [*played(clock, events), *clock.flush()]

    assert [row for row, _ in given_] == [n for n, (kind, *_) in enumerate(events) if kind == "row"]
    assert all(isinstance(step, int) and step >= 0 for _, step in given_)


@given(EVENTS, st.integers(0, 40))
def test_following_a_log_gives_the_steps_of_reading_it(events, cut):
    """What was given before the cut does not change by what comes after it."""
    before = played(StepClock(), events[:cut])

    assert played(StepClock(), events)[: len(before)] == before


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (bar_text(12, 375), [(12, 375, "", True)]),
        (bar_text(3, 9, "Map: "), [(3, 9, "Map", False)]),
        (bar_text(3, 9, "Training: "), [(3, 9, "Training", True)]),
        (f"{{'loss': 0.5}}{bar_text(20, 100)}", [(20, 100, "", True)]),
        (bar_text(1, 4) + bar_text(2, 4, "x "), [(1, 4, "", True), (2, 4, "x", False)]),
        ("loss 50% | 3/4", []),
        ("1100%|##| 3/4 [00:01<00:01]", []),
        ("", []),
    ],
)
def test_bars_are_found_with_what_they_count(text, found):
    """Title, place, and whether it may be the trainer's own."""
    told = list(bars(text))

    assert [(bar.n, bar.total, bar.title, bar.may_count_steps) for bar in told] == found
    assert all(text[bar.start : bar.end].endswith("]") and "%|" in text[bar.start : bar.end] for bar in told)
