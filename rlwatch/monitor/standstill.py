"""Records that come and come while no new step does: nothing closes, so no detector would hear of it."""

from __future__ import annotations

from dataclasses import replace

from rlwatch.records import ClosedStep

EVERY = 50
"""Records without a new step after which detectors are asked, and asked again."""
RECORDS, USUAL = "rlwatch/records", "rlwatch/records_usual"


class Standstill:
    """Counts the records since the last new step, and the most an earlier step had.

    >>> counter = Standstill()
    >>> [counter.update(advances=i == 0) for i in range(50)].index(True)
    49
    """

    def __init__(self) -> None:
        self._records = 0
        self._usual = 0

    def update(self, *, advances: bool) -> bool:
        """Take the next record, the first of a new step or not; whether to ask now."""
        if advances:
            self._usual = max(self._usual, self._records)
            self._records = 0
        self._records += 1
        return self._records % EVERY == 0

    def told(self, view: ClosedStep) -> ClosedStep:
        """``view`` with both counts; the usual one only once a step has closed."""
        counts = {RECORDS: float(self._records)}
        if self._usual:
            counts[USUAL] = float(self._usual)
        return replace(view, metrics={**view.metrics, **counts})
