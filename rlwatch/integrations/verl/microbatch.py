"""verl's inputs of one micro-batch, read as a :class:`~rlwatch.tensors.tokens.TokenBatch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlwatch.gradloc.passes import Outputs
from rlwatch.integrations.verl.losses import Clipping
from rlwatch.integrations.verl.packed import Packed
from rlwatch.tensors.padded import Padded
from rlwatch.tensors.tokens import TokenBatch

COLUMNS = {
    "ids": "responses", "advantages": "advantages", "old_logp": "old_log_probs", "ref_logp": "ref_log_prob",
    "rollout_logp": "rollout_log_probs",
}  # fmt: skip
"""Our name -> the field of verl's micro-batch that its loss may take."""
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


def tokens_of(data: Any, outputs: Outputs, where: Packed) -> TokenBatch:
    """The micro-batch ``data`` beside the ``outputs`` (B, T) of its forward, right-padded with 0 as they are.

    Where the forward computed no entropy, it is that of the policy before the update, if verl knows it.
    """
    columns: dict[str, Any] = {ours: _column(data, theirs, where.width) for ours, theirs in COLUMNS.items()}
    entropy = _column(data, "entropy", where.width) if outputs.entropy is None else outputs.entropy
    mask = _column(data, "response_mask", where.width)
    return TokenBatch(outputs.logp, where.valid if mask is None else mask != 0, entropy=entropy, **columns)


def rewards_of(data: Any, where: Packed) -> Tensor | None:
    """(B,) the score of each response, where verl sent it along."""
    scores = _column(data, "rm_scores", where.width)
    return None if scores is None else scores.sum(1)


def _column(data: Any, name: str, width: int) -> Tensor | None:
    """(B, T) with zeros for padding, as verl's losses see it; None where it is not there or has another shape."""
    found = data.get(name, None)
    if not isinstance(found, Tensor):
        return None
    padded = Padded.of(found, longest=width)
    values = padded.values if padded.valid is None else torch.where(padded.valid, padded.values, 0)
    return values if values.dim() == 2 and values.shape[1] == width else None
