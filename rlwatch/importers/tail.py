"""Reading of a log while a trainer still writes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import IO, Protocol

from rlwatch.errors import ImportFormatError
from rlwatch.importers.assemble import RunAssembly, source_of
from rlwatch.importers.base import About, ImportedRow, Importer, Skipped, Skips, StreamImporter
from rlwatch.importers.follow import DirectoryFollower, Follower, Position, StreamFollower, WholeFollower
from rlwatch.importers.lines import A_LOOK, is_packed, open_regular, shown, unpacker
from rlwatch.importers.naming import NONE, Naming
from rlwatch.importers.refusals import unknown_format
from rlwatch.importers.registry import (
    WINDOW,
    binary_format,
    named,
    of_directory,
    readable,
    recognise,
    refuse_binary,
    run_name,
    sniff,
)
from rlwatch.importers.tensorboard_events import Training, trainings_until
from rlwatch.records import StepRecord


class Tail(Protocol):
    """Interface to the records of a run as they arrive, from a file or a server."""

    name: str
    behind: bool
    turned: bool
    training: int
    """Number of the training to which the last records belong, from 1, because a TensorBoard directory may hold
    several.
    """

    @property
    def format(self) -> str:
        """Return the name of the log's format; empty until it is recognised."""
        ...

    @property
    def source(self) -> str:
        """Return the trainer that writes the log, as far as it is known."""
        ...

    @property
    def about(self) -> About:
        """Return name, project, settings and tags of the run, as far as they were read."""
        ...

    @property
    def problem(self) -> str:
        """Return the reason why nothing can be read at the moment; empty if reading works."""
        ...

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Return counts of unusable lines and values."""
        ...

    @property
    def position(self) -> Position | None:
        """Return the position up to which the log was read, from which a later process can continue."""
        ...

    @property
    def read(self) -> tuple[int, int]:
        """Return how many bytes were read, and how many there are."""
        ...

    @property
    def modified(self) -> float:
        """Return the time of the last change, in Unix seconds. Raises ``OSError`` if the log is gone."""
        ...

    def poll(self, most: int | None = None) -> list[StepRecord]:
        """Return the records that were completed since the last poll, at most about ``most``."""
        ...

    def close(self) -> list[StepRecord]:
        """Return the records that are still held back, at the end."""
        ...

    def release(self) -> None:
        """Close files for now; the next poll opens them again."""
        ...


class LogTail:
    """Reader of the records of a log as a trainer writes them.

    All polls together with :meth:`close` return what :func:`~rlwatch.importers.read_log` returns for the finished log,
    whatever the times of writes and polls. Console output, JSON lines, CSV, TensorBoard's and wandb's files are read
    incrementally and survive half-written ends, truncation (the next attempt begins) and rotation.
    ``trainer_state.json``, databases and gzipped logs are read again when they change. If a TensorBoard directory holds
    another training, ``training`` increases and records are numbered from 1 again, because they belong to another run.

    Parameters
    ----------
    path
        The log. It must exist, but may be empty or hold nothing of use yet.
    run
        The run to read from a log that holds several.
    format
        Name of the format; None recognises it by content.
    naming
        Metrics that the user assigned to unknown names.
    position, last_seq
        Position of an earlier process, and the ``seq`` of the last record that it kept. Numbers continue from there.
        Records up to that one are returned again, so that a caller who keeps records must skip those it has.

    Attributes
    ----------
    behind
        True if there may be more records already.
    turned
        True if the last poll ended where another file begins, to which ``position`` then refers already.

    Raises
    ------
    ImportFormatError
        For the reasons of ``read_log``, except for parts that may still be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        run: str | None = None,
        format: str | None = None,  # noqa: A002
        position: Position | None = None,
        last_seq: int = 0,
        naming: Naming = NONE,
    ) -> None:
        self.path = readable(path)
        self.name = run or run_name(self.path)
        self.behind = False
        self.turned = False
        self._wanted = run
        self._run = run
        self._scanned = 0
        self._unscanned = False
        self._interrupted = False  # behind, but not for rows left over
        self._packed: object = None
        self._problem = "the file is empty"
        self._naming = naming
        self._assembly = RunAssembly(str(self.path), position.base if position else 0, naming)
        self._base = self._assembly.seq
        self._position, self._last_seq = position, last_seq
        self._follower: Follower | None = None
        self._rows: Iterator[ImportedRow] = iter(())
        self._due: list[StepRecord] = []
        """Records of the previous file, to be returned before those of the file that begins."""
        self._begins = False
        self._importer: Importer | None = None
        self.training = 1
        self._training: Training | None = None
        if self.path.is_dir():
            self.training, self._training = trainings_until(self.path, position.file if position else "")
        if format is not None:
            self._follow(named(format, str(path), naming))
        elif self.path.is_dir():
            self._follow(of_directory(self.path))

    @property
    def format(self) -> str:
        """Return the name of the log's format; empty until it is recognised."""
        return self._importer.name if self._importer else ""

    @property
    def source(self) -> str:
        """Return the trainer that the format and the metrics seen so far identify; empty if unknown."""
        return source_of(self._assembly.names, self._importer.source if self._importer else "")

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Return counts of unusable lines and values since reading of the log last began."""
        return self._follower.reading.skips.listed() if self._follower else ()

    @property
    def _skips(self) -> Skips:
        return self._follower.reading.skips if self._follower else Skips()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on how the log is read."""
        return (self._follower.reading.notes() if self._follower else ()) + self._assembly.notes()

    @property
    def about(self) -> About:
        """Return name, project, settings and tags of the run, as far as they were read."""
        reading = self._follower.reading if self._follower else None
        return About() if reading is None else reading.about(self.name)

    @property
    def problem(self) -> str:
        """Return the reason why nothing can be read at the moment, if that may still change; else empty."""
        return self._problem if self._follower is None else self._follower.problem

    @property
    def position(self) -> Position | None:
        """Return the position up to which the log was read, for a later process; None while nothing was read."""
        if self._follower is None:
            return self._position
        path, offset, mark = self._follower.place()
        return Position(path.name, self._base, offset, mark) if offset else self._position

    @property
    def read(self) -> tuple[int, int]:
        """Return how many bytes of the file were read, and its size."""
        path, offset, _ = self._follower.place() if self._follower else (self.path, 0, "")
        try:
            return offset, max(offset, path.stat().st_size)
        except OSError:
            return offset, offset

    @property
    def modified(self) -> float:
        """Return the time of the last write to the file, in Unix seconds. Raises ``OSError`` if it is gone."""
        return (self._follower.place()[0] if self._follower else self.path).stat().st_mtime

    def poll(self, most: int | None = None) -> list[StepRecord]:
        """Return the records that were completed since the last poll, in order. The call never waits.

        It returns at most ``most`` records plus those that were held back, all from one file. ``behind`` is then True
        if there may be more already.
        """
        self._recognise(final=False)
        if self._interrupted:
            self.behind = self._interrupted = False
        records = self._taken(self._follower.poll() if self._follower else (), most)
        if not self.behind and (self._unscanned if self._follower is None else self._follower.more):
            self._rows, self.behind, self._interrupted = iter(()), True, True
        return records

    def close(self) -> list[StepRecord]:
        """Return the records that were held back for more output, and close the file."""
        records = self._drained(())
        self._recognise(final=True)
        if self._follower is None:
            return records
        records += self._drained(self._follower.poll())
        while self._follower.more:
            records += self._drained(self._follower.poll())
        records += self._drained(self._follower.close())
        return records + self._assembly.finish(self._skips)

    def release(self) -> None:
        """Close the file for now; the next poll continues where the last one ended."""
        if self._follower is not None and not self.behind:
            self._follower.release()

    def _follow(self, importer: Importer) -> None:
        self._importer = importer
        self._assembly.order.ordered = not importer.table
        if not isinstance(importer, StreamImporter) or (self.path.is_file() and is_packed(self.path)):
            self._follower = WholeFollower(self.path, importer, self._wanted)
            return
        kind = DirectoryFollower if self.path.is_dir() else StreamFollower
        self._follower = kind(self.path, importer, self._begun, position=self._position)
        self._position = None

    def _begun(self, restarted: bool) -> None:
        """Begin another file, to which the next row belongs."""
        if self._position is not None:  # the file of the earlier process is gone, and so are its copies
            self._assembly.seq = max(self._assembly.seq, self._last_seq)
        settled = self._assembly.restart if restarted else self._assembly.finish
        self._due += settled(self._skips)
        self._base = self._assembly.seq
        self._begins = True

    def _recognise(self, *, final: bool) -> None:
        """Try the importers on each piece of the log once: a long preamble is not read again at every poll.

        An unfinished last line counts only if the log is ``final``. Otherwise reading stops after ``A_LOOK`` bytes, so
        that other logs have their turn.
        """
        if self._follower is not None:
            return
        with contextlib.suppress(FileNotFoundError), open_regular(self.path) as stream:
            if unpacker(stream.read(6)) is not None:
                self._unpack(os.fstat(stream.fileno()))
            else:
                self._look_through(stream, final=final)
                if final and self._follower is None:
                    self._scanned = 0
                    self._look_through(stream, final=True, last=True)

    def _look_through(self, stream: IO[bytes], *, final: bool, last: bool = False) -> None:
        """Try the importers on the pieces that they have not seen yet."""
        if stream.seek(0, os.SEEK_END) < self._scanned:  # it was begun anew
            self._scanned = 0
        until = self._scanned + A_LOOK
        self._unscanned = False
        stream.seek(self._scanned)
        while window := stream.read(WINDOW):
            self._unscanned = self._scanned > until and not final
            if self._unscanned:
                return
            if self._scanned == 0:
                binary = binary_format(window, self.path)
                if binary is not None:
                    self._follow(binary)
                    return
                refuse_binary(window, self.path)
            whole = len(window) == WINDOW
            seen = window if whole or final else window[: _last_line_end(window)]
            importer, tried = recognise(seen, self.path, beginning=self._scanned == 0, last=last, naming=self._naming)
            if importer is not None:
                self._follow(importer)
            elif self._scanned == 0:
                self._problem = unknown_format(seen, tried)
            if importer is not None or not whole:
                return
            self._scanned += WINDOW // 2
            stream.seek(self._scanned)

    def _unpack(self, stat: os.stat_result) -> None:
        """Recognise a packed log from its beginning, whenever it has changed."""
        mark = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if mark == self._packed:
            return
        self._packed = mark
        try:
            self._follow(sniff(self.path, self._naming))
        except ImportFormatError as error:
            self._problem = error.problem

    def _drained(self, rows: Iterable[ImportedRow]) -> list[StepRecord]:
        """Return the records of the rows that were left over and of all ``rows``."""
        records: list[StepRecord] = []
        for source in ((), rows) if self.behind else (rows,):
            records += self._taken(source, None)
            while self.behind:
                records += self._taken((), None)
        return records

    def _taken(self, rows: Iterable[ImportedRow], most: int | None) -> list[StepRecord]:
        """Return the records of the rows that were left over or, if there were none, of ``rows``."""
        left = self._rows if self.behind else iter(rows)
        self.behind = self.turned = False
        records: list[StepRecord] = []
        for row in left:
            records += self._overdue()
            if self._begins and records:
                self._rows, self.behind, self.turned = chain([row], left), True, True
                break
            if self._mine(row):
                noted = self._noted(row)
                self._begins = False
                records += self._assembly.take(noted, self._skips)
                if most is not None and len(records) >= most:
                    self._rows, self.behind = left, True
                    break
        return records + self._overdue()

    def _overdue(self) -> list[StepRecord]:
        due, self._due = self._due, []
        return due

    def _noted(self, row: ImportedRow) -> ImportedRow:
        """Return the row; begin another run if the first row of another event file starts a new training."""
        if self._training is None:
            return row
        if self._begins and self._training.is_another(row):
            self._training, self._assembly = Training(), RunAssembly(str(self.path), naming=self._naming)
            self.training, self._base = self.training + 1, 0
        self._training.add(row)
        return replace(row, starts=self._begins)

    def _mine(self, row: ImportedRow) -> bool:
        if not row.run:
            return True
        if self._wanted is None:
            if self._run is not None and row.run != self._run:
                problem = f"holds several runs ({shown(self._run)}, {shown(row.run)}...); name the one to follow"
                raise ImportFormatError(str(self.path), problem, row.line or None)
            self._run = self.name = row.run
        return row.run == self._wanted or self._wanted is None


def _last_line_end(window: bytes) -> int:
    return max(window.rfind(b"\n"), window.rfind(b"\r")) + 1
