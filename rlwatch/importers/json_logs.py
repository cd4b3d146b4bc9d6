"""Reading of JSON logs: lines of verl's ``file`` logger, other lines with a step, and ``trainer_state.json`` of HF's
Trainer.

verl writes ``{"step": 12, "data": {...}}`` with orjson, which turns NaN **and** both infinities into ``null``: null
reads as NaN, "not finite, observed". Python's ``json`` writes ``NaN``, ``Infinity``, ``-Infinity``, which are read as
such. In rows of TRL a null is its mean of only NaN, so it reads as NaN, too. In rows of other writers it may mean NaN
or "not measured": :mod:`~rlwatch.importers.own_rows` decides, and finds the rows of an evaluation.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import (
    OTHER_RANK,
    OWN_STEP_FIELDS,
    STEP_FIELDS,
    FormatMatch,
    ImportedRow,
    LineImporter,
    LineParser,
    LogReading,
    metrics_of,
    step_of,
)
from rlwatch.importers.lines import LARGEST_DOCUMENT, TextLine, blocks, parsed
from rlwatch.importers.own_rows import OwnRows, flattened, is_flat, is_whole, step_field
from rlwatch.importers.single_records import REASON, of_single
from rlwatch.records import JSON

SUMMARY = "train_runtime"
"""Field of the row that HF's Trainer writes at the very end: averages over the run, not a step."""
HISTORY = "log_history"
"""Field of the state of HF's Trainer, which ms-swift writes as the last line of its log, with all rows again."""


class JsonLinesParser(LineParser):
    """Parser of logs with one JSON object on each line.

    A malformed line (cut off by a crash) is counted and left out.
    """

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the row in the line ``segment``, if there is one.

        Raises ``ImportFormatError`` for a step that is no integer.
        """
        if not segment.text.lstrip().startswith("{"):
            self.skips.add("a line that is not a JSON object", segment.line)
            return
        try:
            entry = parsed(segment.text)
        except ValueError as error:
            self.skips.add(str(error), segment.line)
            return
        yield from self._row(entry, segment.line)

    @abstractmethod
    def _row(self, entry: dict[str, object], line: int) -> Iterator[ImportedRow]:
        """Yield the row in one JSON object, if it is one."""

    def _step(self, value: object, line: int) -> int:
        self.recognised = True
        try:
            return step_of(value)
        except ValueError as error:
            raise ImportFormatError(self.path, f"{error}; correct or remove this line", line) from None


class VerlJsonLinesParser(JsonLinesParser):
    """Parser of the lines of verl's file logger: ``{"step": N, "data": {...}}``."""

    def _row(self, entry: dict[str, object], line: int) -> Iterator[ImportedRow]:
        data = entry.get("data")
        if "step" not in entry or not isinstance(data, dict):
            self.skips.add("a row without step and data", line)
            return
        step = self._step(entry["step"], line)
        yield ImportedRow(step, metrics_of(data, self.skips, line), line)


_FIELDS = (*STEP_FIELDS, *OWN_STEP_FIELDS)
_RANKS = frozenset({"rank", "global_rank", "local_rank", "process_index", "process_rank", "worker_rank"})


class FlatJsonLinesParser(JsonLinesParser):
    """Parser of JSON lines ``{"step": N, name: value, ...}``."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._rows = OwnRows()
        self._names: tuple[str, ...] = ()
        """Names of the metrics of the newest row."""
        self._usual: tuple[str, list[str]] | None = None
        """Field of the step, and names of the fields, of the newest row, if it was read as it is."""
        self._rank: object = None
        self._at = -1

    def _of_another_rank(self, step: int, entry: Mapping[str, object]) -> bool:
        """Return True for a row of another rank than the first one, at the step of the row before."""
        before, self._at = self._at, step
        if _RANKS.isdisjoint(entry):
            return False
        rank = next(entry[name] for name in entry if name in _RANKS)
        self._rank = rank if self._rank is None else self._rank
        return step == before and rank != self._rank

    def _row(self, entry: dict[str, object], line: int) -> Iterator[ImportedRow]:
        usual, self._usual = self._usual, None
        if usual is not None and usual[1] == list(entry):
            given = entry.pop(usual[0])
            if is_whole(entry) and self._rows.goes_on(step := self._step(given, line)):
                self._usual, self._at = usual, step
                yield ImportedRow(step, dict(zip(self._names, entry.values(), strict=True)), line)  # type: ignore[arg-type]
                return
            entry[usual[0]] = given
            entry = {name: entry[name] for name in usual[1]}
        yield from self._unlike(entry, line)

    def _unlike(self, entry: dict[str, object], line: int) -> Iterator[ImportedRow]:
        """Yield the row in a JSON object, if it is one, whatever the row before it was like."""
        if SUMMARY in entry or HISTORY in entry:
            self.skips.add("the trainer's summary row at the end", line)
            return
        fields = list(entry)
        field = step_field(entry, _FIELDS)
        if field is None:
            self.skips.add(f"a row without a step (looked for {', '.join(STEP_FIELDS)})", line)
            return
        if field == "step" and isinstance(entry.get("data"), dict):
            self.skips.add("a row of verl's file logger", line)
            return
        step = self._step(entry.pop(field), line)
        if self._of_another_rank(step, entry):
            self.skips.add(OTHER_RANK, line)
            return
        entry = entry if is_flat(entry) else flattened(entry)
        if of_single(entry):
            self.skips.add(REASON, line)
            return
        read = self._rows.read(step, entry, self.skips, line)
        if read is entry and _RANKS.isdisjoint(entry):
            self._usual = field, fields
        metrics = metrics_of(read, self.skips, line)
        names = tuple(metrics)
        if names != self._names:
            self._names = names
        elif names:  # the same objects as in the row before: looking them up compares no texts
            metrics = dict(zip(self._names, metrics.values(), strict=True))
        if metrics:
            yield ImportedRow(step, metrics, line)


class VerlJsonLines(LineImporter):
    """Importer of the file that verl's ``trainer.logger=["file"]`` writes."""

    name: ClassVar[str] = "verl-jsonl"
    expects: ClassVar[str] = 'JSON line {"step": N, "data": {...}}'
    source: ClassVar[str] = "verl"
    weight: ClassVar[float] = 0.95
    marks: ClassVar[tuple[bytes, ...]] = (b'"data"',)
    parser: ClassVar[type[LineParser]] = VerlJsonLinesParser


class FlatJsonLines(LineImporter):
    """Importer of JSON lines that hold the step and the metrics of a row."""

    name: ClassVar[str] = "jsonl"
    expects: ClassVar[str] = 'JSON line {"step": N, "name": value, ...}'
    marks: ClassVar[tuple[bytes, ...]] = (b"{",)
    parser: ClassVar[type[LineParser]] = FlatJsonLinesParser


# ``trainer_state.json`` of HF's Trainer (in each ``checkpoint-N/``): rows of ``log_history``.
#
# Written by Python's ``json``, so NaN and infinities stand there as the literals ``NaN``, ``Infinity``. ``null`` is
# TRL's mean of nothing but NaN: it reads as NaN. Evaluation rows (``eval_...``) are records of their step too; the
# row of ``train_runtime`` at the end is the run's summary and is left out. Line numbers are numbers of rows.

_SETTINGS = ("max_steps", "num_train_epochs", "logging_steps", "save_steps", "eval_steps", "train_batch_size")


class TrainerStateReading(LogReading):
    """Reader of ``trainer_state.json``, which is one JSON object and so is read as a whole."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._settings: Mapping[str, JSON] = {}

    def config(self) -> Mapping[str, JSON]:
        """Return the training settings that the file holds."""
        return self._settings

    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Yield the rows of ``log_history`` in the file at ``path``.

        Raises ``ImportFormatError`` if it has no such list.
        """
        state = _load(path)
        history = state.get("log_history")
        if not isinstance(history, list):
            raise ImportFormatError(str(path), "has no list 'log_history'; is it the file of a finished checkpoint?")
        self._settings = {name: state[name] for name in _SETTINGS if state.get(name) is not None}
        for number, entry in enumerate(history, 1):
            yield from self._row(entry, number)

    def _row(self, entry: object, number: int) -> Iterator[ImportedRow]:
        if not isinstance(entry, dict) or "step" not in entry:
            self.skips.add("a row without a step", number)
            return
        if SUMMARY in entry:
            self.skips.add("the trainer's summary row at the end", number)
            return
        try:
            step = step_of(entry["step"])
        except ValueError as error:
            raise ImportFormatError(self.path, f"row {number} of log_history: {error}") from None
        self.recognised = True
        metrics = metrics_of({name: value for name, value in entry.items() if name != "step"}, self.skips, number)
        if metrics:
            yield ImportedRow(step, metrics, number)


class TrainerState:
    """Importer of ``trainer_state.json``, which HF's Trainer writes into each checkpoint."""

    name: ClassVar[str] = "trainer-state"
    expects: ClassVar[str] = "JSON object with a 'log_history' (trainer_state.json)"
    source: ClassVar[str] = "trl"
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> FormatMatch:
        """Return a high confidence if ``head`` begins an object with ``log_history``, and a little less for the usual
        name of the file.
        """
        text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        if not text.startswith(b"{") or is_row(text):
            return FormatMatch(0.0, f"no {self.expects}")
        if b'"log_history"' in head:
            return FormatMatch(0.99, "found 'log_history'")
        if path.name.startswith("trainer_state.json"):
            return FormatMatch(0.9, "called trainer_state.json")
        return FormatMatch(0.0, f"no {self.expects}")

    def reading(self, path: str) -> TrainerStateReading:
        """Return a new reader of the file at ``path``."""
        return TrainerStateReading(path)


def is_row(head: bytes) -> bool:
    """Return True if the first of several lines in ``head`` is a JSON object without ``log_history``.

    Such a file has a row on each line. ms-swift writes an object with ``log_history`` as the last line of such a file.
    """
    first, end, rest = head.partition(b"\n")
    try:
        return bool(end and rest.strip()) and HISTORY not in parsed(first.decode("utf-8", "replace"))
    except (ValueError, TypeError):
        return False


def load_document(path: Path) -> JSON:
    """Return the value of the JSON document in the file at ``path``.

    Raises ``ImportFormatError`` if it cannot be read.
    """
    found = bytearray()
    for block in blocks(path):
        found += block
        if len(found) > LARGEST_DOCUMENT:
            raise ImportFormatError(str(path), f"is larger than the {LARGEST_DOCUMENT:,} bytes that are read of such")
    text = found.decode("utf-8-sig", "replace")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        half = "ends in the middle" if error.pos >= len(text.rstrip()) - 1 else "is not valid JSON"
        problem = (
            f"{half} (column {error.colno}: {error.msg}); if the trainer is still writing it, try again, "
            "else use the trainer_state.json of the checkpoint before"
        )
        raise ImportFormatError(str(path), problem, error.lineno) from None
    except ValueError:
        raise ImportFormatError(str(path), "cannot be read: it holds an integer of thousands of digits") from None
    except RecursionError:
        raise ImportFormatError(str(path), "is nested too deeply to be a log") from None


def _load(path: Path) -> dict[str, JSON]:
    state = load_document(path)
    if not isinstance(state, dict):
        raise ImportFormatError(str(path), f"must be a JSON object, got a {type(state).__name__}")
    return state
