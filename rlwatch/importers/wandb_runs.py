"""Reading of wandb runs from a ``.wandb`` file or from a server, with the same rules for the step of a row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rlwatch.clock import Clock, SystemClock
from rlwatch.error_boundary import call_or
from rlwatch.errors import ImportFormatError
from rlwatch.importers.assemble import RunAssembly, source_of
from rlwatch.importers.base import (
    About,
    FormatMatch,
    ImportedRow,
    Skipped,
    Skips,
    StreamImporter,
    StreamReading,
    step_of,
    value_of,
)
from rlwatch.importers.binary_records import WANDB, LevelDbLog, fields, floating, message, signed, text, zigzag
from rlwatch.importers.follow import Position
from rlwatch.importers.lines import LONGEST_NAME, parsed, shown
from rlwatch.importers.naming import NONE, Naming
from rlwatch.records import JSON, StepRecord

TRAINERS = ("train/global_step", "trainer/global_step", "training/global_step")
"""Step fields of Hugging Face, TRL and OpenRLHF, of Lightning, and of verl."""
HUGGING_FACE = TRAINERS[0]
PLAIN = "global_step"
OWN = "_step"
MOST_AXES = 50


class WandbSteps:
    """Assignment of steps to the rows of one wandb run.

    The step of a row comes from the first of these that exists: the trainer's own field, an axis that ``define_metric``
    declared, ``global_step``, the last row with one of the first two, wandb's ``_step``.
    """

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self._axes = list(TRAINERS)
        self._last: int | None = None

    def define(self, axis: str) -> None:
        """Add ``axis``, a step axis that the user declared by ``define_metric``."""
        if axis not in (*self._axes, OWN, PLAIN, "") and len(self._axes) < MOST_AXES:
            self._axes.append(axis)

    def row(self, items: Mapping[str, object], number: int) -> ImportedRow | None:
        """Return the row with its step, or None if it holds no number or no step; ``number`` counts the run's rows."""
        step = self._step(items, number)
        metrics = {
            name: value
            for name, raw in items.items()
            if not name.startswith("_") and (value := self._value(name, raw, items, number)) is not None
        }
        if step is None or not metrics:
            return None
        return ImportedRow(step, metrics, number, ts=_time(items.get("_timestamp")))

    def _value(self, name: str, raw: object, items: Mapping[str, object], number: int) -> float | None:
        """Return the value; None (not measured) counts as NaN only in rows of Hugging Face's trainers."""
        if raw is None and HUGGING_FACE not in items:
            return None
        value = value_of(raw)
        if value is None:
            self._skips.add(f"{shown(name)} is not a number", number)
        return value

    def _step(self, items: Mapping[str, object], number: int) -> int | None:
        for axis in self._axes:
            step = _whole(items.get(axis))
            if step is not None:
                self._last = step
                return step
        for candidate in (_whole(items.get(PLAIN)), self._last, _whole(items.get(OWN))):
            if candidate is not None:
                return candidate
        self._skips.add("a row without a step", number)
        return None


def _whole(value: object) -> int | None:
    if value is None:
        return None
    try:
        return step_of(value)
    except ValueError:
        return None


def _time(value: object) -> float:
    time = value_of(value)
    return time if time is not None and math.isfinite(time) and value is not None else 0.0


# The ``run-ID.wandb`` file of a wandb run (``wandb/offline-run-.../``, and ``wandb/run-.../`` of online ones).
#
# wandb writes every row to it while the run lives, whether it also sends it or not. Fields by number as in wandb's
# ``wandb_internal.proto``; older files write values as JSON, newer ones may write them as numbers. JSON of wandb has
# NaN and the infinities as such. "Lines" are numbers of rows.

_HISTORY, _CONFIG, _STATS, _METRIC, _RUN = 2, 5, 7, 12, 17
_UPDATE, _NAME, _NESTED, _JSON = 1, 1, 2, 16
_ITEM_OF_STATS, _CONFIG_OF_RUN, _TAG_OF_RUN = 3, 4, 10
_WORDS_OF_RUN: Mapping[int, str] = {3: "project", 6: "group", 7: "job_type", 8: "name", 9: "notes"}
SYSTEM = "system/"
"""Prefix that wandb's pages use for measurements of the machine."""
_NO_NUMBER = object()


class WandbIntake:
    """Parser of one ``.wandb`` file.

    wandb's measurements of the machine have no step: the next row gets the last of them.
    """

    def __init__(self, reading: WandbReading) -> None:
        self._reading = reading
        self._system: dict[str, float] = {}
        self._frames = LevelDbLog()
        self._steps = WandbSteps(reading.skips)
        self._count = 0

    def feed(self, data: bytes) -> Iterator[ImportedRow]:
        """Yield the rows that are complete after the next bytes ``data``."""
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

    def finish(self) -> Iterator[ImportedRow]:
        """Yield nothing, because no row is held back."""
        return iter(())

    def cut(self) -> Iterator[ImportedRow]:
        """Yield nothing, because no row is held back."""
        return iter(())

    def _record(self, frame: bytes) -> ImportedRow | None:
        for number, value in fields(frame):
            if number == _HISTORY:
                self._count += 1
                return self._with_system(self._steps.row(_history(message(value)), self._count))
            if number == _METRIC:
                self._steps.define(next((text(axis) for at, axis in fields(message(value)) if at == 4), ""))
            elif number == _STATS:
                measured = (
                    (SYSTEM + name, value_of(item)) for name, item in _items(message(value), _ITEM_OF_STATS).items()
                )
                self._system.update((name, number) for name, number in measured if number is not None)
            elif number == _CONFIG:
                self._reading.settings.update(_items(message(value), _UPDATE))
            elif number == _RUN:
                self._learn(message(value))
        return None

    def _learn(self, run: bytes) -> None:
        for number, value in fields(run):
            if number == _CONFIG_OF_RUN:
                self._reading.settings.update(_items(message(value), _UPDATE))
            elif number == _TAG_OF_RUN:
                self._reading.labels[text(value)] = None
            elif number in _WORDS_OF_RUN:
                self._reading.words[_WORDS_OF_RUN[number]] = text(value)

    def _with_system(self, row: ImportedRow | None) -> ImportedRow | None:
        if row is None or not self._system:
            return row
        measured, self._system = self._system, {}
        return replace(row, metrics={**measured, **row.metrics})


def _items(record: bytes, number: int) -> dict[str, JSON]:
    """Return names and values of the items of a record, in its fields ``number``; other than JSON is left out."""
    found: dict[str, JSON] = {}
    for at, value in fields(record):
        if at == number:
            item = list(fields(message(value)))
            name = ".".join(text(part) for at, part in item if at in (_NAME, _NESTED))
            encoded = next((text(part) for at, part in item if at == _JSON), "")
            with suppress(ValueError):
                found[name] = parsed(encoded)
    return found


def _history(record: bytes) -> Mapping[str, object]:
    """Return the values of a row by name, without those of histograms, images and tables."""
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
    """Yield the names that contain ``name``: ``a`` and ``a.b`` for ``a.b.c``."""
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
    """Reader of a ``.wandb`` file.

    Attributes
    ----------
    settings
        The run's configuration.
    labels
        The run's tags, in order.
    words
        The run's project, name, group, job type and notes.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.settings: dict[str, JSON] = {}
        self.labels: dict[str, None] = {}
        self.words: dict[str, str] = {}

    def config(self) -> Mapping[str, JSON]:
        """Return the last configuration of the run, with group, job type and notes, and without wandb's own entries."""
        extra = {f"wandb/{word}": self.words[word] for word in ("group", "job_type", "notes") if self.words.get(word)}
        return {name: value for name, value in self.settings.items() if name != "_wandb"} | extra

    def called(self) -> tuple[str, str]:
        """Return the run's name and project."""
        return self.words.get("name", ""), self.words.get("project", "")

    def tags(self) -> tuple[str, ...]:
        """Return the tags that the run was started with."""
        return tuple(self.labels)

    def intake(self) -> WandbIntake:
        """Return a new parser for the bytes of one file."""
        return WandbIntake(self)


class WandbOffline(StreamImporter):
    """Importer of a ``.wandb`` file, which wandb writes for each run."""

    name: ClassVar[str] = "wandb"
    expects: ClassVar[str] = "wandb run file (run-ID.wandb)"
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> FormatMatch:  # noqa: ARG002
        """Return a high confidence if ``head`` begins with the bytes of every ``.wandb`` file, else 0."""
        if head.startswith(WANDB):
            return FormatMatch(0.99, "found the mark of a wandb file")
        return FormatMatch(0.0, f"no {self.expects}")

    def reading(self, path: str) -> WandbReading:
        """Return a new reader of the file at ``path``."""
        return WandbReading(path)


# A run on a wandb server, polled through wandb's public API; needs wandb, and a key of its user.
#
# ``scan_history`` returns every row exactly (``history`` would sample). wandb sends no notice of new rows, so the
# server is polled at intervals.

T = TypeVar("T")

ASK_S = 30.0
"""Seconds between two requests to the server."""
_ADDRESS = re.compile(r"(?:wandb://|https?://[^/]+/)([^/\s]+)/([^/\s]+)/(?:runs/)?([^/?#\s]+)/?(?:[?#].*)?")


def wandb_run(address: str) -> str | None:
    """Return ``entity/project/run`` from an address of a wandb run; None if ``address`` is no such address.

    >>> wandb_run("https://wandb.ai/me/math-rl/runs/1jfgog54?nw=x"), wandb_run("wandb://me/math-rl/1jfgog54")
    ('me/math-rl/1jfgog54', 'me/math-rl/1jfgog54')
    """
    match = _ADDRESS.fullmatch(address)
    return "/".join(match.groups()) if match else None


class WandbTail:
    """Reader of the records of a run on a wandb server as they arrive, with the interface of
    :class:`~rlwatch.importers.LogTail`.

    Parameters
    ----------
    run
        ``entity/project/run``.
    api
        Returns a ``wandb.Api``; by default that of the installed wandb.
    clock
        Clock for the time between requests; by default the system's.
    naming
        Metrics that the user assigned to unknown names.

    Raises
    ------
    ImportFormatError
        If wandb is not installed or has no key. Errors of the network are reported in ``problem``.
    """

    def __init__(
        self,
        run: str,
        *,
        api: Callable[[], Any] | None = None,
        clock: Clock | None = None,
        naming: Naming = NONE,
    ) -> None:
        self.run, self.name = run, run.rpartition("/")[2]
        self.format = "wandb-api"
        self.behind = self.turned = False
        self.training = 1
        self.problem = ""
        self.modified = 0.0
        self._clock = clock or SystemClock()
        self._skips = Skips()
        self._steps = WandbSteps(self._skips)
        self._assembly = RunAssembly(run, naming=naming)
        self._next = self._count = 0
        self._ask_at = 0.0
        self._rows: Iterator[Mapping[str, object]] | None = None
        self._api = (api or _public_api)()

    @property
    def source(self) -> str:
        """Return the trainer that the metric names identify; empty if unknown."""
        return source_of(self._assembly.names)

    @property
    def about(self) -> About:
        """Return the project, which the run's address contains."""
        return About(project=self.run.split("/")[1])

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Return counts of unusable values."""
        return self._skips.listed()

    @property
    def position(self) -> Position | None:
        """Return None: every row is requested again, and the store skips those it has."""
        return None

    @property
    def read(self) -> tuple[int, int]:
        """Return (0, 0), because the amount of data is unknown."""
        return 0, 0

    def poll(self, most: int | None = None) -> list[StepRecord]:
        """Return the records of new rows, at most about ``most``. Sends a request at most every 30 s."""
        records: list[StepRecord] = []
        if self._rows is None and self._clock.monotonic() < self._ask_at:
            return records
        self.problem = ""
        try:
            _answered(partial(self._read_into, records, most))
        except _UnansweredError as why:
            self._rows = None
            self.problem = f"wandb does not answer for {self.run}: {why}"
        self.behind = self._rows is not None
        self._ask_at = self._clock.monotonic() + ASK_S
        return records

    def close(self) -> list[StepRecord]:
        """Return the records that were held back until a later row shows whether they belong to the run."""
        return self._assembly.finish(self._skips)

    def release(self) -> None:
        """Do nothing, because no connection stays open."""

    def _read_into(self, records: list[StepRecord], most: int | None) -> None:
        self._rows = self._rows or self._new_rows()
        for items in self._rows:
            records += self._records(items)
            if most is not None and len(records) >= most:
                return
        self._rows = None

    def _new_rows(self) -> Iterator[Mapping[str, object]]:
        rows: Iterable[Mapping[str, object]] = self._api.run(self.run).scan_history(min_step=self._next)
        return iter(rows)

    def _records(self, items: Mapping[str, object]) -> list[StepRecord]:
        self._count += 1
        if items.get(OWN) is not None:
            self._next = max(self._next, step_of(items[OWN]) + 1)
        row = self._steps.row({name: value for name, value in items.items() if _scalar(value)}, self._count)
        return [] if row is None else self._assembly.take(row, self._skips)


def _scalar(value: object) -> bool:
    return not isinstance(value, dict | list)


def _public_api() -> Any:
    try:
        import wandb
    except ImportError:
        raise ImportFormatError("wandb", "a run on a server needs wandb: pip install wandb") from None
    try:
        return _answered(partial(wandb.Api, timeout=20))
    except _UnansweredError as why:
        problem = f"wandb does not let us in ({why}); set WANDB_API_KEY or `wandb login`"
        raise ImportFormatError("wandb", problem) from None


class _UnansweredError(Exception):
    """Reason why wandb did not answer, in one line."""


def _answered(question: Callable[[], T]) -> T:
    """Call wandb; turn any error into ``_UnansweredError``.

    The errors of wandb and of its network libraries share no base class, and change with its version.
    """

    def unanswered(error: Exception) -> T:
        raise _UnansweredError(" ".join(str(error).split())[:200]) from None

    return call_or(question, unanswered)
