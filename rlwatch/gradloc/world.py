"""The ranks whose gradients make up one step, as far as localisation has to know of them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class World(Protocol):
    """Ranks that all localise the same step together. Gradients are means over ranks: c = a / size * derivative.

    Every method is a collective: all ranks call it, in the same order.
    """

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over the ranks, elementwise, on every rank."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """The largest of ``values`` over the ranks, elementwise, on every rank."""
        ...

    def gather(self, values: Tensor) -> list[Tensor]:
        """``values`` of each rank (equal shapes), by rank, on every rank."""
        ...


class Alone:
    """The only rank there is."""

    size = 1
    rank = 0

    def sum(self, values: Tensor) -> Tensor:
        """As passed."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """As passed."""
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """As passed."""
        return [values]
