"""Detect a metric beyond a limit: risen above how the run began, or beyond a bound whatever it began with."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rlwatch.detectors.base import CARRY_ROWS, BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import RewardWatch
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window
from rlwatch.wording import number

ASIDE = 10
"""Number of newest rows that are buffered: windows hold no more."""
MOST = 1e9
"""Odds and weights are clamped to this value."""


def size(value: float) -> float:
    """Return the absolute value, as the scale of a limit."""
    return abs(value)


def odds(share: float) -> float:
    """Return the odds of a share in [0, 1], as the scale of a limit: a factor on odds means the same at 0.1 % and at 30
    %.
    """
    return MOST if share >= 1.0 else min(abs(share) / (1.0 - share), MOST)


def spread_of_ess(ess: float) -> float:
    """Return 1/ESS - 1, the chi^2 of weights whose effective sample size, over their number, is ``ess`` in (0, 1]."""
    return MOST if ess <= 0.0 else min(max(1.0 / ess - 1.0, 0.0), MOST)


def log_size(ratio: float) -> float:
    """Return |log ratio| in nats, the distance of a ratio from 1 in either direction."""
    return abs(math.log(min(max(abs(ratio), 1.0 / MOST), MOST)))


def inverse(value: float) -> float:
    """Return 1 / |value|, as the scale of quantities that are bad if small."""
    return MOST if abs(value) <= 1.0 / MOST else min(1.0 / abs(value), MOST)


@dataclass(frozen=True, slots=True)
class RiseLimit:
    """A limit of a metric: ``floor`` in its own unit, or ``factor`` times its start, whichever is higher, after
    ``scale``.

    Values above ``most`` are another quantity under the same name, and ignored. ``text``: description of the metric in
    a finding.
    """

    metric: str
    floor: float
    factor: float
    scale: Callable[[float], float] = size
    most: float = math.inf
    text: str = ""


class Rise:
    """One metric compared with its limit: the median of its last rows must be beyond it for three rows.

    Most rows of most runs are far below the limit. While no row of the window is near it and no finding holds, rows are
    only buffered (the newest :data:`ASIDE`, all that the windows keep) and processed when a result is needed.
    """

    def __init__(self, limit: RiseLimit) -> None:
        self.limit = limit
        self._floor = limit.scale(limit.floor)
        self._base = Baseline()
        self._now = Window(rows=ASIDE, steps=10)
        self._raw = self._now if limit.scale is size else Window(rows=ASIDE, steps=10)
        """Rows in the metric's own unit; the same window where the scale does not change them."""
        self._row = Hold(forgive=3)
        self.out = Hold(forgive=2)
        """Rows in which the median of the last rows is beyond the limit."""
        self.known = False
        """True once the metric was measured: before that, rows without it are ignored."""
        self._blank = 0
        self.threshold = math.inf
        """On the scale: the larger of the floor and ``factor`` times the beginning; infinite until that is known."""
        self._aside: deque[tuple[int, float, float]] = deque(maxlen=ASIDE)
        self._calm_below = -math.inf
        """Rows below it, on the scale, change nothing."""
        self._last = -1

    def update(self, step: int, value: float | None, floor: float | None = None) -> None:
        """Read the metric's ``value`` in the next row, which is at ``step``; None if it was not measured.

        ``floor``: lowest value that can count as risen, in place of the limit's own; None to keep the limit's.
        """
        if value is None:
            self._blank += 1
            if self._blank > CARRY_ROWS:
                self._catch_up()
                self.out.clear()
            return
        self._blank = 0
        limit, base, now = self.limit, self._base, self._now
        risen = limit.scale(value)
        if risen < self._calm_below and floor is None and step > self._last:
            self._aside.append((step, value, risen))
            self._last = step
            return
        self._catch_up()
        self._last = step
        base.update(step, risen)
        self.known = self.known or base.known
        self._see(step, value, risen)
        if floor is not None:
            self._floor = limit.scale(floor)
        level = base.get()
        self.threshold = threshold = math.inf if level is None else max(self._floor, limit.factor * level)
        self._row.update(step, risen > threshold)
        self.out.update(step, threshold < math.inf and now.reaches(threshold))
        calm = base.done and self._row.since is None and self.out.since is None and now.most < threshold < math.inf
        self._calm_below = threshold if calm else -math.inf

    def calm(self, steps: Sequence[int], values: Sequence[float]) -> bool:
        """Return True if :meth:`update` would only buffer ``values`` at ascending ``steps``, as they are far below the
        limit.
        """
        return steps[0] > self._last and max(map(self.limit.scale, values)) < self._calm_below

    def buffer(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Keep ``values`` at ascending ``steps``, for which :meth:`calm` is True, until a later row needs them."""
        newest = list(zip(steps[-ASIDE:], values[-ASIDE:], strict=True))
        self._aside.extend((step, value, self.limit.scale(value)) for step, value in newest)
        self._last, self._blank = steps[-1], 0

    def _see(self, step: int, value: float, risen: float) -> None:
        """Add the metric's ``value`` at ``step`` to the windows; ``risen``: the value on the limit's scale."""
        if self._raw is self._now and math.copysign(1.0, value) < 0.0:
            self._raw = self._now.copy()
        self._now.update(step, risen)
        if self._raw is not self._now:
            self._raw.update(step, value)

    def _catch_up(self) -> None:
        """Add the buffered rows to the windows."""
        for step, value, risen in self._aside:
            self._see(step, value, risen)
            self._row.update(step, condition=False)
            self.out.update(step, condition=False)
        self._aside.clear()

    @property
    def score(self) -> float:
        """Level of the last rows over the threshold, on the limit's scale; 0 if unknown."""
        self._catch_up()
        now = self._now.get()
        return 0.0 if now is None or math.isinf(self.threshold) else now / self.threshold

    @property
    def level(self) -> float | None:
        """Median of the last rows, in the metric's own unit; None if unknown."""
        self._catch_up()
        return self._raw.get()

    @property
    def began(self) -> float | None:
        """Median of the metric over the first rows, on the limit's scale; None if unknown."""
        return self._base.get()

    @property
    def factor(self) -> float | None:
        """Level as a multiple of its start, on the limit's scale; None if unknown or if it began at zero."""
        self._catch_up()
        now, level = self._now.get(), self._base.get()
        return None if now is None or not level else now / level

    def evidence(self) -> dict[str, float | int | None]:
        """Return the numbers behind a finding: level, threshold and start (both on the limit's scale), and factor."""
        limit = self.threshold
        return {"level": self.level, "threshold": limit, "start": self.began, "factor": self.factor}

    @property
    def lasted(self) -> bool:
        """True if the median of the metric's last rows has been beyond the limit for three rows."""
        return self.out.since is not None and self.out.lasted(3)

    @property
    def since(self) -> int | None:
        """Step since which single rows of the metric, or else the median of the last rows, are beyond the limit; None
        if not.
        """
        return self.out.since if self._row.since is None else self._row.since


class FormattedNumber(float):
    """A number in a message: formatted by :func:`~rlwatch.wording.number`, or by a format specification."""

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else number(float(self))


class RiseDetector(BaseDetector):
    """Base of detectors that report, of several metrics that show one failure, the one furthest beyond its limit.

    A subclass is data: ``limits`` and ``message``. Fields of the message: ``{metric}``; ``{level}`` now and ``{start}``
    at the beginning (on the limit's scale; as a share if that is odds: ``{start_share}``); ``{text}``, the text of the
    limit; ``{factor}``, the text of ``factor`` if the level is a known multiple of its start; ``{reward}``, the course
    of the reward, if ``follows_reward``. ``baseline``: baseline of the finding; ``"start"`` means the metric's start.
    """

    limits: ClassVar[tuple[RiseLimit, ...]]
    message: ClassVar[str] = ""
    factor: ClassVar[str] = ""
    baseline: ClassVar[float | Literal["start"] | None] = None
    follows_reward: ClassVar[bool] = False
    paid_for: ClassVar[bool] = False
    """True if a finding is only ``info`` while the reward rose together with the metric."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "limits" in vars(cls):
            metrics = tuple(limit.metric for limit in cls.limits)
            cls.reads = vars(cls).get("reads", metrics)
            cls.requires = vars(cls).get("requires", tuple((name,) for name in metrics))
        cls._plain = cls.read is RiseDetector.read
        own = (cls.read, cls.judge, cls.listen, cls.floor)
        cls._by_columns = own == (RiseDetector.read, RiseDetector.judge, BaseDetector.listen, RiseDetector.floor)

    shares: ClassVar[tuple[str, ...]] = ("_reward",)
    _plain: ClassVar[bool] = True
    _by_columns: ClassVar[bool] = True
    """True if a row is judged by nothing but its values."""

    def __init__(self) -> None:
        super().__init__()
        self._rises = [Rise(limit) for limit in self.limits]
        self._reward = RewardWatch()

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge each watched metric of the row ``step`` against its limit; return a finding for the worst one beyond,
        if any.
        """
        plain, numbers, at = self._plain, step.numbers, step.step
        for rise in self._rises:
            limit = rise.limit
            value = numbers.get(limit.metric) if plain else self.read(step, limit)
            if plain and value is not None and value > limit.most:
                value = None
            if value is not None or rise.known:
                rise.update(at, value, self.floor(limit))
        risen = [rise for rise in self._rises if rise.out.since is not None and rise.lasted]
        return [self.report(step, max(risen, key=lambda rise: rise.score))] if risen else []

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if all metrics are below their limits; otherwise return False.

        Always False for a subclass that overrides how rows are read or judged.
        """
        return self._by_columns and self.buffered(rows.steps, [rows.column(limit.metric) for limit in self.limits])

    def buffered(self, steps: Sequence[int], columns: Sequence[Sequence[float]]) -> bool:
        """Read rows at ascending ``steps`` at once if every metric is far below its limit; otherwise return False.

        ``columns``: for each of the detector's limits the metric's values, one per row; empty if the rows do not have
        it.
        """
        for rise, values in zip(self._rises, columns, strict=True):
            if max(values) > rise.limit.most or not rise.calm(steps, values) if values else rise.known:
                return False
        for rise, values in zip(self._rises, columns, strict=True):
            if values:
                rise.buffer(steps, values)
        return True

    def read(self, step: ClosedStep, limit: RiseLimit) -> float | None:
        """Return the value in the row ``step`` of the metric that ``limit`` is for; None if there is no usable one."""
        value = finite(step, limit.metric)
        return None if value is None or value > limit.most else value

    def floor(self, limit: RiseLimit) -> float | None:  # noqa: ARG002  (for subclasses)
        """Return the lowest value that can count as risen, if it depends on the run; None to use that of ``limit``."""
        return None

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding at the row ``step`` for a metric beyond its limit; ``rise`` is the metric's course so
        far.
        """
        reward = {"reward": self._reward.now} if self.follows_reward else {}
        since = step.step if rise.since is None else rise.since
        return self.finding(
            step,
            self.kinds[0],
            Severity.INFO if self.paid_for and self._reward.pays(since) else Severity.WARNING,
            self.message.format(**self.fields(rise)),
            onset=since,
            metric=rise.limit.metric,
            score=rise.score,
            baseline=rise.began if self.baseline == "start" else self.baseline,
            evidence=rounded(rise.evidence() | reward),
        )

    def fields(self, rise: Rise) -> dict[str, str | FormattedNumber]:
        """Return the values that the message's template is filled with, for a metric beyond its limit.

        ``rise``: the metric's course so far.
        """
        start = rise.began or 0.0
        numbers: dict[str, str | FormattedNumber] = {
            "metric": rise.limit.metric,
            "level": FormattedNumber(rise.level or 0.0),
            "start": FormattedNumber(start),
            "start_share": FormattedNumber(start / (1.0 + start)),
        }
        factor = "" if rise.factor is None else self.factor.format(number(rise.factor))
        reward = self._reward.in_words() if self.follows_reward else ""
        return {**numbers, "text": rise.limit.text.format(**numbers), "factor": factor, "reward": reward}


class SustainedLevel:
    """A metric whose level, on the scale of ``limit``, must be beyond ``limit.floor`` for ``rows`` rows."""

    def __init__(self, limit: RiseLimit, rows: int = 5) -> None:
        self.limit = limit
        self.bound = limit.scale(limit.floor)
        """The bound on the limit's scale."""
        self.rows = rows
        self._base = Baseline()
        self._now = Window(rows=10, steps=10)
        self._raw = self._now if limit.scale is size else Window(rows=10, steps=10)
        self._row = Hold(forgive=3)
        self._hold = Hold(forgive=1)
        self._blank = 0

    def update(self, step: int, value: float | None) -> None:
        """Read the metric's ``value`` in the next row, which is at ``step``; None if it was not measured."""
        if value is None:
            self._blank += 1
            if self._blank > CARRY_ROWS:
                self._hold.clear()
            return
        self._blank = 0
        scaled = self.limit.scale(value)
        if self._raw is self._now and math.copysign(1.0, value) < 0.0:
            self._raw = self._now.copy()
        self._base.update(step, scaled)
        self._now.update(step, scaled)
        if self._raw is not self._now:
            self._raw.update(step, value)
        self._row.update(step, scaled >= self.bound)
        self._hold.update(step, self._now.reaches(self.bound))

    @property
    def score(self) -> float:
        """Level of the last rows over the bound, on the limit's scale; 0 if unknown."""
        now = self._now.get()
        return 0.0 if now is None else now / self.bound

    @property
    def level(self) -> float | None:
        """Median of the last rows, in the metric's own unit; None if unknown."""
        return self._raw.get()

    @property
    def lasted(self) -> bool:
        """True if the median of the metric's last rows has been beyond the bound for the required number of rows."""
        return self._hold.lasted(self.rows)

    @property
    def since(self) -> int | None:
        """Step since which single rows of the metric, or else the median of the last rows, are beyond the bound; None
        if not.
        """
        return self._hold.since if self._row.since is None else self._row.since

    @property
    def always(self) -> bool:
        """True if the metric was beyond half of the bound in the run's first rows: then the set-up is the cause."""
        return self._began >= self.bound / 2.0

    @property
    def began_beyond(self) -> bool:
        """True if the metric was beyond the bound in the run's first rows."""
        return self._began >= self.bound

    @property
    def _began(self) -> float:
        return -math.inf if self._base.first is None else self._base.first
