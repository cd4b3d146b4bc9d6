"""Reading of a file that grows, and the position up to which it was read.

Only new bytes are read if a format can be read from the middle, otherwise the whole file again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, thread_time
from typing import IO, Protocol

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import DirectoryImporter, ImportedRow, Importer, LineImporter, LogReading, StreamImporter
from rlwatch.importers.lines import A_LOOK, BLOCK, open_regular
from rlwatch.importers.tensorboard_events import event_files
from rlwatch.records import JSON

MARK = 256
"""Number of bytes before the position whose hash is remembered."""
A_WHILE_S = 0.5
_MOST_SIBLINGS = 50


@dataclass(frozen=True, slots=True)
class Position:
    """Position in a log, from which a later process can continue.

    Attributes
    ----------
    file
        Name of the file.
    base
        ``seq`` of the record before the first row of the file.
    offset
        Number of bytes of the file that were read.
    mark
        Hash of the bytes before ``offset``. A file with other bytes there is another file or was rewritten, whatever
        its name, inode and times.
    """

    file: str
    base: int
    offset: int
    mark: str

    def to_dict(self) -> dict[str, JSON]:
        """Return the fields of the position as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Position | None:
        """Return the position that :meth:`to_dict` wrote; None if ``data`` is anything else."""
        if not isinstance(data, dict):
            return None
        file, base, offset, mark = (data.get(name) for name in ("file", "base", "offset", "mark"))
        if not (isinstance(file, str) and isinstance(base, int) and isinstance(offset, int) and isinstance(mark, str)):
            return None
        return cls(file, base, offset, mark) if min(base, offset) >= 0 else None


def mark_of(tail: bytes) -> str:
    """Return the hash of ``tail``, the bytes before a position, by which the file is recognised later."""
    return hashlib.sha256(tail[-MARK:]).hexdigest()[:32]


def holds_mark(file: IO[bytes], offset: int, mark: str) -> bool:
    """Return True if the bytes of ``file`` before ``offset`` have the hash ``mark``. Moves the reading position."""
    start = max(0, offset - MARK)
    file.seek(start)
    tail = file.read(offset - start)
    return len(tail) == offset - start and mark_of(tail) == mark


def is_at(path: Path, offset: int, mark: str) -> bool:
    """Return True if the bytes before ``offset`` in the file at ``path`` have the hash ``mark``.

    The result is False if the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            return holds_mark(file, offset, mark)
    except OSError:
        return False


def kept_copy(path: Path, offset: int, mark: str) -> Path | None:
    """Return the file next to ``path`` with the content that was read from it: a rotated log, or a copy made before
    truncation.

    Its name is like ``train.log.1``, ``train.log-20260101`` or ``train-20260101.log``; packed files do not count.
    ``offset`` and ``mark`` are those of the position up to which the file was read. None if there is no such file.
    """
    if offset == 0:
        return None
    return next((other for other in _siblings(path, offset) if is_at(other, offset, mark)), None)


def _siblings(path: Path, least: int) -> Iterator[Path]:
    found: list[tuple[float, str]] = []
    try:
        with os.scandir(path.parent) as entries:
            for entry in entries:
                if entry.name != path.name and entry.name.startswith(path.stem) and entry.is_file():
                    stat = entry.stat()
                    if stat.st_size >= least:
                        found.append((stat.st_mtime, entry.name))
    except OSError:
        return
    for _, name in sorted(found, reverse=True)[:_MOST_SIBLINGS]:
        yield path.parent / name


_HOLE = b"\x00" * 4


class Follower(Protocol):
    """Interface of a reader that returns the rows (metrics of one step) which a file gained since the last poll."""

    reading: LogReading
    problem: str
    """Reason why the file cannot be read at the moment; empty if it can."""
    more: bool
    """True if the last poll ended before the end of the file, so that other logs can be read first."""

    def poll(self) -> Iterable[ImportedRow]:
        """Return new rows; none if the file has not changed or is missing for a moment."""
        ...

    def close(self) -> Iterable[ImportedRow]:
        """Return the rows that were held back for more output, and close the file."""
        ...

    def release(self) -> None:
        """Close the file for now; the next poll continues where the last one ended."""
        ...

    def place(self) -> tuple[Path, int, str]:
        """Return the file that is being read, the number of bytes read, and the hash of the last of them."""
        ...


class StreamFollower:
    """Reader of the bytes appended to a log, which holds back incomplete rows.

    A file is recognised by its content, because network file systems report old sizes and times and change inodes. If a
    file no longer holds the bytes that were read, a restarted trainer has rewritten it (verl's file logger does): it is
    read from its beginning. So is the next file after a rotation. A rotated log is read to its end first, also if it
    was copied and truncated.

    Parameters
    ----------
    path
        The log.
    importer
        Its format.
    begun
        Called between the rows of two files, with True if the next file is a new attempt.
    position
        Position of an earlier process. Its file, or the rotated copy, is read from its beginning, because a parser must
        see all of it. If neither exists, ``begun`` is called first.
    """

    def __init__(
        self, path: Path, importer: StreamImporter, begun: Callable[[bool], None], *, position: Position | None = None
    ) -> None:
        self._path, self._importer, self._begun = path, importer, begun
        self.problem = ""
        self.more = False
        self._text = isinstance(importer, LineImporter)
        self._file: IO[bytes] | None = None
        self._left = A_LOOK
        self._at = path
        self._fresh()
        if position is not None:
            self._resume(position)

    def poll(self) -> Iterator[ImportedRow]:
        """Yield the rows that were completed since the last poll."""
        self.more, self._left = False, A_LOOK
        with contextlib.suppress(FileNotFoundError):  # between the two halves of a rotation
            yield from self._appended()
            while not self.more and (there := self._next()) is not None:
                yield from self._rest()
                self._move(there)
                yield from self._appended()

    def close(self) -> Iterator[ImportedRow]:
        """Yield the row of the unfinished last line, and the rows that the parser held back; then close the file."""
        yield from self._rest()
        self.release()

    def release(self) -> None:
        """Close the file for now; the next poll opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def place(self) -> tuple[Path, int, str]:
        """Return the file that is being read, the number of bytes read, and the hash of the last of them."""
        return self._at, self._offset, mark_of(self._tail)

    def _resume(self, position: Position) -> None:
        same = is_at(self._path, position.offset, position.mark)
        there = self._path if same else kept_copy(self._path, position.offset, position.mark)
        if there is None:
            self._begun(True)
        else:
            self._at = there

    def _fresh(self) -> None:
        reading = self._importer.reading(str(self._path))
        self.reading: LogReading = reading
        self._intake = reading.intake()
        self._offset = 0
        self._tail = b""

    def _move(self, there: Path, *, restarted: bool = False) -> None:
        self.release()
        self._at = there
        self._fresh()
        self._begun(restarted)

    def _appended(self) -> Iterator[ImportedRow]:
        file = self._opened()
        if file is None:  # written anew, without a copy of its old content
            yield from self._intake.cut()
            self._move(self._at, restarted=True)
            file = self._opened()
        if file is None:
            return
        file.seek(self._offset)
        for block in self._blocks(file):
            yield from self._intake.feed(block)

    def _blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the bytes that are there now; NUL bytes at the end of a text file are not written yet."""
        while block := file.read(BLOCK):
            skipped = 0
            self._left -= len(block)
            if self._text and block.endswith(_HOLE):
                before = file.tell()
                if _only_nul(file):
                    file.seek(before - len(block) + len(block.rstrip(b"\x00")))
                    block = block.rstrip(b"\x00")
                skipped = max(0, file.tell() - before)
            self._tail = (self._tail + block + bytes(min(skipped, MARK)))[-MARK:]
            self._offset += len(block) + skipped
            if not block:
                return
            yield block
            if self._left <= 0:
                self.more = True
                return

    def _opened(self) -> IO[bytes] | None:
        """Return the open file, or its copy, whichever holds what was read of it; None if it was written anew."""
        mark = mark_of(self._tail)
        if self._file is not None and holds_mark(self._file, self._offset, mark):
            return self._file
        self.release()  # a network file system shows its newest state only when a file is opened
        file = open_regular(self._at)
        if not holds_mark(file, self._offset, mark):
            file.close()
            copy = kept_copy(self._path, self._offset, mark)
            if copy is None:
                return None
            self._at, file = copy, open_regular(copy)
        self._file = file
        return file

    def _next(self) -> Path | None:
        """Return the file in which the log goes on; None if it goes on in the same one."""
        if self._at != self._path:
            return self._path if self._path.exists() else None
        if self._file is None:
            return None
        mine, there = os.fstat(self._file.fileno()), self._path.stat()
        if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
            return None
        if self._offset and is_at(self._path, self._offset, mark_of(self._tail)):
            self.release()  # the same content under another inode: written by rsync, or renumbered
            return None
        return self._path

    def _rest(self) -> Iterator[ImportedRow]:
        yield from self._intake.finish()


class DirectoryFollower(StreamFollower):
    """Reader of the event files of a TensorBoard directory: one file to its end, then the next one by name."""

    def _resume(self, position: Position) -> None:
        self._at = self._path / position.file
        if not is_at(self._at, position.offset, position.mark):
            self._begun(True)

    def _next(self) -> Path | None:
        return self._after("" if self._at == self._path else self._at.name)

    def _appended(self) -> Iterator[ImportedRow]:
        if self._at != self._path:
            with contextlib.suppress(FileNotFoundError):  # removed, or never seen by this process
                yield from super()._appended()

    def _after(self, name: str) -> Path | None:
        return next((file for file in event_files(self._path) if file.name > name), None)


class WholeFollower:
    """Reader of a file or directory as a whole, again whenever it has changed, which returns only new rows.

    Metrics that were added to a row later are returned as a row. If a known row has changed, the log was rewritten, and
    all rows from there on are returned. A half-written file is left for the next poll.

    Parameters
    ----------
    path
        The file or directory.
    importer
        Its format.
    run
        The run to read if there are several; None for all.
    share
        Share of CPU time, 0 to 1, that reading may take. A file that took ``A_WHILE_S`` seconds of CPU time is read
        again only after a pause, because the trainer is often on the same machine.
    """

    def __init__(self, path: Path, importer: Importer, run: str | None = None, *, share: float = 0.1) -> None:
        self._path, self._importer, self._run, self._share = path, importer, run, share
        self.reading = importer.reading(str(path))
        self.problem = ""
        self.more = False
        self._known: dict[tuple[str, int, int], ImportedRow] = {}
        self._mark: list[tuple[int, int, int]] | None = None
        self._due = 0.0
        self.newest = path
        """File that was written last."""

    def poll(self) -> list[ImportedRow]:
        """Return new rows, if the file has changed since the last poll."""
        cost = thread_time()
        mark = self._marked() if monotonic() >= self._due else []
        if not mark or mark == self._mark:
            return []
        reading = self._importer.reading(str(self._path))
        reading.only = self._run
        self._mark = mark  # what cannot be read is not read again before it changes
        try:
            rows = list(reading.rows(self._path))
        except ImportFormatError as error:
            self.problem = str(error)
            return []
        finally:
            cost = thread_time() - cost
            self._due = monotonic() + cost / self._share if cost > A_WHILE_S else 0.0
        self.problem, self.reading = "", reading
        return self._news(rows)

    def _marked(self) -> list[tuple[int, int, int]]:
        """Return times, sizes and inodes, which change with every write; empty if the log is gone for a moment."""
        importer = self._importer
        found: list[tuple[int, int, int]] = []
        newest = 0
        for file in importer.files(self._path) if isinstance(importer, DirectoryImporter) else (self._path,):
            with contextlib.suppress(FileNotFoundError):
                stat = file.stat()
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
                if stat.st_mtime_ns >= newest:
                    newest, self.newest = stat.st_mtime_ns, file
        return sorted(found)

    def _news(self, rows: Sequence[ImportedRow]) -> list[ImportedRow]:
        there = {row.run for row in rows}
        known, self._known = self._known, {key: row for key, row in self._known.items() if key[0] not in there}
        times: Counter[tuple[str, int]] = Counter()
        news: list[ImportedRow] = []
        anew = False
        for row in rows:
            times[row.run, row.step] += 1
            key = (row.run, row.step, times[row.run, row.step])
            self._known[key] = row
            before = known.get(key, row) if not anew else row
            begins = not anew and not _holds(row, before)
            anew = anew or begins
            if anew or key not in known:
                news.append(replace(row, starts=True) if begins else row)
            elif len(row.metrics) > len(before.metrics):
                late = {name: value for name, value in row.metrics.items() if name not in before.metrics}
                news.append(replace(row, metrics=late))
        return news

    def close(self) -> list[ImportedRow]:
        """Return new rows, even if the log was read a moment ago."""
        self._due = 0.0
        return self.poll()

    def release(self) -> None:
        """Do nothing, because no file stays open."""

    def place(self) -> tuple[Path, int, str]:
        """Return the newest file, offset 0 and an empty hash, because reading always begins at the beginning."""
        return self.newest, 0, ""


def _only_nul(file: IO[bytes]) -> bool:
    """Return True if only NUL bytes follow in ``file``; otherwise stop at the first other bytes."""
    left = A_LOOK
    while left > 0:
        start = _data_from(file)
        block = b"" if start is None else file.read(BLOCK)
        if start is not None and block.strip(b"\x00"):
            file.seek(start)
            return False
        if not block:
            return True
        left -= len(block)
    return False


def _data_from(file: IO[bytes]) -> int | None:
    """Seek to the next written bytes and return their offset; None if only a hole is left."""
    start = file.tell()
    try:
        return os.lseek(file.fileno(), start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
    except AttributeError:  # a system that does not report holes
        pass
    return start


def _holds(row: ImportedRow, before: ImportedRow) -> bool:
    """Return True if a row still holds all values that it held before; NaN equals NaN."""
    return row.metrics == before.metrics or all(
        repr(row.metrics.get(name)) == repr(value) for name, value in before.metrics.items()
    )
