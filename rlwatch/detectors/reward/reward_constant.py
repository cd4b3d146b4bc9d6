"""The reward does not change: the same mean, to the last digit, row after row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.wording import number

SAME = 1e-9
"""Difference, relative to the size, up to which two means are one: what printing and parsing do to a number."""
ROWS, STEPS = 15, 20
"""Rows and steps one value must have stood: discrete rewards of small batches repeat for a few."""
USUAL = 3
"""Times the longest stretch the run has shown before: coarse rewards stand still now and then."""
SOLVED = 0.999
"""Mean reward on the common 0..1 scale that cannot rise any more."""
SETTLED = 0.01
"""Entropy, nats/token, of a policy as good as deterministic: 0.001 of that of uniform noise over 32 000 tokens."""
POLICY = ("policy/entropy", "optim/grad_norm")
"""Metrics that tell a dead policy from a metric that is stuck."""


class RewardConstant(BaseDetector):
    """Rows for which the mean reward has been one value, against the longest such stretch before.

    A verifier that always answers the same, a policy that always does, a logger that is stuck. Whether anything is
    still learned is for ``no_signal`` to say, so this is never critical, and a full score is ``info``. A mean that
    never moved although rewards vary within the batch is that of normalised ones: nothing is said of it. Where no
    spread is logged, a gradient says that they vary. Where the policy itself is broken (NaN), deterministic or
    without gradient, that is named as the reason, and not the metric.
    """

    name: ClassVar[str] = "reward_constant"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("reward/mean",),)
    reads: ClassVar[tuple[str, ...]] = ("reward/mean",)

    def __init__(self) -> None:
        super().__init__()
        self._value: float | None = None
        self._since = 0
        self._rows = 0
        self._longest = 0
        self._last: int | None = None
        self._spread: float | None = None
        self._policy: dict[str, float] = {}

    def notice(self, event: Event) -> None:
        """A run that goes on from a checkpoint begins to count anew."""
        if event.kind in ("resume", "rollback"):
            self._value = None

    def listen(self, step: ClosedStep) -> None:
        """Remember how the policy does, as last logged."""
        self._policy |= {name: step.metrics[name] for name in POLICY if name in step.metrics}

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Count the rows of one value."""
        value = finite(step, *self.reads)
        if value is None:
            return []
        spread = finite(step, "reward/std", "optim/grad_norm")
        # A gradient that has just become NaN does not unsay that rewards varied.
        self._spread = self._spread if spread is None else spread
        self._count(step.step, value)
        stood = self._rows >= max(ROWS, USUAL * self._longest) and step.step - self._since >= STEPS
        varies = self._spread is not None and self._spread > SAME
        normalised = varies and self._longest == 0
        return [self._finding(step, value, varies)] if stood and not normalised else []

    def _count(self, step: int, value: float) -> None:
        back = self._last is not None and step <= self._last
        self._last = step
        if self._value is not None and not back and abs(value - self._value) <= SAME * max(abs(self._value), 1.0):
            self._rows += 1
            return
        if self._value is not None and not back:
            # A stretch that was reported was no usual one.
            self._longest = max(self._longest, min(self._rows, ROWS - 1))
        self._value, self._since, self._rows = value, step, 1

    def _finding(self, step: ClosedStep, value: float, varies: bool) -> Finding:
        harmless = SOLVED <= value <= 1.0 and not varies
        return self.finding(
            step,
            "reward_constant",
            Severity.INFO if harmless else Severity.WARNING,
            f"the mean reward has been exactly {number(value)} for {self._rows} rows"
            + _says(varies, {} if harmless else self._policy),
            onset=self._since,
            metric="reward/mean",
            score=self._rows / max(ROWS, USUAL * self._longest),
            evidence=rounded({"reward": value, "rows": self._rows, "longest_before": self._longest}),
        )


def _says(varies: bool, policy: Mapping[str, float]) -> str:
    broken = [f"{name} = {value}" for name, value in policy.items() if not math.isfinite(value)]
    if broken:
        return f": most likely the policy is dead ({', '.join(broken)})"
    entropy, gradient = (policy.get(name, math.inf) for name in POLICY)
    if abs(entropy) <= SETTLED:
        return f": the policy always answers the same (policy/entropy = {number(entropy)})"
    if varies and abs(gradient) <= SAME:
        return " while rewards differ within the batch: the policy gets no gradient (optim/grad_norm = 0)"
    if varies:
        return " while rewards differ within the batch: most likely the metric itself is stuck"
    return ": the verifier or the policy always does the same, or the metric is stuck"
