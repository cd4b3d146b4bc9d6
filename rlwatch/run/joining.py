"""Bringing the ranks of a run together, once, when training is set up."""

from __future__ import annotations

import logging
import os

from rlwatch.errors import RLWatchError
from rlwatch.link.address import Address
from rlwatch.link.hub import Hub
from rlwatch.ports import Meeting
from rlwatch.run.lifecycle import watch_over
from rlwatch.run.link import FirstRank, OtherRank
from rlwatch.run.run import Run

logger = logging.getLogger("rlwatch")
MEETING_S = 60.0
"""Longest another rank waits to hear where rank 0 is, in seconds."""
APART = "rank %d is not linked to rank 0: its share of the batch is not measured, and commands are refused (%s)"


def join(run: Run, meeting: Meeting, *, alone: bool | None = None) -> None:
    """Link the ranks of ``run``. Every rank calls it at set-up, with its own run and the same meeting.

    Afterwards a step that every rank :meth:`sends <rlwatch.run.run.Run.send>` is recorded whole, and commands
    reach every rank. Rank 0 waits for nobody. A rank that cannot be linked says so in the log and stays inert.

    Parameters
    ----------
    run
        Of :func:`rlwatch.init`, which knows its rank.
    meeting
        Where rank 0 says on which address it listens.
    alone
        Whether all ranks are on one machine: rank 0 then listens there only. By default where ``LOCAL_WORLD_SIZE``
        says so. Otherwise it listens on a free port of every interface, for whoever knows the run's secret.
    """
    if run.world_size < 2 or run.linked:
        return
    if run.rank == 0:
        _host(run, meeting, alone=_alone(run.world_size) if alone is None else alone)
    else:
        _visit(run, meeting)


def _host(run: Run, meeting: Meeting, *, alone: bool) -> None:
    if not run.active:
        return meeting.tell("")
    try:
        hub = Hub(run.world_size, alone=alone)
    except RLWatchError as error:
        meeting.tell("")
        return logger.warning("the ranks are not linked: only rank 0's share of the batch is measured (%s)", error)
    hub.start()
    run.link(FirstRank(hub, run.offer))
    return meeting.tell(hub.address.to_text())


def _visit(run: Run, meeting: Meeting) -> None:
    try:
        said = meeting.ask(MEETING_S)
        if said:
            run.link(OtherRank(run.rank, Address.from_text(said), run.counters))
            watch_over(run, sigterm=False)
    except RLWatchError as error:
        logger.warning(APART, run.rank, error)


def _alone(world_size: int) -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
