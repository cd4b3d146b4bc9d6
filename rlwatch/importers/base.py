"""Interfaces and helpers of importers, each of which reads one log format and yields the metrics of each step.

An importer knows one kind of log and turns it into rows (the metrics of one step), in the order of the log. It counts
the lines that it leaves out, and reports how confident it is that a log has its format. Everything else (sequence
numbers, attempts, sources, error texts) happens once, for all formats, in :mod:`~rlwatch.importers.assemble` and
:mod:`~rlwatch.importers.registry`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

from rlwatch.errors import ImportFormatError
from rlwatch.importers.lines import LARGEST_STEP, LONGEST_LINE, UTF16, Segments, TextLine, blocks, shown, without_prefix
from rlwatch.records import JSON, StepRecord

LONGEST_REASON = 200
_HOLE_ENDS = re.compile(rb"\x00(?=[^\x00])")
OTHER_RANK = "a line of another rank"
_RANK = re.compile(r"\W{0,3}rank[ _:=]?(?P<rank>\d{1,6})\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Lines or values of a log that could not be used for one ``reason``, with their count.

    ``lines`` are the numbers of the first few lines, from 1 (0: unknown).
    """

    reason: str
    count: int
    lines: tuple[int, ...]


class Skips:
    """Counter of the lines and values of a log that are left out, by reason, so that none is lost silently."""

    SHOWN = 3
    KINDS = 40

    def __init__(self) -> None:
        self._lines: dict[str, list[int]] = {}
        self._counts: dict[str, int] = {}

    def add(self, reason: str, line: int) -> None:
        """Count an unusable line or value at ``line`` under ``reason``.

        Beyond 40 different reasons all others count together.
        """
        reason = reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 1] + "…"
        if reason not in self._counts and len(self._counts) >= self.KINDS:
            reason = "other things that could not be used"
        self._counts[reason] = self._counts.get(reason, 0) + 1
        lines = self._lines.setdefault(reason, [])
        if len(lines) < self.SHOWN:
            lines.append(line)

    def listed(self) -> tuple[Skipped, ...]:
        """Return all counts, one entry for each reason, in the order in which reasons first appeared."""
        return tuple(Skipped(reason, count, tuple(self._lines[reason])) for reason, count in self._counts.items())


@dataclass(frozen=True, slots=True)
class ImportedRow:
    """Metrics of one step, read from one place of a log.

    Attributes
    ----------
    step
        Step as the log counts it.
    metrics
        Value of each metric, under the log's own name.
    line
        Line of the log, from 1; 0 if the format has no lines.
    run
        Name of the run; empty if the log holds only one.
    ts
        Unix time in seconds; 0 if the log holds no time.
    starts
        True if the log shows that a process began with this row.
    """

    step: int
    metrics: Mapping[str, float]
    line: int = 0
    run: str = ""
    ts: float = 0.0
    starts: bool = False


class About(NamedTuple):
    """Name, project, settings and tags of a run; empty if its log does not hold them."""

    name: str = ""
    project: str = ""
    config: Mapping[str, JSON] = MappingProxyType({})
    tags: tuple[str, ...] = ()


class LogReading(ABC):
    """Reader of one log: it yields the metrics of each step, and collects facts about the run.

    Attributes
    ----------
    skips
        Counts of lines and values that were left out.
    recognised
        True once a text that identifies the format was found.
    source
        Trainer that wrote the log, if the log names another one than its format implies; None otherwise.
    only
        Name of the one run to read; None to read all.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.skips = Skips()
        self.recognised = False
        self.source: str | None = None
        self.example: tuple[int, str] | None = None
        """Number and text of a line that was read as a row, or that ended one; None before the first."""
        self.only: str | None = None

    @abstractmethod
    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Yield the rows (metrics of one step) of the file at ``path``, in their order.

        Raises ``ImportFormatError`` if the file cannot be read.
        """

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on how the log was read, such as where the steps came from."""
        return ()

    def config(self) -> Mapping[str, JSON]:
        """Return the settings of the run; empty if the log holds none."""
        return {}

    def tags(self) -> tuple[str, ...]:
        """Return the tags of the run; empty if the log holds none."""
        return ()

    def called(self) -> tuple[str, str]:
        """Return the name and the project of the run; empty if the log holds neither."""
        return "", ""

    def about(self, run: str) -> About:  # noqa: ARG002
        """Return name, project, settings and tags of the run called ``run``, because a log may hold several runs."""
        return About(*self.called(), self.config(), self.tags())


class StreamIntake(Protocol):
    """Interface of a parser that receives a file as bytes, in pieces of any size, and yields rows (metrics of one
    step).
    """

    def feed(self, data: bytes) -> Iterator[ImportedRow]:
        """Yield the rows that are complete after the next bytes ``data``."""
        ...

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the rows that are still held back when the file ends."""
        ...

    def cut(self) -> Iterator[ImportedRow]:
        """Yield the rows that are still held back when the file was replaced. An unfinished last line is dropped."""
        ...


class StreamReading(LogReading):
    """Reader of a log that is parsed as a stream of bytes, from its beginning to its end."""

    @abstractmethod
    def intake(self) -> StreamIntake:
        """Return a new parser for the bytes of one file."""

    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Yield every row (metrics of one step) of the file at ``path``, which is read in blocks, never as a whole."""
        intake = self.intake()
        for block in blocks(path):
            yield from intake.feed(block)
        yield from intake.finish()


class LineParser(StreamReading):
    """Parser of a log line by line; its rows never depend on how the bytes were divided.

    Subclasses set ``recognised`` as soon as they have found a text that identifies their format.
    """

    @abstractmethod
    def feed(self, segment: TextLine) -> Iterable[ImportedRow]:
        """Return the rows (metrics of one step) that are complete after the line ``segment``."""

    def finish(self) -> Iterable[ImportedRow]:
        """Return the rows that are still held back when the log ends."""
        return ()

    def intake(self) -> LineIntake:
        """Return an object that divides bytes into lines for this parser."""
        return LineIntake(self)


class LineIntake:
    """Link between bytes and a line parser: it divides bytes into lines, and yields the parser's rows.

    If every line begins with a rank, only the lines of the rank that printed the first row are read.
    """

    def __init__(self, parser: LineParser) -> None:
        self._parser = parser
        self._segments = Segments(self._too_long)
        self._rank = ""
        """Rank whose rows are read, if every line begins with a rank."""
        self._begun = self._holed = False
        self._wide: bool | None = None

    def feed(self, data: bytes) -> Iterator[ImportedRow]:
        """Yield the rows of the lines that are complete after the next bytes ``data``."""
        if self._holed or b"\x00" in data:
            self._note_holes(data if self._begun else data.lstrip(b"\x00"))
        self._begun = self._begun or bool(data.strip(b"\x00"))
        for segment in self._segments.feed(data):
            if "rank" in segment.text and (match := _RANK.match(without_prefix(segment.text))) is not None:
                yield from self._of_rank(match["rank"], segment)
            elif self._parser.example is None:
                yield from self._first(segment)
            else:
                yield from self._parser.feed(segment)

    def _first(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the rows of a line; the first line that has any is kept as an example."""
        for row in self._parser.feed(segment):
            self._parser.example = self._parser.example or (segment.line, segment.text[:LONGEST_REASON])
            yield row

    def _note_holes(self, data: bytes) -> None:
        """Count the blocks of NUL bytes that end in ``data``."""
        if self._wide is None:
            self._wide = data.startswith(UTF16)
        if self._wide or not data:
            return
        ends = len(_HOLE_ENDS.findall(data)) + (self._holed and data[0] != 0)
        for _ in range(ends):
            self._parser.skips.add("a block of NUL bytes, as of a power cut or a truncated copy", 0)
        self._holed = data.endswith(b"\x00")

    def _of_rank(self, rank: str, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the rows of a line if the rank that printed it is the one that printed the first row."""
        if self._rank and self._rank != rank:
            self._parser.skips.add(OTHER_RANK, segment.line)
            return
        for row in self._first(segment):
            self._rank = rank
            yield row

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the rows of the unterminated last line, and those that the parser held back."""
        for segment in self._segments.finish():
            yield from self._parser.feed(segment)
        yield from self._parser.finish()

    def cut(self) -> Iterator[ImportedRow]:
        """Yield the rows that the parser held back when the file was replaced."""
        yield from self._parser.finish()

    def _too_long(self, line: int) -> None:
        self._parser.skips.add(f"a line of more than {LONGEST_LINE:,} characters", line)


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """One run read from a log.

    Attributes
    ----------
    records
        Records with the log's own metric names, ``seq`` 1, 2, 3... and the ``attempt`` they belong to.
    notes
        Notes for the user on how the log was read, such as where the steps came from.
    title, project
        Name and project that a tracker gave the run; empty if there are none.
    example
        Number and text of a line that was read as a row.
    """

    name: str
    source: str
    format: str
    path: str
    records: list[StepRecord]
    skipped: tuple[Skipped, ...] = ()
    config: Mapping[str, JSON] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    title: str = ""
    project: str = ""
    example: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class FormatMatch:
    """Confidence of an importer that a log has its format, from 0 (none) to 1, with the reason."""

    confidence: float
    reason: str


class Importer(Protocol):
    """Interface of the importer of one log format."""

    name: ClassVar[str]
    expects: ClassVar[str]
    """Description of what identifies the format, for the message that it was not found."""
    source: ClassVar[str]
    """Trainer that writes this format; empty if several do. Names of metrics may identify the trainer further."""
    anywhere: ClassVar[bool]
    """True if the first row may come after any amount of other output."""
    table: ClassVar[bool]
    """True if the order of lines carries no meaning, because a table may be sorted by metric."""

    def sniff(self, head: bytes, path: Path) -> FormatMatch:
        """Return the confidence that ``head``, a piece of the log at ``path``, has this format."""
        ...

    def reading(self, path: str) -> LogReading:
        """Return a new reader of the log at ``path``."""
        ...


class StreamImporter(ABC):
    """Importer of a format that is read from its beginning to its end, and so can be followed while the log grows."""

    @abstractmethod
    def reading(self, path: str) -> StreamReading:
        """Return a new reader of the log at ``path``."""


class DirectoryImporter(ABC):
    """Importer of a format that is a directory, which is read again when it has changed."""

    name: ClassVar[str]
    expects: ClassVar[str]
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> FormatMatch:  # noqa: ARG002
        """Return a confidence of 0: the format is a directory, not a file."""
        return FormatMatch(0.0, f"no {self.expects}")

    @abstractmethod
    def reading(self, path: str) -> LogReading:
        """Return a new reader of the directory ``path``."""

    @abstractmethod
    def files(self, directory: Path) -> Iterable[Path]:
        """Return the files of ``directory`` that show new data: one of them changes, or appears, with every write."""


class LineImporter(StreamImporter):
    """Importer of a format that can be read line by line."""

    name: ClassVar[str]
    expects: ClassVar[str]
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False
    weight: ClassVar[float] = 0.9
    marks: ClassVar[tuple[bytes, ...]] = (b"",)
    """Byte strings of which every log of the format contains at least one, so that a log without them is refused
    unparsed.
    """

    parser: ClassVar[type[LineParser]]
    """Class of the parser of the format's lines."""

    def reading(self, path: str) -> LineParser:
        """Return a new parser of the log at ``path``."""
        return self.parser(path)

    def sniff(self, head: bytes, path: Path) -> FormatMatch:
        """Return the confidence ``weight`` if the parser recognises its format in ``head``, a piece of the log at
        ``path``, else 0.
        """
        if not any(mark in head for mark in self.marks) and not head.startswith(UTF16):
            return FormatMatch(0.0, f"no {self.expects}")
        parser, segments = self.reading(str(path)), Segments()
        try:
            for segment in segments.feed(head) + segments.finish():
                list(parser.feed(segment))
                if parser.recognised:
                    break
        except ImportFormatError:  # it is this format, with a mistake in it: reading reports which
            return FormatMatch(self.weight, f"{self.expects}, with a mistake in it")
        if parser.recognised:
            return FormatMatch(self.weight, f"found {self.expects}")
        seen = parser.skips.listed()
        return FormatMatch(0.0, f"no {self.expects}" + (f" ({seen[0].reason})" if seen else ""))


# Conversion of printed text to numbers: only numbers become metrics, and no value is rescaled.

STEP_FIELDS = (
    "step",
    "global_step",
    "train/global_step",
    "global_step/max_steps",
    "trainer/global_step",
    "training/global_step",
    "_step",
    "iteration",
)
"""Fields that may hold the step of a row; the first that exists counts. ``"1/3820"`` is step 1."""
OWN_STEP_FIELDS = (
    "current_steps",
    "grpo_step",
    "ppo_step",
    "rl_step",
    "rollout_step",
    "train_step",
    "training_step",
    "update_step",
    "optimizer_step",
    "time/iterations",
    "time/total_timesteps",
)
"""Step fields of LLaMA-Factory, custom loops and Stable-Baselines3, used if a row has none of ``STEP_FIELDS``."""
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|[nN]a[nN]|[iI]nf(?:inity)?)"
_NUMBER = re.compile(NUMBER)
_CALL = re.compile(rf"[A-Za-z_][\w.]*\(\s*({NUMBER})\s*(?:,[^()]*)?\)")
_NULLS = frozenset({"null", "None"})


def number(text: str) -> float | None:
    """Return the number in ``text``, also in ``np.float64(...)`` and ``tensor(..., device=...)``; None for other text.

    >>> number("np.float64(-0.5)"), number("nan"), number("True")
    (-0.5, nan, None)
    """
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    call = _CALL.fullmatch(text)
    return float(call.group(1)) if call else None


def is_null(value: object) -> bool:
    """Return True for JSON's null, and for the texts ``null`` and ``None``."""
    return value is None or (isinstance(value, str) and value in _NULLS)


def value_of(value: object) -> float | None:
    """Return the number in a JSON value or a numeric string, NaN for null, and None for anything else.

    null means NaN in the logs of trainers that write it for a measured value (verl's orjson, TRL's all-NaN means). Rows
    of an unknown writer go through :class:`~rlwatch.importers.own_rows.OwnRows` first.
    """
    if isinstance(value, str):
        read = number(value)
        return math.nan if read is None and is_null(value) else read
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def metrics_of(items: Mapping[str, object], skips: Skips, line: int) -> dict[str, float]:
    """Return the entries of ``items`` that are numbers; the others are counted in ``skips``, at ``line``."""
    kinds = set(map(type, items.values()))
    if len(kinds) == 1 and float in kinds:
        return dict(items)  # type: ignore[arg-type]
    metrics: dict[str, float] = {}
    for name, raw in items.items():
        value = value_of(raw)
        if value is None:
            skips.add(f"{shown(name)} is not a number", line)
        else:
            metrics[name] = value
    return metrics


def step_of(value: object) -> int:
    """Return the step in ``value``: an integer >= 0, also written as ``12.0``, ``"12"`` or ``"12/500"``.

    Raises
    ------
    ValueError
        If ``value`` is not an integer from 0 up to 2**53; the message names the problem.
    """
    text = value.split("/", 1)[0] if isinstance(value, str) else value
    read = value_of(text) if text is not None else None
    if read is None or not math.isfinite(read) or read != int(read):
        raise ValueError(f"the step must be an integer, got {shown(value)}")
    if read < 0:
        raise ValueError(f"the step must be >= 0, got {shown(value)}")
    if read >= LARGEST_STEP:
        raise ValueError(f"the step must be below 2**53, got {shown(value)}")
    return int(read)


HELD_OUT = frozenset({"eval", "evaluation", "val", "validation", "test", "heldout"})
_FIRST_WORD = re.compile(r"[a-z]+")


def of_held_out(name: str) -> bool:
    """Return True if ``name`` is the name of a metric on held-out prompts, because it begins with a word such as
    ``val``.

    >>> of_held_out("val_accuracy"), of_held_out("value_loss")
    (True, False)
    """
    first = _FIRST_WORD.search(name.lower())
    return first is not None and first.group() in HELD_OUT
