"""Simulated healthy RLVR runs of realistic shapes, in which no detector may report a problem, and broken values for
them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache

from rlwatch.records import ClosedStep


def machine_metrics(at: int, noise: random.Random) -> dict[str, float]:
    """Return system metrics of two busy machines whose caches fill at first, while checkpoints are written and removed.

    ``noise``: source of the random deviations. ``at``: number of rows before this one. At half of the steps one of the
    four ranks, chosen at random, is slower.
    """
    slow = noise.choice("01234567")
    filling = 30.0 * math.exp(-at / 20.0)
    return {
        "system/memory/free": 200.0 + filling + noise.gauss(0.0, 3.0),
        "system/memory/process": 60.0 - filling / 2.0,
        "system/rank/1/memory/free": 210.0 + noise.gauss(0.0, 3.0),
        "system/disk/checkpoints/free": 900.0 - 20.0 * (at % 10) + noise.gauss(0.0, 1.0),
        "system/gpu/0/temperature": 65.0 + noise.gauss(0.0, 3.0),
        "system/gpu/0/throttled": float(noise.random() < 0.02),
        "system/rank/1/gpu/0/throttled": 0.0,
        **{f"time/rank/{rank}": (1.5 if rank == slow else 1.0) * (8.0 + noise.gauss(0.0, 0.4)) for rank in "0123"},
    }


MACHINE_BROKEN = {"system/gpu/0/throttled": 0.9, "system/gpu/0/temperature": 92.0, "time/rank/2": 20.0}
"""Values of the system metrics of an overheated machine."""


def machine_broken(row: Mapping[str, float], since: int) -> dict[str, float]:
    """Return the values that replace those of the healthy ``row``, ``since`` rows after the machine began to fail."""
    if "system/memory/free" not in row:
        return {}
    left = max(0.0, 1.0 - since / 200.0)
    return MACHINE_BROKEN | {"system/memory/free": 200.0 * left, "system/disk/checkpoints/free": 900.0 * left}


def engine_metrics(row: dict[str, float], noise: random.Random) -> dict[str, float]:
    """Return further metrics for ``row`` (of :func:`healthy_metrics`): mismatch, experts, text, tools, half precision.

    ``noise``: source of the random deviations.
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
        "mismatch/weights_differ": 0.0,
        "mismatch/weights_distance": 0.0,
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


def critic_metrics(progress: float, row: dict[str, float], noise: random.Random) -> dict[str, float]:
    """Return metrics of a value function and of advantages for ``row``; the explained variance rises to a half.

    ``progress`` is the share of the run that has passed, 0 to 1. ``noise``: source of the random deviations. Half of
    the rollouts are by policy weights that are one version old.
    """

    def around(level: float, sigma: float = 0.2) -> float:
        return level * math.exp(noise.gauss(0.0, sigma))

    learnt = 1.0 - math.exp(-6.0 * progress)
    returns = row["reward/mean"] - 0.02 * progress + noise.gauss(0.0, 0.02)
    return {
        "critic/value_loss": around(0.05 + 0.15 * (1.0 - learnt)),
        "critic/explained_var": 0.6 * learnt - 0.1 + noise.gauss(0.0, 0.08),
        "critic/value_clipfrac": min(around(0.05 * (1.0 - learnt) + 0.01, 0.5), 1.0),
        "critic/value_mean": returns * learnt + noise.gauss(0.0, 0.02),
        "critic/returns_mean": returns,
        "adv/mean": 0.0,
        "adv/std": around(0.9 - 0.3 * progress, 0.1),
        "reward/group_std": around(0.3 - 0.1 * progress, 0.1),
        "staleness/stale_frac": min(around(0.5, 0.1), 1.0),
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
    "mismatch/weights_differ": 0.3,
    "mismatch/weights_distance": 0.02,
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
    "critic/value_loss": 40.0,
    "critic/explained_var": -2.0,
    "critic/value_clipfrac": 0.8,
    "critic/value_mean": 30.0,
    "critic/returns_mean": -9.0,
    "adv/mean": -0.3,
    "adv/std": 0.01,
    "reward/group_std": 0.001,
    "staleness/stale_frac": 1.0,
}
"""Values of metrics in a broken run, for metrics where a factor on the healthy value would make no sense."""


def engine_broken(row: Mapping[str, float], *, seen: bool) -> dict[str, float]:
    """Return the values that replace those of the healthy ``row`` in a broken run.

    ``seen``: if False, the mean mismatch stays healthy and only its tail shows the failure.
    """
    broken = {name: value for name, value in ENGINE_BROKEN.items() if name in row}
    means = {} if seen else {name: row[name] for name in ("mismatch/k3", "mismatch/kl") if name in row}
    return broken | means


# What else a healthy run logs: groups, pass@k, text, the tail of lengths, times; and what breaking does to it.

GROUPS = 64

ROLLOUTS_BROKEN = {
    "reward/pass_at_8": 0.6,
    "reward/unique_answers": 0.2,
    "text/looping_frac": 100.0,
    "text/repetition": 6.0,
    "reward/part/answer": 0.1,
    "verifier/absent/answer": 3.0,
    "verifier/seconds/answer": 30.0,
    "verifier/canary_wrong/judge/two": 20.0,
    "tool/errors/search": 8.0,
    "tool/seconds/search": 30.0,
    "len/tail_ratio": 8.0,
    "len/budget_used": 0.3,
    "partial/frac": 10.0,
    "partial/retention_mean": 10.0,
    "time/step": 20.0,
    "time/throughput": 0.05,
}
"""Factors by which a broken run multiplies these metrics."""
EMPTY = {"len/empty": 0.7}
"""Broken values of metrics that are zero in a healthy run."""
VANISHES = "text/distinct_2"
"""Metric that a broken run stops logging."""
HELD_OUT = "val/score"
"""Metric of a broken run that falls before all others, while the reward still rises."""


def rollout_metrics(row: dict[str, float], noise: random.Random) -> dict[str, float]:
    """Return metrics of rewards, rollouts and times for the step whose other metrics are in ``row``.

    Right answers become more frequent and more alike; now and then a step takes four times as long (a checkpoint).
    ``noise``: source of the random deviations.
    """

    def around(level: float, sigma: float = 0.1) -> float:
        return level * math.exp(noise.gauss(0.0, sigma))

    def share(level: float, sigma: float = 0.03) -> float:
        return min(max(level + noise.gauss(0.0, sigma), 0.0), 1.0)

    right = min(max(row["reward/mean"], 0.0), 1.0)
    silent = row["reward/zero_std_frac"]
    one = share(right)
    return {
        "reward/zero_std_right_frac": silent * right,
        "reward/zero_std_wrong_frac": silent * (1.0 - right),
        "reward/effective_groups": float(round(GROUPS * (1.0 - silent))),
        "reward/pass_at_1": one,
        "reward/pass_at_8": max(one, share(0.75 + 0.2 * right)),
        "reward/unique_answers": share(1.0 - 0.6 * right, 0.05),
        "text/looping_frac": share(0.005, 0.005),
        "text/repetition": share(0.12),
        VANISHES: share(0.85),
        "len/empty": share(0.0, 0.003),
        "len/tail_ratio": 1.0 + around(1.0, 0.2),
        "len/bubble": share(0.65),
        "len/budget_used": share(0.92, 0.03),
        "partial/frac": share(0.1),
        "partial/retention_mean": around(0.1),
        "time/step": around((0.05 * row["len/mean"]) * (4.0 if noise.random() < 0.02 else 1.0)),
        "time/throughput": around(5000.0),
    }


def part_metrics(progress: float, row: dict[str, float], noise: random.Random) -> dict[str, float]:
    """Return the parts of the reward for ``row``: the format is learnt in the first tenth of the run, the answer
    steadily.

    ``noise``: source of the random deviations. ``progress`` is the share of the run that has passed, 0 to 1.
    """
    answer = row["reward/mean"] + noise.gauss(0.0, 0.02)
    return {
        "reward/part/format": min(1.0 - 0.7 * math.exp(-30.0 * progress) + noise.gauss(-0.01, 0.01), 1.0),
        "reward/part/answer": min(max(answer, 0.0), 1.0),
    }


def verifier_metrics(noise: random.Random) -> dict[str, float]:
    """Return metrics of a reward verifier that applies to every second task, with canary scores by a slightly noisy
    model.

    ``noise``: source of the random deviations.
    """
    return {
        "verifier/absent/answer": min(max(0.5 + noise.gauss(0.0, 0.1), 0.0), 1.0),
        "verifier/errors/answer": min(abs(noise.gauss(0.0, 0.05)), 1.0),
        "verifier/seconds/answer": 0.5 * math.exp(noise.gauss(0.0, 0.5)),
        "verifier/canary_right/judge/one": 0.9 + noise.gauss(0.0, 0.02),
        "verifier/canary_wrong/judge/two": 0.1 + noise.gauss(0.0, 0.02),
    }


def tool_metrics(noise: random.Random) -> dict[str, float]:
    """Return metrics of a tool whose service is well; ``noise``: source of the random deviations."""
    return {
        "tool/calls/search": float(max(round(60.0 + noise.gauss(0.0, 8.0)), 1)),
        "tool/errors/search": min(max(0.1 + noise.gauss(0.0, 0.03), 0.0), 1.0),
        "tool/timeouts/search": min(abs(noise.gauss(0.0, 0.01)), 1.0),
        "tool/seconds/search": 0.8 * math.exp(noise.gauss(0.0, 0.4)),
    }


# Synthetic runs that a monitor must be silent on: the shapes healthy RLVR runs really have.

VOCABULARY = 152_000


def healthy_metrics(step: int, length: int, noise: random.Random) -> dict[str, float]:
    """Return the basic metrics of one ``step`` of a healthy run of ``length`` steps.

    The reward saturates, entropy falls to a third, KL grows and settles. The noise is that of small batches. Now and
    then all groups agree (no gradient), and one step in a hundred raises the gradient norm threefold.
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
    """Return metrics that a trainer can compute only from per-token tensors, for the step whose other metrics are in
    ``row``: entropy by advantage sign, importance ratios, KL estimates.

    The rollout engine has weights that are one or two versions old. ``noise``: source of the random deviations.
    """

    def around(level: float, sigma: float = 0.2) -> float:
        return level * math.exp(noise.gauss(0.0, sigma))

    tapped = {
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
    # One update to a version; a router that moves as the ratios do. Drawn from nothing, so that other draws stay.
    return {**tapped, "staleness/updates": tapped["staleness/mean"], "ratio/router_layer_frac": 10 * tapped["ratio/m2"]}


def layer_norms(total: float, layers: int, noise: random.Random) -> dict[str, float]:
    """Return ``grad_layer/layers.<i>``, a gradient norm for each of ``layers`` layers of a model; lower layers have
    larger norms.

    The squares of the norms add up to ``total`` squared. ``noise``: source of the random deviations.
    """
    raw = [(1.0 + 3.0 / (1 + i)) * math.exp(noise.gauss(0.0, 0.1)) for i in range(layers)]
    whole = math.sqrt(math.fsum(x * x for x in raw))
    return {f"grad_layer/layers.{i}": total * x / whole for i, x in enumerate(raw)}


def healthy_run(
    seed: int = 0, *, length: int = 300, every: int = 1, layers: int = 0, taps: bool = False
) -> list[ClosedStep]:
    """Return the rows of a whole healthy run, logged every ``every`` steps as the mean over them, as trainers do.

    ``length``: number of steps. ``layers``: number of layers whose gradient norms are logged. ``taps``: also log the
    metrics of :func:`tapped_metrics`, ``rollout_metrics``, ``engine_metrics``, ``critic_metrics``, ``part_metrics``,
    ``machine_metrics``, ``verifier_metrics`` and
    ``tool_metrics``. The other metrics do not depend on these arguments.
    """
    return list(_rows(seed, length, every, layers, taps))


@lru_cache(maxsize=24)
def _rows(seed: int, length: int, every: int, layers: int, taps: bool) -> tuple[ClosedStep, ...]:
    """Return the rows of a healthy run, cached: the same few runs serve many tests, and making one takes long."""
    noise, of_layers, of_taps, of_rollouts, of_engine, of_critic, of_parts, of_machine, of_verifier, of_tool = (
        random.Random(seed + i) for i in range(10)
    )
    steps = [healthy_metrics(step, length, noise) for step in range(1, length + 1)]
    for step in steps if layers else ():
        step.update(layer_norms(step["optim/grad_norm"], layers, of_layers))
    for at, step in enumerate(steps if taps else ()):
        step.update(critic_metrics(at / length, step, of_critic))
        step.update(tapped_metrics(step, of_taps))
        step.update(engine_metrics(step, of_engine))
        step.update(rollout_metrics(step, of_rollouts))
        step.update(part_metrics(at / length, step, of_parts))
        step.update(machine_metrics(at, of_machine))
        step.update(verifier_metrics(of_verifier))
        step.update(tool_metrics(of_tool))
    chunks = [steps[i : i + every] for i in range(0, length - every + 1, every)]
    return tuple(
        ClosedStep(step=(i + 1) * every, metrics=mean_metrics(chunk), seq=i + 1, ts=1000.0 + 60.0 * i)
        for i, chunk in enumerate(chunks)
    )


def mean_metrics(chunk: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over several steps, which all have the same metrics."""
    return {name: math.fsum(step[name] for step in chunk) / len(chunk) for name in chunk[0]}
