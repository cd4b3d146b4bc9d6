"""Reading of a table in console output: a header with a word for the step, then rows of numbers.

That is a CSV after the first output of a program, or columns that a loop prints with blanks between them. Separators
are comma, semicolon, tab and blanks. With semicolons and tabs a number may have a decimal comma; between blanks a comma
separates thousands, as in all other lines of a console. A header counts once a row follows it: as many cells, a whole
step, and only numbers. An empty cell was not measured. A repeated header changes nothing; a different one begins other
columns. A printed ``DataFrame`` has one cell more than its header, its index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from rlwatch.importers.base import ImportedRow, LineImporter, LineParser, number, step_of
from rlwatch.importers.csv_table import SEPARATORS, STEP_COLUMNS, cells_of_line, plain_number
from rlwatch.importers.lines import LONGEST_NAME, TextLine, without_prefix

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
