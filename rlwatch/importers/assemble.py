"""From rows to records: sequence numbers, attempts, one list per run."""

from __future__ import annotations

from itertools import pairwise

from rlwatch.importers.attempts import Attempts
from rlwatch.importers.reading import Row
from rlwatch.records import StepRecord


class RunAssembly:
    """Gives the rows of one run their ``seq`` (1, 2, 3... or on from ``seq``) and ``attempt``."""

    def __init__(self, seq: int = 0) -> None:
        self.attempts = Attempts()
        self.records: list[StepRecord] = []
        self.names: dict[str, None] = {}
        """Every metric seen, in order of first appearance."""
        self.seq = seq

    def record(self, row: Row) -> StepRecord:
        """The record of the next row, without keeping it."""
        self.seq += 1
        self.names.update(dict.fromkeys(row.metrics))
        attempt = self.attempts.of(row.step, row.metrics)
        return StepRecord(step=row.step, metrics=row.metrics, ts=row.ts, attempt=attempt, seq=self.seq)

    def add(self, row: Row) -> None:
        """Keep the record of the next row."""
        self.records.append(self.record(row))

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
