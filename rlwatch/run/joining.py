"""Bringing the ranks of a run together, once, when training is set up. Nobody waits for anybody here."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from rlwatch.link.hub import Hub
from rlwatch.link.sockets import LOOPBACK, Address, LinkError, Place
from rlwatch.link.spoke import NobodyError
from rlwatch.ports import Meeting
from rlwatch.run.lifecycle import watch_over
from rlwatch.run.link import FirstRank, OtherRank
from rlwatch.run.run import Run

logger = logging.getLogger("rlwatch")
ADDRESS, FAR = "address", "far"
"""What rank 0 leaves at the meeting, and what a rank of another machine does."""


def join(run: Run, meeting: Meeting, *, link: str | None = None) -> None:
    """Link the ranks of ``run``. Every rank calls it at set-up, with its own run and the same meeting.

    It returns at once; the ranks find each other on threads of their own, however much later one comes. From then on a
    step that every rank :meth:`sends <rlwatch.run.run.Run.send>` is recorded whole, and commands reach every rank. A
    rank that cannot be linked says so in the log and stays inert.

    Parameters
    ----------
    run
        Of :func:`rlwatch.init`, which knows its rank.
    meeting
        Where rank 0 says on which address it listens.
    link
        Where rank 0 listens: ``HOST:PORT``, ``HOST`` or ``:PORT``; by default as ``RLWATCH_LINK_HOST`` and
        ``RLWATCH_LINK_PORT`` say. Without a host it listens on the loopback, until a rank of another machine looks for
        it, then on every interface; without a port on a free one.

    Raises
    ------
    ConfigError
        If where to listen is not said in words that can be understood, or the secret is too short.
    LinkError
        If rank 0 was told where to listen, and cannot.
    """
    if run.world_size < 2 or run.linked:
        return
    place = Place.of(link)
    if run.rank == 0:
        _host(run, meeting, place)
    else:
        run.link(OtherRank(run.rank, _finder(meeting), run.counters))
        watch_over(run, sigterm=False)


def _host(run: Run, meeting: Meeting, place: Place) -> None:
    if not run.active:
        return meeting.put(ADDRESS, "")
    try:
        hub = Hub(run.world_size, place)
    except LinkError as error:
        meeting.put(ADDRESS, "")
        if place != Place():
            raise
        return logger.warning("the ranks are not linked: only rank 0's share of the batch is measured (%s)", error)
    hub.start()
    meeting.put(ADDRESS, hub.address.to_text())
    alone = os.environ.get("LOCAL_WORLD_SIZE") == str(run.world_size)
    return run.link(FirstRank(hub, run.offer, run.has_commands, None if alone or place.host else _lookout(meeting)))


def _lookout(meeting: Meeting) -> Callable[[Hub], bool]:
    """Whether to look again for ranks of other machines; where there is one, rank 0 lets it in."""

    def look(hub: Hub) -> bool:
        if meeting.get(FAR) is None:
            return True
        hub.open_up()
        meeting.put(ADDRESS, hub.address.to_text())
        return hub.address.hosts == (LOOPBACK,)

    return look


def _finder(meeting: Meeting) -> Callable[[], Address | None]:
    def find() -> Address | None:
        said = meeting.get(ADDRESS)
        if said is None:
            return None
        if not said:
            raise NobodyError("rank 0 does not record")
        address = Address.from_text(said)
        if address.within_reach:
            return address
        meeting.put(FAR, "1")
        return None

    return find
