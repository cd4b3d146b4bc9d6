"""What one optimizer step measured, combined over its micro-batches and sent to the CPU once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from rlwatch.integrations.shared_step import SharedStep
from rlwatch.integrations.spike_rows import Decode, spike_batch, texts_of
from rlwatch.records import SpikeBatch
from rlwatch.tensors.mergeable import Stats, merge
from rlwatch.tensors.observe import observe
from rlwatch.tensors.spikes import SpikeTable, top_tokens
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.transfer import Transfer

if TYPE_CHECKING:
    from rlwatch.run import Run

__all__ = ["Decode", "SealedStep", "StepTally"]


@dataclass(slots=True)
class StepTally:
    """Collects one step. Everything stays on the device until :meth:`seal`."""

    stats: Stats = field(default_factory=dict)
    spikes: SpikeTable | None = None
    numbers: dict[str, list[float]] = field(default_factory=dict)
    rows: int = 0

    @property
    def empty(self) -> bool:
        """Whether nothing was collected."""
        return not (self.stats or self.numbers)

    def add_batch(self, batch: TokenBatch, *, full: bool = True) -> None:
        """One micro-batch; ``full`` as in :func:`~rlwatch.tensors.observe.observe`."""
        self.add_stats(observe(batch, full=full))
        self.add_spikes(batch)

    def add_spikes(self, batch: TokenBatch) -> None:
        """The most extreme tokens of a micro-batch, without its statistics."""
        table = top_tokens(batch, first_row=self.rows)
        self.spikes = table if self.spikes is None else self.spikes.join(table)
        self.rows += batch.logp.shape[0]

    def add_stats(self, stats: Stats) -> None:
        """More statistics of a micro-batch."""
        self.stats = merge(self.stats, stats)

    def add_number(self, name: str, value: float) -> None:
        """A number the CPU already knows; several of one step are averaged."""
        self.numbers.setdefault(name, []).append(float(value))

    def seal(self, step: int, *, shared: bool = False) -> SealedStep:
        """End the collection: everything starts its way to the CPU in one copy.

        ``shared``: this is one rank's share of the step (:attr:`rlwatch.run.Run.linked`).
        """
        with torch.no_grad():
            if shared:
                return SharedStep.of(step, self.stats, self.spikes, _averages(self.numbers))
            settled = [stat.settle() for stat in self.stats.values()]
            values = [stat.value() for stat in settled]
            counts = [stat.count for stat in settled]
            table = [] if self.spikes is None else [self.spikes.rows]
            columns = () if self.spikes is None else self.spikes.names
            return WholeStep(
                step, list(self.stats), _averages(self.numbers), columns, Transfer([*values, *counts, *table])
            )


class SealedStep(Protocol):
    """A step on its way to the CPU, whether this rank measured all of it or a share."""

    @property
    def step(self) -> int:
        """The trainer's global step."""
        ...

    def ready(self) -> bool:
        """Whether :meth:`deliver` would not wait."""
        ...

    def deliver(self, run: Run, decode: Decode | None = None) -> dict[str, float]:
        """Record the step, or send the share; returns its metrics, which of a share are known later.

        ``decode`` turns the ids of the extreme tokens into text, which is kept beside them.
        """
        ...


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A step of which this rank measured all."""

    step: int
    names: list[str]
    numbers: Mapping[str, float]
    columns: tuple[str, ...]
    transfer: Transfer

    def ready(self) -> bool:
        """Whether :meth:`deliver` would not wait."""
        return self.transfer.ready()

    def deliver(self, run: Run, decode: Decode | None = None) -> dict[str, float]:
        """Record the step; returns its metrics. What was never measured (a count of 0) is left out."""
        arrays = self.transfer.read()
        n = len(self.names)
        values, rest = arrays[:n], arrays[n:]
        table = rest.pop() if self.columns else None
        measured = {name: float(v) for name, v, count in zip(self.names, values, rest, strict=True) if count > 0}
        measured |= self.numbers
        run.log(measured, step=self.step)
        spikes = None if table is None else self._spikes(table, decode)
        if spikes is not None:
            run.log_spikes(spikes)
        return measured

    def _spikes(self, table: np.ndarray, decode: Decode | None) -> SpikeBatch | None:
        return spike_batch(self.step, table, self.columns, texts_of(table, self.columns, decode))


def _averages(numbers: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: sum(values) / len(values) for name, values in numbers.items()}
