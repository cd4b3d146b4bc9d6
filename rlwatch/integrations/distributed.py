"""The ranks of ``torch.distributed``: how those of one run find each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rlwatch.errors import RLWatchError
from rlwatch.link.sockets import Place
from rlwatch.run.joining import ADDRESS, join

if TYPE_CHECKING:
    from rlwatch.run import Run

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
        """What another rank left; None if nothing yet. Raises ``RLWatchError`` if the store is gone."""
        with _store_errors():
            return _found(self._store, f"{self._key}/{name}")


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # DistStoreError, DistNetworkError
        words = str(error).partition("\n")[0]
        raise RLWatchError(f"the store of the process group does not answer: {words}") from None


def _found(store: Any, key: str) -> str | None:
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
    """Whether every rank says ``yes``: the same answer on each, and no collective that a missing rank leaves hanging.

    Rank 0 waits for the others at most ``timeout_s`` seconds, and they for it a little longer. False without a store.
    """
    store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()
    key = f"rlwatch/agree/{next(_questions)}"
    try:
        if store is None:
            return False
        return (
            _decided(store, key, timeout_s, yes=yes) if dist.get_rank() == 0 else _heard(store, key, timeout_s, yes=yes)
        )
    except RuntimeError:  # DistStoreError, DistNetworkError: rank 0 is missing
        return False


def _decided(store: Any, key: str, timeout_s: float, *, yes: bool) -> bool:
    end = time.monotonic() + timeout_s
    agreed = yes
    for rank in range(1, dist.get_world_size()):
        agreed = agreed and _awaited(store, f"{key}/{rank}", end) == "1"
    store.set(key, str(int(agreed)))
    return agreed


def _heard(store: Any, key: str, timeout_s: float, *, yes: bool) -> bool:
    store.set(f"{key}/{dist.get_rank()}", str(int(yes)))
    return _awaited(store, key, time.monotonic() + timeout_s + 10.0) == "1"


def _awaited(store: Any, key: str, end: float) -> str | None:
    """Polls: the threads by which the ranks find each other use the same client meanwhile."""
    while (found := _found(store, key)) is None and time.monotonic() < end:
        time.sleep(POLL_S)
    return found


def begin_together(begin: Callable[[], Run], *, link: str | None = None) -> Run:
    """``begin()``, which makes this rank's run, and the link to the other ranks. Every rank calls it at set-up.

    ``link`` says where rank 0 listens; see :func:`rlwatch.run.joining.join`. Raises what ``begin`` raises; the other
    ranks then go on unwatched.
    """
    Place.of(link)  # what is said wrongly shows before a run is begun
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
