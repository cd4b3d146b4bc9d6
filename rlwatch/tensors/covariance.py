"""Covariance of log-prob and advantage: what drives entropy down (Cui et al., arXiv 2505.22617).

With c_t = (log p_t - <log p>)(A_t - <A>) over the tokens the loss counts, a policy-gradient step changes entropy by
about minus the step size times <c>. A few tokens carry most of it; Clip-Cov and KL-Cov hold just those back.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.clipping import clipped_sides
from rlwatch.tensors.masked import indicator, keep, masked_count, masked_mean, widen
from rlwatch.tensors.mergeable import Stat, Stats
from rlwatch.tensors.paired import Paired
from rlwatch.tensors.tokens import TokenBatch

TOP = 0.002
"""Fraction of tokens called the top: what KL-Cov holds back in a 7B model."""
BOUNDS = (1.0, 5.0)
"""Between these a token is a candidate of Clip-Cov, as published and by verl's defaults."""


def token_covariance(logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """c_t of each token, in the shape of ``logp`` and ``mask``; ``advantages`` broadcast to it."""
    a = widen(advantages).expand_as(logp)
    return (widen(logp) - masked_mean(logp, mask)) * (a - masked_mean(a, mask))


def clip_cov_candidates(
    logp: Tensor, advantages: Tensor, mask: Tensor, clipped: Tensor, bounds: tuple[float, float] = BOUNDS
) -> Tensor:
    """Tokens Clip-Cov draws from, (B, T) bool: c_t between ``bounds`` and not ``clipped`` (B, T) by PPO already.

    verl's loss ``clip_cov`` drops the gradient of floor(2e-4 N) of them, chosen at random (at least one, if there is
    one).
    """
    c = token_covariance(logp, advantages, mask)
    return mask.bool() & ~clipped & (c > bounds[0]) & (c < bounds[1])


def kl_cov_tokens(logp: Tensor, advantages: Tensor, mask: Tensor, fraction: float = TOP) -> Tensor:
    """Tokens KL-Cov penalises, (B, T) bool: of N, the floor(``fraction`` N) with the largest c_t, at least one.

    verl's default is 2e-4, as published for a 32B model.
    """
    top, chosen = _largest(token_covariance(logp, advantages, mask), mask, fraction)
    picked = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    return picked.scatter(0, top.indices, chosen).view_as(mask) & mask.bool()


def _largest(c: Tensor, mask: Tensor, fraction: float) -> tuple[torch.return_types.topk, Tensor]:
    """More than enough of the largest of ``c``, and which of them are the ``fraction`` of ``mask``."""
    top = keep(c, mask, -torch.inf).flatten().topk(min(c.numel(), max(1, int(c.numel() * fraction))))
    n = mask.bool().sum()
    exact = n.to(torch.float32 if n.device.type == "mps" else torch.float64) * fraction
    return top, torch.arange(len(top.values), device=n.device) < exact.floor().clamp(min=1)


@dataclass(frozen=True, slots=True)
class Covariance(Paired):
    """Mean of c_t: the covariance over n tokens (not n - 1)."""

    @override
    def value(self) -> Tensor:
        return self.xy / self.count


@dataclass(frozen=True, slots=True)
class Pairs(Stat):
    """Base of those that need the c_t of all tokens together: pairs are kept until the step ends.

    ``logp`` and ``masks`` hold one (B, T) a micro-batch, ``advantages`` one that broadcasts to it.
    """

    logp: tuple[Tensor, ...]
    advantages: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]

    @classmethod
    def of(cls, logp: Tensor, advantages: Tensor, mask: Tensor) -> Self:
        """Of ``logp`` and ``mask`` (B, T) and ``advantages`` (B, T) or (B, 1)."""
        return cls(masked_count(mask, logp), (widen(logp),), (widen(advantages),), (mask.bool(),))

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def all(self) -> tuple[Tensor, Tensor]:
        """c_t and mask of all tokens, (N,)."""
        a = torch.cat([a.expand_as(x).flatten() for a, x in zip(self.advantages, self.logp, strict=True)])
        mask = _flat(self.masks)
        return token_covariance(_flat(self.logp), a, mask), mask


def _flat(pieces: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([piece.flatten() for piece in pieces])


@dataclass(frozen=True, slots=True)
class TopCovariance(Pairs):
    """Mean of the :data:`TOP` largest c_t."""

    @override
    def value(self) -> Tensor:
        c, mask = self.all()
        if not c.numel():
            return c.new_full((), torch.nan)
        top, chosen = _largest(c, mask, TOP)
        mean = torch.where(chosen, top.values, 0.0).sum() / chosen.sum()
        return torch.where(keep(c, mask, 0.0).isnan().any(), torch.nan, mean)


@dataclass(frozen=True, slots=True)
class PositiveCovariance(Pairs):
    """Fraction of tokens with c_t > 0."""

    @override
    def value(self) -> Tensor:
        c, mask = self.all()
        return masked_mean(indicator(c > 0, c), mask)


@dataclass(frozen=True, slots=True)
class ClipCovCandidates(Pairs):
    """Fraction of tokens that :func:`clip_cov_candidates` names; ``clipped`` as ``masks``."""

    clipped: tuple[Tensor, ...]

    @classmethod
    def beside(cls, pairs: Pairs, clipped: Tensor) -> Self:
        """Of the tokens of ``pairs``, of which PPO has ``clipped`` (B, T) some."""
        return cls(pairs.count, pairs.logp, pairs.advantages, pairs.masks, (clipped,))

    @override
    def value(self) -> Tensor:
        c, mask = self.all()
        low, high = BOUNDS
        return masked_mean(indicator((c > low) & (c < high) & ~_flat(self.clipped), c), mask)


def core(batch: TokenBatch) -> Stats:
    """``policy/cov``, the mean of c_t, where advantages are known; nats times the advantage's unit."""
    a = batch.token_advantages
    return {} if a is None else {"policy/cov": Covariance.of(batch.logp, a, batch.mask)}


def full(batch: TokenBatch) -> Stats:
    """``policy/cov_top``, ``cov_positive`` and ``cov_candidates``: which tokens carry the covariance."""
    a = batch.token_advantages
    if a is None:
        return {}
    top = TopCovariance.of(batch.logp, a, batch.mask)
    return {
        "policy/cov_top": top,
        "policy/cov_positive": PositiveCovariance(top.count, top.logp, top.advantages, top.masks),
        "policy/cov_candidates": ClipCovCandidates.beside(top, _clipped(batch, a)),
    }


def _clipped(batch: TokenBatch, advantages: Tensor) -> Tensor:
    if batch.old_logp is None or batch.clip is None:
        return torch.zeros_like(batch.mask, dtype=torch.bool)
    ratio = (widen(batch.logp) - widen(batch.old_logp)).exp()
    low, high = batch.clip
    below, above = clipped_sides(ratio, advantages, low=low, high=high)
    return below | above
