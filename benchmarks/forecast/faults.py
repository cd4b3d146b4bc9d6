"""Faults, one function each: it draws when, how fast and how much."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from forecast.knobs import Change, Knobs

Rng = np.random.Generator
Changes = tuple[Change, ...]


def between(r: Rng, low: float, high: float) -> float:
    """Uniform in the logarithm."""
    return float(np.exp(r.uniform(math.log(low), math.log(high))))


def fault(r: Rng, *, sudden: float = 0.25, slow: tuple[int, int] = (50, 180), **knobs: Any) -> Changes:
    """At a random step: at once, or growing over ``slow`` steps."""
    over = 0 if r.random() < sudden else int(r.integers(*slow))
    return (Change(int(r.integers(60, 210)), knobs, over, exponential=bool(r.random() < 0.6)),)


def lr_constant(r: Rng, _: Knobs) -> Changes:
    return (Change(0, {"lr_factor": between(r, 3.5, 12)}, exponential=True),)


def lr_step(r: Rng, _: Knobs) -> Changes:
    return fault(r, sudden=1.0, lr_factor=between(r, 6, 30))


def lr_ramp(r: Rng, _: Knobs) -> Changes:
    return fault(r, sudden=0.0, lr_factor=between(r, 20, 90))


def lr_spike(r: Rng, _: Knobs) -> Changes:
    at = int(r.integers(60, 210))
    return (Change(at, {"lr_factor": between(r, 20, 80)}, until=at + int(r.integers(3, 20))),)


def no_clip(r: Rng, _: Knobs) -> Changes:
    return fault(r, clip=False, grad_clip=0.0, mu=int(r.integers(4, 7)), lr_factor=between(r, 5, 20))


def negative_weight(r: Rng, _: Knobs) -> Changes:
    return fault(r, negative_weight=between(r, 4, 14), lr_factor=between(r, 2, 5), grad_clip=0.0)


def advantage_shift(r: Rng, _: Knobs) -> Changes:
    return fault(r, advantage_shift=-between(r, 1.5, 6), lr_factor=between(r, 1.5, 4))


def advantage_uncentred(r: Rng, _: Knobs) -> Changes:
    return fault(r, sudden=1.0, advantage="uncentred", advantage_shift=between(r, 0.5, 3), lr_factor=between(r, 3, 8))


def stale_level(r: Rng, _: Knobs) -> Changes:
    return fault(r, sudden=0.5, stale=int(r.integers(12, 50)), lr_factor=between(r, 2, 5), old="engine", clip=False)


def stale_growing(r: Rng, _: Knobs) -> Changes:
    return fault(r, sudden=0.0, stale=int(r.integers(25, 80)), lr_factor=between(r, 3, 9), clip=bool(r.integers(2)))


def mismatch_level(r: Rng, _: Knobs) -> Changes:
    return fault(r, sudden=0.5, noise=between(r, 0.15, 0.6), lr_factor=between(r, 1, 3), truncation=0.0)


def mismatch_drift(r: Rng, _: Knobs) -> Changes:
    at = int(r.integers(60, 180))
    knobs = {"noise": between(r, 0.4, 1.2), "lr_factor": between(r, 1, 2)}
    return (Change(at, knobs, int(r.integers(70, 180))),)


def mismatch_fresh(r: Rng, _: Knobs) -> Changes:
    return fault(r, sudden=0.25, noise=between(r, 0.3, 0.9), fresh_noise=True, truncation=0.0)


def quantised(r: Rng, _: Knobs) -> Changes:
    return fault(r, sudden=1.0, engine=str(r.choice(["int3", "int4"])), lr_factor=between(r, 1, 3), truncation=0.0)


def temperature(r: Rng, _: Knobs) -> Changes:
    return fault(r, temperature=float(r.choice([0.3, 0.4, 1.7, 2.4])), lr_factor=between(r, 2, 6), truncation=0.0)


def one_engine(r: Rng, _: Knobs) -> Changes:
    return fault(
        r, sudden=0.3, noise=between(r, 0.4, 1.2), share=float(r.choice([0.25, 0.5])), lr_factor=between(r, 1, 3)
    )


def entropy_up(r: Rng, _: Knobs) -> Changes:
    return fault(r, entropy=between(r, 0.1, 0.7))


def entropy_down(r: Rng, _: Knobs) -> Changes:
    return fault(r, entropy=-between(r, 0.05, 0.4), beta=0.0)


def positive_only(r: Rng, _: Knobs) -> Changes:
    return fault(r, negative_weight=0.0, beta=0.0, lr_factor=between(r, 3, 10), entropy=0.0)


def kl_k1(r: Rng, _: Knobs) -> Changes:
    return fault(
        r, kl="k1", beta=between(r, 1, 8), mu=int(r.integers(3, 6)), lr_factor=between(r, 1.5, 4), grad_clip=0.0
    )


def kl_k3(r: Rng, _: Knobs) -> Changes:
    return fault(
        r, kl="k3", beta=between(r, 3, 30), mu=int(r.integers(3, 6)), lr_factor=between(r, 5, 14), grad_clip=0.0
    )


def kl_sign(r: Rng, _: Knobs) -> Changes:
    return fault(r, kl=str(r.choice(["k2", "k3"])), beta=-between(r, 0.05, 0.6))


def reference_drift(r: Rng, _: Knobs) -> Changes:
    return fault(r, reference_noise=between(r, 0.4, 1.5), beta=between(r, 0.2, 1.5))


def fp16_overflow(r: Rng, _: Knobs) -> Changes:
    return fault(r, loss_scale=float(2 ** r.uniform(19, 25)), sudden=0.3, grad_clip=0.0)


def fp16_skip(r: Rng, _: Knobs) -> Changes:
    return fault(r, loss_scale=float(2 ** r.uniform(19, 24)), sudden=0.2, skip_nonfinite=True, grad_clip=0.0)


def log_zero(r: Rng, _: Knobs) -> Changes:
    return fault(r, half_entropy=True, entropy=-between(r, 0.003, 0.05), lr_factor=between(r, 2, 5), beta=0.0)


def nan_batch(r: Rng, _: Knobs) -> Changes:
    return fault(r, bad_batch=between(r, 0.02, 0.6))


def zero_division(r: Rng, _: Knobs) -> Changes:
    return fault(
        r, sudden=1.0, advantage=str(r.choice(["std", "batch"])), advantage_eps=0.0, lr_factor=between(r, 1, 2)
    )


def hack_magic(r: Rng, _: Knobs) -> Changes:
    return fault(r, magic=between(r, 1.0, 2.5), right=float(r.uniform(0.3, 1)), beta=0.0, lr_factor=between(r, 1, 3))


def hack_filler(r: Rng, _: Knobs) -> Changes:
    return fault(r, filler_bonus=between(r, 1, 6), beta=0.0, lr_factor=between(r, 1, 2.5))


def hack_length(r: Rng, _: Knobs) -> Changes:
    return fault(r, length_bonus=between(r, 1, 6), beta=0.0, lr_factor=between(r, 1, 2.5))


def hack_format(r: Rng, _: Knobs) -> Changes:
    knobs = {"right": 0.0, "partial": 0.0, "format_bonus": 1.0, "beta": 0.0}
    knobs |= {"entropy": between(r, 0.03, 0.12), "lr_factor": between(r, 2, 6)}
    return fault(r, **knobs)


def sign_flip(r: Rng, _: Knobs) -> Changes:
    return fault(r, right=-between(r, 0.3, 1.0), partial=0.0)


def verifier_stuck(r: Rng, _: Knobs) -> Changes:
    return fault(r, stuck=float(r.uniform(0.85, 1.0)), entropy=between(r, 0.1, 0.5), lr_factor=between(r, 2, 6))


def verifier_noisy(r: Rng, _: Knobs) -> Changes:
    return fault(r, flipped=float(r.uniform(0.4, 0.6)), lr_factor=between(r, 3, 8))


def wrong_key(r: Rng, _: Knobs) -> Changes:
    return fault(r, wrong_key=float(r.uniform(0.7, 1.0)), partial=0.3, lr_factor=between(r, 1, 3))


def length_collapse(r: Rng, _: Knobs) -> Changes:
    return fault(r, length_bonus=-between(r, 4, 14), right=0.2, partial=0.0, lr_factor=between(r, 2, 5), beta=0.0)


def end_banned(r: Rng, _: Knobs) -> Changes:
    return fault(r, end_bias=-between(r, 8, 25), lr_factor=between(r, 1, 2.5))


def data_hard(r: Rng, _: Knobs) -> Changes:
    return fault(r, sudden=0.6, extra=int(r.integers(1, 4)), lr_factor=between(r, 1.5, 5))


def data_narrow(r: Rng, _: Knobs) -> Changes:
    return fault(r, distinct=int(r.integers(1, 3)), sudden=1.0, lr_factor=between(r, 5, 14))


def impossible(r: Rng, _: Knobs) -> Changes:
    knobs = {"wrong_key": 1.0, "partial": 0.0, "entropy": between(r, 0.05, 0.3), "lr_factor": between(r, 2, 5)}
    return fault(r, **knobs)


SWITCHES: tuple[Callable[[Rng], dict[str, Any]], ...] = (
    lambda r: {"noise": between(r, 0.3, 0.7), "clip": False, "lr_factor": between(r, 2, 4)},
    lambda r: {"stale": int(r.integers(20, 50)), "clip": False, "lr_factor": between(r, 2, 5)},
    lambda r: {"negative_weight": between(r, 3, 6), "mu": 4, "grad_clip": 0.0},
    lambda r: {"entropy": between(r, 0.05, 0.2), "lr_factor": between(r, 2, 4), "beta": 0.0},
    lambda r: {"temperature": 1.6, "mu": 4, "clip": False, "lr_factor": between(r, 1.5, 3)},
    lambda r: {"kl": "k1", "beta": between(r, 1, 4), "prompts": 3, "lr_factor": between(r, 2, 5)},
)


def switch(r: Rng, _: Knobs) -> Changes:
    return fault(r, sudden=1.0, **SWITCHES[r.integers(len(SWITCHES))](r))
