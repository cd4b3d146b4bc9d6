"""Measure control tokens (ends of turns, tags of tool calls and of thinking): their share, probability and order.

The collapse of a policy that uses tools begins at these tokens: their probabilities change while its skill stays (arXiv
2606.27026). A gap between trainer and engine at these tokens, at the token after one, or at the first token of a
response is caused by a template or tokenizer which the two apply differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.masked import widen
from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.tokens import TokenBatch

Tags = tuple[tuple[int, int], ...]
"""Pairs of token ids: of the token that opens a block, and of the one that closes it."""


def places_of(ids: Tensor, control: tuple[int, ...]) -> Tensor:
    """Return True for each of ``ids`` (integers of any shape) that is one of the control tokens ``control``; same
    shape.
    """
    known = torch.tensor(control, dtype=ids.dtype, device="cpu").to(ids.device, non_blocking=True)
    return torch.isin(ids, known)


def malformed(ids: Tensor, mask: Tensor, tags: Tags, cut: Tensor | None = None) -> Tensor:
    """Return True for each response (B,) whose ``tags`` do not pair up.

    A block is closed that is not open, opened again inside itself, or still open at the end of a response. A response
    that was ``cut`` (B,) at the length limit may end inside a block. ``ids`` and ``mask`` are (B, T).

    >>> malformed(torch.tensor([[7, 1, 8], [8, 1, 7], [7, 1, 2]]), torch.ones(3, 3), ((7, 8),)).tolist()
    [False, True, True]
    """
    on = mask.bool()
    broken = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    if not ids.shape[1]:
        return broken
    for opens, closes in tags:
        change = ((ids == opens) & on).long() - ((ids == closes) & on).long()
        depth = change.cumsum(-1)
        left_open = depth[:, -1] != 0 if cut is None else (depth[:, -1] != 0) & ~cut.bool()
        broken |= ((depth < 0) | (depth > 1)).any(-1) | left_open
    return broken


def template_places(mask: Tensor, ids: Tensor | None, control: tuple[int, ...]) -> Tensor:
    """Return a mask (B, T) bool of the tokens inside ``mask`` that depend on a template or tokenizer.

    They are the first of each response and, if ``ids`` and ``control`` are known, control tokens and those that follow
    one.
    """
    on = mask.bool()
    first = on & (on.cumsum(-1) == 1)
    if ids is None or not control:
        return first
    at = places_of(ids, control) & on
    after = torch.zeros_like(at)
    after[:, 1:] = at[:, :-1]
    return first | at | (after & on)


def observe_control(batch: TokenBatch) -> Stats:
    """Return share and mean probability of control tokens among the sampled ones, and the share of malformed responses.

    ``text/control_share``, ``text/control_prob``, ``text/control_malformed`` (see :func:`malformed`). Empty if token
    ids or control tokens are unknown.
    """
    if batch.ids is None or not batch.control:
        return {}
    at = places_of(batch.ids, batch.control) & batch.mask.bool()
    stats: Stats = {
        "text/control_share": Mean.of(at, batch.mask),
        "text/control_prob": Mean.of(widen(batch.logp).exp(), at),
    }
    if batch.tags:
        broken = malformed(batch.ids, batch.mask, batch.tags, batch.cut)
        stats["text/control_malformed"] = Mean.of(broken, batch.mask.bool().any(-1))
    return stats
