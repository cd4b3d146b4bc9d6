"""Counters of what rlwatch lost or swallowed: each is itself a metric of the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident

from rlwatch.error_boundary import log_message
from rlwatch.redaction import redacted

MOST_SPANS = 8
"""Largest number of spans of steps that are listed separately."""


@dataclass(slots=True)
class Span:
    """Rows that were lost between two steps, both included."""

    first: int
    last: int
    rows: int

    def __str__(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


def _first(span: Span) -> int:
    return span.first


def told(spans: Sequence[Span]) -> str:
    """Format the number of rows and their steps.

    >>> told([Span(3, 3, 1), Span(7, 9, 4)])
    '5 rows of steps 3, 7-9'
    >>> told([Span(3, 3, 1)])
    '1 row of step 3'
    """
    rows, steps = sum(span.rows for span in spans), ", ".join(map(str, spans))
    one = len(spans) == 1 and spans[0].first == spans[0].last
    return f"{rows:,} row{'s' * (rows > 1)} of step{'s' * (not one)} {steps}"


class Counters:
    """Named counters that only grow, with one warning for each name. Nothing here raises.

    Written from any thread, without a lock (a signal may arrive while one is held, a fork copies it locked): each
    thread has counts of its own, and they are added up when they are read.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._warned: set[str] = set()
        self._lost: dict[int, list[Span]] = {}

    def add(self, name: str, n: int = 1) -> None:
        """Count ``n`` more of ``name``."""
        key = (name, get_ident())
        self._counts[key] = self._counts.get(key, 0) + n

    def warn(self, name: str, message: str, n: int = 1) -> None:
        """Count, and log ``message`` the first time only."""
        self.add(name, n)
        if name not in self._warned:
            self._warned.add(name)
            log_message(logging.WARNING, "%s (further ones are counted as %r, not logged)", redacted(message), name)

    def lose(self, step: int | None) -> None:
        """Note that a row, or what else belonged to ``step``, is lost."""
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
        """Steps of which rows were lost, in order."""
        return sorted(
            (Span(s.first, s.last, s.rows) for of in self._lost.copy().values() for s in list(of)), key=_first
        )

    def __getitem__(self, name: str) -> int:
        return sum(n for (counted, _), n in self._counts.copy().items() if counted == name)

    def snapshot(self) -> Mapping[str, int]:
        """All counters now."""
        total: Counter[str] = Counter()
        for (name, _), n in self._counts.copy().items():
            total[name] += n
        return dict(total)
