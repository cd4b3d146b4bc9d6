"""Rows of many runs in memory: what labels, scores and features are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TRUTH = "truth/"
"""Columns that begin so are hidden: labels may read them, nothing that forecasts may."""
HEALTHY = "healthy"
"""The family of runs without a fault, or with one that is harmless or ends in time."""


@dataclass(frozen=True)
class Column:
    """One metric over all rows: ``values`` is NaN where the value was NaN and where nothing was measured."""

    values: Floats
    measured: Bools


@dataclass(frozen=True)
class RunTable:
    """Rows of many runs, run after run, steps ascending.

    ``runs``, ``recipes``, ``families``, ``pairs``: one entry a run; ``pairs`` names the run that a run is the
    faultless twin of, or ""; ``faults``: the step at which the fault of a run that was made to fail began, None (or no
    entry at all) where nobody knows. ``at_once``: whether the fault is of a kind that does not come gradually
    (no entry: nobody knows). ``starts``: the first row of each run and, last, the number of rows. ``step``: of
    each row. ``columns``: by canonical name, and hidden ``truth/`` ones.
    """

    runs: tuple[str, ...]
    recipes: tuple[str, ...]
    families: tuple[str, ...]
    pairs: tuple[str, ...]
    starts: Ints
    step: Ints
    columns: Mapping[str, Column]
    notes: tuple[str, ...] = field(default=())
    faults: tuple[int | None, ...] = field(default=())
    at_once: tuple[bool, ...] = field(default=())

    def __len__(self) -> int:
        """How many rows."""
        return len(self.step)

    @cached_property
    def place(self) -> dict[str, int]:
        """Where in ``runs`` a run is."""
        return {run: i for i, run in enumerate(self.runs)}

    @cached_property
    def run_of(self) -> Ints:
        """Of each row, its run."""
        return np.repeat(np.arange(len(self.runs)), np.diff(self.starts))

    @cached_property
    def first(self) -> Ints:
        """First step of each run."""
        return self.step[self.starts[:-1]]

    @cached_property
    def last(self) -> Ints:
        """Last step of each run."""
        return self.step[self.starts[1:] - 1]

    @cached_property
    def span(self) -> Ints:
        """Steps that each row stands for: those since the row before (1 for the first of a run)."""
        span = np.diff(self.step, prepend=0)
        span[self.starts[:-1]] = 1
        return span

    @cached_property
    def stride(self) -> int:
        """Farther than any two steps of a run are apart, with room for windows that reach beyond it."""
        return int(self.step.max(initial=0)) + 100_000

    @cached_property
    def key(self) -> Ints:
        """Ascending over runs and steps: run * stride + step, for searching rows by run and step."""
        return self.run_of * self.stride + self.step

    def find(self, runs: Ints, steps: Ints) -> Ints:
        """First row of each of ``runs`` (places) at or after each of ``steps``; the next run's first if none is."""
        before, after = runs * self.stride, (runs + 1) * self.stride - 1
        found: Ints = np.searchsorted(self.key, np.clip(before + steps, before, after)).astype(np.int64)
        return found

    def rows(self, i: int) -> slice:
        """Rows of the run at place ``i``."""
        return slice(int(self.starts[i]), int(self.starts[i + 1]))

    @cached_property
    def fault(self) -> Floats:
        """Of each run, the step from which on a fault was there for good; infinite where none is known of."""
        known = zip(self.faults or (None,) * len(self.runs), self.families, strict=True)
        return np.array([np.inf if step is None or family == HEALTHY else step for step, family in known], dtype=float)

    @property
    def sound_until(self) -> Floats:
        """Of each run, the step of its fault; minus infinity where none is known of: then no step is known as sound."""
        return np.where(np.isfinite(self.fault), self.fault, -np.inf)

    @property
    def visible(self) -> list[str]:
        """Names of the columns that are not hidden."""
        return [name for name in self.columns if not name.startswith(TRUTH)]

    def stream(self, i: int) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, what was measured and is not hidden) of one run, row by row: all a tool gets to see."""
        rows = self.rows(i)
        names = self.visible
        values = [self.columns[name].values[rows].tolist() for name in names]
        there = [self.columns[name].measured[rows].tolist() for name in names]
        for at, step in enumerate(self.step[rows].tolist()):
            yield step, {n: v[at] for n, v, m in zip(names, values, there, strict=True) if m[at]}

    def only(self, places: Sequence[int]) -> RunTable:
        """The same of some runs, in that order."""
        rows = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in places] or [np.zeros(0, int)])
        lengths = [int(self.starts[i + 1] - self.starts[i]) for i in places]

        def of(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(names[i] for i in places)

        columns = {name: Column(c.values[rows], c.measured[rows]) for name, c in self.columns.items()}
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        told = (of(self.runs), of(self.recipes), of(self.families), of(self.pairs))
        faults = tuple(self.faults[i] for i in places) if self.faults else ()
        at_once = tuple(self.at_once[i] for i in places) if self.at_once else ()
        return RunTable(*told, starts, self.step[rows], columns, self.notes, faults, at_once)
