"""What a store answers about runs, over two hooks: which runs there are, and where a run's tables are."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from rlwatch.errors import StoreError
from rlwatch.ports import Checkpoint, Series
from rlwatch.records import (
    JSON,
    CompletionBatch,
    Event,
    Finding,
    ForecastRecord,
    RunInfo,
    SpikeBatch,
    StepRecord,
)
from rlwatch.store.sqlite import progress, reading, runrow
from rlwatch.store.sqlite import series as series_rows


class RunTables(ABC):
    """The reading half (``RunReader``): one snapshot a call."""

    url: str

    @abstractmethod
    def _run_ids(self) -> list[str]:
        """Names of what may be runs, readable or not."""

    @abstractmethod
    def _reading(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        """The run's tables as they are now. Raises ``RunNotFoundError`` and what reading may raise."""

    def runs(self) -> list[RunInfo]:
        """All readable runs, newest first."""
        return sorted(self._listed()[0], key=lambda run: (run.created_at, run.run_id), reverse=True)

    def unreadable(self) -> Mapping[str, str]:
        """Name of each unreadable run -> why."""
        return self._listed()[1]

    def run(self, run_id: str) -> RunInfo:
        """One run."""
        with self._reading(run_id) as db:
            return runrow.load(db, run_id)

    def records(
        self, run_id: str, *, after_seq: int = 0, limit: int | None = None, last: int | None = None
    ) -> list[StepRecord]:
        """Records with ``seq > after_seq`` in order of ``seq``; of these the ``last`` newest if given."""
        with self._reading(run_id) as db:
            return reading.records(db, after_seq, limit) if last is None else reading.newest(db, after_seq, last)

    def branch(
        self, run_id: str, attempt: int, before_step: int, *, after_seq: int = 0
    ) -> Iterator[StepRecord | Event]:
        """The history that ``attempt``, starting at ``before_step``, continues."""
        self.branch_bounds(run_id, attempt, before_step)  # an unknown run is an error now, not at the first item
        return self._branch(run_id, attempt, before_step, after_seq)

    def _branch(self, run_id: str, attempt: int, before_step: int, after_seq: int) -> Iterator[StepRecord | Event]:
        with self._reading(run_id) as db:
            yield from reading.branch(db, attempt, before_step, after_seq)

    def branch_bounds(self, run_id: str, attempt: int, before_step: int) -> Mapping[int, int]:
        """Earlier attempt -> the step below which :meth:`branch` has its records."""
        with self._reading(run_id) as db:
            return reading.bounds(db, attempt, before_step)

    def stream(self, run_id: str, *, after_seq: int, limit: int) -> list[StepRecord | Event]:
        """The next ``limit`` records and events above ``after_seq``."""
        with self._reading(run_id) as db:
            return reading.stream(db, after_seq, limit)

    def judged(self, run_id: str) -> tuple[int, int]:
        """Up to which ``seq`` the run is judged, and its last."""
        with self._reading(run_id) as db:
            return progress.judged(db), runrow.last_seq(db)

    def first_seq(self, run_id: str, attempt: int) -> int:
        """The first ``seq`` that ``attempt`` may have written."""
        with self._reading(run_id) as db:
            return runrow.first_seq(db, attempt)

    def checkpoint(
        self, run_id: str, made_by: str, fits: Callable[[int, int, int], bool] = lambda *_: True
    ) -> Checkpoint | None:
        """The newest checkpoint that fits."""
        with self._reading(run_id) as db:
            return progress.newest(db, made_by, fits)

    def metric_names(self, run_id: str) -> list[str]:
        """Every metric name ever recorded, sorted."""
        with self._reading(run_id) as db:
            return sorted(set().union(*reading.metric_sets(db).values()))

    def series(self, run_id: str, names: Sequence[str]) -> dict[str, Series]:
        """Whole series of ``names``."""
        with self._reading(run_id) as db:
            return series_rows.load(db, names)

    def last_values(self, run_id: str) -> dict[str, tuple[int, float]]:
        """Metric name -> (step, value) as last recorded."""
        with self._reading(run_id) as db:
            return reading.last_values(db)

    def spikes(
        self, run_id: str, *, last: int | None = None, reason: str | None = None, step: int | None = None
    ) -> list[SpikeBatch]:
        """Spike batches by step, or the ``last`` newest; of one ``reason`` or one ``step`` only, where it is said."""
        with self._reading(run_id) as db:
            return reading.spikes(db, last, reason, step)

    def top_spikes(self, run_id: str, *, limit: int = 50) -> list[Mapping[str, JSON]]:
        """The worst rows of all spike batches, worst first, with their step, attempt and rank."""
        with self._reading(run_id) as db:
            return reading.top_spikes(db, limit)

    def completions(self, run_id: str, *, last: int | None = None) -> list[CompletionBatch]:
        """Recorded completions by step, or the ``last`` newest batches."""
        with self._reading(run_id) as db:
            return reading.completions(db, last)

    def findings(self, run_id: str) -> list[Finding]:
        """Findings in order of ``seq``."""
        with self._reading(run_id) as db:
            return reading.findings(db)

    def forecasts(self, run_id: str, *, last: int | None = None) -> list[ForecastRecord]:
        """What was forecast, in order of ``seq``."""
        with self._reading(run_id) as db:
            return reading.forecasts(db, last)

    def events(self, run_id: str, *, after_seq: int = 0) -> list[Event]:
        """Events in order of ``seq``."""
        with self._reading(run_id) as db:
            return reading.events(db, after_seq)

    def _listed(self) -> tuple[list[RunInfo], dict[str, str]]:
        runs: list[RunInfo] = []
        unreadable: dict[str, str] = {}
        for run_id in self._run_ids():
            try:
                runs.append(self.run(run_id))
            except StoreError as error:
                unreadable[run_id] = str(error)
        return runs, unreadable
