"""Which step a row of wandb belongs to: the order of precedence, and wandb's own counter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.integrations.wandb import WandbStepAxis


def steps_of(*rows, declare=(), step_metric=None):
    """The step of each row, as a mirror decides it; a row is a dict, or (dict, step)."""
    steps = WandbStepAxis(step_metric)
    for axis in declare:
        steps.declare(axis)
    out = []
    for row, step in (r if isinstance(r, tuple) else (r, None) for r in rows):
        index = steps.count(step, None)
        stated = steps.stated(row, step)
        out.append(steps.assumed(index) if stated is None else stated)
    return out


def test_without_any_hint_a_row_is_at_wandbs_own_step():
    """Rows are counted from 0."""
    assert steps_of({"a": 1}, {"a": 2}, {"a": 3}) == [0, 1, 2]


@pytest.mark.parametrize("axis", ["train/global_step", "trainer/global_step", "training/global_step"])
def test_a_well_known_global_step_wins_over_the_count_and_over_step(axis):
    """wandb's step counts rows, and a training may log several rows at one global step."""
    assert steps_of({axis: 10}, {axis: 20.0}, ({axis: 30}, 99)) == [10, 20, 30]


def test_a_row_without_the_axis_is_at_its_last_value():
    """As wandb's step_sync fills it in: a checkpoint's or a table's row between two steps."""
    assert steps_of({"a": 1}, {"train/global_step": 10}, {"b": 1}, {"train/global_step": 20}) == [0, 10, 10, 20]


def test_a_declared_axis_counts_after_the_well_known_ones():
    """define_metric("rollout/*", step_metric="rollout/step") before anything better is seen."""
    rows = {"rollout/step": 4}, {"rollout/step": 5, "train/global_step": 40}, {"rollout/step": 6}

    assert steps_of(*rows, declare=["rollout/step"]) == [4, 40, 40]


def test_declared_axes_count_in_order_of_declaration():
    """And an undeclared name never."""
    assert steps_of({"b": 7, "a": 3, "c": 9}, declare=["a", "b"]) == [3]
    assert steps_of({"epoch": 7}) == [0]


def test_a_fraction_of_an_epoch_is_no_step():
    """Hugging Face declares nothing of the kind, others do."""
    assert steps_of({"epoch": 0.5}, {"epoch": 1.0}, {"epoch": 1.5}, declare=["epoch"]) == [0, 1, 1]


def test_the_argument_step_wins_over_a_bare_global_step():
    """A bare global_step often counts frames or tokens."""
    assert steps_of(({"global_step": 512}, 4), {"global_step": 640}) == [4, 640]


def test_the_argument_step_wins_over_the_last_value_of_an_axis():
    """What is said of this row beats what was said of another."""
    assert steps_of({"train/global_step": 10}, ({"val/acc": 0.5}, 12)) == [10, 12]


def test_the_metric_the_user_names_wins_over_all():
    """``step_metric=``; rows without it are at its last value."""
    rows = ({"mine": 3, "train/global_step": 9}, 1), {"train/global_step": 10}

    assert steps_of(*rows, step_metric="mine") == [3, 3]


@given(st.lists(st.tuples(st.none() | st.integers(0, 30), st.none() | st.booleans()), max_size=40))
def test_the_counter_never_goes_back_and_moves_on_with_each_committed_row(calls):
    """wandb's rule: a row is committed by commit=True, or by neither step nor commit."""
    steps, last = WandbStepAxis(), 0
    for step, commit in calls:
        index = steps.count(step, commit)
        expected = last if step is None else step
        after = max(last, expected) + (1 if commit or (step is None and commit is None) else 0)

        assert (index, steps.counter) == (expected, after)
        last = after


def test_the_counter_catches_up_with_wandbs():
    """Rows logged before the mirror was there, or in a resumed run."""
    steps = WandbStepAxis()

    assert steps.count(None, None, own=500) == 500
    assert steps.count(None, None, own=0) == 501
