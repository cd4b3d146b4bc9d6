"""Context of a metric: the reward with its noise and changes, and other metrics that support a detector's finding.

"Level" means the median of the last rows; a row is the metrics of one training step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, compress, pairwise
from operator import mul, sub
from typing import Any, cast

import numpy as np

from rlwatch.detectors.base import Stretch
from rlwatch.records import ClosedStep
from rlwatch.stats import Baseline, Window, mad, median, middles, ordered_quantile, quantile, running
from rlwatch.wording import number

MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""
NORMAL_80 = 1.2816
"""Standard deviations below which 80 % of the absolute values of a normal variable lie."""
SURE = 5.0
"""Standard errors that make a fall significant: the best level is a maximum over many windows, so 3 would be too
few.
"""
LIKELY = 4.0
"""Standard errors that make a rise over the start significant; the start, unlike the best level, is no maximum."""
VISIBLE = 0.1
"""Share of the reward's own range; smaller changes are ignored."""
TAKE_OFF, TAKE_OFF_ROWS = 1.0 / 3.0, 25
"""Share of its range, and number of rows within which the reward gains it, when a run discovers what is rewarded."""
NEARLY = 0.99
"""Factor on a limit: values below the product are below the limit whatever the rounding."""
ROUNDING = 1e-9
"""Share of a limit within which a comparison may be one of rounding."""
NOTHING = 1e-7
"""Gradient norm that counts as zero."""
LUCK = 1.5
"""Standard deviations subtracted from the first row when it is used as a level by itself."""
HELD_ROWS = 6
"""Number of rows whose median counts as a level that was held: two of three rows of small batches are often lucky."""
CHANCE = 0.01
"""Share of the usual spread of answers; a smaller change of their mean is none: the mean of 10,000 varies as much."""
LUCKY = 0.02
"""A fall is not counted if its low rows follow a few lucky ones by chance with more than this probability."""
LEVEL_STEPS = 15
"""Steps over which a level is measured, with three rows at least."""
LEAST_BEFORE, LEAST_LEVELS = 6, 4
"""Rows before the last level of the reward from which its noise is known, and number of levels from which theirs is."""
WANDERS = 3.0
"""Standard deviations of the reward's levels (over separate rows) beyond which a change is not due to hard or easy
data.
"""
SOLVED = 0.7
"""Mean reward, scaled to 0..1, from which groups with equal rewards mean a solved task.

If three quarters of the samples are in such groups and the mean is 0.7 or more, at least 0.45 of all samples are right
ones in such groups, so most of the groups are right. Runs that begin at 0.85 with nine in ten samples in such groups go
on learning.
"""
FULL = 0.9
"""Mean reward on the common 0..1 scale where hardly anything is left to gain: nearly all agreeing groups are right,
however they answer.
"""
RECENT_ROWS = 60
"""Number of newest rows whose reward is remembered one by one."""
BEGINNINGS = 16
"""Number of starting points of changes for which the level before is remembered."""
UNLIKE = 1.2
"""A fall counts as a new one if it exceeds the deepest fall from which the run has recovered by this factor."""


class AnswerCount:
    """Estimator of how many answers each mean reward is taken from, by its granularity, for rewards that are shares of
    right answers.

    Means such as 3/8 and 5/8 suggest eight answers.
    """

    MOST, LEAST = 64, 4
    """Number of answers per row beyond which they are simply many; and number of different means that show the
    granularity.
    """

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._count = 2

    def update(self, value: float) -> None:
        """Read the mean reward of the next row."""
        if not 0.0 <= value <= 1.0:
            self._count = self.MOST + 1
        if self._count > self.MOST:
            return
        if value not in self._seen:
            self._seen = [*self._seen[-23:], value]
        if not self._fits(value):
            while self._count <= self.MOST and not all(self._fits(seen) for seen in self._seen):
                self._count += 1

    @property
    def few(self) -> bool:
        """True while the means may be taken from few answers each."""
        return self._count <= self.MOST

    def _fits(self, value: float) -> bool:
        return abs(value * self._count - round(value * self._count)) < 1e-3 * self._count

    @property
    def error(self) -> float:
        """Standard error of the mean reward of one row with so few answers; 0 if their number is large or unknown."""
        return 0.5 / math.sqrt(self._count) if len(self._seen) >= self.LEAST and self._count <= self.MOST else 0.0


class RowsReadOnce:
    """Base of state that several detectors share, each of which gives it every row."""

    def __init__(self) -> None:
        self._taken: ClosedStep | None = None
        self._until: ClosedStep | None = None
        """The last of the rows that were read ahead, until it comes; None otherwise."""

    def _is_new(self, step: ClosedStep) -> bool:
        """Return whether the row is not read yet, neither by itself nor ahead; take it as read from now on."""
        if self._until is not None:
            if step is self._until:
                self._taken, self._until = step, None
            return False
        if step is self._taken:
            return False
        self._taken = step
        return True


class RewardWatch(RowsReadOnce):
    """Level of the reward now compared with its level at the start and its best so far; noise from first differences.

    The level is the median of the last rows. The first row, before any update, counts as a level (less ``LUCK``
    standard deviations): a run that breaks during its warm-up has then fallen from how it began. ``noise`` is the
    standard deviation of one row.
    """

    def __init__(self) -> None:
        super().__init__()
        self._window = Window(rows=10, steps=LEVEL_STEPS)
        self._held = Window(rows=10, steps=LEVEL_STEPS, least=HELD_ROWS)
        self._recent = Window(rows=RECENT_ROWS, steps=10**9, least=6)
        self._levels = Window(rows=16, steps=10**9)
        self._base = Baseline(rows=8, steps=15)
        self._first: float | None = None
        self._top: float | None = None
        self._low, self._high = math.inf, -math.inf
        self._noise: float | None = None
        self._wander: float | None = None
        self._rose: dict[float, bool] = {}
        self._best: float | None = None
        self._fell: dict[tuple[float, float], bool] = {}
        """Cached results for the last row: several detectors need the same."""
        self._before: dict[int, float] = {}
        """Step -> level before it, for changes that began then and persist."""
        self._deepest = self._survived = 0.0
        self._answers = AnswerCount()
        self._spread = Window(rows=60, steps=10**9, least=1)
        self._course: tuple[Stretch, RewardCourse | None] | None = None
        """The last result of :meth:`ahead`, with its rows."""

    def update(self, step: ClosedStep) -> None:
        """Read ``reward/mean`` of the row ``step``; the same row again is ignored, because detectors share this
        object.
        """
        if not self._is_new(step):
            return
        numbers = step.numbers
        spread, value = numbers.get("reward/std"), numbers.get("reward/mean")
        if spread is not None:
            self._spread.update(step.step, spread)
        if value is not None:
            self.take(step.step, value)

    def take(self, step: int, value: float) -> None:
        """Read a finite value of the reward, or of another score, at a step."""
        last = self._recent.last
        if last is not None and step <= last:
            self._deepest = self._survived = 0.0
            self._before.clear()
        self._first = value if self._first is None else self._first
        self._low, self._high = min(self._low, value), max(self._high, value)
        self._answers.update(value)
        if not self._base.done:
            self._base.update(step, value)
        self._window.update(step, value)
        self._held.update(step, value)
        self._recent.update(step, value)
        self._noise = self._wander = self._best = None
        self._rose.clear()
        self._fell.clear()
        level = self.now
        if level is None:
            return
        began, newest = self._window.oldest, self._levels.last
        if newest is None or began is None or began > newest:
            self._levels.update(step, level)
        if len(self._held) >= HELD_ROWS:
            held = median(self._held.values)
            self._top = held if self._top is None else max(self._top, held)
        self._remember_fall(level)

    def ahead(self, rows: Stretch) -> RewardCourse | None:
        """Return the course of the reward over the next ``rows``, which are not read by this; None where its levels
        cannot be computed in advance.
        """
        if self._course is None or self._course[0] is not rows:
            self._course = rows, self._found_ahead(rows)
        return self._course[1]

    def _found_ahead(self, rows: Stretch) -> RewardCourse | None:
        values, start, first, top = rows.column("reward/mean"), self.start, self._first, self._top
        at, steps = self._window.at, rows.steps
        if not values or start is None or first is None or top is None or not self._base.done or steps[0] <= at[-1]:
            return None
        # A first row above every level makes the best one depend on noise; a gap makes the newest row the level.
        if first > max(start, top) or max(map(sub, steps, [at[-1], *steps])) >= LEVEL_STEPS:
            return None
        now, held = self._window.medians(steps, values), self._window
        if self._held.at != at or len(self._held) <= HELD_ROWS:
            held = self._held
        levels = now if held is self._window else held.medians(steps, values)
        rows_before = RECENT_ROWS - len(at) if len(self._recent) == RECENT_ROWS and self._window.steady(steps) else 0
        recent = self._recent.values
        if self._answers.few:  # then noise is also a matter of their number
            rows_before = 0
        span = self._high - self._low
        return RewardCourse(
            values, now, levels, start=start, top=top, span=span, recent=recent, rows_before=rows_before
        )

    def extend(self, rows: Stretch) -> None:
        """Read all ``rows`` at once, as :meth:`update` would one by one; :meth:`update` then ignores these rows."""
        if self._until is rows.rows[-1]:
            return
        course, spreads, steps = self.ahead(rows), rows.column("reward/std"), rows.steps
        if course is None:
            for row in rows.rows:
                self.update(row)
        else:
            if spreads:
                self._spread.extend(steps, spreads)
            self._extend(steps, rows.column("reward/mean"), course)
        self._until = rows.rows[-1]

    def _extend(self, steps: Sequence[int], values: Sequence[float], course: RewardCourse) -> None:
        self._low, self._high = min(self._low, *values), max(self._high, *values)
        if self._answers.few:
            for value in values:
                self._answers.update(value)
        oldest = self._window.oldest_after(steps)
        for window in (self._window, self._held, self._recent):
            window.extend(steps, values)
        self._noise = self._wander = self._best = None
        self._rose.clear()
        self._fell.clear()
        newest = self._levels.last
        for step, began, level in zip(steps, oldest, course.levels, strict=True):
            if newest is None or began > newest:
                self._levels.update(step, level)
                newest = step
        self._top = course.top
        for level, best in zip(course.levels, course.bests, strict=True):
            fall = max(best - level, 0.0)
            self._deepest = max(self._deepest, fall)
            if fall <= self._deepest / 2.0:
                self._survived, self._deepest = max(self._survived, self._deepest), fall

    def wake(self) -> None:
        """Read each row again that :meth:`update` is given, also one that :meth:`extend` has read."""
        self._until = self._course = None

    def _remember_fall(self, level: float) -> None:
        """Store the deepest fall that recovered half of the way: data cause such falls, and will again."""
        best = self.best
        fall = 0.0 if best is None else max(best - level, 0.0)
        self._deepest = max(self._deepest, fall)
        if fall <= self._deepest / 2.0:
            self._survived, self._deepest = max(self._survived, self._deepest), fall

    @property
    def noise(self) -> float:
        """Standard deviation of the mean reward of one row, from the rows before the last level; computed once per row,
        on demand.

        All rows are used if those before never moved: a reward that has just begun to move shows no noise yet.
        """
        if self._noise is None:
            values = self._recent.values
            before = values[: -len(self._window)]
            known = uneven_noise_of(before) if len(before) >= LEAST_BEFORE else 0.0
            self._noise = max(known if known > 0.0 else uneven_noise_of(values), self.error)
        return self._noise

    @property
    def error(self) -> float:
        """Standard error of the mean reward of one row with few answers; 0 if their number is large or unknown."""
        return self._answers.error

    @property
    def wander(self) -> float:
        """Standard deviation of the reward's level, which data of changing difficulty move over many rows; 0 if unknown
        yet.

        It is computed from the changes between levels that share no row, around their median, because a trend is no
        noise. The newest change is left out, as it may be a fall.
        """
        if self._wander is None:
            before = self._levels.values[:-1]
            jumps = [b - a for a, b in pairwise(before)]
            self._wander = mad(jumps) / math.sqrt(2.0) if len(before) >= LEAST_LEVELS else 0.0
        return self._wander

    @property
    def now(self) -> float | None:
        """Level of the reward now: the median of the last rows; None with too few rows."""
        return self._window.get()

    @property
    def above(self) -> bool:
        """True if the level of the reward is above its start, by any amount."""
        now, start = self.now, self.start
        return now is not None and start is not None and now > start

    @property
    def still(self) -> bool:
        """True if the rewards of the last rows are all equal."""
        return self.now is not None and self._window.spread <= 1e-6 * max(1.0, abs(self.now))

    @property
    def start(self) -> float | None:
        """Median reward of the first rows; None if unknown."""
        return self._base.first

    @property
    def best(self) -> float | None:
        """Highest level of the reward so far, the first row included; None if unknown."""
        if self._best is None:
            self._best = self._found_best()
        return self._best

    def _found_best(self) -> float | None:
        start = self.start
        if start is None or self._first is None:
            return None
        level = start if self._top is None else max(start, self._top)
        # The noise only lowers the first row, so most rows need not compute it.
        return level if self._first <= level else max(level, self._first - LUCK * self.noise)

    def _counts(self, change: float, share: float, of: float, errors: float) -> bool:
        """Return whether a change counts: more than a share, visible on the reward's own range, and beyond noise."""
        if change <= max(share * abs(of), VISIBLE * self._range, CHANCE * (self._spread.get() or 0.0)):
            return False
        window = self._window
        error = self.noise if window.alone else MEDIAN_ERROR * self.noise / math.sqrt(max(len(window), 1))
        return change > errors * error and change > WANDERS * self.wander

    def fallen(self, share: float = 0.25, errors: float = SURE) -> bool:
        """Return True if the reward has lost ``share`` of its best level, by more than ``errors`` standard errors.

        The loss must also exceed any fall from which the run has recovered.
        """
        fell = self._fell.get((share, errors))
        if fell is None:
            fell = self._fell[share, errors] = self._has_fallen(share, errors)
        return fell

    def _has_fallen(self, share: float, errors: float) -> bool:
        now, best, start = self.now, self.best, self.start
        if now is None or best is None or start is None:
            return False
        unlike = best - now > UNLIKE * self._survived
        counts = unlike and self._counts(best - now, share, max(abs(best), best - start), errors)
        return counts and chance_of_low(self._recent.values, best, now) <= LUCKY

    def low(self, value: float, share: float = 0.25) -> bool:
        """Return True if the mean reward ``value`` of one row is below the best level by ``share`` of that level and by
        noise.

        Noise is two standard deviations of a row. Detectors date the beginning of a fall by such rows.
        """
        best = self.best
        if best is None or best - value <= max(share * abs(best), VISIBLE * self._range):
            return False
        return best - value > 2.0 * self.noise

    def plunged(self, newest: Sequence[float], share: float) -> bool:
        """Return True if the few ``newest`` rows lost ``share`` of the best level, beyond what noise explains."""
        best, start = self.best, self.start
        if best is None or start is None or not self.low(newest[-1], share):
            return False
        lost, of = best - sum(newest) / len(newest), max(abs(best), best - start)
        error = self.noise / math.sqrt(len(newest))
        return lost > max(share * of, CHANCE * (self._spread.get() or 0.0), SURE * error, WANDERS * self.wander)

    def right(self, value: float, *, cut: bool = False) -> bool:
        """Return True if groups with equal rewards agree because their answers are right, given the row's mean reward
        ``value``.

        The mean is then near the best level, which is that of a solved task, or one that the run rose to. ``cut``:
        answers are cut at the length limit, so that only a rise shows that they are answers.
        """
        if self.low(value):
            return False
        rose = self.start is not None and value > self.start and self.risen()
        return rose or (SOLVED <= value <= 1.0 and not cut)

    def holds(self, at: float) -> bool:
        """Return True if the level is at least ``at`` on the common 0..1 scale, at most 1, and has not fallen."""
        now = self.now
        return now is not None and at <= now <= 1.0 and not self.fallen()

    @property
    def _range(self) -> float:
        return self._high - self._low

    def near_full(self) -> bool:
        """Return True if the reward is near the top of the common 0..1 scale, or has risen to that of a solved task."""
        return self.holds(FULL) or (self.holds(SOLVED) and self.risen())

    def taking_off(self) -> bool:
        """Return True if the mean reward gained a third of its whole range within the last 25 rows, by more than noise.

        Earlier levels of other metrics, the gradient norm above all, are then no baseline: groups that all failed had
        no gradient.
        """
        now, values = self.now, self._recent.values
        if now is None or len(values) < TAKE_OFF_ROWS + 10:
            return False
        gained = now - median(values[-TAKE_OFF_ROWS - 10 : -TAKE_OFF_ROWS])
        return gained > TAKE_OFF * self._range and self._counts(gained, 0.0, 0.0, LIKELY)

    def risen(self, errors: float = LIKELY) -> bool:
        """Return True if the reward is clearly above its start, by more than ``errors`` standard errors."""
        rose = self._rose.get(errors)
        if rose is None:
            now, start = self.now, self.start
            rose = now is not None and start is not None and self._counts(now - start, 0.1, start, errors)
            self._rose[errors] = rose
        return rose

    def visible(self) -> bool:
        """Return True if the level is clearly above zero: a rise from a penalty to zero does not count as reward."""
        return self.now is not None and self.now > VISIBLE * self._range

    def pays(self, since: int) -> bool:
        """Return True if the reward is clearly higher than before step ``since``, so that it paid for a change since
        then.

        It must not have fallen, and a rise from a penalty to zero does not count: an empty answer is not punished. Call
        it from the first rows of the change on, because the level before is stored at the first call.
        """
        now, before = self.now, self._level_before(since)
        if now is None or before is None or not self.visible() or self.fallen():
            return False
        return self._counts(now - before, 0.1, before, LIKELY)

    def _level_before(self, since: int) -> float | None:
        """Return the level of ten rows, ``TAKE_OFF_ROWS`` before ``since``: a metric passes its limit while rising."""
        known = self._before.get(since)
        if known is not None or self.start is None:
            return known
        at, values = self._recent.at, self._recent.values
        earlier = bisect_left(at, since)
        if not earlier and self._before:
            return self._before[min(self._before, key=lambda other: abs(other - since))]  # too long ago: the nearest
        until = earlier - TAKE_OFF_ROWS
        known = self.start
        if until >= LEAST_BEFORE or len(values) == RECENT_ROWS:
            known = median(values[max(until - 10, 0) : max(until, 10)])
        while len(self._before) >= BEGINNINGS:
            del self._before[next(iter(self._before))]
        self._before[since] = known
        return known

    def in_words(self) -> str:
        """Return ``" while reward fell from 0.58 to 0.01"`` or the like; an empty string if the levels are unknown."""
        now, best, start = self.now, self.best, self.start
        if now is None or best is None or start is None:
            return ""
        if self.fallen():
            return f" while reward fell from {number(best)} to {number(now)}"
        how = f"rose from {number(start)} to" if self.risen() else "stalled:"
        return f" while reward {how} {number(now)}"


class RewardCourse:
    """Levels of the reward over rows that are known in advance, and what certainly does not happen in them.

    Parameters
    ----------
    values
        Mean reward of each row.
    levels, held
        The medians after each row that :class:`RewardWatch` compares: of the last rows, and of at least six.
    start, top
        Median of the run's first rows, and the highest held level before these rows.
    span
        Range of the mean rewards before these rows.
    recent
        Mean rewards of the newest rows before these.
    rows_before
        Rows among the newest before each level, from which the noise of a row is known; 0 where it is not.
    """

    def __init__(
        self,
        values: Sequence[float],
        levels: Sequence[float | None],
        held: Sequence[float | None],
        *,
        start: float,
        top: float,
        span: float,
        recent: Sequence[float],
        rows_before: int,
    ) -> None:
        self.levels = cast("list[float]", levels)
        """Level after each row."""
        tops = list(accumulate(cast("list[float]", held), max, initial=top))[1:]
        self.top = tops[-1]
        """Highest held level after the last row."""
        self.bests = [max(start, each) for each in tops]
        """Best level after each row."""
        self._values, self._now, self._best = np.array(values), np.array(levels), np.array(self.bests)
        self._start, self._span, self._least, self._recent, self._rows = (
            start,
            span,
            VISIBLE * span,
            recent,
            rows_before,
        )

    def cannot_fall(self, share: float = 0.25) -> bool:
        """Return True if :meth:`RewardWatch.fallen` is False after every row, for this ``share`` or a larger one."""
        best = self._best
        of = share * np.maximum(np.abs(best), best - self._start)
        return not (best - self._now > np.maximum(of, self._least)).any()

    def cannot_be_low(self, share: float = 0.25) -> bool:
        """Return True if :meth:`RewardWatch.low` is False for the reward of every row, for this ``share`` or a larger
        one.
        """
        best = self._best
        return not (best - self._values > np.maximum(share * np.abs(best), self._least)).any()

    def cannot_rise(self) -> bool:
        """Return True if :meth:`RewardWatch.risen` is False after every row."""
        return max(self.levels) - self._start <= max(0.1 * abs(self._start), self._least)

    @property
    def stays_above(self) -> bool:
        """True if the level is above the start after every row."""
        return min(self.levels) > self._start

    def cannot_take_off(self) -> bool:
        """Return True if :meth:`RewardWatch.taking_off` is False after every row."""
        whole, first = [*self._recent, *self._values.tolist()], len(self._recent)
        earlier = first - TAKE_OFF_ROWS - 9
        if earlier < 0:
            return first + len(self.levels) < TAKE_OFF_ROWS + 10
        before = middles(running(whole[earlier : len(whole) - TAKE_OFF_ROWS], 10))
        return not (self._now - before > NEARLY * TAKE_OFF * self._span).any()

    def above(self, deviations: float) -> list[bool] | None:
        """Return after each row whether the level exceeds the start by so many ``deviations`` of a row; None if
        unknown.
        """
        up = self._now > self._start
        if not up.any():
            return [False] * len(self.levels)
        noise = self._noise
        if noise is None:
            return None
        limit = self._start + deviations * noise
        close = np.abs(self._now - limit) <= ROUNDING * (abs(self._start) + deviations * noise)
        if (up & (close | (noise <= 0.0))).any():
            return None
        found: list[bool] = (up & (self._now > limit)).tolist()
        return found

    @cached_property
    def _noise(self) -> Any:
        """Return the standard deviation of a row before each level, correct but for rounding; None if unknown."""
        count = self._rows - 1
        if count < LEAST_BEFORE:
            return None
        jumps = np.abs(np.diff(np.array([*self._recent, *self._values.tolist()])))
        ordered = running(jumps[1:], count)[: len(self.levels)]
        at = 0.8 * (count - 1)
        low, part = int(at), at - int(at)
        plain = (ordered[:, low] * (1.0 - part) + ordered[:, low + 1] * part) / (NORMAL_80 * math.sqrt(2.0))
        kept = ordered[:, : count - max(count // 10, 1)]
        return np.maximum(plain, np.sqrt((kept * kept).mean(axis=1) / 2.0) / NORMAL_80)


def noise_of(values: list[float]) -> float:
    """Return the standard deviation of one row, from the 80th percentile of the jumps between neighbouring ``values``.

    A high percentile, because rewards are often discrete.
    """
    return _of_jumps(_jumps(values))


def uneven_noise_of(values: list[float]) -> float:
    """Return the standard deviation of one row where most rows carry little information and some a lot.

    An example are rows of one prompt each. It is the quadratic mean of all jumps except the largest tenth, if that is
    larger than :func:`noise_of`. For equal jumps both agree.
    """
    jumps = _jumps(values)
    kept = jumps[: len(jumps) - max(len(jumps) // 10, 1)] or jumps
    square = sum(map(mul, kept, kept)) / len(kept) if kept else 0.0
    return max(_of_jumps(jumps), math.sqrt(square / 2.0) / NORMAL_80)


def _jumps(values: list[float]) -> list[float]:
    """Return the absolute changes from row to row, in ascending order."""
    return sorted(map(abs, map(sub, values[1:], values)))


def _of_jumps(jumps: list[float]) -> float:
    return ordered_quantile(jumps, 0.8) / (NORMAL_80 * math.sqrt(2.0)) if jumps else 0.0


def chance_of_low(values: Sequence[float], best: float, now: float) -> float:
    """Return the probability of the low rows at the end of ``values``, if low rows are as frequent as before.

    A row is low below the middle of ``best`` and ``now``. The rows before begin with the first row that was not low.
    With one prompt per step most rows earn nothing and a few a lot: three or four lucky ones look like a level, and the
    usual rows like its end. While a level is held few rows are low, so two or three low ones after it are more than
    chance.
    """
    middle = (best + now) / 2.0
    low = [value < middle for value in values]
    while low and not low[-1]:
        low.pop()
    high = [i for i, each in enumerate(low) if not each]
    # Since the last row that was not low; or since the one before it, if that last one was lucky.
    return min((_as_low(low[high[0] : last + 1], low[last + 1 :]) for last in high[-2:]), default=0.0)


def _as_low(before: Sequence[bool], last: Sequence[bool]) -> float:
    # After few rows one low row is no fall; after six that were all high it was no part of the level.
    few = len(before) < HELD_ROWS
    share = (sum(before) + 0.5) / (len(before) + 1.0) if few else sum(before) / len(before)
    return binomial_tail(sum(last), len(last), share)


def binomial_tail(least: int, of: int, share: float) -> float:
    """Return the probability of at least ``least`` of ``of`` independent events of probability ``share``.

    >>> binomial_tail(2, 2, 0.5), binomial_tail(0, 2, 0.5)
    (0.25, 1.0)
    """
    return math.fsum(math.comb(of, k) * share**k * (1.0 - share) ** (of - k) for k in range(least, of + 1))


# A level of a noisy metric now, against its own start and its own best.


class Change:
    """A metric's level (median of the last rows) compared with its start (median of the first rows).

    Noise is the standard deviation of one row, from first differences, because a trend is no noise. ``rows``,
    ``steps``: extent of the last rows.
    """

    def __init__(self, rows: int = 15, steps: int = 30) -> None:
        self._base = Baseline()
        self._now = Window(rows=rows, steps=steps, least=5)
        self._recent = Window(rows=60, steps=10**9, least=6)

    def update(self, step: int, value: float) -> None:
        """Read the metric's next finite ``value``, at a training ``step``."""
        if not self._base.done:
            self._base.update(step, value)
        self._now.update(step, value)
        self._recent.update(step, value)

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Read finite ``values`` of the metric at ascending ``steps``; allowed once the metric's start is known."""
        self._now.extend(steps, values)
        self._recent.extend(steps, values)

    def span(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the lowest and the highest level that the metric can have while its next ``values`` are read."""
        return min(*values, self._now.lowest), max(*values, self._now.most)

    @property
    def now(self) -> float | None:
        """Median of the metric over the last rows; None if there are too few rows."""
        return self._now.get()

    @property
    def start(self) -> float | None:
        """Median of the metric over the first rows; None until all of them are known."""
        return self._base.get() if self._base.done else None

    @property
    def gain(self) -> float:
        """Distance of the metric's level from its start (negative: below the start); 0 if unknown."""
        now, start = self.now, self.start
        return 0.0 if now is None or start is None else now - start

    @property
    def share(self) -> float:
        """Ratio of the metric's level to its start; 1 if unknown, or if the start is not above zero."""
        now, start = self.now, self.start
        return 1.0 if now is None or start is None or start <= 0.0 else now / start

    @property
    def moved(self) -> bool:
        """True if the distance of the metric's level from its start is more than noise explains."""
        return abs(self.gain) > self._error

    @property
    def _error(self) -> float:
        return SURE * MEDIAN_ERROR * noise_of(self._recent.values) / math.sqrt(max(len(self._now), 1))


class Peak(Change):
    """A metric's level compared with its start, as :class:`Change`, and with its best level since then."""

    def __init__(self, rows: int = 15, steps: int = 30) -> None:
        super().__init__(rows, steps)
        self._best: float | None = None

    def update(self, step: int, value: float) -> None:
        """Read the metric's next finite value, at a step."""
        super().update(step, value)
        now = self.now
        if now is not None and self._base.done:
            self._best = now if self._best is None else max(self._best, now)

    @property
    def best(self) -> float | None:
        """Highest level since the start; None if unknown."""
        start = self.start
        return None if start is None else start if self._best is None else max(start, self._best)

    @property
    def fallen(self) -> float:
        """Distance of the level below its best; 0 if unknown."""
        now, best = self.now, self.best
        return 0.0 if now is None or best is None else max(best - now, 0.0)

    @property
    def dropped(self) -> bool:
        """True if the metric's level is below its best one by more than noise explains."""
        return self.fallen > self._error


# Other metrics that confirm or rule out a detector's finding.

DETERMINISTIC = 1e-3
"""Entropy, as a share of log V, below which a language model is practically deterministic."""
CUT = 0.95
"""Share of responses cut at the length limit that counts as nearly all."""
STIFF = 0.1
"""Range of mean rewards of the last rows, over that of the first rows, below which all batches earn about the same."""
AGREE = 1e-6
"""Spread of rewards, relative to their size, below which all rewards of a group count as equal."""


def kept_by_layer_clip(step: ClosedStep) -> float:
    """Return the factor by which layer-wise clipping scaled down the layer it clipped most; 1 without such clipping."""
    get = step.numbers.get
    scale, clipped = get("optim/clip_scale_min"), get("optim/layers_clipped")
    return 1.0 if scale is None or not clipped else min(max(scale, 0.0), 1.0)


def silent_share(step: ClosedStep) -> float | None:
    """Return the share of samples without gradient in this row, by the best measure logged; None if none is logged.

    It is the trainer's own share of groups with equal rewards. Otherwise it is 1 or 0: whether the reward did not vary
    at all, or whether all advantages were zero.
    """
    get = step.numbers.get
    share = get("reward/zero_std_frac")
    if share is not None:
        return min(max(share, 0.0), 1.0)
    spread = get("reward/std")
    if spread is not None:
        size = abs(get("reward/mean") or 0.0)
        return float(abs(spread) <= AGREE * max(size, 1.0))
    low, high = get("adv/min"), get("adv/max")
    if low is not None and high is not None:
        return float(max(abs(low), abs(high)) <= AGREE)
    return None


def silent_shares(rows: Stretch) -> list[float]:
    """Return :func:`silent_share` of each row; empty if the rows have no measure of it."""
    shares, spreads = rows.column("reward/zero_std_frac"), rows.column("reward/std")
    if shares:
        return [min(max(share, 0.0), 1.0) for share in shares]
    if spreads:
        sizes = rows.column("reward/mean") or [0.0] * len(spreads)
        return [float(abs(one) <= AGREE * max(abs(size), 1.0)) for one, size in zip(spreads, sizes, strict=True)]
    return [
        float(max(abs(low), abs(high)) <= AGREE)
        for low, high in zip(rows.column("adv/min"), rows.column("adv/max"), strict=False)
    ]


class RunContext(RowsReadOnce):
    """Reward, share of samples without gradient and gradient norm of a run, each compared with its own beginning.

    ``log_vocab``: the entropy of uniform noise in nats, which is the maximum; None if no vocabulary size is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reward = RewardWatch()
        self._silent = Window(rows=20, steps=20, least=5)
        self._grad = Window(rows=20, steps=20, least=5)
        self._pushed = Window(rows=20, steps=20, least=3)
        self._pushed_base = Baseline()
        self._means = Window(rows=20, steps=20, least=10)
        self._means_base = Baseline()
        self._clipped = Window(rows=10, steps=15)
        self._clipped_base = Baseline()
        self.log_vocab: float | None = None

    def update(self, step: ClosedStep) -> None:
        """Read the metrics of the row ``step`` that describe the run's course.

        All detectors of a run share this object, and each of them passes every row: a row that was read is ignored.
        """
        self.reward.update(step)
        if not self._is_new(step):
            return
        numbers = step.numbers
        share, mean = silent_share(step), numbers.get("reward/mean")
        if share is not None:
            self._silent.update(step.step, share)
        if mean is not None:
            self._means.update(step.step, mean)
            if not self._means_base.done:
                self._means_base.update(step.step, mean)
        norm = numbers.get("optim/grad_norm")
        if norm is not None:
            self._grad.update(step.step, abs(norm))
            if share is None or share < 1.0 or abs(norm) > NOTHING:
                self._pushed.update(step.step, abs(norm))
                self._pushed_base.update(step.step, abs(norm))
        clipped = numbers.get("len/clipped")
        if clipped is not None:
            self._clipped.update(step.step, clipped)
            if not self._clipped_base.done:
                self._clipped_base.update(step.step, clipped)
        vocab = numbers.get("policy/vocab_size")
        if vocab is not None and vocab > 1.0:
            self.log_vocab = math.log(vocab)

    def extend(self, rows: Stretch) -> None:
        """Read all ``rows`` at once, as :meth:`update` would one by one; :meth:`update` then ignores these rows."""
        self.reward.extend(rows)
        steps, shares, means = rows.steps, silent_shares(rows), rows.column("reward/mean")
        if shares:
            self._silent.extend(steps, shares)
        if means:
            self._means.extend(steps, means)
            self._means_base.extend(steps, means)
        norms = list(map(abs, rows.column("optim/grad_norm")))
        if norms:
            self._grad.extend(steps, norms)
            pushed = [norm > NOTHING or not shares or shares[i] < 1.0 for i, norm in enumerate(norms)]
            if any(pushed):
                rest = list(compress(steps, pushed)), list(compress(norms, pushed))
                self._pushed.extend(*rest)
                self._pushed_base.extend(*rest)
        clipped = rows.column("len/clipped")
        if clipped:
            self._clipped.extend(steps, clipped)
            self._clipped_base.extend(steps, clipped)
        for vocab in rows.column("policy/vocab_size"):
            if vocab > 1.0:
                self.log_vocab = math.log(vocab)
        self._until = rows.rows[-1]

    def wake(self) -> None:
        """Read each row again that :meth:`update` is given, also one that :meth:`extend` has read."""
        self._until = None
        self.reward.wake()

    @property
    def silent(self) -> float | None:
        """Mean share of samples without gradient (all rewards of their group are equal) over the last rows; None if
        unknown.
        """
        return self._silent.mean

    @property
    def has_learning_signal(self) -> bool:
        """True if half of the groups have differing rewards in at least one of six rows: a weak signal, but some."""
        return 6 * sum(share < 0.5 for share in self._silent.values) >= len(self._silent) > 0

    @property
    def grad(self) -> float | None:
        """Median gradient norm over the last rows; None if unknown."""
        return self._grad.get()

    def teaches(self, gradient: float, share: float) -> bool:
        """Return True if each of the last rows has a gradient above 0, and less than ``share`` of its samples have
        none.

        ``gradient``: smallest gradient norm of the next rows, which must be above 0 as well.
        """
        return self._silent.most < NEARLY * share and min(gradient, self._grad.lowest) > NOTHING

    @property
    def grad_ratio(self) -> float | None:
        """Median gradient norm of the last rows over the upper quartile of the first; None if unknown.

        Rows in which all groups agree are left out: their gradient is 0 by construction.
        """
        now, then = self._pushed.get(), self._pushed_base.upper()
        if now is None or then is None:
            return None
        return now / then if then > 0.0 else (0.0 if now == 0.0 else None)

    @property
    def truncated(self) -> bool:
        """True if nearly all responses of the last rows are cut at the length limit."""
        clipped = self._clipped.get()
        return clipped is not None and clipped >= CUT

    @property
    def newly_truncated(self) -> bool:
        """True if nearly all responses are cut at the length limit now, and were not when the run began."""
        return self.truncated and (self._clipped_base.first or 0.0) < CUT

    @property
    def stiff(self) -> bool:
        """True if all batches, which used to differ, now have about the same mean reward (judged by the range between
        deciles).
        """
        now, low, high = self._means, self._means_base.upper(0.1), self._means_base.upper(0.9)
        if len(now) < now.least or low is None or high is None or not self._means_base.done:
            return False
        return quantile(now.values, 0.9) - quantile(now.values, 0.1) < STIFF * (high - low)

    def mute(self) -> bool:
        """Return True if hardly any sample has a gradient: by their share alone, or by a lower share and one more
        metric.

        That metric is the gradient norm; if none is logged, that all batches earn the same.
        """
        share, ratio = self.silent, self.grad_ratio
        if share is None:
            return False
        return share >= 0.9 or (share >= 0.75 and (self.stiff if ratio is None else ratio <= 0.05))
