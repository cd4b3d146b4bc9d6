"""What an integration needs to know of the other ranks of its run. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlwatch.records import Command


class Ranks(Protocol):
    """The ranks of one run, all of which call :meth:`share` and :meth:`agree` at the same boundaries.

    Nothing here waits for a rank that is gone: a command is then refused, and training goes on.
    """

    rank: int
    world_size: int

    def share(self, commands: Sequence[Command], step: int) -> list[Command]:
        """What rank 0 passed at ``step``, on every rank. A few bytes when there is nothing to do.

        On a rank that cannot hear rank 0 an empty list; the others then get a refusal from :meth:`agree`.
        """
        ...

    def agree(self, refusal: str | None) -> str | None:
        """None if every rank passed None; else a refusal, on every rank. For a command of the last :meth:`share`."""
        ...


class OneRank:
    """The only rank there is."""

    rank = 0
    world_size = 1

    def share(self, commands: Sequence[Command], step: int) -> list[Command]:  # noqa: ARG002  (the port's signature)
        """As passed."""
        return list(commands)

    def agree(self, refusal: str | None) -> str | None:
        """As passed."""
        return refusal
