"""Reward, length and entropy per task or data source, for a bounded number of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlwatch.tensors.masked import keep
from rlwatch.tensors.mergeable import Mean, Stats

OTHER = "other"
"""Where all tasks go that found no place of their own."""

UNNAMED = "unnamed"
"""The task of a response that has none."""

LONGEST = 80
"""Characters of a task's name in a metric's name."""


@dataclass(slots=True)
class TaskNames:
    """The tasks of a run that have metrics of their own: at most ``limit``, and :data:`OTHER` for the rest.

    A task keeps its place for the whole run, so that no series changes its meaning; the most frequent of the first
    batch that holds new tasks come first. Ranks that see different tasks may choose differently beyond ``limit``;
    give all of them the same names then.
    """

    limit: int = 32
    places: dict[str, int] = field(default_factory=dict)

    def codes(self, tasks: Sequence[object]) -> list[int]:
        """The place of each task; None is :data:`UNNAMED`. The place ``len(self.names) - 1`` is :data:`OTHER`'s."""
        called = [_called(task) for task in tasks]
        for name, _times in Counter(called).most_common():
            if name not in self.places and name != OTHER and len(self.places) < self.limit:
                self.places[name] = len(self.places)
        return [self.places.get(name, len(self.places)) for name in called]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all places."""
        return (*self.places, OTHER)


def _called(task: object) -> str:
    """A name that can be part of a metric's name."""
    return UNNAMED if task is None else ("_".join(str(task).split())[:LONGEST].strip("/") or UNNAMED)


def by_task(prefix: str, x: Tensor, mask: Tensor, codes: Tensor, names: Iterable[str]) -> Stats:
    """``<prefix><name>``: mean of ``x`` (B,) inside ``mask`` (B,) over the responses with each of ``codes`` (B,)."""
    names = tuple(names)
    place = codes.long().clamp(0, max(len(names) - 1, 0))
    values = torch.stack([keep(x, mask, 0.0), mask.to(keep(x, mask, 0.0).dtype)], -1)
    sums, counts = values.new_zeros((len(names), 2)).index_add_(0, place, values).unbind(-1)
    return {prefix + name: Mean(n, total) for name, n, total in zip(names, counts, sums, strict=True)}
