"""OpenRLHF's inputs of one policy loss, read as a :class:`~rlwatch.tensors.tokens.TokenBatch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlwatch.tensors.importance import sequence_log_ratio, sequence_ratio_stats
from rlwatch.tensors.mergeable import Stats
from rlwatch.tensors.tokens import TokenBatch


def token_batch(loss: Any, given: Mapping[str, Any], experience: Any, entropy: Tensor | None) -> TokenBatch:
    """Of ``loss.forward``'s arguments ``given``, all (B, A), and the experience they are of; ``entropy`` (B, >= A).

    Log-probs are 0 outside the mask. The reference's are there only where KL is a term of the loss.
    """
    mask = given["action_mask"].bool()
    width = mask.shape[1]
    sequences = getattr(experience, "sequences", None)
    return TokenBatch(
        logp=given["log_probs"].detach(),
        mask=mask,
        entropy=None if entropy is None else entropy[:, -width:].detach(),
        ids=None if sequences is None else sequences[:, -width:],
        advantages=given["advantages"].detach(),
        old_logp=given["old_log_probs"].detach(),
        ref_logp=getattr(experience, "base_action_log_probs", None),
        rollout_logp=given.get("rollout_log_probs"),
        clip=_clip(loss),
        dual_clip=loss.dual_clip if _clip(loss) else None,
        truncation=_truncation(loss),
    )


def loss_stats(loss: Any, batch: TokenBatch) -> Stats:
    """Ratios of whole responses, where the loss goes by them (GSPO)."""
    if loss.policy_loss_type != "gspo" or batch.old_logp is None:
        return {}
    log_ratio = sequence_log_ratio(batch.logp, batch.old_logp, batch.mask, per_token=True)
    return sequence_ratio_stats(log_ratio, batch.mask.any(1))


def _clip(loss: Any) -> tuple[float, float] | None:
    """Bounds of the clip on token ratios, if this loss has one."""
    return (float(loss.clip_eps_low), float(loss.clip_eps_high)) if loss.policy_loss_type == "ppo" else None


def _truncation(loss: Any) -> float | None:
    """The cap on the weights of tokens against vLLM's, where that is the whole correction.

    Masking, weights of whole responses and a bound from below are other corrections.
    """
    level, mode = loss.is_correction_level, loss.is_correction_mode
    low, high = loss.is_correction_threshold
    return float(high) if (level, mode) == ("token", "clip") and low <= 0 else None
