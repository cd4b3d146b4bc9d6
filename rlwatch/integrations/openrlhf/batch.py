"""Reading of OpenRLHF's experiences for statistics: the inputs of a policy loss, and the responses generated for a
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlwatch.tensors.importance import sequence_log_ratio, sequence_ratio_stats
from rlwatch.tensors.mergeable import Stats, merge
from rlwatch.tensors.responses import ResponseBatch, observe_responses
from rlwatch.tensors.tokens import TokenBatch


def token_batch(loss: Any, given: Mapping[str, Any], experience: Any, entropy: Tensor | None) -> TokenBatch:
    """Return the arguments ``given`` of ``loss.forward``, all (B, A), as a batch of tokens.

    ``experience`` is the one that they belong to, ``entropy`` is (B, >= A) or None. Log-probs are 0 outside the mask.
    Those of the reference exist only if KL is a term of the loss.
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
    """Return statistics of the importance ratios of whole responses, if ``loss`` uses them (GSPO), else none."""
    if loss.policy_loss_type != "gspo" or batch.old_logp is None:
        return {}
    log_ratio = sequence_log_ratio(batch.logp, batch.old_logp, batch.mask, per_token=True)
    return sequence_ratio_stats(log_ratio, batch.mask.any(1))


def _clip(loss: Any) -> tuple[float, float] | None:
    """Return the bounds of the clip on token ratios, if this loss has one."""
    return (float(loss.clip_eps_low), float(loss.clip_eps_high)) if loss.policy_loss_type == "ppo" else None


def _truncation(loss: Any) -> float | None:
    """Return the cap on token weights that correct for vLLM's log-probs, if the cap is the whole correction.

    Masking, weights of whole responses and a lower bound are other corrections.
    """
    level, mode = loss.is_correction_level, loss.is_correction_mode
    low, high = loss.is_correction_threshold
    return float(high) if (level, mode) == ("token", "clip") and low <= 0 else None


# Responses generated for a step.


def response_stats(experiences: Sequence[Any], group_size: int, *, full: bool) -> Stats:
    """Return statistics of all responses generated for a step; ``group_size`` responses were sampled for each prompt.

    ``experiences``: OpenRLHF's micro-batches of the step. ``full``: also statistics that read token ids.
    """
    stats: Stats = {}
    with torch.no_grad():
        for batch in _batches(experiences, group_size, full=full):
            stats = merge(stats, observe_responses(batch))
    return stats


def _batches(experiences: Sequence[Any], group_size: int, *, full: bool) -> Iterator[ResponseBatch]:
    """Yield the responses of each experience. Groups are consecutive in generation order, which ``index`` preserves."""
    at = 0
    for experience in experiences:
        n = len(experience.sequences)
        index = getattr(experience, "index", None)
        places = torch.arange(at, at + n) if index is None else torch.as_tensor(index)
        at += n
        width = experience.action_mask.shape[1]
        yield ResponseBatch.of(
            rewards=_reward(experience),
            groups=places // group_size if group_size > 1 else None,
            lengths=experience.response_length,
            cut=experience.truncated,
            ids=experience.sequences[:, -width:] if full else None,
            mask=experience.action_mask if full else None,
        )


def _reward(experience: Any) -> Tensor | None:
    """Return rewards as scored, before length penalties and baselines."""
    info = getattr(experience, "info", None) or {}
    reward = info.get("reward")
    return reward if isinstance(reward, Tensor) else experience.rewards
