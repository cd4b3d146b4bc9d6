"""The ranks that localise a step together."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch.distributed as dist

from rlwatch.gradloc.world import Alone, Processes, World
from rlwatch.integrations.distributed import all_agree
from rlwatch.integrations.localising.localiser import Localiser
from rlwatch.integrations.localising.settings import Localise
from rlwatch.integrations.seam import Seam
from rlwatch.integrations.spike_rows import Decode

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")

TIMEOUT_S = 60.0
"""Longest that ranks wait for one that does not come, in seconds: once, then they do without localisation."""
OFF = "rlwatch does not localise gradient spikes over several ranks (training goes on): %s"


def localiser_of(seam: Seam, settings: Localise | None, decode: Decode | None) -> Localiser | None:
    """For the ranks of ``seam``'s run; None if it is not wanted or they cannot. Every rank calls it at set-up."""
    world = None if settings is None else world_of(seam.run)
    return None if settings is None or world is None else Localiser(seam, settings, decode=decode, world=world)


def world_of(run: Run | None) -> World | None:
    """The ranks of ``run``; None, with a warning, where they cannot work together. Every rank calls it at set-up."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return Alone()
    try:
        if all_agree(run is not None and run.linked, TIMEOUT_S):
            return Processes(TIMEOUT_S)
        reason = "they are not all linked to rank 0"
    except (RuntimeError, AttributeError) as error:  # DistBackendError, DistNetworkError; torch without gloo
        reason = f"a process group of their own could not be made: {error}"
    logger.warning(OFF, reason)
    return None
