"""RewardWatch against its definition, computed from all rows at once."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from rlwatch.detectors.context import (
    LIKELY,
    LUCK,
    LUCKY,
    MEDIAN_ERROR,
    TAKE_OFF,
    TAKE_OFF_ROWS,
    UNLIKE,
    VISIBLE,
    WANDERS,
    RewardWatch,
    uneven_noise_of,
)
from rlwatch.stats import mad, median

LEVELS = st.lists(st.floats(-1.0, 1.0).map(lambda v: round(v, 2)), min_size=3, max_size=80)
"""Rewards, one a step; rounded, so that ties and constant stretches come."""
SHARES, ERRORS = st.sampled_from([0.05, 0.25, 0.5]), st.sampled_from([0.5, 2.0, 5.0])


def watched(values):
    watch = RewardWatch()
    for step, value in enumerate(values):
        watch.take(step, value)
    return watch


def row_noise(values):
    """Of the rows before the last level, where there are six."""
    before = values[-60:][:-10]
    return uneven_noise_of(before if len(before) >= 6 else values[-60:])


def wander(values):
    """Of the changes between levels that share no row, without the newest of them."""
    before = [median(values[max(0, i - 9) : i + 1]) for i in range(2, len(values), 10)][:-1]
    jumps = [b - a for a, b in pairwise(before)]
    return mad(jumps) / math.sqrt(2.0) if len(before) >= 4 else 0.0


def survived(values):
    """The deepest fall below the best so far that was halved again, of all levels there were."""
    deepest = kept = 0.0
    for end in range(3, len(values) + 1):
        now, _, best = levels(values[:end])
        fall = max(best - now, 0.0)
        deepest = max(deepest, fall)
        if fall <= deepest / 2.0:
            kept, deepest = max(kept, deepest), fall
    return kept


def levels(values):
    """(now, start, best) by definition: medians of ten rows, of the first three, and the highest of six rows or more."""
    held = [median(values[max(0, i - 9) : i + 1]) for i in range(5, len(values))]
    start = median(values[:3])
    return median(values[-10:]), start, max(start, values[0] - LUCK * row_noise(values), *held)


@given(LEVELS)
def test_the_levels_are_those_of_all_rows(values):
    """Now, start, best and noise, in whichever order and however often they are asked for."""
    watch = watched(values)

    assert (watch.now, watch.start, watch.best) == levels(values)
    assert watch.noise == row_noise(values)
    assert watch.best == levels(values)[2]


def by_chance(values, best, now):
    """Chance of as many low rows, since the last high one or the one before it, if rows are as since the first high."""
    low = [value < (best + now) / 2.0 for value in values]
    end = max((i + 1 for i, each in enumerate(low) if each), default=0)
    high = [i for i in range(end) if not low[i]]
    chances = []
    for last in high[-2:]:
        count, rows = sum(low[high[0] : last]), last + 1 - high[0]
        share = count / rows if rows >= 6 else (count + 0.5) / (rows + 1)
        chances.append(binom.sf(sum(low[last + 1 : end]) - 1, end - last - 1, share))
    return min(chances, default=0.0)


@given(LEVELS, SHARES, ERRORS, st.floats(-1.0, 1.0))
def test_a_fall_is_beyond_a_share_noise_what_is_visible_and_luck(values, share, errors, value):
    """All bounds count for the level, all but the last for a single row."""
    watch, (now, start, best) = watched(values), levels(values)
    noise, visible = row_noise(values), VISIBLE * (max(values) - min(values))
    error = MEDIAN_ERROR * noise / math.sqrt(min(len(values), 10))

    assert watch.fallen(share, errors) == (
        by_chance(values[-60:], best, now) <= LUCKY
        and best - now
        > max(
            share * max(abs(best), best - start),
            errors * error,
            visible,
            WANDERS * wander(values),
            UNLIKE * survived(values),
        )
    )
    assert watch.low(value, share) == (best - value > max(share * abs(best), 2.0 * noise, visible))


@given(LEVELS)
def test_a_rise_is_beyond_a_tenth_noise_and_what_is_visible(values):
    """Four standard errors: the start is no maximum."""
    now, start, _ = levels(values)
    error = MEDIAN_ERROR * row_noise(values) / math.sqrt(min(len(values), 10))
    visible = VISIBLE * (max(values) - min(values))

    assert watched(values).risen() == (
        now - start > max(0.1 * abs(start), 4.0 * error, visible, WANDERS * wander(values))
    )


@given(LEVELS)
def test_a_take_off_is_a_third_of_the_range_within_25_rows_and_beyond_noise(values):
    """The level of ten rows against that of the ten before the last 25; before there are 35, nobody knows."""
    error = MEDIAN_ERROR * row_noise(values) / math.sqrt(min(len(values), 10))
    known = len(values) >= TAKE_OFF_ROWS + 10
    before = median(values[-TAKE_OFF_ROWS - 10 : -TAKE_OFF_ROWS]) if known else math.inf
    gained = levels(values)[0] - before

    assert watched(values).taking_off() == (
        gained
        > max(
            LIKELY * error,
            WANDERS * wander(values),
            TAKE_OFF * (max(values) - min(values)),
            VISIBLE * (max(values) - min(values)),
        )
    )


def test_a_run_takes_off_while_it_learns_and_no_longer_when_it_has_learnt():
    """Sixty rows from nothing to two in three: from the first third of them until twenty after."""
    watch, told = RewardWatch(), []
    for step in range(220):
        watch.take(step, 0.02 + 0.6 * min(max((step - 60) / 60, 0.0), 1.0))
        told.append(watch.taking_off())

    assert [step for step in range(220) if told[step]] == list(range(told.index(True), 220 - told[::-1].index(True)))
    assert 60 < told.index(True) < 80
    assert 120 < 220 - told[::-1].index(True) < 150
