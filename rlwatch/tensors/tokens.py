"""Hold the per-token data of one micro-batch in one form for all trainers, and select its most extreme tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlwatch.tensors.masked import difference, everywhere, keep, shared, widen
from rlwatch.tensors.mergeable import Mean, Stats


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Detached tensors of one micro-batch of B responses, right-padded to T tokens.

    Every optional tensor is ``None`` if the trainer does not have it, never a substitute.

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
    experts, rollout_experts, old_experts
        (B, T, layers, k) ids of the experts a token was routed to: in the trainer, in the rollout engine, and in the
        trainer under the policy that the update began with.
    collision
        (B, T) sum of the squared probabilities of all tokens at a place.
    eos
        Ids that end a response; empty if the trainer does not give them.
    control, tags
        Ids of control tokens (of templates, tools, thinking); pairs of them that open and close a block.
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
    old_experts: Tensor | None = None
    collision: Tensor | None = None
    eos: tuple[int, ...] = ()
    control: tuple[int, ...] = ()
    tags: tuple[tuple[int, int], ...] = ()

    @property
    def token_advantages(self) -> Tensor | None:
        """Advantages as (B, T) or (B, 1), so that they broadcast over tokens; None if there are none."""
        return None if self.advantages is None else _over_tokens(self.advantages)

    @property
    def trainer_logp(self) -> Tensor:
        """Log-probs (B, T) under the weights the rollout engine had: the old policy's, or (on-policy) the current
        ones.
        """
        return self.logp if self.old_logp is None else self.old_logp

    @property
    def routed(self) -> bool:
        """True if the batch has the experts of its tokens, which take hundreds of times the memory of everything
        else.
        """
        return any(getattr(self, name) is not None for name in _EXPERTS)

    def copied(self) -> TokenBatch:
        """Return a copy with memory of its own, as the trainer may reuse its memory; ids of experts are not copied."""
        with torch.no_grad():
            mine = {name: x.clone() for name, x in _tensors(self).items() if name not in _EXPERTS}
        return replace(self, **mine)


@shared
def tokens_of(batch: TokenBatch) -> TokenBatch:
    """Return the N tokens inside the mask of ``batch`` as one response, (1, N), for statistics of tokens in any order.

    It has only log-probs, entropy, advantages and the settings of the loss. On a device it is ``batch`` itself, as a
    selection there is waited for.
    """
    on = batch.mask
    if not on.is_cpu or on.shape != batch.logp.shape:
        return batch
    places = torch.from_numpy(np.flatnonzero(on.bool().numpy())).view(1, -1)
    if not places.numel():
        return batch
    given = {name: getattr(batch, name) for name in _OF_TOKENS} | {"advantages": batch.token_advantages}
    wide = {name: x if x.shape == on.shape else x.expand(on.shape) for name, x in given.items() if x is not None}
    parts: dict[str, Any] = {name: x.take(places) for name, x in wide.items()}
    settings = {name: getattr(batch, name) for name in ("clip", "dual_clip", "off_policy_delta", "truncation")}
    return TokenBatch(mask=everywhere(places), **parts, **settings)


_OF_TOKENS = ("logp", "entropy", "old_logp", "ref_logp", "rollout_logp")


@shared
def _over_tokens(advantages: Tensor) -> Tensor:
    return advantages if advantages.dim() > 1 else advantages.unsqueeze(1)


_EXPERTS = ("experts", "rollout_experts", "old_experts")


def alike(one: TokenBatch, other: TokenBatch) -> bool:
    """Return True if :func:`joined` can combine two batches: they have the same quantities, types, devices and clip
    bounds.
    """
    return all(_same(getattr(one, f.name), getattr(other, f.name), one, other) for f in fields(one))


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Return one batch with the responses of all ``batches`` in order, padded to the longest with zeros outside the
    mask.
    """
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
    """Return whether the loss counts tokens that the environment (a tool, a user) wrote; empty if those are not known.

    ``tokens/environment_leak``: share of the environment's tokens with mask 1. ``tokens/environment_frac``: share of
    tokens that the environment wrote. A policy that is trained on tokens it did not sample is taught to imitate its
    tools.
    """
    if batch.environment is None:
        return {}
    written, counted = batch.environment.bool(), batch.mask.bool()
    return {
        "tokens/environment_leak": Mean.of(counted, written),
        "tokens/environment_frac": Mean.of(written, written | counted),
    }


# The few tokens that a user should inspect, non-finite ones and outliers, chosen on the device.


RATIO_LIMIT = 10.0
"""A token with an importance ratio pi / pi_old above this is a spike."""
LOGP_DIFF_LIMIT = 3.0
"""A token with |log trainer - log rollout| above this (nats) is a spike."""
LOGP_LIMIT = -15.0
"""A sampled token with a log-prob below this (nats) is a spike."""


@dataclass(frozen=True, slots=True)
class SpikeTable:
    """Up to K rows (K, C) with the most extreme tokens of a batch, in no promised order.

    The first column of ``rows`` is the score: >= 1 is a spike, inf is non-finite, -inf is padding. The other columns
    are named ``names``, in order. Row numbers and token ids are exact below 2**24.
    """

    names: tuple[str, ...]
    rows: Tensor

    def merge(self, other: SpikeTable, k: int = 64) -> SpikeTable:
        """Return the ``k`` most extreme rows of two tables. Raises ``ValueError`` if their columns differ."""
        if self.names != other.names:
            raise ValueError(f"spike columns differ: {self.names} and {other.names}")
        rows = torch.cat([self.rows, other.rows])
        return SpikeTable(self.names, rows[rows[:, 0].topk(min(k, rows.shape[0])).indices])

    def join(self, other: SpikeTable, k: int = 64) -> SpikeTable:
        """Return the ``k`` most extreme rows of two tables, with the columns that both have.

        Micro-batches may measure different quantities.
        """
        both = tuple(name for name in self.names if name in other.names)
        return self._only(both).merge(other._only(both), k)

    def _only(self, names: tuple[str, ...]) -> SpikeTable:
        if names == self.names:
            return self
        columns = [self.rows[:, :1], *(self.rows[:, 1 + self.names.index(name), None] for name in names)]
        return SpikeTable(names, torch.cat(columns, 1))


def spike_score(batch: TokenBatch) -> Tensor:
    """Return how extreme each token is, (B, T): 1 at the limits above, inf if non-finite, -inf outside the mask."""
    score = widen(batch.logp) / LOGP_LIMIT
    nothing = widen(batch.logp) * 0.0  # 0, but NaN where a log-prob is not finite
    if batch.old_logp is not None:
        log_ratio = difference(batch.logp, batch.old_logp)
        score = score.maximum(log_ratio / math.log(RATIO_LIMIT))
        nothing = nothing + widen(batch.old_logp) * 0.0
    if batch.rollout_logp is not None:
        score = score.maximum((difference(batch.trainer_logp, batch.rollout_logp)).abs() / LOGP_DIFF_LIMIT)
        nothing = nothing + widen(batch.rollout_logp) * 0.0
    if batch.ref_logp is not None:
        nothing = nothing + widen(batch.ref_logp) * 0.0
    return keep(score.masked_fill(nothing.isnan(), torch.inf), batch.mask, -torch.inf)


def top_tokens(batch: TokenBatch, *, k: int = 64, first_row: int = 0) -> SpikeTable:
    """Return the ``k`` tokens of ``batch`` with the highest :func:`spike_score`, with their measured quantities.

    ``first_row``: added to the index of the response, if the batch is a part of a larger one.
    """
    with torch.no_grad():
        score = spike_score(batch)
        top = score.flatten().topk(min(k, score.numel()))
        columns = _columns(batch, top.indices, first_row)
        dtype = score.dtype
        wide = [c if c.dtype == dtype else c.to(dtype) for c in columns.values()]
        return SpikeTable(tuple(columns), torch.stack([top.values, *wide], 1))


def _columns(batch: TokenBatch, chosen: Tensor, first_row: int) -> Mapping[str, Tensor]:
    """Return the measured quantities of the tokens at the flat positions ``chosen`` (K,), as columns (K,)."""
    shape = batch.logp.shape
    row = torch.div(chosen, max(shape[1], 1), rounding_mode="floor")
    measured = {
        "token_id": batch.ids,
        "logp": batch.logp,
        "old_logp": batch.old_logp,
        "rollout_logp": batch.rollout_logp,
        "ref_logp": batch.ref_logp,
        "advantage": batch.token_advantages,
        "entropy": batch.entropy,
    }
    columns = {"sequence": row + first_row, "position": chosen - row * shape[1]}
    wide = {name: x if x.shape == shape else x.expand(shape) for name, x in measured.items() if x is not None}
    columns |= {name: x.take(chosen) for name, x in wide.items()}
    met = None if batch.collision is None else batch.collision.take(chosen)
    if "old_logp" in columns:
        columns["ratio"] = (widen(columns["logp"]) - widen(columns["old_logp"])).exp()
    if "advantage" in columns:
        columns["screen"] = screen(columns["logp"], columns["advantage"], columns.get("ratio"), met)
    return columns


def screen(logp: Tensor, advantages: Tensor, ratio: Tensor | None, collision: Tensor | None = None) -> Tensor:
    """Return |A| r (1 - p) of tokens: how hard a token pushes its own logit, >= 0, in the shape of the arguments.

    ``logp`` in nats; ``ratio`` r is None on-policy, where it is 1. With ``collision``, the sum of all squared
    probabilities, it is how hard the token pushes all logits.
    """
    own = -torch.expm1(widen(logp))
    if collision is not None:
        own = (own.square() + (widen(collision) - widen(logp).exp().square()).clamp(min=0.0)).sqrt()
    push = widen(advantages).abs() * own
    return push if ratio is None else push * ratio
