"""Tables that Hugging Face's Trainer shows in a notebook: ``<th>Step</th><th>Training Loss</th>...``, in ``.ipynb``.

The table of a training is redrawn as it grows, so that the notebook keeps the last one, with every row. Several tables
are a run each. What was not measured reads ``No log`` and is left out; a name that was broken at its slashes, to fit
the table, is mended. "Lines" are numbers of rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import ClassVar

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import Reading, Row, Skips, Verdict, metrics_of, step_of
from rlwatch.importers.json_logs import load_document

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

    def rows(self, path: Path) -> Iterator[Row]:
        """The rows of every table of steps, one table after another."""
        tables = [rows for text in _texts(load_document(path)) for rows in _tables(text, self.skips)]
        tables = [rows for rows in tables if len(rows) >= LEAST_ROWS]
        if not tables:
            problem = (
                "is a notebook without a table of training steps in its outputs; anything else in one is not supported "
                "yet; export the metrics to a CSV 'run_id,step,metric,value' and give that"
            )
            raise ImportFormatError(str(path), problem)
        self.recognised = True
        for number, rows in enumerate(tables, 1):
            for step, metrics, line in rows:
                yield Row(step, metrics, line, f"table {number}" if len(tables) > 1 else "")


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
    """A notebook, or a JSON document with the tables of one."""

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
        return NotebookReading(path)
