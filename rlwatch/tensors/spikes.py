"""The few tokens that a user should inspect, non-finite ones and outliers, chosen on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.tensors.masked import keep, widen
from rlwatch.tensors.tokens import TokenBatch

RATIO_LIMIT = 10.0
"""A token ratio pi / pi_old above this is a spike."""
LOGP_DIFF_LIMIT = 3.0
"""|log trainer - log rollout| above this (nats) is a spike."""
LOGP_LIMIT = -15.0
"""A sampled token less likely than this (nats) is a spike."""


@dataclass(frozen=True, slots=True)
class SpikeTable:
    """Up to K rows (K, C) of the most extreme tokens, most extreme first is not promised.

    The first column of ``rows`` is the score: >= 1 is a spike, inf is non-finite, -inf is padding. The others are
    ``names``, in order. Row numbers and token ids are exact below 2**24.
    """

    names: tuple[str, ...]
    rows: Tensor

    def merge(self, other: SpikeTable, k: int = 64) -> SpikeTable:
        """Return the ``k`` most extreme rows of both; ``other`` must have the same columns."""
        if self.names != other.names:
            raise ValueError(f"spike columns differ: {self.names} and {other.names}")
        rows = torch.cat([self.rows, other.rows])
        return SpikeTable(self.names, rows[rows[:, 0].topk(min(k, rows.shape[0])).indices])

    def join(self, other: SpikeTable, k: int = 64) -> SpikeTable:
        """Merge over the columns both have: micro-batches need not measure the same."""
        both = tuple(name for name in self.names if name in other.names)
        return self._only(both).merge(other._only(both), k)

    def _only(self, names: tuple[str, ...]) -> SpikeTable:
        if names == self.names:
            return self
        columns = [self.rows[:, :1], *(self.rows[:, 1 + self.names.index(name), None] for name in names)]
        return SpikeTable(names, torch.cat(columns, 1))


def spike_score(batch: TokenBatch) -> Tensor:
    """Score of each token, (B, T): 1 at the limits above, inf if non-finite, -inf outside the mask."""
    score = widen(batch.logp) / LOGP_LIMIT
    broken = ~batch.logp.isfinite()
    if batch.old_logp is not None:
        log_ratio = widen(batch.logp) - widen(batch.old_logp)
        score = score.maximum(log_ratio / math.log(RATIO_LIMIT))
        broken = broken | ~batch.old_logp.isfinite()
    if batch.rollout_logp is not None:
        score = score.maximum((widen(batch.trainer_logp) - widen(batch.rollout_logp)).abs() / LOGP_DIFF_LIMIT)
        broken = broken | ~batch.rollout_logp.isfinite()
    if batch.ref_logp is not None:
        broken = broken | ~batch.ref_logp.isfinite()
    return keep(torch.where(broken, torch.inf, score), batch.mask, -torch.inf)


def top_tokens(batch: TokenBatch, *, k: int = 64, first_row: int = 0) -> SpikeTable:
    """The ``k`` tokens of ``batch`` with the highest score; ``first_row`` is added to the sequence number."""
    with torch.no_grad():
        score = spike_score(batch)
        top = score.flatten().topk(min(k, score.numel()))
        columns = _columns(batch, top.indices, first_row)
        dtype = score.dtype
        return SpikeTable(tuple(columns), torch.stack([top.values, *(c.to(dtype) for c in columns.values())], 1))


def _columns(batch: TokenBatch, chosen: Tensor, first_row: int) -> Mapping[str, Tensor]:
    """Measured quantities of the tokens at the flat positions ``chosen`` (K,), each column (K,)."""
    shape = batch.logp.shape
    row = torch.div(chosen, max(shape[1], 1), rounding_mode="floor")
    at = (row, chosen - row * shape[1])
    measured = {
        "token_id": batch.ids,
        "logp": batch.logp,
        "old_logp": batch.old_logp,
        "rollout_logp": batch.rollout_logp,
        "ref_logp": batch.ref_logp,
        "advantage": batch.token_advantages,
        "entropy": batch.entropy,
    }
    columns = {"sequence": row + first_row, "position": at[1]}
    columns |= {name: x.detach().expand(shape)[at] for name, x in measured.items() if x is not None}
    if "old_logp" in columns:
        columns["ratio"] = (widen(columns["logp"]) - widen(columns["old_logp"])).exp()
    if "advantage" in columns:
        columns["screen"] = screen(columns["logp"], columns["advantage"], columns.get("ratio"))
    return columns


def screen(logp: Tensor, advantages: Tensor, ratio: Tensor | None) -> Tensor:
    """|A| r (1 - p): how hard a token pushes its own logit, >= 0; r = 1 on-policy, where it is None. Any shape."""
    push = widen(advantages).abs() * -torch.expm1(widen(logp))
    return push if ratio is None else push * ratio
