"""Responses that say the same again and again: one block of tokens, of any length, repeated in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rlwatch.tensors.ngrams import windows

WINDOW = 16
"""Tokens that must be equal before a place counts as said before; phrases shorter than this repeat in any text."""

_MIX = 0x5851F42D4C957F2D
"""An odd multiplier (Knuth's MMIX): powers of it spread the ids of a window over 64 bits."""


@dataclass(frozen=True, slots=True)
class Loops:
    """Per response (B,): share of its tokens in the longest loop, share in a loop it ends in, whether long enough."""

    longest: Tensor
    tail: Tensor
    measured: Tensor

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor) -> Self:
        """Of ``ids`` (B, T) inside ``mask`` (B, T).

        A loop is a block that stands at least twice in a row; its cover is all its repetitions, the last of which may
        be cut. Every window of :data:`WINDOW` tokens is compared with its last occurrence: within a loop of period p
        that lies p tokens back at each place, so a run of equal distances is a loop, found in one sort, whatever its
        period. A response needs more than one window to be measured.
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
        last = (torch.where(on, place, 0).amax(-1, keepdim=True) - WINDOW + 1).clamp(min=0)
        return cls(share.amax(-1), share.gather(1, last).squeeze(1), length > WINDOW)


def distance_back(ids: Tensor, on: Tensor) -> Tensor:
    """How far back each window of :data:`WINDOW` tokens stood last, by its first token; 0 where it is new, (B, T')."""
    whole = windows(on, WINDOW)
    key = _hashes(ids.detach().long(), whole.shape[1]).masked_fill(~whole, torch.iinfo(torch.int64).max)
    ordered, place = key.sort(dim=-1, stable=True)
    gap = torch.zeros_like(place)
    gap[:, 1:] = (place[:, 1:] - place[:, :-1]) * (ordered[:, 1:] == ordered[:, :-1])
    return torch.zeros_like(gap).scatter_(1, place, gap) * whole


def _hashes(ids: Tensor, width: int) -> Tensor:
    """64-bit hash of each window, (B, width), by doubling: of 1, 2, 4 ... tokens."""
    if not width:
        return ids[:, :0]
    hashes, span, factor = (ids + 1) * _MIX, 1, _MIX
    while span < WINDOW:
        hashes = hashes[:, :-span] * factor + hashes[:, span:]
        span, factor = 2 * span, _wrap(factor * factor)
    return hashes


def _wrap(x: int) -> int:
    """As an int64 overflows."""
    return (x + 2**63) % 2**64 - 2**63


def _cover(back: Tensor) -> Tensor:
    """Tokens of the loop that each window stands at the end of, (B, T'); 0 where it ends none."""
    place = torch.arange(back.shape[1], device=back.device).expand_as(back)
    breaks = torch.ones_like(back, dtype=torch.bool)
    breaks[:, 1:] = back[:, 1:] != back[:, :-1]
    begin = torch.where(breaks, place, 0).cummax(-1).values if back.numel() else place
    again = place - begin + WINDOW  # tokens that equal those `back` earlier
    return torch.where((back > 0) & (again >= back), again + back, 0)
