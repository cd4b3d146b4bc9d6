"""ROLL's console: a JSON object of metrics, then a line with its step, ``pipeline step 3 finished``.

The object is printed every ``logging_steps`` only. Python's ``json`` writes ``NaN`` and ``Infinity``; ``null`` is NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from rlwatch.importers.base import ImportedRow, LineImporter, LineParser, metrics_of, step_of
from rlwatch.importers.console import dict_rows
from rlwatch.importers.lines import TextLine

_STEP = re.compile(r"pipeline step (\d{1,15}) finished")
_METRICS = re.compile(r"\{\"[\w@.-]+/[^\"]{1,200}\": (?:-?\d|NaN|-?Infinity|null)")


class RollConsoleParser(LineParser):
    """Parser that holds a row until the line with its step."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._held: tuple[dict[str, float], int] | None = None

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the row whose step ``segment`` holds."""
        step = _STEP.search(segment.text)
        if step is not None and self._held is not None:
            (metrics, line), self._held = self._held, None
            self.recognised = True
            yield ImportedRow(step_of(step[1]), metrics, line)
            return
        found = _METRICS.search(segment.text)
        rows = [] if found is None else dict_rows(segment.text[found.start() :])[:1]
        if rows and not rows[0].cut:
            self._held = metrics_of(rows[0].items, self.skips, segment.line), segment.line


class RollConsole(LineImporter):
    """Console output of ROLL."""

    name: ClassVar[str] = "roll-console"
    expects: ClassVar[str] = "JSON of metrics, then 'pipeline step N finished'"
    source: ClassVar[str] = "roll"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"pipeline step ",)
    parser: ClassVar[type[LineParser]] = RollConsoleParser
