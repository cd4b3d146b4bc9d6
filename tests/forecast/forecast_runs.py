"""Runs made by formula, for tests of forecasting."""

import math

import numpy as np


def steady(length=120, *, seed=0, every=1, noise=0.02, **moved):
    """step -> metrics of a run that goes on as it began; ``moved``: metric -> function of the step, instead."""
    draw = np.random.default_rng(seed)
    level = {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "policy/entropy": 1.0,
        "optim/grad_norm": 0.3,
        "policy/kl_ref_k3": 0.02,
        "mismatch/k3": 0.002,
        "mismatch/ess": 0.99,
        "len/mean": 40.0,
        "len/clipped": 0.05,
        "ratio/clipfrac_high": 0.01,
    }
    rows = {}
    for step in range(1, length + 1):
        row = {name: value * math.exp(noise * draw.standard_normal()) for name, value in level.items()}
        row["mismatch/ess"] = min(row["mismatch/ess"], 1.0)
        row |= {name: change(step) for name, change in moved.items()}
        if step % every == 0:
            rows[step] = row
    return rows


def scaled(rows, **factors):
    """The same run in another unit."""
    return {step: {n: v * factors.get(n, 1.0) for n, v in row.items()} for step, row in rows.items()}
