"""Synthetic runs that a monitor must be silent on: the shapes healthy RLVR runs really have."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache

from rlwatch.records import ClosedStep
from rlwatch.testing.engine_metrics import engine_metrics
from rlwatch.testing.healthy_rollouts import rollout_metrics

VOCABULARY = 152_000


def healthy_metrics(step: int, length: int, noise: random.Random) -> dict[str, float]:
    """One step: reward saturates, entropy is spent threefold on it, KL grows and settles.

    The noise is that of small batches. Now and then all groups agree (no gradient), and one step in a
    hundred spikes the gradient norm threefold.
    """
    progress = 1.0 - math.exp(-4.0 * step / length)
    silent = noise.random() < 0.05
    spike = 3.0 if noise.random() < 0.01 else 1.0
    return {
        "reward/mean": 0.35 + 0.45 * progress + noise.gauss(0.0, 0.05),
        "reward/std": 0.0 if silent else 0.3 + noise.gauss(0.0, 0.03),
        "reward/zero_std_frac": 1.0 if silent else min(max(noise.gauss(0.1 + 0.3 * progress, 0.1), 0.0), 0.9),
        "policy/entropy": 0.35 * math.exp(-1.1 * progress) * math.exp(noise.gauss(0.0, 0.08)),
        "policy/vocab_size": float(VOCABULARY),
        "policy/kl_ref": 0.15 * progress * math.exp(noise.gauss(0.0, 0.3)),
        "policy/kl_old": abs(noise.gauss(0.0, 1e-3)),
        "optim/grad_norm": 1e-3 if silent else 0.5 * spike * math.exp(noise.gauss(0.0, 0.25)),
        "loss/policy": noise.gauss(0.0, 0.02),
        "mismatch/k3": 5e-4 * math.exp(noise.gauss(0.0, 0.2)),
        "mismatch/kl": noise.gauss(0.0, 5e-4),
        "mismatch/logp_absdiff": 0.003 * math.exp(noise.gauss(0.0, 0.2)),
        "mismatch/prob_absdiff": 0.007 * math.exp(noise.gauss(0.0, 0.1)),
        "len/mean": 400.0 + 60.0 * progress + noise.gauss(0.0, 15.0),
        "len/clipped": min(max(noise.gauss(0.1, 0.05), 0.0), 1.0),
        "nonfinite/grad": 0.0,
    }


def tapped_metrics(row: dict[str, float], noise: random.Random) -> dict[str, float]:
    """What per-token taps add to ``row``: two sides of entropy, raw importance ratios, KL by every estimator.

    The rollout engine is one or two versions old.
    """

    def around(level: float, sigma: float = 0.2) -> float:
        return level * math.exp(noise.gauss(0.0, sigma))

    return {
        "policy/entropy_pos": around(0.8 * row["policy/entropy"], 0.05),
        "policy/entropy_neg": around(1.3 * row["policy/entropy"], 0.05),
        "ratio/clipfrac": around(2e-3, 0.5),
        "ratio/clipfrac_low": around(1e-3, 0.5),
        "ratio/clipfrac_high": around(1e-3, 0.5),
        "ratio/clipfrac_dual": 0.0,
        "ratio/max": math.exp(around(0.8, 0.3)),
        "ratio/min": math.exp(-around(0.8, 0.3)),
        "ratio/p99": math.exp(around(0.1)),
        "ratio/log_absmax": around(0.9, 0.3),
        "ratio/m2": around(2e-3, 0.3),
        "ratio/chi2": around(4e-3, 0.5) - 1e-3,
        "ratio/ess": 1.0 - around(4e-3, 0.5),
        "ratio/geo_mean": 1.0 + noise.gauss(0.0, 1e-3),
        "ratio/geo_max": math.exp(around(0.02)),
        "ratio/geo_min": math.exp(-around(0.02)),
        "ratio/product_ess": 1.0 / (1.0 + around(0.2, 0.4)),
        "ratio/log_var_growth": 2e-5 + noise.gauss(0.0, 2e-5),
        "policy/kl_ref_k1": row["policy/kl_ref"] + noise.gauss(0.0, 5e-3),
        "policy/kl_ref_k2": around(0.9 * row["policy/kl_ref"], 0.05),
        "policy/kl_ref_k3": row["policy/kl_ref"],
        "policy/kl_ref_weighted": around(row["policy/kl_ref"], 0.02),
        "policy/kl_ref_saturated": around(1e-5, 0.5),
        "offpolicy/masked": min(around(0.01, 0.5), 1.0),
        "offpolicy/masked_neg": min(around(0.02, 0.5), 1.0),
        "staleness/mean": around(1.0, 0.1),
        "staleness/max": float(noise.choice((1, 2))),
        "staleness/worst_mean": around(1.3, 0.1),
        "staleness/spans_mean": 1.0 + around(0.2),
    }


def layer_norms(total: float, layers: int, noise: random.Random) -> dict[str, float]:
    """``grad_layer/layers.<i>`` of a model whose lower layers carry more; their squares add up to ``total`` squared."""
    raw = [(1.0 + 3.0 / (1 + i)) * math.exp(noise.gauss(0.0, 0.1)) for i in range(layers)]
    whole = math.sqrt(math.fsum(x * x for x in raw))
    return {f"grad_layer/layers.{i}": total * x / whole for i, x in enumerate(raw)}


def healthy_run(
    seed: int = 0, *, length: int = 300, every: int = 1, layers: int = 0, taps: bool = False
) -> list[ClosedStep]:
    """A whole run, logged every ``every`` steps as the mean over them, the way trainers do.

    With ``layers``, gradient norms of so many layers are among its metrics, with ``taps`` those of
    :func:`tapped_metrics`, ``rollout_metrics`` and ``engine_metrics``; the others are the same without.
    """
    return list(_rows(seed, length, every, layers, taps))


@lru_cache(maxsize=24)
def _rows(seed: int, length: int, every: int, layers: int, taps: bool) -> tuple[ClosedStep, ...]:
    """The same few runs serve many tests, and making one takes longer than judging it."""
    noise, of_layers, of_taps, of_rollouts, of_engine = (random.Random(seed + i) for i in range(5))
    steps = [healthy_metrics(step, length, noise) for step in range(1, length + 1)]
    for step in steps if layers else ():
        step.update(layer_norms(step["optim/grad_norm"], layers, of_layers))
    for step in steps if taps else ():
        step.update(tapped_metrics(step, of_taps))
        step.update(engine_metrics(step, of_engine))
        step.update(rollout_metrics(step, of_rollouts))
    chunks = [steps[i : i + every] for i in range(0, length - every + 1, every)]
    return tuple(
        ClosedStep(step=(i + 1) * every, metrics=mean_metrics(chunk), seq=i + 1, ts=1000.0 + i)
        for i, chunk in enumerate(chunks)
    )


def mean_metrics(chunk: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metric-wise mean of steps that measured the same."""
    return {name: math.fsum(step[name] for step in chunk) / len(chunk) for name in chunk[0]}
