"""Histograms of token quantities of a batch: counts in fixed bins, so that batches and ranks can be added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.distributions import MANTISSA, QUANTITIES, bins_of
from rlwatch.tensors.masked import difference, masked_count, widen
from rlwatch.tensors.mergeable import Stat, Stats
from rlwatch.tensors.mismatch import gap_of
from rlwatch.tensors.tokens import TokenBatch, tokens_of

PREFIX = "distribution/"
"""Prefix of the names of histograms among the statistics of a batch; the name of the quantity follows."""


@dataclass(frozen=True, slots=True)
class Histogram(Stat):
    """Counts (int64) of values in the fixed bins of :mod:`rlwatch.distributions`; recorded, but not reported as a
    number.
    """

    bins: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor, bits: int) -> Self:
        """Count the values ``x`` inside ``mask`` (of the same shape), in bins by sign, exponent and ``bits`` of the
        mantissa.
        """
        # The sign, the exponent and the first bits of the mantissa are the bin: a shift, where logarithms and a search
        # of edges took ten times as long. Counts are whole numbers, so their order does not matter.
        raw = widen(x).float().contiguous().view(torch.int32)
        places = (raw >> (MANTISSA - bits)) & (bins_of(bits) - 1)
        empty = torch.zeros(bins_of(bits), dtype=torch.int64, device=x.device)
        ones = mask.bool().expand_as(x).flatten().long()
        return cls(masked_count(mask, x), empty.scatter_add_(0, places.flatten().long(), ones))

    @override
    def merge(self, other: Self) -> Self:
        return replace(self, count=self.count + other.count, bins=self.bins + other.bins)

    @override
    def value(self) -> Tensor:
        return self.count


def observe_distributions(batch: TokenBatch) -> Stats:
    """Return histograms of the batch's token quantities whose inputs it has.

    They are the log-ratio of the policy to the old policy, the gap between the log-probs of trainer and rollout engine
    (both in nats), and the entropy (nats).
    """
    batch = tokens_of(batch)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if batch.old_logp is not None:
        found["log_ratio"] = difference(batch.logp, batch.old_logp), batch.mask
    if batch.rollout_logp is not None:
        gap = gap_of(batch.trainer_logp, batch.rollout_logp, batch.mask)
        found["logp_difference"] = gap.d, gap.scored
    if batch.entropy is not None:
        found["entropy"] = batch.entropy, batch.mask
    with torch.no_grad():
        return {PREFIX + name: Histogram.of(x, mask, QUANTITIES[name].bits) for name, (x, mask) in found.items()}


def taken_apart(stats: Mapping[str, Stat]) -> tuple[Stats, dict[str, Histogram]]:
    """Split a batch's statistics into numbers, by metric name, and histograms, by the quantity they show."""
    histograms = {name.removeprefix(PREFIX): stat for name, stat in stats.items() if type(stat) is Histogram}
    return {name: stat for name, stat in stats.items() if type(stat) is not Histogram}, histograms
