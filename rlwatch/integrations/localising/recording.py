"""What becomes of a localisation: token rows, an event, and the inputs if they are to be kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlwatch.gradloc.locate import Located
from rlwatch.gradloc.passes import Passes
from rlwatch.gradloc.world import World
from rlwatch.integrations.localising.settings import Localise
from rlwatch.integrations.spike_rows import Decode

if TYPE_CHECKING:
    from rlwatch.run import Run


@dataclass(frozen=True, slots=True)
class Recorded:
    """A localised step, with what is needed to record it."""

    step: int
    located: Located
    passes: Passes
    settings: Localise
    decode: Decode | None
    world: World


def record(what: Recorded, run: Run | None) -> None:
    """Through ``run``; of several ranks rank 0 records for all."""
