"""Stretches of consecutive rows that a detector may read at once: most cannot have a finding, and one look shows it.

A detector that can decide this for many rows overrides :meth:`~rlwatch.detectors.base.BaseDetector.pass_over`, which
compares the extremes of the rows with the detector's limits. If they are on the safe side, no row would have had a
finding, and the state after the rows follows from the last of them. Otherwise the rows are judged one by one, as live
rows are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from rlwatch.records import ClosedStep

LONGEST, SHORTEST = 64, 6
"""Most rows of a stretch, so that one odd row affects few others; and fewest rows that are worth reading at once."""


class Stretch:
    """Consecutive rows (metrics of one step each) of one attempt, with the same metrics, all finite, at ascending
    steps.

    Parameters ---------- rows
        The rows, at least one; :func:`stretches` finds them.
    """

    def __init__(self, rows: Sequence[ClosedStep]) -> None:
        self.rows = rows
        self.metrics = frozenset(rows[0].metrics)
        """Names of the metrics."""
        self._columns: dict[str, list[float]] = {}

    @cached_property
    def steps(self) -> list[int]:
        """Training step of each row, ascending."""
        return [row.step for row in self.rows]

    def column(self, name: str) -> list[float]:
        """Return the values of the metric ``name``, one per row; empty if the rows do not have the metric."""
        if name not in self.metrics:
            return []
        known = self._columns.get(name)
        if known is None:
            known = self._columns[name] = [row.metrics[name] for row in self.rows]
        return known

    def first(self, *names: str) -> list[float]:
        """Return the values of the first of the metrics ``names`` that the rows have, one per row; empty if they have
        none.
        """
        return next((self.column(name) for name in names if name in self.metrics), [])


def stretches(steps: Sequence[ClosedStep]) -> Iterator[Sequence[ClosedStep]]:
    """Cut closed ``steps``, which are in order, into stretches; a row that fits no neighbour is one by itself.

    >>> rows = [ClosedStep(step, {"a": 0.5}) for step in (1, 2, 3, 3, 4)]
    >>> [[row.step for row in part] for part in stretches(rows)]
    [[1, 2, 3], [3, 4]]
    """
    begins = 0
    for at in range(1, len(steps) + 1):
        if at == len(steps) or at - begins == LONGEST or not _go_on(steps[at - 1], steps[at]):
            yield steps[begins:at]
            begins = at


def _go_on(before: ClosedStep, row: ClosedStep) -> bool:
    """Return whether a row belongs to the stretch of the row before it."""
    finite = row.numbers is row.metrics and before.numbers is before.metrics
    return finite and row.beginning is before.beginning and row.attempt == before.attempt and row.step > before.step
