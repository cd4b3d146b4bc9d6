"""What one optimizer step measured, combined over its micro-batches and sent to the CPU once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlwatch.records import SpikeBatch
from rlwatch.tensors.mergeable import Stats, merge
from rlwatch.tensors.observe import observe
from rlwatch.tensors.spikes import SpikeTable, top_tokens
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.transfer import Transfer

if TYPE_CHECKING:
    from rlwatch.run import Run

Decode = Callable[[int], str]
"""Token id -> its text."""

_WHOLE = ("sequence", "position", "token_id")


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

    def seal(self, step: int) -> SealedStep:
        """End the collection: everything starts its way to the CPU in one copy."""
        with torch.no_grad():
            settled = [stat.settle() for stat in self.stats.values()]
            values = [stat.value() for stat in settled]
            counts = [stat.count for stat in settled]
            table = [] if self.spikes is None else [self.spikes.rows]
            columns = () if self.spikes is None else self.spikes.names
            return SealedStep(step, list(self.stats), dict(self.numbers), columns, Transfer([*values, *counts, *table]))


@dataclass(frozen=True, slots=True)
class SealedStep:
    """A step on its way to the CPU."""

    step: int
    names: list[str]
    numbers: Mapping[str, list[float]]
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
        measured |= {name: sum(numbers) / len(numbers) for name, numbers in self.numbers.items()}
        run.log(measured, step=self.step)
        spikes = None if table is None else self._spikes(table, decode)
        if spikes is not None:
            run.log_spikes(spikes)
        return measured

    def _spikes(self, table: np.ndarray, decode: Decode | None) -> SpikeBatch | None:
        """The tokens at or beyond a limit, worst first; None in an ordinary step."""
        far = table[table[:, 0] >= 1]
        if not len(far):
            return None
        far = far[np.argsort(-far[:, 0], kind="stable")]
        columns: dict[str, np.ndarray | list[str]] = {
            name: far[:, i].astype(np.int64) if name in _WHOLE else far[:, i] for i, name in enumerate(self.columns, 1)
        }
        if decode is not None and "token_id" in columns:
            columns["text"] = [decode(int(token)) for token in columns["token_id"]]
        reason = "non-finite tokens" if np.isinf(far[0, 0]) else "far-out tokens"
        return SpikeBatch(self.step, columns, reason=reason)
