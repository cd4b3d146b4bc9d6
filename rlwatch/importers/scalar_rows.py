"""Rows of logs whose records hold one scalar each: consecutive records of one step are a row."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlwatch.importers.base import ImportedRow


class ScalarRows:
    """Puts scalars together into rows.

    A row ends where another step, or the same metric again, begins; and, so that the alarm need not wait for that,
    after the first value of a step that is not finite.
    """

    def __init__(self) -> None:
        self._open: ImportedRow | None = None
        self._metrics: dict[str, float] = {}
        self._alarmed = -1

    def add(self, step: int, name: str, value: float, *, ts: float, line: int) -> Iterator[ImportedRow]:
        """Rows that a scalar ends; of the new one ``ts`` and ``line`` are kept."""
        if self._open is None or self._open.step != step or name in self._metrics:
            yield from self.finish()
            self._metrics = {}
            self._open = ImportedRow(step, self._metrics, line, ts=ts)
        self._metrics[name] = value
        if not math.isfinite(value) and step != self._alarmed:
            self._alarmed = step
            yield from self.finish()

    def finish(self) -> Iterator[ImportedRow]:
        """The row of the last step."""
        if self._open is not None:
            yield self._open
        self._open = None
