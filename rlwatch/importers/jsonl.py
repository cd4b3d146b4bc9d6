"""JSON lines: verl's ``file`` logger and flat rows of anything else (ms-swift's ``logging.jsonl``, own loops).

verl writes ``{"step": 12, "data": {...}}`` with orjson, which turns NaN **and** both infinities into ``null``: null
reads as NaN, "not finite, observed". Python's ``json`` writes ``NaN``, ``Infinity``, ``-Infinity``, which are read
as such; a null there is TRL's mean of nothing but NaN, so it reads as NaN too. What was not measured is absent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import LineImporter
from rlwatch.importers.bounds import parsed
from rlwatch.importers.lines import Segment
from rlwatch.importers.reading import LineParser, Row
from rlwatch.importers.values import STEP_FIELDS, metrics_of, step_of

SUMMARY = "train_runtime"
"""Marks the row HF's Trainer writes at the very end: averages over the run, not a step."""


class JsonLinesParser(LineParser):
    """One JSON object a line; a line that is none (cut off by a crash) is counted and left out."""

    def feed(self, segment: Segment) -> Iterator[Row]:
        """The row of one line."""
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
    def _row(self, entry: dict[str, object], line: int) -> Iterator[Row]:
        """The row of one object, if it is one."""

    def _step(self, value: object, line: int) -> int:
        self.recognised = True
        try:
            return step_of(value)
        except ValueError as error:
            raise ImportFormatError(self.path, f"{error}; correct or remove this line", line) from None


class VerlJsonLinesParser(JsonLinesParser):
    """Rows ``{"step": N, "data": {...}}``."""

    def _row(self, entry: dict[str, object], line: int) -> Iterator[Row]:
        data = entry.get("data")
        if "step" not in entry or not isinstance(data, dict):
            self.skips.add("a row without step and data", line)
            return
        step = self._step(entry["step"], line)
        yield Row(step, metrics_of(data, self.skips, line), line)


class FlatJsonLinesParser(JsonLinesParser):
    """Rows ``{"step": N, name: value, ...}``."""

    def _row(self, entry: dict[str, object], line: int) -> Iterator[Row]:
        if SUMMARY in entry:
            self.skips.add("the trainer's summary row at the end", line)
            return
        field = next((name for name in STEP_FIELDS if name in entry), None)
        if field is None:
            self.skips.add(f"a row without a step (looked for {', '.join(STEP_FIELDS)})", line)
            return
        if field == "step" and isinstance(entry.get("data"), dict):
            self.skips.add("a row of verl's file logger", line)
            return
        step = self._step(entry.pop(field), line)
        metrics = metrics_of(entry, self.skips, line)
        if metrics:
            yield Row(step, metrics, line)


class VerlJsonLines(LineImporter):
    """The file that verl's ``trainer.logger=["file"]`` writes."""

    name: ClassVar[str] = "verl-jsonl"
    expects: ClassVar[str] = 'JSON line {"step": N, "data": {...}}'
    source: ClassVar[str] = "verl"
    weight: ClassVar[float] = 0.95
    marks: ClassVar[tuple[bytes, ...]] = (b'"data"',)
    parser: ClassVar[type[LineParser]] = VerlJsonLinesParser


class FlatJsonLines(LineImporter):
    """JSON lines with a step and metrics side by side."""

    name: ClassVar[str] = "jsonl"
    expects: ClassVar[str] = 'JSON line {"step": N, "name": value, ...}'
    marks: ClassVar[tuple[bytes, ...]] = (b"{",)
    parser: ClassVar[type[LineParser]] = FlatJsonLinesParser
