"""The ranks of a run: what an integration asks of them, and how those of ``torch.distributed`` find each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.link.wire import ListenAddress
from rlwatch.records import Command
from rlwatch.run.ranks import ADDRESS, join

if TYPE_CHECKING:
    from rlwatch.run import Run
    from rlwatch.run.run import Link


APART = "the ranks of this run are not linked, and a command must act on all of them at the same step"


class Ranks(Protocol):
    """The ranks of one run, all of which come to the same boundaries.

    Nothing here waits for a rank that is gone: a command is then refused, and training goes on.
    """

    @property
    def rank(self) -> int:
        """Rank of this process."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def meets(self, step: int, *, wanted: bool, staying: bool = False) -> bool:
        """True if all ranks meet at this boundary, after ``step``, because rank 0 has commands. ``wanted``: this rank
        knows of one; on a rank other than 0 of one that is due on every rank here, so that it awaits rank 0's word.

        If not, the boundary is passed, unless this rank stays at it because training is paused. Nobody waits for that:
        where another rank has passed it already, all meet at a later one.
        """
        ...

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """Return what rank 0 passed, on every rank, where all meet.

        On a rank that cannot reach rank 0 an empty list; the others then get a refusal from :meth:`agree`.
        """
        ...

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """Return what rank 0 passed, usually nothing, at a place that every rank comes to and only rank 0 knows of.

        The other ranks wait there for rank 0, a minute at most.
        """
        ...

    def agree(self, refusal: str | None) -> str | None:
        """None if every rank passed None; else a refusal, on every rank. For a command of the last :meth:`share`."""
        ...

    def over(self) -> None:
        """End the round of the last :meth:`share`: whoever waits for an answer is let go.

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
        """Meet wherever something is wanted."""
        return wanted

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """Return what was passed."""
        return list(commands)

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """Return what was passed."""
        return list(commands)

    def agree(self, refusal: str | None) -> str | None:
        """Return what was passed."""
        return refusal

    def over(self) -> None:
        """Do nothing: nobody waits."""

    def leave(self) -> None:
        """Do nothing: nobody asks."""


class RunRanks:
    """The ranks of a seam's run, whichever run that is: a trainer that trains again makes a new one."""

    def __init__(self, seam: ErrorBoundary) -> None:
        self._seam = seam

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return 0 if self._seam.run is None else self._seam.run.rank

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return 1 if self._seam.run is None else self._seam.run.world_size

    def meets(self, step: int, *, wanted: bool, staying: bool = False) -> bool:
        """Ask the link; without one meet wherever something is wanted, so that it is answered."""
        link = _link_of(self._seam.run)
        return wanted if link is None else link.meets(step, wanted=wanted, staying=staying)

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """Go through the link; without one return what was passed."""
        link = _link_of(self._seam.run)
        return list(commands) if link is None else link.share(commands)

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """Go through the link; without one return what was passed."""
        link = _link_of(self._seam.run)
        return list(commands) if link is None else link.order(commands)

    def agree(self, refusal: str | None) -> str | None:
        """Ask the link; several ranks without one never agree."""
        link = _link_of(self._seam.run)
        if link is not None:
            return link.agree(refusal)
        return refusal if self.world_size == 1 else refusal or APART

    def over(self) -> None:
        """Pass it on to the link."""
        link = _link_of(self._seam.run)
        if link is not None:
            link.over()

    def leave(self) -> None:
        """Pass it on to the link."""
        link = _link_of(self._seam.run)
        if link is not None:
            link.leave()


def _link_of(run: Run | None) -> Link | None:
    return None if run is None else run.ranks


# The ranks of ``torch.distributed``: how those of one run find each other.

POLL_S = 0.01
_meetings = itertools.count()
_questions = itertools.count()


class StoreMeeting:
    """Over the key-value store by which the process group itself came together. Needs no collective.

    Every rank makes its meetings in the same order. It never waits in the store: whoever does holds the one lock of its
    client, behind which the trainer would wait too.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._key = f"rlwatch/{next(_meetings)}"

    def put(self, name: str, text: str) -> None:
        """Leave ``text`` for the others. Raises ``RLWatchError`` if the store is gone."""
        with _store_errors():
            self._store.set(f"{self._key}/{name}", text)

    def get(self, name: str) -> str | None:
        """Read what another rank left; None if nothing yet. Raises ``RLWatchError`` if the store is gone."""
        with _store_errors():
            return _read_key(self._store, f"{self._key}/{name}")


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # DistStoreError, DistNetworkError
        words = str(error).partition("\n")[0]
        raise RLWatchError(f"the store of the process group does not answer: {words}") from None


def _read_key(store: Any, key: str) -> str | None:
    return str(store.get(key).decode()) if store.check([key]) else None


def place_here() -> dict[str, int]:
    """``rank`` and ``world_size`` of this process, as :func:`rlwatch.init` takes them; empty without a process group.

    Launchers that start processes themselves (``torch.multiprocessing``) set no environment to read them from.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}


def meeting() -> StoreMeeting | None:
    """A meeting of this process group's ranks; None where there is one rank, or no store."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()
    return None if store is None else StoreMeeting(store)


def all_agree(yes: bool, timeout_s: float = 60.0) -> bool:
    """True if every rank says ``yes``: the same answer on each, and no collective that a missing rank leaves hanging.

    Rank 0 waits for the others at most ``timeout_s`` seconds, and they for it a little longer. False without a store.
    """
    store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()
    key = f"rlwatch/agree/{next(_questions)}"
    try:
        if store is None:
            return False
        return (
            _decide(store, key, timeout_s, yes=yes)
            if dist.get_rank() == 0
            else _await_decision(store, key, timeout_s, yes=yes)
        )
    except RuntimeError:  # DistStoreError, DistNetworkError: rank 0 is missing
        return False


def _decide(store: Any, key: str, timeout_s: float, *, yes: bool) -> bool:
    end = time.monotonic() + timeout_s
    agreed = yes
    for rank in range(1, dist.get_world_size()):
        agreed = agreed and _awaited(store, f"{key}/{rank}", end) == "1"
    store.set(key, str(int(agreed)))
    return agreed


def _await_decision(store: Any, key: str, timeout_s: float, *, yes: bool) -> bool:
    store.set(f"{key}/{dist.get_rank()}", str(int(yes)))
    return _awaited(store, key, time.monotonic() + timeout_s + 10.0) == "1"


def _awaited(store: Any, key: str, end: float) -> str | None:
    """Polls: the threads by which the ranks find each other use the same client meanwhile."""
    while (value := _read_key(store, key)) is None and time.monotonic() < end:
        time.sleep(POLL_S)
    return value


def begin_together(begin: Callable[[], Run], *, link: str | None = None) -> Run:
    """``begin()``, which makes this rank's run, and the link to the other ranks. Every rank calls it at set-up.

    ``link`` says where rank 0 listens; see :func:`rlwatch.run.ranks.join`. Raises what ``begin`` raises; the other
    ranks then go on unwatched.
    """
    ListenAddress.of(link)  # a wrong address shows before a run is begun
    place = meeting()
    if place is None:
        return begin()
    with ExitStack() as missing:
        if dist.get_rank() == 0:
            missing.callback(place.put, ADDRESS, "")
        run = begin()
        join(run, place, link=link)
        missing.pop_all()
    return run
