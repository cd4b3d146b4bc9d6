"""verl's importance-weight metrics, after its truncation, and the same of the raw weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.tensors.correction.sums import clamped, mean, mean_of_each, sample_deviation, spread, total
from rlwatch.tensors.correction.thresholds import Threshold, weight_bounds
from rlwatch.tensors.masked import keep, masked_max, masked_min
from rlwatch.tensors.spread import Ess

LEVELS = ("token", "sequence")


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one batch, (B, T): ``raw`` clamped only by verl's safety bound, ``used`` as they multiply the loss.

    ``log`` is unclamped: (B, T) at token level, (B, 1) at sequence level.
    """

    log: Tensor
    raw: Tensor
    used: Tensor
    mask: Tensor
    low: float | None
    high: float

    @property
    def floor(self) -> float:
        """What counts as a low weight where no lower bound was given."""
        return 1.0 / self.high if self.low is None else self.low


def weigh(log_ratio: Tensor, mask: Tensor, level: str, threshold: Threshold) -> Weights:
    """``log_ratio`` (B, T) nats. Raises ``ValueError`` for another level than ``token`` and ``sequence``."""
    if level not in LEVELS:
        raise ValueError(f"rollout_is must be one of {', '.join(LEVELS)}, got {level!r}")
    low, high = weight_bounds(threshold)
    log = log_ratio if level == "token" else total(log_ratio, mask).unsqueeze(-1)
    raw = clamped(log).exp().expand_as(log_ratio) * mask
    used = raw.clamp(max=high) if low is None else torch.where((raw >= low) & (raw <= high), raw, 0.0)
    return Weights(log, raw, used, mask, low, high)


def weight_metrics(weights: Weights, level: str, *, batch_normalize: bool = False) -> dict[str, Tensor]:
    """As ``compute_is_metrics``; ``rollout_is_raw_*`` are ours."""
    extremes = _token_extremes if level == "token" else _sequence_extremes
    metrics = {
        "rollout_is_mean": mean(weights.used, weights.mask),
        "rollout_is_std": spread(weights.used, weights.mask, low=0.0, high=weights.high),
        "rollout_is_eff_sample_size": _effective(weights.used.clamp(0.0, weights.high), weights.mask),
        **extremes(weights),
        **_of_responses(weights),
        **_raw(weights),
    }
    if weights.low is not None:
        outside = (weights.raw < weights.low) | (weights.raw > weights.high)
        metrics["rollout_is_oob_ratio"] = mean(outside.float(), weights.mask)
    if batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = _norm_factor(weights, level)
    return metrics


def _effective(weights: Tensor, mask: Tensor) -> Tensor:
    """0 where IcePop left no weight at all; verl divides by zero there."""
    inverse = mean((weights / (mean(weights, mask) + 1e-8)).square(), mask)
    return torch.where(inverse == 0, 0.0, 1.0 / inverse)


def _token_extremes(weights: Weights) -> dict[str, Tensor]:
    return {
        "rollout_is_max": masked_max(weights.used, weights.mask),
        "rollout_is_min": masked_min(weights.used, weights.mask),
        "rollout_is_ratio_fraction_high": mean((weights.raw > weights.high).float(), weights.mask),
        "rollout_is_ratio_fraction_low": mean((weights.raw < weights.floor).float(), weights.mask),
    }


def _sequence_extremes(weights: Weights) -> dict[str, Tensor]:
    """Untruncated, over all responses, also those without tokens (weight 1)."""
    log, every = weights.log, torch.ones_like(weights.log)
    return {
        "rollout_is_max": masked_max(log, every).clamp(max=20.0).exp(),
        "rollout_is_min": masked_min(log, every).exp(),
        "rollout_is_ratio_fraction_high": (log > math.log(weights.high)).float().mean(),
        "rollout_is_ratio_fraction_low": (log < math.log(weights.floor)).float().mean(),
    }


def _of_responses(weights: Weights) -> dict[str, Tensor]:
    """Of the mean weight of each response; the fractions are of the raw ones."""
    each, raw = mean_of_each(weights.used, weights.mask), mean_of_each(weights.raw, weights.mask)
    every = torch.ones_like(each)
    return {
        "rollout_is_seq_mean": each.mean(),
        "rollout_is_seq_std": sample_deviation(each, every),
        "rollout_is_seq_max": masked_max(each, every),
        "rollout_is_seq_min": masked_min(each, every),
        "rollout_is_seq_max_deviation": masked_max((each - 1.0).abs(), every),
        "rollout_is_seq_fraction_high": (raw > weights.high).float().mean(),
        "rollout_is_seq_fraction_low": (raw < weights.floor).float().mean(),
    }


def _raw(weights: Weights) -> dict[str, Tensor]:
    """What verl hides: the same of the weights before truncation, IcePop and safety bound, at the same level."""
    log = weights.log.expand_as(weights.raw)
    raw = log.exp()
    middle = mean(raw, weights.mask)
    return {
        "rollout_is_raw_mean": middle,
        "rollout_is_raw_std": mean((raw - middle).square(), weights.mask).sqrt(),
        "rollout_is_raw_max": masked_max(raw, weights.mask),
        "rollout_is_raw_min": masked_min(raw, weights.mask),
        "rollout_is_raw_eff_sample_size": Ess.of(log, weights.mask).value(),
    }


def _norm_factor(weights: Weights, level: str) -> Tensor:
    """The mean that verl divides weights by; 1 where it is 0. Over this batch only, not over ranks."""
    if level == "token":
        factor = mean(weights.used, weights.mask)
    else:
        filled = weights.mask.sum(-1) > 0
        factor = keep(mean_of_each(weights.used, weights.mask), filled, 0.0).sum() / filled.sum().clamp(min=1)
    return torch.where(factor > 1e-8, factor, 1.0)
