"""Parsing of console output: printed dicts of metrics, tqdm's progress bars, and the steps that bars show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

_START = re.compile(r"""\{\s*(?=['"][^'"{}]+['"]\s*:)""")
_LOST_BRACE = re.compile(r"""\s*(?=['"][^'"{}]+['"]\s*:)""")
_PAIR = re.compile(
    r"""\s*(['"])(?P<key>[^'"{}]+)\1\s*:\s*(?P<value>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"
    |[A-Za-z_][\w.]*\([^()]*\)|\[[^\]]*\]|\([^)]*\)|\{[^{}]*\}|[^,{}\[\]()'"\s]+)\s*(?P<end>,|\}|$)""",
    re.VERBOSE,
)


MOST_BROKEN = 50
"""Largest number of dicts without an end in one line, each of which may be searched to the end of the line."""


@dataclass(frozen=True, slots=True)
class DictRow:
    """A printed dict: its items as text (strings without quotes), its start and end in the line, and whether it was cut
    off.
    """

    items: dict[str, str]
    start: int
    end: int
    cut: bool


def dict_rows(text: str) -> list[DictRow]:
    """Return the dicts printed in ``text``, left to right, also a first one without its leading brace."""
    rows: list[DictRow] = []
    lost = _LOST_BRACE.match(text)
    at = lost.end() if lost else _next_start(text, 0)
    broken = 0
    while at is not None and broken < MOST_BROKEN:
        row = _read(text, at)
        if row.items:
            rows.append(row)
        broken += row.cut
        at = _next_start(text, max(row.end, at))
    return rows


def _next_start(text: str, at: int) -> int | None:
    match = _START.search(text, at)
    return match.end() if match else None


def _read(text: str, start: int) -> DictRow:
    """Return the dict whose first key is at ``start``.

    A value at the very end of the text may be cut, so it is left out.
    """
    items: dict[str, str] = {}
    at = start
    while match := _PAIR.match(text, at):
        if not match["end"]:
            break
        at = match.end()
        items[match["key"]] = match["value"].strip("'\"")
        if match["end"] == "}":
            return DictRow(items, start, at, cut=False)
    return DictRow(items, start, at, cut=True)


# Reading tqdm progress bars: `` 3%|▎ | 12/375 [01:02<31:12, 5.16s/it]``.

_BAR = re.compile(r"(?<!\d)\d{1,3}%\|[^|]*\| *(?P<n>\d{1,15})/(?P<total>\d{1,15}) \[[^\]{]*\]?")


@dataclass(frozen=True, slots=True)
class Bar:
    """One state of a progress bar: ``n`` of ``total``.

    ``start`` and ``end`` are its place in the text in which it was found.
    """

    n: int
    total: int
    title: str
    start: int
    end: int

    @property
    def may_count_steps(self) -> bool:
        """Return True if this may be the trainer's own progress bar, which has no title (other bars are called
        ``Map:``, ``Loading shards:``).
        """
        return not self.title or "train" in self.title.lower()


def bars(text: str) -> Iterator[Bar]:
    """Yield the progress bars in ``text``, left to right."""
    if "%|" not in text:
        return
    end = 0
    for match in _BAR.finditer(text):
        title = text[end : match.start()].rpartition("}")[2].strip(" :")  # "}" ends a row of metrics before the bar
        end = match.end()
        yield Bar(int(match["n"]), int(match["total"]), title, match.start(), end)


# Steps of rows that hold none, from the progress bars around them.
#
# HF's Trainer prints its metrics without the step, and the bar that tqdm redraws right after the row shows the step. If
# stdout was buffered, rows come in batches, long after their steps: a batch of 31 rows before ``620/1875`` is one row
# every 20 steps. Without any bar rows are numbered. The result depends only on earlier output, never on the end of the
# log, so that following a log and reading it afterwards give the same steps.

T = TypeVar("T")
_NOTHING = (0, 0)
MOST_WAITING = 1000
"""Largest number of rows held back for a bar. 8 KiB of buffered stdout are about a hundred; a bar may also never
come.
"""


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    row: T
    trains: bool
    bar_before: tuple[int, int]


class StepClock(Generic[T]):
    """Assignment of steps to rows that hold none, from the progress bars printed around them.

    It receives rows and progress bars in the order of the log, and returns rows with their step. A row that ``trains``
    has its own step; any other row is an evaluation and gets the step of the row before.
    """

    def __init__(self) -> None:
        self.pace: int | None = None
        """Number of steps from one row to the next; None until it is known."""
        self.last = 0
        """Step of the last row."""
        self.counted = False
        """True if any row had to be numbered because no bar showed its step."""
        self._waiting: list[_Waiting[T]] = []
        self._trainings = 0
        """Number of training rows among the rows that wait."""
        self._total: int | None = None
        self._guessed: int | None = None
        self._n = 0
        self._bars_seen = False
        self._batches = False  # rows come late and together: a bar does not show the step of a single row

    def row(self, row: T, *, trains: bool, bar_before: tuple[int, int] = _NOTHING) -> list[tuple[T, int]]:
        """Add a row, and return the rows whose step is known now, as (row, step).

        ``trains``: the row belongs to the training, not to an evaluation. ``bar_before`` is (n, total) of the bar
        printed before it on the same line; (0, 0) if there was none.
        """
        if not trains and not self._waiting:
            return [(row, self.last if self._total is None or self._batches else max(self.last, self._n))]
        self._waiting.append(_Waiting(row, trains, bar_before))
        self._trainings += trains
        barless = not self._bars_seen and (self._trainings > 1 or self.counted)
        return self._count() if barless or len(self._waiting) > MOST_WAITING else []

    def bar(self, n: int, total: int, *, directly: bool) -> list[tuple[T, int]]:
        """Add a progress bar with the count ``n`` of ``total``, and return the rows whose step is known now, as (row,
        step).

        ``directly``: only line ends lie between the bar and the last row.
        """
        self._bars_seen = True
        if self._total is None:
            self._guess(n, total)
        if not self._is_own(n, total, directly=directly):
            return []
        if n < self.last:  # the trainer was started again
            self.last = 0
        self._total, self._n = total, n
        return self._settle(n) if n > 0 else []

    def _guess(self, n: int, total: int) -> None:
        """Guess that the trainer's bar is the first unfinished one, until a row identifies it.

        The bar of an evaluation begins later; a bar of data loading is finished before the first row.
        """
        if self._guessed is None:
            self._guessed = total
        if self._guessed == total:
            self._n = n
            if n == total and not self._waiting:
                self._guessed = None

    def _is_own(self, n: int, total: int, *, directly: bool) -> bool:
        """Return True if a bar is the trainer's: it is redrawn after the trainer's rows, and counts at least as far."""
        if total == self._total:
            return True
        if not self._waiting or n < max(1, self._trainings):
            return False
        return directly or total == self._waiting[0].bar_before[1] or (self._total is None and total == self._guessed)

    def _bar_before(self) -> int:
        """Return the count of the bar before the only row that waits; 0 if there was none, or it lagged.

        A bar before the first of several rows shows no step: such rows come in a batch.
        """
        alone = self._waiting[0].bar_before[0] if len(self._waiting) == 1 else 0
        return alone if alone > self.last else 0

    def at(self, step: int) -> list[tuple[T, int]]:
        """Note the ``step`` of a row that holds it, and return the rows that waited before that row, as (row, step)."""
        settled = self.flush()
        self._advance(step)
        return settled

    def again(self, share: float) -> list[tuple[T, int]]:
        """Restart the count before the first row of a restarted training, and return the rows that waited, as (row,
        step).

        ``share`` is the epoch of the loaded checkpoint divided by the epoch that was reached before, 0 to 1.
        """
        settled = self.flush()
        self.last = max(0, round(self.last * share) - (self.pace or 1))
        self._n = 0
        self._total = self._guessed = None
        return settled

    def flush(self) -> list[tuple[T, int]]:
        """Return the rows that still wait, as (row, step), with the best guess of their steps: the training or the log
        has ended.
        """
        return self._settle(self._n) if self._n > self.last else self._count()

    def _settle(self, n: int) -> list[tuple[T, int]]:
        """Spread the waiting rows over the steps up to ``n``, the count of the bar."""
        return self._assign(self._spread(self._trainings, self._bar_before() or n))

    def _count(self) -> list[tuple[T, int]]:
        trainings = self._trainings
        self.counted = self.counted or trainings > 0
        pace = self.pace or 1
        return self._assign([self.last + pace * i for i in range(1, trainings + 1)])

    def _assign(self, steps: list[int]) -> list[tuple[T, int]]:
        following = iter(steps)
        done = [(w.row, self._advance(next(following)) if w.trains else self.last) for w in self._waiting]
        self._waiting, self._trainings = [], 0
        return done

    def _advance(self, step: int) -> int:
        if step > self.last:
            self.pace = step - self.last
        self.last = step
        return step

    def _spread(self, rows: int, n: int) -> list[int]:
        """Return the steps of ``rows`` consecutive rows of which the last is at or shortly before ``n``."""
        if rows <= 1:
            return [n] * rows
        self._batches = True
        if self.pace:
            end = self.last + self.pace * rows
            if not 0 <= n - end <= self.pace:  # rows are missing: count back, HF logs at multiples of the pace
                end = n - n % self.pace
            if end - self.pace * rows >= self.last:
                return [end - self.pace * i for i in reversed(range(rows))]
        if self.last == 0 and n % rows and rows > 2 and n % (rows - 1) == 0:  # logging_first_step
            return [1] + [n // (rows - 1) * i for i in range(1, rows)]
        pace = max(1, (n - self.last) // rows)
        return [min(self.last + pace * i, n) for i in range(1, rows + 1)]
