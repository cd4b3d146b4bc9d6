"""Ranks of a run: the interface that trainers use to execute commands on all ranks, and the set-up over
``torch.distributed``.
"""

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
    """Interface to the ranks (processes) of one run, all of which reach the same boundaries between steps.

    No method waits for a rank that is gone: a command is then refused, and training continues.
    """

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        ...

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the run."""
        ...

    def meets(self, step: int, *, wanted: bool, staying: bool = False) -> bool:
        """Return True if all ranks meet at this boundary, after ``step``, because rank 0 has commands to execute.

        A boundary is a point of training at which commands may be executed. ``wanted``: this rank has a command to
        execute. On ranks other than 0 it is a command that is due on every rank, and the rank waits for rank 0.

        If the result is False, this rank passes the boundary, unless it is ``staying`` because training is paused.
        Ranks do not wait for each other: if one has passed the boundary already, all meet at a later one.
        """
        ...

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """Return, on every rank, the ``commands`` that rank 0 passed. Call it when all ranks meet.

        A rank that cannot reach rank 0 gets an empty list; the other ranks then get a refusal from :meth:`agree`.
        """
        ...

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """Return, on every rank, the ``commands`` that rank 0 passed, at a place in the code that every rank reaches.

        Usually there are none. The other ranks wait for rank 0, at most a minute.
        """
        ...

    def agree(self, refusal: str | None) -> str | None:
        """Return None, on every rank, if every rank passed None, else one of the refusals.

        Call it for each command of :meth:`share`.
        """
        ...

    def over(self) -> None:
        """End the round of commands that :meth:`share` or :meth:`order` began, and release the ranks that wait for an
        answer.

        Call it whatever the outcome of the round.
        """
        ...

    def leave(self) -> None:
        """Leave the boundary (point of training at which commands may be executed), so that this rank continues
        training.

        Call it whatever the outcome of the commands.
        """
        ...


class OneRank:
    """The only rank of a run with one process; no method communicates."""

    rank = 0
    world_size = 1

    def meets(self, step: int, *, wanted: bool, staying: bool = False) -> bool:  # noqa: ARG002  (the port's signature)
        """Return ``wanted``: one process meets whenever it has commands."""
        return wanted

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """Return ``commands`` unchanged."""
        return list(commands)

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """Return ``commands`` unchanged."""
        return list(commands)

    def agree(self, refusal: str | None) -> str | None:
        """Return ``refusal`` unchanged."""
        return refusal

    def over(self) -> None:
        """Do nothing, because no other rank waits."""

    def leave(self) -> None:
        """Do nothing, because there is no other rank."""


class RunRanks:
    """Ranks of the current run of an error boundary ``error_boundary``. A trainer that trains again has a new run."""

    def __init__(self, error_boundary: ErrorBoundary) -> None:
        self._error_boundary = error_boundary

    @property
    def rank(self) -> int:
        """Return the rank of this process, 0 without a run."""
        return 0 if self._error_boundary.run is None else self._error_boundary.run.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the run, 1 without a run."""
        return 1 if self._error_boundary.run is None else self._error_boundary.run.world_size

    def meets(self, step: int, *, wanted: bool, staying: bool = False) -> bool:
        """Return True if all ranks meet at this boundary (point of training at which commands may be executed), by the
        link between them.

        See :meth:`Ranks.meets`. Without a link return ``wanted``, so that the command is answered.
        """
        link = _link_of(self._error_boundary.run)
        return wanted if link is None else link.meets(step, wanted=wanted, staying=staying)

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """Return the commands of rank 0, received through the link between the ranks.

        Without a link return ``commands``.
        """
        link = _link_of(self._error_boundary.run)
        return list(commands) if link is None else link.share(commands)

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """Return the commands of rank 0, received through the link between the ranks.

        Without a link return ``commands``.
        """
        link = _link_of(self._error_boundary.run)
        return list(commands) if link is None else link.order(commands)

    def agree(self, refusal: str | None) -> str | None:
        """Return a refusal if any rank passed one, by the link between the ranks.

        Several ranks without a link always refuse.
        """
        link = _link_of(self._error_boundary.run)
        if link is not None:
            return link.agree(refusal)
        return refusal if self.world_size == 1 else refusal or APART

    def over(self) -> None:
        """End the round of commands on the link between the ranks, if there is one."""
        link = _link_of(self._error_boundary.run)
        if link is not None:
            link.over()

    def leave(self) -> None:
        """Leave the boundary (point of training at which commands may be executed) on the link between the ranks, if
        there is one.
        """
        link = _link_of(self._error_boundary.run)
        if link is not None:
            link.leave()


def _link_of(run: Run | None) -> Link | None:
    return None if run is None else run.ranks


# Rendezvous of the ranks of one run over the store of ``torch.distributed``.

POLL_S = 0.01
_meetings = itertools.count()
_questions = itertools.count()


class StoreMeeting:
    """Rendezvous of the ranks over the key-value store of the process group ``store``. It needs no collective.

    Every rank creates its meetings in the same order. No call blocks in the store, because a blocking call holds the
    client's only lock and would block the trainer, too.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._key = f"rlwatch/{next(_meetings)}"

    def put(self, name: str, text: str) -> None:
        """Store ``text`` under ``name`` for the other ranks. Raises ``RLWatchError`` if the store is gone."""
        with _store_errors():
            self._store.set(f"{self._key}/{name}", text)

    def get(self, name: str) -> str | None:
        """Return the text that a rank stored under ``name``, None if there is none yet.

        Raises ``RLWatchError`` if the store is gone.
        """
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
    """Return ``rank`` and ``world_size`` of the process group as arguments of :func:`rlwatch.init`.

    The result is empty without a process group. Launchers that start processes themselves (``torch.multiprocessing``)
    do not set the environment variables for them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}


def meeting() -> StoreMeeting | None:
    """Return a rendezvous of this process group's ranks, or None with one rank or without a store."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()
    return None if store is None else StoreMeeting(store)


def all_agree(yes: bool, timeout_s: float = 60.0) -> bool:
    """Return True, on every rank, if all ranks passed ``yes``. It uses no collective, because a collective could hang.

    Rank 0 waits for the others at most ``timeout_s`` seconds, the others 10 seconds longer. False without a store.
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
    """Poll for a key, because the rendezvous threads use the same client at the same time."""
    while (value := _read_key(store, key)) is None and time.monotonic() < end:
        time.sleep(POLL_S)
    return value


def begin_together(begin: Callable[[], Run], *, link: str | None = None) -> Run:
    """Create this rank's run by ``begin()`` and connect it to the other ranks. Every rank calls it at set-up.

    ``link`` is the address at which rank 0 listens; see :func:`rlwatch.run.ranks.join`. Raises what ``begin`` raises,
    and the other ranks then continue unwatched. Raises ``ConfigError`` for an address that is not valid.
    """
    ListenAddress.of(link)  # report a wrong address before a run begins
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
