"""verl's inputs of one micro-batch, read as a :class:`~rlwatch.tensors.tokens.TokenBatch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from rlwatch.integrations.verl.losses import Clipping
from rlwatch.tensors.padded import Padded
from rlwatch.tensors.tokens import TokenBatch

BESIDE = {"ids": "responses", "ref_logp": "ref_log_prob", "rollout_logp": "rollout_log_probs", "entropy": "entropy"}
"""Our name -> the field of verl's micro-batch, where it holds it; entropy is that of the policy before the update."""


def loss_batch(given: Mapping[str, Any], clipping: Clipping, beside: Mapping[str, Any]) -> TokenBatch:
    """Of the arguments of a policy loss, all (B, T); ``beside`` are more columns of the same shape."""
    batch = TokenBatch(
        logp=given["log_prob"].detach(),
        mask=given["response_mask"].bool(),
        old_logp=given["old_log_prob"].detach(),
        advantages=given["advantages"].detach(),
        clip=clipping.clip,
        dual_clip=clipping.dual,
    )
    return replace(batch, **beside)


def beside(data: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """What else the micro-batch ``data`` (a TensorDict of jagged responses) tells of its tokens.

    Right-padded to ``shape`` (B, T); a column of another shape is left out.
    """
    found = {ours: data[theirs] for ours, theirs in BESIDE.items() if theirs in data.keys()}  # noqa: SIM118  (TensorDict)
    padded = {ours: Padded.of(x, longest=shape[1]).values for ours, x in found.items() if isinstance(x, Tensor)}
    return {ours: x for ours, x in padded.items() if tuple(x.shape) == shape}
