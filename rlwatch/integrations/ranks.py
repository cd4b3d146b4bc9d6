"""What an integration needs to know of the other ranks of its run. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rlwatch.records import Command
from rlwatch.seam import Seam

if TYPE_CHECKING:
    from rlwatch.run import Run
    from rlwatch.run.link import Link

APART = "the ranks of this run are not linked, and a command must act on all of them at the same step"


class Ranks(Protocol):
    """The ranks of one run, all of which call :meth:`share` and :meth:`agree` at the same boundaries.

    Nothing here waits for a rank that is gone: a command is then refused, and training goes on.
    """

    @property
    def rank(self) -> int:
        """Of this process."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    def share(self, commands: Sequence[Command], step: int) -> list[Command]:
        """What rank 0 passed at ``step``, on every rank. A few bytes when there is nothing to do.

        On a rank that cannot hear rank 0 an empty list; the others then get a refusal from :meth:`agree`.
        """
        ...

    def agree(self, refusal: str | None) -> str | None:
        """None if every rank passed None; else a refusal, on every rank. For a command of the last :meth:`share`."""
        ...

    def over(self) -> None:
        """Rank 0 asks nothing more about the commands of the last :meth:`share`: whoever waits for an answer is let go.

        Call it however the round ended.
        """
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

    def over(self) -> None:
        """Nobody waits."""


class RunRanks:
    """The ranks of a seam's run, whichever run that is: a trainer that trains again makes a new one."""

    def __init__(self, seam: Seam) -> None:
        self._seam = seam

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self._seam.run is None else self._seam.run.rank

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return 1 if self._seam.run is None else self._seam.run.world_size

    def share(self, commands: Sequence[Command], step: int) -> list[Command]:
        """Through the link; as passed where there is none."""
        link = _link_of(self._seam.run)
        return list(commands) if link is None else link.share(commands, step)

    def agree(self, refusal: str | None) -> str | None:
        """Through the link; several ranks without one never agree."""
        link = _link_of(self._seam.run)
        if link is not None:
            return link.agree(refusal)
        return refusal if self.world_size == 1 else refusal or APART

    def over(self) -> None:
        """Through the link."""
        link = _link_of(self._seam.run)
        if link is not None:
            link.over()


def _link_of(run: Run | None) -> Link | None:
    return None if run is None else run.ranks
