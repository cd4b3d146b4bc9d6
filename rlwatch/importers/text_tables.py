"""Reading of tables as text: CSV files, tables in consoles, and tables in Markdown.

A CSV file is long (``run_id,step,metric,value``) or wide (``step,loss,...``). It may hold several runs (with a
``run_id`` column) or one (without). Separators are comma, semicolon, tab and bar; with all but the comma a number may
have a decimal comma. Comment lines (``#``) before the header, and repeated headers, are skipped. ``nan``, ``inf`` and
``-inf`` as text are values. An **empty cell means not measured**: pandas leaves a cell empty both for NaN and for
values that were never logged. If every gap counted as NaN, the log would be one long false alarm.
"""

from __future__ import annotations

import csv
import re
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import STEP_FIELDS, ImportedRow, LineImporter, LineParser, metrics_of, number, step_of
from rlwatch.importers.lines import LONGEST_NAME, TextLine, shown, without_prefix
from rlwatch.importers.single_records import REASON, may_be_of_single, of_single

_RUN_COLUMNS = ("run_id", "run")
_OF_TENSORBOARD = ["wall time", "step", "value"]
_EXTREMES = ("__MIN", "__MAX")
_OF_SB3 = ("time/iterations", "time/total_timesteps")
STEP_COLUMNS = (*STEP_FIELDS, "training_step", "train_step", "iter", "update", "timestep", "steps", *_OF_SB3, "epoch")
"""Columns that may hold the step; the first match counts, so that an epoch is the step of a log that has no other.

The list is longer than for other formats: a column is a series, while ``"steps": 2000`` in a JSON row may be a setting.
"""
SEPARATORS = ",;\t"
_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+(?:[eE][-+]?\d+)?")


def cells_of_line(text: str, separator: str) -> list[str]:
    """Return the cells of a line, which ``separator`` divides; empty if it is no CSV (Python's csv module refuses cells
    over 128 KiB).
    """
    if '"' not in text:
        return [cell.strip() for cell in text.split(separator)]
    try:
        return [cell.strip() for cell in next(csv.reader([text], delimiter=separator))]
    except csv.Error:
        return []


def plain_number(text: str, separator: str) -> str:
    """Return the text of a number with a decimal point. A decimal comma is replaced, unless ``separator`` is the comma.

    >>> plain_number("0,5", ";"), plain_number("0.5", ";")
    ('0.5', '0.5')
    """
    if separator != "," and "," in text and _DECIMAL_COMMA.fullmatch(text):
        return text.replace(",", ".")
    return text


class TableParser(LineParser):
    """Parser of a CSV table: it reads the header first, then the cells of each line."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._columns: list[str] | None = None
        self._separator = ","
        self._run = self._step = -1
        self._last = ("", 0)  # a step as written and as read: most lines repeat that of the line before

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the rows that are complete after the line ``segment``.

        Raises ``ImportFormatError`` for a step that is no integer.
        """
        if self._columns is None:
            self._header(segment.text)
            return
        if not self.recognised:
            return
        cells = cells_of_line(segment.text, self._separator)
        if cells == self._columns:
            self.skips.add("the header again", segment.line)
            return
        if self._separator == "|" and not segment.text.strip("|-+: "):
            return
        if len(cells) != len(self._columns):
            self.skips.add(f"a line with other than {len(self._columns)} cells", segment.line)
            return
        yield from self._read(cells, segment.line)

    def _header(self, text: str) -> None:
        if text.startswith("#"):
            return
        self._separator = max(SEPARATORS, key=text.count)
        if self._separator not in text and "|" in text and not text.lstrip().startswith("|"):
            self._separator = "|"
        self._columns = cells_of_line(text, self._separator)
        lower = [name.lower() for name in self._columns]
        self._run = next((lower.index(name) for name in _RUN_COLUMNS if name in lower), -1)
        self._step = next((lower.index(name) for name in STEP_COLUMNS if name in lower), -1)
        twice = len(self._columns) - len(set(self._columns))
        for _ in range(min(1, twice)):
            self.skips.add(f"{twice} columns that are called as another is (the last one counts)", 1)
        numbers = sum(number(name) is not None for name in lower)
        self.recognised = self._step >= 0 and 3 * numbers < len(lower) and self._accepts(lower)

    @abstractmethod
    def _accepts(self, columns: list[str]) -> bool:
        """Return True if the table has this parser's form; ``columns`` are in lower case."""

    @abstractmethod
    def _read(self, cells: list[str], line: int) -> Iterator[ImportedRow]:
        """Yield the rows that are complete after the cells of one line."""

    def _place(self, cells: list[str], line: int) -> tuple[str, int]:
        """Return the run and the step of a line."""
        text = cells[self._step]
        if text != self._last[0] or not text:
            try:
                self._last = (text, step_of(self._plain(text)))
            except ValueError as error:
                raise ImportFormatError(self.path, f"{error}; correct or remove this line", line) from None
        return (cells[self._run] if self._run >= 0 else ""), self._last[1]

    def _plain(self, text: str) -> str:
        """Return a number with a decimal point."""
        return plain_number(text, self._separator)

    def _number(self, text: str, name: str, line: int) -> float | None:
        value = number(self._plain(text)) if text else None
        if value is None:
            self.skips.add(
                "an empty cell (read as not measured)" if not text else f"{shown(name)} is not a number", line
            )
        return value


class LongTableParser(TableParser):
    """Parser of a long CSV table, with one value on each line.

    Consecutive values of one run and step become one row.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._metric = self._value = -1
        self._named = ""
        self._open: ImportedRow | None = None
        self._metrics: dict[str, float] = {}

    def _accepts(self, columns: list[str]) -> bool:
        if columns == _OF_TENSORBOARD:
            self._value = columns.index("value")
            self._named = _tag(Path(self.path).name)
            return True
        if "metric" not in columns or "value" not in columns:
            return False
        self._metric, self._value = columns.index("metric"), columns.index("value")
        return True

    def _read(self, cells: list[str], line: int) -> Iterator[ImportedRow]:
        run, step = self._place(cells, line)
        name = self._named or cells[self._metric]
        value = self._number(cells[self._value], name, line)
        if value is None:
            return
        if self._open is None or (self._open.run, self._open.step) != (run, step) or name in self._metrics:
            yield from self.finish()
            self._metrics = {}
            self._open = ImportedRow(step, self._metrics, line, run)
        self._metrics[name] = value

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the row of the last step."""
        if self._open is not None:
            yield self._open
        self._open = None


def _tag(file: str) -> str:
    """Return the name of the metric in a file from TensorBoard's page, which has it in the file name only.

    >>> _tag("run-seed3_logs-tag-train_reward.csv"), _tag("reward.csv")
    ('train_reward', 'reward')
    """
    return file.partition("-tag-")[2].partition(".")[0] or file.partition(".")[0]


class WideTableParser(TableParser):
    """Parser of a wide CSV table, with one step on each line.

    In an export of a chart from wandb's page each column is a run, with the metric after its name.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._charted: list[tuple[str, str]] = []
        """Run and metric of each column; empty if columns are metrics."""
        self._of_single = False
        """True if the columns are those of records of single responses."""

    def _accepts(self, columns: list[str]) -> bool:
        given = [column.rpartition(" - ") for column in self._columns or ()]
        others = [parts for index, parts in enumerate(given) if index != self._step]
        if others and all(run and metric for run, _, metric in others):
            self._charted = [(run, "" if metric.endswith(_EXTREMES) else metric) for run, _, metric in given]
        self._of_single = may_be_of_single(self._columns or ())
        return "value" not in columns and len(columns) > 1 + (self._run >= 0)

    def _read(self, cells: list[str], line: int) -> Iterator[ImportedRow]:
        run, step = self._place(cells, line)
        if self._charted:
            yield from self._of_runs(step, cells, line)
            return
        metrics: dict[str, float] = {}
        for index, (name, text) in enumerate(zip(self._columns or (), cells, strict=True)):
            value = None if index in (self._step, self._run) or not name else self._number(text, name, line)
            if value is not None:
                metrics[name] = value
        if self._of_single and of_single({**dict(zip(self._columns or (), cells, strict=True)), **metrics}):
            self.skips.add(REASON, line)
        elif metrics:
            yield ImportedRow(step, metrics, line, run)

    def _of_runs(self, step: int, cells: list[str], line: int) -> Iterator[ImportedRow]:
        """Yield a row for each run that was measured at this step."""
        found: dict[str, dict[str, float]] = {}
        for index, ((run, metric), text) in enumerate(zip(self._charted, cells, strict=True)):
            value = self._number(text, metric, line) if metric and text and index != self._step else None
            if value is not None:
                found.setdefault(run, {})[metric] = value
        for run, metrics in found.items():
            yield ImportedRow(step, metrics, line, run)


class LongTable(LineImporter):
    """Importer of a long CSV table, which has one value on each line (run, step, metric, value)."""

    name: ClassVar[str] = "csv"
    expects: ClassVar[str] = "CSV header 'run_id,step,metric,value'"
    table: ClassVar[bool] = True
    parser: ClassVar[type[LineParser]] = LongTableParser


class WideTable(LineImporter):
    """Importer of a wide CSV table, which has one step on each line and one metric in each column."""

    name: ClassVar[str] = "csv-wide"
    expects: ClassVar[str] = "CSV header 'step,<metric>,<metric>...'"
    weight: ClassVar[float] = 0.7
    parser: ClassVar[type[LineParser]] = WideTableParser


# Reading of a table in console output: a header with a word for the step, then rows of numbers.
#
# That is a CSV after the first output of a program, or columns that a loop prints with blanks between them. Separators
# are comma, semicolon, tab and blanks. With semicolons and tabs a number may have a decimal comma; between blanks a
# comma separates thousands, as in all other lines of a console. A header counts once a row follows it: as many cells,
# a whole step, and only numbers. An empty cell was not measured. A repeated header changes nothing; a different one
# begins other columns. A printed ``DataFrame`` has one cell more than its header, its index.

BLANKS = " "
LONGEST = 20_000
"""Largest number of characters in a row."""
_NAME = re.compile(r"[A-Za-z_%][^,;\t|]*")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_RULE = re.compile(r"[\s\-=+|_─━═]*")
_OTHER = "a line of as many cells as the table has that is no row of it"


class _Header(NamedTuple):
    """Names of the columns, the index of the step among them, and the separator of cells."""

    columns: tuple[str, ...]
    step: int
    separator: str


class ConsoleTableParser(LineParser):
    """Parser that searches for a header and its first row, then reads the rows of the table."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._header: _Header | None = None
        self._candidates: list[_Header] = []
        """Headers that the line before may be, one for each separator."""

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the row in the line ``segment``, if it belongs to a table."""
        if len(segment.text) > LONGEST:
            return
        text = without_prefix(segment.text)
        if _RULE.fullmatch(text):
            return
        for header in (*([self._header] if self._header else []), *self._candidates):
            row = _row(header, text, segment.line)
            if row is not None:
                self._header, self._candidates, self.recognised = header, [], True
                yield row
                return
        self._candidates = [header for header in _headers(text) if header != self._header]
        known = self._header
        if known and not self._candidates and len(_split(text, known.separator)) == len(known.columns) > 2:
            self.skips.add(_OTHER, segment.line)


def _split(text: str, separator: str) -> list[str]:
    return text.split() if separator == BLANKS else cells_of_line(text, separator)


def _plain(cell: str, separator: str) -> str:
    """Return the text of a number without separators of thousands, and with a decimal point."""
    if separator != BLANKS:
        return plain_number(cell, separator)
    return cell.replace(",", "") if _THOUSANDS.fullmatch(cell) else cell


def _headers(text: str) -> Iterator[_Header]:
    """Yield the headers that a line may be, by each separator."""
    for separator in (*SEPARATORS, BLANKS):
        columns = tuple(_split(text, separator)) if separator in text else ()
        if len(columns) < 2 or not all(_NAME.fullmatch(name) and len(name) <= LONGEST_NAME for name in columns):
            continue
        lower = [name.lower() for name in columns]
        step = next((lower.index(name) for name in STEP_COLUMNS if name in lower), -1)
        if step >= 0 and len(set(lower)) == len(lower):
            yield _Header(columns, step, separator)


def _row(header: _Header, text: str, line: int) -> ImportedRow | None:
    """Return the row of a line below ``header``; None if it is no row."""
    cells = _split(text, header.separator)
    if header.separator == BLANKS and len(cells) == len(header.columns) + 1 and cells[0].isdecimal():
        del cells[0]
    if len(cells) != len(header.columns):
        return None
    decimals = [_plain(cell, header.separator) for cell in cells]
    try:
        step = step_of(decimals[header.step])
    except ValueError:
        return None
    metrics: dict[str, float] = {}
    for index, (name, cell) in enumerate(zip(header.columns, decimals, strict=True)):
        value = number(cell) if cell else None
        if cell and value is None:
            return None
        if value is not None and index != header.step:
            metrics[name] = value
    return ImportedRow(step, metrics, line) if metrics else None


class ConsoleTable(LineImporter):
    """Importer of a table that a program prints between other lines."""

    name: ClassVar[str] = "console-table"
    expects: ClassVar[str] = "header 'step reward ...' with a row of numbers below"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"step", b"Step", b"STEP", b"iter", b"Iter", b"update", b"Update", b"poch")
    weight: ClassVar[float] = 0.25
    """Confidence in this format, below that in custom loops, which may also print a small table."""
    parser: ClassVar[type[LineParser]] = ConsoleTableParser


# Reading of Markdown tables with a column ``Step``: model cards of Hugging Face's trainers, and tables pasted into
# issues.
#
# The table of a card holds evaluations: if it has a column ``Validation Loss``, all columns but ``Training Loss`` and
# ``Epoch`` come from held-out data, and are called ``eval/...``. ``No log`` means not measured; ``nan`` and ``inf``
# are values. A second table begins another attempt.

_MARKDOWN_RULE = re.compile(r"\s*\|?(?:\s*:?-{2,}:?\s*\|)+(?:\s*:?-{2,}:?\s*)?\|?\s*")
_STEP = "step"
_HELD_OUT = "Validation Loss"
_OF_TRAINING = frozenset({"Training Loss", "Epoch", "Step"})
_NOTHING = frozenset({"No log", "No Log", ""})


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
        if len(cells) == len(above) > 1 and _MARKDOWN_RULE.fullmatch(segment.text):
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
