"""Following a log while a run writes it."""

from __future__ import annotations

import os

from rlwatch.errors import ImportFormatError
from rlwatch.importers.assemble import RunAssembly
from rlwatch.importers.base import Importer, LineImporter, Row, Skipped
from rlwatch.importers.follow import Follower, LineFollower, WholeFollower
from rlwatch.importers.lines import is_packed, open_log
from rlwatch.importers.registry import WINDOW, named, readable, recognise, run_name
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

    def poll(self) -> list[StepRecord]:
        """The records that were completed since the last poll, in order; never waits."""
        if self._follower is None:
            importer = self._recognised()
            if importer is None:
                return []
            self._follow(importer)
        return self._records(self._follower.poll() if self._follower else [])

    def close(self) -> list[StepRecord]:
        """The records still held back for output that will not come. Lets go of the file."""
        return self._records(self._follower.close() if self._follower else [])

    def _follow(self, importer: Importer) -> None:
        self._importer = importer
        if isinstance(importer, LineImporter) and not is_packed(self.path):
            self._follower = LineFollower(self.path, importer, self._assembly.attempts.restart)
        else:
            self._follower = WholeFollower(self.path, importer)

    def _recognised(self) -> Importer | None:
        """The importer, asked of each piece of the log once: a long preamble is not read again at every poll."""
        try:
            with open_log(self.path) as stream:
                beginning = self._scanned == 0
                stream.seek(self._scanned)
                while window := stream.read(WINDOW):
                    importer, _ = recognise(window, self.path, beginning=beginning)
                    if importer is not None:
                        return importer
                    if len(window) < WINDOW:
                        break
                    self._scanned += WINDOW // 2
                    stream.seek(self._scanned)
                    beginning = False
        except (FileNotFoundError, EOFError):
            return None
        return None

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
