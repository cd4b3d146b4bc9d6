"""A metric that was always there is not logged any more, while others go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector
from rlwatch.records import ClosedStep, Event, Finding, Severity

REGULAR = 20
"""Rows a metric must have been in before it is missed."""
MISSING = 10
"""Rows it must be absent."""
TIMES = 5
"""Times the longest gap it has had: evaluations, and metrics of every tenth step, have gaps."""
PATIENCE = 100
"""Rows after which a vanished metric is taken to be gone for good, on purpose."""
STAY = 0.5
"""Share of the regular metrics that must go on: a row of an evaluation holds none of the others."""
NAMES = 1000
"""Metrics followed at most."""
TOLD = 8
"""Names told at most."""
OWN = "rlwatch/"
"""Counters of rlwatch's own come when there is something to count."""


@dataclass(slots=True)
class Presence:
    """When a metric was there, in rows of the run: how often, last, and the longest gap between."""

    rows: int
    last: int
    step: int
    gap: int = 1

    def seen(self, row: int, step: int) -> None:
        """It is there now."""
        away = row - self.last
        if away > self.gap:
            self.gap = min(away, PATIENCE)
        self.rows, self.last, self.step = self.rows + 1, row, step

    def patience(self) -> int:
        """Rows without it that mean nothing yet."""
        return max(MISSING, TIMES * self.gap)


class MetricVanished(BaseDetector):
    """Metrics that came regularly and are missing, while at least half of the regular ones go on.

    Trainers drop NaN before they average, so vanishing can be how a NaN looks. NaN itself is a value, and present.
    """

    name: ClassVar[str] = "metric_vanished"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((),)
    reads: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self._row = 0
        self._attempt: int | None = None
        self._presence: dict[str, Presence] = {}

    def notice(self, event: Event) -> None:
        """A run that goes on may log other things."""
        if event.kind in ("resume", "rollback"):
            self._presence.clear()

    def measured(self, step: ClosedStep) -> bool:
        """Any row that holds metrics of the run."""
        return any(not name.startswith(OWN) for name in step.metrics)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Note who is there; tell who is missing."""
        if step.attempt != self._attempt:
            self._attempt = step.attempt
            self._presence.clear()
        self._row += 1
        for name in step.metrics:
            self._see(name, step.step)
        missing = {name: seen for name, seen in self._presence.items() if self._row != seen.last and self._missed(seen)}
        if not missing:
            return []
        regular = sum(seen.rows >= REGULAR for seen in self._presence.values())
        if regular - len(missing) < STAY * regular:
            return []
        self._forget(missing)
        return [self._finding(step, missing, regular)]

    def _see(self, name: str, step: int) -> None:
        known = self._presence.get(name)
        if known is not None:
            known.seen(self._row, step)
        elif len(self._presence) < NAMES and not name.startswith(OWN):
            self._presence[name] = Presence(1, self._row, step)

    def _missed(self, seen: Presence) -> bool:
        """Whether it came regularly, and has been away for longer than it ever was."""
        return seen.rows >= REGULAR and self._row - seen.last > seen.patience()

    def _forget(self, missing: dict[str, Presence]) -> None:
        for name, seen in missing.items():
            if self._row - seen.last > seen.patience() + PATIENCE:
                del self._presence[name]

    def _finding(self, step: ClosedStep, missing: dict[str, Presence], regular: int) -> Finding:
        names = sorted(missing)
        first = min(names, key=lambda name: (missing[name].step, name))
        what = ", ".join(names[:TOLD]) + (f" and {len(names) - TOLD} more" if len(names) > TOLD else "")
        return self.finding(
            step,
            "metric_vanished",
            Severity.WARNING,
            f"{what}: not logged since step {missing[first].step}, while {regular - len(names)} other metrics go on",
            onset=missing[first].step,
            metric=first,
            evidence={"metrics": names[:TOLD], "missing": len(names), "regular": regular},
        )
