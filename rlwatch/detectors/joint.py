"""Joint evidence: metrics of several families that leave the run's own past in the same rows.

One metric that wanders says little: data differ in difficulty, batches are small, spikes pass. A reward that falls in
the very rows in which the entropy doubles or every answer is cut is a failure within two rows. Each witness is the
deviation of one metric in one direction, in units of what moves it by chance in this run. Speed comes from agreement
between families, caution from solitude.

The limits were chosen on :mod:`rlwatch.testing.small_batches` with public runs in view (docs/detection.md says which):
on those its figures are in-sample.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import sub
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, rounded
from rlwatch.detectors.context import HELD_ROWS, LUCKY, NORMAL_80, AnswerCount, chance_of_low, uneven_noise_of
from rlwatch.metrics import Family
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold, median, ordered_quantile, quantile
from rlwatch.wording import number

REFERENCE_STEPS, REFERENCE_ROWS, FEWEST_ROWS = 60, 12, 3
"""A witness is compared with the rows of so many steps before the last two: with so many rows at least where the log is
coarse. With fewer than so few nothing is judged."""
LAST = 2
"""Rows that must agree: the milder of them counts, so that one odd row is nothing."""
NORMAL_95 = 1.645
"""Standard deviations between the median and the 95th percentile of a normal variable."""
MANY = 8
"""Earlier deviations from which the run's own tell what chance does."""
DELAY = 2
"""Rows after which a deviation counts as chance: by then it would have shown to be the beginning of a failure."""
UNPRECEDENTED = 2.25
"""Deviations of a kind that the run has seen and survived count no more than this."""
SILENCE, UNIT, MOST = 1.5, 1.5, 3.0
"""Evidence of z deviations: (z - SILENCE) / UNIT, between 0 and MOST."""
HALF_LIFE = 5
"""Steps in which evidence that is not renewed halves."""
ACCEPTED_ROWS = 12
"""Rows beyond which a deviation is the run's own new normal to what comes after."""
FINE = 4
"""Steps between two rows below which two evaluations must agree: further apart, a row is many steps already."""
ONE_PROMPT_ROWS, SINGLE_ROWS = 8, 4
"""Rows that tell that each is of one prompt, and how many must agree then."""
SOME = 0.2
"""Evidence below which a witness has no part in what is raised."""
WITNESS = 0.6
"""Evidence from which a family counts as a witness."""
CRITICAL, WARNING = 2.2, 2.0
"""Joint evidence from which it is critical, or a warning, if what stands beside the heaviest witness makes one too."""
REWARD_WEIGHT = 1.5
"""The reward is what the run is for: its fall weighs more than any one sign of how it falls."""
GONE, PARTLY = 0.9, 0.5
"""Hard data cost small batches a part of the reward again and again: a fall by less than so much of it counts half."""
DEPTH = 0.5
"""Part of all the reward's range that a fall must measure to say all by itself."""
WELL = 0.5
"""What counts of all else while the reward stands at its best: much moves in a run that learns."""


def log(value: float) -> float:
    """Logarithm of the size, from 1e-8 up: factors count, not differences."""
    return math.log(max(abs(value), 1e-8))


def logit(share: float) -> float:
    """Log odds of a share between 0.3 % and 99.7 %: beyond, small counts rule."""
    kept = min(max(share, 0.003), 0.997)
    return math.log(kept / (1.0 - kept))


def same(value: float) -> float:
    """As it is: for shares of answers, of which a third more is a third more at any level."""
    return value


@dataclass(frozen=True, slots=True)
class Indicator:
    """A metric and the direction in which it leaves its past in a failure.

    ``effect``: the deviation worth a weak witness, after ``scale``. ``least`` and ``most``: bounds in the metric's own
    unit without which the move is harmless. ``cap``: the most it can weigh. ``alone``: a level that no sound run comes
    to from far below it, whatever else it shows.
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
        """Name and direction."""
        return f"{self.metric} {'up' if self.up else 'down'}"


SIGNAL = "signal"
"""Groups that agree: what becomes of a reward that falls to nothing, and so no second witness beside it."""
LENGTH, CUT = "length", "cut"

WITNESSES = (
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
"""Metrics whose being NaN or infinite is a witness."""


def evidence(deviations: float, most: float = MOST) -> float:
    """Weight of a deviation: 0 up to 1.5 of its units, 1 at 3, 3 at 6 and beyond.

    >>> evidence(1.0), evidence(3.0), evidence(60.0)
    (0.0, 1.0, 3.0)
    """
    return min(max((deviations - SILENCE) / UNIT, 0.0), most)


def noise(values: Sequence[float]) -> float:
    """Standard deviation of one row from the jumps between neighbours; wider where there are few rows to tell."""
    jumps = list(map(abs, map(sub, values[1:], values)))
    return quantile(jumps, 0.8) / (NORMAL_80 * math.sqrt(2.0)) * (1.0 + 2.0 / len(values)) if jumps else 0.0


class Earlier:
    """Deviations of the rows so far, without those of a failure that is suspected: what chance does in this run.

    They hold whatever moves the metric together with its neighbours: data of changing difficulty, small batches, waves.
    """

    def __init__(self, most: int) -> None:
        self._kept: deque[float] = deque(maxlen=most)
        self._ordered: list[float] | None = None
        """The same in order; None until it is asked for, and again where it has not been for a row."""
        self._asked = False
        self._pending: deque[float] = deque()
        self._away = 0

    def take(self, deviation: float, *, far: bool, accepted: int) -> None:
        """Remember one, a few rows later; those that led into an excursion, and its own, only once it has lasted
        ``accepted`` rows.
        """
        self._away = self._away + 1 if far else 0
        if far and self._away <= accepted:
            self._pending.clear()
            return
        self._pending.append(deviation)
        if len(self._pending) <= DELAY:
            return
        deviation, kept = self._pending.popleft(), self._kept
        if self._asked and self._ordered is not None:
            if len(kept) == kept.maxlen:
                del self._ordered[bisect_left(self._ordered, kept[0])]
            insort(self._ordered, deviation)
        else:
            self._ordered = None
        self._asked = False
        kept.append(deviation)

    @property
    def many(self) -> bool:
        """True once they tell what chance does."""
        return len(self._kept) >= MANY

    def scale(self) -> tuple[float, float, float]:
        """Usual deviation (0 at least), standard deviation of the upper half, and the largest one."""
        if self._ordered is None:
            self._ordered = sorted(self._kept)
        ordered, self._asked = self._ordered, True
        usual = max(ordered_quantile(ordered, 0.5), 0.0)
        return usual, max(ordered_quantile(ordered, 0.95) - usual, 0.0) / NORMAL_95, ordered[-1]


class Watch:
    """One witness over the rows of a run."""

    def __init__(self, witness: Indicator) -> None:
        self.witness, self.metric = witness, witness.metric
        self._sign = 1.0 if witness.up else -1.0
        self._half = witness.effect / 2.0
        self.known = False
        """True once it was measured."""
        self._rows: deque[tuple[int, float, float]] = deque(maxlen=48)
        self._ordered: list[float] = []
        self._earlier = Earlier(80)
        self._beyond = Hold(forgive=1)
        self._spike = 0.0
        self._blank = 0
        self.weight = 0.0
        """Evidence now."""
        self.level = 0.0
        """Median of the reference rows, on the scale and in the direction of the witness."""
        self.deviation = 0.0
        """Distance of the milder of the last rows from it."""
        self.alone = False
        """True at a level that says all."""
        self.beyond = False
        """True if the last row it was measured in is beyond half the effect."""

    def update(self, step: int, value: float | None, fade: float, error: float) -> None:
        """Take a row; None where it was not measured.

        ``fade``: of evidence that is not renewed. ``error``: standard error of a share of the answers; 0 if not known.
        """
        if self.weight or self._spike:
            self._spike *= fade
            self.weight *= fade
            self.alone = False
        if value is None:
            self._blank += 1
            if self._blank > LAST + 1:
                self.weight = 0.0
            return
        self._blank, self.known = 0, True
        self._add(step, self._sign * self.witness.scale(value), value)
        if len(self._rows) >= FEWEST_ROWS + LAST:
            self._judge(error)

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
        rows, witness = self._rows, self.witness
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
        unit = max(witness.effect / 3.0, near, spread, error if witness.scale is same else 0.0)
        z = (deviation - usual) / unit
        if self._earlier.many and deviation <= largest:
            z = min(z, UNPRECEDENTED)
        if not self._matters(value, value_before):
            z = 0.0
        if self._matters(value, value):
            self._spike = max(self._spike, min(evidence((now - level - usual) / unit / 2.0), 1.0))
        self.weight = min(max(evidence(z), self._spike, self.weight), witness.cap)
        self.alone = z >= SILENCE + MOST * UNIT and min(value, value_before) >= witness.alone
        self._earlier.take(deviation, far=z >= 2.0 * UNIT, accepted=ACCEPTED_ROWS)

    def _scale(self) -> tuple[float, float, float]:
        if self._earlier.many:
            return self._earlier.scale()
        sound = self._sound()
        most = max(sound) if len(sound) >= FEWEST_ROWS else self._ordered[-1]
        return 0.0, max(most - self.level, 0.0) / NORMAL_80, math.inf

    def _sound(self) -> list[float]:
        """Reference rows before those that are suspected: a failure's own first row is not what chance does."""
        rows, since = self._rows, self._beyond.since
        return [x for step, x, _ in islice(rows, len(rows) - LAST) if since is None or step < since]

    def _matters(self, *values: float) -> bool:
        return min(values) >= self.witness.least and max(values) <= self.witness.most

    @property
    def since(self) -> int | None:
        """Since when single rows have been beyond half the effect."""
        return self._beyond.since

    @property
    def newest(self) -> float | None:
        """The last value, in the metric's own unit."""
        return self._rows[-1][2] if self._rows else None

    def returned(self, half: float) -> bool:
        """True if the last rows are back below ``half``, on the scale."""
        return (
            not self._rows
            or self._blank > LAST + 1
            or max(x for _, x, _ in islice(self._rows, max(len(self._rows) - LAST, 0), None)) < half
        )


class RewardFall:
    """The reward below the best level it has held, over windows of 2, 4 and 8 rows."""

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
        """Highest median of six rows, or least of three: of three, two are often lucky."""
        self.weight = 0.0
        """Evidence now."""
        self.certain = 0.0
        """The same where nothing else speaks: by the level that was held."""
        self.share = 0.0
        """Of its best level that is lost, over the last two rows."""
        self.depth = 0.0
        """The same of all the range it has been seen in."""
        self.known = False
        """True once there is a level to fall from."""
        self._well: bool | None = False
        """As asked for last; None: not since the row was judged."""
        self._close = (0.0, 0.0, 0.0)
        """Fall over the last two rows, the usual one and the least unit of it: what :attr:`well` is told by."""
        self._row: float | None = None
        """Noise of one row; None: not asked for since the row was judged."""
        self._before: int | None = None
        """:attr:`since` as the row was judged."""

    def update(self, step: int, value: float | None) -> None:
        """Take a row; None where it was not measured."""
        if value is None:
            return
        rows = self._rows
        if rows and rows[-1][0] >= step:
            self._well = self.well
            # Resumed further back: the level it had reached since then belongs to weights that are gone.
            self.best = self.held = self._start = None
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
        """Judge the last rows. Noise of a row is dear: it is asked for only where it decides something."""
        best, start = self.best or 0.0, self._start or 0.0
        values = [v for _, v in self._rows]
        whole, seen_in = max(abs(best), best - start, 1e-9), self._high - self._low
        self._row, self._before = None, self._beyond.since
        milder, worst = best - max(values[-LAST:]), 0.0
        falls = {
            count: best - sum(values[-count:]) / count for count in self.WINDOWS if len(values) >= count + FEWEST_ROWS
        }
        self.share, self.depth = falls[LAST] / whole, falls[LAST] / max(seen_in, 1e-9)
        part = self.error > 0.0 and self.share < GONE
        for count, fall in falls.items():
            earlier = self._earlier[count]
            usual, spread, largest = earlier.scale() if earlier.many else (self.row / 2.0, 0.0, math.inf)
            least = max(spread, 1e-9)
            if count == LAST:
                self._close, self._well = (fall, usual, least), None
            # No unit is smaller than the least one: what is not evidence in these is none.
            if milder < fall / 2.0 or (fall - usual) / least <= SILENCE:
                continue
            z = (fall - usual) / self._unit(count, least)
            seen = earlier.many and fall <= largest
            if seen or fall < self.SHARE * whole or fall < 0.1 * seen_in:
                z = min(z, UNPRECEDENTED)
            worst = max(worst, z * PARTLY if part else z)
        far = worst >= 2.0 * UNIT
        for count, fall in falls.items():
            self._earlier[count].take(fall, far=far, accepted=self.ACCEPTED)
        self.weight = evidence(worst)
        self.certain = min(self.weight, self._alone(values)) if self.weight else 0.0
        below, share = best - values[-1], self.SHARE * whole
        self._beyond.update(step, below > share and below > max(share, self.row))

    @property
    def row(self) -> float:
        """Noise of one row, of those before the fall that is suspected."""
        if self._row is None:
            self._row = max(noise(self._sound()), self.error)
        return self._row

    def _unit(self, count: int, least: float) -> float:
        return max(1.2 * self.row / math.sqrt(count), least)

    @property
    def well(self) -> bool:
        """True while it stands at its best."""
        if self._well is None:
            fall, usual, least = self._close
            self._well = fall <= usual + least / 2.0 or fall <= usual + self._unit(LAST, least) / 2.0
        return self._well

    def _alone(self, values: Sequence[float]) -> float:
        """Evidence of the last rows against a level that was held, by noise that allows for rare lucky rows.

        What chance does to a share of a known number of answers need not be learnt from rows.
        """
        if self.error > 0.0:
            return MOST
        held, now = self.held or 0.0, sum(values[-LAST:]) / LAST
        if held <= now or chance_of_low(values, held, now) > LUCKY:
            return 0.0
        return evidence((held - now) / max(1.2 * self._unsure() / math.sqrt(LAST), 1e-9))

    def _unsure(self) -> float:
        """Standard deviation of one row that allows for rare lucky ones."""
        sound = self._sound()
        return max(uneven_noise_of(sound), noise(sound))

    @property
    def error(self) -> float:
        """Standard error of a share of the answers of a row, as far as their number shows."""
        return self._answers.error

    def _sound(self) -> list[float]:
        """Rows before the fall that is suspected: its own jumps would hide it."""
        values, since = [v for _, v in self._rows], self._before
        sound = len(values) - LAST if since is None else sum(s < since for s, _ in self._rows)
        return values[: max(min(sound, len(values) - LAST), FEWEST_ROWS)]

    @property
    def since(self) -> int | None:
        """Since when single rows have been that far below the best."""
        return self._beyond.since

    @property
    def now(self) -> float | None:
        """Mean of the last two rows."""
        return (
            None
            if not self._rows
            else sum(v for _, v in islice(self._rows, max(len(self._rows) - LAST, 0), None))
            / min(LAST, len(self._rows))
        )


class OnePrompt:
    """Rows that stand for the answers to one prompt each: either all groups of one agree or none does, row after row.

    Then its lengths, cuts and reward are those of that prompt, and the next one's are others.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._whole = {0.0: 0, 1.0: 0}

    def update(self, share: float | None) -> None:
        """Take the share of groups that agree; None where it was not measured."""
        if share is None:
            return
        self._rows += 1
        if share in self._whole:
            self._whole[share] += 1

    @property
    def single(self) -> bool:
        """True once there were rows of both kinds, and no others."""
        return (
            self._rows == sum(self._whole.values()) and self._rows >= ONE_PROMPT_ROWS and min(self._whole.values()) > 1
        )


@dataclass(slots=True)
class JointAlarm:
    """Witnesses of a failure, and the way back of each that ends it: half of its deviation."""

    onset: int
    since: int
    severity: Severity
    halves: dict[int, float]
    reward_half: float | None
    better: Hold = field(default_factory=lambda: Hold(forgive=0))


class JointEvidence(BaseDetector):
    """Failures told by several families at once, or by one that no sound run shows."""

    name: ClassVar[str] = "joint_collapse"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("reward/mean",),
        *((name,) for name in dict.fromkeys(witness.metric for witness in WITNESSES)),
    )
    reads: ClassVar[tuple[str, ...]] = ("reward/mean", *dict.fromkeys(witness.metric for witness in WITNESSES))

    def __init__(self) -> None:
        super().__init__()
        self._watches = [Watch(witness) for witness in WITNESSES]
        self._reward = RewardFall()
        self._last: int | None = None
        self._before = 0.0
        self._halved = 0
        self._gone = 0
        self._broken = 0.0
        self._alarm: JointAlarm | None = None
        self._alone = False
        """True in a row in which a witness says all."""
        self._gap = 1
        self._prompts = OnePrompt()
        self._scores: deque[float] = deque(maxlen=SINGLE_ROWS - 1)
        self.score = 0.0
        """Joint evidence of the last row, of the milder of the last two where rows are close; of more where a row is of
        one prompt and its reward has not fallen.
        """

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge all witnesses of a row together."""
        self._gap = 1 if self._last is None else max(step.step - self._last, 1)
        self._last = step.step
        numbers = step.numbers
        self._reward.update(step.step, numbers.get("reward/mean"))
        fade, error = 0.5 ** min(max(self._gap / HALF_LIFE, 0.2), 1.0), self._reward.error
        self._alone = False
        for watch in self._watches:
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
        self.score = score if self._gap >= FINE else min(score, self._before)
        if self._prompts.single and self._reward.weight < WITNESS:
            self.score = min(score, *self._scores) if len(self._scores) == SINGLE_ROWS - 1 else 0.0
        self._scores.append(score)
        self._before = score
        self._follow(step.step, self.score)
        return [] if self._alarm is None else [self._finding(step, self._alarm, self.score, families)]

    def _families(self) -> dict[str, Watch]:
        """The heaviest witness of each family that says something."""
        best: dict[str, Watch] = {}
        for watch in self._watches:
            if watch.weight > 0.0:
                rival = best.get(watch.witness.family)
                if rival is None or watch.weight > rival.weight:
                    best[watch.witness.family] = watch
        return best

    def _score(self, families: dict[str, Watch]) -> float:
        reward = self._reward
        weights = {family: watch.weight for family, watch in families.items()}
        rest = sum(weights.values()) + self._broken
        score = REWARD_WEIGHT * reward.weight + rest * (WELL if rest and reward.well else 1.0)
        heaviest = max((reward.weight, *(w for family, w in weights.items() if family != SIGNAL), self._broken))
        beside = reward.weight + rest - heaviest
        if reward.weight < 2.0:
            beside -= weights.get(SIGNAL, 0.0)
        if self._says_all():
            return max(score, 4.0)
        return score if beside >= WITNESS else min(score, WARNING - 0.1)

    def _says_all(self) -> bool:
        """A level no sound run comes to, or a reward that is gone for several rows."""
        reward, rows = self._reward, 2 if self._gap >= FINE else 3
        wide = reward.depth >= DEPTH
        self._halved = self._halved + 1 if wide and reward.certain >= 0.9 * MOST and reward.share >= 0.55 else 0
        self._gone = self._gone + 1 if wide and reward.certain >= 1.3 and reward.share >= 0.85 else 0
        lost = self._halved >= rows or self._gone >= (rows if rows == 2 else rows + 1)
        return lost or self._alone

    def _follow(self, step: int, score: float) -> None:
        """Raise the alarm; end it once its witnesses are half of the way back for as long as it took to rise."""
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
        """True if this row shows what is suspected: evidence outlasts the rows it is of."""
        return bool(self._broken or self._reward.weight or any(w.beyond and w.weight >= SOME for w in self._watches))

    def _raised(self, step: int, severity: Severity, before: JointAlarm | None) -> JointAlarm:
        active = {i: watch for i, watch in enumerate(self._watches) if watch.weight >= WITNESS or watch.alone}
        dates = [watch.since for watch in active.values() if watch.since is not None]
        if self._reward.weight >= WITNESS and self._reward.since is not None:
            dates.append(self._reward.since)
        onset = min([step, *dates])
        half = None
        if self._reward.weight >= WITNESS and self._reward.best is not None and self._reward.now is not None:
            half = (self._reward.best + self._reward.now) / 2.0
        halves = {i: watch.level + max(watch.deviation, watch.witness.effect) / 2.0 for i, watch in active.items()}
        return JointAlarm(onset if before is None else min(before.onset, onset), step, severity, halves, half)

    def _finding(self, step: ClosedStep, alarm: JointAlarm, score: float, families: dict[str, Watch]) -> Finding:
        shown = sorted(
            (watch for watch in families.values() if watch.weight >= 0.2),
            key=lambda watch: -watch.weight,
        )
        parts = [f"{watch.witness.words} to {number(watch.newest)}" for watch in shown if watch.newest is not None]
        reward = self._reward
        if reward.weight >= WITNESS and reward.best is not None and reward.now is not None:
            parts.insert(0, f"reward/mean down from {number(reward.best)} to {number(reward.now)}")
        if self._broken >= WITNESS:
            parts.append("non-finite values")
        said = "; ".join(parts)
        if len(parts) > 1:
            said = f"several metrics broke in the same rows: {said}"
        elif parts:
            said = f"not seen in healthy runs: {said}"
        else:
            said = f"the change at step {alarm.onset} persists"
        weights = {f"weight {watch.witness.words}": watch.weight for watch in shown}
        return self.finding(
            step,
            "joint_collapse",
            alarm.severity,
            said,
            onset=alarm.onset,
            metric="reward/mean" if reward.known else shown[0].witness.metric if shown else "",
            score=max(score / WARNING, 1.0),
            evidence=rounded({"joint": score, "weight reward/mean down": REWARD_WEIGHT * reward.weight, **weights}),
        )
