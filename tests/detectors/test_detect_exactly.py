"""Exactly at a limit, with numbers that a computer holds exactly: it is said of each limit on which side it lies."""

import math

import pytest
from exact_runs import always, exact, then, worst

from rlwatch.detectors.exploration.diversity_decay import DiversityDecay
from rlwatch.detectors.exploration.entropy import EntropyCollapse, EntropyExplosion
from rlwatch.detectors.exploration.entropy_sides import EntropySides
from rlwatch.detectors.mismatch.mismatch_growth import MismatchLevel
from rlwatch.detectors.mismatch.mismatch_mask import MismatchMask
from rlwatch.detectors.optimisation.grad_spike import GradSpike
from rlwatch.detectors.reward.reward_drop import RewardDrop
from rlwatch.detectors.reward.silent_groups import NoSignal, ZeroVariance
from rlwatch.detectors.rises import MismatchTail, Staleness
from rlwatch.detectors.rollouts.broken_output import Id0Run
from rlwatch.detectors.rollouts.lengths import LengthCollapse, LengthExplosion
from rlwatch.detectors.rollouts.token_ids import MaskLeakage
from rlwatch.detectors.system import ThroughputDrop
from rlwatch.detectors.trust_region.kl_estimator import KLEstimator
from rlwatch.detectors.trust_region.kl_reference import KLReference

FALLING = then(1.0, 0.25, 40)
"""A reward that is lost."""
RISING = lambda s: min(0.25 + s / 64, 1.25)  # noqa: E731
"""A reward that pays for much."""


def kl(before, after, **more):
    return {"policy/kl_ref": then(before, after, 40)} | more


def entropy(after, **more):
    return {"policy/entropy": then(1.0, after, 40)} | more


def sides(positive, negative):
    return {"policy/entropy_pos": then(1.0, positive, 40), "policy/entropy_neg": then(1.0, negative, 40)}


def passes(one, many, before=(0.25, 0.5)):
    """pass@1 and pass@8."""
    return {"reward/pass_at_1": then(before[0], one, 40), "reward/pass_at_8": then(before[1], many, 40)}


REWARD = "reward/mean"
CASES = {
    "kl: a level of 0.3 is no drift": (KLReference, kl(0.0625, 0.3), None, 60),
    "kl: nor is a factor of three": (KLReference, kl(0.125, 0.375), None, 60),
    "kl: one nat is not heavy": (KLReference, kl(0.125, 1.0), "warning"),
    "kl: from a tenth it only began": (KLReference, kl(0.1, 1.5), "warning"),
    "kl: twenty nats are not huge": (KLReference, kl(0.0625, 20.0), "warning"),
    "kl: flat at 0.3 is notable": (KLReference, kl(0.3, 0.3), "info"),
    "kl: half of the loss is heavy": (
        KLReference,
        kl(0.5, 0.5) | {"policy/kl_coef": always(0.5), "loss/policy": always(0.25)},
        "warning",
    ),
    "kl: a tenth of garbled output is no veto": (KLReference, kl(0.5, 0.5) | {"text/garbled": always(0.1)}, "info"),
    "kl: more is one": (KLReference, kl(0.5, 0.5) | {"text/garbled": always(0.11)}, None),
    "estimators: half of the larger": (
        KLEstimator,
        {"policy/kl_ref_k1": always(0.125), "policy/kl_ref_k3": always(0.25)},
        "info",
    ),
    "estimators: a twentieth of a nat": (
        KLEstimator,
        {"policy/kl_ref_k1": always(0.0), "policy/kl_ref_k3": always(0.05)},
        "warning",
    ),
    "estimators: one level": (
        KLEstimator,
        {"policy/kl_ref_k1": always(0.25), "policy/kl_ref_k3": always(0.25)},
        None,
    ),
    "estimators: three times the other": (
        KLEstimator,
        {"policy/kl_ref_k1": always(0.125), "policy/kl_ref_k3": always(0.375)},
        "warning",
    ),
    "entropy: 0.15 of it is not low enough": (EntropyCollapse, entropy(0.15), None),
    "entropy: nor 0.02 for critical": (EntropyCollapse, entropy(0.02), "warning"),
    "entropy: nor 0.4 beside a lost reward": (EntropyCollapse, entropy(0.4) | {REWARD: FALLING}, None),
    "entropy: nor 0.2 for critical there": (EntropyCollapse, entropy(0.2) | {REWARD: FALLING}, "warning"),
    "entropy: nor 0.05 where it was paid for": (EntropyCollapse, entropy(0.05) | {REWARD: RISING}, None),
    "entropy: 1.5 of it beside a lost reward": (EntropyExplosion, entropy(1.5) | {REWARD: FALLING}, None),
    "entropy: twice for critical": (EntropyExplosion, entropy(2.0) | {REWARD: FALLING}, "warning"),
    "entropy: three times by itself": (EntropyExplosion, entropy(3.0) | {REWARD: always(0.5)}, None),
    "entropy: seven tenths of noise": (
        EntropyExplosion,
        {"policy/entropy": then(3.0, 0.7 * math.log(1000), 40), "policy/vocab_size": always(1000.0)},
        None,
    ),
    "entropy: near noise, which it has not risen to": (
        EntropyExplosion,
        entropy(1.3) | {"policy/vocab_size": always(4.0)},
        None,
    ),
    "sides: twice, for nothing": (EntropySides, sides(1.0, 2.0) | {REWARD: always(0.5)}, "warning"),
    "sides: half as much again": (EntropySides, sides(1.0, 1.5), "info"),
    "sides: three quarters of the growth": (EntropySides, sides(1.25, 1.75), "info"),
    "sides: 0.15 of the positive, 0.4 of the negative": (EntropySides, sides(0.15, 0.4), "warning"),
    "gradient: six times the usual": (
        GradSpike,
        {"optim/grad_norm": lambda s: 6.0 if s == 40 else 1.0},
        None,
    ),
    "gradient: ten times the start": (GradSpike, {"optim/grad_norm": then(1.0, 10.0, 20)}, "warning"),
    "reward: a quarter lost": (RewardDrop, {REWARD: then(1.0, 0.75, 40)}, None),
    "reward: half lost for critical": (RewardDrop, {REWARD: then(1.0, 0.5, 40)}, "warning", 80),
    "reward: a third lost for critical in the end": (RewardDrop, {REWARD: then(1.5, 1.0, 40)}, "warning"),
    "groups: a fifth more that agree": (ZeroVariance, {"reward/zero_std_frac": then(0.55, 0.75, 40)}, "warning"),
    "groups: a third of those that differed": (ZeroVariance, {"reward/effective_groups": then(48.0, 16.0, 40)}, None),
    "groups: two thirds of them right": (
        ZeroVariance,
        {"reward/zero_std_right_frac": then(0.125, 0.5, 40), "reward/zero_std_wrong_frac": then(0.125, 0.25, 40)},
        "info",
    ),
    "groups: half of them right": (
        ZeroVariance,
        {"reward/zero_std_right_frac": then(0.125, 0.375, 40), "reward/zero_std_wrong_frac": then(0.125, 0.375, 40)},
        "warning",
    ),
    "signal: nine tenths silent": (
        NoSignal,
        {"reward/zero_std_frac": then(0.25, 0.9, 40), REWARD: always(0.5)},
        "critical",
    ),
    "signal: three quarters and a twentieth": (
        NoSignal,
        {
            "reward/zero_std_frac": then(0.25, 0.75, 40),
            "optim/grad_norm": then(1.0, 0.05, 40),
            REWARD: always(0.5),
        },
        "critical",
    ),
    "signal: batches that never differed": (
        NoSignal,
        {"reward/zero_std_frac": then(0.25, 0.8, 40), REWARD: always(0.5)},
        None,
    ),
    "tail: at the floor": (MismatchTail, {"mismatch/chi2": then(0.0625, 0.5, 40)}, "warning"),
    "tail: at the factor": (MismatchTail, {"mismatch/chi2": then(0.25, 1.0, 40)}, "warning"),
    "staleness: at the floor": (Staleness, {"staleness/max": then(2.0, 8.0, 40)}, "warning"),
    "level: at the band": (MismatchLevel, {"mismatch/k3": always(0.1)}, "warning"),
    "level: close to it from the start": (MismatchLevel, {"mismatch/k3": then(0.05, 0.2, 40)}, "warning"),
    "mask: six tenths and five quarters": (
        MismatchMask,
        {"mismatch/icepop_masked": then(2.0**-9, 0.6 * 2.0**-9, 40), "mismatch/k3": then(0.5, 0.625, 40)},
        "warning",
    ),
    "mask: the least share": (
        MismatchMask,
        {"mismatch/icepop_masked": then(1e-4, 1e-5, 40), "mismatch/k3": then(0.5, 1.0, 40)},
        "warning",
    ),
    "id 0: a hundredth": (Id0Run, {"text/id0_frac": then(0.0, 0.01, 40)}, "warning"),
    "id 0: half": (Id0Run, {"text/id0_frac": then(0.0, 0.5, 40)}, "critical"),
    "leak: a thousandth": (MaskLeakage, {"tokens/environment_leak": then(0.0, 1e-3, 40)}, "warning"),
    "length: 0.95 cut": (LengthExplosion, {"len/clipped": then(0.25, 0.95, 40)}, "critical"),
    "length: 0.3 of the start": (LengthCollapse, {"len/mean": then(1000.0, 300.0, 40)}, None),
    "length: a tenth of the start": (LengthCollapse, {"len/mean": then(1000.0, 100.0, 40)}, "warning"),
    "length: half of them empty": (LengthCollapse, {"len/empty": then(0.0, 0.5, 40)}, "critical"),
    "answers: a tenth lost": (DiversityDecay, passes(0.0, 0.0, before=(0.0, 0.1)), "warning"),
    "answers: half of the gap": (DiversityDecay, passes(0.25, 0.5, before=(0.25, 0.75)), "warning"),
    "answers: half of the distinct ones": (
        DiversityDecay,
        {"reward/unique_answers": then(0.5, 0.25, 40)},
        "warning",
    ),
    "steps: twice as slow": (ThroughputDrop, {"time/step": then(2.0, 4.0, 40)}, "warning"),
    "steps: longer by a quarter per token": (
        ThroughputDrop,
        {"time/step": then(2.0, 5.0, 40), "len/mean": then(100.0, 200.0, 40)},
        "warning",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_limit_lies_on_the_side_it_is_documented_to(case):
    """'From' it on or 'beyond' it: what the words beside each limit say."""
    detector, curves, said, *length = CASES[case]

    assert worst(detector(), exact(curves, length=length[0] if length else 110)) == said
