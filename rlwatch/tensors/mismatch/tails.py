"""Where the mismatch sits: in few tokens or all, sure ones or unsure ones, early or late in a response."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlwatch.tensors.masked import indicator
from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.mismatch.gap import Gap
from rlwatch.tensors.mismatch.thresholds import USUAL, Thresholds
from rlwatch.tensors.paired import Slope
from rlwatch.tensors.spread import Ess, Quantile

BUCKETS = ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, math.inf))
"""Of the trainer's probability of a token, low included, high excluded."""
SURE, UNSURE = 0.9, 0.5
"""A rollout engine above the one and a trainer below the other contradict each other."""


def tail_stats(gap: Gap, at: Thresholds = USUAL, entropy: Tensor | None = None) -> Stats:
    """Over the scored tokens; ``entropy`` (B, T) nats.

    ``factor2_frac``: share of tokens whose probabilities differ by more than a factor of 2; ``overconfident_frac``:
    share that the engine held above .9 and the trainer below .5; ``absdiff_per_1k``: growth of |d| over 1,000 tokens
    of a response; ``ess_truncated``: the effective sample size after truncation, beside the raw one it flatters.
    """
    distance = gap.d.abs()
    position = torch.arange(gap.d.shape[-1], device=gap.d.device, dtype=gap.d.dtype) / 1000
    contradicted = (gap.rollout > math.log(SURE)) & (gap.trainer < math.log(UNSURE))
    return {
        "mismatch/logp_absdiff_p99": Quantile.of(distance, gap.scored, 0.99),
        "mismatch/m2": Mean.of(gap.d.square(), gap.scored),
        "mismatch/factor2_frac": Mean.of(indicator(distance > math.log(2), distance), gap.scored),
        "mismatch/overconfident_frac": Mean.of(indicator(contradicted, gap.d), gap.scored),
        "mismatch/absdiff_per_1k": Slope.of(position, distance, gap.scored),
        "mismatch/ess_truncated": Ess.of(gap.d.clamp(max=math.log(at.cap)), gap.scored),
        **_by_probability(gap),
        **_masked_entropy(gap, at, entropy),
    }


def _by_probability(gap: Gap) -> Stats:
    """``mismatch/diff_p<low>``: mean d of the tokens in each bucket of the trainer's probability, nats.

    A token whose probability is NaN is outside none of them: it shows in all.
    """
    p = gap.trainer.exp()
    inside = {low: gap.scored & ~((p < low) | (p >= high)) for low, high in BUCKETS}
    return {f"mismatch/diff_p{round(100 * low):02d}": Mean.of(gap.d, mask) for low, mask in inside.items()}


def _masked_entropy(gap: Gap, at: Thresholds, entropy: Tensor | None) -> Stats:
    """Mean entropy of the tokens IcePop masks: forks in the text, or noise."""
    if entropy is None:
        return {}
    low, high = at.token
    masked = gap.scored & ~((gap.weight >= low) & (gap.weight <= high))
    return {"mismatch/icepop_entropy": Mean.of(entropy, masked)}
