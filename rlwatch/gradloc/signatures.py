"""Where a number that is not finite comes from, by what beside it is and is not: METHODS, section 10."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.gradloc.passes import LossPass
from rlwatch.gradloc.traced import Origin

APART = 20.0
"""No policy update moves a log-prob by this many nats: tokens are misaligned or cut (METHODS, section 10, C)."""


def of_input(name: str, one: LossPass, at: tuple[int, ...]) -> tuple[Origin, str]:
    """Of ``name`` at token ``at`` of a micro-batch: the origin, and the reason in words."""
    tokens = one.tokens

    def fine(values: Tensor | None) -> bool:
        return values is not None and bool(values[at].isfinite())

    if name in {"rewards", "advantages"}:
        return Origin.REWARD, "the loss multiplies with it"
    if name == "ref_logp":
        return Origin.FORWARD, "the reference model gave it"
    if name == "rollout_logp" and fine(tokens.old_logp):
        return Origin.ENGINE, "the rollout engine gave it, the trainer's own log-prob is finite"
    if name in {"old_logp", "rollout_logp"} and fine(tokens.ref_logp):
        return Origin.WEIGHTS, "the reference is finite, so the policy's weights were broken when it was computed"
    return Origin.UNKNOWN, "nothing here says where it comes from"


def of_coefficient(one: LossPass, flags: Tensor) -> tuple[Origin, str]:
    """Of coefficients at ``flags`` (B, T), made of finite inputs: how far apart the policies are there, nats."""
    tokens = one.tokens
    pairs = {
        "the old policy": (tokens.logp, tokens.old_logp),
        "the reference": (tokens.logp, tokens.ref_logp),
        "the rollout engine": (tokens.trainer_logp, tokens.rollout_logp),
    }
    apart = {name: _largest(ours - other, flags) for name, (ours, other) in pairs.items() if other is not None}
    if not apart:
        return Origin.BACKWARD, "its inputs are finite, the loss itself overflowed"
    farthest = max(apart, key=apart.__getitem__)
    data = apart.get("the rollout engine", 0.0) > APART
    said = f"its inputs are finite, its log-prob is {apart[farthest]:.3g} nats from that of {farthest}"
    return (Origin.DATA if data else Origin.BACKWARD), said


def _largest(gaps: Tensor, flags: Tensor) -> float:
    return float(torch.where(flags, gaps.abs(), 0.0).nan_to_num(0.0).max())
