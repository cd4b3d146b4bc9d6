"""How many different answers a group gives, and how far it agrees on one.

Answers are int64 codes, equal for equal answers; a negative one means that no answer could be extracted, which
leaves the response out. Groups with fewer than two answers are not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.groups import Grouped, Grouping
from rlwatch.tensors.mergeable import Mean


@dataclass(frozen=True, slots=True)
class Answers(Grouped):
    """Mean over groups of ``kind``: ``unique`` and ``majority`` over the number of answers, ``entropy`` in nats."""

    kind: str = "unique"

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Mean:
        given = mask & (values >= 0)
        times = occurrences(torch.where(given, values, -1), grouping.labels)
        n = grouping.total(given.float())
        measured = n > 1
        per_group = self._per_group(given, times, grouping, n)
        return Mean(measured.sum().float(), torch.where(measured, per_group, 0.0).sum())

    def _per_group(self, given: Tensor, times: Tensor, grouping: Grouping, n: Tensor) -> Tensor:
        """A response whose answer was given ``times`` (N,) by its group is one of as many that say the same."""
        if self.kind == "majority":
            return grouping.largest(torch.where(given, times, 0.0)) / n
        share = times / n[grouping.labels]
        each = 1 / times if self.kind == "unique" else -share.log()
        return grouping.total(torch.where(given, each, 0.0)) / n


def occurrences(values: Tensor, labels: Tensor) -> Tensor:
    """How often the group of each response, ``labels`` (N,), holds its value, ``values`` (N,); floats (N,)."""
    order = values.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]
    value, label = values[order], labels[order]
    fresh = torch.ones_like(value, dtype=torch.bool)
    fresh[1:] = (value[1:] != value[:-1]) | (label[1:] != label[:-1])
    same = Grouping(torch.empty_like(order).scatter_(0, order, fresh.cumsum(0) - 1))
    return same.total(torch.ones_like(values, dtype=torch.float32))[same.labels]


def answer_stats(answers: Tensor, groups: Tensor) -> dict[str, Grouped]:
    """``reward/unique_answers``, ``reward/majority_share``, ``reward/answer_entropy`` of ``answers`` (B,)."""
    kept = Answers.of(answers, groups, answers >= 0)
    state = (kept.count, kept.values, kept.groups, kept.masks)
    return {
        "reward/unique_answers": kept,
        "reward/majority_share": Answers(*state, "majority"),
        "reward/answer_entropy": Answers(*state, "entropy"),
    }
