"""Detect that a reward function fails, returns no reward, or takes far longer than at the run's beginning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, members, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold
from rlwatch.wording import number

ERRORS, TIMEOUTS, ABSENT = "verifier/errors/", "verifier/timeouts/", "verifier/absent/"
ON_ERROR, CANARY_FAILED = "verifier/full_on_error/", "verifier/canary_failed/"
SECONDS = "verifier/seconds/"
SHARES = {
    ERRORS: "a share of {} of its checks raises",
    TIMEOUTS: "a share of {} of its checks times out",
    ABSENT: "a share of {} of the answers gets no reward",
    ON_ERROR: "a share of {} of its full marks is given in spite of an exception",
    CANARY_FAILED: "a share of {} of its canaries cannot be scored",
}
"""Prefixes of metrics that are shares, each with the text for a level."""
PREFIXES = (*SHARES, SECONDS)
SERIES = 64
"""Most series that are followed."""
FIRST = 10
"""Number of first rows whose maximum is the baseline."""
RISEN = 0.2
"""Rise of a share (of timeouts, for example) above its baseline from which it is reported."""
ROWS = 5
"""Rows for which a rise must last."""
SLOWER, LEAST_S = 10.0, 1.0
"""Multiple of the longest call of the first rows, and seconds, from which a call is slow."""


class VerifierSeries:
    """One metric of a reward function, a share or a latency in seconds, compared with its first rows."""

    def __init__(self, *, seconds: bool) -> None:
        self.base = -math.inf
        self.last = 0.0
        self.risen = Hold(forgive=1)
        self._rows = 0
        self._seconds = seconds

    def update(self, step: int, value: float) -> None:
        """Read the metric's next finite ``value``, at least 0, at a training ``step``."""
        self.last = value
        if self._rows < FIRST:
            self._rows += 1
            self.base = max(self.base, value)
            self.risen.update(step, False)  # the hold learns how many steps a row covers
            return
        far = value > max(SLOWER * self.base, LEAST_S) if self._seconds else value > self.base + RISEN
        self.risen.update(step, far)

    @property
    def lasted(self) -> bool:
        """True if the metric has been far above its first rows for long enough."""
        return self.risen.lasted(ROWS)


class VerifierHealth(BaseDetector):
    """Detector of a failing or slow reward function.

    It reads errors, timeouts, missing rewards, unscored canaries (test answers with a known score), full marks after an
    exception, and seconds of a call. A share has risen if it exceeds the highest of its first ten rows by .2, for five
    rows: a warning. A call is slow if it takes ten times as long as the longest of the first ten rows, and more than a
    second, for five rows: info. The answers that a function does not score from the start (those of another task) are
    its baseline.
    """

    name: ClassVar[str] = "verifier_health"
    reads: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((prefix,) for prefix in PREFIXES)
    families: ClassVar[tuple[str, ...]] = PREFIXES
    levels: ClassVar[Mapping[str, str]] = SHARES
    seconds: ClassVar[str] = SECONDS

    def __init__(self) -> None:
        super().__init__()
        self._series: dict[str, VerifierSeries] = {}

    def measured(self, step: ClosedStep) -> bool:
        """Return True if the row ``step`` has a metric of this detector, such as a share of failed calls."""
        return any(finite(step, name) is not None for prefix in self.families for name in members(step, prefix))

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the metrics of the row ``step``; return findings for those that have risen, failures first."""
        for prefix in self.families:
            for name in members(step, prefix):
                value = finite(step, name)
                if value is None or value < 0.0 or not self.enough(step, name.removeprefix(prefix)):
                    continue
                if name in self._series or len(self._series) < SERIES:
                    self._series.setdefault(name, VerifierSeries(seconds=prefix == self.seconds)).update(
                        step.step, value
                    )
        risen = {name: one for name, one in self._series.items() if one.lasted}
        failing = {name: one for name, one in risen.items() if not name.startswith(self.seconds)}
        slow = {name: one for name, one in risen.items() if name.startswith(self.seconds)}
        fails, takes_long = self.kinds  # in the order of their entries in the catalogue
        return [*self._reported(step, fails, failing), *self._reported(step, takes_long, slow)]

    def enough(self, step: ClosedStep, function: str) -> bool:  # noqa: ARG002  (for subclasses)
        """Return True if the row has enough calls of ``function`` for its shares to be judged."""
        return True

    def _reported(self, step: ClosedStep, kind: str, risen: dict[str, VerifierSeries]) -> list[Finding]:
        if not risen:
            return []
        name = min(risen, key=lambda one: (risen[one].risen.since or 0, self.families.index(self._prefix(one)), one))
        one, prefix = risen[name], self._prefix(name)
        share = self.levels.get(prefix)
        text = f"a call takes {number(one.last)} s" if share is None else share.format(number(one.last))
        severity = Severity.INFO if share is None else Severity.WARNING
        return [
            self.finding(
                step,
                kind,
                severity,
                f"{name.removeprefix(prefix)}: {text}, at most {number(one.base)} in the first {FIRST} rows",
                onset=one.risen.since,
                metric=name,
                baseline=one.base,
                evidence=rounded({other: each.last for other, each in risen.items()}),
            )
        ]

    def _prefix(self, name: str) -> str:
        return next(prefix for prefix in self.families if name.startswith(prefix))
