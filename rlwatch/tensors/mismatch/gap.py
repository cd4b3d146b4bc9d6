"""How far rollout engine and trainer lie apart on the sampled tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rlwatch.tensors.kl import k3
from rlwatch.tensors.masked import indicator, widen
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats
from rlwatch.tensors.mismatch.thresholds import USUAL, Band, Thresholds
from rlwatch.tensors.paired import Correlation
from rlwatch.tensors.spread import Ess, Std


@dataclass(frozen=True, slots=True)
class Gap:
    """Both sets of log-probs (B, T), nats, and which tokens to compare.

    ``scored`` leaves out what the engine could not score (NaN in ``rollout``); a NaN of the trainer is not hidden.
    ``d`` is trainer - rollout, ``weight`` its exponential (inf where that overflows).
    """

    trainer: Tensor
    rollout: Tensor
    scored: Tensor
    d: Tensor
    weight: Tensor

    @classmethod
    def of(cls, trainer_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Self:
        """Of log-probs (B, T) over ``mask`` (B, T)."""
        trainer, rollout = widen(trainer_logp), widen(rollout_logp)
        d = trainer - rollout
        return cls(trainer, rollout, mask.bool() & ~rollout.isnan(), d, d.exp())

    def outside(self, band: Band) -> Tensor:
        """1.0 where the weight lies outside ``band``, else 0.0; NaN where it is NaN. (B, T)."""
        low, high = band
        return indicator((self.weight < low) | (self.weight > high), self.weight)


def gap_stats(gap: Gap, at: Thresholds = USUAL) -> Stats:
    """Token statistics of trainer against rollout engine over the scored tokens of ``gap``.

    Tokens the engine could not score are left out here and counted by
    :func:`rlwatch.tensors.finite.nonfinite_stats`.
    """
    return {**_log_prob_stats(gap), **_weight_stats(gap, at), **_probability_stats(gap)}


def _log_prob_stats(gap: Gap) -> Stats:
    """Of d, nats; ``mult_prob_error`` is NeMo-RL's mean of exp |d|, >= 1."""
    distance = gap.d.abs()
    return {
        "mismatch/kl": Mean.of(-gap.d, gap.scored),
        "mismatch/k3": Mean.of(k3(-gap.d), gap.scored),
        "mismatch/logp_absdiff": Mean.of(distance, gap.scored),
        "mismatch/logp_absdiff_max": Max.of(distance, gap.scored),
        "mismatch/mult_prob_error": Mean.of(distance.exp(), gap.scored),
    }


def _weight_stats(gap: Gap, at: Thresholds) -> Stats:
    """Of the raw weights, and the shares that truncation and IcePop would cut. chi2 is E[weight^2] - 1."""
    return {
        "mismatch/weight_mean": Mean.of(gap.weight, gap.scored),
        "mismatch/weight_max": Max.of(gap.weight, gap.scored),
        "mismatch/weight_min": Min.of(gap.weight, gap.scored),
        "mismatch/chi2": Mean.of(torch.expm1(2 * gap.d), gap.scored),
        "mismatch/ess": Ess.of(gap.d, gap.scored),
        "mismatch/tis_truncated": Mean.of(indicator(gap.d > math.log(at.cap), gap.d), gap.scored),
        "mismatch/icepop_masked": Mean.of(gap.outside(at.token), gap.scored),
    }


def _probability_stats(gap: Gap) -> Stats:
    """Of probabilities, not log-probs, as verl's ``training/rollout_probs_diff_*`` (correlation: arXiv 2506.13585)."""
    trainer, rollout = gap.trainer.exp(), gap.rollout.exp()
    distance = (trainer - rollout).abs()
    return {
        "mismatch/prob_absdiff": Mean.of(distance, gap.scored),
        "mismatch/prob_absdiff_max": Max.of(distance, gap.scored),
        "mismatch/prob_absdiff_std": Std.of(distance, gap.scored),
        "mismatch/prob_corr": Correlation.of(trainer, rollout, gap.scored),
    }
