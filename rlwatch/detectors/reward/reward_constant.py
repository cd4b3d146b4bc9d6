"""Detect a reward that does not move: the same mean to the last digit, or almost no change since the first row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import SOLVED as GOOD
from rlwatch.detectors.context import RewardCourse, RewardWatch, silent_share, silent_shares
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.stats import Thinned, exact_sum
from rlwatch.wording import number

SAME = 1e-9
"""Difference, relative to the size, up to which two means are equal: the effect of printing and parsing a number."""
ROWS, STEPS = 15, 20
"""Rows and steps for which one value must last: discrete rewards of small batches repeat for a few."""
USUAL = 3
"""Multiple of the longest constant stretch before: coarse rewards repeat now and then."""
SEEN = 10
"""Number of rows from the first on with one value after which a mean reward carries no information."""
SOLVED = 0.999
"""Mean reward, scaled to 0..1, at which it cannot rise any more."""
SETTLED = 0.01
"""Entropy, nats/token, of a nearly deterministic policy: 0.001 of that of uniform noise over 32 000 tokens."""
POLICY = ("policy/entropy", "optim/grad_norm")
"""Metrics that show whether a constant reward comes from a policy that does not change or from a stuck metric."""


NOTHING, LITTLE = 0.1, 0.25
"""Mean reward of a row, on the common 0..1 scale, that is nearly zero; and one that is small if groups agree."""
SOME = 0.5
"""Mean reward of a single row, scaled to 0..1, that shows that success is possible, however rare."""
AGREE = 0.6
"""Mean share of the samples in groups with equal rewards from which little learning signal is left."""
NEARLY_ALL = 0.9
"""Share of all rows so far whose reward must be that low."""
FLOOR = -0.05
"""Rewards below this value are on another scale, on which 0 is no lower bound."""
BARREN_ROWS, BARREN_STEPS = 50, 50
"""Number of rows, and of steps, that a run has to find its first rewards: learning from rare successes begins
slowly.
"""
APART_ROWS, APART_STEPS = 15, 150
"""Rows and steps where groups agree, or their share is not logged: rows far apart cover many steps."""
STILL_ROWS, STILL_STEPS = 25, 200
"""Number of rows, and of steps, after which a reward that certainly gained nothing is reported, whatever its scale."""
CERTAIN, GAIN = 2.0, 1.0
"""Standard errors of the bound on the gain of the reward, and standard deviations of a row that count as a gain."""
STIFF = 0.05
"""Standard deviation of a row's mean reward, as a share of its level, below which the reward does not move at all."""
TINY = 1e-12


class Barren:
    """Recognise a run that never learns: the reward is near zero in nearly all rows and has not risen.

    Once the reward has risen, or a batch was mostly right, it never reports again.
    """

    def __init__(self) -> None:
        self.reward = RewardWatch()
        self._alive = False
        self._nothing = self._little = self._counted = 0
        self._silent = 0.0
        self.rows = 0
        self.since = 0

    def update(self, step: ClosedStep, reward: float) -> bool:
        """Read the row ``step`` with the mean ``reward``; return True if the run has not learnt to find rewards."""
        if self._alive:
            return False
        self.since = min(self.since, step.step) if self.rows else step.step
        self.rows += 1
        self._nothing += reward <= NOTHING
        self._little += reward <= LITTLE
        silent = silent_share(step)
        if silent is not None:
            self._silent += silent
            self._counted += 1
        self._alive = reward < FLOOR or reward > SOME or self.reward.risen()
        if self._alive or not (self._lasted(step, BARREN_ROWS, BARREN_STEPS) or self._lasted_apart(step)):
            return False
        low = NEARLY_ALL * self.rows
        return self._nothing >= low or (self._little >= low and (self.silent or 0.0) >= AGREE)

    def can_pass(self, rewards: Sequence[float], course: RewardCourse) -> bool:
        """Return True if :meth:`update` returns False for each of the next ``rewards``, and the run is not alive by
        them.

        ``course``: course of the reward over these rows.
        """
        if self._alive:
            return True
        if not self.rows or min(rewards) < FLOOR or max(rewards) > SOME or not course.cannot_rise():
            return False
        return self._little + sum(reward <= LITTLE for reward in rewards) < NEARLY_ALL * self.rows

    def extend(self, rows: Stretch, rewards: Sequence[float]) -> None:
        """Read all ``rows`` with the mean ``rewards`` at once, for which :meth:`can_pass` is True."""
        if self._alive:
            return
        self.since = min(self.since, rows.steps[0])
        self.rows += len(rewards)
        self._nothing += sum(reward <= NOTHING for reward in rewards)
        self._little += sum(reward <= LITTLE for reward in rewards)
        for share in silent_shares(rows):
            self._silent += share
            self._counted += 1

    def _lasted(self, step: ClosedStep, rows: int, steps: int) -> bool:
        return self.rows >= rows and step.step - self.since + 1 >= steps

    def _lasted_apart(self, step: ClosedStep) -> bool:
        agree = self.silent is None or self.silent >= AGREE
        return agree and self._lasted(step, APART_ROWS, APART_STEPS)

    @property
    def silent(self) -> float | None:
        """Mean share of the samples in groups with equal rewards, over the rows that log it; None if none does."""
        return self._silent / self._counted if self._counted else None

    @property
    def level(self) -> float | None:
        """Median of the mean reward over the last rows; None if unknown."""
        return self.reward.now


class Unmoved:
    """Recognise a reward that certainly gained nothing since the first row, on any scale: last third against first
    third.

    Once the reward has risen or fallen, or if it is as high as it can be, it never reports again.
    """

    def __init__(self) -> None:
        self.reward = RewardWatch()
        self._points = Thinned(48)
        self._thirds: tuple[int, float, float] = (-1, 0.0, 0.0)
        """Of the points: their version, the change from the first third to the last, and the bound on its error."""
        self._moved = False
        self._start: int | None = None
        self._rows = 0
        self.gained = 0.0
        """Upper bound on the gain, in deviations of a row."""

    def update(self, step: ClosedStep, value: float) -> bool:
        """Read the row ``step`` with the mean reward ``value``; return True if the reward gained nothing over the
        run.
        """
        if self._moved:
            return False
        self._points.update(step.step, step.step, value)
        self._start = step.step if self._start is None else min(self._start, step.step)
        self._rows += 1
        self._moved = self.reward.risen() or self.reward.fallen()
        if self._moved or self._rows < STILL_ROWS or step.step - self._start < STILL_STEPS:
            return False
        return not self.reward.holds(GOOD) and self._certain()

    def can_pass(self, course: RewardCourse) -> bool:
        """Return True if the reward neither rises nor falls over the next rows, whose ``course`` is known."""
        return self._moved or (self._start is not None and course.cannot_rise() and course.cannot_fall())

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Read rows at once, for which :meth:`can_pass` is True and no finding can follow."""
        if self._moved:
            return
        for step, value in zip(steps, values, strict=True):
            self._points.update(step, step, value)
        self._start = min(self._start or 0, steps[0])
        self._rows += len(steps)

    @property
    def dismissed(self) -> bool:
        """True if it never reports again."""
        return self._moved

    def dismiss(self) -> None:
        """Never report again, because the constant value was already reported."""
        self._moved = True

    def _certain(self) -> bool:
        third = len(self._points) // 3
        if third < 3:
            return False
        if self._thirds[0] != self._points.version:
            values = self._points.get()[1]
            first, last = values[:third], values[-third:]
            error = math.sqrt((_variance(first) + _variance(last)) / third)
            self._thirds = self._points.version, (exact_sum(last) - exact_sum(first)) / third, CERTAIN * error
        _, change, error = self._thirds
        noise = max(self.reward.noise, TINY)
        self.gained = change / noise + error / noise
        return self.gained < GAIN

    @property
    def still(self) -> bool:
        """True if the rewards of its rows hardly differ, relative to their level."""
        return self.reward.noise <= STIFF * abs(self.reward.now or 0.0)

    @property
    def level(self) -> float | None:
        """Median of the mean reward over the last rows; None if unknown."""
        return self.reward.now

    @property
    def since(self) -> int:
        """First step of the run that was read here."""
        return self._start or 0


def _variance(values: list[float]) -> float:
    mean = exact_sum(values) / len(values)
    return exact_sum([(value - mean) ** 2 for value in values]) / (len(values) - 1)


class RewardConstant(BaseDetector):
    """Detector of a mean reward that repeats one value, for longer than any such stretch before.

    The cause is a verifier that always returns the same value, a policy that always answers the same, or a stuck
    logger. ``no_signal`` reports whether anything is still learned, so this finding is never critical; at full score it
    is ``info``. A mean that never moved although rewards vary within the batch is normalised or rounded: it carries no
    information (``reward_uninformative``, ``info``), and the run is not judged by it. If no spread is logged, a
    gradient shows that rewards vary. If the policy itself is broken (NaN), deterministic or without gradient, the
    message names that as the reason instead of the metric.

    A reward that moves but stays near zero is reported as ``never_learns``. So is a reward that certainly gained
    nothing in 200 steps, if it is small and the share of agreeing groups is not logged, or if it is stiff on a scale of
    its own.
    """

    name: ClassVar[str] = "reward_constant"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("reward/mean",),)
    reads: ClassVar[tuple[str, ...]] = ("reward/mean",)
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._value: float | None = None
        self._since = 0
        self._rows = 0
        self._longest = 0
        self._last: int | None = None
        self._spread: float | None = None
        self._policy: dict[str, float] = {}
        self._barren, self._unmoved = Barren(), Unmoved()
        self._barren.reward = self._unmoved.reward = self._reward

    def share(self, common: Mapping[type, Any]) -> None:
        """Share the object that follows the mean reward with the run's other detectors.

        ``common``: class of the shared state -> the object that all detectors of the run use.
        """
        super().share(common)
        self._barren.reward = self._unmoved.reward = self._reward

    def notice(self, event: Event) -> None:
        """Start anew if the run continues from a checkpoint."""
        if event.kind in ("resume", "rollback"):
            self._value = None

    def listen(self, step: ClosedStep) -> None:
        """Remember the latest entropy, gradient norm and other metrics that show whether the policy changes."""
        super().listen(step)
        self._policy |= {name: step.metrics[name] for name in POLICY if name in step.metrics}

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if their reward varies, moves neither up nor down, and is not low."""
        rewards, course, last = rows.column("reward/mean"), self._reward.ahead(rows), self._last
        if course is None or self._longest == 0 or self._value is None or last is None or rows.steps[0] <= last:
            return False
        longest = self._rows + 1
        if any(abs(b - a) <= SAME * max(abs(a), 1.0) for a, b in pairwise((self._value, *rewards))):
            return False
        if longest >= ROWS or not (self._barren.can_pass(rewards, course) and self._unmoved.can_pass(course)):
            return False
        if not self._unmoved.dismissed and not (min(course.levels) > LITTLE and max(course.levels) <= 1.0):
            return False
        spreads = rows.first("reward/std", "optim/grad_norm")
        self._spread = spreads[-1] if spreads else self._spread
        self._policy |= {name: rows.column(name)[-1] for name in POLICY if name in rows.metrics}
        self._longest = max(self._longest, self._rows)
        self._value, self._since, self._rows, self._last = rewards[-1], rows.steps[-1], 1, rows.steps[-1]
        self._barren.extend(rows, rewards)
        self._unmoved.extend(rows.steps, rewards)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Count rows with one and the same mean reward, and with one near zero; return findings once there are
        enough.
        """
        value = finite(step, *self.reads)
        if value is None:
            return []
        spread = finite(step, "reward/std", "optim/grad_norm")
        # A gradient that has just become NaN leaves the last known variation of rewards in place.
        self._spread = self._spread if spread is None else spread
        self._count(step.step, value)
        stood = self._rows >= max(ROWS, USUAL * self._longest) and step.step - self._since >= STEPS
        varies = self._spread is not None and self._spread > SAME
        normalised = varies and self._longest == 0
        barren, unmoved = self._barren.update(step, value), self._unmoved.update(step, value)
        if self._longest == 0 and self._rows >= SEEN and (normalised or not stood) and not _full(value, varies):
            return [self._uninformative(step, value)]
        if normalised:
            return []
        if stood:
            self._unmoved.dismiss()
            return [self._finding(step, value, varies)]
        if barren:
            return [self._never(step, value)]
        return [self._never_moved(step, value)] if unmoved and self._conclusive(value) else []

    def _uninformative(self, step: ClosedStep, value: float) -> Finding:
        return self.finding(
            step,
            "reward_uninformative",
            Severity.INFO,
            f"the mean reward has been exactly {number(value)} in all {self._rows} rows: it is normalised or rounded, "
            "or no response ever earned one; log the reward as the verifier gives it",
            onset=self._since,
            metric="reward/mean",
            evidence=rounded({"reward": value, "rows": self._rows}),
        )

    def _conclusive(self, value: float) -> bool:
        """Return whether a reward without gain is small with groups not logged, or stiff on a scale of its own.

        Any other reward without gain may be the best that this policy reaches.
        """
        now = value if self._unmoved.level is None else self._unmoved.level
        if FLOOR <= now <= 1.0:
            return now <= LITTLE and self._barren.silent is None
        return self._unmoved.still

    def _never_moved(self, step: ClosedStep, value: float) -> Finding:
        unmoved, silent = self._unmoved, self._barren.silent
        now = value if unmoved.level is None else unmoved.level
        return self.finding(
            step,
            "never_learns",
            Severity.WARNING,
            f"no reward gain in {step.step - unmoved.since} steps: reward {number(now)}, as at the start",
            onset=unmoved.since,
            metric="reward/mean",
            evidence=rounded({"reward": now, "gained at most, deviations": unmoved.gained, "silent_share": silent}),
        )

    def _never(self, step: ClosedStep, value: float) -> Finding:
        barren, silent = self._barren, self._barren.silent
        now = value if barren.level is None else barren.level
        groups = "" if silent is None else f"; zero-variance groups: {silent:.0%} of the samples"
        return self.finding(
            step,
            "never_learns",
            Severity.WARNING,
            f"no learning in {step.step - barren.since + 1} steps: reward {number(now)} never rose{groups}",
            onset=barren.since,
            metric="reward/mean",
            score=barren.rows / BARREN_ROWS,
            evidence=rounded({"reward": now, "rows": barren.rows, "silent_share": silent}),
        )

    def _count(self, step: int, value: float) -> None:
        back = self._last is not None and step <= self._last
        self._last = step
        if self._value is not None and not back and abs(value - self._value) <= SAME * max(abs(self._value), 1.0):
            self._rows += 1
            return
        if self._value is not None and not back:
            # A stretch that was reported does not count as normal.
            self._longest = max(self._longest, min(self._rows, ROWS - 1))
        self._value, self._since, self._rows = value, step, 1

    def _finding(self, step: ClosedStep, value: float, varies: bool) -> Finding:
        harmless = _full(value, varies)
        return self.finding(
            step,
            "reward_constant",
            Severity.INFO if harmless else Severity.WARNING,
            f"the mean reward has been exactly {number(value)} for {self._rows} rows"
            + _explanation(varies, {} if harmless else self._policy),
            onset=self._since,
            metric="reward/mean",
            score=self._rows / max(ROWS, USUAL * self._longest),
            evidence=rounded({"reward": value, "rows": self._rows, "longest_before": self._longest}),
        )


def _full(value: float, varies: bool) -> bool:
    """Return whether a constant mean reward is that of a run that solved its task."""
    return SOLVED <= value <= 1.0 and not varies


def _explanation(varies: bool, policy: Mapping[str, float]) -> str:
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
