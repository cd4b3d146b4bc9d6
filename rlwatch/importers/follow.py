"""Following a file that grows: only new bytes for lines, the whole file where it is one JSON object or packed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import Importer, LineParser, Row
from rlwatch.importers.lines import BLOCK, Segments

_PRINT = 256
"""Bytes before the reading position that are remembered, to notice a file that was written anew."""


class Follower(Protocol):
    """Gives the rows that came since the last time."""

    parser: LineParser
    problem: str
    """Why the file cannot be read at the moment; empty if it can."""

    def poll(self) -> list[Row]:
        """New rows; none if the file has not changed or is gone for a moment."""
        ...

    def close(self) -> list[Row]:
        """The rows held back for more output that will not come; lets go of the file."""
        ...


class LineFollower:
    """Reads what was appended, and holds back a line until its end is there.

    A file that became shorter, or whose last bytes read have changed, was truncated by a restarted trainer (verl's
    file logger does): ``restarted`` is called and it is read from its beginning. A file replaced by another of the
    same name (log rotation) is read to its end, then the new one from its beginning.
    """

    def __init__(self, path: Path, importer: Importer, restarted: Callable[[], None]) -> None:
        self._path, self._importer, self._restarted = path, importer, restarted
        self.problem = ""
        self._file: IO[bytes] | None = None
        self._fresh()

    def _fresh(self) -> None:
        self.parser = self._importer.parser(str(self._path))
        self._segments = Segments()
        self._offset = 0
        self._print = b""

    def poll(self) -> list[Row]:
        """Rows of the lines completed since the last poll."""
        rows: list[Row] = []
        with contextlib.suppress(FileNotFoundError):  # between the two halves of a rotation
            rows += self._appended()
            while self._replaced():
                rows += self._rest()
                self._let_go()
                self._fresh()
                rows += self._appended()
        return rows

    def close(self) -> list[Row]:
        """The unterminated last line and whatever the parser held back."""
        rows = self._rest()
        self._let_go()
        return rows

    def _appended(self) -> list[Row]:
        if self._file is None:
            self._file = self._path.open("rb")
        rows = self._rest(cut=True) if self._truncated(self._file) else []
        self._file.seek(self._offset)
        while block := self._file.read(BLOCK):
            self._offset += len(block)
            self._print = (self._print + block)[-_PRINT:]
            for segment in self._segments.feed(block):
                rows += self.parser.feed(segment)
        return rows

    def _truncated(self, file: IO[bytes]) -> bool:
        if os.fstat(file.fileno()).st_size >= self._offset:
            file.seek(self._offset - len(self._print))
            if file.read(len(self._print)) == self._print:
                return False
        return True

    def _rest(self, *, cut: bool = False) -> list[Row]:
        """What is held back; after a truncation (``cut``) the unterminated line is lost and reading starts anew."""
        rows: list[Row] = []
        if not cut:
            for segment in self._segments.finish():
                rows += self.parser.feed(segment)
        rows += self.parser.finish()
        if cut:
            self._fresh()
            self._restarted()
        return rows

    def _replaced(self) -> bool:
        if self._file is None:
            return False
        mine, there = os.fstat(self._file.fileno()), self._path.stat()
        return (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino)

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


class WholeFollower:
    """Reads the whole file again when it has changed, and gives the rows that differ from the last reading.

    A file that cannot be read (half-written) is left for the next time.
    """

    def __init__(self, path: Path, importer: Importer) -> None:
        self._path, self._importer = path, importer
        self.parser = importer.parser(str(path))
        self.problem = ""
        self._known: list[Row] = []
        self._mark: tuple[int, int, int] | None = None

    def poll(self) -> list[Row]:
        """New rows, if the file has changed."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return []
        mark = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if mark == self._mark:
            return []
        parser = self._importer.parser(str(self._path))
        try:
            rows = list(self._importer.rows(self._path, parser))
        except ImportFormatError as error:
            self.problem = str(error)
            return []
        self._mark, self.problem, self.parser = mark, "", parser
        same = 0
        while same < min(len(rows), len(self._known)) and _equal(rows[same], self._known[same]):
            same += 1
        self._known = rows
        return rows[same:]

    def close(self) -> list[Row]:
        """Nothing is ever held back."""
        return []


def _equal(a: Row, b: Row) -> bool:
    """Whether two rows say the same; NaN equals NaN."""
    return (a.step, a.run) == (b.step, b.run) and repr(a.metrics) == repr(b.metrics)
