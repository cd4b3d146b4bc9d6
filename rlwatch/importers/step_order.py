"""Step counter of an imported run: it decides which rows continue it, which restart it, and which have another counter.

A log may hold several counters: evaluations with their own numbers, a resumed trainer that repeats steps, generated
text that looks like rows. Steps that go back are a **restart**, and begin the next attempt, only if they *last*: rows
of the same kind (mostly the same names) advance from there for ``LASTING`` steps, in a long run for a few more. Rows of
another kind need ``LASTING_OTHERWISE`` steps. Until then such rows are held back, because a returned row is never
withdrawn. If the old counter continues, they belong to another counter, and repeated steps are left out. If the log
shows that a process began (another event file, a rewritten state), one row that goes back is enough.

A row far **ahead** of the counter is held back in the same way, until ``LASTING`` steps show that the counter jumped.
If it did not, an evaluation gets the step at which it was printed, and a row with the training's own names is left out.
A row with only new names at an earlier step is a late record of the same attempt. If such rows lag ever further, they
have a slower counter (of rollouts, when the run counts updates) and get the step at which they were printed. Rows on
held-out prompts never begin an attempt. A row that is printed again unchanged (by each rank, say) counts once.

The result depends on the rows before and on at most a few rows after, never on the time of reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from rlwatch.importers.base import ImportedRow, Skips, of_held_out

LASTING = 3
"""Number of steps with rows of the training's kind after which a return to earlier steps is a restart."""
SHARE_THAT_LASTS = 20
MOST_LASTING = 8
"""In a long run a restart needs a step for every ``SHARE_THAT_LASTS`` rows, at most ``MOST_LASTING`` steps."""
LASTING_OTHERWISE = 12
"""Number of steps with rows of other names after which a return to earlier steps is a restart."""
SETTLED = 5
"""Number of rows after which the usual gap between steps and the recurring names are known."""
LEAST_GAPS = 2
"""Number of gaps between steps after which a row may count as far ahead. A log that jumps only waits for one more
row.
"""
MOST_AHEAD = 4
"""Multiple of the widest gap so far by which the counter may jump without a second row to confirm it."""
OFTEN = 4
"""A kind of rows belongs to the training if it has at least one row for this many rows of the main kind."""
ALIKE = 0.5
"""Smallest share of common names, 0 to 1, of two rows of one kind."""
MOST_HELD = 1000
MOST_WRITTEN = 1000
MOST_OF_A_STEP = 64
OTHER_COUNTER = "a row whose step goes back, or ahead, while the others go on (of another counter)"
TOO_FEW = "a row whose step goes back at the end of the log (too few for a restart)"
COPY = "a row printed again as it was (a copy, as of another rank)"
Numbered = tuple[ImportedRow, int]
"""A row, and its attempt."""


class _Kind:
    """Rows with one set of names."""

    __slots__ = ("count", "held_out", "names", "slower")

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.held_out = bool(names) and all(map(of_held_out, names))
        self.count = 0
        self.slower = False


class _Holding(Enum):
    NOTHING = 0
    BACK = 1
    AHEAD = 2


class _Held(NamedTuple):
    row: ImportedRow
    kind: _Kind


class StepOrder:
    """Step counter of one run, which receives rows in the order of the log and returns each with its attempt, from 1.

    A new attempt (process of a resumed run) begins where the steps of the log go back and do not jump forward again.

    ``ordered`` is False for tables, whose rows may come in any order.

    >>> order, skips = StepOrder(), Skips()
    >>> rows = [ImportedRow(step, {"loss": 0.5}) for step in (1, 2, 3, 4, 2, 3, 4, 5)]
    >>> [(row.step, attempt) for row in rows for row, attempt in order.take(row, skips)]
    [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (5, 2)]
    """

    def __init__(self, *, ordered: bool = True) -> None:
        self.attempt = 1
        self.ordered = ordered
        self.returns = 0
        """Number of times that the steps went back, whether it lasted or not."""
        self.placed = 0
        """Number of rows of another counter that got the step at which they were printed."""
        self._kinds: dict[frozenset[str], _Kind] = {}
        self._written: dict[tuple[str, ...], _Kind] = {}
        """The kinds by their names in the order of the row, for a faster lookup."""
        self._newest: tuple[list[str], _Kind] | None = None
        """Names of the newest row, with its kind."""
        self._main: _Kind | None = None
        """Kind with the most rows."""
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        """Each set of names once, because most steps have the same names."""
        self._gaps = self._widest = 0
        self._held: list[_Held] = []
        self._holding = _Holding.NOTHING
        self._back: set[int] = set()
        self._back_alike: set[int] = set()
        self._last_back = -1
        self._begin()

    def _begin(self) -> None:
        self._seen: dict[int, frozenset[str]] = {}
        self._at = self._first = -1
        self._rows_at: list[Mapping[str, float]] = []
        self._begun = False

    def take(self, row: ImportedRow, skips: Skips) -> list[Numbered]:
        """Add ``row``, and return the rows that are decided now, with their attempts.

        ``row`` itself is among them unless it is held back. Rows that are left out are counted in ``skips``.
        """
        newest, names = self._newest, list(row.metrics)
        if newest is None or newest[0] != names:
            newest = self._newest = names, self._written.get(tuple(names)) or self._kind(row)
        kind = newest[1]
        if kind is self._main and not self._held and 0 < row.step - self._at <= self._widest:
            return self._next(row, kind)
        if row.starts and self._holding is not _Holding.NOTHING:
            return self.finish(skips) + self._direct(row, kind, skips)
        if self._holding is _Holding.NOTHING:
            return self._direct(row, kind, skips)
        if self._holding is _Holding.AHEAD:
            return self._while_ahead(row, kind, skips)
        return self._while_back(row, kind, skips)

    def _kind(self, row: ImportedRow) -> _Kind:
        """Return the kind of rows with these names, in an order that was not seen before."""
        names = frozenset(row.metrics)
        kind = self._kinds.setdefault(names, _Kind(names))
        if len(self._written) < MOST_WRITTEN:
            self._written[tuple(row.metrics)] = kind
        return kind

    def finish(self, skips: Skips) -> list[Numbered]:
        """Return the rows that are still held back at the end of the log, with their attempts; count rows left out in
        ``skips``.
        """
        if self._holding is _Holding.BACK:
            return self._refuted_back(skips, TOO_FEW)
        if self._holding is _Holding.AHEAD and self._at >= 0:
            return self._refuted_ahead(skips, at_end=True)
        return self._given()

    def restart(self, skips: Skips) -> list[Numbered]:
        """Begin another attempt with the next row, whatever its step, because the trainer was restarted.

        Return the rows held back, with their attempts. Rows that are left out are counted in ``skips``.
        """
        given = self.finish(skips)
        if self._begun:
            self.attempt += 1
            self._begin()
        return given

    def _next(self, row: ImportedRow, kind: _Kind) -> list[Numbered]:
        """Return the next row of the training, the usual case; a faster form of :meth:`_emit`."""
        step = row.step
        kind.count += 1
        self._gaps += 1
        seen = self._seen.get(step)
        self._seen[step] = kind.names if seen is None else seen | kind.names
        self._at, self._rows_at = step, [row.metrics]
        return [(row, self.attempt)]

    def _direct(self, row: ImportedRow, kind: _Kind, skips: Skips) -> list[Numbered]:
        """Take a row while none is held back."""
        step, at = row.step, self._at
        if step == at and any(_same(row.metrics, other) for other in self._rows_at):
            skips.add(COPY, row.line)
            return []
        if step < at:
            if kind.slower:
                return self._emit(self._moved(row, at), kind)
            if not kind.held_out and self._goes_back(step, kind):
                if not row.starts:
                    return self._hold(_Holding.BACK, row, kind, skips)
                self.restart(skips)
            elif self._is_of_a_slower_counter(step, kind):
                kind.slower = True
                return self._emit(self._moved(row, at), kind)
        elif (kind.held_out and at < 0) or (self._gaps >= LEAST_GAPS and step - at > self._reach(kind)):
            return self._hold(_Holding.AHEAD, row, kind, skips)
        return self._emit(row, kind)

    def _is_of_a_slower_counter(self, step: int, kind: _Kind) -> bool:
        """Return True for a row with new names that lags further than any late record: it counts rollouts, say."""
        return kind.count >= LASTING and self._gaps >= SETTLED and self._at - step > self._widest * MOST_AHEAD

    def _reach(self, kind: _Kind) -> int:
        """Return the number of steps that the counter may jump."""
        return self._widest * (MOST_AHEAD if self._is_regular(kind) else 1)

    def _while_ahead(self, row: ImportedRow, kind: _Kind, skips: Skips) -> list[Numbered]:
        if kind.held_out:
            return self._hold(_Holding.AHEAD, row, kind, skips)
        if self._at < 0:  # evaluations before the first row of the training
            held, self._held, self._holding = self._held, [], _Holding.NOTHING
            given = [n for row_, kind_ in held for n in self._emit(self._moved(row_, min(row_.step, row.step)), kind_)]
            return given + self._direct(row, kind, skips)
        if row.step < self._held[0].row.step:
            return self._refuted_ahead(skips, at_end=False) + self._direct(row, kind, skips)
        steps = {one.row.step for one in self._held if self._is_regular(one.kind)} | {row.step}
        if self._is_regular(kind) and len(steps) >= LASTING:
            return self._given() + self._emit(row, kind)
        return self._hold(_Holding.AHEAD, row, kind, skips)

    def _while_back(self, row: ImportedRow, kind: _Kind, skips: Skips) -> list[Numbered]:
        if not kind.held_out:
            old_goes_on = row.step > self._at and self._last_back < self._at
            again = row.step < self._last_back and any(
                one.kind is kind and one.row.step > row.step for one in self._held
            )
            if old_goes_on or again:
                return self._refuted_back(skips, OTHER_COUNTER) + self._direct(row, kind, skips)
        return self._hold(_Holding.BACK, row, kind, skips)

    def _hold(self, why: _Holding, row: ImportedRow, kind: _Kind, skips: Skips) -> list[Numbered]:
        """Keep a row, and return all held rows once they are decided."""
        self.returns += why is _Holding.BACK and not self._held
        self._holding = why
        self._held.append(_Held(row, kind))
        if not kind.held_out:
            self._back.add(row.step)
            self._last_back = max(self._last_back, row.step)
            if self._is_regular(kind):
                self._back_alike.add(row.step)
        if why is _Holding.BACK and self._lasts():
            given = self._held
            self._settle()
            self.attempt += 1
            self._begin()
            return [numbered for one in given for numbered in self._again(*one, skips)]
        most = len(self._held) >= (LASTING_OTHERWISE if self._at < 0 else MOST_HELD)
        return self._given() if most or len(self._back) >= LASTING_OTHERWISE else []

    def _lasts(self) -> bool:
        """Return True if the steps that went back continue from there."""
        many = len(self._held) >= MOST_HELD
        lasting = min(MOST_LASTING, max(LASTING, self._gaps // SHARE_THAT_LASTS))
        return many or len(self._back_alike) >= lasting or len(self._back) >= LASTING_OTHERWISE

    def _settle(self) -> None:
        self._held, self._holding = [], _Holding.NOTHING
        self._back, self._back_alike, self._last_back = set(), set(), -1

    def _given(self) -> list[Numbered]:
        """Return the held rows unchanged."""
        held = self._held
        self._settle()
        given = [numbered for one in held for numbered in self._emit(*one)]
        self._at = max(self._at, *(one.row.step for one in held)) if held else self._at
        return given

    def _again(self, row: ImportedRow, kind: _Kind, skips: Skips) -> list[Numbered]:
        """Return a row of a restart, unless it is a copy of another."""
        if row.step == self._at and any(_same(row.metrics, other) for other in self._rows_at):
            skips.add(COPY, row.line)
            return []
        return self._emit(row, kind)

    def _refuted_back(self, skips: Skips, reason: str) -> list[Numbered]:
        held = self._held
        self._settle()
        given: list[Numbered] = []
        for row, kind in held:
            if kind.held_out or not self._goes_back(row.step, kind):
                given += self._emit(row, kind)
            else:
                skips.add(reason, row.line)
        return given

    def _refuted_ahead(self, skips: Skips, *, at_end: bool) -> list[Numbered]:
        held = self._held
        self._settle()
        given: list[Numbered] = []
        for row, kind in held:
            regular = self._is_regular(kind)
            if regular and at_end:
                given += self._emit(row, kind)
            elif not regular and (kind.held_out or self._main is None or kind.names.isdisjoint(self._main.names)):
                given += self._emit(self._moved(row, self._at), kind)
            else:
                skips.add(OTHER_COUNTER, row.line)
        return given

    def _moved(self, row: ImportedRow, step: int) -> ImportedRow:
        self.placed += row.step != step
        return row if row.step == step else replace(row, step=step)

    def _emit(self, row: ImportedRow, kind: _Kind) -> list[Numbered]:
        """Return a row, and learn from it."""
        step = row.step
        kind.count += 1
        self._begun = True
        if self._main is None or (kind.count > self._main.count and not kind.held_out):
            self._main = kind
        seen = self._seen.get(step)
        together = kind.names if seen is None else seen | kind.names
        self._seen[step] = self._sets.setdefault(together, together)
        in_pace = (
            not kind.held_out and step - self._at <= self._widest
        )  # a row that lacks metrics which are measured now and then
        if step > self._at and (in_pace or self._is_regular(kind)):
            if self._at < 0:
                self._first = step
            else:
                self._gaps += 1
                self._widest = max(self._widest, step - self._at)
            self._at, self._rows_at = step, []
        if step == self._at and len(self._rows_at) < MOST_OF_A_STEP:
            self._rows_at.append(row.metrics)
        return [(row, self.attempt)]

    def _is_regular(self, kind: _Kind) -> bool:
        """Return True if the names of a row are those of the training."""
        main = self._main
        if kind is main or main is None:
            return not kind.held_out
        if kind.held_out:
            return False
        if main.held_out or self._gaps < SETTLED or kind.count * OFTEN >= main.count:
            return True
        return len(kind.names & main.names) >= ALIKE * len(kind.names | main.names)

    def _goes_back(self, step: int, kind: _Kind) -> bool:
        """Return True for a row that repeats a metric of its step, or whose step is before the first."""
        if self.ordered and self._gaps > 1 and step < self._first and kind is self._main:
            return True
        return not self._seen.get(step, frozenset()).isdisjoint(kind.names)


def _same(metrics: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Return True if both hold the same values; NaN equals NaN."""
    return metrics.keys() == others.keys() and all(
        value == others[name] or (value != value and others[name] != others[name])  # noqa: PLR0124
        for name, value in metrics.items()
    )


def numbered(rows: Iterable[ImportedRow], skips: Skips) -> list[Numbered]:
    """Return all ``rows`` of a run that count, with their attempts; those left out are counted in ``skips``."""
    order = StepOrder()
    return [found for row in rows for found in order.take(row, skips)] + order.finish(skips)
