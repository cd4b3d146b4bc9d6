"""The ``run-ID.wandb`` file of a wandb run (``wandb/offline-run-.../``, and ``wandb/run-.../`` of online ones).

wandb writes every row to it while the run lives, whether it also sends it or not. Fields by number as in wandb's
``wandb_internal.proto``; older files write values as JSON, newer ones may write them as numbers. JSON of wandb has
NaN and the infinities as such. "Lines" are numbers of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from rlwatch.importers.base import StreamImporter, Verdict
from rlwatch.importers.bounds import LONGEST_NAME, parsed
from rlwatch.importers.frames import WANDB, LevelDbLog
from rlwatch.importers.protowire import fields, floating, message, signed, text, zigzag
from rlwatch.importers.reading import Reading, Row, StreamReading
from rlwatch.importers.wandb_steps import OWN, WandbSteps

_HISTORY, _METRIC = 2, 12
_NO_NUMBER = object()


class WandbIntake:
    """Takes one ``.wandb`` file in."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._frames = LevelDbLog()
        self._steps = WandbSteps(reading.skips)
        self._count = 0

    def feed(self, data: bytes) -> Iterator[Row]:
        """Rows that ``data`` completes."""
        for frame in self._frames.feed(data):
            self._reading.recognised = True
            try:
                row = self._record(frame)
            except ValueError as error:
                self._reading.skips.add(f"a record that cannot be read ({error})", self._count)
                continue
            if row is not None:
                yield row
        if self._frames.damage:
            self._reading.skips.add(self._frames.damage, self._count)
            self._frames.damage = ""

    def finish(self) -> Iterator[Row]:
        """Nothing is held back."""
        return iter(())

    def cut(self) -> Iterator[Row]:
        """Nothing is held back."""
        return iter(())

    def _record(self, frame: bytes) -> Row | None:
        for number, value in fields(frame):
            if number == _HISTORY:
                self._count += 1
                return self._steps.row(_history(message(value)), self._count)
            if number == _METRIC:
                self._steps.define(next((text(axis) for at, axis in fields(message(value)) if at == 4), ""))
        return None


def _history(record: bytes) -> Mapping[str, object]:
    """The values of a row by name; what belongs to a histogram, an image or a table is left out."""
    items: dict[str, object] = {}
    for number, value in fields(record):
        if number == 1:
            name, found = _item(message(value))
            items[name] = found
        elif number == 2:
            own = next((signed(step) for at, step in fields(message(value)) if at == 1), 0)
            items.setdefault(OWN, own)
    media = {name.removesuffix("._type") for name in items if name.endswith("._type")}
    return {
        name: value
        for name, value in items.items()
        if value is not _NO_NUMBER and not (media and any(part in media for part in _parents(name)))
    }


def _parents(name: str) -> Iterator[str]:
    """What ``name`` may be a part of: of ``a.b.c`` ``a`` and ``a.b``."""
    at = name.find(".", 0, LONGEST_NAME)
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1, LONGEST_NAME)


def _item(item: bytes) -> tuple[str, object]:
    name, nested, found = "", list[str](), None
    for number, value in fields(item):
        if number == 1:
            name = text(value)
        elif number == 2:
            nested.append(text(value))
        elif number in (8, 16):
            found = _json(text(value))
        elif number == 6:
            found = floating(value)
        elif number == 5:
            found = zigzag(value)
        elif number in (4, 7):
            found = _NO_NUMBER
    return name or ".".join(nested), found


def _json(text: str) -> object:
    try:
        value = parsed(text)
    except ValueError:
        return _NO_NUMBER
    return _NO_NUMBER if isinstance(value, dict | list | bool) else value


class WandbReading(StreamReading):
    """Of a ``.wandb`` file."""

    def intake(self) -> WandbIntake:
        """Takes one file in."""
        return WandbIntake(self)


class WandbOffline(StreamImporter):
    """A ``.wandb`` file."""

    name: ClassVar[str] = "wandb"
    expects: ClassVar[str] = "wandb run file (run-ID.wandb)"
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> Verdict:  # noqa: ARG002
        """Sure by the mark that every such file begins with."""
        if head.startswith(WANDB):
            return Verdict(0.99, "found the mark of a wandb file")
        return Verdict(0.0, f"no {self.expects}")

    def reading(self, path: str) -> WandbReading:
        """A fresh reading."""
        return WandbReading(path)
