"""What the rewards of a group say: whether it teaches anything, how they spread, pass@k.

A group is measured if at least two of its responses were scored and all their rewards are finite. All of it is of
``scores`` (B, 2): the reward, and 1 for a right response, 0 for a wrong one, NaN where that is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.groups import Grouped, Grouping
from rlwatch.tensors.masked import keep, widen
from rlwatch.tensors.mergeable import Mean, Total

RELATIVE, ABSOLUTE = 1e-6, 1e-8
"""Rewards this close are equal: sums of parts in float32 differ by their rounding."""

DRAWS = (1, 2, 4, 8, 16, 32, 64)
"""The k of pass@k and all-correct@k."""


def scores(rewards: Tensor, right: Tensor | None = None) -> Tensor:
    """Scores (B, 2) of ``rewards`` (B,) and, where the trainer judges separately, ``right`` (B,) bool.

    Without ``right`` a reward of 1 is right and a reward of 0 or -1 wrong; of any other reward it is not known.
    """
    r = widen(rewards)
    if right is not None:
        return torch.stack([r, right.to(r.dtype)], -1)
    known = torch.where(near(r, torch.zeros_like(r)) | near(r, -torch.ones_like(r)), 0.0, torch.nan)
    return torch.stack([r, torch.where(near(r, torch.ones_like(r)), 1.0, known)], -1)


def near(x: Tensor, y: Tensor) -> Tensor:
    """Whether ``x`` and ``y`` are equal but for rounding; false where one is not finite."""
    return (x - y).abs() <= RELATIVE * torch.maximum(x.abs(), y.abs()) + ABSOLUTE


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Per group label (N,): responses scored, and of these right; whether the group is measured, and what it is.

    ``unknown`` (0-d) is of how many responses it is not known whether they are right.
    """

    size: Tensor
    rights: Tensor
    measured: Tensor
    flat: Tensor
    right: Tensor
    wrong: Tensor
    unknown: Tensor

    @property
    def other(self) -> Tensor:
        """Flat, but neither right nor wrong as a whole."""
        return self.flat & ~self.right & ~self.wrong

    @property
    def effective(self) -> Tensor:
        """Of unequal rewards."""
        return self.measured & ~self.flat


@lru_cache(maxsize=2)
def verdicts_of(values: Tensor, mask: Tensor, grouping: Grouping) -> Verdicts:
    """Of the scores ``values`` (N, 2) inside ``mask`` (N,); once for all statistics of them."""
    reward, right = values.unbind(-1)
    size, broken, rights, wrongs = grouping.total(
        torch.stack([mask, mask & ~reward.isfinite(), mask & (right == 1), mask & (right == 0)], -1).float()
    ).unbind(-1)
    high = grouping.largest(keep(reward, mask, -torch.inf))
    low = -grouping.largest(-keep(reward, mask, torch.inf))
    measured = (size > 1) & (broken == 0)
    flat = measured & near(high, low)
    unknown = (mask & right.isnan()).sum().float()
    return Verdicts(size, rights, measured, flat, flat & (rights == size), flat & (wrongs == size), unknown)


@dataclass(frozen=True, slots=True)
class ResponsesIn(Grouped):
    """Fraction of the responses in measured groups whose group is ``kind``: an attribute of :class:`Verdicts`."""

    kind: str = "flat"

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Mean:
        verdicts = verdicts_of(values, mask, grouping)
        return Mean((verdicts.size * verdicts.measured).sum(), (verdicts.size * getattr(verdicts, self.kind)).sum())


@dataclass(frozen=True, slots=True)
class GroupsThat(Grouped):
    """Number of measured groups that are ``kind``: an attribute of :class:`Verdicts`."""

    kind: str = "effective"

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Total:
        verdicts = verdicts_of(values, mask, grouping)
        return Total(verdicts.measured.sum().float(), getattr(verdicts, self.kind).sum().float())


@dataclass(frozen=True, slots=True)
class GroupStd(Grouped):
    """Standard deviation (ddof 1) of the rewards of a measured group, mean over responses."""

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Mean:
        verdicts = verdicts_of(values, mask, grouping)
        reward, size = keep(values[:, 0], mask, 0.0), verdicts.size
        gap = reward - (grouping.total(reward) / size.clamp(min=1))[grouping.labels]
        std = (grouping.total(keep(gap, mask, 0.0).square()) / (size - 1).clamp(min=1)).sqrt()
        return Mean((size * verdicts.measured).sum(), keep(size * std, verdicts.measured, 0.0).sum())


@dataclass(frozen=True, slots=True)
class Unless(Mean):
    """A mean that does not exist if anything was ``against`` it."""

    against: Tensor

    @override
    def merge(self, other: Self) -> Self:
        against = self.against + other.against
        return replace(self, count=self.count + other.count, kept=self.kept + other.kept, against=against)

    @override
    def settle(self) -> Mean:
        return Mean(self.count.masked_fill(self.against > 0, 0.0), self.kept)


@dataclass(frozen=True, slots=True)
class PassAt(Grouped):
    """Unbiased chance that of ``k`` responses to a prompt one is right (or, with ``every``, all are), mean over groups.

    Chen et al., arXiv 2107.03374: 1 - C(n - c, k) / C(n, k) for c right ones of n, over the groups with n >= k.
    Not measured if of a single scored response of the step it is not known whether it was right.
    """

    k: int = 1
    every: bool = False

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Unless:
        verdicts = verdicts_of(values, mask, grouping)
        n, c = verdicts.size, verdicts.rights
        chance = all_among(c, n, self.k) if self.every else 1 - all_among(n - c, n, self.k)
        large = n >= self.k
        return Unless(large.sum().float(), keep(chance, large, 0.0).sum(), verdicts.unknown)


def all_among(some: Tensor, n: Tensor, k: int) -> Tensor:
    """Chance that ``k`` drawn of ``n`` without putting back are all among ``some`` of them: C(some, k) / C(n, k)."""
    drawn = torch.arange(k, device=n.device, dtype=n.dtype)
    left = (some.unsqueeze(-1) - drawn).clamp(min=0)
    return (left / (n.unsqueeze(-1) - drawn).clamp(min=1)).prod(-1)


def reward_stats(rewards: Tensor, groups: Tensor, scored: Tensor, right: Tensor | None) -> dict[str, Grouped]:
    """All of this module under their canonical names; all arguments (B,)."""
    kept = GroupStd.of(scores(rewards, right), groups, scored)
    state = (kept.count, kept.values, kept.groups, kept.masks)
    return {
        "reward/group_std": kept,
        "reward/zero_std_frac": ResponsesIn(*state, "flat"),
        "reward/zero_std_right_frac": ResponsesIn(*state, "right"),
        "reward/zero_std_wrong_frac": ResponsesIn(*state, "wrong"),
        "reward/zero_std_other_frac": ResponsesIn(*state, "other"),
        "reward/groups_right": GroupsThat(*state, "right"),
        "reward/groups_wrong": GroupsThat(*state, "wrong"),
        "reward/effective_groups": GroupsThat(*state, "effective"),
        **{f"reward/pass_at_{k}": PassAt(*state, k) for k in DRAWS},
        **{f"reward/all_correct_at_{k}": PassAt(*state, k, every=True) for k in DRAWS[1:]},
    }
