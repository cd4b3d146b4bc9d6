"""verl's rejection-sampling metrics (``rollout_rs``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.tensors.correction.sums import clamped, mean, mean_of_each, sample_deviation, spread, total
from rlwatch.tensors.correction.thresholds import Rule
from rlwatch.tensors.masked import keep, masked_max, masked_mean, masked_min


@dataclass(frozen=True, slots=True)
class Judged:
    """What one rule says of a batch.

    ``statistic`` (B, T) per token, a response's own spread over its tokens; ``of_response`` (B,); ``kept`` (B, T) bool;
    ``low`` and ``high`` bound the statistic. For k1 the statistic is -log weight, so the bounds apply to
    rollout/trainer: the reciprocal of what ``rollout_is_threshold`` bounds.
    """

    rule: Rule
    statistic: Tensor
    of_response: Tensor
    kept: Tensor
    low: float | None
    high: float


def rejection_metrics(log_ratio: Tensor, mask: Tensor, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """As ``compute_rollout_rejection_mask``; ``log_ratio`` (B, T) nats."""
    metrics: dict[str, Tensor] = {}
    kept = torch.ones_like(mask, dtype=torch.bool)
    for rule in rules:
        judged = judge(log_ratio, mask, rule)
        metrics |= _option_metrics(judged, mask)
        kept = kept & judged.kept
    lost = mask.bool() & ~kept
    metrics["rollout_rs_masked_fraction"] = mean((~kept).to(log_ratio.dtype), mask)
    metrics["rollout_rs_seq_masked_fraction"] = lost.any(-1).float().mean()
    return metrics


def judge(log_ratio: Tensor, mask: Tensor, rule: Rule) -> Judged:
    """Apply one rule. A NaN is not kept."""
    per_token = _divergence(clamped(log_ratio), rule.estimator)
    if rule.level == "token":
        statistic, of_response = per_token, mean_of_each(per_token, mask)
    else:
        of_response = _over_response(per_token, mask, rule.level)
        statistic = of_response.unsqueeze(-1).expand_as(per_token)
    low, high = (None, rule.high) if rule.low is None else (math.log(rule.low), math.log(rule.high))
    kept = (statistic <= high) if low is None else (statistic >= low) & (statistic <= high)
    return Judged(rule, statistic, of_response, kept, low, high)


def _divergence(log_ratio: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -log_ratio
    return 0.5 * log_ratio**2 if estimator == "k2" else log_ratio.exp() - 1.0 - log_ratio


def _over_response(per_token: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "seq_sum":
        return total(per_token, mask)
    if level == "seq_mean":
        return mean_of_each(per_token, mask)
    if not per_token.shape[-1]:
        return per_token.sum(-1)
    largest = keep(per_token, mask, -torch.inf).amax(-1)
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _option_metrics(judged: Judged, mask: Tensor) -> dict[str, Tensor]:
    filled = mask.sum(-1) > 0
    whole, values = judged.rule.level != "token", judged.of_response
    x, on = (values, filled) if whole else (judged.statistic, mask)
    lost = (mask.bool() & ~judged.kept).any(-1)
    metrics = {
        "mean": mean(judged.statistic, mask),
        "max": masked_max(x, on),
        "min": masked_min(x, on),
        "std": spread(judged.statistic, mask, low=judged.low or 0.0, high=judged.high),
        "fraction_high": _fraction(x > judged.high, on, whole=whole),
        "fraction_low": _below(x, judged.low, on, whole=whole),
        **_response_metrics(judged, filled),
        "masked_fraction": mean((~judged.kept).to(judged.statistic.dtype), mask),
        "seq_masked_fraction": masked_mean(lost.to(values.dtype), filled),
    }
    return {f"rollout_rs_{judged.rule.option}_{name}": value for name, value in metrics.items()}


def _response_metrics(judged: Judged, filled: Tensor) -> dict[str, Tensor]:
    """Of the responses that have tokens."""
    values = judged.of_response
    metrics = {
        "seq_mean": masked_mean(values, filled),
        "seq_std": sample_deviation(values, filled),
        "seq_max": masked_max(values, filled),
        "seq_min": masked_min(values, filled),
        "seq_max_deviation": masked_max(values.abs(), filled),
        "seq_fraction_high": masked_mean((values > judged.high).float(), filled),
    }
    if judged.low is not None:
        metrics["seq_fraction_low"] = masked_mean((values < judged.low).float(), filled)
    return metrics


def _fraction(condition: Tensor, on: Tensor, *, whole: bool) -> Tensor:
    return masked_mean(condition.float(), on) if whole else mean(condition.float(), on)


def _below(x: Tensor, low: float | None, on: Tensor, *, whole: bool) -> Tensor:
    return x.new_zeros(()) if low is None else _fraction(x < low, on, whole=whole)
