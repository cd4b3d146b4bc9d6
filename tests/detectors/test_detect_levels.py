"""Levels that are none: a gradient of nothing, and KL below it."""

import pytest
from exact_runs import alarms, always, exact, then, when

from rlwatch.detectors.optimisation.grad_spike import GradSpike
from rlwatch.detectors.trust_region.kl_reference import KLReference


@pytest.mark.parametrize("rest", [0.0, 5e-4])
@pytest.mark.parametrize("shared", [1, 4])
def test_rows_that_teach_next_to_a_start_without_gradient_are_no_explosion(rest, shared):
    """Dead from the start, with rare batches in which one answer differs: these have an ordinary norm.

    ``shared``: the updates of a batch, of which only the first logs how its groups did.
    """
    teaches = lambda step: (step // 4) % 5 == 3 or 60 <= step < 100  # noqa: E731
    rows = exact(
        {
            "optim/grad_norm": lambda s: 0.5 + 0.1 * (s % 2) if teaches(s) else rest,
            "reward/zero_std_frac": lambda s: (0.0 if teaches(s) else 1.0) if s % shared == 0 else None,
            "reward/mean": always(-0.1),
        },
        length=200,
    )

    assert "critical" not in when(GradSpike(), rows)


def test_a_gradient_that_is_far_above_that_of_rows_that_taught_is_still_critical():
    """Thirty times, though most of the first rows taught nothing."""
    rows = exact(
        {
            "optim/grad_norm": lambda s: 15.0 if s >= 60 else (0.5 if s % 3 == 0 else 5e-4),
            "reward/zero_std_frac": lambda s: float(s % 3 != 0 and s < 60),
        },
        length=100,
    )

    assert alarms(GradSpike(), rows)["critical"].onset_step == 60


def test_a_negative_estimate_of_kl_is_told_as_negative():
    """As k1 can be, or log-probs that were taken the other way round."""
    rows = exact({"policy/kl_ref": then(-0.02, -2.0, 60), "reward/mean": always(0.3)}, length=100)
    message = alarms(KLReference(), rows)["warning"].message

    assert "negative, -2 nats/token" in message
    assert "grew" not in message
