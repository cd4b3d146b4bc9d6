"""What OpenRLHF generated for a step, read as :class:`~rlwatch.tensors.responses.ResponseBatch`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlwatch.tensors.mergeable import Stats, merge
from rlwatch.tensors.responses import ResponseBatch, observe_responses


def response_stats(experiences: Sequence[Any], group_size: int, *, full: bool) -> Stats:
    """Of everything that was generated for a step; ``group_size`` responses were sampled for each prompt."""
    stats: Stats = {}
    with torch.no_grad():
        for batch in _batches(experiences, group_size, full=full):
            stats = merge(stats, observe_responses(batch))
    return stats


def _batches(experiences: Sequence[Any], group_size: int, *, full: bool) -> Iterator[ResponseBatch]:
    """Groups lie one after the other in the order of generation, which ``index`` keeps where batches are balanced."""
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
    """As scored, before length penalties and baselines."""
    info = getattr(experience, "info", None) or {}
    reward = info.get("reward")
    return reward if isinstance(reward, Tensor) else experience.rewards
