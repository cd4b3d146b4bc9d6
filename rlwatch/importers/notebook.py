"""Reading of notebooks (``.ipynb``): the tables that Hugging Face's Trainer shows, and the printed output of cells.

A table reads ``<th>Step</th><th>Training Loss</th>...`` and is redrawn as it grows, so that the notebook keeps the last
one, with every row. The output that a cell printed with its table belongs to the same training, and is joined by step,
because a table may show only the loss. The output of other cells joins the only table if its steps match and no value
contradicts it; otherwise it is a run by itself. Several tables are a run each. ``No log`` means not measured and is
left out. A name that was broken at its slashes, to fit the table, is repaired. Lines are numbers of rows; lines of
printed output are counted over all cells together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import ClassVar

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import FormatMatch, ImportedRow, LineImporter, LogReading, Skips, metrics_of, step_of
from rlwatch.importers.json_logs import load_document
from rlwatch.metrics import known
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
SURE = 0.2
"""Smallest confidence of a console importer in the output next to a table, where users also print samples."""
_TRAINER, _LOSS = "trl", "Training Loss"
_WRITTEN = 1e-4
"""Rounding of a loss that is printed with four digits."""


def is_notebook(head: bytes, path: Path) -> bool:
    """Return True if ``head`` begins a notebook, by its content and by the name of ``path``."""
    return _NOTEBOOK.match(head) is not None and (b'"cell_type"' in head or ".ipynb" in path.name)


class NotebookReading(LogReading):
    """Reader of a notebook, which is one JSON document and so is read as a whole.

    ``consoles`` are the importers for the printed output of its cells.
    """

    def __init__(self, path: str, consoles: Sequence[LineImporter]) -> None:
        super().__init__(path)
        self._consoles = consoles
        self._notes: dict[str, None] = {}

    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Yield the rows of every training in the notebook, one training after another, from tables and printed output.

        Raises ``ImportFormatError`` if there are none.
        """
        document = load_document(path)
        trainings: list[list[ImportedRow]] = []
        elsewhere: list[str] = []
        for cell in _cells(document):
            tables = [rows for text in _texts(cell) for rows in _tables(text, self.skips)]
            tables = _joined_tables([rows for rows in tables if len(rows) >= LEAST_ROWS])
            printed = _streamed(cell)
            if tables:
                trainings += self._with_printed(tables, printed, path)
            else:
                elsewhere.append(printed)
        self.recognised = bool(trainings)
        printed_rows = self._printed("".join(elsewhere), path, 0.0 if not trainings else SURE)
        if not trainings and printed_rows is None:
            problem = "is a notebook of whose outputs none is a table of training steps or a trainer's console output"
            raise ImportFormatError(str(path), problem)
        if printed_rows is not None and (not trainings or len(printed_rows) >= LEAST_ROWS):
            joined = _joined(trainings[0], printed_rows) if len(trainings) == 1 else None
            if joined is not None and not _contradict(trainings[0], printed_rows):
                trainings = [joined]
                self._notes = {"the rows of a table and what other cells printed are joined by step": None}
            else:
                trainings.append(printed_rows)
        for number, rows in enumerate(trainings, 1):
            for row in rows:
                yield replace(row, run=f"table {number}") if len(trainings) > 1 else row

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on where the rows came from."""
        return tuple(self._notes)

    def _printed(self, text: str, path: Path, least: float) -> list[ImportedRow] | None:
        """Return the rows of printed output; None if no console importer is more confident than ``least``."""
        printed = text.encode()
        best = max(self._consoles, key=lambda console: console.sniff(printed, path).confidence)
        if best.sniff(printed, path).confidence <= least:
            return None
        reading = best.reading(self.path)
        reading.skips = self.skips
        intake = reading.intake()
        rows = [*intake.feed(printed), *intake.finish()]
        if not self.recognised:
            self.recognised, self.source = True, best.source
        self._notes |= dict.fromkeys(("read from what its cells printed", *reading.notes()))
        return rows

    def _with_printed(self, tables: list[list[ImportedRow]], text: str, path: Path) -> list[list[ImportedRow]]:
        """Return the tables of a cell; the table whose steps match the printed ``text`` also has its metrics."""
        kept, notes = self.recognised, dict(self._notes)
        self.recognised = True  # output printed with a table does not identify the trainer
        printed = self._printed(text, path, SURE) or []
        self.recognised = kept
        for table in tables:
            joined = _joined(table, printed)
            if joined is not None:
                table[:] = joined
                self._notes = notes | {"the rows of a table and what its cell printed are joined by step": None}
                return tables
        self._notes = notes
        if printed:
            self.skips.add("a row printed with a table, whose step in that table is unknown", 0)
        return tables


def _cells(document: JSON) -> list[JSON]:
    """Return the cells of a notebook; any other document counts as one cell."""
    cells = document.get("cells") if isinstance(document, dict) else None
    return cells if isinstance(cells, list) else [document]


def _streamed(cell: JSON) -> str:
    """Return the printed text of a cell."""
    outputs = cell.get("outputs") if isinstance(cell, dict) else None
    found = []
    for output in outputs if isinstance(outputs, list) else ():
        text = output.get("text") if isinstance(output, dict) else None
        found.append("".join(map(str, text)) if isinstance(text, list) else text if isinstance(text, str) else "")
    return "".join(found)


def _joined_tables(tables: list[list[ImportedRow]]) -> list[list[ImportedRow]]:
    """Return the tables of a cell, those of the same steps as one: a training may draw its logs and evaluations."""
    joined: list[list[ImportedRow]] = []
    for table in tables:
        steps = [row.step for row in table]
        same = next((other for other in joined if [row.step for row in other] == steps), None)
        if same is None:
            joined.append(table)
        else:
            same[:] = [
                replace(old, metrics={**new.metrics, **old.metrics}) for old, new in zip(same, table, strict=True)
            ]
    return joined


def _joined(table: Sequence[ImportedRow], printed: Sequence[ImportedRow]) -> list[ImportedRow] | None:
    """Return the rows of a table and of printed output, joined by step; None if most of their steps differ.

    If both hold the same metric, under whatever name, the value of the table counts.
    """
    placed = _placed(table, printed)
    by_step: dict[int, dict[str, float]] = {}
    for row in placed:
        by_step.setdefault(row.step, {}).update(row.metrics)
    own = {row.step: row for row in table}
    shared = own.keys() & by_step.keys()
    if len(by_step) < len(placed) or 2 * len(shared) < min(len(own), len(by_step)) or not shared:
        return None
    in_table = known([name for row in table for name in row.metrics], _TRAINER)
    joined = []
    for step in sorted(own.keys() | by_step.keys()):
        row = own.get(step, ImportedRow(step, {}))
        others = by_step.get(step, {}).items()
        fresh = {name: value for name, value in others if not known([name], _TRAINER) & in_table}
        joined.append(replace(row, metrics={**row.metrics, **fresh}))
    return [row for row in joined if row.metrics]


def _contradict(table: Sequence[ImportedRow], printed: Sequence[ImportedRow]) -> bool:
    """Return True if both hold a loss and most losses of the same step differ: they belong to two trainings."""
    losses = {row.step: row.metrics.get(_LOSS) for row in table}
    pairs = [(losses.get(row.step), row.metrics["loss"]) for row in printed if "loss" in row.metrics]
    return 2 * sum(own is not None and not _agree(own, loss) for own, loss in pairs) > len(pairs)


def _placed(table: Sequence[ImportedRow], printed: Sequence[ImportedRow]) -> Sequence[ImportedRow]:
    """Return printed rows; if they were only numbered, move them to the steps of the table, by order or by loss."""
    steps = [row.step for row in printed]
    if steps != list(range(1, len(printed) + 1)) or set(steps).issuperset(row.step for row in table):
        return printed
    if len(printed) == len(table):
        return [replace(row, step=own.step) for row, own in zip(printed, table, strict=True)]
    placed, left = [], iter(table)
    for row in printed:
        same = next((own for own in left if _agree(own.metrics.get(_LOSS), row.metrics.get("loss"))), None)
        if same is None:
            return []
        placed.append(replace(row, step=same.step))
    return placed


def _agree(shown: float | None, printed: float | None) -> bool:
    """Return True if two numbers are equal within the digits with which both were written."""
    return shown is not None and printed is not None and abs(shown - printed) <= _WRITTEN * max(1.0, abs(shown))


def _texts(document: object, depth: int = DEEPEST) -> Iterator[str]:
    """Yield the strings in ``document`` that contain a table of steps; lists of lines are joined."""
    if isinstance(document, str):
        if _MARK in document:
            yield document
    elif isinstance(document, list) and document and all(isinstance(line, str) for line in document):
        yield from _texts("".join(document))
    elif isinstance(document, list | dict) and depth > 0:
        for inner in document.values() if isinstance(document, dict) else document:
            yield from _texts(inner, depth - 1)


def _tables(text: str, skips: Skips) -> Iterator[list[ImportedRow]]:
    """Yield the rows of each table of steps."""
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
            measured = {name.replace(" / ", "/"): cell for name, cell in named.items() if cell != _NOTHING}
            rows.append(ImportedRow(step, metrics_of(measured, skips, number), number))
        yield rows


class Notebook:
    """Importer of a notebook, or of a JSON document with the tables of one.

    Parameters
    ----------
    consoles
        Importers of the formats that its cells may have printed.
    """

    def __init__(self, consoles: Sequence[LineImporter]) -> None:
        self._consoles = consoles

    name: ClassVar[str] = "notebook"
    expects: ClassVar[str] = "notebook (.ipynb) with a table <th>Step</th>"
    source: ClassVar[str] = _TRAINER
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> FormatMatch:
        """Return a high confidence if ``head`` begins JSON with a table of steps, and for any notebook, because its
        table may come later.
        """
        if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"[", b"{") and _MARK.encode() in head:
            return FormatMatch(0.97, "found a table of steps")
        if is_notebook(head, path):
            return FormatMatch(0.96, "found the cells of a notebook")
        return FormatMatch(0.0, f"no {self.expects}")

    def reading(self, path: str) -> NotebookReading:
        """Return a new reader of the notebook at ``path``."""
        return NotebookReading(path, self._consoles)
