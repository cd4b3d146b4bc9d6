"""Following a log while a run writes it."""

from __future__ import annotations

import contextlib
import os

from rlwatch.errors import ImportFormatError
from rlwatch.importers.assemble import RunAssembly
from rlwatch.importers.base import Importer, LineImporter, Row, Skipped
from rlwatch.importers.follow import Follower, LineFollower, WholeFollower
from rlwatch.importers.lines import is_packed, open_log
from rlwatch.importers.registry import WINDOW, named, readable, recognise, refuse_binary, run_name
from rlwatch.importers.source import source_of
from rlwatch.records import StepRecord


class LogTail:
    """The records of a log as they come.

    All polls together with :meth:`close` give what :func:`~rlwatch.importers.read_log` gives for the finished log,
    however the writing and the polls fell. Console output, JSON lines and CSV are read incrementally and survive
    half-written lines, truncation (the next attempt begins) and rotation; ``trainer_state.json`` and gzipped logs
    are read again when they change.

    Parameters
    ----------
    path
        The log. It must exist, but may be empty or hold nothing of use yet.
    run
        Which run of a log that holds several.
    format
        Overrules recognition by content.

    Raises ``ImportFormatError`` as ``read_log`` does, except for what may still come.
    """

    def __init__(self, path: str | os.PathLike[str], *, run: str | None = None, format: str | None = None) -> None:  # noqa: A002
        self.path = readable(path)
        self.name = run or run_name(self.path)
        self._wanted = run
        self._run = run
        self._scanned = 0
        self._problem = "the file is empty"
        self._assembly = RunAssembly()
        self._follower: Follower | None = None
        self._importer: Importer | None = None
        if format is not None:
            self._follow(named(format, str(path)))

    @property
    def format(self) -> str:
        """The format's name; empty while the log holds nothing that tells it."""
        return self._importer.name if self._importer else ""

    @property
    def source(self) -> str:
        """The trainer, as far as the metrics seen so far tell."""
        return source_of(self._assembly.names, self._importer.source if self._importer else "")

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What could not be used since the log was last begun."""
        return self._follower.parser.skips.listed() if self._follower else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """How the log is read."""
        return self._follower.parser.notes() if self._follower else ()

    @property
    def problem(self) -> str:
        """Why nothing can be read at the moment, as far as that may still change; else empty."""
        return self._problem if self._follower is None else self._follower.problem

    def poll(self) -> list[StepRecord]:
        """The records that were completed since the last poll, in order; never waits."""
        self._recognise(final=False)
        return self._records(self._follower.poll() if self._follower else [])

    def close(self) -> list[StepRecord]:
        """The records still held back for output that will not come. Lets go of the file."""
        self._recognise(final=True)
        if self._follower is None:
            return []
        return self._records(self._follower.poll() + self._follower.close())

    def _follow(self, importer: Importer) -> None:
        self._importer = importer
        if isinstance(importer, LineImporter) and not is_packed(self.path):
            self._follower = LineFollower(self.path, importer, self._assembly.attempts.restart)
        else:
            self._follower = WholeFollower(self.path, importer)

    def _recognise(self, *, final: bool) -> None:
        """Ask the importers of each piece of the log once: a long preamble is not read again at every poll.

        Of a line still being written they are asked only when it is ``final``.
        """
        if self._follower is not None:
            return
        with contextlib.suppress(FileNotFoundError, EOFError), open_log(self.path) as stream:
            stream.seek(self._scanned)
            while window := stream.read(WINDOW):
                if self._scanned == 0:
                    refuse_binary(window, self.path)
                whole = len(window) == WINDOW
                seen = window if whole or final else window[: _last_line_end(window)]
                importer, self._problem = recognise(seen, self.path, beginning=self._scanned == 0)
                if importer is not None:
                    self._follow(importer)
                if importer is not None or not whole:
                    return
                self._scanned += WINDOW // 2
                stream.seek(self._scanned)

    def _records(self, rows: list[Row]) -> list[StepRecord]:
        return [self._assembly.record(row) for row in rows if self._mine(row)]

    def _mine(self, row: Row) -> bool:
        if not row.run:
            return True
        if self._wanted is None:
            if self._run is not None and row.run != self._run:
                problem = f"holds several runs ({self._run!r}, {row.run!r}...); say which one to follow"
                raise ImportFormatError(str(self.path), problem, row.line or None)
            self._run = self.name = row.run
        return row.run == self._wanted or self._wanted is None


def _last_line_end(window: bytes) -> int:
    return max(window.rfind(b"\n"), window.rfind(b"\r")) + 1
