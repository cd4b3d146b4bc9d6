"""Runs that part, or do not, at known steps: rows of a policy that learns, with the noise of small batches."""

from __future__ import annotations

import math

import numpy as np

from rlwatch.compare import ComparedRun, MetricSeries, compare, subject_of_records
from rlwatch.records import StepRecord

Metrics = dict[str, np.ndarray]


def sound(steps: int, seed: int) -> Metrics:
    """Metrics (steps,) of a run that learns, each with noise of its own kind: white, wandering, heavy-tailed, coarse."""
    rng, t = np.random.default_rng(seed), np.arange(steps) / steps
    white, walk = lambda: rng.normal(size=steps), lambda: np.cumsum(rng.normal(size=steps)) / math.sqrt(steps)
    near, settled = rng.normal(size=steps), np.zeros(steps)
    for i in range(1, steps):
        settled[i] = 0.95 * settled[i - 1] + 0.02 * near[i]
    return {
        "reward": rng.binomial(64, 0.2 + 0.4 * t) / 64,
        "entropy": 0.6 * np.exp(-0.3 * t + 0.1 * walk() + 0.02 * white()),
        "grad_norm": 0.9 * np.exp(0.3 * white() + (rng.random(steps) < 0.02) * rng.exponential(1.0, steps)),
        "kl": 1e-5 + 2e-3 * t * np.exp(0.2 * walk() + 0.1 * white()),
        "loss": 0.02 * rng.standard_t(3, steps),
        "completions/mean_length": 300 * np.exp(0.2 * walk() + 0.05 * white()),
        "completions/clipped_ratio": np.where(rng.random(steps) < 0.2, 0.02 * rng.random(steps), 0.0),
        "reward_std": 0.3 + settled,
        "sampling/sampling_logp_difference/mean": 0.01 * np.exp(0.1 * white()),
        "learning_rate": np.minimum(1.0, 20 * t) * 1e-6 * (1 - 0.5 * t),
    }


def collapsed(steps: int, seed: int, at: int) -> Metrics:
    """The same run until ``at``; from there on its gradient norm is ten times as large, 20 steps later its entropy
    falls, 40 steps later its reward.
    """
    run, since = sound(steps, seed), np.arange(steps) - at
    run["grad_norm"] = np.where(since >= 0, 10.0, 1.0) * run["grad_norm"]
    run["entropy"] = run["entropy"] * np.exp(-np.maximum(since - 20, -1) * 0.1 * (since >= 20))
    run["reward"] = np.where(since >= 40, 0.0, run["reward"])
    return run


def records(metrics: Metrics, *, every: int = 1, first: int = 0, attempt: int = 1, seq: int = 1) -> list[StepRecord]:
    """Rows of every ``every``-th step, 30 s a step; row i is step ``first`` + i."""
    steps = len(next(iter(metrics.values())))
    return [
        StepRecord(
            first + i,
            {name: float(values[i]) for name, values in metrics.items()},
            ts=1e9 + 30.0 * (first + i),
            attempt=attempt,
            seq=seq + i,
        )
        for i in range(0, steps, every)
    ]


def subject(rows: list[StepRecord], name: str = "run", **config: object) -> ComparedRun:
    """A run of these rows."""
    return subject_of_records(name, "trl/grpo", rows, config)


def parted(left: list[StepRecord], right: list[StepRecord]) -> dict[str, float]:
    """Metrics that parted on the way, first first, and where."""
    found = compare(subject(left, "A"), subject(right, "B")).partings
    return {one.metric: one.at for one in found if not one.apart_from_start}


def rows(values: np.ndarray | list[float], every: int = 1) -> MetricSeries:
    """One metric as it is compared."""
    return MetricSeries(
        np.arange(0, len(values) * every, every, dtype=np.float64), np.asarray(values, dtype=np.float64)
    )
