"""Detect slow drift: metrics of several families are far from where the run began, and the reward has not gained.

A detector with a moving baseline follows a drift and treats it as normal, so this one compares with the first rows of
the run. A single distant family is weak evidence: lengths settle, entropy is spent on reward, a KL term is chosen
loose. Two distant families without a gain of reward mean that the policy wanders.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import FULL, RewardWatch, noise_of
from rlwatch.metrics import Family
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold, median
from rlwatch.wording import number

FIRST_ROWS, LAST_ROWS = 5, 3
"""Rows whose median is the start of the run, and rows whose median is its present level."""
SETTLED_ROWS, SETTLED_STEPS = 8, 10
"""Number of rows, and of steps, at the start of a run in which no drift is reported, as metrics settle then."""
NOISE_ROWS = 30
"""Number of newest rows from which the noise (standard deviation of one row) of a metric is estimated."""
BEYOND = 1.5
"""A level must exceed its limit by so many deviations of a single row: small batches reach any factor by chance."""
FAMILIES = 2
"""Number of families that must be far out at once."""
ROWS, SURE_ROWS, SURE_STEPS = 2, 4, 8
"""Rows for which the families must be far out for a warning; rows and steps for a critical finding."""
FINE = 4
"""Steps between two rows from which one row is enough for a warning: it already covers many steps."""
PAID = 1.5
"""Standard deviations of one row by which the mean reward must exceed its start to count as a gain."""
TINY = 1e-8
NEARLY = 1.0 - 1e-9
"""Factor on a limit: values below the product are below the limit whatever the rounding."""


def _log(value: float) -> float:
    return math.log(max(abs(value), TINY))


def _share(value: float) -> float:
    return value


@dataclass(frozen=True, slots=True)
class DriftMetric:
    """A metric that rises as a policy drifts, with the limits from which it counts as far out.

    ``far``: distance from the start, after ``scale``, that counts as far. ``least``: level in the metric's own unit
    below which the metric is harmless. ``floor``: lower bound on the start, because any level is a large multiple of a
    tiny one.
    """

    metric: str
    family: str
    far: float
    least: float
    floor: float
    scale: Callable[[float], float] = _log


KL, LENGTH = "kl", "length"
SIGNS = (
    *(DriftMetric(f"policy/kl_ref{kind}", KL, math.log(10.0), 0.5, 0.02) for kind in ("", "_k3")),
    DriftMetric("policy/entropy", Family.EXPLORATION.value, math.log(1.4), 0.1, 0.05),
    DriftMetric("len/mean", LENGTH, math.log(1.8), 0.0, 1.0),
    DriftMetric("len/clipped", LENGTH, 0.2, 0.3, 0.0, _share),
    DriftMetric("optim/grad_norm", Family.OPTIMISATION.value, math.log(8.0), 0.05, 0.01),
    DriftMetric("ratio/clipfrac", "clip", math.log(5.0), 0.05, 0.005),
    DriftMetric("mismatch/logp_absdiff", Family.MISMATCH.value, math.log(3.0), 0.01, 1e-3),
    DriftMetric("mismatch/kl", Family.MISMATCH.value, math.log(4.0), 5e-3, 1e-3),
)


class DriftCourse:
    """One metric over a run: its start, its level, and the step since which it has been half of the way to its
    limit.
    """

    def __init__(self, sign: DriftMetric) -> None:
        self.sign = sign
        self._first: list[float] = []
        self._rows: deque[float] = deque(maxlen=NOISE_ROWS)
        self._out = Hold(forgive=2)
        self.start: float | None = None
        """In the metric's own unit; None until known."""

    def update(self, step: int, value: float) -> None:
        """Read the metric's next finite ``value``, at a training ``step``."""
        value, sign = abs(value), self.sign
        self._rows.append(sign.scale(value))
        if self.start is None:
            self._first.append(value)
            if len(self._first) == FIRST_ROWS:
                self.start = median(self._first)
            return
        self._out.update(step, self._rows[-1] - self._began >= sign.far / 2.0)

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Read ``values`` of the metric at ascending ``steps``, none of which is half of the way to the limit."""
        self._rows.extend([self.sign.scale(abs(value)) for value in values[-NOISE_ROWS:]])
        self._out.miss(steps)

    def may_pass(self, values: Sequence[float]) -> bool:
        """Return True if none of the metric's next ``values`` is half of the way to the limit."""
        if self.start is None or self._out.rows:
            return False
        return self.sign.scale(max(map(abs, values))) - self._began < NEARLY * self.sign.far / 2.0

    @property
    def _began(self) -> float:
        return self.sign.scale(max(self.start or 0.0, self.sign.floor))

    @property
    def now(self) -> float:
        """Median of the metric over the last rows, on the metric's scale (mostly its logarithm)."""
        return median(list(self._rows)[-LAST_ROWS:])

    @property
    def far(self) -> float:
        """Distance of the metric from its start as a multiple of the limit; 0 if unknown, harmless or explained by
        chance.
        """
        if self.start is None or self._out.rows < LAST_ROWS - 1:
            return 0.0
        now, sign = self.now, self.sign
        if now < sign.scale(max(sign.least, TINY)):
            return 0.0
        gone = now - self._began
        chance = BEYOND * noise_of(list(self._rows))
        return gone / sign.far if gone >= max(sign.far, chance) else 0.0

    @property
    def since(self) -> int | None:
        """First step since which rows are half of the way to the limit; None if they are not."""
        return self._out.since

    def words(self) -> str:
        """Return the metric's name, its start and its level now, as words for a message."""
        now = math.exp(self.now) if self.sign.scale is _log else self.now
        return f"{self.sign.metric} from {number(self.start)} to {number(now)}"


class SlowDrift(BaseDetector):
    """Detector of slow drift: two families of metrics far from the run's first rows while the reward has gained
    nothing.

    Critical once it has lasted, unless the reward is nearly full or unknown: then there is no evidence of a loss.
    """

    name: ClassVar[str] = "slow_drift"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((sign.metric,) for sign in SIGNS)
    reads: ClassVar[tuple[str, ...]] = tuple(sign.metric for sign in SIGNS)
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._courses = {sign.metric: DriftCourse(sign) for sign in SIGNS}
        self._drifts, self._lasts = Hold(forgive=1), Hold(forgive=3)
        self._unpaid = Hold()
        self._start: int | None = None
        self._last: int | None = None
        self._rows = 0

    def pass_over(self, rows: Stretch) -> bool:
        """Read the metrics of all ``rows`` at once if none is half of the way to its limit.

        Where the gain of the reward is not known in advance, :meth:`judge` checks it row by row.
        """
        there = [(course, rows.column(name)) for name, course in self._courses.items() if name in rows.metrics]
        absent = any(course.since is not None for name, course in self._courses.items() if name not in rows.metrics)
        if absent or self._start is None or self._last is None or self._last >= rows.steps[0]:
            return False
        if not all(course.may_pass(values) for course, values in there):
            return False
        for course, values in there:
            course.extend(rows.steps, values)
        for hold in (self._drifts, self._lasts):
            hold.miss(rows.steps)
        self._rows, self._last = self._rows + len(rows.steps), rows.steps[-1]
        reward = self._reward.ahead(rows)
        paid = None if reward is None else reward.above(PAID)
        if paid is None:
            self._rows_left = len(rows.steps)
            return False
        for step, gained in zip(rows.steps, paid, strict=True):
            self._unpaid.update(step, not gained)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge all metrics of a row together and return the drift, if there is one."""
        if self._rows_left:
            self._rows_left -= 1
            self._unpaid.update(step.step, not self._paid)
            return []
        self._start = step.step if self._start is None else min(self._start, step.step)
        gap = 1 if self._last is None else step.step - self._last
        self._rows, self._last = self._rows + 1, step.step
        for name, course in self._courses.items():
            value = finite(step, name)
            if value is not None:
                course.update(step.step, value)
        far = self._far() if self._settled(step.step) else {}
        self._unpaid.update(step.step, not self._paid)
        for hold in (self._drifts, self._lasts):
            hold.update(step.step, len(far) >= FAMILIES and not self._paid)
        if not far or self._drifts.rows < (1 if gap >= FINE else ROWS):
            return []
        known = self._reward.now is not None and not self._reward.holds(FULL)
        sure = known and self._lasts.lasted(SURE_ROWS, SURE_STEPS)
        return [self._finding(step, list(far.values()), Severity.CRITICAL if sure else Severity.WARNING)]

    def _settled(self, step: int) -> bool:
        return self._rows > SETTLED_ROWS and self._start is not None and step - self._start >= SETTLED_STEPS

    def _far(self) -> dict[str, DriftCourse]:
        """Return the farthest metric of each family that is far out, the farthest first."""
        out: dict[str, tuple[float, DriftCourse]] = {}
        for course in self._courses.values():
            far = course.far
            if far > out.get(course.sign.family, (0.0, course))[0]:
                out[course.sign.family] = far, course
        ordered = sorted(out.items(), key=lambda item: -item[1][0])
        return {family: course for family, (_, course) in ordered}

    @property
    def _paid(self) -> bool:
        """Return whether the reward is above its start by more than noise."""
        reward = self._reward
        if reward.now is None or reward.start is None:
            return False
        return reward.now > reward.start and reward.now > reward.start + PAID * reward.noise  # noise is expensive

    def _onset(self, far: Sequence[DriftCourse]) -> int | None:
        """Return when two families were half of the way out, no earlier than the reward was last above its start.

        One family alone, or one that a rising reward paid for, was no failure yet.
        """
        dates = sorted(course.since for course in far if course.since is not None)[:FAMILIES]
        unpaid = self._unpaid.since
        return max([*dates, *([] if unpaid is None else [unpaid])], default=None)

    def _finding(self, step: ClosedStep, far: list[DriftCourse], severity: Severity) -> Finding:
        reward, heaviest = self._reward, far[0]
        metrics = "; ".join(course.words() for course in far)
        return self.finding(
            step,
            "slow_drift",
            severity,
            f"far from the first rows: {metrics}{reward.in_words()}",
            onset=self._onset(far),
            metric=heaviest.sign.metric,
            score=heaviest.far,
            baseline=heaviest.start,
            evidence=rounded({"families": len(far), "reward": reward.now, "reward_start": reward.start})
            | rounded({course.sign.metric: course.far for course in far}),
        )
