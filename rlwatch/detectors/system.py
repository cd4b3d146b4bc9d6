"""Detectors of the training loop: steps that slow down or stand still, metrics that are no longer logged."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from operator import truediv
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.rise import MOST, Rise, RiseDetector, RiseLimit, inverse
from rlwatch.records import SHED, ClosedStep, Event, Finding, Severity
from rlwatch.stats import Baseline, Hold
from rlwatch.wording import number

SLOWER = 2.0
"""Factor over the usual time that counts as slow. Machines, prompts and evaluations vary; twice as slow for many rows
doubles the cost.
"""
LEAST = 1.0
"""Seconds that a step must take to be judged: a shorter one reflects the other load of its machine."""
NOTABLE = 1.25
"""Factor over the usual from which a step, or the time it takes per token, has become longer at all."""
FOR_LENGTH = "seconds per step and token"
"""Name of a third series, derived from two metrics: ``time/step`` over ``len/mean``."""


class ThroughputDrop(RiseDetector):
    """Detector of steps that take longer, or of fewer tokens per second, than when the run began.

    Medians are compared, as a checkpoint or an evaluation is one row. ``info`` if longer responses explain the longer
    step, or if there are simply fewer tokens to process; else a warning, never critical.
    """

    name: ClassVar[str] = "throughput_drop"
    limits: ClassVar[tuple[RiseLimit, ...]] = (
        RiseLimit("time/throughput", MOST, SLOWER, inverse),
        RiseLimit("time/step", LEAST, SLOWER),
        RiseLimit(FOR_LENGTH, 1e-9, NOTABLE),
    )
    reads: ClassVar[tuple[str, ...]] = ("time/step", "time/throughput")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("time/step",), ("time/throughput",))

    def read(self, step: ClosedStep, limit: RiseLimit) -> float | None:
        """Return the value in the row ``step`` of the metric that ``limit`` is for; None if not measured or 0."""
        if limit.metric != FOR_LENGTH:
            return finite(step, limit.metric) or None
        seconds, tokens = finite(step, "time/step"), finite(step, "len/mean")
        return seconds / tokens if seconds and tokens and tokens >= 1.0 else None

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if throughput, step time and time per token are within their limits; otherwise
        return False.
        """
        rates, seconds, tokens = map(rows.column, ("time/throughput", "time/step", "len/mean"))
        if not (all(rates) and all(seconds)) or (tokens and min(tokens) < 1.0):
            return False
        per_token = list(map(truediv, seconds, tokens)) if seconds and tokens else []
        return self.buffered(rows.steps, [rates, seconds, per_token])

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge tokens per second first, as they do not depend on lengths, then seconds per step."""
        for rise in self._rises:
            rise.update(step.step, self.read(step, rise.limit))
        rate, time, _ = self._rises
        slow = next((rise for rise in (rate, time) if rise.lasted), None)
        return [] if slow is None else [self.report(step, slow)]

    def _explained(self, slow: Rise) -> bool:
        """Return whether fewer or longer responses explain the slowdown."""
        rate, time, per_token = self._rises
        if slow is rate:
            return time.factor is not None and time.factor < NOTABLE
        return per_token.factor is not None and per_token.factor < NOTABLE

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding of a slowdown at the row ``step``, ``info`` if longer responses explain it.

        ``rise``: the course of the metric so far.
        """
        rate, time, per_token = self._rises
        level, began = rise.level or 0.0, rise.began or 0.0
        if rise is rate:
            what = f"throughput fell to {number(level)} tokens/s, {number(inverse(began))} at the start"
            why = "; steps take no longer: there is less to process"
        else:
            what, why = (
                f"a step takes {number(level)} s, {number(began)} s at the start",
                "; responses are that much longer",
            )
        explained = self._explained(rise)
        return self.finding(
            step,
            "throughput_drop",
            Severity.INFO if explained else Severity.WARNING,
            what + (why if explained else ""),
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            baseline=inverse(began) if rise is rate else began,
            evidence=rounded(
                {
                    "seconds": time.level,
                    "seconds_start": time.began,
                    "tokens_per_second": rate.level,
                    "tokens_per_second_start": None if rate.began is None else inverse(rate.began),
                    "per_token_factor": per_token.factor,
                }
            ),
        )


# Step counter stalled: steps repeat or go back, or each takes many times the usual.

SLOW = 15.0
"""Factor over the usual seconds per step: no evaluation and no long batch takes that for several rows in a row."""
SLOW_ROWS = 3
"""Consecutive rows that must be that slow."""
REPEATS = 5
"""Consecutive rows without a new step, and without an announced resume, from which the counter counts as stalled."""
RECORDS, USUAL_RECORDS = "rlwatch/records", "rlwatch/records_usual"
"""Metrics that the monitor counts: records since the last new step, and the most that an earlier step had."""
MANY, FIRST_MANY = 50, 1000
"""Records without a new step up to which each micro-batch or rank may send its own; the same before any step is
known.
"""
TIMES = 10.0
"""Factor over the most records that an earlier step had."""


class StalledSteps(BaseDetector):
    """Detector of a stalled step counter, or of steps that take many times the usual.

    Seconds per step are the trainer's, else from the times of the records. A run that sends nothing at all is reported
    by the watcher of the store (``run_silent``). Never more than a warning: the counter alone may be broken.
    """

    name: ClassVar[str] = "stalled_steps"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((),)
    reads: ClassVar[tuple[str, ...]] = ("time/step",)

    def __init__(self) -> None:
        super().__init__()
        self._before: ClosedStep | None = None
        self._repeats = 0
        self._usual = Baseline()
        self._slow = Hold()

    def notice(self, event: Event) -> None:
        """Start anew at a resume or rollback, after which steps go back and time has passed."""
        if event.kind in ("resume", "rollback"):
            self._before = None
            self._begin()

    def _begin(self) -> None:
        self._repeats = 0
        self._slow.clear()

    def measured(self, step: ClosedStep) -> bool:  # noqa: ARG002
        """Return True: every row has a training step, which is what this detector judges."""
        return True

    def arrival(self, step: ClosedStep) -> list[Finding]:
        """Return a finding if records keep arriving while no step closes, which nothing else would show."""
        records = finite(step, RECORDS)
        if records is None:
            return []
        usual = finite(step, USUAL_RECORDS)
        limit = FIRST_MANY if usual is None else max(MANY, TIMES * usual)
        if records < limit:
            return []
        return [
            self.finding(
                step,
                "stalled_steps",
                Severity.WARNING,
                f"{records:.0f} records without a new step, usually at most {number(usual or 0.0)}: the step counter "
                "stalled or went back",
                score=records / limit,
                evidence=rounded({"records": records, "usual": usual}),
            )
        ]

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if the step counter goes on and no step takes long; otherwise return False."""
        before, usual = self._before, self._usual.get()
        if before is None or before.attempt != rows.rows[0].attempt or before.step >= rows.steps[0]:
            return False
        own, times = rows.column("time/step"), pairwise((before, *rows.rows))
        seconds = [own[i] if own and own[i] else _between(*pair) for i, pair in enumerate(times)]
        timed = [(step, each) for step, each in zip(rows.steps, seconds, strict=True) if each and each > 0.0]
        if timed and (usual is None or not self._usual.done or max(each for _, each in timed) > SLOW * usual):
            return False
        if timed:
            self._slow.miss([step for step, _ in timed])
        self._before, self._repeats = rows.rows[-1], 0
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge whether the step counter goes on, then the seconds per step; return findings of a stall or of slow
        steps.
        """
        before, self._before = self._before, step
        if before is not None and before.attempt != step.attempt:
            self._begin()
            before = None
        if before is not None and step.step <= before.step:
            self._repeats += 1
            self._slow.clear()
            return [self._repeats_step(step)] if self._repeats >= REPEATS else []
        self._repeats = 0
        return self._timed(step, before)

    def _timed(self, step: ClosedStep, before: ClosedStep | None) -> list[Finding]:
        seconds = finite(step, "time/step") or _between(before, step)
        if seconds is None or seconds <= 0.0:
            return []
        usual = self._usual.get()
        slow = usual is not None and seconds > SLOW * usual
        if not slow:
            self._usual.update(step.step, seconds)
        self._slow.update(step.step, slow)
        return [self._crawls(step, seconds, usual or 0.0)] if self._slow.lasted(SLOW_ROWS) else []

    def _repeats_step(self, step: ClosedStep) -> Finding:
        return self.finding(
            step,
            "stalled_steps",
            Severity.WARNING,
            f"{self._repeats} rows on end without a new step: the step counter stalled or went back",
            score=self._repeats / REPEATS,
            evidence=rounded({"rows": self._repeats}),
        )

    def _crawls(self, step: ClosedStep, seconds: float, usual: float) -> Finding:
        return self.finding(
            step,
            "stalled_steps",
            Severity.WARNING,
            f"a step takes {number(seconds)} s, usually {number(usual)} s: the run has nearly stopped",
            onset=self._slow.since,
            metric="time/step",
            score=seconds / (SLOW * usual) if usual > 0.0 else None,
            baseline=usual,
            evidence=rounded({"seconds": seconds, "usual": usual}),
        )


def _between(before: ClosedStep | None, step: ClosedStep) -> float | None:
    """Return seconds per step by the clock of the records; None where they have none."""
    if before is None or before.ts <= 0.0 or step.ts <= before.ts:
        return None
    return (step.ts - before.ts) / (step.step - before.step)


# A metric that was always there is not logged any more, while others go on.

REGULAR = 20
"""Rows that must have had a metric before it can be missed."""
MISSING = 10
"""Fewest rows without a metric from which it is missed."""
GAP_TIMES = 5
"""A metric is missed after this multiple of its longest gap: evaluations, and metrics of every tenth step, have
gaps.
"""
PATIENCE = 100
"""Rows after which a missing metric counts as removed on purpose."""
STAY = 0.5
"""Share of the regular metrics that must still be logged: a row of an evaluation has none of the others."""
NAMES = 1000
"""Most metrics that are followed."""
NAMED = 8
"""Most names that a message lists."""
OWN = ("rlwatch/", "system/", "engine/")
"""Prefixes of rlwatch's own metrics, which are not logged regularly: its counters appear if there is something to
count, system and engine metrics at their own times.
"""


@dataclass(slots=True)
class Presence:
    """Record of the rows that have a metric: how many, the last row and step, and the longest gap between them."""

    rows: int
    last: int
    step: int
    gap: int = 1

    def patience(self) -> int:
        """Return how many rows in a row may lack the metric before it counts as vanished."""
        return max(MISSING, GAP_TIMES * self.gap)


class MetricVanished(BaseDetector):
    """Detector of metrics that were logged regularly and are missing, while at least half of the regular ones continue.

    Trainers drop NaN before they average, so a NaN can show as a missing metric. NaN itself is a value, and present.
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
        """Forget which metrics the run logs, upon an ``event`` after which they may differ.

        Such events are a resume, and ``SHED``: metrics were dropped because the store's buffer was nearly full.
        """
        if event.kind in ("resume", "rollback", SHED):
            self._presence.clear()

    def measured(self, step: ClosedStep) -> bool:
        """Return True if the row has metrics other than rlwatch's own."""
        return any(not name.startswith(OWN) for name in step.metrics)

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if they have exactly the metrics that the run logged so far; otherwise return
        False.

        Metrics of rlwatch itself may be added.
        """
        strangers = rows.metrics - self._presence.keys()
        if self._attempt != rows.rows[0].attempt or len(rows.metrics) - len(strangers) < max(len(self._presence), 1):
            return False
        if not all(name.startswith(OWN) for name in strangers):
            return False
        before, self._row = self._row, self._row + len(rows.steps)
        for known in self._presence.values():
            known.gap = max(known.gap, min(before + 1 - known.last, PATIENCE))
            known.rows += len(rows.steps)
            known.last, known.step = self._row, rows.steps[-1]
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Record the metrics of the row and return a finding for those that are missing."""
        if step.attempt != self._attempt:
            self._attempt = step.attempt
            self._presence.clear()
        self._row += 1
        self._see(step)
        missing = {name: seen for name, seen in self._presence.items() if self._row != seen.last and self._missed(seen)}
        if not missing:
            return []
        regular = sum(seen.rows >= REGULAR for seen in self._presence.values())
        if regular - len(missing) < STAY * regular:
            return []
        self._forget(missing)
        return [self._finding(step, missing, regular)]

    def _see(self, step: ClosedStep) -> None:
        """Record each metric of the row: a row has hundreds, so without a call for each."""
        row, at = self._row, step.step
        for name in step.metrics:
            known = self._presence.get(name)
            if known is not None:
                away = row - known.last
                if away > known.gap:
                    known.gap = min(away, PATIENCE)
                known.rows += 1
                known.last, known.step = row, at
            elif len(self._presence) < NAMES and not name.startswith(OWN):
                self._presence[name] = Presence(1, row, at)

    def _missed(self, seen: Presence) -> bool:
        """Return whether the metric came regularly and has been absent for longer than ever before."""
        return seen.rows >= REGULAR and self._row - seen.last > seen.patience()

    def _forget(self, missing: dict[str, Presence]) -> None:
        for name, seen in missing.items():
            if self._row - seen.last > seen.patience() + PATIENCE:
                del self._presence[name]

    def _finding(self, step: ClosedStep, missing: dict[str, Presence], regular: int) -> Finding:
        names = sorted(missing)
        first = min(names, key=lambda name: (missing[name].step, name))
        what = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        return self.finding(
            step,
            "metric_vanished",
            Severity.WARNING,
            f"{what}: not logged since step {missing[first].step}, while {regular - len(names)} other metrics go on",
            onset=missing[first].step,
            metric=first,
            evidence={"metrics": names[:NAMED], "missing": len(names), "regular": regular},
        )
