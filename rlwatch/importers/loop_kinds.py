"""Recognition of rows in a console by lines that recur, so that text which only looks like a row is left out.

Lines are of one **kind** if the text around their step is alike and they hold mostly the same names. A kind becomes a
kind of rows once ``LEAST_ROWS`` of its lines advanced the counter (``LEAST_UNNUMBERED`` different lines, if they hold
no step). Until then its lines are held back. A second kind is accepted if three of its lines, between three rows, held
the current step of the run: a second line for each step, or an evaluation. A kind with its own counter is accepted only
if ``LASTING`` consecutive lines advanced that counter and no line of the known kind came between: the trainer changed
its format. All other lines are text, and are counted: "Step 2: reward = 5" of a completion, a traceback, source code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rlwatch.importers.base import ImportedRow, Skips

LEAST_ROWS = 3
LEAST_UNNUMBERED = 6
LASTING = 12
ALIKE = 0.5
"""Share of names, 0 to 1, that two lines of one kind must have in common."""
BELOW = "below"
"""Form of lines below a row that hold no step and continue the row."""
NO_ROW = "a line with numbers that is no row of this log (text, or another counter)"
MOST_CANDIDATES = 200
MOST_HELD = 64
Metrics = Mapping[str, float]
Key = tuple[str, frozenset[str]]


@dataclass(slots=True)
class Offer:
    """A line, or a block of lines, that may be a row.

    ``step`` is None if the text holds none. ``metrics`` is called when the row is yielded, because the lines that
    belong to a block are known only later. ``form`` is the text around the step, ``line`` the number of the line.
    """

    form: str
    names: frozenset[str]
    metrics: Callable[[], Metrics]
    step: int | None
    line: int
    mark: object = None
    """Value that distinguishes the line from others without a step."""


@dataclass(slots=True)
class _Kind:
    """Lines of one form, which may be rows."""

    form: str
    names: frozenset[str]
    last: int = -1
    steady: int = 0
    """Number of times that a line of this kind held the step of the run, each after another row."""
    alone: int = 0
    """Number of lines that advanced this kind's own counter since the last row."""
    at_row: int = -1
    held: list[Offer] = field(default_factory=list)
    odd: list[Offer] = field(default_factory=list)
    """Lines whose step went back, kept until it is known which of the two counters is the run's."""
    marks: set[object] = field(default_factory=set)


class Kinds:
    """Decision, line by line in the order of a console, which lines are rows.

    Parameters
    ----------
    skips
        Counter of the lines that are no rows.
    of_use
        Returns True if lines may be rows, given their names and whether they hold a step.
    """

    def __init__(self, skips: Skips, of_use: Callable[[frozenset[str], bool], bool]) -> None:
        self._skips = skips
        self._of_use = of_use
        self._known: dict[Key, bool] = {}
        self._rows_of: list[_Kind] = []
        self._candidates: dict[Key, _Kind] = {}
        self.given = 0
        """Number of rows yielded so far."""
        self._gap = 1
        self._back, self._last_back = 0, -1
        """Number of consecutive rows whose step went back, and the last such step; several move the run there."""
        self.step = -1
        """Current step of the run; -1 before the first row."""
        self.counted = 0
        """Number of rows without a step, which had to be numbered."""

    @property
    def known(self) -> bool:
        """Return True once lines of some form were accepted as rows."""
        return bool(self._rows_of)

    def take(self, offer: Offer) -> Iterator[ImportedRow]:
        """Add ``offer``, a line or block that may be a row, and yield the rows that are decided now."""
        key = (offer.form, offer.names)
        if self._is_row(key):
            yield self._row(offer)
        else:
            yield from self._weighed(self._candidate(key), offer)

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the rows held back at the end of the log: the lines of the most frequent form, if no form was accepted
        before.
        """
        if not self._rows_of and self._candidates:
            kind = max(self._candidates.values(), key=lambda kind: len(kind.held))
            has_step = all(offer.step is not None for offer in kind.held)
            if self._of_use(kind.names, has_step) and len(kind.names) > 1:
                yield from self._taken_up(kind)
        for kind in self._candidates.values():
            self._drop(kind)

    def _is_row(self, key: Key) -> bool:
        known = self._known.get(key)
        if known is None:
            known = any(_alike(kind, key) for kind in self._rows_of)
            if known:
                self._known[key] = True
        return bool(known)

    def _row(self, offer: Offer) -> ImportedRow:
        self.given += 1
        if offer.step is None:
            self.counted += 1
        step = self.counted if offer.step is None else offer.step
        if step < self.step:
            self._back = self._back + 1 if step > self._last_back else 1
            self._last_back = step
        else:
            self._back = 0
        if self._back in (0, LEAST_ROWS):
            self._gap = step - self.step if step > self.step >= 0 else self._gap
            self.step, self._back, self._last_back = step, 0, -1
        metrics = offer.metrics()
        return ImportedRow(step, metrics, offer.line)

    def _candidate(self, key: Key) -> _Kind:
        kind = self._candidates.get(key)
        if kind is None:
            if len(self._candidates) >= MOST_CANDIDATES:
                oldest = next(iter(self._candidates.values()))
                self._drop(oldest)
                self._candidates = {key: other for key, other in self._candidates.items() if other is not oldest}
            alike = next((other for other in self._candidates.values() if _alike(other, key)), None)
            kind = self._candidates[key] = alike or _Kind(*key)
        return kind

    def _weighed(self, kind: _Kind, offer: Offer) -> Iterator[ImportedRow]:
        if offer.step is None:
            yield from self._without_step(kind, offer)
            return
        step = offer.step
        in_step = self.known and self.step <= step <= self.step + self._gap
        if not self.known and step < kind.last:
            self._went_back(kind, offer)
            return
        if step < kind.last or (self.known and kind.at_row != self.given and not in_step):
            self._drop(kind)
        self._left_out(kind.odd)
        kind.steady += (in_step and kind.at_row != self.given) or (kind.form == BELOW and step > kind.last)
        kind.alone += step > kind.last
        kind.last, kind.at_row = step, self.given
        kind.marks.add(offer.mark)
        self._keep(kind, offer)
        if self.known:
            changes = kind.form != BELOW or len(kind.marks) >= LEAST_ROWS
            if (kind.steady >= LEAST_ROWS and changes) or kind.alone >= LASTING:
                yield from self._taken_up(kind)
        elif kind.alone >= LEAST_ROWS and self._of_use(kind.names, True):
            yield from self._taken_up(kind)

    def _went_back(self, kind: _Kind, offer: Offer) -> None:
        """Keep a line whose step goes back; if three do and advance, the lines before them were text."""
        if kind.odd and (offer.step or 0) <= (kind.odd[-1].step or 0):
            self._left_out(kind.odd)
        kind.odd.append(offer)
        if len(kind.odd) >= LEAST_ROWS - 1:
            odd, kind.odd = kind.odd, []
            self._drop(kind)
            kind.held, kind.last, kind.alone = odd, odd[-1].step or 0, len(odd)

    def _left_out(self, offers: list[Offer]) -> None:
        for offer in offers:
            self._skips.add(NO_ROW, offer.line)
        offers.clear()

    def _without_step(self, kind: _Kind, offer: Offer) -> Iterator[ImportedRow]:
        """Weigh a line without a step; it is a row only in a console where no line has one."""
        if self.known:
            self._skips.add(NO_ROW, offer.line)
            return
        kind.marks.add(offer.mark)
        self._keep(kind, offer)
        if len(kind.marks) >= LEAST_UNNUMBERED and self._of_use(kind.names, False):
            yield from self._taken_up(kind)

    def _keep(self, kind: _Kind, offer: Offer) -> None:
        kind.held.append(offer)
        if len(kind.held) > MOST_HELD:
            self._skips.add(NO_ROW, kind.held.pop(0).line)

    def _taken_up(self, kind: _Kind) -> Iterator[ImportedRow]:
        """Accept a kind as rows, and yield those of its rows that were held back."""
        self._rows_of.append(kind)
        self._known[kind.form, kind.names] = True
        self._candidates = {key: other for key, other in self._candidates.items() if other is not kind}
        before, held, kind.held = self.step, kind.held, []
        for offer in held:
            yield self._row(offer)
        if kind.steady >= LEAST_ROWS:
            self.step = max(before, self.step)

    def _drop(self, kind: _Kind) -> None:
        """Count the held lines of a kind as text."""
        self._left_out(kind.held)
        self._left_out(kind.odd)
        kind.held, kind.steady, kind.alone, kind.last = [], 0, 0, -1
        kind.marks.clear()


def _alike(kind: _Kind, key: Key) -> bool:
    form, names = key
    return kind.form == form and len(kind.names & names) >= ALIKE * len(kind.names | names)
