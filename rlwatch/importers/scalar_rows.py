"""Grouping of single scalars into rows: consecutive scalars of one step are a row."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlwatch.importers.base import ImportedRow


class ScalarRows:
    """Collector of single scalars, which yields them as rows (metrics of one step).

    A row ends where another step begins, or where the same metric comes again. It also ends after the first value of a
    step that is not finite, so that an alarm need not wait for the next step.
    """

    def __init__(self) -> None:
        self._open: ImportedRow | None = None
        self._metrics: dict[str, float] = {}
        self._alarmed = -1

    def add(self, step: int, name: str, value: float, *, ts: float, line: int) -> Iterator[ImportedRow]:
        """Add the scalar ``name`` of ``step``, and yield the rows that it ends.

        The new row keeps ``ts`` (Unix time in seconds) and ``line`` (its line in the log).
        """
        if self._open is None or self._open.step != step or name in self._metrics:
            yield from self.finish()
            self._metrics = {}
            self._open = ImportedRow(step, self._metrics, line, ts=ts)
        self._metrics[name] = value
        if not math.isfinite(value) and step != self._alarmed:
            self._alarmed = step
            yield from self.finish()

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the row of the last step."""
        if self._open is not None:
            yield self._open
        self._open = None
