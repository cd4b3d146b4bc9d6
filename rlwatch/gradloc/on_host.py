"""The numbers of one loss pass, copied from the device once: what culprits and their responses are described with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlwatch.gradloc.causes import ResponseLevels, StepLevels
from rlwatch.gradloc.passes import LossPass, Passes
from rlwatch.gradloc.report import TokenAt
from rlwatch.gradloc.world import World, gather_plain
from rlwatch.tensors.masked import widen

NUMBERS = (
    "logp", "old_logp", "rollout_logp", "ref_logp", "entropy", "ratio", "advantage", "reward", "coefficient",
    "entropy_coefficient",
)  # fmt: skip
"""What can be known of a token, in this order."""


@dataclass(frozen=True, slots=True)
class HostPass:
    """One micro-batch of this rank: ``columns`` (B, T) of those of :data:`NUMBERS` that are known, float64.

    ``mask`` (B, T) is bool; ``ids`` (B, T) int64, None where not known.
    """

    rank: int
    microbatch: int
    first_row: int
    mask: np.ndarray
    columns: Mapping[str, np.ndarray]
    ids: np.ndarray | None = None

    def token_id(self, at: TokenAt) -> int | None:
        """Of the token there."""
        return None if self.ids is None else int(self.ids[at.row, at.position])

    def numbers(self, at: TokenAt) -> dict[str, float]:
        """What is known of the token there; NaN is a value, what was not measured is absent."""
        return {name: float(column[at.row, at.position]) for name, column in self.columns.items()}

    def response(self, at: TokenAt) -> ResponseLevels:
        """Mean log-ratios of the response the token is in, the token itself left out."""
        others = self.mask[at.row].copy()
        others[at.position] = False
        return ResponseLevels(self._apart(at.row, others, "old_logp"), self._apart(at.row, others, "rollout_logp"))

    def _apart(self, row: int, where: np.ndarray, other: str) -> float | None:
        if other not in self.columns or not where.any():
            return None
        mean = float((self.columns["logp"][row] - self.columns[other][row])[where].mean())
        return mean if math.isfinite(mean) else None

    def per_response(self, name: str) -> list[float]:
        """``name`` of the first token of each response that has tokens; empty where not known."""
        if name not in self.columns:
            return []
        return [
            float(values[mask][0]) for values, mask in zip(self.columns[name], self.mask, strict=True) if mask.any()
        ]


def on_host(passes: Passes, rank: int = 0) -> list[HostPass]:
    """Each pass of ``rank``; waits for the device once for each."""
    return [_copied(one, rank, k) for k, one in enumerate(passes.all)]


def step_levels(
    hosts: Sequence[HostPass],
    *,
    world: World | None = None,
    layers: Mapping[str, float] | None = None,
    usual: Mapping[str, float] | None = None,
    top_share: float | None = None,
) -> StepLevels:
    """What is usual in the step: advantages and rewards of the responses of all ranks of ``world``. A collective."""
    ours = [[value for host in hosts for value in host.per_response(name)] for name in ("advantage", "reward")]
    every = [ours] if world is None else gather_plain(world, ours)
    advantages, rewards = ([value for rank in every for value in rank[i]] for i in (0, 1))
    return StepLevels.of(advantages, rewards, layers=layers, usual=usual, top_share=top_share)


def _copied(one: LossPass, rank: int, microbatch: int) -> HostPass:
    """Everything in one tensor, so that it is one copy; token ids are exact below 2**24."""
    tokens, known = one.tokens, _known(one)
    ids = {} if tokens.ids is None else {"ids": tokens.ids.to(torch.float32)}
    parts = {"mask": tokens.mask.to(torch.float32), **ids, **known}
    host = torch.stack([widen(part).expand(one.shape).double() for part in parts.values()]).cpu().numpy()
    columns = dict(zip(parts, host, strict=True))
    mask = columns.pop("mask") != 0
    whole = columns.pop("ids").astype(np.int64) if ids else None
    return HostPass(rank, microbatch, one.first_row, mask, columns, whole)


def _known(one: LossPass) -> dict[str, Tensor]:
    tokens = one.tokens
    logp, old = widen(tokens.logp), tokens.old_logp
    found = {
        "logp": logp,
        "old_logp": old,
        "rollout_logp": tokens.rollout_logp,
        "ref_logp": tokens.ref_logp,
        "entropy": tokens.entropy,
        "ratio": None if old is None else (logp - widen(old)).exp(),
        "advantage": tokens.token_advantages,
        "reward": None if one.rewards is None else one.rewards[:, None],
        "coefficient": one.coefficients.get("logp"),
        "entropy_coefficient": one.coefficients.get("entropy"),
    }
    return {name: values for name, values in found.items() if values is not None}
