"""A level against its own start and best: what noise and trends do to it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.detectors.context import Peak
from rlwatch.detectors.reward.reward_hacking import Proxy, Signs, held_out
from rlwatch.records import ClosedStep


def fed(values, every=1):
    change = Peak()
    for i, value in enumerate(values):
        change.update(i * every, value)
    return change


def test_nothing_is_known_before_the_start_is():
    """Twenty rows, or five over fifty steps."""
    young = fed([0.5] * 19)

    assert (young.start, young.best, young.gain, young.fallen, young.share) == (None, None, 0.0, 0.0, 1.0)
    assert (young.moved, young.dropped) == (False, False)
    assert fed([0.5] * 20).start == 0.5
    assert fed([0.5] * 6, every=10).start == 0.5


def test_a_step_is_measured_from_start_and_from_best():
    """0.4, then 0.8, then 0.6."""
    change = fed([0.4] * 30 + [0.8] * 30 + [0.6] * 30)

    assert (change.start, change.best, change.now) == (0.4, 0.8, 0.6)
    assert change.gain == pytest.approx(0.2)
    assert change.fallen == pytest.approx(0.2)
    assert change.share == pytest.approx(1.5)
    assert change.moved
    assert change.dropped


def test_a_start_at_nothing_has_no_shares():
    """Division by it would say anything."""
    assert fed([0.0] * 30 + [0.5] * 30).share == 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=120))
def test_its_numbers_are_finite_and_keep_their_order(values):
    """The best is no lower than start and now; a fall is no rise."""
    change = fed(values)

    assert math.isfinite(change.gain)
    assert math.isfinite(change.fallen)
    assert change.fallen >= 0.0
    if change.start is not None:
        assert change.best >= change.start
        assert change.fallen >= -change.gain or change.fallen == pytest.approx(-change.gain)


@settings(max_examples=40, deadline=None)
@given(st.integers(25, 100), st.floats(-1e3, 1e3))
def test_one_row_is_no_change(at, spike):
    """Whatever it is."""
    change = fed([0.5] * at + [spike] + [0.5] * 10)

    assert (change.now, change.gain, change.fallen, change.moved) == (0.5, 0.0, 0.0, False)


@pytest.mark.parametrize(
    ("factor", "floor", "before", "after", "holds"),
    [
        (3.0, 0.1, 0.02, 0.2, True),
        (3.0, 0.1, 0.02, 0.08, False),
        (3.0, 0.1, 0.1, 0.2, False),
        (0.25, 0.0, 400.0, 90.0, True),
        (0.25, 0.0, 400.0, 120.0, False),
        (0.25, 500.0, 400.0, 90.0, False),
    ],
)
def test_a_proxy_needs_its_factor_and_its_floor(factor, floor, before, after, holds):
    """Below one a factor means a fall."""
    assert Proxy("m", factor, floor, 1, "says").holds(fed([before] * 40 + [after] * 40)) is holds


def test_held_out_scores_are_known_by_name_and_few_are_followed():
    """Spreads are no scores; eight sets at most."""
    row = ClosedStep(5, {"val/score": 0.5, "val-core/a/mean@4": 0.4, "val-core/a/best@4/std": 0.1, "reward/mean": 0.3})
    signs = Signs()
    for step in range(40):
        signs.update(ClosedStep(step, {f"val-core/{i}/mean": 0.9 if step < 20 else 0.1 for i in range(20)}), 0.1 * step)

    assert held_out(row) == ["val/score", "val-core/a/mean@4"]
    assert [sign.metric for sign in signs.now()] == [f"val-core/{i}/mean" for i in range(8)]
