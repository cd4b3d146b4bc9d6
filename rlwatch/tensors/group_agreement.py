"""How alike the responses to one prompt begin: what the first action has in common drives likelihood displacement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from rlwatch.tensors.groups import Grouped, Grouping
from rlwatch.tensors.mergeable import Mean

WINDOW = 64
"""Positions compared."""

_BASE = 2**21
"""Larger than any vocabulary."""


@dataclass(frozen=True, slots=True)
class Agreement(Grouped):
    """Of all pairs of responses of a group, at all positions both have a token: the fraction that have the same.

    Counted without forming pairs: m equal tokens at one position of a group are m (m - 1) / 2 pairs that agree.
    """

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Mean:
        key = torch.where(mask, grouping.labels.unsqueeze(-1) * _BASE + values, -1).T.sort(-1).values
        fresh = torch.ones_like(key, dtype=torch.bool)
        fresh[:, 1:] = key[:, 1:] != key[:, :-1]
        place = torch.arange(key.shape[1], device=key.device).expand_as(key)
        earlier = place - torch.where(fresh, place, 0).cummax(-1).values if key.numel() else place
        agreeing = torch.where(key >= 0, earlier, 0).sum()
        n = grouping.total(mask.long())
        return Mean((n * (n - 1)).sum().float() / 2, agreeing.float())


def agreement(ids: Tensor, mask: Tensor, groups: Tensor) -> Agreement:
    """Over the first :data:`WINDOW` positions of ``ids`` (B, T) inside ``mask`` (B, T); ``groups`` (B,)."""
    short = max(0, WINDOW - ids.shape[1])
    return Agreement.of(pad(ids[:, :WINDOW].long(), (0, short)), groups, pad(mask[:, :WINDOW].bool(), (0, short)))
