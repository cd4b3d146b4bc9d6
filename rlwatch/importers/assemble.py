"""From rows to records: sequence numbers, attempts, one list per run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from rlwatch.errors import ImportFormatError
from rlwatch.importers.attempts import Attempts
from rlwatch.importers.bounds import LONGEST_NAME, MOST_ATTEMPTS, MOST_NAMES
from rlwatch.importers.reading import Row, Skips
from rlwatch.records import StepRecord


class RunAssembly:
    """Gives the rows of one run their ``seq`` (1, 2, 3... or on from ``seq``) and ``attempt``.

    Metrics beyond the first 20,000, and those whose names are no names, are left out.
    """

    def __init__(self, path: str, seq: int = 0) -> None:
        self.path = path
        self.attempts = Attempts()
        self.records: list[StepRecord] = []
        self.names: dict[str, None] = {}
        """Every metric seen, in order of first appearance."""
        self.seq = seq

    def record(self, row: Row, skips: Skips) -> StepRecord:
        """The record of the next row, without keeping it; what is left out is counted in ``skips``.

        Raises ``ImportFormatError`` where steps go back so often that the rows cannot be of one run.
        """
        self.seq += 1
        new = row.metrics.keys() - self.names.keys()
        metrics = self._bounded(row, skips) if new else row.metrics
        attempt = self.attempts.of(row.step, metrics)
        if attempt > MOST_ATTEMPTS:
            problem = f"its steps go back more than {MOST_ATTEMPTS:,} times, as those of one run never do; are these "
            raise ImportFormatError(self.path, problem + "the rows of several runs?", row.line or None)
        return StepRecord(step=row.step, metrics=metrics, ts=row.ts, attempt=attempt, seq=self.seq)

    def add(self, row: Row, skips: Skips) -> None:
        """Keep the record of the next row."""
        self.records.append(self.record(row, skips))

    def _bounded(self, row: Row, skips: Skips) -> Mapping[str, float]:
        """The metrics of a row with names not seen before, without those that are too many or too long."""
        kept: dict[str, float] = {}
        for name, value in row.metrics.items():
            if name not in self.names:
                if len(name) > LONGEST_NAME:
                    skips.add(f"a metric whose name has more than {LONGEST_NAME} characters", row.line)
                    continue
                if len(self.names) >= MOST_NAMES:
                    skips.add(f"a metric beyond the first {MOST_NAMES:,} of its run", row.line)
                    continue
                self.names[name] = None
            kept[name] = value
        return kept

    def by_step(self) -> list[StepRecord]:
        """The kept records; merged by step and sorted, if the rows came sorted by metric rather than by step."""
        if all(a.attempt != b.attempt or a.step <= b.step for a, b in pairwise(self.records)):
            return self.records
        merged: dict[tuple[int, int], dict[str, float]] = {}
        for record in self.records:
            merged.setdefault((record.attempt, record.step), {}).update(record.metrics)
        return [
            StepRecord(step=step, metrics=merged[attempt, step], attempt=attempt, seq=seq)
            for seq, (attempt, step) in enumerate(sorted(merged), 1)
        ]
