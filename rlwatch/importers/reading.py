"""One reading of a log: its rows, in the order of the file, and what was left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlwatch.importers.bounds import LONGEST_LINE
from rlwatch.importers.lines import Segment, Segments, blocks
from rlwatch.records import JSON

LONGEST_REASON = 200


@dataclass(frozen=True, slots=True)
class Skipped:
    """Things of one kind that could not be used. ``lines`` are the first few, 1-based (0: unknown)."""

    reason: str
    count: int
    lines: tuple[int, ...]


class Skips:
    """Counts what is left out, so that nothing is lost silently."""

    SHOWN = 3
    KINDS = 40

    def __init__(self) -> None:
        self._lines: dict[str, list[int]] = {}
        self._counts: dict[str, int] = {}

    def add(self, reason: str, line: int) -> None:
        """Count one thing at ``line``; beyond 40 different reasons they are counted together."""
        reason = reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 1] + "…"
        if reason not in self._counts and len(self._counts) >= self.KINDS:
            reason = "other things that could not be used"
        self._counts[reason] = self._counts.get(reason, 0) + 1
        lines = self._lines.setdefault(reason, [])
        if len(lines) < self.SHOWN:
            lines.append(line)

    def listed(self) -> tuple[Skipped, ...]:
        """What was counted, in order of first appearance."""
        return tuple(Skipped(reason, count, tuple(self._lines[reason])) for reason, count in self._counts.items())


@dataclass(frozen=True, slots=True)
class Row:
    """Metrics of one step as one place of the log gives them.

    ``run`` is empty where the log holds one run, ``ts`` (Unix seconds) 0 where it does not tell the time.
    """

    step: int
    metrics: Mapping[str, float]
    line: int = 0
    run: str = ""
    ts: float = 0.0


class Reading(ABC):
    """One reading of a log: its rows, and what is learnt besides them.

    ``skips``: what was left out; ``recognised``: whether the mark of the format was seen.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.skips = Skips()
        self.recognised = False

    @abstractmethod
    def rows(self, path: Path) -> Iterator[Row]:
        """Every row of the file, in its order. Raises ``ImportFormatError``."""

    def notes(self) -> tuple[str, ...]:
        """What a reader should know about how the log was read."""
        return ()

    def config(self) -> Mapping[str, JSON]:
        """Settings of the run, where the log holds them."""
        return {}


class Intake(Protocol):
    """Takes a file in as bytes, however they are cut, and gives rows."""

    def feed(self, data: bytes) -> Iterator[Row]:
        """Rows that ``data`` completes."""
        ...

    def finish(self) -> Iterator[Row]:
        """Rows still held back when the file ends."""
        ...

    def cut(self) -> Iterator[Row]:
        """The same when the file was written anew: its unfinished end is lost."""
        ...


class StreamReading(Reading):
    """Of a log that is read from its beginning to its end."""

    @abstractmethod
    def intake(self) -> Intake:
        """What takes one file in."""

    def rows(self, path: Path) -> Iterator[Row]:
        """Every row of the file; reads it in blocks, never as a whole."""
        intake = self.intake()
        for block in blocks(path):
            yield from intake.feed(block)
        yield from intake.finish()


class LineParser(StreamReading):
    """Reads a log line by line; what it says never depends on how the bytes were cut.

    Subclasses set ``recognised`` as soon as they have seen the mark of their format.
    """

    @abstractmethod
    def feed(self, segment: Segment) -> Iterable[Row]:
        """Rows that ``segment`` completes."""

    def finish(self) -> Iterable[Row]:
        """Rows still held back when the log ends."""
        return ()

    def intake(self) -> LineIntake:
        """Cuts into lines for the parser."""
        return LineIntake(self)


class LineIntake:
    """Takes text in, line by line."""

    def __init__(self, parser: LineParser) -> None:
        self._parser = parser
        self._segments = Segments(self._too_long)

    def feed(self, data: bytes) -> Iterator[Row]:
        """Rows of the lines that ``data`` completes."""
        for segment in self._segments.feed(data):
            yield from self._parser.feed(segment)

    def finish(self) -> Iterator[Row]:
        """Rows of the unterminated last line, and what the parser held back."""
        for segment in self._segments.finish():
            yield from self._parser.feed(segment)
        yield from self._parser.finish()

    def cut(self) -> Iterator[Row]:
        """What the parser held back."""
        yield from self._parser.finish()

    def _too_long(self, line: int) -> None:
        self._parser.skips.add(f"a line of more than {LONGEST_LINE:,} characters", line)
