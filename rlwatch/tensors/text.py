"""Degenerate text seen on token ids: no tokenizer, no waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.loops import Loops
from rlwatch.tensors.mergeable import Max, Mean, Stats
from rlwatch.tensors.ngrams import distinct
from rlwatch.tensors.tokens import TokenBatch


def id0_share(ids: Tensor, mask: Tensor) -> Tensor:
    """Share of a response's tokens that are id 0, shape (B,); NaN for a response without tokens.

    A sampler fed NaN logits emits id 0 for ever: "!" in Qwen2's and Llama 3's vocabularies (verl #721, #751).
    """
    on = mask.bool()
    return ((ids == 0) & on).sum(-1) / on.sum(-1).float()


def id0_run(ids: Tensor, mask: Tensor) -> Tensor:
    """Longest run of id 0 in each response, tokens, (B,) float.

    >>> id0_run(torch.tensor([[0, 0, 5, 0]]), torch.ones(1, 4)).tolist()
    [2.0]
    """
    zero = (ids == 0) & mask.bool()
    place = torch.arange(1, zero.shape[1] + 1, device=ids.device).expand_as(zero)
    if not zero.numel():
        return torch.zeros(zero.shape[0], device=ids.device)
    before = torch.where(zero, 0, place).cummax(-1).values
    return torch.where(zero, place - before, 0).amax(-1).float()


def unended(ids: Tensor, mask: Tensor, eos: tuple[int, ...]) -> Tensor:
    """Whether the last token of each response inside ``mask`` (B, T) is none of ``eos``, (B,) bool.

    Which responses were cut, for a trainer that does not say; pass all ids that end a sequence. One without tokens
    has not ended either.
    """
    on = mask.bool()
    if not on.shape[1]:
        return torch.ones(on.shape[0], dtype=torch.bool, device=ids.device)
    place = torch.arange(on.shape[1], device=ids.device)
    last = ids.gather(1, torch.where(on, place, 0).amax(-1, keepdim=True)).squeeze(1)
    ended = torch.zeros_like(last, dtype=torch.bool)
    for token in eos:
        ended |= last == token
    return ~(ended & on.any(-1))


def text_stats(ids: Tensor, mask: Tensor) -> Stats:
    """All measures of degeneration of ``ids``, ``mask`` (B, T), under their canonical names, means over responses.

    ``text/distinct_1``, ``distinct_2``, ``repetition`` (1 - distinct-3), ``loop_cover``, ``tail_loop``,
    ``looping_frac`` (half covered by a loop), ``id0_frac`` (at least 90 % id 0), ``id0_run`` (the longest).
    """
    some = mask.bool().any(-1)
    trigrams, has_trigrams = distinct(ids, mask, 3)
    loops = Loops.of(ids, mask)
    return {
        "text/distinct_1": Mean.of(*distinct(ids, mask, 1)),
        "text/distinct_2": Mean.of(*distinct(ids, mask, 2)),
        "text/repetition": Mean.of(1 - trigrams, has_trigrams),
        "text/loop_cover": Mean.of(loops.longest, loops.measured),
        "text/tail_loop": Mean.of(loops.tail, loops.measured),
        "text/looping_frac": Mean.of(loops.longest >= 0.5, loops.measured),
        "text/id0_frac": Mean.of(id0_share(ids, mask) >= 0.9, some),
        "text/id0_run": Max.of(id0_run(ids, mask), some),
    }


def full(batch: TokenBatch) -> Stats:
    """Repetition, loops and id-0 runs, where the token ids are known."""
    return {} if batch.ids is None else text_stats(batch.ids, batch.mask)
