"""What a rising reward pays for, and what layer-wise clipping held, is a remark; the same without it is a warning.

Curves are small twins of healthy trainings: a loop whose answers are meant to fill their limit, a policy that learns
to repeat itself, a small model that solves sums.
"""

import math

import pytest
from exact_runs import always, exact, then, worst

from rlwatch.detectors.context import RewardWatch
from rlwatch.detectors.exploration.entropy_budget import EntropyBudget
from rlwatch.detectors.optimisation.grad_spike import GradSpike, LayerSpike
from rlwatch.detectors.rises import Repetition
from rlwatch.detectors.rollouts.lengths import LengthExplosion
from rlwatch.detectors.trust_region.kl_estimator import KLEstimator
from rlwatch.detectors.trust_region.kl_reference import KLReference
from rlwatch.records import StepRecord
from rlwatch.scanner import scan


def climb(low, high, start, end):
    """From ``low`` to ``high`` between two steps, with the noise of small batches."""

    def curve(step):
        share = min(max((step - start) / (end - start), 0.0), 1.0)
        return low + (high - low) * (share + 0.02 * ((step * 7) % 5 - 2))

    return curve


SHAPES = {
    "repetition": (Repetition, {"text/repetition": climb(0.1, 0.7, 60, 100)}),
    "answers at the limit": (LengthExplosion, {"len/clipped": climb(0.05, 0.97, 60, 100)}),
    "KL between one and two nats": (
        KLReference,
        {"policy/kl_ref": climb(0.2, 1.6, 60, 100), "policy/entropy": climb(2.2, 0.6, 60, 100)},
    ),
}
BESIDE = {
    "rises with it": (climb(0.1, 0.6, 55, 105), "info"),
    "rose before it": (climb(0.1, 0.6, 5, 25), "warning"),
    "stands still": (always(0.4), "warning"),
}


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("shape", SHAPES)
def test_only_a_reward_that_rises_with_it_pays_for_it(shape, beside, every):
    """At any distance of rows. ``critical`` is worse than a warning."""
    make, curves = SHAPES[shape]
    reward, said = BESIDE[beside]
    stretched = {name: lambda step, curve=curve: curve(step // every) for name, curve in curves.items()}
    rows = exact(stretched | {"reward/mean": lambda step: reward(step // every)}, length=160, every=every)
    found = worst(make(), rows)

    assert found == said or (said == "warning" and found == "critical")


@pytest.mark.parametrize("entropy", [{}, {"policy/entropy": always(0.4)}, {"policy/entropy": climb(1.0, 1.7, 60, 100)}])
def test_a_policy_that_moves_away_without_growing_surer_is_told_though_the_reward_rises(entropy):
    """It may have found out what its reward overlooks."""
    curves = {"policy/kl_ref": climb(0.2, 1.6, 60, 100), "reward/mean": climb(0.1, 0.6, 55, 105)} | entropy

    assert worst(KLReference(), exact(curves, length=160)) == "warning"


def test_a_rise_from_a_penalty_to_nothing_pays_for_nothing():
    """All answers came to be the limit, and none earns anything."""
    curves = {"len/clipped": climb(0.6, 0.99, 20, 60), "reward/mean": climb(-2.5, 0.0, 10, 70)}

    assert worst(LengthExplosion(), exact(curves, length=120)) == "warning"


def test_a_reward_that_rose_with_it_pays_for_it_for_good_until_it_falls():
    """However long ago that was."""
    reward, said = RewardWatch(), {}
    for step in range(600):
        reward.take(step, climb(0.1, 0.6, 20, 60)(step) if step < 500 else 0.1)
        said[step] = step >= 45 and reward.pays(40)

    assert all(said[step] for step in range(70, 500))
    assert not any(said[step] for step in range(520, 600))


def test_answers_at_the_limit_are_a_remark_where_the_reward_is_all_but_full():
    """They are right, as hardly any is wrong; where it never rose, it may not be looking at them."""
    cut = {"len/clipped": then(0.1, 0.97, 60)}
    risen, never = cut | {"reward/mean": climb(0.3, 0.95, 5, 25)}, cut | {"reward/mean": always(0.95)}

    assert worst(LengthExplosion(), exact(risen, length=120)) == "info"
    assert worst(LengthExplosion(), exact(never, length=120)) == "critical"


def test_answers_that_nearly_all_filled_the_limit_from_the_first_row_on_are_how_the_run_is_set_up():
    """From 94 % to all of them, at any reward."""
    assert worst(LengthExplosion(), exact({"len/clipped": then(0.94, 1.0, 20), "reward/mean": always(0.4)})) is None


@pytest.mark.parametrize(("usual", "said"), [(0.15, "info"), (0.02, "warning")])
def test_tokens_beyond_the_clamp_are_the_tail_of_a_large_kl(usual, said):
    """A quarter of a percent of them is much beside a small KL only."""
    curves = {"policy/kl_ref_k3": always(usual), "policy/kl_ref_saturated": then(0.0, 0.0025, 30)}

    assert worst(KLEstimator(), exact(curves), "k3_saturation") == said


def spiked(step):
    return step >= 30 and step % 10 == 0


@pytest.mark.parametrize(("clip", "said"), [(0.03, "info"), (0.5, "warning"), (None, "warning")])
def test_a_spike_that_layer_wise_clipping_took_off_is_a_remark(clip, said):
    """Again and again, too; a limit that leaves a spike holds nothing."""
    layers = {f"grad_layer/l{i}": lambda s, i=i: 0.1 + 0.01 * ((s * 3 + i) % 4) for i in range(5)}
    layers["grad_layer/l2"] = lambda s: 4.0 if spiked(s) else 0.1 + 0.01 * (s % 3)
    total = lambda s: math.sqrt(sum(curve(s) ** 2 for curve in layers.values()))  # noqa: E731
    curves = layers | {"optim/grad_norm": total}
    if clip is not None:
        curves["optim/layers_clipped"] = lambda s: float(spiked(s))
        curves["optim/clip_scale_min"] = lambda s: clip if spiked(s) else 1.0
    rows = exact(curves, length=70)

    assert (worst(GradSpike(), rows), worst(LayerSpike(), rows, "layer_spike")) == (said, said)


def test_a_budget_that_bought_a_solved_task_is_a_remark():
    """Nine tenths of the entropy for a reward of .8, and the law holds."""
    entropy = lambda s: 1.2 * math.exp(-0.03 * s)  # noqa: E731
    curves = {"policy/entropy": entropy, "reward/mean": lambda s: 1.0 - 0.2 * math.exp(entropy(s))}

    assert worst(EntropyBudget(), exact(curves, length=150)) == "info"


def test_a_tiny_policy_that_learns_a_task_whose_answers_fill_the_limit_is_healthy():
    """Everything moves at once, as the reward pays for all of it: no alarm, no cause."""
    rise = lambda low, high: climb(low, high, 30, 110)  # noqa: E731
    curves = {
        "reward/mean": rise(0.06, 0.95),
        "policy/entropy": rise(2.2, 0.15),
        "policy/kl_ref": rise(0.1, 1.7),
        "policy/kl_ref_k3": rise(0.1, 1.7),
        "policy/kl_ref_saturated": climb(0.0, 0.004, 30, 110),
        "len/clipped": rise(0.55, 0.97),
        "len/mean": rise(6.5, 7.9),
        "text/repetition": rise(0.1, 0.8),
        "optim/grad_norm": always(0.3),
    }
    rows = exact({name: lambda s, c=c: max(c(s), 0.0) for name, c in curves.items()}, length=200)
    report = scan([StepRecord(row.step, dict(row.metrics), seq=row.seq) for row in rows])

    assert report.view.headline.startswith("Healthy")
    assert report.alarms == ()
    assert report.view.diagnosis.causes == ()
