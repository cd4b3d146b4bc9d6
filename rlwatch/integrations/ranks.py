"""What an integration needs to know of the other ranks of its run. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlwatch.records import Command


class Ranks(Protocol):
    """The ranks of one run, all of which call :meth:`share` and :meth:`agree` at the same boundaries."""

    rank: int
    world_size: int

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """What rank 0 passed, on every rank. One tiny collective when there is nothing to do.

        After a failure (a rank died) it returns an empty list at once, for ever.
        """
        ...

    def agree(self, refusal: str | None) -> str | None:
        """None if every rank passed None; else a refusal, the same on every rank."""
        ...


class OneRank:
    """The only rank there is."""

    rank = 0
    world_size = 1

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """As passed."""
        return list(commands)

    def agree(self, refusal: str | None) -> str | None:
        """As passed."""
        return refusal
