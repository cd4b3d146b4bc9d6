"""Measure degenerate text from token ids alone: repetition, loops and runs of id 0, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlwatch.tensors.masked import ascending, shared
from rlwatch.tensors.mergeable import Max, Mean, Stats
from rlwatch.tensors.tokens import TokenBatch

SHORTEST_RUN = 2
"""Fewest consecutive tokens of id 0 that count as a run."""
OF_ID0 = ("text/id0_frac", "text/id0_run")
"""Metrics that mean nothing if the vocabulary's id 0 ends a response."""


def id0_share(ids: Tensor, mask: Tensor) -> Tensor:
    """Return the share of each response's tokens inside ``mask`` that are id 0, (B,); NaN for a response without
    tokens.

    A sampler fed NaN logits emits id 0 for ever: "!" in Qwen2's and Llama 3's vocabularies (verl #721, #751).
    """
    return _zeros(ids, mask).sum(-1) / mask.bool().sum(-1).float()


@shared
def _zeros(ids: Tensor, mask: Tensor) -> Tensor:
    return (ids == 0) & mask.bool()


def id0_run(ids: Tensor, mask: Tensor) -> Tensor:
    """Return the length in tokens of the longest run of id 0 in each response, (B,) float.

    ``ids`` and ``mask`` are (B, T).

    >>> id0_run(torch.tensor([[0, 0, 5, 0]]), torch.ones(1, 4)).tolist()
    [2.0]
    """
    zero = _zeros(ids, mask)
    place = torch.arange(1, zero.shape[1] + 1, device=ids.device).expand_as(zero)
    if not zero.numel():
        return torch.zeros(zero.shape[0], device=ids.device)
    before = torch.where(zero, 0, place).cummax(-1).values
    return torch.where(zero, place - before, 0).amax(-1).float()


def unended(ids: Tensor, mask: Tensor, eos: tuple[int, ...]) -> Tensor:
    """Return True for each response (B,) whose last token inside ``mask`` (B, T) is not an end token.

    For trainers that do not report truncation. ``eos``: all ids that end a sequence. A response without tokens counts
    as not ended.
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


def degeneration_stats(ids: Tensor, mask: Tensor) -> Stats:
    """Return statistics of degenerate text in responses with token ids ``ids`` and ``mask`` (B, T), as means over
    responses.

    ``text/distinct_1`` and ``distinct_2``: see :func:`distinct`. ``repetition``: 1 - distinct-3. ``loop_cover`` and
    ``tail_loop``: see :class:`Loops`. ``looping_frac``: share of responses at least half covered by a loop.
    ``id0_frac``: share that is at least 90 % id 0, in a run of it. ``id0_run``: the longest run. A response of one
    token is no run: if id 0 ends a response, an empty one is that token alone.
    """
    some = mask.bool().any(-1)
    one, two, (trigrams, has_trigrams) = _distinct(ids, mask, (1, 2, 3))
    loops, runs = Loops.of(ids, mask), id0_run(ids, mask)
    means = {
        "text/distinct_1": one,
        "text/distinct_2": two,
        "text/repetition": (1 - trigrams, has_trigrams),
        "text/loop_cover": (loops.longest, loops.measured),
        "text/tail_loop": (loops.tail, loops.measured),
        "text/looping_frac": (loops.longest >= 0.5, loops.measured),
        "text/id0_frac": ((id0_share(ids, mask) >= 0.9) & (runs >= SHORTEST_RUN), some),
    }
    return {**Mean.each(tuple(means), *zip(*means.values(), strict=True)), "text/id0_run": Max.of(runs, some)}


def observe_degeneration(batch: TokenBatch) -> Stats:
    """Return repetition, loops and runs of id 0 if the batch has token ids; no runs of id 0 if that id ends a
    response.
    """
    if batch.ids is None:
        return {}
    stats = degeneration_stats(batch.ids, batch.mask)
    return {name: stat for name, stat in stats.items() if name not in OF_ID0} if 0 in batch.eos else stats


# Distinct n-grams of token ids.

_BASE = 2**21
"""Larger than any vocabulary; three digits of it fit an int64."""


def windows(mask: Tensor, n: int) -> Tensor:
    """Return where ``n`` consecutive tokens lie inside ``mask`` (B, T): (B, max(T - n + 1, 0)) bool, by the first
    token.
    """
    if mask.shape[1] < n:
        return mask.new_zeros((mask.shape[0], 0), dtype=torch.bool)
    before = pad(mask.bool(), (1, 0)).cumsum(-1)  # number of tokens before each place
    return before[:, n:] - before[:, :-n] == n


def distinct(ids: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return distinct-n of each response: different n-grams over all n-grams; 1 without repetition, near 0 in a loop.

    ``ids`` (B, T) integers in [0, 2**21), ``mask`` (B, T), ``n`` 1 to 3. No n-gram reaches over a hole in the mask.
    Returns the value (B,) and whether the response has an n-gram at all (B,); the value is NaN if it has none. Li et
    al., arXiv 1510.03055.

    >>> ids = torch.tensor([[1, 2, 3, 1, 2, 3, 4]])
    >>> [round(distinct(ids, torch.ones_like(ids), n)[0].item(), 7) for n in (1, 2, 3)]
    [0.5714286, 0.6666667, 0.8]
    """
    (found,) = _distinct(ids, mask, (n,))
    return found


TOGETHER = 2**15
"""Most tokens of which n-grams of several lengths are sorted together, which takes that many times the memory."""


def _distinct(ids: Tensor, mask: Tensor, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return :func:`distinct` for each of the ``sizes`` n."""
    if len(sizes) > 1 and ids.numel() > TOGETHER:
        return [found for n in sizes for found in _distinct(ids, mask, (n,))]
    token = torch.where(mask.bool(), ids.detach().long(), -1)
    width = token.shape[1]
    ahead = pad(token, (0, max(sizes) - 1), value=-1)
    # Below 0 is a window that is not whole. The longer n-grams are made of the shorter ones, with the next token.
    grams = [token]
    for n in range(1, max(sizes)):
        after = ahead[:, n : n + width]
        grams.append(torch.where((grams[-1] | after) < 0, -1, grams[-1] * _BASE + after))
    ordered = ascending(torch.stack([grams[n - 1] for n in sizes]))
    whole = ordered >= 0
    fresh = whole.clone()
    fresh[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    total = whole.sum(-1)
    share = fresh.sum(-1) / total.float()
    return list(zip(share.unbind(), (total > 0).unbind(), strict=True))


# Responses that repeat themselves: one block of tokens, of any length, several times in a row.

LOOP_WINDOW = 16
"""Number of equal consecutive tokens from which text counts as repeated; shorter phrases repeat in any text."""

_MIX = 0x5851F42D4C957F2D
"""An odd multiplier (Knuth's MMIX): powers of it spread the ids of a window over 64 bits."""


@dataclass(frozen=True, slots=True)
class Loops:
    """Extent of loops (a block of tokens that repeats in succession) in each response of a batch, (B,).

    Attributes
    ----------
    longest
        Share of the tokens in the longest loop, 0 to 1.
    tail
        Share of the tokens in the loop that the response ends in, 0 to 1.
    measured
        bool: True if the response is long enough to be measured.
    """

    longest: Tensor
    tail: Tensor
    measured: Tensor

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor) -> Self:
        """Find loops in the token ids ``ids`` (B, T) inside ``mask`` (B, T).

        A loop is a block of tokens that occurs at least twice in succession; its cover is all its repetitions, the last
        of which may be cut. Every window of :data:`LOOP_WINDOW` tokens is compared with its last occurrence. Within a
        loop of period p the last occurrence is p tokens back everywhere, so a run of equal distances is a loop. One
        sort finds loops of any period. A response needs more than one window to be measured.
        """
        on = mask.bool()
        back = distance_back(ids, on)
        cover = _cover(back)
        length = on.sum(-1)
        share = (cover / length.unsqueeze(-1)).clamp(max=1.0)
        if not back.shape[1]:
            nothing = torch.zeros_like(length, dtype=torch.float32)
            return cls(nothing, nothing, nothing > 0)
        place = torch.arange(on.shape[1], device=on.device)
        last = (torch.where(on, place, 0).amax(-1, keepdim=True) - LOOP_WINDOW + 1).clamp(min=0)
        return cls(share.amax(-1), share.gather(1, last).squeeze(1), length > LOOP_WINDOW)


def distance_back(ids: Tensor, on: Tensor) -> Tensor:
    """Return for each window of :data:`LOOP_WINDOW` tokens the distance in tokens to its last occurrence, (B, T'); 0 if
    new.

    ``ids`` and the mask ``on`` are (B, T).
    """
    # A window's place is the last bits of what is sorted, so that equal windows come in the order of their places.
    whole = windows(on, LOOP_WINDOW)
    bits, width = whole.shape[1].bit_length(), whole.shape[1]
    none = torch.iinfo(torch.int64).max >> bits << bits
    hashes = (_hashes(ids.detach().long(), width) << bits).masked_fill(~whole, none)
    ordered = ascending(hashes | torch.arange(width, device=hashes.device))
    place, same = ordered & (2**bits - 1), ordered >> bits
    gap = torch.zeros_like(place)
    gap[:, 1:] = (place[:, 1:] - place[:, :-1]) * (same[:, 1:] == same[:, :-1])
    return torch.zeros_like(gap).scatter_(1, place, gap) * whole


def _hashes(ids: Tensor, width: int) -> Tensor:
    """Return a 64-bit hash of each window of LOOP_WINDOW tokens of ``ids``, (B, width); its low bits are one, too.

    Hashes of windows twice as long follow from those of shorter ones: of 1, 2, 4 ... tokens.
    """
    # A polynomial in _MIX modulo 2**64: hash(ab) = hash(a) * _MIX**len(a) + hash(b), so windows of 2n tokens follow
    # from those of n in one multiplication. The 47 bits that remain with a place among 10^5 collide for two windows of
    # such a response with probability 4e-5. A collision changes the distance of one window.
    if not width:
        return ids[:, :0]
    hashes, span, factor = (ids + 1) * _MIX, 1, _MIX
    while span < LOOP_WINDOW:
        hashes = hashes[:, :-span] * factor + hashes[:, span:]
        span, factor = 2 * span, _wrap(factor * factor)
    return hashes


def _wrap(x: int) -> int:
    """Return ``x`` as an int64 holds it after an overflow."""
    return (x + 2**63) % 2**64 - 2**63


def _cover(back: Tensor) -> Tensor:
    """Return the length in tokens of the loop that ends with each window, (B, T'); 0 if none does."""
    place = torch.arange(back.shape[1], device=back.device).expand_as(back)
    breaks = torch.ones_like(back, dtype=torch.bool)
    breaks[:, 1:] = back[:, 1:] != back[:, :-1]
    begin = torch.where(breaks, place, 0).cummax(-1).values if back.numel() else place
    # In a run of equal distances `back`, r windows long, r + LOOP_WINDOW - 1 tokens equal those `back` earlier. If that
    # is a whole period at least, the block occurs twice, and the loop covers the first block as well.
    again = place - begin + LOOP_WINDOW  # tokens that equal those `back` earlier
    return torch.where((back > 0) & (again >= back), again + back, 0)
