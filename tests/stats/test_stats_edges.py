"""Statistics at their edges: the row that freezes a baseline, the value that is far, the miss that ends a hold."""

import math

import pytest

from rlwatch.stats import Baseline, Cusum, Hold, Window, mad, quantile, theil_sen


def fed(stat, values, start=0, gap=1):
    for i, value in enumerate(values):
        stat.update(start + i * gap, value)
    return stat


@pytest.mark.parametrize(("rows", "done"), [(19, False), (20, True)])
def test_a_baseline_is_frozen_by_its_twentieth_row(rows, done):
    """In a dense log, whatever step it starts at."""
    assert fed(Baseline(), [1.0] * rows, start=5000).done is done


@pytest.mark.parametrize(("rows", "gap", "done"), [(5, 12, False), (5, 13, True), (4, 100, False), (6, 10, True)])
def test_or_by_the_fifth_that_is_fifty_steps_on(rows, gap, done):
    """Steps are counted from its first row."""
    assert fed(Baseline(), [1.0] * rows, start=7000, gap=gap).done is done


def test_a_frozen_baseline_learns_nothing_more():
    """Not even by pushing its oldest rows out."""
    baseline = fed(Baseline(), [1.0] * 20 + [5.0] * 30)

    assert (baseline.get(), baseline.first, baseline.quarantined) == (1.0, 1.0, 0)


@pytest.mark.parametrize(("value", "quarantined"), [(9.9, 0), (10.1, 1), (-5.9, 0), (-6.1, 1)])
def test_far_is_two_widths_between_the_deciles_outside_them(value, quarantined):
    """Of 0, 0.5, ... 4 the deciles are 0.4 and 3.6, their distance 3.2: from below -6 to above 10."""
    assert fed(Baseline(), [*(0.5 * i for i in range(9)), value]).quarantined == quarantined


@pytest.mark.parametrize(("rows", "kept"), [(7, True), (8, False)])
def test_nothing_is_far_before_eight_rows(rows, kept):
    """The spread is not known yet."""
    values = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.0][:rows]

    assert (fed(Baseline(), [*values, 99.0]).quarantined == 0) is kept


def test_without_any_spread_nothing_is_far_but_a_floor_decides():
    """A constant says nothing about its noise."""
    assert fed(Baseline(), [1.0] * 10 + [9.0]).quarantined == 0
    assert fed(Baseline(floor=0.5), [1.0] * 10 + [1.9, 2.1]).quarantined == 1


def test_the_spread_of_a_baseline_is_never_below_its_floor():
    """Not before it knows anything either."""
    assert (Baseline(floor=0.3).spread, Baseline().spread) == (0.3, 0.0)
    assert fed(Baseline(floor=0.3), [1.0] * 5).spread == 0.3
    assert fed(Baseline(floor=0.3), [1.0, 3.0, 5.0]).spread == pytest.approx(2 * 1.4826)


def test_a_baseline_speaks_from_its_third_row():
    """The first three stay apart from the level."""
    baseline = fed(Baseline(), [3.0, 1.0, 2.0])
    third = (baseline.ready, baseline.get(), baseline.first, baseline.upper(), baseline.upper(0.0))
    fed(baseline, [10.0, 10.0], start=3)

    assert third == (True, 2.0, 2.0, 2.5, 1.0)
    assert (baseline.get(), baseline.first) == (3.0, 2.0)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.1, 1.4), (0.5, 3.0), (0.9, 4.6), (1.0, 5.0)])
def test_quantiles_are_interpolated_between_neighbours(share, value):
    """Of 1 to 5, in any order; one value is every quantile of itself."""
    assert quantile([4.0, 1.0, 5.0, 3.0, 2.0], share) == pytest.approx(value)
    assert quantile([7.0], share) == 7.0


def test_deviations_may_be_taken_from_another_centre():
    """Than the median."""
    assert mad([1.0, 2.0, 3.0], center=0.0) == pytest.approx(2 * 1.4826)


def test_a_trend_is_per_step_not_per_row():
    """Rows ten steps apart."""
    assert theil_sen([0, 10, 20], [0.0, 5.0, 10.0]) == 0.5
    assert theil_sen([20, 10, 0], [10.0, 5.0, 0.0]) == 0.5


def test_a_row_adds_at_most_the_cap_less_the_drift():
    """By default three deviations less a half; the sum has a ceiling of twenty caps."""
    assert fed(Cusum(), [1e6]).get() == 2.5
    assert fed(Cusum(), [1.5]).get() == 1.0
    assert fed(Cusum(), [0.5]).get() == 0.0
    assert fed(Cusum(drift=1.0, cap=2.0), [9.0] * 1000).get() == 40.0


def test_the_change_is_dated_to_the_first_row_of_the_excursion():
    """An excursion that came to nothing is forgotten, date and all."""
    cusum = Cusum()
    dates = []
    for step, z in enumerate([0.0, 2.0, -5.0, 2.0, 2.0, math.nan, 2.0]):
        cusum.update(step, z)
        dates.append(cusum.since)

    assert dates == [None, 1, None, 3, 3, 3, 3]
    assert (cusum.get(), cusum.skipped) == (4.5, 1)


def test_what_never_began_has_not_lasted():
    """Zero rows, zero steps."""
    hold = Hold()

    assert (hold.since, hold.rows, hold.get(), hold.lasted(1)) == (None, 0, 0, False)
    assert fed(hold, [False, False]).get() == 0
    assert not hold.lasted(1)


def test_a_condition_lasts_through_its_forgiven_misses():
    """The steps of a miss count, its row does not."""
    hold = fed(Hold(forgive=1), [True, False, True, False], start=10)

    assert (hold.since, hold.rows, hold.get()) == (10, 2, 3)
    assert hold.lasted(2, 3)
    assert not hold.lasted(3)


def test_misses_are_forgiven_in_a_row_not_in_sum():
    """Each time it holds again the count starts over; one too many and all is forgotten."""
    hold = fed(Hold(forgive=1), [True, False] * 5)
    assert (hold.since, hold.rows) == (0, 5)

    fed(hold, [False], start=10)
    assert (hold.since, hold.rows, hold.get()) == (None, 0, 0)


@pytest.mark.parametrize("step", [4, 3])
def test_a_step_seen_before_begins_a_hold_anew(step):
    """A resume; misses before it are forgotten too."""
    hold = fed(Hold(forgive=1), [True, True, True, True, False])
    hold.update(step, False)
    missed = (hold.since, hold.rows)
    hold.update(step + 1, True)

    assert missed == (None, 0)
    assert (hold.since, hold.rows) == (step + 1, 1)


def test_a_cleared_hold_is_as_new():
    """Any step may follow."""
    hold = fed(Hold(forgive=1), [True, True, False])
    hold.clear()

    assert hold.state_dict() == Hold(forgive=1).state_dict()


def test_a_window_keeps_the_rows_of_its_last_steps():
    """A row exactly as old as the window is out; the last ``least`` stay however old they are."""
    window = fed(Window(rows=10, steps=5, least=2), [1.0] * 7)
    assert window.at == [2, 3, 4, 5, 6]

    fed(window, [1.0], start=100)
    assert window.at == [6, 100]


def test_a_window_never_holds_more_than_its_rows():
    """However many fall into its steps."""
    window = fed(Window(rows=4, steps=1000), [float(i) for i in range(9)])

    assert (window.values, len(window), window.get(), window.mean) == ([5.0, 6.0, 7.0, 8.0], 4, 6.5, 6.5)


def test_the_spread_of_a_window_is_that_of_its_rows():
    """Nothing when it is empty."""
    assert Window(rows=3, steps=3).spread == 0.0
    assert fed(Window(rows=9, steps=9), [1.0, 3.0, 5.0]).spread == pytest.approx(2 * 1.4826)


@pytest.mark.parametrize("step", [2, 1])
def test_a_repeated_step_replaces_what_was_there(step):
    """And all after it."""
    window = fed(Window(rows=9, steps=99), [1.0, 2.0, 3.0])
    window.update(step, 9.0)

    assert (window.at[-1], window.values[-1], len(window)) == (step, 9.0, step + 1)
