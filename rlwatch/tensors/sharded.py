"""Statistics of tensors that lie in shards on several ranks, each element counted on one rank only.

Every rank keeps what it holds; nothing is sent while training waits. Until the shards together are whole there is
no value: ``count`` is then 0. What is copied on several ranks is the lowest rank's.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.mergeable import Stat


@dataclass(frozen=True, slots=True)
class Sharded(Stat):
    """Base: of ``size`` elements, ``held`` are in ``kept``, the others on other ranks."""

    kept: Tensor
    held: int
    size: int

    @classmethod
    def of(cls, kept: Tensor, held: int, size: int) -> Self:
        """Of what this rank holds."""
        return cls(kept.new_full((), float(held >= size)), kept, held, size)

    @override
    def merge(self, other: Self) -> Self:
        """The later of two measurements."""
        return other

    @override
    def across(self, other: Self) -> Self:
        if self.held >= self.size:
            return self
        held = self.held + other.held
        count = self.count.new_full((), float(held >= self.size))
        return replace(self, count=count, kept=self.together(other.kept), held=held)

    @abstractmethod
    def together(self, kept: Tensor) -> Tensor:
        """What this rank and another have kept, as one."""


@dataclass(frozen=True, slots=True)
class Norm(Sharded):
    """L2 norm; keeps the sum of squares, 0-d."""

    @override
    def together(self, kept: Tensor) -> Tensor:
        return self.kept + kept

    @override
    def value(self) -> Tensor:
        return self.kept.sqrt()


@dataclass(frozen=True, slots=True)
class Marked(Sharded):
    """How many of P tensors are marked; keeps a mark (0 or 1) for each, which one of its shards is enough to set."""

    @override
    def together(self, kept: Tensor) -> Tensor:
        return self.kept.maximum(kept) if self.kept.shape == kept.shape else self.kept

    @override
    def value(self) -> Tensor:
        return self.kept.sum()
