"""What importers are, and what they give.

An importer knows one kind of log and turns it into rows (:mod:`~rlwatch.importers.reading`). Everything else (sequence
numbers, attempts, sources, error texts) happens once, for all formats, in :mod:`~rlwatch.importers.assemble` and
:mod:`~rlwatch.importers.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from rlwatch.errors import ImportFormatError
from rlwatch.importers.lines import UTF16, Segments
from rlwatch.importers.reading import LineParser, Reading, Skipped, StreamReading
from rlwatch.records import JSON, StepRecord


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """One run read from a log.

    ``records`` carry the source's own metric names, ``seq`` 1, 2, 3... and the ``attempt`` they belong to.
    ``notes`` say what a reader should know about how the log was read (where the steps came from).
    """

    name: str
    source: str
    format: str
    path: str
    records: list[StepRecord]
    skipped: tuple[Skipped, ...] = ()
    config: Mapping[str, JSON] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """How sure an importer is that a log is its own: 0 (not at all) to 1, and why."""

    confidence: float
    reason: str


class Importer(Protocol):
    """One source format."""

    name: ClassVar[str]
    expects: ClassVar[str]
    """What the format looks like, for the message that says it was not found."""
    source: ClassVar[str]
    """The trainer, where the format tells; names of metrics may tell more."""
    anywhere: ClassVar[bool]
    """Whether the first row may come after any amount of other output."""
    table: ClassVar[bool]
    """Whether the order of lines carries no meaning (a table may be sorted by metric)."""

    def sniff(self, head: bytes, path: Path) -> Verdict:
        """Whether ``head``, a piece of the log, looks like this format."""
        ...

    def reading(self, path: str) -> Reading:
        """A fresh reading of the log at ``path``."""
        ...


class StreamImporter(ABC):
    """A format that is read from its beginning to its end, and so can be followed while it grows."""

    @abstractmethod
    def reading(self, path: str) -> StreamReading:
        """A fresh reading of the log at ``path``."""


class LineImporter(StreamImporter):
    """A format that can be read line by line."""

    name: ClassVar[str]
    expects: ClassVar[str]
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False
    weight: ClassVar[float] = 0.9
    marks: ClassVar[tuple[bytes, ...]] = (b"",)
    """One of these is in every log of the format: what lacks them all need not be parsed to be refused."""

    parser: ClassVar[type[LineParser]]
    """What reads it."""

    def reading(self, path: str) -> LineParser:
        """A fresh parser."""
        return self.parser(path)

    def sniff(self, head: bytes, path: Path) -> Verdict:
        """Sure as soon as its own parser finds its mark in ``head``."""
        if not any(mark in head for mark in self.marks) and not head.startswith(UTF16):
            return Verdict(0.0, f"no {self.expects}")
        parser, segments = self.reading(str(path)), Segments()
        try:
            for segment in segments.feed(head) + segments.finish():
                list(parser.feed(segment))
                if parser.recognised:
                    break
        except ImportFormatError:  # it is this format, with a mistake in it: reading will say which
            return Verdict(self.weight, f"{self.expects}, with a mistake in it")
        if parser.recognised:
            return Verdict(self.weight, f"found {self.expects}")
        seen = parser.skips.listed()
        return Verdict(0.0, f"no {self.expects}" + (f" ({seen[0].reason})" if seen else ""))
