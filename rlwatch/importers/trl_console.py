"""Reading of the console output of HF's Trainer, and so of TRL: ``{'loss': 0.01, 'grad_norm': 2.6, ..., 'epoch':
0.1}``.

Values are floats or, since transformers 5, strings of 4 digits. Rows are joined to progress bars, lose their leading
brace when copied, and the last may be cut off (then its last value is left out). ``nan`` and ``inf`` are values.
``None`` is TRL's mean of only NaN and reads as NaN. In a row without an epoch, which no HF trainer printed, it may mean
"not measured" (:mod:`~rlwatch.importers.own_rows`). Rows of ms-swift hold their step (``'global_step/max_steps':
'5/3766'``). Most other rows do not: see :mod:`~rlwatch.importers.console`.

A row that a terminal or a document wrapped is joined, as long as each line continues where the one before was cut off.

Identical rows that several ranks print count once.

If ``epoch`` falls, or rows follow the trainer's summary, the training was restarted, and its steps begin again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Generic, TypeVar

from rlwatch.importers.base import ImportedRow, LineImporter, LineParser, metrics_of, number, step_of
from rlwatch.importers.console import Bar, DictRow, StepClock, bars, dict_rows
from rlwatch.importers.json_logs import SUMMARY
from rlwatch.importers.lines import TextLine, without_prefix
from rlwatch.importers.own_rows import OwnRows
from rlwatch.importers.step_order import COPY
from rlwatch.metrics import known

# Identical rows that several ranks print: if rows are numbered by counting, each copy would be a step of its own.
#
# A single row does not show whether it is a copy or whether nothing changed in the training. So the first two
# different rows decide: if both are printed equally often, with other measurements in the second, several ranks
# print, and from then on each group of that many equal rows counts once.


T = TypeVar("T")
MOST_RANKS = 16
"""Number of equal rows at the beginning after which no more are held back."""
_NO_MEASUREMENTS = frozenset({"epoch", "learning_rate", "lr", "num_tokens"})
"""Fields that change, rounded, even in a training in which no measurement changes."""


class Copies(Generic[T]):
    """Filter that removes rows which several ranks print identically.

    It receives rows and other output in order.

    Parameters
    ----------
    left_out
        Called with each copy that is removed.
    """

    def __init__(self, left_out: Callable[[T], object]) -> None:
        self._left_out = left_out
        self._times = 0
        """Number of times that each row is printed; 0 while unknown."""
        self._first = 0
        self._row: Mapping[str, str] | None = None
        self._count = 0
        self._held: list[tuple[bool, T]] = []
        """Held output, each with True if it is a copy in case several ranks print."""

    def other(self, thing: T) -> list[T]:
        """Add ``thing``, output that is no row; return the output, in order, of which it is known now that it is no
        copy.
        """
        if not self._held:
            return [thing]
        self._held.append((False, thing))
        return []

    def row(self, items: Mapping[str, str], thing: T) -> list[T]:
        """Add ``thing``, a row with these ``items``; return the output, in order, of which it is known now that it is
        no copy.
        """
        again = items == self._row
        before, self._row = self._row, items
        if self._times:
            again = again and self._count < self._times
            self._count = self._count + 1 if again else 1
            if again:
                self._left_out(thing)
            return [] if again else [thing]
        self._count += 1
        if again:
            self._held.append((True, thing))
            too_many = self._count > (self._first or MOST_RANKS)
            return self._settled(1) if too_many else []
        if self._first:
            return self._settled(self._first if self._count - 1 == self._first else 1, thing)
        if self._count == 1:
            return [thing]
        self._first, self._count = self._count - 1, 1
        if self._first > 1 and before is not None and _differs(items, before):
            self._held.append((False, thing))
            return []
        return self._settled(1, thing)

    def _settled(self, times: int, *things: T) -> list[T]:
        """Return the held output, then ``things``; each row is known to be printed ``times`` times."""
        held, self._held, self._times, self._count = self._held, [], times, 1
        for copy, thing in held:
            if copy and times > 1:
                self._left_out(thing)
        return [thing for copy, thing in held if not copy or times == 1] + list(things)

    def finish(self) -> list[T]:
        """Return the output that is still held back at the end of the log, without copies."""
        if not self._held:
            return []
        return self._settled(self._first if self._count == self._first else 1)


def _differs(row: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return True if a measurement differs."""
    return any(row.get(name) != value for name, value in other.items() if name not in _NO_MEASUREMENTS)


# Console output of HF's Trainer, and so of TRL: ``{'loss': 0.01, 'grad_norm': 2.6, ..., 'epoch': 0.1}``.


_STEP_FIELDS = ("global_step/max_steps", "global_step", "step")
_MARKS = frozenset({"loss", "grad_norm", "learning_rate", "lr", "epoch", "eval_loss", SUMMARY, *_STEP_FIELDS})
_SETTINGS = frozenset({"optim/lr", "policy/kl_coef", "policy/vocab_size"})
_PACE = re.compile(r"logging_steps['\"]?\s*[:=]\s*(\d{1,15})(?![\d.])")
_OPENRLHF = re.compile(r"Global step \d+:")
_EVAL = "eval_"
_STEP_NAMED = frozenset(_STEP_FIELDS)
_CODE = re.compile(r"(?:\breturn|[=(,\[])\s*\{?\s*$")
"""Text before a dict in source code."""
NEAR = 80
"""Number of characters before a dict that are searched for ``_CODE``, because a line may hold a thousand dicts."""
LEAST_ROWS = 3
"""Number of different rows without step and epoch after which dicts count as a trainer's rows."""
LONGEST_ROW = 100_000
"""Largest number of characters in a row that is joined from wrapped lines."""


class TrlConsoleParser(LineParser):
    """Parser of HF's and TRL's console output, which receives rows and progress bars in the order in which they were
    printed.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._clock: StepClock[tuple[Mapping[str, float], int]] = StepClock()
        self._directly = False  # nothing was printed since the last row
        self._stated = False
        self._epoch = 0.0  # of the last row that trains
        self._ended = False  # by a summary
        self._own = OwnRows()
        self._rows = 0
        """Number of rows with a step or an epoch."""
        self._different: set[tuple[str, ...]] = set()
        """Values of the rows without step and epoch."""
        self._copies: Copies[tuple[Bar | DictRow, Bar | None, int]] = Copies(lambda row: self.skips.add(COPY, row[2]))
        self._held: tuple[str, DictRow, Bar | None, int] | None = None
        """A row that was cut off, with its text: the next line may continue it."""

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the rows whose step is known after the line ``segment``."""
        text = segment.text
        if "logging_steps" in text and self._clock.pace is None and (match := _PACE.search(text)):
            self._clock.pace = int(match.group(1)) or None
        text, line, bar_before = without_prefix(text), segment.line, None
        if self._held is not None:
            held, row, bar, begun = self._held
            self._held = None
            if _goes_on(held, row, text):
                text, line, bar_before = held + text, begun, bar
            else:
                yield from self._offered(row, bar, begun)
        yield from self._printed(text, line, bar_before)

    def _printed(self, text: str, line: int, bar: Bar | None) -> Iterator[ImportedRow]:
        found = self._found(text)
        for thing in found:
            if isinstance(thing, Bar):
                bar = thing
                yield from self._read(self._copies.other((thing, None, line)))
            elif thing.cut and thing is found[-1] and len(text) < LONGEST_ROW:
                self._held = (text[thing.start :], replace(thing, start=0), bar, line)
            else:
                yield from self._offered(thing, bar, line)
        if not found:
            self._directly = False

    def _offered(self, row: DictRow, bar: Bar | None, line: int) -> Iterator[ImportedRow]:
        """Yield the rows that a printed dict settles, unless it is a copy."""
        if SUMMARY in row.items:
            yield from self._read(self._copies.finish())
            yield from self._dict(row, bar, line)
            return
        yield from self._read(self._copies.row(row.items, (row, bar, line)))

    def _read(self, things: list[tuple[Bar | DictRow, Bar | None, int]]) -> Iterator[ImportedRow]:
        for thing, bar, line in things:
            if isinstance(thing, Bar):
                yield from self._settled(self._clock.bar(thing.n, thing.total, directly=self._directly))
                self._directly = False
            else:
                yield from self._dict(thing, bar, line)

    def _found(self, text: str) -> list[Bar | DictRow]:
        """Return the trainer's bars and rows in ``text``, left to right."""
        found: list[Bar | DictRow] = [bar for bar in bars(text) if bar.may_count_steps] if "%|" in text else []
        if ("'" in text or '"' in text) and ":" in text and not _OPENRLHF.search(text):
            rows = (row for row in dict_rows(text) if not _CODE.search(text[max(row.start - NEAR, 0) : row.start]))
            found += [row for row in rows if _is_trainers(row.items)]
            found.sort(key=lambda thing: thing.start)
        return found

    def _dict(self, row: DictRow, bar: Bar | None, line: int) -> Iterator[ImportedRow]:
        if not self._is_usual(row.items):
            self.skips.add("a printed dict that is no row of this trainer", line)
            return
        if row.cut:
            self.skips.add("the last value of a row that is cut off", line)
        if SUMMARY in row.items:
            self.skips.add("the trainer's summary row at the end", line)
            yield from self._settled(self._clock.flush())
            self._ended = True
            return
        items = dict(row.items)
        field = next((name for name in _STEP_FIELDS if name in items), None)
        if field is not None:
            yield from self._with_step(items, field, line)
            return
        metrics = self._metrics(items, line)
        trains = not any(name.startswith(_EVAL) for name in metrics)
        if trains and (share := self._share_of_another_start(metrics)) is not None:
            yield from self._settled(self._clock.again(share))
        self._directly = trains
        bar_before = (bar.n, bar.total) if bar else (0, 0)
        yield from self._settled(self._clock.row((metrics, line), trains=trains, bar_before=bar_before))

    def _is_usual(self, items: Mapping[str, str]) -> bool:
        """Return True if the trainer printed the dict; if any row has an epoch, all rows of HF's trainer have one."""
        if "epoch" in items or SUMMARY in items or not _STEP_NAMED.isdisjoint(items):
            self.recognised = True
            self._rows += 1
            return True
        if self._rows >= LEAST_ROWS:
            return any(name.startswith(_EVAL) for name in items)
        self._different.add(tuple(items.values()))
        self.recognised = self.recognised or len(self._different) >= LEAST_ROWS
        return True

    def _with_step(self, items: dict[str, str], field: str, line: int) -> Iterator[ImportedRow]:
        try:
            step = step_of(items.pop(field))
        except ValueError as error:
            self.skips.add(str(error), line)
            return
        self._stated = True
        yield from self._settled(self._clock.at(step))
        yield ImportedRow(step, self._metrics(items, line), line)

    def _metrics(self, items: dict[str, str], line: int) -> dict[str, float]:
        if "epoch" in items:
            return metrics_of(items, self.skips, line)
        return metrics_of(self._own.read(self._clock.last, items, self.skips, line), self.skips, line)

    def _share_of_another_start(self, metrics: Mapping[str, float]) -> float | None:
        """Return the epoch over that of the row before, if the training restarted; None if it did not."""
        epoch, before = metrics.get("epoch", math.nan), self._epoch
        ended, self._ended = self._ended, False
        self._epoch = epoch if math.isfinite(epoch) else before
        if not ended and not epoch < before:
            return None
        return epoch / before if 0 <= epoch < before else 0.0

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the rows that still wait for the rest of their text, or for the progress bar that shows their step."""
        if self._held is not None:
            _, row, bar, line = self._held
            self._held = None
            yield from self._offered(row, bar, line)
        yield from self._read(self._copies.finish())
        yield from self._settled(self._clock.flush())

    def _settled(self, rows: list[tuple[tuple[Mapping[str, float], int], int]]) -> Iterator[ImportedRow]:
        for (metrics, line), step in rows:
            yield ImportedRow(step, metrics, line)

    def notes(self) -> tuple[str, ...]:
        """Return a note for the user on where the steps of the rows came from."""
        pace = self._clock.pace or 1
        if self._clock.counted:
            numbers = f"{pace}, {2 * pace}, {3 * pace}..."
            return (f"no progress bar shows the steps of some rows: they are numbered on ({numbers})",)
        if self._stated:
            return ()
        every = "step" if pace == 1 else f"{pace} steps"
        return (f"steps are read from the progress bars (one row every {every})",)


def _goes_on(held: str, row: DictRow, text: str) -> bool:
    """Return True if ``text`` continues ``row``, which was cut off at the end of ``held``."""
    joined = dict_rows(held + text)
    return bool(joined) and joined[0].start == 0 and len(joined[0].items) > len(row.items)


def _is_trainers(items: Mapping[str, str]) -> bool:
    """Return True if a printed dict is a row of metrics, not settings or a reward function's debug output."""
    numeric = [name for name, text in items.items() if number(text) is not None or text in {"None", "null"}]
    if SUMMARY in items:
        return True
    if len(numeric) < 2 or _MARKS.isdisjoint(items):
        return False
    return _are_metrics(tuple(numeric)) or list(items)[-1] == "epoch"


@lru_cache(maxsize=1024)
def _are_metrics(names: tuple[str, ...]) -> bool:
    """Return True if any name is that of a known metric, not of a setting."""
    return bool(known(name.removeprefix(_EVAL) for name in names) - _SETTINGS)


class TrlConsole(LineImporter):
    """Importer of the console output of TRL and other trainers built on HF's Trainer."""

    name: ClassVar[str] = "trl-console"
    expects: ClassVar[str] = "row {'loss': ..., 'epoch': ...} of HF's Trainer"
    source: ClassVar[str] = "trl"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"'", b'"')
    weight: ClassVar[float] = 0.8
    parser: ClassVar[type[LineParser]] = TrlConsoleParser
