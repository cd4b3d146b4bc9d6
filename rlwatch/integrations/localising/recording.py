"""What becomes of a localisation: token rows and an event, and the inputs of the step if they are to be kept."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rlwatch.gradloc.distributed import World, gather_bytes
from rlwatch.gradloc.locate import Located
from rlwatch.gradloc.rows import culprit_batches, event_body, response_batch
from rlwatch.integrations.localising.settings import Localise
from rlwatch.integrations.spike_rows import Decode
from rlwatch.records import LOCALISED, SpikeBatch

if TYPE_CHECKING:
    from rlwatch.run import Run


@dataclass(frozen=True, slots=True)
class Recorded:
    """A localised step of this rank, with what is needed to record it."""

    step: int
    located: Located
    settings: Localise
    decode: Decode | None = None


def record(what: Recorded, world: World, run: Run | None) -> None:
    """Through the ``run`` of rank 0, what all ranks found. A collective."""
    theirs = gather_bytes(world, encoded(batches_of(what, world.rank)))
    if run is None or world.rank != 0:
        return
    for data in theirs:
        for batch in decoded(data):
            run.log_spikes(batch)
    run.event(LOCALISED, what.step, **event_body(what.located.report))


def batches_of(what: Recorded, rank: int) -> list[SpikeBatch]:
    """The culprits on this ``rank``, and their responses."""
    located = what.located
    ours = [culprit for culprit in located.report.culprits if culprit.at.rank == rank]
    report = replace(located.report, culprits=ours)
    responses = response_batch(
        what.step,
        report,
        located.hosts,
        located.contributions,
        rank=rank,
        context=what.settings.context,
        decode=what.decode,
    )
    found = culprit_batches(what.step, report, located.hosts, decode=what.decode)
    return found if responses is None else [*found, responses]


def encoded(batches: Sequence[SpikeBatch]) -> bytes:
    """As bytes for rank 0. No pickle: columns as numpy writes them."""
    columns = {
        f"{i}/{name}": np.asarray(column) for i, one in enumerate(batches) for name, column in one.columns.items()
    }
    heads = [
        {"step": one.step, "reason": one.reason, "rank": one.rank, "columns": list(one.columns)} for one in batches
    ]
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, heads=np.array(json.dumps(heads)), **columns)
    return buffer.getvalue()


def decoded(data: bytes) -> list[SpikeBatch]:
    """What :func:`encoded` wrote."""
    with np.load(io.BytesIO(data), allow_pickle=False) as found:
        heads = json.loads(str(found["heads"]))
        return [
            SpikeBatch(
                head["step"],
                {name: _column(found[f"{i}/{name}"]) for name in head["columns"]},
                head["reason"],
                rank=head["rank"],
            )
            for i, head in enumerate(heads)
        ]


def _column(column: np.ndarray) -> np.ndarray | list[str]:
    return column if column.dtype.kind in "biuf" else [str(text) for text in column]
