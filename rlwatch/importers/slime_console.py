"""slime's console lines: ``rollout 3: {'rollout/raw_reward': 0.5, ...}``, ``step 3: {'train/loss': 0.01, ...}``.

Printed under Ray and Python's logging. A rollout and an update have a number each, which are the same where every
rollout is trained on in one update; both are read as the step. Values are a Python dict's: ``nan`` and ``inf`` are read
as such, ``None`` as NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from rlwatch.importers.base import ImportedRow, LineImporter, LineParser, metrics_of, step_of
from rlwatch.importers.console import dict_rows
from rlwatch.importers.lines import TextLine

_LINE = re.compile(r"(?:^|[\s-])(?:rollout|step|perf|eval) (\d{1,15}): *(?=\{['\"](?:rollout|train|perf|eval)/)")
_COUNTERS = frozenset({"rollout/step", "train/step", "eval/step"})


class SlimeConsoleParser(LineParser):
    """Parser of lines that each hold their step."""

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """The row of one line."""
        match = _LINE.search(segment.text)
        if match is None:
            return
        for row in dict_rows(segment.text[match.end() :])[:1]:
            self.recognised = True
            if row.cut:
                self.skips.add("the last value of a row that is cut off", segment.line)
            items = {name: value for name, value in row.items.items() if name not in _COUNTERS}
            yield ImportedRow(step_of(match.group(1)), metrics_of(items, self.skips, segment.line), segment.line)

    def notes(self) -> tuple[str, ...]:
        """Counters that the steps are."""
        return ("a rollout and an update of the same number are read as one step",) if self.recognised else ()


class SlimeConsole(LineImporter):
    """Console output of slime."""

    name: ClassVar[str] = "slime-console"
    expects: ClassVar[str] = "line 'rollout N: {...}' or 'step N: {...}'"
    source: ClassVar[str] = "slime"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"rollout ", b"step ")
    parser: ClassVar[type[LineParser]] = SlimeConsoleParser
