"""Reading of Markdown tables with a column ``Step``: model cards of Hugging Face's trainers, and tables pasted into
issues.

The table of a card holds evaluations: if it has a column ``Validation Loss``, all columns but ``Training Loss`` and
``Epoch`` come from held-out data, and are called ``eval/...``. ``No log`` means not measured; ``nan`` and ``inf`` are
values. A second table begins another attempt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from rlwatch.importers.base import ImportedRow, LineImporter, LineParser, metrics_of, step_of
from rlwatch.importers.lines import LONGEST_NAME, TextLine

_RULE = re.compile(r"\s*\|?(?:\s*:?-{2,}:?\s*\|)+(?:\s*:?-{2,}:?\s*)?\|?\s*")
_STEP = "step"
_HELD_OUT = "Validation Loss"
_OF_TRAINING = frozenset({"Training Loss", "Epoch", "Step"})
_NOTHING = frozenset({"No log", "No Log", ""})
LONGEST = 20_000
"""Largest number of characters in a row."""


class MarkdownTableParser(LineParser):
    """Parser of Markdown tables, each of whose rows holds its step."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._above: list[str] = []
        self._columns: list[str] = []

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the row in the line ``segment``, if it belongs to a table with a column ``Step``."""
        cells = cells_of(segment.text) if "|" in segment.text and len(segment.text) <= LONGEST else []
        above, self._above = self._above, cells
        if len(cells) == len(above) > 1 and _RULE.fullmatch(segment.text):
            self._columns = above if _STEP in map(str.lower, above) else []
        elif self._columns and len(cells) == len(self._columns):
            self.recognised = True
            yield from self._row(dict(zip(self._columns, cells, strict=True)), segment.line)
        else:
            self._columns = []

    def _row(self, named: dict[str, str], line: int) -> Iterator[ImportedRow]:
        field = next(name for name in named if name.lower() == _STEP)
        try:
            step = step_of(named.pop(field))
        except ValueError as error:
            self.skips.add(str(error), line)
            return
        held_out = _HELD_OUT in named
        measured = {
            name if not held_out or name in _OF_TRAINING else f"eval/{name}": cell
            for name, cell in named.items()
            if cell not in _NOTHING and 0 < len(name) <= LONGEST_NAME
        }
        yield ImportedRow(step, metrics_of(measured, self.skips, line), line)


def cells_of(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table.

    >>> cells_of("| Step | Training Loss |"), cells_of("1 | 0.5")
    (['Step', 'Training Loss'], ['1', '0.5'])
    """
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


class MarkdownTable(LineImporter):
    """Importer of a Markdown table in a model card or another text."""

    name: ClassVar[str] = "markdown"
    expects: ClassVar[str] = "Markdown table with a column 'Step'"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"Step", b"step")
    weight: ClassVar[float] = 0.72  # above tables with bars: a rule below the names is a surer mark
    parser: ClassVar[type[LineParser]] = MarkdownTableParser
