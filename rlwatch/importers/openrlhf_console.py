"""OpenRLHF's console line: ``Global step 12: {'policy_loss': 0.01, 'kl': 0.2, ...}``.

Printed by every OpenRLHF trainer, under Ray after ``(PPOTrainer pid=123)`` and a logging prefix. Values are a
Python dict's: ``nan`` and ``inf`` are read as such, ``None`` as NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from rlwatch.importers.base import ImportedRow, LineImporter, LineParser, metrics_of, step_of
from rlwatch.importers.console import dict_rows
from rlwatch.importers.lines import TextLine

_LINE = re.compile(r"Global step (\S+): *(?=\{)")


class OpenRlhfConsoleParser(LineParser):
    """Parser of lines that each hold their step."""

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """The row of one line."""
        match = _LINE.search(segment.text)
        if match is None:
            return
        try:
            step = step_of(match.group(1))
        except ValueError as error:
            self.skips.add(str(error), segment.line)
            return
        for row in dict_rows(segment.text[match.end() :])[:1]:
            self.recognised = True
            if row.cut:
                self.skips.add("the last value of a row that is cut off", segment.line)
            yield ImportedRow(step, metrics_of(row.items, self.skips, segment.line), segment.line)


class OpenRlhfConsole(LineImporter):
    """Console output of OpenRLHF."""

    name: ClassVar[str] = "openrlhf-console"
    expects: ClassVar[str] = "line 'Global step N: {...}'"
    source: ClassVar[str] = "openrlhf"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"Global step ",)
    parser: ClassVar[type[LineParser]] = OpenRlhfConsoleParser
