"""The ranks of ``torch.distributed``: how those of one run find each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rlwatch.errors import RLWatchError
from rlwatch.run.joining import join

if TYPE_CHECKING:
    from rlwatch.run import Run

_meetings = itertools.count()
_questions = itertools.count()


class StoreMeeting:
    """Over the key-value store by which the process group itself came together. Needs no collective.

    Every rank makes its meetings in the same order. Rank 0 waits for nobody.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._key = f"rlwatch/{next(_meetings)}"

    def tell(self, text: str) -> None:
        """Leave ``text`` for the others."""
        self._store.set(self._key, text)

    def ask(self, timeout_s: float) -> str:
        """What rank 0 left. Raises ``RLWatchError`` if it leaves nothing for ``timeout_s`` seconds."""
        try:
            self._store.wait([self._key], timedelta(seconds=timeout_s))
            return str(self._store.get(self._key).decode())
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise RLWatchError(
                f"rank 0 said nothing for {timeout_s:g} s; rlwatch must be set up on every rank ({error})"
            ) from None


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
    others = [f"{key}/{rank}" for rank in range(1, dist.get_world_size())]
    try:
        if yes:
            store.wait(others, timedelta(seconds=timeout_s))
        agreed = yes and all(store.get(other) == b"1" for other in others)
    except RuntimeError:
        agreed = False
    store.set(key, str(int(agreed)))
    return agreed


def _heard(store: Any, key: str, timeout_s: float, *, yes: bool) -> bool:
    store.set(f"{key}/{dist.get_rank()}", str(int(yes)))
    store.wait([key], timedelta(seconds=timeout_s + 10.0))
    return bool(store.get(key) == b"1")


def begin_together(begin: Callable[[], Run]) -> Run:
    """``begin()``, which makes this rank's run, and the link to the other ranks. Every rank calls it at set-up.

    Raises what ``begin`` raises; the other ranks then go on unwatched.
    """
    place = meeting()
    if place is None:
        return begin()
    with ExitStack() as missing:
        if dist.get_rank() == 0:
            missing.callback(place.tell, "")
        run = begin()
        missing.pop_all()
    join(run, place)
    return run
