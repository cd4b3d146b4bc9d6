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
    """The ranks of one run, all of which come to the same boundaries.

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

    def meets(self, step: int, *, wanted: bool, staying: bool = False) -> bool:
        """Whether all ranks meet at this boundary, after ``step``, because rank 0 has commands. ``wanted``: this rank
        knows of one; on a rank other than 0 of one that is due on every rank here, so that it awaits rank 0's word.

        If not, the boundary is passed, unless this rank stays at it because training is paused. Nobody waits for that:
        where another rank has passed it already, all meet at a later one.
        """
        ...

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """What rank 0 passed, on every rank, where all meet.

        On a rank that cannot hear rank 0 an empty list; the others then get a refusal from :meth:`agree`.
        """
        ...

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """What rank 0 passed, usually nothing, at a place that every rank comes to and only rank 0 knows about.

        The other ranks wait there for rank 0, a minute at most.
        """
        ...

    def agree(self, refusal: str | None) -> str | None:
        """None if every rank passed None; else a refusal, on every rank. For a command of the last :meth:`share`."""
        ...

    def over(self) -> None:
        """Nothing more is asked about the commands of the last :meth:`share`: whoever waits for an answer is let go.

        Call it however the round ended.
        """
        ...

    def leave(self) -> None:
        """The boundary is passed, however."""
        ...


class OneRank:
    """The only rank there is."""

    rank = 0
    world_size = 1

    def meets(self, step: int, *, wanted: bool, staying: bool = False) -> bool:  # noqa: ARG002  (the port's signature)
        """Wherever something is wanted."""
        return wanted

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """As passed."""
        return list(commands)

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """As passed."""
        return list(commands)

    def agree(self, refusal: str | None) -> str | None:
        """As passed."""
        return refusal

    def over(self) -> None:
        """Nobody waits."""

    def leave(self) -> None:
        """Nobody asks."""


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

    def meets(self, step: int, *, wanted: bool, staying: bool = False) -> bool:
        """Through the link; wherever something is wanted, so that it is answered, where there is none."""
        link = _link_of(self._seam.run)
        return wanted if link is None else link.meets(step, wanted=wanted, staying=staying)

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """Through the link; as passed where there is none."""
        link = _link_of(self._seam.run)
        return list(commands) if link is None else link.share(commands)

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """Through the link; as passed where there is none."""
        link = _link_of(self._seam.run)
        return list(commands) if link is None else link.order(commands)

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

    def leave(self) -> None:
        """Through the link."""
        link = _link_of(self._seam.run)
        if link is not None:
            link.leave()


def _link_of(run: Run | None) -> Link | None:
    return None if run is None else run.ranks
