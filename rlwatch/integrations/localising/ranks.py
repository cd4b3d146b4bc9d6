"""The ranks that localise a step together."""

from __future__ import annotations

import logging

import torch.distributed as dist

from rlwatch.errors import RLWatchError
from rlwatch.gradloc.distributed import Alone, Processes, World
from rlwatch.integrations.distributed import all_agree
from rlwatch.integrations.localising.localiser import Localiser
from rlwatch.integrations.localising.settings import Localise
from rlwatch.integrations.spike_rows import Decode
from rlwatch.seam import Seam

logger = logging.getLogger("rlwatch")

TIMEOUT_S = 60.0
"""Longest that ranks wait for one that does not come, in seconds: once, then they do without localisation."""
OFF = "rlwatch does not localise gradient spikes over several ranks (training goes on): %s"


def localiser_of(seam: Seam, settings: Localise | None, decode: Decode | None) -> Localiser | None:
    """For the ranks of ``seam``'s run; None, with a warning, where they cannot. Every rank calls it at set-up."""
    if settings is None:
        return None
    link = None if seam.run is None else seam.run.ranks
    linked = link is not None and link.settled(TIMEOUT_S)
    try:
        world = world_of(linked, otherwise="they are not all linked to rank 0")
    except RLWatchError as error:
        logger.warning(OFF, error)
        return None
    return Localiser(seam, settings, decode=decode, world=world)


def world_of(ready: bool, *, otherwise: str) -> World:
    """The ranks of ``torch.distributed``; every rank calls it at set-up, and says whether it is ready.

    Nobody waits for a rank that will not come: all are asked first. Raises ``RLWatchError`` on all ranks alike: with
    ``otherwise`` where one is not ready, or with why their process group could not be made.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return Alone()
    try:
        if all_agree(ready, TIMEOUT_S):
            return Processes(TIMEOUT_S)
    except (RuntimeError, AttributeError) as error:  # DistBackendError, DistNetworkError; torch without gloo
        raise RLWatchError(f"a process group of their own could not be made: {error}") from None
    raise RLWatchError(otherwise)
