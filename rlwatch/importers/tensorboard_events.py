"""Reading of TensorBoard's event files: scalars of ``SummaryWriter`` and of the loggers of Hugging Face, verl and
OpenRLHF.

An event holds one scalar, so consecutive events of one step are a row. A row ends where the next step begins, and after
the first value that is not finite, so that an alarm need not wait for the next step. Values have the precision with
which they were written (``float`` mostly). Lines are numbers of events.

A directory holds one file for each start of a trainer, in the order of their names, which begin with the time. A file
that continues where an earlier one had been (a checkpoint was loaded) belongs to the same run, and so does a file of
other metrics (a second writer). A file that begins at the first steps again, with metrics that the run has, is
**another training**: a run called ``<directory>#2``, and so on.

Fields by number as in tensorboard/compat/proto: event.proto, summary.proto, tensor.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

from rlwatch.importers.base import FormatMatch, ImportedRow, LogReading, StreamImporter, StreamReading
from rlwatch.importers.binary_records import TfRecords, fields, floating, message, signed, text
from rlwatch.importers.lines import LARGEST_STEP, MOST_NAMES, shown
from rlwatch.importers.scalar_rows import ScalarRows

SCALARS = "scalars"
_VERSION = b"brain.Event:"
_TENSORS = {1: "<f", 2: "<d", 3: "<i", 9: "<q", 19: "<e"}
"""DataType of a tensor -> format of one packed element."""


def is_event_file(path: Path) -> bool:
    """Return True if ``path`` has the name of an event file, and is not a file of the profiler, which holds no
    scalar.
    """
    return "tfevents" in path.name and not path.name.endswith(".profile-empty")


def event_files(directory: Path) -> list[Path]:
    """Return the event files in ``directory``, in the order of their names."""
    return sorted(path for path in directory.iterdir() if is_event_file(path) and path.is_file())


class EventIntake:
    """Parser of one TensorBoard event file."""

    def __init__(self, reading: LogReading) -> None:
        self._reading = reading
        self._frames = TfRecords()
        self._count = 0
        self._plugins: dict[str, str] = {}
        self._rows = ScalarRows()

    def feed(self, data: bytes) -> Iterator[ImportedRow]:
        """Yield the rows of the steps that are complete after the next bytes ``data``."""
        for frame in self._frames.feed(data):
            self._count += 1
            try:
                step, ts, scalars = self._event(frame)
            except ValueError as error:
                self._reading.skips.add(f"an event that cannot be read ({error})", self._count)
                continue
            for name, value in scalars:
                yield from self._scalar(step, ts, name, value)
        if self._frames.damage:
            self._reading.skips.add(self._frames.damage, self._count + 1)
            self._frames.damage = ""

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the row of the last step."""
        yield from self._rows.finish()

    def cut(self) -> Iterator[ImportedRow]:
        """Yield the row of the last step of a file that was replaced."""
        return self.finish()

    def _scalar(self, step: int, ts: float, name: str, value: float) -> Iterator[ImportedRow]:
        if step < 0 or step >= LARGEST_STEP:
            self._reading.skips.add("a step below 0" if step < 0 else "a step of 2**53 or more", self._count)
            return
        yield from self._rows.add(step, name, value, ts=ts, line=self._count)

    def _event(self, frame: bytes) -> tuple[int, float, list[tuple[str, float]]]:
        step, ts = 0, 0.0
        scalars: list[tuple[str, float]] = []
        for number, value in fields(frame):
            if number == 1:
                ts = floating(value)
            elif number == 2:
                step = signed(value)
            elif number == 3:
                self._reading.recognised = True
            elif number == 5:
                scalars += [found for at, entry in fields(message(value)) if at == 1 and (found := self._value(entry))]
        return step, ts, scalars

    def _value(self, entry: int | bytes) -> tuple[str, float] | None:
        """Return tag and number of a ``Summary.Value``; only the first of a tag names the plugin that shows it."""
        tag, number, kind = "", None, ""
        for at, value in fields(message(entry)):
            if at == 1:
                tag = text(value)
            elif at == 2:
                number = floating(value)
            elif at == 8:
                number = _tensor(message(value))
            elif at == 9:
                kind = _plugin(message(value))
        kind = self._plugins.setdefault(tag, kind) if len(self._plugins) < MOST_NAMES else self._plugins.get(tag, kind)
        if number is None or kind not in ("", SCALARS):
            self._reading.skips.add(f"{shown(tag)} is not a scalar", self._count)
            return None
        return tag, number


def _plugin(metadata: bytes) -> str:
    for at, value in fields(metadata):
        if at == 1:
            return next((text(name) for number, name in fields(message(value)) if number == 1), "")
    return ""


def _tensor(tensor: bytes) -> float | None:
    """Return the number in a tensor of one element; None for any other tensor."""
    kind, found = 0, list[float]()
    for at, value in fields(tensor):
        if at == 1:
            kind = signed(value)
        elif at == 4 and (packed := _TENSORS.get(kind)):
            content = message(value)
            size = struct.calcsize(packed)
            enough = content[: min(len(content) // size, 2) * size]
            found += [float(one) for (one,) in struct.iter_unpack(packed, enough)]
        elif at in (5, 6):  # float_val, double_val: packed or not
            content, size = message(value), 4 if at == 5 else 8
            found += [floating(content[start : start + size]) for start in range(0, len(content), size)[:2]]
        if len(found) > 1:
            return None
    return found[0] if found else None


class Training:
    """The first step and the metric names of one training in a directory, from the event files read so far."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.names: set[str] = set()

    def is_another(self, row: ImportedRow) -> bool:
        """Return True if an event file whose first row is ``row`` repeats steps of this training, and so begins another
        one.
        """
        return self.first is not None and row.step <= self.first and not self.names.isdisjoint(row.metrics)

    def add(self, row: ImportedRow) -> None:
        """Add the step and the metric names of ``row`` to this training."""
        self.first = row.step if self.first is None else min(self.first, row.step)
        self.names.update(row.metrics)


def trainings_until(directory: Path, file: str) -> tuple[int, Training]:
    """Return the number of the training to which the event file ``file`` belongs, and that training.

    Only the first row of each file in ``directory`` is read.
    """
    training, number = Training(), 1
    for path in event_files(directory):
        if path.name > file:
            break
        first = next(EventReading(str(path)).rows(path), None)
        if first is not None:
            if training.is_another(first):
                training, number = Training(), number + 1
            training.add(first)
    return number, training


def called(name: str, number: int) -> str:
    """Return the name of the run for the ``number``-th training of the directory ``name``.

    >>> called("seed3", 1), called("seed3", 2)
    ('seed3', 'seed3#2')
    """
    return name if number == 1 else f"{name}#{number}"


class EventReading(StreamReading):
    """Reader of one event file, or of a directory of event files."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._trainings = self._empty = 0

    def intake(self) -> EventIntake:
        """Return a new parser for the bytes of one file."""
        return EventIntake(self)

    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Yield every row of the file, or of all event files of the directory one after another, with the name of its
        training.
        """
        if not path.is_dir():
            yield from super().rows(path)
            return
        training, self._trainings = Training(), 1
        for file in event_files(path):
            rows = super().rows(file)
            first = next(rows, None)
            if first is None:
                self._empty += 1
                continue
            if training.is_another(first):
                training = Training()
                self._trainings += 1
            first = replace(first, starts=True)
            name = called(path.resolve().name or "run", self._trainings) if self._trainings > 1 else ""
            for row in chain((first,), rows):
                training.add(row)
                yield replace(row, run=name) if name else row

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on the number of trainings, and on files without scalars."""
        several = f"the event files of this directory are of {self._trainings} trainings, read as a run each"
        empty = f"{self._empty} event file{'s' if self._empty > 1 else ''} without a scalar"
        return tuple(note for note, of_use in ((several, self._trainings > 1), (empty, self._empty)) if of_use)


class TensorBoardEvents(StreamImporter):
    """Importer of a TensorBoard event file, or of a directory of event files."""

    name: ClassVar[str] = "tensorboard"
    expects: ClassVar[str] = "TensorBoard event file (events.out.tfevents...)"
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> FormatMatch:
        """Return a high confidence if ``head`` has the version with which every event file begins, and for the usual
        name of such a file.
        """
        if _VERSION in head[:64]:
            return FormatMatch(0.99, "found the version of an event file")
        if is_event_file(path):
            return FormatMatch(0.97, "called as event files are")
        return FormatMatch(0.0, f"no {self.expects}")

    def reading(self, path: str) -> EventReading:
        """Return a new reader of the file or directory ``path``."""
        return EventReading(path)
