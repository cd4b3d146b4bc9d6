"""Reading of SwanLab runs on disk: ``run-ID.swanlab`` (from 0.8 on) or ``backup.swanlab`` (before) in
``swanlog/run-.../``.

Both are logs in LevelDB's format, as wandb's. Their records are Protocol Buffers, with fields by number as in SwanLab's
``record.proto`` and ``data.proto``, or JSON ``{"model_type": "Scalar", "data": {...}}``. A record holds one scalar;
consecutive scalars of one step are a row. NaN and the infinities are doubles in the newer format, and words in the
older one. "Lines" are numbers of scalars. SwanLab's measurements of the machine (``__swanlab__...``) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rlwatch.importers.base import FormatMatch, ImportedRow, StreamImporter, StreamReading, step_of, value_of
from rlwatch.importers.binary_records import LevelDbLog, fields, floating, message, signed, text
from rlwatch.importers.lines import parsed, shown
from rlwatch.importers.scalar_rows import ScalarRows

_MARK = b":SWL"
_SCALAR, _KEY, _STEP, _TIME, _VALUE = 13, 1, 2, 4, 5
_INFINITE = "INF"
"""Word for both infinities in the older format."""
_OF_THE_MACHINE = "__swanlab__"


class Scalar(NamedTuple):
    """One value of a run: metric name, step, number (None if it is none), and Unix time in seconds."""

    name: str
    step: int
    value: float | None
    at: float


class SwanLabIntake:
    """Parser of one ``.swanlab`` file."""

    def __init__(self, reading: StreamReading) -> None:
        self._reading = reading
        self._frames = LevelDbLog()
        self._rows = ScalarRows()
        self._count = 0

    def feed(self, data: bytes) -> Iterator[ImportedRow]:
        """Yield the rows that are complete after the next bytes ``data``."""
        for frame in self._frames.feed(data):
            self._reading.recognised = True
            try:
                scalar = _of_json(frame) if frame.startswith(b"{") else _of_fields(frame)
            except (ValueError, KeyError, TypeError) as error:
                self._reading.skips.add(f"a record that cannot be read ({error})", self._count)
                continue
            if scalar is not None and not scalar.name.startswith(_OF_THE_MACHINE):
                yield from self._taken(scalar)
        if self._frames.damage:
            self._reading.skips.add(self._frames.damage, self._count)
            self._frames.damage = ""

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the row of the last step, at the end of the file."""
        yield from self._rows.finish()

    def cut(self) -> Iterator[ImportedRow]:
        """Yield the row of the last step of a file that was replaced."""
        yield from self.finish()

    def _taken(self, scalar: Scalar) -> Iterator[ImportedRow]:
        self._count += 1
        if scalar.value is None:
            self._reading.skips.add(f"{shown(scalar.name)} is not a number", self._count)
        else:
            yield from self._rows.add(scalar.step, scalar.name, scalar.value, ts=scalar.at, line=self._count)


def _of_fields(frame: bytes) -> Scalar | None:
    scalar = next((message(value) for number, value in fields(frame) if number == _SCALAR), None)
    if scalar is None:
        return None
    found = dict(fields(scalar))
    seconds = dict(fields(message(found.get(_TIME, b""))))
    at = signed(seconds.get(1, 0)) + signed(seconds.get(2, 0)) / 1e9
    value = dict(fields(message(found.get(_VALUE, b""))))
    # a double of 0.0 and a step of 0 are left out, as Protocol Buffers leave out what is 0
    number = floating(value[1]) if 1 in value else 0.0
    return Scalar(text(found[_KEY]), step_of(signed(found.get(_STEP, 0))), number, at)


def _of_json(frame: bytes) -> Scalar | None:
    record: Any = parsed(frame.decode("utf-8", "replace"))
    if record.get("model_type") != "Scalar":
        return None
    data = record["data"]
    metric = data["metric"]
    at = datetime.fromisoformat(metric["create_time"]).timestamp()
    written = metric["data"]
    value = math.inf if written == _INFINITE else value_of(written)
    return Scalar(str(data["key"]), step_of(data["step"]), value, at)


class SwanLabReading(StreamReading):
    """Reader of a ``.swanlab`` file."""

    def intake(self) -> SwanLabIntake:
        """Return a new parser for the bytes of one file."""
        return SwanLabIntake(self)


class SwanLabRun(StreamImporter):
    """Importer of a ``.swanlab`` file, which SwanLab writes for each run."""

    name: ClassVar[str] = "swanlab"
    expects: ClassVar[str] = "SwanLab run file (.swanlab)"
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> FormatMatch:  # noqa: ARG002
        """Return a high confidence if ``head`` begins with the bytes of every ``.swanlab`` file, else 0."""
        found = head.startswith(_MARK)
        return FormatMatch(0.99 if found else 0.0, f"{'found the mark of a' if found else 'no'} {self.expects}")

    def reading(self, path: str) -> SwanLabReading:
        """Return a new reader of the file at ``path``."""
        return SwanLabReading(path)
