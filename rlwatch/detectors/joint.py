"""Detect a collapse by joint evidence: metrics of several families leave the run's own past in the same rows.

One moving metric is weak evidence: data differ in difficulty, batches are small, spikes pass. If the reward falls in
the rows in which the entropy doubles or every answer is cut, the run has failed, and two rows show it. Each indicator
measures the deviation of one metric in one direction, in units of the metric's chance variation in this run. Agreement
between families makes the detector fast; a single family needs strong evidence.

The limits were chosen on :mod:`rlwatch.testing.small_batches` and on public runs, which docs/detection.md lists.
Figures on those runs are in-sample.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from operator import sub
from typing import ClassVar

import numpy as np

from rlwatch.detectors.base import BaseDetector, Stretch, rounded
from rlwatch.detectors.context import HELD_ROWS, LUCKY, NORMAL_80, AnswerCount, chance_of_low, uneven_noise_of
from rlwatch.metrics import Family
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold, median, middles, ordered_quantile, running
from rlwatch.wording import number

REFERENCE_STEPS, REFERENCE_ROWS, FEWEST_ROWS = 60, 12, 3
"""Steps of the reference window, which ends before the last two rows; its fewest rows if few steps are logged; and the
number of reference rows below which nothing is judged.
"""
LAST = 2
"""Number of newest rows that must deviate: the smaller deviation counts, so that one odd row has no effect."""
NORMAL_95 = 1.645
"""Standard deviations between the median and the 95th percentile of a normal variable."""
MANY = 8
"""Number of earlier deviations from which the run's chance variation can be estimated."""
DELAY = 2
"""Rows after which a deviation counts as chance variation; the beginning of a failure shows within fewer."""
UNPRECEDENTED = 2.25
"""Upper bound on a deviation, in units of chance variation, if the run has had one as large before and survived it."""
SILENCE, UNIT, MOST = 1.5, 1.5, 3.0
"""Constants of the evidence of z deviations, (z - SILENCE) / UNIT, which is limited to 0..MOST."""
HALF_LIFE = 5
"""Number of steps in which evidence halves that no new deviation renews."""
ACCEPTED_ROWS = 12
"""Number of rows after which a lasting deviation of a metric becomes part of the run's reference."""
FINE = 4
"""Steps between two rows below which two rows must agree; rows further apart already cover many steps each."""
ONE_PROMPT_ROWS, SINGLE_ROWS = 8, 4
"""Rows after which a run is known to log one prompt per row, and the number of rows that must then agree."""
SOME = 0.2
"""An indicator with less evidence does not keep an alarm raised."""
SIGNIFICANT = 0.6
"""Evidence from which a family counts as confirming another."""
CRITICAL, WARNING = 2.2, 2.0
"""Joint evidence from which a finding is critical, and from which it is a warning.

Without its heaviest part the evidence must still be significant.
"""
REWARD_WEIGHT = 1.5
"""Weight of the evidence of a falling reward: the reward is what the run optimises, so it counts more than a
symptom.
"""
GONE, PARTLY = 0.9, 0.5
"""Hard data repeatedly cost small batches a part of the reward. A fall by less than the share ``GONE`` is weighted by
``PARTLY``.
"""
DEPTH = 0.5
"""Share of the reward's whole range that a fall of it must cover to be sufficient evidence by itself."""
ALONE = 0.55
"""Share of the best reward below which a fall of it is never sufficient evidence by itself."""
WELL = 0.5
"""Factor on all other evidence while the reward is at its best: many metrics move in a run that learns."""


def log(value: float) -> float:
    """Return the logarithm of the magnitude of ``value``, at least that of 1e-8: factors count, not differences."""
    size = abs(value)
    return math.log(1e-8 if size < 1e-8 else size)


def logit(share: float) -> float:
    """Return the log odds of a share, clamped to 0.3 % and 99.7 %: beyond these, small counts dominate."""
    kept = min(max(share, 0.003), 0.997)
    return math.log(kept / (1.0 - kept))


def same(value: float) -> float:
    """Return ``value`` unchanged, as the scale of metrics for which a difference means the same at any level."""
    return value


@dataclass(frozen=True, slots=True)
class Indicator:
    """A metric and the direction in which it leaves its past when a run fails.

    ``effect``: the deviation, after ``scale``, that is weak evidence. ``least`` and ``most``: bounds in the metric's
    own unit outside which the move is harmless. ``cap``: the largest evidence it can give. ``alone``: a level that no
    sound run reaches from far below it, which is sufficient evidence by itself.
    """

    metric: str
    family: str
    up: bool
    effect: float
    scale: Callable[[float], float] = log
    least: float = -math.inf
    most: float = math.inf
    cap: float = MOST
    alone: float = math.inf

    @property
    def words(self) -> str:
        """Name of the metric and the direction, such as ``policy/entropy up``."""
        return f"{self.metric} {'up' if self.up else 'down'}"


SIGNAL = "signal"
"""Family of metrics of groups with equal rewards. A reward that falls to zero causes those, so they do not confirm
it.
"""
LENGTH, CUT = "length", "cut"

INDICATORS = (
    Indicator("policy/entropy", Family.EXPLORATION.value, True, math.log(1.8), least=0.1, alone=1.5),
    Indicator("policy/entropy", Family.EXPLORATION.value, False, math.log(2.5), most=0.2),
    Indicator("len/mean", Family.ROLLOUTS.value, False, math.log(2.2)),
    Indicator("len/mean", Family.ROLLOUTS.value, True, math.log(1.8), cap=1.5),
    Indicator("len/clipped", Family.ROLLOUTS.value, True, 0.25, same, least=0.3, alone=0.9),
    Indicator("text/garbled", Family.ROLLOUTS.value, True, 0.1, same),
    Indicator("text/id0_frac", Family.ROLLOUTS.value, True, 0.1, same),
    Indicator("text/looping_frac", Family.ROLLOUTS.value, True, 0.15, same),
    Indicator("optim/grad_norm", Family.OPTIMISATION.value, True, math.log(5.0), least=1e-2),
    Indicator("critic/value_loss", Family.CRITIC.value, True, math.log(5.0), least=1e-2),
    Indicator("policy/kl_ref", Family.TRUST_REGION.value, True, math.log(4.0), least=0.05),
    Indicator("policy/kl_old", Family.TRUST_REGION.value, True, math.log(4.0), least=0.02),
    Indicator("ratio/clipfrac", Family.TRUST_REGION.value, True, math.log(4.0), logit, least=0.05),
    Indicator("ratio/max", Family.TRUST_REGION.value, True, math.log(4.0), least=5.0),
    Indicator("ratio/ess", Family.TRUST_REGION.value, False, math.log(2.0), most=0.7),
    Indicator("mismatch/logp_absdiff_max", Family.MISMATCH.value, True, math.log(2.5), least=1.0),
    Indicator("mismatch/is_ratio_min", Family.MISMATCH.value, False, math.log(3.0)),
    Indicator("mismatch/logp_absdiff", Family.MISMATCH.value, True, math.log(2.5), least=0.01),
    Indicator("mismatch/k3", Family.MISMATCH.value, True, math.log(4.0), least=1e-3),
    Indicator("mismatch/kl", Family.MISMATCH.value, True, math.log(4.0), least=1e-3),
    Indicator("mismatch/ess", Family.MISMATCH.value, False, math.log(2.0), most=0.7),
    Indicator("reward/zero_std_frac", SIGNAL, True, 0.4, same, least=0.6, cap=1.0),
)
NUMBERS = ("reward/mean", "policy/entropy", "optim/grad_norm", "loss/policy")
"""Metrics of which NaN or infinity is evidence."""


def evidence(deviations: float, most: float = MOST) -> float:
    """Return the evidence of a deviation, given in units of chance variation: 0 up to 1.5, 1 at 3, 3 at 6 and beyond.

    ``most``: upper bound on the evidence.

    >>> evidence(1.0), evidence(3.0), evidence(60.0)
    (0.0, 1.0, 3.0)
    """
    return min(max((deviations - SILENCE) / UNIT, 0.0), most)


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation of one row, from jumps between neighbours; larger if few rows are known."""
    return noise_of_jumps(sorted(map(abs, map(sub, values[1:], values))))


def noise_of_jumps(ordered: Sequence[float]) -> float:
    """Return what :func:`noise` returns, from the jumps between the rows in ascending order."""
    if not ordered:
        return 0.0
    return ordered_quantile(ordered, 0.8) / (NORMAL_80 * math.sqrt(2.0)) * (1.0 + 2.0 / (len(ordered) + 1))


class Jumps:
    """The jumps between neighbouring rows of a window in ascending order; it moves on with the window."""

    def __init__(self) -> None:
        self._at: deque[int] = deque()
        """Step to which each jump leads, and"""
        self._sizes: deque[float] = deque()
        """its size."""
        self._ordered: list[float] = []

    def between(self, rows: deque[tuple[int, float]], last: int) -> list[float]:
        """Return the sizes of the jumps between the ``rows`` (step and value), at least one, but the ``last`` ones."""
        at, sizes, ordered = self._at, self._sizes, self._ordered
        first = rows[0][0]
        while at and at[0] <= first:
            at.popleft()
            del ordered[bisect_left(ordered, sizes.popleft())]
        newest, end = at[-1] if at else first, len(rows) - last
        begins = next((i for i in range(end - 1, -1, -1) if rows[i][0] <= newest), end)
        known = islice(rows, begins, end)
        for (_, before), (step, value) in pairwise(known):
            jump = abs(value - before)
            at.append(step)
            sizes.append(jump)
            insort(ordered, jump)
        return ordered


UNUSED = 8
"""Rows without a use after which deviations are no longer kept in order: to sort them costs as much as ten rows do."""


class Earlier:
    """Earlier deviations of a metric, which give its chance variation in this run, without rows of a suspected failure.

    It includes whatever moves the metric together with its neighbours: data of changing difficulty, small batches.
    ``most``: number of deviations that are remembered.
    """

    def __init__(self, most: int) -> None:
        self._kept: deque[float] = deque(maxlen=most)
        self._ordered: list[float] | None = None
        """The same in ascending order; None until :meth:`scale` needs it, and again after rows without a use."""
        self._unused = 0
        """Rows since :meth:`scale` was last needed."""
        self._pending: deque[float] = deque()
        self._away = 0

    def take(self, deviation: float, *, far: bool, accepted: int) -> None:
        """Store a deviation of the metric from its reference, after :data:`DELAY` further rows.

        ``far``: True if the deviation is part of an excursion. Deviations of an excursion, and of the rows that led
        into it, are stored only once it has lasted ``accepted`` rows.
        """
        self._away = self._away + 1 if far else 0
        if far and self._away <= accepted:
            self._pending.clear()
            return
        self._pending.append(deviation)
        if len(self._pending) <= DELAY:
            return
        deviation, kept = self._pending.popleft(), self._kept
        if self._ordered is not None and self._unused < UNUSED:
            if len(kept) == kept.maxlen:
                del self._ordered[bisect_left(self._ordered, kept[0])]
            insort(self._ordered, deviation)
        else:
            self._ordered = None
        self._unused += 1
        kept.append(deviation)

    def extend(self, deviations: Sequence[float]) -> None:
        """Store deviations none of which is part of an excursion, as one call of :meth:`take` for each would."""
        self._away = 0
        pending, kept = self._pending, self._kept
        pending.extend(deviations)
        due = [pending.popleft() for _ in range(len(pending) - DELAY)]
        if self._ordered is not None and self._unused + len(due) <= UNUSED:
            for deviation in due:
                if len(kept) == kept.maxlen:
                    del self._ordered[bisect_left(self._ordered, kept[0])]
                insort(self._ordered, deviation)
                kept.append(deviation)
        else:
            self._ordered = None
            kept.extend(due)
        self._unused += len(due)

    def chance(self, later: int) -> float:
        """Return a deviation below which none is evidence, also after ``later`` further ones; -inf if there is none.

        Each further one moves a quantile by one place at most.
        """
        if not self.many:
            return -math.inf
        if self._ordered is None:
            self._ordered, self._unused = sorted(self._kept), 0
        ordered, last = self._ordered, len(self._ordered) - 1
        low, high = int(0.5 * last) - later, int(0.95 * last) - later
        if low < 0:
            return -math.inf
        # Evidence begins SILENCE standard deviations of the upper half above the usual deviation, which is at least 0.
        share = SILENCE / NORMAL_95
        least = (1.0 - share) * max(ordered[low], 0.0) + share * ordered[high]
        return least - 1e-9 * abs(least)

    @property
    def many(self) -> bool:
        """True if there are enough deviations to estimate chance variation."""
        return len(self._kept) >= MANY

    def scale(self) -> tuple[float, float, float]:
        """Return the usual deviation (at least 0), the standard deviation of the upper half, and the largest
        deviation.
        """
        if self._ordered is None:
            self._ordered = sorted(self._kept)
        ordered, self._unused = self._ordered, 0
        usual = ordered_quantile(ordered, 0.5)
        usual = max(0.0, usual)
        above = ordered_quantile(ordered, 0.95) - usual
        return usual, above / NORMAL_95 if above > 0.0 else 0.0, ordered[-1]


SPAN, KEPT = 48, 80
"""Number of rows in the reference window and the last ones together; and number of earlier deviations that are kept."""
ASIDE = SPAN + KEPT + DELAY
"""Number of newest rows on which the state of an indicator depends if it has given no evidence for long."""
NEARLY = 1.0 - 1e-9
"""Factor on a limit: values below the product are below the limit whatever the rounding."""


class Watch:
    """Course of one indicator's metric over the rows of a run, and the evidence of a failure that it gives."""

    def __init__(self, indicator: Indicator) -> None:
        self.indicator, self.metric = indicator, indicator.metric
        self._sign = 1.0 if indicator.up else -1.0
        self._half = indicator.effect / 2.0
        self.known = False
        """True once the metric was measured."""
        self._rows: deque[tuple[int, float, float]] = deque(maxlen=SPAN)
        self._ordered: list[float] = []
        self._earlier = Earlier(KEPT)
        self._beyond = Hold(forgive=1)
        self._spike = 0.0
        self._blank = 0
        self.weight = 0.0
        """Evidence of the last row."""
        self.level = 0.0
        """Median of the reference rows, on the scale and in the direction of the indicator."""
        self.deviation = 0.0
        """Distance of the milder of the last rows from :attr:`level`."""
        self.alone = False
        """True at a level that is sufficient evidence by itself."""
        self.beyond = False
        """True if the last measured row is beyond half the effect."""
        self.passed = False
        """True if it has taken the rows of the present stretch."""
        self._aside: deque[tuple[int, float]] = deque(maxlen=ASIDE)
        """Rows that are no evidence, not processed yet."""

    def update(self, step: int, value: float | None, fade: float, error: float) -> None:
        """Read the indicator's ``value`` in the next row, which is at ``step``; None if it was not measured.

        ``fade``: factor on evidence that is not renewed. ``error``: standard error of a share of the answers; 0 if
        unknown.
        """
        if self.fades:
            self.fade(fade)
        if value is None:
            self._blank += 1
            if self._blank > LAST + 1:
                self.weight = 0.0
            return
        self._blank, self.known = 0, True
        if self._aside:
            self._catch_up()
        self._add(step, self._sign * self.indicator.scale(value), value)
        if len(self._rows) >= FEWEST_ROWS + LAST:
            self._judge(error)

    @property
    def fades(self) -> bool:
        """True if the indicator still has evidence from earlier rows, which fades with time."""
        return bool(self.weight or self._spike)

    def fade(self, factor: float) -> None:
        """Multiply the evidence from earlier rows by ``factor``, below 1."""
        self._spike *= factor
        self.weight *= factor
        self.alone = False

    def pass_over(self, steps: Sequence[int], values: Sequence[float]) -> bool:
        """Read ``values`` at ascending ``steps`` if none can deviate by half of the indicator's effect; otherwise
        return False.

        The values are only stored, and processed when one may deviate. Evidence of earlier rows does not fade by this.
        """
        if len(self._rows) < FEWEST_ROWS + LAST:
            return False
        aside, scale = self._aside, self.indicator.scale
        last = aside[-1][0] if aside else self._rows[-1][0]
        # Scales are monotone, that of factors in the magnitude: the extremes of the scaled values are those of these.
        kept = [*(value for _, value in islice(aside, max(len(aside) - SPAN, 0), None)), *values]
        now, before = (map(abs, values), map(abs, kept)) if scale is log else (values, kept)
        ends = [*before]
        low, high = (min(ends), max(now)) if self._sign > 0.0 else (max(ends), min(now))
        # The reference level is no lower than the lowest row.
        lowest = self._sign * scale(low)
        if len(aside) < SPAN:
            earlier = islice(self._rows, max(len(self._rows) + len(aside) - SPAN, 0), None)
            lowest = min([lowest, *(x for _, x, _ in earlier)])
        if steps[0] <= last or self._sign * scale(high) - lowest >= NEARLY * self._half:
            return False
        self._aside.extend(zip(steps, values, strict=True))
        self._beyond.miss(steps)
        self.beyond, self._blank = False, 0
        return True

    def _catch_up(self) -> None:
        """Process the rows that are no evidence; of very many, those on which the state depends."""
        rows, first = list(self._aside), 0
        self._aside.clear()
        if len(rows) == ASIDE:
            self._rows.clear()
            self._ordered.clear()
            self._earlier, first = Earlier(KEPT), SPAN - 1
        for i, (step, value) in enumerate(rows):
            self._add(step, self._sign * self.indicator.scale(value), value)
            if i >= first:
                level = ordered_quantile(self._ordered, 0.5)
                newest = min(self._rows[-1][1], self._rows[-2][1])
                self._earlier.take(newest - level, far=False, accepted=ACCEPTED_ROWS)

    def _add(self, step: int, x: float, value: float) -> None:
        rows, ordered = self._rows, self._ordered
        if rows and rows[-1][0] >= step:
            while rows and rows[-1][0] >= step:
                rows.pop()
            ordered[:] = sorted(x for _, x, _ in islice(rows, max(len(rows) - LAST, 0)))
        if len(rows) == rows.maxlen:
            del ordered[bisect_left(ordered, rows.popleft()[1])]
        rows.append((step, x, value))
        if len(rows) > LAST:
            insort(ordered, rows[-1 - LAST][1])
        while len(rows) > REFERENCE_ROWS + LAST and rows[0][0] <= step - REFERENCE_STEPS:
            del ordered[bisect_left(ordered, rows.popleft()[1])]

    def _judge(self, error: float) -> None:
        rows, indicator = self._rows, self.indicator
        (_, now, value), (_, before, value_before) = rows[-1], rows[-2]
        self.level = level = ordered_quantile(self._ordered, 0.5)
        self.deviation = deviation = min(now, before) - level
        self.beyond = moved = now - level >= self._half
        self._beyond.update(rows[-1][0], moved)
        # A unit is a third of the effect at least, so below half the effect nothing is evidence.
        if not moved:
            self._earlier.take(deviation, far=False, accepted=ACCEPTED_ROWS)
            return
        usual, spread, largest = self._scale()
        near = noise(self._sound())
        unit = max(indicator.effect / 3.0, near, spread, error if indicator.scale is same else 0.0)
        z = (deviation - usual) / unit
        if self._earlier.many and deviation <= largest:
            z = min(z, UNPRECEDENTED)
        if not self._matters(value, value_before):
            z = 0.0
        if self._matters(value, value):
            self._spike = max(self._spike, min(evidence((now - level - usual) / unit / 2.0), 1.0))
        self.weight = min(max(evidence(z), self._spike, self.weight), indicator.cap)
        self.alone = z >= SILENCE + MOST * UNIT and min(value, value_before) >= indicator.alone
        self._earlier.take(deviation, far=z >= 2.0 * UNIT, accepted=ACCEPTED_ROWS)

    def _scale(self) -> tuple[float, float, float]:
        if self._earlier.many:
            return self._earlier.scale()
        sound = self._sound()
        most = max(sound) if len(sound) >= FEWEST_ROWS else self._ordered[-1]
        return 0.0, max(most - self.level, 0.0) / NORMAL_80, math.inf

    def _sound(self) -> list[float]:
        """Return the metric in the reference rows before the suspected failure, whose own rows are not chance
        variation.
        """
        rows, since = self._rows, self._beyond.since
        return [x for step, x, _ in islice(rows, len(rows) - LAST) if since is None or step < since]

    def _matters(self, *values: float) -> bool:
        return min(values) >= self.indicator.least and max(values) <= self.indicator.most

    @property
    def since(self) -> int | None:
        """Step since which single rows are beyond half the effect; None if they are not."""
        return self._beyond.since

    @property
    def newest(self) -> float | None:
        """Last value of the watched metric, in the metric's own unit; None if there is none."""
        self._catch_up()
        return self._rows[-1][2] if self._rows else None

    def returned(self, half: float) -> bool:
        """Return True if the metric's last rows are back below ``half``, or if the metric is no longer measured.

        ``half``: level, on the indicator's scale, at which the deviation that raised the alarm has halved.
        """
        self._catch_up()
        return (
            not self._rows
            or self._blank > LAST + 1
            or max(x for _, x, _ in islice(self._rows, max(len(self._rows) - LAST, 0), None)) < half
        )


class RewardFall:
    """Evidence that the reward fell below the best level it has held, over windows of 2, 4 and 8 rows."""

    WINDOWS = (2, 4, 8)
    ACCEPTED = 25
    SHARE = 0.25

    def __init__(self) -> None:
        self._rows: deque[tuple[int, float]] = deque(maxlen=62)
        self._earlier = {rows: Earlier(200) for rows in self.WINDOWS}
        self._answers = AnswerCount()
        self._low, self._high = math.inf, -math.inf
        self._start: float | None = None
        self._beyond = Hold(forgive=1)
        self.best: float | None = None
        """Highest median of ten rows or fifteen steps, three rows at least."""
        self.held: float | None = None
        """Highest median of six rows, or the lowest of three: two of three are often lucky."""
        self.weight = 0.0
        """Evidence of the last row."""
        self.certain = 0.0
        """Evidence of the fall without support by other metrics, against :attr:`held`."""
        self.share = 0.0
        """Share of the best level that is lost over the last two rows."""
        self.depth = 0.0
        """The same loss as a share of the reward's whole range."""
        self.known = False
        """True once there is a level to fall from."""
        self._well: bool | None = False
        """Cached value of :attr:`well`; None where it was not computed for this row."""
        self._close = (0.0, 0.0, 0.0)
        """Fall over the last two rows, its usual size and its smallest unit: the inputs of :attr:`well`."""
        self._jumps = Jumps()
        self._row: float | None = None
        """Cached noise of one row; None where it was not computed for this row."""
        self._before: int | None = None
        """:attr:`since` when the row was judged."""

    def update(self, step: int, value: float | None) -> None:
        """Read the mean reward ``value`` of the next row, which is at ``step``; None if it was not measured."""
        if value is None:
            return
        rows = self._rows
        if rows and rows[-1][0] >= step:
            self._well = self.well
            # Resumed further back: the level it had reached since then belongs to weights that are gone.
            self.best = self.held = self._start = None
            self._jumps = Jumps()
        while rows and rows[-1][0] >= step:
            rows.pop()
        rows.append((step, value))
        self._low, self._high = min(self._low, value), max(self._high, value)
        self._answers.update(value)
        self.weight = self.certain = 0.0
        if len(rows) < FEWEST_ROWS + LAST:
            return
        self._start = median([v for _, v in rows]) if self._start is None else self._start
        self._raise_best()
        self._judge(step)

    def weights_over(self, steps: Sequence[int], values: Sequence[float]) -> list[float] | None:
        """Read several rows at ascending ``steps`` at once and return :attr:`weight` after each.

        None, and nothing is read, if the fall may be sufficient evidence by itself, or if levels must be found row by
        row.
        """
        best, held, start = self.best, self.held, self._start
        levels = self._levels_over(steps, values)
        if best is None or held is None or start is None or levels is None:
            return None
        bests, helds = (
            list(accumulate(each, max, initial=now))[1:] for each, now in zip(levels, (best, held), strict=True)
        )
        for top, pair in zip(bests, pairwise((self._rows[-1][1], *values)), strict=True):
            if top - sum(pair) / LAST >= NEARLY * ALONE * max(abs(top), top - start, 1e-9):
                return None
        weights, rows, most = [], self._rows, self.WINDOWS[-1]
        course, last = [*(value for _, value in list(rows)[1 - most :]), *values], steps[-1]
        calm: list[int] = []
        falls: list[list[float]] = []
        for at, (step, value, self.best, self.held) in enumerate(zip(steps, values, bests, helds, strict=True)):
            rows.append((step, value))
            self._low, self._high = min(self._low, value), max(self._high, value)
            if self._answers.few:
                self._answers.update(value)
            self.weight = self.certain = 0.0
            # The last row is judged in any case, because what others ask of this is about it.
            fell = None if step == last else self._falls_of_chance(course[at : at + most], start, len(calm))
            if fell is not None:
                calm.append(step)
                falls.append(fell)
            else:
                self._take_calm(calm, falls)
                self._judge(step)
            weights.append(self.weight)
        return weights

    def _falls_of_chance(self, values: Sequence[float], start: float, later: int) -> list[float] | None:
        """Return the fall over each of the windows that end at the last of ``values``; None if one may be evidence.

        ``later``: number of rows before it whose falls are not stored yet.
        """
        best, now = self.best or 0.0, values[-1]
        if best - now > self.SHARE * max(abs(best), best - start, 1e-9):
            return None
        milder, found = best - max(values[-LAST:]), []
        for count, earlier in self._earlier.items():
            fall = best - sum(values[-count:]) / count
            if milder >= fall / 2.0 and fall >= earlier.chance(later):
                return None
            found.append(fall)
        return found

    def _take_calm(self, steps: list[int], falls: list[list[float]]) -> None:
        """Store the ``falls`` of rows at ``steps``, none of which is evidence, and clear both."""
        if steps:
            for earlier, each in zip(self._earlier.values(), zip(*falls, strict=True), strict=True):
                earlier.extend(each)
            self._beyond.miss(steps)
            steps.clear()
            falls.clear()

    def _levels_over(self, steps: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]] | None:
        """Return the levels after each row of which :attr:`best` and :attr:`held` are the highest; None where rows are
        few or unevenly apart.
        """
        known = list(self._rows)[-LAST - 10 + 1 :]
        gap = steps[1] - steps[0] if len(steps) > 1 else 0
        first = known[0][0] if known else 0
        at = [*(step for step, _ in known), *steps]
        if gap < 1 or len(known) < LAST + 9 or at != list(range(first, first + gap * len(at), gap)):
            return None
        past = np.array([*(value for _, value in known), *values])[:-LAST]
        if np.signbit(past[past == 0.0]).any():
            return None  # sorting may misplace zeros with a sign
        near = min(10, max(FEWEST_ROWS, -(-15 // gap)))
        count = len(steps)
        levels = middles(running(past[-count - near + 1 :], near))
        half = middles(running(past[-count - HELD_ROWS + 1 :], HELD_ROWS))
        least = running(past[-count - FEWEST_ROWS + 1 :], FEWEST_ROWS)[:, 0]
        return levels.tolist(), np.maximum(least, half).tolist()

    def _raise_best(self) -> None:
        past = list(self._rows)[-LAST - 10 : -LAST]
        last, newest = [v for _, v in past], past[-1][0]
        near = last if past[0][0] > newest - 15 else [v for s, v in past if s > newest - 15]
        level = median(near if len(near) >= FEWEST_ROWS else last[-FEWEST_ROWS:])
        self.best = level if self.best is None else max(self.best, level)
        least = min(last[-FEWEST_ROWS:])
        held = max(least, median(last[-HELD_ROWS:])) if len(last) >= HELD_ROWS else least
        self.held = held if self.held is None else max(self.held, held)
        self.known = True

    def _judge(self, step: int) -> None:
        """Judge the last rows. The noise of a row is expensive, so it is computed only where it changes the result."""
        best, start, rows = self.best or 0.0, self._start or 0.0, self._rows
        size = len(rows)
        values = [rows[i][1] for i in range(-min(size, self.WINDOWS[-1]), 0)]
        now, before = values[-1], values[-LAST]
        whole, seen_in = max(abs(best), best - start, 1e-9), self._high - self._low
        self._row, self._before = None, self._beyond.since
        milder, worst = best - (now if now > before else before), 0.0
        falls: list[tuple[Earlier, float]] = []
        for count, earlier in self._earlier.items():
            if size < count + FEWEST_ROWS:
                continue
            fall = best - sum(values[-count:]) / count
            falls.append((earlier, fall))
            if count == LAST:
                self.share, self.depth = fall / whole, fall / max(seen_in, 1e-9)
            elif milder < fall / 2.0:
                continue
            usual, spread, largest = earlier.scale() if earlier.many else (self.row / 2.0, 0.0, math.inf)
            least = max(spread, 1e-9)
            if count == LAST:
                self._close, self._well = (fall, usual, least), None
            # No unit is smaller than the smallest one, so what is no evidence in these units is none.
            if milder < fall / 2.0 or (fall - usual) / least <= SILENCE:
                continue
            z = (fall - usual) / self._unit(count, least)
            seen = earlier.many and fall <= largest
            if seen or fall < self.SHARE * whole or fall < 0.1 * seen_in:
                z = min(z, UNPRECEDENTED)
            worst = max(worst, z * PARTLY if self.share < GONE and self.error > 0.0 else z)
        far = worst >= 2.0 * UNIT
        for earlier, fall in falls:
            earlier.take(fall, far=far, accepted=self.ACCEPTED)
        self.weight = evidence(worst) if worst > SILENCE else 0.0
        self.certain = min(self.weight, self._alone([v for _, v in rows])) if self.weight else 0.0
        below, share = best - values[-1], self.SHARE * whole
        self._beyond.update(step, below > share and below > max(share, self.row))

    @property
    def row(self) -> float:
        """Standard deviation of the mean reward of one row, from the rows before the suspected fall."""
        if self._row is None:
            rows = self._rows
            sound = self._before is None and len(rows) > FEWEST_ROWS + LAST
            near = noise_of_jumps(self._jumps.between(rows, LAST)) if sound else noise(self._sound())
            self._row = max(near, self.error)
        return self._row

    def _unit(self, count: int, least: float) -> float:
        return max(1.2 * self.row / math.sqrt(count), least)

    @property
    def well(self) -> bool:
        """True if the level of the mean reward is its best so far, but for noise."""
        if self._well is None:
            fall, usual, least = self._close
            self._well = fall <= usual + least / 2.0 or fall <= usual + self._unit(LAST, least) / 2.0
        return self._well

    def _alone(self, values: Sequence[float]) -> float:
        """Return the evidence of the last rows against the held level, with noise that allows for rare lucky rows.

        The chance variation of a share is known where the number of answers is.
        """
        if self.error > 0.0:
            return MOST
        held, now = self.held or 0.0, sum(values[-LAST:]) / LAST
        if held <= now or chance_of_low(values, held, now) > LUCKY:
            return 0.0
        return evidence((held - now) / max(1.2 * self._unsure() / math.sqrt(LAST), 1e-9))

    def _unsure(self) -> float:
        """Return the standard deviation of the mean reward of one row, allowing for rare lucky rows."""
        sound = self._sound()
        return max(uneven_noise_of(sound), noise(sound))

    @property
    def error(self) -> float:
        """Standard error of the mean reward of one row with few answers; 0 if their number is large or unknown."""
        return self._answers.error

    def _sound(self) -> list[float]:
        """Return the mean rewards of the rows before the suspected fall: the jumps of the fall would hide it."""
        values, since = [v for _, v in self._rows], self._before
        sound = len(values) - LAST if since is None else sum(s < since for s, _ in self._rows)
        return values[: max(min(sound, len(values) - LAST), FEWEST_ROWS)]

    @property
    def since(self) -> int | None:
        """Step since which the mean reward of single rows is far below its best level; None if they are not."""
        return self._beyond.since

    @property
    def now(self) -> float | None:
        """Mean reward of the last two rows; None if there is none."""
        return (
            None
            if not self._rows
            else sum(v for _, v in islice(self._rows, max(len(self._rows) - LAST, 0), None))
            / min(LAST, len(self._rows))
        )


class OnePrompt:
    """Detector of logs in which each row has the answers to one prompt, by the share of groups with equal rewards.

    That share is then always 0 or 1. The mean length, share of cuts and reward of a row are those of one prompt, so
    neighbouring rows differ more than otherwise.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._whole = {0.0: 0, 1.0: 0}

    def update(self, share: float | None) -> None:
        """Read a row's share of groups with equal rewards; None if it was not measured."""
        if share is None:
            return
        self._rows += 1
        if share in self._whole:
            self._whole[share] += 1

    @property
    def single(self) -> bool:
        """True if all rows had a share of 0 or 1, and there were several of each."""
        return (
            self._rows == sum(self._whole.values()) and self._rows >= ONE_PROMPT_ROWS and min(self._whole.values()) > 1
        )


@dataclass(slots=True)
class JointAlarm:
    """A raised alarm of joint evidence; it ends when the deviations that raised it have halved, or hardly any evidence
    is left.

    ``onset``: step at which the problem began. ``since``: step at which the alarm was raised. ``halves``: index of each
    indicator -> level, on the indicator's scale, at which its deviation has halved. ``reward_half``: mean reward at
    which its fall has halved; None if the reward was no part of the evidence.
    """

    onset: int
    since: int
    severity: Severity
    halves: dict[int, float]
    reward_half: float | None
    better: Hold = field(default_factory=lambda: Hold(forgive=0))


class JointEvidence(BaseDetector):
    """Detector of collapses shown by several families of metrics at once, or by one at a level that no sound run
    reaches.
    """

    name: ClassVar[str] = "joint_collapse"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("reward/mean",),
        *((name,) for name in dict.fromkeys(indicator.metric for indicator in INDICATORS)),
    )
    reads: ClassVar[tuple[str, ...]] = ("reward/mean", *dict.fromkeys(indicator.metric for indicator in INDICATORS))

    def __init__(self) -> None:
        super().__init__()
        self._watches = [Watch(indicator) for indicator in INDICATORS]
        self._awake = self._watches
        """Those that the next row concerns: the others have taken it, or their metric is not logged."""
        self._reward = RewardFall()
        self._last: int | None = None
        self._before = 0.0
        self._halved = 0
        self._gone = 0
        self._broken = 0.0
        self._alarm: JointAlarm | None = None
        self._alone = False
        """True in a row in which one indicator is sufficient evidence."""
        self._gap = 1
        self._prompts = OnePrompt()
        self._scores: deque[float] = deque(maxlen=SINGLE_ROWS - 1)
        self.score = 0.0
        """Joint evidence of the last row; the milder of the last two where rows are close, or of more where each row is
        of one prompt and the reward has not fallen.
        """

    def pass_over(self, rows: Stretch) -> bool:
        """Let each indicator read its metric in all ``rows`` at once, and the reward if none has evidence.

        Otherwise return False: :meth:`judge` then judges the reward and the other indicators row by row.
        """
        self._rows_left, self._awake = len(rows.steps), []
        for watch in self._watches:
            there = watch.metric in rows.metrics
            watch.passed = there and watch.pass_over(rows.steps, rows.column(watch.metric))
            if watch.fades if watch.passed else there or watch.known:
                self._awake.append(watch)
        if self._awake or self._broken or self._alarm is not None or not self._pass_reward(rows):
            return False
        self._rows_left = 0
        return True

    def _pass_reward(self, rows: Stretch) -> bool:
        """Read the reward of all ``rows`` at once if no fall of it alone is a failure; otherwise return False.

        No other indicator has evidence in them.
        """
        steps, rewards, last = rows.steps, rows.column("reward/mean"), self._last
        if last is None or steps[0] <= last or (not rewards and self._reward.weight):
            return False
        weights = self._reward.weights_over(steps, rewards) if rewards else [0.0] * len(steps)
        if weights is None:
            return False
        shares = rows.column("reward/zero_std_frac")
        for share in shares[:-1]:
            self._prompts.update(share)
        self._alone, self._halved, self._gone = False, 0, 0
        scores = [min(REWARD_WEIGHT * weight, WARNING - 0.1) for weight in weights]
        self._scores.extend(scores[:-1])
        self._before, self._gap, self._last = scores[-2], steps[-1] - steps[-2], steps[-1]
        self._prompts.update(shares[-1] if shares else None)
        self._take_score(scores[-1])
        return True

    def _wake(self) -> None:
        self._awake = self._watches
        for watch in self._watches:
            watch.passed = False

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge all indicators of a row together and return the collapse while its alarm is raised."""
        self._gap = 1 if self._last is None else max(step.step - self._last, 1)
        self._last = step.step
        numbers = step.numbers
        self._reward.update(step.step, numbers.get("reward/mean"))
        fade, error = 0.5 ** min(max(self._gap / HALF_LIFE, 0.2), 1.0), self._reward.error
        self._alone = False
        if self._rows_left:
            self._rows_left -= 1
        elif self._awake is not self._watches:
            self._wake()
        for watch in self._awake:
            if watch.passed:
                watch.fade(fade)
                continue
            value = numbers.get(watch.metric)
            if value is not None or watch.known:
                watch.update(step.step, value, fade, error)
                self._alone = self._alone or watch.alone
        if numbers is not step.metrics and any(name in step.metrics and name not in numbers for name in NUMBERS):
            self._broken = 2.0
        else:
            self._broken *= fade
        families = self._families()
        score = self._score(families)
        self._prompts.update(numbers.get("reward/zero_std_frac"))
        self._take_score(score)
        self._follow(step.step, self.score)
        return [] if self._alarm is None else [self._finding(step, self._alarm, self.score, families)]

    def _take_score(self, score: float) -> None:
        """Compute :attr:`score` from the evidence ``score`` of a row and of those before it."""
        self.score = score if self._gap >= FINE else min(score, self._before)
        if self._prompts.single and self._reward.weight < SIGNIFICANT:
            self.score = min(score, *self._scores) if len(self._scores) == SINGLE_ROWS - 1 else 0.0
        self._scores.append(score)
        self._before = score

    def _families(self) -> dict[str, Watch]:
        """Return the strongest indicator with evidence in each family."""
        best: dict[str, Watch] = {}
        for watch in self._awake:
            if watch.weight > 0.0:
                rival = best.get(watch.indicator.family)
                if rival is None or watch.weight > rival.weight:
                    best[watch.indicator.family] = watch
        return best

    def _score(self, families: dict[str, Watch]) -> float:
        reward = self._reward
        weights = {family: watch.weight for family, watch in families.items()}
        rest = sum(weights.values()) + self._broken
        score = REWARD_WEIGHT * reward.weight + rest * (WELL if rest and reward.well else 1.0)
        heaviest = max((reward.weight, *(w for family, w in weights.items() if family != SIGNAL), self._broken))
        support = reward.weight + rest - heaviest
        if reward.weight < 2.0:
            support -= weights.get(SIGNAL, 0.0)
        if self._conclusive():
            return max(score, 4.0)
        return score if support >= SIGNIFICANT else min(score, WARNING - 0.1)

    def _conclusive(self) -> bool:
        """Return whether a level that no sound run reaches, or a reward lost for several rows, suffices alone."""
        reward, rows = self._reward, 2 if self._gap >= FINE else 3
        wide = reward.depth >= DEPTH
        self._halved = self._halved + 1 if wide and reward.certain >= 0.9 * MOST and reward.share >= ALONE else 0
        self._gone = self._gone + 1 if wide and reward.certain >= 1.3 and reward.share >= 0.85 else 0
        lost = self._halved >= rows or self._gone >= (rows if rows == 2 else rows + 1)
        return lost or self._alone

    def _follow(self, step: int, score: float) -> None:
        """Raise the alarm; end it once its indicators have been half of the way back for as long as it took to rise."""
        severity = Severity.CRITICAL if score >= CRITICAL else Severity.WARNING if score >= WARNING else None
        alarm = self._alarm
        if severity is not None and (alarm is None or severity.rank > alarm.severity.rank) and self._now:
            self._alarm = self._raised(step, severity, alarm)
            return
        if alarm is None:
            return
        back = all(self._watches[i].returned(half) for i, half in alarm.halves.items())
        if alarm.reward_half is not None and self._reward.now is not None:
            back = back and self._reward.now >= alarm.reward_half
        calm = score < WARNING / 2.0 and self._reward.share < RewardFall.SHARE
        alarm.better.update(step, severity is None and (back or calm))
        if alarm.better.lasted(3, min(alarm.since - alarm.onset, 20)):
            self._alarm = None

    @property
    def _now(self) -> bool:
        """Return whether this row itself shows the failure: evidence outlasts the rows that it comes from."""
        return bool(self._broken or self._reward.weight or any(w.beyond and w.weight >= SOME for w in self._watches))

    def _raised(self, step: int, severity: Severity, before: JointAlarm | None) -> JointAlarm:
        active = {i: watch for i, watch in enumerate(self._watches) if watch.weight >= SIGNIFICANT or watch.alone}
        dates = [watch.since for watch in active.values() if watch.since is not None]
        if self._reward.weight >= SIGNIFICANT and self._reward.since is not None:
            dates.append(self._reward.since)
        onset = min([step, *dates])
        half = None
        if self._reward.weight >= SIGNIFICANT and self._reward.best is not None and self._reward.now is not None:
            half = (self._reward.best + self._reward.now) / 2.0
        halves = {i: watch.level + max(watch.deviation, watch.indicator.effect) / 2.0 for i, watch in active.items()}
        return JointAlarm(onset if before is None else min(before.onset, onset), step, severity, halves, half)

    def _finding(self, step: ClosedStep, alarm: JointAlarm, score: float, families: dict[str, Watch]) -> Finding:
        shown = sorted(
            (watch for watch in families.values() if watch.weight >= 0.2),
            key=lambda watch: -watch.weight,
        )
        parts = [f"{watch.indicator.words} to {number(watch.newest)}" for watch in shown if watch.newest is not None]
        reward = self._reward
        if reward.weight >= SIGNIFICANT and reward.best is not None and reward.now is not None:
            parts.insert(0, f"reward/mean down from {number(reward.best)} to {number(reward.now)}")
        if self._broken >= SIGNIFICANT:
            parts.append("non-finite values")
        text = "; ".join(parts)
        if len(parts) > 1:
            text = f"several metrics broke in the same rows: {text}"
        elif parts:
            text = f"not seen in healthy runs: {text}"
        else:
            text = f"the change at step {alarm.onset} persists"
        weights = {f"weight {watch.indicator.words}": watch.weight for watch in shown}
        return self.finding(
            step,
            "joint_collapse",
            alarm.severity,
            text,
            onset=alarm.onset,
            metric="reward/mean" if reward.known else shown[0].indicator.metric if shown else "",
            score=max(score / WARNING, 1.0),
            evidence=rounded({"joint": score, "weight reward/mean down": REWARD_WEIGHT * reward.weight, **weights}),
        )
