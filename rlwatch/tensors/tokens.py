"""The per-token view of one micro-batch, whatever trainer it came from, and the check of its mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlwatch.tensors.mergeable import Mean, Stats


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Detached tensors of one micro-batch of B responses, right-padded to T tokens.

    Every optional tensor is ``None`` where it does not exist, never a stand-in.

    Parameters
    ----------
    logp
        (B, T) log-probs of the sampled tokens under the policy being updated, nats.
    mask
        (B, T) the tokens the loss counts.
    entropy
        (B, T) full-softmax entropy, nats.
    ids
        (B, T) sampled token ids.
    advantages
        (B,), (B, 1) or (B, T).
    old_logp, ref_logp, rollout_logp
        (B, T) under the policy that the update began with, the reference, and as the rollout engine reported, nats.
    clip, dual_clip
        (low, high) of a token-level PPO clip [1 - low, 1 + high]; the cap on -r A of dual-clip PPO.
    off_policy_delta
        Threshold of the loss's own off-policy sequence mask, nats per token.
    truncation
        Largest weight of the loss's own truncated importance sampling between trainer and rollout engine.
    cut
        (B,) whether a response was cut at the length limit.
    environment
        (B, T) tokens the environment (a tool, a user) wrote, which no loss may count.
    staleness
        (B,) policy versions between the rollout and this update.
    experts, rollout_experts
        (B, T, layers, k) ids of the experts a token was routed to, in the trainer and in the rollout engine.
    eos
        Ids that end a response; empty if the trainer does not give them.
    """

    logp: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    ids: Tensor | None = None
    advantages: Tensor | None = None
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    rollout_logp: Tensor | None = None
    clip: tuple[float, float] | None = None
    dual_clip: float | None = None
    off_policy_delta: float | None = None
    truncation: float | None = None
    cut: Tensor | None = None
    environment: Tensor | None = None
    staleness: Tensor | None = None
    experts: Tensor | None = None
    rollout_experts: Tensor | None = None
    eos: tuple[int, ...] = ()

    @property
    def token_advantages(self) -> Tensor | None:
        """Advantages (B, T) or (B, 1), to go with tokens."""
        if self.advantages is None or self.advantages.dim() > 1:
            return self.advantages
        return self.advantages.unsqueeze(1)

    @property
    def trainer_logp(self) -> Tensor:
        """Log-probs of the weights the rollout engine had: the old policy's, or (on-policy) the current one's."""
        return self.logp if self.old_logp is None else self.old_logp

    @property
    def routed(self) -> bool:
        """True if it holds the experts of its tokens, hundreds of times as many numbers as all the rest."""
        return self.experts is not None or self.rollout_experts is not None

    def copied(self) -> TokenBatch:
        """Return a copy whose memory the trainer does not reuse; ids of experts are not copied."""
        mine = {name: x.detach().clone() for name, x in _tensors(self).items() if name not in _EXPERTS}
        return replace(self, **mine)


_EXPERTS = ("experts", "rollout_experts")


def alike(one: TokenBatch, other: TokenBatch) -> bool:
    """True if :func:`joined` can put both together: they hold the same quantities, made and clipped alike."""
    return all(_same(getattr(one, f.name), getattr(other, f.name), one, other) for f in fields(one))


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Return the responses of all ``batches`` in order, padded to the longest with zeros outside of the mask."""
    if len(batches) == 1:
        return batches[0]
    width = max(one.logp.shape[1] for one in batches)
    columns = [{name: _widened(x, one, width) for name, x in _tensors(one).items()} for one in batches]
    whole: dict[str, Any] = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
    return replace(batches[0], **whole)


def _same(mine: object, theirs: object, one: TokenBatch, other: TokenBatch) -> bool:
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return _kind(mine, one) == _kind(theirs, other)
    return not isinstance(mine, Tensor) and not isinstance(theirs, Tensor) and mine == theirs


def _tensors(batch: TokenBatch) -> dict[str, Any]:
    return {f.name: x for f in fields(batch) if isinstance(x := getattr(batch, f.name), Tensor)}


def _of_tokens(x: Tensor, batch: TokenBatch) -> bool:
    return x.dim() > 1 and x.shape[1] == batch.logp.shape[1]


def _kind(x: Tensor, batch: TokenBatch) -> tuple[object, ...]:
    """Return the properties that tensors must share to be joined: all but the numbers of responses and tokens."""
    return x.dtype, x.device, x.dim(), _of_tokens(x, batch), x.shape[2 if _of_tokens(x, batch) else 1 :]


def _widened(x: Tensor, batch: TokenBatch, width: int) -> Tensor:
    """Return (B, T, ...) as (B, width, ...), padded with zeros; tensors without tokens stay as they are."""
    more = width - batch.logp.shape[1]
    return pad(x, [0, 0] * (x.dim() - 2) + [0, more]) if more and _of_tokens(x, batch) else x


# Tokens the environment wrote (a tool's answer, a user's turn), which no loss may count.


def observe_environment(batch: TokenBatch) -> Stats:
    """``tokens/environment_leak``: of the environment's tokens, those with mask 1; ``tokens/environment_frac``.

    A policy that is trained on tokens it did not sample is taught to imitate its tools.
    """
    if batch.environment is None:
        return {}
    written, counted = batch.environment.bool(), batch.mask.bool()
    return {
        "tokens/environment_leak": Mean.of(counted, written),
        "tokens/environment_frac": Mean.of(written, written | counted),
    }
