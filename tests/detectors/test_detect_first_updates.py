"""A policy that its first updates broke, which no later baseline shows."""

import pytest
from exact_runs import alarms, always, exact, swinging, when

from rlwatch.detectors.trust_region.first_updates import FirstUpdates


def then(first, later, noise=0.0):
    """``first`` in the first row, and about ``later`` from the second on."""
    swings = swinging(later, later, 0, noise)
    return lambda step: first if step == 0 else swings(step)


BROKEN = {"reward/mean": then(0.64, 0.35, 0.02), "policy/kl_ref": then(0.0, 0.7)}


@pytest.mark.parametrize("every", [1, 5, 20])
def test_a_policy_that_is_far_away_at_once_and_pays_less_is_broken_from_the_second_row(every):
    """The seventh row settles it, at any cadence; it holds for as long as the reward is away."""
    found = alarms(FirstUpdates(), exact(BROKEN, length=60, every=every))

    assert set(found) == {"critical"}
    assert (found["critical"].step, found["critical"].onset_step) == (6 * every, every)
    assert found["critical"].kind == "first_updates"
    assert "from 0.64 to 0.3" in found["critical"].message


def test_it_is_over_when_the_reward_is_back():
    """Within a tenth of what the first row paid."""
    detector, back = FirstUpdates(), BROKEN | {"reward/mean": lambda step: 0.35 if 0 < step < 30 else 0.62}
    held = [bool(detector.update(row)) for row in exact(back, length=60)]

    assert held[6:30] == [True] * 24
    assert not any(held[40:])


@pytest.mark.parametrize(
    "run",
    [
        BROKEN | {"reward/mean": then(0.64, 0.55, 0.02)},
        BROKEN | {"reward/mean": then(0.64, 0.4, 0.3)},
        BROKEN | {"reward/mean": lambda step: 0.3 + 0.01 * step},
        BROKEN | {"policy/kl_ref": then(0.0, 0.05)},
        BROKEN | {"policy/kl_ref": always(0.7)},
        BROKEN
        | {"reward/mean": lambda step: 0.64 if step < 20 else 0.3, "policy/kl_ref": lambda step: 0.7 * (step > 19)},
        {"reward/mean": BROKEN["reward/mean"]},
    ],
    ids=["pays nearly as much", "noisy", "learns", "near", "far from the first row on", "later", "no KL"],
)
def test_no_other_run_is_called_broken_by_its_first_updates(run):
    """Each lacks one of the signs."""
    assert when(FirstUpdates(), exact(run, length=80)) == {}
