"""What taps record of the rollout engine, of text and of updates: in a healthy run, and in one that breaks."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping


def engine_metrics(row: dict[str, float], noise: random.Random) -> dict[str, float]:
    """Metrics beside ``row`` (of :func:`rlwatch.testing.healthy.healthy_metrics`) of a mixture of experts trained with
    tools, in half precision; every update is made and every response is text.
    """

    def around(level: float, sigma: float = 0.2) -> float:
        return level * math.exp(noise.gauss(0.0, sigma))

    def share(level: float, sigma: float = 0.2) -> float:
        return min(around(level, sigma), 1.0)

    entropy = row["policy/entropy"]
    return {
        "mismatch/logp_absdiff_p99": around(0.04),
        "mismatch/logp_absdiff_max": around(1.0, 0.4),
        "mismatch/prob_absdiff_max": share(0.25, 0.3),
        "mismatch/log_ppl_absdiff": around(0.004),
        "mismatch/mult_prob_error": 1.0 + around(0.004),
        "mismatch/prob_corr": 1.0 - around(0.003, 0.3),
        "mismatch/factor2_frac": share(2e-4, 0.5),
        "mismatch/ess": 1.0 - share(0.003, 0.5),
        "mismatch/chi2": around(0.003, 0.5) - 1e-3,
        "mismatch/is_ratio": 1.0 + noise.gauss(0.0, 2e-3),
        "mismatch/is_ratio_std": around(0.05),
        "mismatch/icepop_masked": share(1.5e-3, 0.3),
        "mismatch/tis_truncated": share(1e-3, 0.3),
        "mismatch/seq_ess": 1.0 / (1.0 + around(0.3, 0.4)),
        "mismatch/seq_chi2": around(0.4, 0.5),
        "mismatch/seq_weight_max": around(3.0, 0.3),
        "mismatch/routing_layer_frac": share(0.1),
        "mismatch/moe_avg_vio": around(0.4, 0.1),
        "mismatch/moe_max_vio": around(1.8),
        "lld/logp_positive": -around(0.8 * entropy, 0.05),
        "lld/displacement": around(5e-3, 0.5),
        "lld/displaced_frac": share(0.2),
        "len/min": around(40.0),
        "len/max": around(900.0, 0.05),
        "text/id0_frac": 0.0,
        "text/garbled": noise.choice((0.0, 1e-4)),
        "text/script_switches": around(0.2),
        "text/retok_exact": 1.0 - share(0.01, 0.5),
        "text/turn_prefix_kept": 1.0,
        "tokens/environment_frac": share(0.3),
        "tokens/environment_leak": 0.0,
        "optim/step_skipped": 0.0,
    }


ENGINE_BROKEN = {
    "mismatch/prob_corr": 0.8,
    "mismatch/ess": 0.05,
    "mismatch/seq_ess": 0.001,
    "mismatch/prob_absdiff_max": 1.0,
    "mismatch/is_ratio": 0.3,
    "mismatch/mult_prob_error": 1.5,
    "mismatch/icepop_masked": 2e-4,
    "mismatch/tis_truncated": 0.5,
    "mismatch/routing_layer_frac": 0.6,
    "mismatch/factor2_frac": 0.2,
    "lld/logp_positive": -3.0,
    "lld/displaced_frac": 0.9,
    "reward/std": 0.0,
    "len/min": 24.0,
    "len/mean": 24.0,
    "len/max": 24.0,
    "text/id0_frac": 1.0,
    "text/garbled": 0.6,
    "text/retok_exact": 0.3,
    "text/turn_prefix_kept": 0.5,
    "tokens/environment_leak": 0.4,
    "optim/step_skipped": 1.0,
}
"""The values of a run in which all of this goes wrong, where a factor on the healthy ones would make no sense."""


def engine_broken(row: Mapping[str, float], *, seen: bool) -> dict[str, float]:
    """Values that replace those of the healthy ``row``. Not ``seen``: the mean mismatch looks as before, its
    tail does not.
    """
    broken = {name: value for name, value in ENGINE_BROKEN.items() if name in row}
    means = {} if seen else {name: row[name] for name in ("mismatch/k3", "mismatch/kl") if name in row}
    return broken | means
