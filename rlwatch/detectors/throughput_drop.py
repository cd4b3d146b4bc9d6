"""Training became slow: seconds per step up, tokens per second down."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import finite, number, rounded
from rlwatch.detectors.long_tail import inverse
from rlwatch.detectors.rise import MOST, Limit, Rise, RiseDetector
from rlwatch.records import ClosedStep, Finding, Severity

SLOWER = 2.0
"""Times the usual. Machines, prompts and evaluations vary; twice as slow for rows on end doubles the bill."""
LEAST = 1.0
"""Seconds a step must take: that of a toy says more of what else its machine does."""
NOTABLE = 1.25
"""Times the usual from which a step, or the time it takes per token, has become longer at all."""
FOR_LENGTH = "seconds per step and token"
"""What is followed beside the two metrics: ``time/step`` over ``len/mean``."""


class ThroughputDrop(RiseDetector):
    """Step time and tokens per second against how the run began (medians: a checkpoint or an evaluation is one row).

    ``info`` where longer responses explain the longer step, or where there are simply fewer tokens to process; else
    a warning. It never ends a run.
    """

    name: ClassVar[str] = "throughput_drop"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("time/throughput", MOST, SLOWER, inverse),
        Limit("time/step", LEAST, SLOWER),
        Limit(FOR_LENGTH, 1e-9, NOTABLE),
    )
    reads: ClassVar[tuple[str, ...]] = ("time/step", "time/throughput")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("time/step",), ("time/throughput",))

    def read(self, step: ClosedStep, metric: str) -> float | None:
        """Times and rates of 0 were not measured."""
        if metric != FOR_LENGTH:
            return finite(step, metric) or None
        seconds, tokens = finite(step, "time/step"), finite(step, "len/mean")
        return seconds / tokens if seconds and tokens and tokens >= 1.0 else None

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge tokens per second first: they are the same at any length."""
        for rise in self._rises:
            rise.update(step.step, self.read(step, rise.limit.metric))
        rate, time, _ = self._rises
        slow = next((rise for rise in (rate, time) if rise.lasted), None)
        return [] if slow is None else [self.told(step, slow)]

    def _explained(self, slow: Rise) -> bool:
        """Whether fewer or longer responses are all there is to it."""
        rate, time, per_token = self._rises
        if slow is rate:
            return time.factor is not None and time.factor < NOTABLE
        return per_token.factor is not None and per_token.factor < NOTABLE

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """How slow, and whether lengths explain it."""
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
