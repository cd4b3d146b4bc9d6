"""What else a healthy run logs: groups, pass@k, text, the tail of lengths, times; and what breaking does to it."""

from __future__ import annotations

import math
import random

GROUPS = 64

ROLLOUTS_BROKEN = {
    "reward/pass_at_8": 0.6,
    "reward/unique_answers": 0.2,
    "text/looping_frac": 100.0,
    "text/repetition": 6.0,
    "len/tail_ratio": 8.0,
    "len/budget_used": 0.3,
    "partial/frac": 10.0,
    "partial/retention_mean": 10.0,
    "time/step": 20.0,
    "time/throughput": 0.05,
}
"""What a broken run multiplies them by."""
EMPTY = {"len/empty": 0.7}
"""What replaces values that are nothing in a healthy run."""
VANISHES = "text/distinct_2"
"""The metric a broken run logs no more."""
HELD_OUT = "val/score"
"""What a broken run measures besides: it falls before anything else does, while the reward still rises."""


def rollout_metrics(row: dict[str, float], noise: random.Random) -> dict[str, float]:
    """What detectors of rewards, rollouts and times read, for a step that measured ``row``.

    Right answers become more and alike; now and then a step takes four times as long (a checkpoint).
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
