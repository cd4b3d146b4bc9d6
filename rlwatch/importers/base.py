"""The contract of importers: rows in the order of the log, what was left out, and how sure a format is of a log.

An importer knows one kind of log and turns it into rows. Everything else (sequence numbers, attempts, sources, error
texts) happens once, for all formats, in :mod:`~rlwatch.importers.assemble` and :mod:`~rlwatch.importers.registry`.
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
        """All that was counted, in order of first appearance."""
        return tuple(Skipped(reason, count, tuple(self._lines[reason])) for reason, count in self._counts.items())


@dataclass(frozen=True, slots=True)
class ImportedRow:
    """Metrics of one step as one place of the log gives them.

    ``run`` is empty where the log holds one run, ``ts`` (Unix seconds) 0 where it does not tell the time. ``starts``:
    the log tells that a process begins with this row.
    """

    step: int
    metrics: Mapping[str, float]
    line: int = 0
    run: str = ""
    ts: float = 0.0
    starts: bool = False


class About(NamedTuple):
    """Name, project, settings and tags of a run, where its log holds them."""

    name: str = ""
    project: str = ""
    config: Mapping[str, JSON] = MappingProxyType({})
    tags: tuple[str, ...] = ()


class LogReading(ABC):
    """One reading of a log: its rows, and what is learnt besides them.

    ``skips``: what was left out; ``recognised``: whether the mark of the format was seen; ``source``: the trainer,
    where the log tells another than its format does; ``only``: the run that is asked for, beside which others need
    not be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.skips = Skips()
        self.recognised = False
        self.source: str | None = None
        self.example: tuple[int, str] | None = None
        """A line that was a row, or ended one: its number and its text, where lines are."""
        self.only: str | None = None

    @abstractmethod
    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Every row of the file, in its order. Raises ``ImportFormatError``."""

    def notes(self) -> tuple[str, ...]:
        """Notes for the reader on how the log was read."""
        return ()

    def config(self) -> Mapping[str, JSON]:
        """Settings of the run, where the log holds them."""
        return {}

    def tags(self) -> tuple[str, ...]:
        """Words that people gave the run, where the log holds them."""
        return ()

    def called(self) -> tuple[str, str]:
        """Name and project that people gave the run; empty where the log holds neither."""
        return "", ""

    def about(self, run: str) -> About:  # noqa: ARG002
        """The same three of the run called ``run``, where the log holds several."""
        return About(*self.called(), self.config(), self.tags())


class StreamIntake(Protocol):
    """Takes a file in as bytes, however they are cut, and gives rows."""

    def feed(self, data: bytes) -> Iterator[ImportedRow]:
        """Rows that ``data`` completes."""
        ...

    def finish(self) -> Iterator[ImportedRow]:
        """Rows still held back when the file ends."""
        ...

    def cut(self) -> Iterator[ImportedRow]:
        """The same when the file was written anew: its unfinished end is lost."""
        ...


class StreamReading(LogReading):
    """Of a log that is read from its beginning to its end."""

    @abstractmethod
    def intake(self) -> StreamIntake:
        """Intake of one file."""

    def rows(self, path: Path) -> Iterator[ImportedRow]:
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
    def feed(self, segment: TextLine) -> Iterable[ImportedRow]:
        """Rows that ``segment`` completes."""

    def finish(self) -> Iterable[ImportedRow]:
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
        self._rank = ""
        """The process whose rows are read, where each begins its lines with its number."""
        self._begun = self._holed = False
        self._wide: bool | None = None

    def feed(self, data: bytes) -> Iterator[ImportedRow]:
        """Rows of the lines that ``data`` completes."""
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
        """The rows of a line; the first that has any is kept as an example."""
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
        """The rows of a line of one process of several: of the one that gave the first row."""
        if self._rank and self._rank != rank:
            self._parser.skips.add(OTHER_RANK, segment.line)
            return
        for row in self._first(segment):
            self._rank = rank
            yield row

    def finish(self) -> Iterator[ImportedRow]:
        """Rows of the unterminated last line, and what the parser held back."""
        for segment in self._segments.finish():
            yield from self._parser.feed(segment)
        yield from self._parser.finish()

    def cut(self) -> Iterator[ImportedRow]:
        """Rows that the parser held back."""
        yield from self._parser.finish()

    def _too_long(self, line: int) -> None:
        self._parser.skips.add(f"a line of more than {LONGEST_LINE:,} characters", line)


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """One run read from a log.

    ``records`` carry the source's own metric names, ``seq`` 1, 2, 3... and the ``attempt`` they belong to.
    ``notes`` say what a reader should know about how the log was read (where the steps came from), ``title`` and
    ``project`` what a tracker called the run; ``example``: number and text of a line that was read as a row.
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
    """Confidence of an importer that a log is its own, from 0 (none) to 1, and the reason."""

    confidence: float
    reason: str


class Importer(Protocol):
    """One source format."""

    name: ClassVar[str]
    expects: ClassVar[str]
    """Looks of the format, for the message that says it was not found."""
    source: ClassVar[str]
    """The trainer, where the format tells; names of metrics may tell more."""
    anywhere: ClassVar[bool]
    """True if the first row may come after any amount of other output."""
    table: ClassVar[bool]
    """True if the order of lines carries no meaning (a table may be sorted by metric)."""

    def sniff(self, head: bytes, path: Path) -> FormatMatch:
        """True if ``head``, a piece of the log, looks like this format."""
        ...

    def reading(self, path: str) -> LogReading:
        """A fresh reading of the log at ``path``."""
        ...


class StreamImporter(ABC):
    """A format that is read from its beginning to its end, and so can be followed while it grows."""

    @abstractmethod
    def reading(self, path: str) -> StreamReading:
        """A fresh reading of the log at ``path``."""


class DirectoryImporter(ABC):
    """A format that is a directory, and is read again when it has changed."""

    name: ClassVar[str]
    expects: ClassVar[str]
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> FormatMatch:  # noqa: ARG002
        """No file is one."""
        return FormatMatch(0.0, f"no {self.expects}")

    @abstractmethod
    def reading(self, path: str) -> LogReading:
        """A fresh reading of the directory."""

    @abstractmethod
    def files(self, directory: Path) -> Iterable[Path]:
        """Files of which one changes, or is new, whenever something was logged."""


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
    """Parser of its lines."""

    def reading(self, path: str) -> LineParser:
        """A fresh parser."""
        return self.parser(path)

    def sniff(self, head: bytes, path: Path) -> FormatMatch:
        """Sure as soon as its own parser finds its mark in ``head``."""
        if not any(mark in head for mark in self.marks) and not head.startswith(UTF16):
            return FormatMatch(0.0, f"no {self.expects}")
        parser, segments = self.reading(str(path)), Segments()
        try:
            for segment in segments.feed(head) + segments.finish():
                list(parser.feed(segment))
                if parser.recognised:
                    break
        except ImportFormatError:  # it is this format, with a mistake in it: reading will say which
            return FormatMatch(self.weight, f"{self.expects}, with a mistake in it")
        if parser.recognised:
            return FormatMatch(self.weight, f"found {self.expects}")
        seen = parser.skips.listed()
        return FormatMatch(0.0, f"no {self.expects}" + (f" ({seen[0].reason})" if seen else ""))


# From what a log prints to numbers: only numbers become metrics, and nothing is rescaled.

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
"""Fields in which a row may say its step, first match wins; ``"1/3820"`` is step 1."""
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
"""Fields of LLaMA-Factory, loops of one's own and Stable-Baselines3, looked for where none of those stands."""
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|[nN]a[nN]|[iI]nf(?:inity)?)"
_NUMBER = re.compile(NUMBER)
_CALL = re.compile(rf"[A-Za-z_][\w.]*\(\s*({NUMBER})\s*(?:,[^()]*)?\)")
_NULLS = frozenset({"null", "None"})


def number(text: str) -> float | None:
    """The number that ``text`` is, or None. Sees through ``np.float64(...)`` and ``tensor(..., device=...)``.

    >>> number("np.float64(-0.5)"), number("nan"), number("True")
    (-0.5, nan, None)
    """
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    call = _CALL.fullmatch(text)
    return float(call.group(1)) if call else None


def is_null(value: object) -> bool:
    """True for JSON's null and for the text that stands for it."""
    return value is None or (isinstance(value, str) and value in _NULLS)


def value_of(value: object) -> float | None:
    """A number for a JSON value, a string that is a number, or null; None for anything else.

    null means NaN, as it does for trainers that write it of what they measured (verl's orjson, TRL's all-NaN means).
    Of a writer nobody knows :class:`~rlwatch.importers.own_rows.OwnRows` has to be asked first.
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
    """The entries of ``items`` that are numbers; the others are counted in ``skips``."""
    if set(map(type, items.values())) == {float}:
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
    """The step that ``value`` says: an integer >= 0, also as ``12.0``, ``"12"`` or ``"12/500"``.

    Raises ``ValueError`` with what is wrong with it.
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
    """True if the name is that of a measurement on held-out prompts.

    >>> of_held_out("val_accuracy"), of_held_out("value_loss")
    (True, False)
    """
    first = _FIRST_WORD.search(name.lower())
    return first is not None and first.group() in HELD_OUT
