"""The system: steps that slow down or stand still, metrics that are no longer logged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.detectors.rise import MOST, Rise, RiseDetector, RiseLimit, inverse
from rlwatch.records import SHED, ClosedStep, Event, Finding, Severity
from rlwatch.stats import Baseline, Hold
from rlwatch.wording import number

SLOWER = 2.0
"""Times the usual. Machines, prompts and evaluations vary; twice as slow for rows on end doubles the bill."""
LEAST = 1.0
"""Seconds a step must take: a shorter one reflects the other load of its machine."""
NOTABLE = 1.25
"""Times the usual from which a step, or the time it takes per token, has become longer at all."""
FOR_LENGTH = "seconds per step and token"
"""Third series, derived from two metrics: ``time/step`` over ``len/mean``."""


class ThroughputDrop(RiseDetector):
    """Step time and tokens per second against how the run began (medians: a checkpoint or an evaluation is one row).

    ``info`` where longer responses explain the longer step, or where there are simply fewer tokens to process; else
    a warning. It never ends a run.
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
        """Return the value; a time or rate of 0 was not measured."""
        if limit.metric != FOR_LENGTH:
            return finite(step, limit.metric) or None
        seconds, tokens = finite(step, "time/step"), finite(step, "len/mean")
        return seconds / tokens if seconds and tokens and tokens >= 1.0 else None

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge tokens per second first: they are the same at any length."""
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
        """Return the slowdown, a remark where lengths explain it."""
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
"""Times the usual seconds per step: no evaluation and no long batch takes that for several rows in a row."""
SLOW_ROWS = 3
"""Consecutive rows of it."""
REPEATS = 5
"""Consecutive rows without a new step that no resume announced."""
RECORDS, USUAL_RECORDS = "rlwatch/records", "rlwatch/records_usual"
"""Records since the last new step, and the most an earlier step had: the monitor counts them."""
MANY, FIRST_MANY = 50, 1000
"""Records without a new step below which each micro-batch or rank may send its own; the same before any is known."""
TIMES = 10.0
"""Times the most an earlier step had."""


class StalledSteps(BaseDetector):
    """Rows without a new step, and seconds per step (the trainer's, else from the clock of the records).

    A run that sends nothing at all is reported by the watcher of the store (``run_silent``). Never more than a warning:
    the counter alone may be broken.
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
        """Note a resume: steps go back, and time has passed."""
        if event.kind in ("resume", "rollback"):
            self._before = None
            self._begin()

    def _begin(self) -> None:
        self._repeats = 0
        self._slow.clear()

    def measured(self, step: ClosedStep) -> bool:  # noqa: ARG002
        """Return True: every row has a step."""
        return True

    def arrival(self, step: ClosedStep) -> list[Finding]:
        """Report records that keep arriving while no step closes: nothing else would show them."""
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

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the counter, then the clock."""
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
"""Rows a metric must have been in before it is missed."""
MISSING = 10
"""Rows it must be absent."""
GAP_TIMES = 5
"""Times the longest gap it has had: evaluations, and metrics of every tenth step, have gaps."""
PATIENCE = 100
"""Rows after which a vanished metric is taken to be gone for good, on purpose."""
STAY = 0.5
"""Share of the regular metrics that must go on: a row of an evaluation holds none of the others."""
NAMES = 1000
"""Metrics followed at most."""
NAMED = 8
"""Names given at most."""
OWN = ("rlwatch/", "system/", "engine/")
"""Counters of rlwatch's own come when there is something to count, looks at machines and engines when it is time."""


@dataclass(slots=True)
class Presence:
    """The rows a metric was in: how many, the last, and the longest gap between."""

    rows: int
    last: int
    step: int
    gap: int = 1

    def patience(self) -> int:
        """Return the number of rows without the metric that are still normal."""
        return max(MISSING, GAP_TIMES * self.gap)


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
        """Note a resumed run, which may log other metrics, and metrics that were shed, which are not missing."""
        if event.kind in ("resume", "rollback", SHED):
            self._presence.clear()

    def measured(self, step: ClosedStep) -> bool:
        """Return whether the row holds metrics of the run."""
        return any(not name.startswith(OWN) for name in step.metrics)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Record the metrics of the row and report those that are missing."""
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
