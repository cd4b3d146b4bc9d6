"""Reading of logs that are one JSON document: a list of rows, an object of columns, or several tables.

Callbacks write ``[{"step": 1, "loss": 0.5}, ...]`` at the end; plots are drawn from ``{"loss": [0.5, 0.4], "reward":
[...]}``. Either may be nested in other data (``{"history": [{...}, ...]}``), columns also by group (``{"history":
{"step": [...], "train": {"reward": [...]}}}``). Rows without a step are numbered. Several tables in one document are a
run each. Line numbers are numbers of rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import (
    OWN_STEP_FIELDS,
    STEP_FIELDS,
    FormatMatch,
    ImportedRow,
    LogReading,
    is_null,
    metrics_of,
    of_held_out,
    step_of,
    value_of,
)
from rlwatch.importers.json_logs import HISTORY, SUMMARY, is_row, load_document
from rlwatch.importers.lines import shown
from rlwatch.importers.own_rows import OwnRows, flattened, step_field
from rlwatch.importers.single_records import may_be_numbered, of_single
from rlwatch.metrics.words import stems
from rlwatch.records import JSON

_Table = tuple[str, Sequence[Mapping[str, object]]]

_FIELDS = (*STEP_FIELDS, *OWN_STEP_FIELDS, "steps", "iter", "iterations", "update", "episode")
_NUMBER = rb'"[^"\\]{1,200}"\s*:\s*(?:-?\d|NaN|-?Infinity|null)'
_ROWS = re.compile(rb"\s*\[\s*\{[^<]{0,4000}?" + _NUMBER)
_COLUMNS = re.compile(rb'\s*\{.{0,100000}?"[^"\\]{1,200}"\s*:\s*\[\s*(?:\{\s*"|-?\d|NaN|null)', re.DOTALL)
_WRAPPED = b'"stream_name"'
MOST_TABLES = 100
LOOKED_AT = 100
"""Number of rows of a table that are checked for records of single responses."""
LEAST_ROWS = 2
"""Smallest number of entries in a list that is read as a series."""


class JsonDocumentReading(LogReading):
    """Reader of a log that is one JSON document, and so is read as a whole."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._numbered = False

    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Yield the rows of every table in the file at ``path``, one table after another.

        Raises ``ImportFormatError`` if the file cannot be read, or is no log.
        """
        yield from self.rows_of(load_document(path))

    def rows_of(self, document: JSON) -> Iterator[ImportedRow]:
        """Yield the rows of every table in ``document``, which was loaded already.

        Raises ``ImportFormatError`` if it is no log.
        """
        found = [(name, rows) for name, rows in _tables(document) if len(rows) >= LEAST_ROWS][:MOST_TABLES]
        tables = self._of_a_training(found, listed=not _is_columns(document))
        several = sum(not of_held_out(name) for name, _ in tables) > 1
        for name, rows in tables:
            yield from self._table(rows, name if several else "", held_out=not several and of_held_out(name))

    def rows_in(self, tables: Mapping[str, Sequence[Mapping[str, object]]]) -> Iterator[ImportedRow]:
        """Yield the rows in ``tables`` (name of a run -> its rows).

        Raises ``ImportFormatError`` if they are no training steps.
        """
        for name, rows in self._of_a_training(list(tables.items()), listed=False):
            yield from self._table(rows, name, held_out=False)

    def _of_a_training(self, tables: Sequence[_Table], *, listed: bool) -> list[_Table]:
        """Return the tables whose rows may be training steps. Raises ``ImportFormatError`` if there are none.

        ``listed`` rows come from a list, whose order may mean nothing unless the rows hold a step. Columns are kept to
        be plotted, so that a reward is enough.
        """
        problems = {name: _no_training(rows, listed=listed) for name, rows in tables}
        wrong = [problem for problem in problems.values() if problem]
        if wrong and len(wrong) == len(tables):
            raise ImportFormatError(self.path, f"holds {wrong[0]}; give the trainer's log, which has a row a step")
        for name, rows in tables:
            if problems[name]:
                self.skips.add(f"{shown(name)}: {problems[name]}", len(rows))
        return [(name, rows) for name, rows in tables if not problems[name]]

    def notes(self) -> tuple[str, ...]:
        """Return a note for the user if rows are numbered because none holds its step."""
        return ("no row holds its step: rows are numbered 1, 2, 3...",) if self._numbered else ()

    def _table(self, rows: Sequence[Mapping[str, object]], run: str, *, held_out: bool) -> Iterator[ImportedRow]:
        own = OwnRows()
        for number, row in enumerate(rows, 1):
            if SUMMARY in row:
                self.skips.add("the trainer's summary row at the end", number)
                continue
            entry = flattened({**row, "eval": True} if held_out else row)
            field = step_field({name: value for name, value in entry.items() if not is_null(value)}, _FIELDS)
            try:
                step = number if field is None else step_of(entry.pop(field))
            except ValueError as error:
                raise ImportFormatError(self.path, f"row {number}: {error}") from None
            self._numbered = self._numbered or field is None
            metrics = metrics_of(own.read(step, entry, self.skips, number), self.skips, number)
            if metrics:
                self.recognised = True
                yield ImportedRow(step, metrics, number, run)


def _no_training(rows: Sequence[Mapping[str, object]], *, listed: bool) -> str:
    """Return the reason why ``rows`` are no rows of a training; empty if they may be."""
    looked = [flattened(row) for row in rows[:LOOKED_AT]]
    fields = [field for row in looked if (field := of_single(row))]
    if 2 * len(fields) > len(looked):
        return (
            f"records of single responses or episodes (each with its own {shown(fields[0])}), an evaluation or samples"
        )
    stepless = all(step_field(row, _FIELDS) is None for row in looked)
    kept = not listed and any("reward" in stems(name) for row in looked for name in row)
    if stepless and not kept and not may_be_numbered(looked):
        return "records without a step, and nothing in them that only a training has, as a loss or a KL"
    return ""


def _is_columns(document: JSON) -> bool:
    return isinstance(document, dict) and bool(_columns(document))


def _tables(document: JSON) -> list[tuple[str, list[dict[str, object]]]]:
    """Return name and rows of each table in ``document``."""
    if isinstance(document, list):
        rows = [entry for entry in document if isinstance(entry, dict)]
        inner = [
            (str(row.get("name", row.get("cell", number))), _rows_of(row["rows"]))
            for number, row in enumerate(rows, 1)
            if isinstance(row.get("rows"), list)
        ]
        return inner or [("", rows)]
    if not isinstance(document, dict):
        return []
    columns = _columns(document)
    if columns:
        return [("", columns)]
    found = [(name, _rows_of(value)) for name, value in document.items() if isinstance(value, list)]
    within = [(name, _columns(flattened(value))) for name, value in document.items() if isinstance(value, dict)]
    return [(name, rows) for name, rows in (*found, *within) if rows]


def _rows_of(value: object) -> list[dict[str, object]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _columns(document: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the rows of an object of columns, of the most frequent length; empty if no list holds two numbers."""
    columns = {name: value for name, value in document.items() if _is_column(value)}
    lengths = Counter(len(value) for value in columns.values() if isinstance(value, list))
    if not lengths:
        return []
    length = max(lengths, key=lambda each: (lengths[each], each))
    aligned = {name: value for name, value in columns.items() if isinstance(value, list) and len(value) == length}
    return [dict(zip(aligned, cells, strict=True)) for cells in zip(*aligned.values(), strict=True)]


def _is_column(value: object) -> bool:
    return isinstance(value, list) and len(value) >= LEAST_ROWS and all(value_of(cell) is not None for cell in value)


class JsonDocument:
    """Importer of a log that is one JSON document."""

    name: ClassVar[str] = "json"
    expects: ClassVar[str] = 'JSON document [{"step": N, "name": value}, ...] or {"name": [values], ...}'
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> FormatMatch:  # noqa: ARG002
        """Return a high confidence if ``head`` begins a list of rows with numbers, and less for an object that holds
        lists.
        """
        text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        if _WRAPPED in text[:200] or b"<t" in text or HISTORY.encode() in text or is_row(text):
            return FormatMatch(0.0, f"no {self.expects}")
        if _ROWS.match(text):
            return FormatMatch(0.85, "found a list of rows")
        if _COLUMNS.match(text):
            return FormatMatch(0.82, "found an object of lists")
        return FormatMatch(0.0, f"no {self.expects}")

    def reading(self, path: str) -> JsonDocumentReading:
        """Return a new reader of the file at ``path``."""
        return JsonDocumentReading(path)
