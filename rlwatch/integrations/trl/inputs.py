"""TRL's inputs of one micro-batch, read as a :class:`~rlwatch.tensors.tokens.TokenBatch`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlwatch.integrations.transformers.describe import source_of
from rlwatch.tensors.importance import clip_stats, sequence_log_ratio, sequence_ratio_stats
from rlwatch.tensors.masked import indicator, keep, masked_count, widen
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats
from rlwatch.tensors.spread import Std
from rlwatch.tensors.tokens import TokenBatch

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses of GRPOTrainer whose clip is the PPO clip; of the others CISPO has a cap, and the rest report none."""


def token_batch(trainer: Any, inputs: Mapping[str, Any], logp: Tensor, entropy: Tensor | None) -> TokenBatch:
    """Of GRPO or RLOO. ``old_per_token_logps`` is absent on-policy (the ratio is 1 by definition) and in RLOO."""
    whole = inputs["completion_mask"].bool()
    sampled = inputs["tool_mask"].bool() if "tool_mask" in inputs else None
    return TokenBatch(
        logp=logp,
        mask=whole if sampled is None else whole & sampled,
        entropy=entropy,
        ids=inputs["completion_ids"],
        advantages=raw_advantages(inputs["advantages"]) if "advantages" in inputs else None,
        old_logp=inputs.get("old_per_token_logps"),
        ref_logp=inputs.get("ref_per_token_logps"),
        rollout_logp=inputs.get("sampling_per_token_logps"),
        clip=_clip(trainer),
        dual_clip=_dual_clip(trainer),
        truncation=_truncation(trainer),
        environment=None if sampled is None else whole & ~sampled,
        off_policy_delta=getattr(trainer, "off_policy_mask_threshold", None),
    )


def sequence_stats(trainer: Any, inputs: Mapping[str, Any], batch: TokenBatch) -> Stats:
    """Ratios of whole responses, for the losses that use them: RLOO's product and GSPO's geometric mean.

    And what their clip binds, which then is every token of a response. RLOO's old log-probs ``old_logps`` (B,) are sums
    over tokens, so of tokens only the mean log-ratio is known.
    """
    old_sums, measured = inputs.get("old_logps"), batch.mask.bool().any(1)
    if old_sums is not None:
        log_ratio = keep(batch.logp, batch.mask, 0.0).sum(1) - widen(old_sums)
        kl_old: Stats = {"policy/kl_old": Mean(masked_count(batch.mask, batch.logp), -log_ratio.sum())}
        clipped = _clipped_responses(log_ratio, batch, _bounds(trainer))
        return {**sequence_ratio_stats(log_ratio, measured), **clipped, **kl_old}
    if batch.old_logp is not None and getattr(trainer, "importance_sampling_level", "") == "sequence":
        log_ratio = sequence_log_ratio(batch.logp, batch.old_logp, batch.mask, per_token=True)
        bounds = _bounds(trainer) if getattr(trainer, "loss_type", "") in CLIPPED_LOSSES else None
        return {**sequence_ratio_stats(log_ratio, measured), **_clipped_responses(log_ratio, batch, bounds)}
    return {}


def _clipped_responses(log_ratio: Tensor, batch: TokenBatch, bounds: tuple[float, float] | None) -> Stats:
    """Fractions of tokens in responses that the loss clips as a whole."""
    a = batch.advantages
    if bounds is None or a is None or a.dim() != 1:
        return {}
    low, high = bounds
    return clip_stats(log_ratio.unsqueeze(1), a.unsqueeze(1), batch.mask, low=low, high=high)


def correction_stats(inputs: Mapping[str, Any], batch: TokenBatch) -> Stats:
    """The weights between trainer and vLLM that the loss was multiplied by: truncated or set to 0, as TRL does it.

    (B, T), or (B, 1) of whole responses; those of responses are counted once each, but ``mismatch/is_zero`` is a
    fraction of tokens.
    """
    weights = inputs.get("importance_sampling_ratio")
    if weights is None:
        return {}
    weights = widen(weights)
    mask = batch.mask if weights.shape == batch.mask.shape else batch.mask.bool().any(1, keepdim=True)
    return {
        "mismatch/is_ratio": Mean.of(weights, mask),
        "mismatch/is_ratio_max": Max.of(weights, mask),
        "mismatch/is_ratio_min": Min.of(weights, mask),
        "mismatch/is_ratio_std": Std.of(weights, mask),
        "mismatch/is_zero": Mean.of(indicator(weights == 0, weights).expand_as(batch.mask), batch.mask),
    }


def raw_advantages(advantages: Tensor) -> Tensor:
    """Advantages as before TRL's ``nan_to_num``, which writes an infinity as the largest float."""
    a = advantages.detach()
    if not a.is_floating_point():
        return a.float()
    largest = torch.finfo(a.dtype).max
    return a.masked_fill(a >= largest, torch.inf).masked_fill(a <= -largest, -torch.inf)


def _clip(trainer: Any) -> tuple[float, float] | None:
    """Bounds of a clip on token ratios, if this loss has one; CISPO has none below."""
    if getattr(trainer, "importance_sampling_level", "") != "token":
        return None
    loss = getattr(trainer, "loss_type", "")
    if loss == "cispo":
        return math.inf, float(trainer.epsilon_high) - 1
    return _bounds(trainer) if loss in CLIPPED_LOSSES else None


def _bounds(trainer: Any) -> tuple[float, float]:
    """Of the PPO clip. ``delta`` caps ratios before it, so that a smaller one is the bound; GMPO bounds log-ratios."""
    low, high = float(trainer.epsilon_low), float(trainer.epsilon_high)
    if source_of(trainer.args) == "trl/gmpo":
        return -math.expm1(-low), math.expm1(high)
    delta = getattr(trainer.args, "delta", None)
    return low, high if delta is None else min(high, float(delta) - 1)


def _dual_clip(trainer: Any) -> float | None:
    """The cap of two-sided clipping (``delta``), where the clip is on token ratios."""
    delta = getattr(trainer.args, "delta", None)
    clips = getattr(trainer, "loss_type", "") in CLIPPED_LOSSES and _clip(trainer) is not None
    return float(delta) if clips and delta is not None else None


def _truncation(trainer: Any) -> float | None:
    """The cap on the weights of tokens against vLLM's, where that is the whole correction.

    Masking, weights of whole responses and a bound from below are other corrections.
    """
    floor, cap = (getattr(trainer, f"vllm_importance_sampling_clip_{end}", None) for end in ("min", "max"))
    corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
    of_tokens = getattr(trainer, "vllm_importance_sampling_mode", "") == "token_truncate"
    return float(cap) if corrects and of_tokens and floor is None and cap is not None else None
