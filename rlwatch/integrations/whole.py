"""One global step, put together of what the driver read of the batch and what each worker measured of the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlwatch.integrations.shared_step import SharedStep, decoded, read
from rlwatch.integrations.spike_rows import Decode, most_extreme, spike_batch, texts_of
from rlwatch.integrations.step_tally import StepTally
from rlwatch.records import SpikeBatch
from rlwatch.tensors.mergeable import Stats, merge_ranks

MOST_SPIKES = 64
"""Extreme tokens recorded of a step, over the batch and all workers."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A step as it is recorded."""

    metrics: Mapping[str, float]
    spikes: Sequence[SpikeBatch]


def encoded(tally: StepTally, step: int) -> bytes:
    """What a worker measured of ``step``, for :func:`together`. Waits for the device."""
    return SharedStep.of(step, tally.stats, tally.spikes, {}).encode()


def together(step: int, batch: StepTally, workers: Mapping[int, bytes], decode: Decode | None = None) -> Whole:
    """``batch`` is what the driver measured; ``workers``, by rank, what :func:`encoded` made there.

    Ranks merge exactly. What both measure is the driver's: it sees every response once, and the workers as often
    as they update on it. The driver's extreme tokens come first, as those of rank 0.
    """
    shares = {rank: decoded(workers[rank]) for rank in sorted(workers)}
    update: Stats = {}
    for share in shares.values():
        update = merge_ranks(update, share.stats)
    averages = {name: sum(values) / len(values) for name, values in batch.numbers.items()}
    tables = [] if batch.spikes is None else [(0, batch.spikes.names, batch.spikes.rows.double().numpy())]
    tables += [(rank, share.columns, share.rows) for rank, share in shares.items() if share.columns]
    return Whole({**read({**update, **batch.stats}), **averages}, _spikes(step, tables, decode))


def _spikes(
    step: int, tables: Sequence[tuple[int, tuple[str, ...], np.ndarray]], decode: Decode | None
) -> list[SpikeBatch]:
    if not tables:
        return []
    kept = most_extreme([rows for _, _, rows in tables], MOST_SPIKES)
    found = [
        spike_batch(step, rows, names, texts_of(rows, names, decode), rank=rank)
        for (rank, names, _), rows in zip(tables, kept, strict=True)
    ]
    return [batch for batch in found if batch is not None]
