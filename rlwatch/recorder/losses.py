"""Losses of the recorder: data that are dropped when space is short, and the counters of everything lost.

While a store accepts nothing, records wait in the run's journal, a file with a size limit. As it fills, the bulkiest
data go first: tokens of single steps, then texts of completions, then series of the machine and the engines, and at
last rows are thinned, to one in two steps, in four... Events, findings, alerts and commands are never dropped, nor are
rows that contain NaN or an infinity. All drops are counted, and reported by events of the run
(:data:`rlwatch.records.SHED`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from threading import get_ident
from typing import Any

from rlwatch.error_boundary import log_message
from rlwatch.records import SHED, CompletionBatch, Event, SpikeBatch
from rlwatch.redaction import redacted

MOST_SPANS = 8
"""Largest number of ranges of steps that are listed separately."""


@dataclass(slots=True)
class Span:
    """A range of steps, both ends included, and the number of rows that were lost in it."""

    first: int
    last: int
    rows: int

    def __str__(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


def _first(span: Span) -> int:
    return span.first


def spans_in_words(spans: Sequence[Span]) -> str:
    """Return a text with the number of lost rows and their steps.

    >>> spans_in_words([Span(3, 3, 1), Span(7, 9, 4)])
    '5 rows of steps 3, 7-9'
    >>> spans_in_words([Span(3, 3, 1)])
    '1 row of step 3'
    """
    rows, steps = sum(span.rows for span in spans), ", ".join(map(str, spans))
    one = len(spans) == 1 and spans[0].first == spans[0].last
    return f"{rows:,} row{'s' * (rows > 1)} of step{'s' * (not one)} {steps}"


class Counters:
    """Named counters of lost records and errors, which only grow, with one logged warning for each name. Nothing
    raises.

    Written from any thread, without a lock (a signal may arrive while one is held, a fork copies it locked): each
    thread has counts of its own, and they are added up when they are read.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._warned: set[str] = set()
        self._lost: dict[int, list[Span]] = {}

    def add(self, name: str, n: int = 1) -> None:
        """Raise the counter ``name`` by ``n``."""
        key = (name, get_ident())
        self._counts[key] = self._counts.get(key, 0) + n

    def warn(self, name: str, message: str, n: int = 1) -> None:
        """Raise the counter ``name`` by ``n``, and log ``message`` the first time only."""
        self.add(name, n)
        if name not in self._warned:
            self._warned.add(name)
            log_message(logging.WARNING, "%s (further ones are counted as %r, not logged)", redacted(message), name)

    def lose(self, step: int | None) -> None:
        """Note that a row of ``step`` is lost; None: its step is not known."""
        spans = self._lost.setdefault(get_ident(), [])
        if step is None:
            return
        if spans and spans[-1].first <= step <= spans[-1].last + 1:
            spans[-1].last = max(spans[-1].last, step)
            spans[-1].rows += 1
        elif len(spans) < MOST_SPANS:
            spans.append(Span(step, step, 1))
        else:
            last = spans[-1]
            last.first, last.last, last.rows = min(last.first, step), max(last.last, step), last.rows + 1

    def lost(self) -> list[Span]:
        """Return the ranges of steps in which rows were lost, in order."""
        return sorted(
            (Span(s.first, s.last, s.rows) for of in self._lost.copy().values() for s in list(of)), key=_first
        )

    def __getitem__(self, name: str) -> int:
        return sum(n for (counted, _), n in self._counts.copy().items() if counted == name)

    def snapshot(self) -> Mapping[str, int]:
        """Return name -> present count, for all counters."""
        total: Counter[str] = Counter()
        for (name, _), n in self._counts.copy().items():
            total[name] += n
        return dict(total)


# Give up what is missed least when the room for what waits is nearly spent: at the door, and out of the journal.
#
# While a store takes nothing, what is logged waits in the run's journal, which has a budget. As that fills, the
# bulkiest goes first: tokens of single steps, then texts of completions, then series of the machine and the engines,
# and at last rows are thinned, to one in two steps, in four... Events, findings, alerts and commands are never given
# up, nor are rows that hold NaN or an infinity. All of it is counted, and reported by events of the run
# (:data:`rlwatch.records.SHED`).


class ShedKind(StrEnum):
    """Kinds of data that are dropped when space is short; the first member is dropped first."""

    TOKENS = "token records"
    COMPLETIONS = "completions"
    SYSTEM = "values of system series"
    ROWS = "metric rows"


NEARLY = 0.6
"""Used share of the space from which on anything is dropped."""
REFUSED_FROM = {ShedKind.TOKENS: NEARLY, ShedKind.COMPLETIONS: 0.65, ShedKind.SYSTEM: 0.75, ShedKind.ROWS: 0.8}
"""Used share of the space from which on no more of a kind is accepted."""
EVICTED_FROM = 0.7
"""Used share of the space from which on tokens, then completions, that were accepted already are removed."""
THINNEST = 6
"""Power of two: while there is any space, at least one step in 64 keeps its row."""
TOLD_EVERY_S = 60.0
"""Seconds between two events that report dropped data."""
SYSTEM = (
    "system/", "sys/", "perf/", "timing/", "timing_s/", "timing_per_token_ms/", "time/", "profiling/", "engine/",
    "vllm/", "vllm:", "sglang/", "sglang:", "gpu/", "gpu.", "cpu/", "memory/", "nccl/", "ray/", "throughput",
)  # fmt: skip
"""Beginnings of names of series about machines and engines, which are not needed to judge a training."""


@dataclass(frozen=True, slots=True)
class Given:
    """Number of items of one kind (``kind``) that were dropped at one step, because space was short."""

    kind: ShedKind
    n: int
    step: int


class Shedding:
    """Decides which data of a run are dropped while its space is nearly used up, and counts them.

    It is called by threads that log, and takes no lock. ``counters``: counters of the run.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._given: deque[Given] = deque()
        self._step, self._steps = -1, 0
        self._reported_at = -math.inf

    def takes(self, batch: SpikeBatch | CompletionBatch, filled: float) -> bool:
        """Return whether the batch is accepted; otherwise count it as dropped. ``filled``: used share of the space."""
        if filled < REFUSED_FROM[_kind(batch)]:
            return True
        self.give_up(batch)
        return False

    def cut(self, step: int, metrics: dict[str, Any], filled: float) -> bool:
        """Return whether the row of ``step`` is accepted; metrics of the machine are removed from ``metrics`` first.

        ``filled``: used share of the space.
        """
        if filled < REFUSED_FROM[ShedKind.SYSTEM]:
            return True
        machine = [name for name in metrics if type(name) is str and name.startswith(SYSTEM)]
        for name in machine:
            del metrics[name]
        if machine:
            self._note(ShedKind.SYSTEM, len(machine), step)
        if not metrics:
            return False
        if filled < REFUSED_FROM[ShedKind.ROWS] or self._is_due(step, filled):
            return True
        if any(type(value) is float and not math.isfinite(value) for value in metrics.values()):
            return True
        self._note(ShedKind.ROWS, 1, step)
        self._counters.lose(step)
        return False

    def _is_due(self, step: int, filled: float) -> bool:
        """Return True for all rows of one in 2, 4, 8... steps: the less space, the fewer."""
        if step != self._step:
            self._step, self._steps = step, self._steps + 1
        spent = (filled - REFUSED_FROM[ShedKind.ROWS]) / (1.0 - REFUSED_FROM[ShedKind.ROWS])
        every: int = 1 << min(THINNEST, 1 + int(THINNEST * spent))
        return self._steps % every == 0

    def give_up(self, batch: SpikeBatch | CompletionBatch) -> None:
        """Count the contents of a batch as dropped."""
        self._note(_kind(batch), len(batch), batch.step)

    def _note(self, kind: ShedKind, n: int, step: int) -> None:
        self._given.append(Given(kind, n, step))
        self._counters.warn("shed", f"the room for what the store does not take is nearly spent: {kind} are shed", n)

    def tell(self, now: float, why: str, *, last: bool = False) -> list[Event]:
        """Return one event for each kind of data that was dropped since the last report, with numbers and steps.

        The list is empty within a minute of the last report, unless ``last``. ``now``: seconds of a clock that only
        goes forward. ``why``: the reason, for the events.
        """
        if not self._given or (now - self._reported_at < TOLD_EVERY_S and not last):
            return []
        self._reported_at = now
        sums: dict[ShedKind, Event] = {}
        for _ in range(len(self._given)):
            given = self._given.popleft()
            so_far = sums.get(given.kind)
            sums[given.kind] = _event(given, why) if so_far is None else _more(so_far, given)
        return [sums[kind] for kind in ShedKind if kind in sums]


def _kind(batch: SpikeBatch | CompletionBatch) -> ShedKind:
    return ShedKind.TOKENS if isinstance(batch, SpikeBatch) else ShedKind.COMPLETIONS


def _event(given: Given, why: str) -> Event:
    body = {"what": given.kind.value, "n": given.n, "first_step": given.step, "last_step": given.step, "why": why}
    return Event(SHED, given.step, body)


def _more(event: Event, given: Given) -> Event:
    body = event.body
    first, last = min(body["first_step"], given.step), max(body["last_step"], given.step)
    return replace(event, step=last, body={**body, "n": body["n"] + given.n, "first_step": first, "last_step": last})
