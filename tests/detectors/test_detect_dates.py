"""When each detector speaks: the onset, the first row of each severity and the last one, of a change that is plain."""

import pytest
from exact_runs import exact

from rlwatch.detectors.exploration.diversity_decay import DiversityDecay
from rlwatch.detectors.exploration.entropy import EntropyCollapse, EntropyExplosion
from rlwatch.detectors.exploration.entropy_sides import EntropySides
from rlwatch.detectors.exploration.likelihood_displacement import LikelihoodDisplacement
from rlwatch.detectors.mismatch.mismatch_growth import MismatchBlind, MismatchCorrelation, MismatchGrowth, MismatchLevel
from rlwatch.detectors.mismatch.mismatch_mask import MismatchMask
from rlwatch.detectors.optimisation.grad_spike import GradSpike
from rlwatch.detectors.optimisation.silent_freeze import SilentFreeze
from rlwatch.detectors.reward.reward_constant import RewardConstant
from rlwatch.detectors.reward.reward_drop import RewardDrop
from rlwatch.detectors.reward.reward_hacking import RewardHacking
from rlwatch.detectors.reward.silent_groups import NoSignal, ZeroVariance
from rlwatch.detectors.rises import (
    MoEImbalance,
    OffPolicyMask,
    RatioDrift,
    Repetition,
    RoutingMismatch,
    Staleness,
    WeightTail,
)
from rlwatch.detectors.rollouts.broken_output import DegenerateBatch, GarbledOutput, Id0Run
from rlwatch.detectors.rollouts.lengths import LengthCollapse, LengthExplosion, LengthSurge, LongTail
from rlwatch.detectors.rollouts.token_ids import MaskLeakage, Retokenisation
from rlwatch.detectors.system import MetricVanished, StalledSteps, ThroughputDrop
from rlwatch.detectors.trust_region.clipping import ClipBlind, ClipSaturation
from rlwatch.detectors.trust_region.kl_estimator import KLEstimator
from rlwatch.detectors.trust_region.kl_reference import KLReference
from rlwatch.detectors.trust_region.ratio_growth import RatioGrowth

CHANGE, BACK, ROWS = 60, 160, 240
"""Rows at which the levels change, at which they are again as they were, and at which the run ends."""
REWARD = "reward/mean"
LOST = {REWARD: (0.8, 0.1)}
SAME = {REWARD: (0.5, 0.5)}
RUNS = {
    "entropy lost with the reward": (EntropyCollapse, {"policy/entropy": (1.0, 0.01)} | LOST),
    "entropy lost": (EntropyCollapse, {"policy/entropy": (1.0, 0.1)} | SAME),
    "entropy tripled as the reward fell": (EntropyExplosion, {"policy/entropy": (1.0, 3.5)} | LOST),
    "entropy of the negative side": (
        EntropySides,
        {"policy/entropy_pos": (1.0, 1.0), "policy/entropy_neg": (1.0, 2.5)},
    ),
    "entropy of the positive side": (
        EntropySides,
        {"policy/entropy_pos": (1.0, 0.1), "policy/entropy_neg": (1.0, 1.0)},
    ),
    "pass@8 lost": (DiversityDecay, {"reward/pass_at_1": (0.25, 0.25), "reward/pass_at_8": (0.75, 0.4)}),
    "likelihood of right answers": (LikelihoodDisplacement, {"lld/logp_positive": (-0.5, -2.0)} | SAME),
    "estimates of KL that see nothing": (
        MismatchBlind,
        {"mismatch/k3": (1e-3, 1e-3), "mismatch/logp_absdiff_p99": (0.1, 2.0), "mismatch/prob_absdiff_max": (0.2, 0.95)}
        | LOST,
    ),
    "a largest difference that was always large": (
        MismatchBlind,
        {"mismatch/k3": (1e-3, 1e-3), "mismatch/prob_absdiff_max": (0.89, 0.95)} | LOST,
    ),
    "correlation": (MismatchCorrelation, {"mismatch/prob_corr": (0.999, 0.9)}),
    "mismatch": (MismatchGrowth, {"mismatch/k3": (1e-3, 0.2)}),
    "mismatch beyond its band": (MismatchLevel, {"mismatch/k3": (1e-3, 0.2)}),
    "a mask that goes blind": (MismatchMask, {"mismatch/icepop_masked": (2e-3, 1e-3), "mismatch/k3": (0.01, 0.02)}),
    "gradient": (GradSpike, {"optim/grad_norm": (1.0, 20.0)}),
    "skipped steps": (SilentFreeze, {"optim/step_skipped": (0.0, 1.0)}),
    "a reward that stands still": (RewardConstant, {REWARD: (lambda s: 0.5 + 0.1 * (s % 3), 0.5)}),
    "reward lost": (RewardDrop, LOST),
    "reward lost by a third": (RewardDrop, {REWARD: (0.9, 0.55)}),
    "a reward that is hacked": (
        RewardHacking,
        {REWARD: (0.2, 0.9), "text/looping_frac": (0.01, 0.6), "text/repetition": (0.1, 0.9)},
    ),
    "groups that agree": (ZeroVariance, {"reward/zero_std_frac": (0.2, 0.95)}),
    "no signal": (NoSignal, {"reward/zero_std_frac": (0.2, 1.0)} | SAME),
    "importance weights": (WeightTail, {"ratio/ess": (0.99, 0.2)}),
    "one length for all": (
        DegenerateBatch,
        {
            "len/min": (10.0, 512.0),
            "len/mean": (100.0, 512.0),
            "len/max": (400.0, 512.0),
            "len/clipped": (0.0, 1.0),
            "reward/std": (0.4, 0.0),
        },
    ),
    "garbled": (GarbledOutput, {"text/garbled": (0.001, 0.3)}),
    "token id 0": (Id0Run, {"text/id0_frac": (0.0, 0.8)}),
    "nothing left to say": (LengthCollapse, {"len/mean": (500.0, 20.0)} | LOST),
    "empty": (LengthCollapse, {"len/empty": (0.0, 0.9)}),
    "nothing left to say, with the sign of a cost": (LengthCollapse, {"len/mean": (-500.0, -20.0)} | LOST),
    "all cut": (LengthExplosion, {"len/clipped": (0.1, 1.0)}),
    "longer and longer": (LengthSurge, {"len/mean": (200.0, 900.0)} | SAME),
    "long tail": (LongTail, {"len/tail_ratio": (2.0, 9.0)}),
    "tokens of tools": (MaskLeakage, {"tokens/environment_leak": (0.0, 0.5)}),
    "encoded anew": (Retokenisation, {"text/retok_exact": (1.0, 0.5)}),
    "slow": (ThroughputDrop, {"time/step": (10.0, 40.0)}),
    "as good as standing": (StalledSteps, {"time/step": (10.0, 9000.0)}),
    "no longer logged": (MetricVanished, {"policy/entropy": (1.0, None), REWARD: (0.5, 0.5), "len/mean": (9.0, 9.0)}),
    "clipped": (ClipSaturation, {"ratio/clipfrac": (0.01, 0.5)}),
    "never clipped": (ClipBlind, {"ratio/clipfrac": (0.0, 0.0), "ratio/max": (1.0, 3.0)}),
    "estimators apart": (KLEstimator, {"policy/kl_ref_k1": (0.1, 0.1), "policy/kl_ref_k3": (0.1, 0.5)}),
    "KL that ran away": (KLReference, {"policy/kl_ref": (0.2, 2.0)} | SAME),
    "ratios of long responses": (RatioGrowth, {"ratio/log_var_growth": (1e-5, 5e-3), "len/mean": (1e3, 1e3)}),
    "fewer tokens a second": (ThroughputDrop, {"time/throughput": (1000.0, 250.0), "time/step": (10.0, 40.0)}),
    "less to do": (ThroughputDrop, {"time/throughput": (1000.0, 250.0), "time/step": (10.0, 10.0)}),
    "longer for longer responses": (ThroughputDrop, {"time/step": (10.0, 40.0), "len/mean": (100.0, 400.0)}),
    "few groups with a signal": (ZeroVariance, {"reward/effective_groups": (48.0, 8.0)}),
    "groups that are all right": (
        ZeroVariance,
        {"reward/zero_std_right_frac": (0.1, 0.7), "reward/zero_std_wrong_frac": (0.1, 0.2)},
    ),
    "a gradient of nothing": (NoSignal, {"optim/grad_norm": (1.0, 0.0)} | SAME),
    "solved": (NoSignal, {"reward/zero_std_frac": (0.2, 1.0), REWARD: (0.5, 1.0)}),
    "tokens at the clamp": (KLEstimator, {"policy/kl_ref_saturated": (0.0, 0.05)}),
    "cut at the limit": (LengthSurge, {"len/clipped": (0.1, 0.8)} | SAME),
    "routed elsewhere": (RoutingMismatch, {"mismatch/routing_layer_frac": (0.1, 0.4)}),
    "experts": (MoEImbalance, {"mismatch/moe_max_vio": (1.5, 6.0)}),
    "loops": (Repetition, {"text/looping_frac": (0.01, 0.5)} | LOST),
    "drifting ratios": (RatioDrift, {"ratio/geo_mean": (1.001, 0.8)}),
    "stale": (Staleness, {"staleness/mean": (1.0, 6.0)}),
    "masked as off-policy": (OffPolicyMask, {"offpolicy/masked": (0.02, 0.5)}),
    "clipped below": (ClipSaturation, {"ratio/clipfrac_low": (0.01, 0.5)} | {"ratio/seq_mean": (1.0, 1.0)}),
    "prefixes of turns": (Retokenisation, {"text/turn_prefix_kept": (1.0, 0.5)}),
    "budget of the rollouts": (LongTail, {"len/budget_used": (0.9, 0.3)}),
}
SAID = {
    "entropy lost with the reward": (({"critical": 67}, 60, 164), ({"critical": 61}, 60, 160)),
    "entropy lost": (({"warning": 67}, 60, 164), ({"warning": 61}, 60, 160)),
    "entropy tripled as the reward fell": (({"critical": 66}, 60, 164), ({"warning": 61, "critical": 62}, 60, 160)),
    "entropy of the negative side": (({"info": 68, "warning": 74}, 64, 166), ({"info": 61, "warning": 63}, 60, 161)),
    "entropy of the positive side": (({"warning": 69}, 65, 165), ({"warning": 61}, 60, 161)),
    "pass@8 lost": (({"warning": 82}, 67, 168), ({"warning": 63}, 62, 163)),
    "likelihood of right answers": (({"warning": 68}, 64, 166), ({"warning": 62}, 61, 163)),
    "estimates of KL that see nothing": (({"warning": 68}, 60, 168), ({"warning": 62}, 60, 163)),
    "a largest difference that was always large": (({"warning": 71}, 69, 165), ({"warning": 63}, 62, 162)),
    "correlation": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "mismatch": (({"warning": 66, "critical": 67}, 60, 166), ({"critical": 61}, 60, 161)),
    "mismatch beyond its band": (({"info": 68}, 60, 165), ({"info": 61}, 60, 160)),
    "a mask that goes blind": (({"warning": 78}, 74, 164), ({"warning": 63}, 62, 161)),
    "gradient": (({"warning": 60, "critical": 67}, 60, 164), ({"warning": 60, "critical": 61}, 60, 160)),
    "skipped steps": (({"warning": 64, "critical": 80}, 60, 159), ({"warning": 61, "critical": 62}, 60, 159)),
    "a reward that stands still": (({"warning": 80}, 60, 159), ({"warning": 74}, 60, 159)),
    "reward lost": (({"info": 61, "warning": 72, "critical": 77}, 60, 164), ({"info": 61, "critical": 62}, 60, 160)),
    "reward lost by a third": (({"warning": 73, "critical": 125}, 60, 164), ({"warning": 62, "critical": 67}, 60, 160)),
    "a reward that is hacked": (({"info": 87}, 67, 163), ({"info": 64}, 62, 160)),
    "groups that agree": (({"warning": 89}, 60, 171), ({"warning": 64}, 60, 163)),
    "no signal": (({"warning": 82, "critical": 92}, 60, 163), ({"critical": 65, "warning": 160}, 60, 161)),
    "importance weights": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "one length for all": (({"warning": 69}, 60, 159), ({"warning": 62}, 60, 159)),
    "garbled": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "token id 0": (({"warning": 60, "critical": 61}, 60, 159), ({"warning": 60, "critical": 61}, 60, 159)),
    "nothing left to say": (({"warning": 73, "critical": 85}, 60, 165), ({"warning": 62, "critical": 63}, 60, 162)),
    "empty": (({"warning": 73, "critical": 85}, 60, 165), ({"warning": 62, "critical": 63}, 60, 162)),
    "nothing left to say, with the sign of a cost": (
        ({"warning": 73, "critical": 85}, 60, 165),
        ({"warning": 62, "critical": 63}, 60, 162),
    ),
    "all cut": (({"warning": 73, "critical": 95}, 60, 166), ({"warning": 62, "critical": 64}, 60, 162)),
    "longer and longer": (({"warning": 81}, 60, 166), ({"warning": 62}, 60, 161)),
    "long tail": (({"info": 66}, 60, 166), ({"info": 61}, 60, 161)),
    "tokens of tools": (({"warning": 66}, 60, 165), ({"warning": 61}, 60, 160)),
    "encoded anew": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "slow": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "as good as standing": (({"warning": 62}, 60, 159), ({"warning": 61}, 60, 159)),
    "no longer logged": (({"warning": 70}, 59, 159), ({"warning": 70}, 59, 159)),
    "clipped": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "never clipped": (({"info": 49}, 0, 239), ({"info": 49}, 0, 239)),
    "estimators apart": (({"warning": 72, "info": 170}, 70, 170), ({"warning": 67}, 66, 162)),
    "KL that ran away": (
        ({"warning": 66, "critical": 84, "info": 104}, 60, 165),
        ({"warning": 61, "critical": 62, "info": 96}, 60, 161),
    ),
    "ratios of long responses": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "fewer tokens a second": (({"warning": 66, "info": 165}, 60, 166), ({"warning": 61, "info": 160}, 60, 161)),
    "less to do": (({"info": 66}, 60, 166), ({"info": 61}, 60, 161)),
    "longer for longer responses": (({"info": 66}, 60, 166), ({"info": 61}, 60, 161)),
    "few groups with a signal": (({"warning": 90}, 70, 170), ({"warning": 64}, 62, 163)),
    "groups that are all right": (({"info": 89}, 60, 171), ({"info": 64, "warning": 163}, 60, 163)),
    "a gradient of nothing": (({"warning": 75, "critical": 85}, 70, 170), ({"critical": 63, "warning": 162}, 62, 163)),
    "solved": (({"info": 82}, 60, 163), ({"info": 65}, 60, 161)),
    "tokens at the clamp": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "cut at the limit": (({"warning": 81}, 60, 166), ({"warning": 62}, 60, 161)),
    "routed elsewhere": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "experts": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "loops": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "drifting ratios": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "stale": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "masked as off-policy": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "clipped below": (({"warning": 67}, 60, 165), ({"warning": 61}, 60, 161)),
    "prefixes of turns": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
    "budget of the rollouts": (({"warning": 66}, 60, 166), ({"warning": 61}, 60, 161)),
}
"""First row of each severity, the onset's row and the last: with a row a step, and with one every ten steps."""

NUMBERS = {
    "entropy lost with the reward": (
        "policy/entropy",
        40.0,
        1.0,
        {"entropy": 0.01, "entropy_baseline": 1.0, "ratio": 0.01, "reward": 0.1, "reward_best": 0.8},
    ),
    "entropy lost": (
        "policy/entropy",
        4.0,
        1.0,
        {"entropy": 0.1, "entropy_baseline": 1.0, "ratio": 0.1, "reward": 0.5, "reward_best": 0.5},
    ),
    "entropy tripled as the reward fell": (
        "policy/entropy",
        2.33333,
        1.0,
        {"entropy": 3.5, "entropy_baseline": 1.0, "ratio": 3.5, "reward": 0.1, "reward_best": 0.8},
    ),
    "entropy of the negative side": (
        "policy/entropy_neg",
        1.66667,
        1.0,
        {"entropy_neg": 2.5, "start": 1.0, "share": 1.0, "entropy_pos": 1.0},
    ),
    "entropy of the positive side": (
        "policy/entropy_pos",
        1.5,
        1.0,
        {"entropy_pos": 0.1, "start": 1.0, "entropy_neg_ratio": 1.0},
    ),
    "pass@8 lost": (
        "reward/pass_at_8",
        1.875,
        0.75,
        {"k": 8.0, "pass_at_1": 0.25, "pass_at_k": 0.4, "pass_at_k_best": 0.75, "gap_start": 0.5},
    ),
    "likelihood of right answers": (
        "lld/logp_positive",
        30.0,
        -0.5,
        {"phase": 2, "logp_positive": -2.0, "logp_best": -0.5, "grad_factor": 0.0, "entropy_factor": 0.0},
    ),
    "estimates of KL that see nothing": (
        "mismatch/logp_absdiff_p99",
        10.0,
        None,
        {
            "mismatch/k3": 0.001,
            "mismatch/logp_absdiff_p99": 2.0,
            "mismatch/prob_absdiff_max": 0.95,
            "reward": 0.1,
            "reward_best": 0.8,
        },
    ),
    "a largest difference that was always large": (
        "mismatch/prob_absdiff_max",
        1.0,
        None,
        {"mismatch/k3": 0.001, "mismatch/prob_absdiff_max": 0.95, "reward": 0.1, "reward_best": 0.8},
    ),
    "correlation": ("mismatch/prob_corr", 5.0, 0.999, {"correlation": 0.9, "start": 0.999}),
    "mismatch": ("mismatch/k3", 59.2593, 0.0025, {"level": 0.2, "factor": 80.0, "cusum": 60.0}),
    "mismatch beyond its band": ("mismatch/k3", 2.0, None, {"mismatch/k3": 0.2, "from_the_start": False}),
    "a mask that goes blind": (
        "mismatch/icepop_masked",
        1.6,
        0.002,
        {"masked": 0.001, "masked_then": 0.002, "gap": 0.02, "gap_then": 0.01},
    ),
    "gradient": ("optim/grad_norm", 2.0, 1.0, {"grad_norm": 20.0, "start": 1.0, "factor": 20.0, "rows": 97.0}),
    "skipped steps": ("optim/step_skipped", 24.75, None, {"steps": 99.0, "rows": 100.0, "counted": True}),
    "a reward that stands still": ("reward/mean", 6.66667, None, {"reward": 0.5, "rows": 100.0, "longest_before": 1.0}),
    "reward lost": ("reward/mean", 3.5, 0.8, {"reward": 0.1, "best": 0.8, "noise": 0.0}),
    "reward lost by a third": ("reward/mean", 1.55556, 0.9, {"reward": 0.55, "best": 0.9, "noise": 0.0}),
    "a reward that is hacked": (
        "reward/mean",
        2.0,
        0.2,
        {
            "reward": 0.9,
            "reward_start": 0.2,
            "weight": 4.0,
            "sure": "hint",
            "signs": ["text/looping_frac", "text/repetition"],
        },
    ),
    "groups that agree": ("reward/zero_std_frac", 1.35714, 0.2, {"share": 0.95, "start": 0.2, "side": "unknown"}),
    "no signal": ("reward/zero_std_frac", 1.33333, None, {"silent_share": 1.0, "reward": 0.5, "reward_start": 0.5}),
    "importance weights": (
        "ratio/ess",
        4.0,
        None,
        {"level": 0.2, "threshold": 1.0, "start": 0.010101, "factor": 396.0},
    ),
    "one length for all": ("len/min", 100.0, None, {"length": 512.0, "rows": 100.0}),
    "garbled": (
        "text/garbled",
        42.4286,
        None,
        {"level": 0.3, "threshold": 0.010101, "start": 0.001001, "factor": 428.143},
    ),
    "token id 0": ("text/id0_frac", 80.0, None, {"id0": 0.8}),
    "nothing left to say": ("len/mean", 7.5, 500.0, {"length": 20.0, "start": 500.0, "share": 0.04, "reward": 0.1}),
    "empty": ("len/empty", None, None, {"empty": 0.9}),
    "nothing left to say, with the sign of a cost": (
        "len/mean",
        7.5,
        500.0,
        {"length": 20.0, "start": 500.0, "share": 0.04, "reward": 0.1},
    ),
    "all cut": ("len/clipped", 1.05263, 0.1, {"clipped": 1.0, "clipped_start": 0.1}),
    "longer and longer": (
        "len/mean",
        2.25,
        None,
        {"level": 900.0, "threshold": 400.0, "start": 200.0, "factor": 4.5, "reward": 0.5, "reward_start": 0.5},
    ),
    "long tail": ("len/tail_ratio", 2.25, None, {"level": 9.0, "threshold": 4.0, "start": 2.0, "factor": 4.5}),
    "tokens of tools": ("tokens/environment_leak", 500.0, None, {"leak": 0.5}),
    "encoded anew": ("text/retok_exact", 9.0, None, {"text/retok_exact": 0.5}),
    "slow": ("time/step", 2.0, 10.0, {"seconds": 40.0, "seconds_start": 10.0}),
    "as good as standing": ("time/step", 60.0, 10.0, {"seconds": 9000.0, "usual": 10.0}),
    "no longer logged": ("policy/entropy", None, None, {"metrics": ["policy/entropy"], "missing": 1, "regular": 3}),
    "clipped": ("ratio/clipfrac", 9.0, 0.01, {"clipped": 0.5, "start": 0.01, "odds_factor": 99.0}),
    "never clipped": ("ratio/clipfrac", None, None, {"rows": 50.0}),
    "estimators apart": ("policy/kl_ref_k1", 1.6, None, {"policy/kl_ref_k1": 0.1, "policy/kl_ref_k3": 0.5}),
    "KL that ran away": ("policy/kl_ref", 6.66667, None, {"kl": 2.0, "change": 0.0}),
    "ratios of long responses": (
        "ratio/log_var_growth",
        10.0,
        1e-05,
        {"level": 0.005, "threshold": 0.0005, "start": 1e-05, "factor": 500.0, "length": 1000.0, "variance": 5.0},
    ),
    "fewer tokens a second": (
        "time/throughput",
        2.0,
        1000.0,
        {"seconds": 40.0, "seconds_start": 10.0, "tokens_per_second": 250.0, "tokens_per_second_start": 1000.0},
    ),
    "less to do": (
        "time/throughput",
        2.0,
        1000.0,
        {"seconds": 10.0, "seconds_start": 10.0, "tokens_per_second": 250.0, "tokens_per_second_start": 1000.0},
    ),
    "longer for longer responses": (
        "time/step",
        2.0,
        10.0,
        {"seconds": 40.0, "seconds_start": 10.0, "per_token_factor": 1.0},
    ),
    "few groups with a signal": (
        "reward/effective_groups",
        None,
        48.0,
        {"effective_groups": 8.0, "effective_start": 48.0, "side": "unknown"},
    ),
    "groups that are all right": (
        "reward/zero_std_frac",
        1.28571,
        0.2,
        {"share": 0.9, "start": 0.2, "right": 0.7, "wrong": 0.2, "side": "easy"},
    ),
    "a gradient of nothing": (
        "optim/grad_norm",
        None,
        None,
        {"grad_norm": 0.0, "grad_ratio": 0.0, "reward": 0.5, "reward_start": 0.5},
    ),
    "solved": ("reward/zero_std_frac", 1.33333, None, {"silent_share": 1.0, "reward": 1.0, "reward_start": 0.5}),
    "tokens at the clamp": ("policy/kl_ref_saturated", 26.2632, None, {"share": 0.05, "clamped_mean": 0.5}),
    "cut at the limit": (
        "len/clipped",
        4.0,
        None,
        {"level": 0.8, "threshold": 1.0, "start": 0.111111, "factor": 36.0, "reward": 0.5, "reward_start": 0.5},
    ),
    "routed elsewhere": (
        "mismatch/routing_layer_frac",
        3.0,
        0.111111,
        {"level": 0.4, "threshold": 0.222222, "start": 0.111111, "factor": 6.0},
    ),
    "experts": ("mismatch/moe_max_vio", 2.0, 1.5, {"level": 6.0, "threshold": 3.0, "start": 1.5, "factor": 4.0}),
    "loops": (
        "text/looping_frac",
        9.0,
        None,
        {"level": 0.5, "threshold": 0.111111, "start": 0.010101, "factor": 99.0, "reward": 0.1},
    ),
    "drifting ratios": (
        "ratio/geo_mean",
        11.2684,
        1.0,
        {"level": 0.8, "threshold": 0.0198026, "start": 0.0009995, "factor": 223.255},
    ),
    "stale": ("staleness/mean", 2.0, 1.0, {"level": 6.0, "threshold": 3.0, "start": 1.0, "factor": 6.0}),
    "masked as off-policy": (
        "offpolicy/masked",
        5.66667,
        None,
        {"level": 0.5, "threshold": 0.176471, "start": 0.0204082, "factor": 49.0},
    ),
    "clipped below": ("ratio/clipfrac_low", 1.5, 0.01, {"clipped": 0.5, "start": 0.01, "odds_factor": 99.0}),
    "prefixes of turns": ("text/turn_prefix_kept", 49.0, None, {"text/turn_prefix_kept": 0.5}),
    "budget of the rollouts": (
        "len/budget_used",
        2.0,
        None,
        {"level": 0.3, "threshold": 1.66667, "start": 1.11111, "factor": 3.0},
    ),
}
"""Metric, score and baseline of the last finding before the change is over, and what its evidence holds at least."""


def changing(before, after, every):
    """A level, or a function of the row, that is another one for a while."""

    def level(step):
        now = after if CHANGE <= step // every < BACK else before
        return now(step // every) if callable(now) else now

    return level


def played(name, every):
    """(severity -> row of the first, onset's row, last row) of a run with a row every so many steps."""
    detector, levels = RUNS[name]
    watch, first, onset, last = detector(), {}, None, None

    for row in exact({m: changing(*pair, every) for m, pair in levels.items()}, length=ROWS, every=every):
        for finding in watch.update(row):
            first.setdefault(finding.severity.value, row.step // every)
            onset = finding.onset_step // every if onset is None else onset
            last = row.step // every
    return first, onset, last


def played_out(name):
    """The finding of the last row before the levels are again as they were."""
    detector, levels = RUNS[name]
    watch, said = detector(), []
    for row in exact({m: changing(*pair, 1) for m, pair in levels.items()}, length=BACK):
        said = watch.update(row)
    return said[0]


@pytest.mark.parametrize("name", RUNS)
def test_a_plain_change_is_said_in_time_dated_and_over(name):
    """Windows and holds are counted in rows and in steps: in coarse logs fewer rows must do."""
    assert (played(name, 1), played(name, 10)) == SAID[name]


@pytest.mark.parametrize("name", RUNS)
def test_a_finding_has_the_numbers_it_was_made_of(name):
    """The level over its limit, how it began, and what a person needs to check it."""
    metric, score, baseline, evidence = NUMBERS[name]
    said = played_out(name)

    assert said.metric == metric
    assert said.score == (None if score is None else pytest.approx(score, rel=1e-5))
    assert said.baseline == (None if baseline is None else pytest.approx(baseline, rel=1e-5))
    assert {key: said.evidence.get(key) for key in evidence} == evidence
