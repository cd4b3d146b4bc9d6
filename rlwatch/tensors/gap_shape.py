"""Measure the shape of the gap between rollout engine and trainer, which differs from cause to cause.

:mod:`rlwatch.tensors.mismatch` measures the size of the gap. With d = log trainer - log rollout of a sampled token:

* Sampling that truncates the distribution (top-p, top-k, min-p) and is renormalised makes d = log(kept mass) <= 0
  wherever anything was cut. So nothing of the gap lies above 0, and the mean weight, 1 for any engine that can sample
  all that the trainer holds possible, is the kept mass.
* A temperature T of the engine, relative to the trainer's, makes log rollout = log p / T - log sum p^(1/T). To first
  order d = (1 - 1/T) (log p + H) with the entropy H of the trainer at that token: one number explains all of d.
* Rounding makes d a noise on both sides of 0, as large as the token's probability permits (1 - p), at any position.
* An error that adds up, as in a state that every token reads and writes, makes d grow along the response.
* Another template or tokenizer moves control tokens, those that follow one, and the first of a response most.
* A router that chooses other experts moves the tokens after those that it sent elsewhere, and the others hardly.
* Old weights make d grow with the versions between sampling and learning. Within one version they look like rounding.

An infinite gap has no shape: if one is scored, the sums and the statistics made from them are infinite or NaN. All
statistics are sums that add up over micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.control_tokens import template_places
from rlwatch.tensors.masked import indicator, keep, masked_count, widen
from rlwatch.tensors.mergeable import Correlation, Mean, ShareStat, Slope, Stat, Stats
from rlwatch.tensors.mismatch import LogProbGap, differing_layers, gap_of, recorded
from rlwatch.tensors.tokens import TokenBatch

__all__ = [
    "observe_gap_shape",
    "place_stats",
    "routing_contrast",
    "side_stats",
    "temperature_stats",
    "template_stats",
    "version_stats",
]


# Sides: how much of the gap lies above 0, where a truncated distribution has nothing.


def side_stats(gap: LogProbGap) -> Stats:
    """Return how the gap d = log trainer - log rollout of the scored tokens is divided between both sides of 0.

    ``below_frac``: share of tokens with d <= 0, including equal log-probs. ``above_share``: sum of the d above 0 over
    the sum of |d|, in [0, 1]. It is about .5 for noise and 0 for a truncated distribution; absent if there is no gap at
    all. It weighs a token by its gap, so that rounding hides nothing. The kept mass is ``mismatch/weight_mean``.
    """
    return {
        "mismatch/below_frac": Mean.of(indicator(gap.d <= 0, gap.d), gap.scored),
        "mismatch/above_share": ShareStat.of(gap.d.clamp(min=0.0), gap.d.abs(), gap.scored),
    }


# Temperature: a line through 0 on what the trainer would have expected.


@dataclass(frozen=True, slots=True)
class ThroughOrigin(Stat):
    """Base of statistics of the line y = b x through the origin: sums of squares and products of pairs (x, y).

    Not measured if x or y is 0 everywhere. Sums are float64 where the device has it.
    """

    xx: Tensor
    yy: Tensor
    xy: Tensor

    elementwise: ClassVar[bool] = True

    @classmethod
    def of(cls, x: Tensor, y: Tensor, mask: Tensor) -> Self:
        """Measure the pairs of ``x`` and ``y`` (of one shape) inside ``mask``."""
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        x, y = (keep(z, mask, 0.0).to(dtype) for z in (x, y))
        return cls(masked_count(mask, x), x.square().sum(), y.square().sum(), (x * y).sum())

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.xx + other.xx, self.yy + other.yy, self.xy + other.xy)

    @override
    def settle(self) -> Self:
        return replace(self, count=torch.where((self.xx == 0) | (self.yy == 0), 0.0, self.count))


class Temperature(ThroughOrigin):
    """Relative temperature T > 0 of the rollout engine, from the slope of y = (1 - 1/T) x through the origin.

    Not measured if no T > 0 explains the slope, not even an engine that samples uniformly.
    """

    @override
    def settle(self) -> Self:
        settled = super().settle()
        return replace(settled, count=torch.where(self.xy >= self.xx, 0.0, settled.count))

    @override
    def value(self) -> Tensor:
        return 1 / (1 - self.xy / self.xx)


class Explained(ThroughOrigin):
    """Share of the sum of squares of y that the least-squares line y = b x through the origin explains, in [0, 1]."""

    @override
    def value(self) -> Tensor:
        # Divided one by one: the product of two tiny sums would be 0.
        return (self.xy / self.xx * (self.xy / self.yy)).clamp(0.0, 1.0)


def temperature_stats(gap: LogProbGap, entropy: Tensor | None = None) -> Stats:
    """Return statistics of the engine's temperature relative to the trainer's, as far as a temperature explains the
    gap.

    ``logp_slope``: slope of d on the mean of both log-probs. It is 0 if both spread equally, above 0 if the engine's
    distribution is flatter. ``logp_corr``: Pearson's correlation of d and that mean, in [-1, 1]. Neither needs an
    entropy, but both mix certain and uncertain tokens. With ``entropy`` (B, T) of the trainer, in nats:
    ``engine_temperature`` > 0, which is 1 if both agree, to first order; and ``temperature_share``, the share of the
    squared gap that it explains, in [0, 1].
    """
    # On the mean of both, not on the trainer's: a noise in one of them alone would give a slope on that one.
    slope = Slope.of((gap.trainer + gap.rollout) / 2, gap.d, gap.scored)
    moments = (slope.count, slope.mean_x, slope.mean_y, slope.xx, slope.yy, slope.xy)
    stats: Stats = {"mismatch/logp_slope": slope, "mismatch/logp_corr": Correlation(*moments)}
    if entropy is None:
        return stats
    surprise = gap.trainer + widen(entropy)
    return stats | {
        "mismatch/engine_temperature": Temperature.of(surprise, gap.d, gap.scored),
        "mismatch/temperature_share": Explained.of(surprise, gap.d, gap.scored),
    }


# Place: does the gap grow along a response, beyond what sure and unsure tokens make of it?


@dataclass(frozen=True, slots=True)
class RoomRatio(Stat):
    """Ratio >= 0 of chosen elements to the others in one quantity: the sum of sizes over the sum of scales.

    Not measured if one of the four sums is 0.
    """

    others: Tensor
    others_room: Tensor
    chosen: Tensor
    chosen_room: Tensor

    elementwise: ClassVar[bool] = True

    @classmethod
    def of(cls, size: Tensor, room: Tensor, chosen: Tensor, mask: Tensor) -> Self:
        """Sum ``size`` and its scale ``room`` (of one shape, >= 0) inside ``mask``, for ``chosen`` (bool) elements and
        others.
        """
        on = mask.bool()
        sums = [keep(x, side, 0.0).sum() for side in (on & ~chosen, on & chosen) for x in (size, room)]
        return cls(masked_count(mask, size), *sums)

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(
            self.count + other.count,
            self.others + other.others,
            self.others_room + other.others_room,
            self.chosen + other.chosen,
            self.chosen_room + other.chosen_room,
        )

    @override
    def settle(self) -> Self:
        empty = (self.others == 0) | (self.others_room == 0) | (self.chosen == 0) | (self.chosen_room == 0)
        return replace(self, count=torch.where(empty, 0.0, self.count))

    @override
    def value(self) -> Tensor:
        return self.chosen / self.chosen_room / (self.others / self.others_room)


def place_stats(gap: LogProbGap) -> Stats:
    """Return ``mismatch/late_ratio``, whether the gap between trainer and engine grows along a response.

    It is sum |d| over sum (1 - p), p the trainer's probability, in the second half of each response's scored tokens,
    divided by the same in the first half. It is >= 0; 1 if the position does not matter, > 1 if the gap grows. Noise of
    the logits scales with 1 - p, so that the ratio is 1 also if responses end more certain than they begin. Absent if
    the tokens of one half are all certain or without a gap.
    """
    late = 2 * gap.scored.cumsum(-1) > gap.scored.sum(-1, keepdim=True)
    return {"mismatch/late_ratio": RoomRatio.of(gap.d.abs(), room_of(gap), late, gap.scored)}


def room_of(gap: LogProbGap) -> Tensor:
    """Return 1 - p of each token (B, T), p the trainer's probability: how far noise of the logits can change p."""
    return -torch.expm1(gap.trainer)


def template_stats(gap: LogProbGap, places: Tensor) -> Stats:
    """Return how much of the gap d between trainer and engine lies at tokens that depend on a template or tokenizer.

    ``places`` (B, T) bool marks these tokens. ``mismatch/template_ratio``: |d| over 1 - p at these tokens over the same
    at the others. It is 1 for noise, which does not depend on templates, and far above 1 if trainer and engine apply
    them differently. ``mismatch/template_share``: their share of the summed |d|.
    """
    size = gap.d.abs()
    return {
        "mismatch/template_ratio": RoomRatio.of(size, room_of(gap), places, gap.scored),
        "mismatch/template_share": ShareStat.of(torch.where(places, size, 0.0), size, gap.scored),
    }


def routing_contrast(gap: LogProbGap, experts: Tensor, rollout_experts: Tensor, mask: Tensor) -> Stats:
    """Return ``mismatch/routing_ratio``: how much larger the gap is after tokens that went to different experts.

    It is |d| over 1 - p of tokens whose predecessor went to different experts in trainer and engine, over the same of
    the other tokens, because a token's experts determine the log-prob of the next one. It is 1 if the router follows
    noise, as it does if everything is rounded; far above 1 if the router is what differs. ``experts``,
    ``rollout_experts``: (B, T, layers, k); empty if they differ in shape or device.
    """
    alike = experts.shape == rollout_experts.shape and experts.device == rollout_experts.device == mask.device
    if not alike or experts.dim() != 4 or not experts.shape[2] or mask.shape[1] < 2:
        return {}
    known, moved = recorded(experts, rollout_experts, mask), differing_layers(experts, rollout_experts) > 0
    size, room, scored = gap.d.abs()[:, 1:], room_of(gap)[:, 1:], gap.scored[:, 1:] & known[:, :-1]
    return {"mismatch/routing_ratio": RoomRatio.of(size, room, moved[:, :-1], scored)}


def version_stats(gap: LogProbGap, staleness: Tensor) -> Stats:
    """Return ``mismatch/absdiff_per_version``: the slope of |d| on ``staleness``, in nats per token and version.

    ``staleness`` (B,): policy versions between sampling and learning of each response. Absent if all are equal.
    """
    return {"mismatch/absdiff_per_version": Slope.of(widen(staleness).unsqueeze(-1), gap.d.abs(), gap.scored)}


def observe_gap_shape(batch: TokenBatch) -> Stats:
    """Return the statistics of the batch that differ between causes of a mismatch; empty if the engine gave no
    log-probs.
    """
    if batch.rollout_logp is None:
        return {}
    gap = gap_of(batch.trainer_logp, batch.rollout_logp, batch.mask)
    places = template_places(gap.scored, batch.ids, batch.control)
    stats = {**side_stats(gap), **temperature_stats(gap, batch.entropy), **place_stats(gap)}
    stats |= template_stats(gap, places)
    if batch.experts is not None and batch.rollout_experts is not None:
        stats |= routing_contrast(gap, batch.experts, batch.rollout_experts, batch.mask)
    return stats if batch.staleness is None else stats | version_stats(gap, batch.staleness)
