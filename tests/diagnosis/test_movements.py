"""What moved first: a reward that fell by itself, and updates that grew; and no guess without its evidence."""

import math
import random

import pytest
from found import WARNING, found

from rlwatch.diagnosis import ChangeSource, Confidence, KnobTracker, Nature, diagnose

FALL = [found("reward_drop", 100), found("no_signal", 112)]
MEASURED = ("reward/mean", "policy/entropy", "policy/kl_ref", "optim/grad_norm", "len/mean")


def rows(changes, until=130, seed=0, drop=()):
    """A calm run, with ``changes``: metric -> function of the step, from step 100 on."""
    draw = random.Random(seed)
    tracker = KnobTracker()
    for step in range(until):
        row = {
            "reward/mean": 0.6 + draw.gauss(0, 0.02), "policy/entropy": 1.2 + draw.gauss(0, 0.03),
            "policy/kl_ref": 0.02 + draw.gauss(0, 0.001), "optim/grad_norm": 0.5 + draw.gauss(0, 0.05),
            "ratio/clipfrac": 0.01, "len/mean": 200 + draw.gauss(0, 8),
        }  # fmt: skip
        if step >= 100:
            row |= {metric: change(step) for metric, change in changes.items()}
        tracker.update(step, {metric: value for metric, value in row.items() if metric not in drop})
    return tracker.turns


def moved(turns):
    return [(turn.name, turn.step) for turn in turns if turn.source is ChangeSource.MOVED]


def test_a_calm_run_moves_nothing_and_noise_is_calm():
    """Nor do values that are no number."""
    assert moved(rows({})) == []
    assert moved(rows({}, seed=7, until=600)) == []
    assert moved(rows({"policy/entropy": lambda step: math.nan})) == []


def test_a_movement_is_dated_to_its_row_and_a_new_level_is_one_movement():
    """One row alone is none."""
    assert moved(rows({"policy/entropy": lambda step: 3.0}, until=400)) == [("policy/entropy", 100)]
    assert moved(rows({"policy/entropy": lambda step: 3.0 if step == 100 else 1.2})) == []


def test_a_reward_that_falls_while_the_policy_stands_still_is_looked_for_outside_the_policy():
    """A tool that died, a verifier that says no: with what was measured of the policy."""
    told = diagnose(FALL, turns=rows({"reward/mean": lambda step: 0.02}), measured=MEASURED)

    cause = told.causes[0]
    assert (cause.knob, cause.onset_step, cause.sure) == ("environment", 100, Confidence.PLAUSIBLE)
    assert cause.title.startswith("Fault outside the policy (reward 0.599 to 0.02")
    assert "KL to the reference, entropy, gradient norm, response length" in cause.why
    assert [action.id for action in cause.actions][:2] == ["check-verifier", "read-completions"]
    assert told.nature is Nature.CAUSE


@pytest.mark.parametrize(
    "changes",
    [
        {"reward/mean": lambda step: 0.02, "policy/entropy": lambda step: 0.1},
        {"reward/mean": lambda step: 0.02, "optim/grad_norm": lambda step: 30.0},
        {"policy/entropy": lambda step: 1.2},
    ],
    ids=["the entropy fell with it", "the gradient burst with it", "the reward of the rows did not fall"],
)
def test_where_the_policy_moved_too_nothing_outside_is_blamed(changes):
    """Nor where no row shows a fall."""
    told = diagnose(FALL, turns=rows(changes), measured=MEASURED)

    assert "environment" not in {cause.knob for cause in told.causes}


def test_what_is_not_measured_does_not_stand_still():
    """A log of a reward alone says nothing of the policy; nor is the policy clear where it was found to change."""
    lone = rows({"reward/mean": lambda step: 0.02}, drop=MEASURED[1:])
    full = rows({"reward/mean": lambda step: 0.02})

    assert diagnose(FALL, turns=lone, measured=["reward/mean"]).nature is not Nature.CAUSE
    beside = [*FALL, found("length_collapse", 98, WARNING)]
    assert "environment" not in {cause.knob for cause in diagnose(beside, turns=full, measured=MEASURED).causes}


def test_updates_that_grew_before_the_failure_are_named_with_their_numbers():
    """Gradient and clipping: whichever knob made them so."""
    grown = rows({"optim/grad_norm": lambda step: 12.0, "ratio/clipfrac": lambda step: 0.3})
    told = diagnose([found("reward_drop", 110)], turns=grown, measured=MEASURED)

    cause = told.causes[0]
    assert (cause.knob, cause.onset_step, cause.sure) == ("update_size", 100, Confidence.PLAUSIBLE)
    assert "gradient norm 0.488 to 12" in cause.title
    assert "clip fraction 0.01 to 0.3" in cause.title
    assert "lower-lr" in [action.id for action in cause.actions]


def test_one_side_alone_or_one_that_grew_afterwards_is_no_evidence_of_large_updates():
    """A gradient that rises with nothing else; and what burst when all was lost."""
    gradient = rows({"optim/grad_norm": lambda step: 12.0})
    both = rows({"optim/grad_norm": lambda step: 12.0, "ratio/clipfrac": lambda step: 0.3})

    for told in (
        diagnose([found("reward_drop", 110)], turns=gradient),
        diagnose([found("reward_drop", 60)], turns=both),
    ):
        assert "update_size" not in {cause.knob for cause in told.causes}


def test_a_clip_fraction_that_is_large_from_the_first_rows_explains_a_gradient_that_bursts():
    """Sixteen updates of one batch: by itself it is no cause."""
    tracker = KnobTracker()
    for step in range(60):
        tracker.update(step, {"ratio/clipfrac": 0.2, "optim/grad_norm": 0.5 if step < 30 else 60.0})
    calm = KnobTracker()
    for step in range(60):
        calm.update(step, {"ratio/clipfrac": 0.2, "optim/grad_norm": 0.5})

    first = diagnose([found("reward_drop", 34)], turns=tracker.turns).causes[0]
    assert (first.knob, first.onset_step) == ("update_size", 30)
    assert "clip fraction 0.2 from the first rows" in first.title
    assert diagnose([found("reward_drop", 34)], turns=calm.turns).nature is not Nature.CAUSE
