"""Notebooks (``.ipynb``): the tables that Hugging Face's Trainer shows, else what cells printed, as a console's output.

A table reads ``<th>Step</th><th>Training Loss</th>...`` and is redrawn as it grows, so that the notebook keeps the last
one, with every row. Several tables are a run each. What was not measured reads ``No log`` and is left out; a name that
was broken at its slashes, to fit the table, is mended. "Lines" are numbers of rows, of printed output those of all
cells together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import ClassVar

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import LineImporter, LineParser, Reading, Row, Skips, Verdict, metrics_of, step_of
from rlwatch.importers.json_logs import load_document
from rlwatch.records import JSON

_MARK = "<th>Step</th>"
_TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<t[hd][^>]*>(.*?)</t[hd]>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_NOTEBOOK = re.compile(rb'\s*\{\s*"(?:cells|metadata|nbformat)"')
_NOTHING = "No log"
DEEPEST = 12
LEAST_ROWS = 2


def is_notebook(head: bytes, path: Path) -> bool:
    """True if ``head`` begins a notebook."""
    return _NOTEBOOK.match(head) is not None and (b'"cell_type"' in head or ".ipynb" in path.name)


class NotebookReading(Reading):
    """Read as a whole, since a notebook is one JSON document."""

    def __init__(self, path: str, consoles: Sequence[LineImporter]) -> None:
        super().__init__(path)
        self._consoles = consoles
        self._printed: LineParser | None = None

    def rows(self, path: Path) -> Iterator[Row]:
        """The rows of every table of steps, one table after another, or those that the cells printed."""
        document = load_document(path)
        tables = [rows for text in _texts(document) for rows in _tables(text, self.skips)]
        tables = [rows for rows in tables if len(rows) >= LEAST_ROWS]
        if not tables:
            yield from self._printed_rows(document, path)
            return
        self.recognised = True
        for number, rows in enumerate(tables, 1):
            for step, metrics, line in rows:
                yield Row(step, metrics, line, f"table {number}" if len(tables) > 1 else "")

    def notes(self) -> tuple[str, ...]:
        """Source of the rows."""
        return () if self._printed is None else ("read from what its cells printed", *self._printed.notes())

    def _printed_rows(self, document: JSON, path: Path) -> Iterator[Row]:
        """The rows of the console whose output the cells hold, if any."""
        printed = "".join(_streams(document)).encode()
        best = max(self._consoles, key=lambda console: console.sniff(printed, path).confidence)
        if best.sniff(printed, path).confidence <= 0:
            problem = "is a notebook of whose outputs none is a table of training steps or a trainer's console output"
            raise ImportFormatError(str(path), problem)
        self._printed = best.reading(self.path)
        self._printed.skips = self.skips
        self.recognised, self.source = True, best.source
        intake = self._printed.intake()
        yield from intake.feed(printed)
        yield from intake.finish()


def _streams(document: JSON) -> Iterator[str]:
    """Printed text of each cell, in order."""
    cells = document.get("cells") if isinstance(document, dict) else None
    for cell in cells if isinstance(cells, list) else ():
        outputs = cell.get("outputs") if isinstance(cell, dict) else None
        for output in outputs if isinstance(outputs, list) else ():
            text = output.get("text") if isinstance(output, dict) else None
            yield "".join(map(str, text)) if isinstance(text, list) else text if isinstance(text, str) else ""


def _texts(document: object, depth: int = DEEPEST) -> Iterator[str]:
    """The strings of ``document`` with a table of steps; lists of lines are joined."""
    if isinstance(document, str):
        if _MARK in document:
            yield document
    elif isinstance(document, list) and document and all(isinstance(line, str) for line in document):
        yield from _texts("".join(document))
    elif isinstance(document, list | dict) and depth > 0:
        for inner in document.values() if isinstance(document, dict) else document:
            yield from _texts(inner, depth - 1)


def _tables(text: str, skips: Skips) -> Iterator[list[tuple[int, dict[str, float], int]]]:
    """Step, metrics and number of each row of each table of steps."""
    for table in _TABLE.findall(text):
        if _MARK not in table:
            continue
        header, *body = [
            [unescape(_TAG.sub("", cell)).strip() for cell in _CELL.findall(row)] for row in _ROW.findall(table)
        ]
        rows = []
        for number, cells in enumerate(body, 1):
            named = dict(zip(header, cells, strict=False))
            try:
                step = step_of(named.pop("Step", ""))
            except ValueError as error:
                skips.add(str(error), number)
                continue
            said = {name.replace(" / ", "/"): cell for name, cell in named.items() if cell != _NOTHING}
            rows.append((step, metrics_of(said, skips, number), number))
        yield rows


class Notebook:
    """A notebook, or a JSON document with the tables of one.

    Parameters
    ----------
    consoles
        Formats that its cells may have printed.
    """

    def __init__(self, consoles: Sequence[LineImporter]) -> None:
        self._consoles = consoles

    name: ClassVar[str] = "notebook"
    expects: ClassVar[str] = "notebook (.ipynb) with a table <th>Step</th>"
    source: ClassVar[str] = "trl"
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> Verdict:
        """Sure of JSON with a table of steps, and of a notebook: where its table stands, if any, nobody knows."""
        if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"[", b"{") and _MARK.encode() in head:
            return Verdict(0.97, "found a table of steps")
        if is_notebook(head, path):
            return Verdict(0.96, "found the cells of a notebook")
        return Verdict(0.0, f"no {self.expects}")

    def reading(self, path: str) -> NotebookReading:
        """A fresh reading."""
        return NotebookReading(path, self._consoles)
