"""How the mismatch of tokens adds up over whole responses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rlwatch.tensors.growth import Growth
from rlwatch.tensors.masked import indicator, keep
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats
from rlwatch.tensors.mismatch.gap import Gap
from rlwatch.tensors.mismatch.thresholds import USUAL, Band, Thresholds
from rlwatch.tensors.spread import Ess


@dataclass(frozen=True, slots=True)
class Responses:
    """Sums over the scored tokens of each response, (B,): log-probs, and their difference ``d``; nats.

    A response without a scored token is not ``measured``: verl counts such ones as weight 1 and perplexity 1.
    """

    tokens: Tensor
    measured: Tensor
    trainer: Tensor
    rollout: Tensor
    d: Tensor

    @classmethod
    def of(cls, gap: Gap) -> Self:
        """Of a batch."""
        tokens = gap.scored.sum(-1).to(gap.d.dtype)
        sums = [keep(x, gap.scored, 0.0).sum(-1) for x in (gap.trainer, gap.rollout, gap.d)]
        return cls(tokens, tokens > 0, *sums)

    def per_token(self, total: Tensor) -> Tensor:
        """Mean over the tokens of a response, (B,); NaN for one without tokens."""
        return total / self.tokens


def response_stats(gap: Gap, at: Thresholds = USUAL) -> Stats:
    """Every response counts once, unlike in verl's sequence-level weights, which count it once a token."""
    responses = Responses.of(gap)
    return {
        **_weight_stats(responses, at),
        **_perplexity_stats(responses),
        "mismatch/seq_m2": _growth(responses),
        "mismatch/log_var_growth": Growth.of(gap.d, gap.scored),
    }


def _weight_stats(responses: Responses, at: Thresholds) -> Stats:
    """Of the product of a response's raw weights (inf where it overflows), and the shares rejection would drop."""
    total, measured = responses.d, responses.measured
    mean = responses.per_token(total)
    return {
        "mismatch/seq_weight_mean": Mean.of(total.exp(), measured),
        "mismatch/seq_weight_max": Max.of(total.exp(), measured),
        "mismatch/seq_chi2": Mean.of(torch.expm1(2 * total), measured),
        "mismatch/seq_ess": Ess.of(total, measured),
        "mismatch/seq_rejected": Mean.of(_outside(total, at.sequence), measured),
        "mismatch/geo_rejected": Mean.of(_outside(mean, at.geometric), measured),
    }


def _outside(log_weight: Tensor, band: Band) -> Tensor:
    low, high = (math.log(bound) for bound in band)
    return indicator((log_weight < low) | (log_weight > high), log_weight)


def _perplexity_stats(responses: Responses) -> Stats:
    """Perplexities as in verl's ``rollout_corr``; ``log_ppl_diff`` is log perplexity of the trainer minus rollout's.

    That is what verl 0.9.1 computes, although its documentation states the opposite sign: above 0 the trainer is the
    less confident one.
    """
    per_token, measured = responses.per_token, responses.measured
    trainer, rollout, diff = -per_token(responses.trainer), -per_token(responses.rollout), -per_token(responses.d)
    return {
        "mismatch/ppl_trainer": Mean.of(trainer.exp(), measured),
        "mismatch/ppl_rollout": Mean.of(rollout.exp(), measured),
        "mismatch/ppl_ratio": Mean.of(diff.exp(), measured),
        "mismatch/log_ppl_trainer": Mean.of(trainer, measured),
        "mismatch/log_ppl_rollout": Mean.of(rollout, measured),
        "mismatch/log_ppl_diff": Mean.of(diff, measured),
        "mismatch/log_ppl_diff_max": Max.of(diff, measured),
        "mismatch/log_ppl_diff_min": Min.of(diff, measured),
        "mismatch/log_ppl_absdiff": Mean.of(diff.abs(), measured),
    }


def _growth(responses: Responses) -> Mean:
    """Sum of the squared log-weights of responses over the sum of their lengths, nats^2 per token.

    Independent errors of tokens make it equal ``mismatch/m2``; errors that compound make it up to n times that.
    Unlike the regression of :class:`~rlwatch.tensors.growth.Growth` it exists where all lengths are equal.
    """
    return Mean(responses.tokens.sum(), keep(responses.d.square(), responses.measured, 0.0).sum())
