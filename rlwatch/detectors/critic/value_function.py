"""Detectors of PPO's value function: it diverges or explains nothing, or values or returns drift from the reward."""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.rise import RiseDetector, RiseLimit, odds
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window
from rlwatch.wording import number

LOSS, EXPLAINED = "critic/value_loss", "critic/explained_var"
TIMES = 4.0
"""Factor over its lowest level by which the value loss must have risen; it must also be above how the run began."""
EXPLOSION = 100.0
"""The same factor for critical: the squared error of a value head that follows a growing reward rises tenfold."""
USEFUL, USELESS = 0.2, 0.0
"""Explained variance that counts as useful, and the one at which values are no better than the mean return."""
WORSE = -0.5
"""Explained variance at which the values, subtracted, add half as much noise to the advantages as there was."""
LEARNT = 100
"""Steps by which a value function, untrained at first, should explain something."""
NEARLY = 1.0 - 1e-9
"""Factor on a limit: values below the product are below the limit whatever the rounding."""
ROWS, STEPS = 5, 15
"""Rows and steps that a level must last: the returns of one batch are few."""


class ValueDivergence(BaseDetector):
    """Detector of a diverging value function: value loss above its lowest level, or explained variance lost, negative,
    or never gained.

    An untrained head begins with a large loss and explains nothing, so neither is judged by its beginning. The loss is
    compared with its lowest level since; the explained variance counts once it has been useful or has had its time. A
    warning; critical if both hold, or the loss has exploded, and it lasts: the advantages are then noise.
    """

    name: ClassVar[str] = "value_divergence"
    reads: ClassVar[tuple[str, ...]] = (LOSS, EXPLAINED)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((LOSS,), (EXPLAINED,))

    def __init__(self) -> None:
        super().__init__()
        self._loss, self._explained = (Window(rows=10, steps=10) for _ in range(2))
        self._loss_base = Baseline()
        self._lowest: float | None = None
        self._best: float | None = None
        self._began: int | None = None
        self._row, self._high, self._lost, self._exploded = (Hold(forgive=2) for _ in range(4))

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if the loss stays near its lowest level and the values explain something."""
        steps, losses, shares = rows.steps, list(map(abs, rows.column(LOSS))), rows.column(EXPLAINED)
        if any(hold.since is not None for hold in (self._row, self._high, self._lost, self._exploded)):
            return False
        lowest, best = self._lowest, self._best
        if losses:
            last = self._loss.last
            if not self._loss_base.done or lowest is None or last is None or steps[0] <= last:
                return False
            now = self._loss.medians(steps, losses)
            lowest = min(lowest, *(level for level in now if level is not None))
            if None in now or max(*losses, *(level for level in now if level is not None)) >= NEARLY * TIMES * lowest:
                return False
        if shares:
            last = self._explained.last
            if best is None or best < USEFUL or last is None or steps[0] <= last:
                return False
            levels = [level for level in self._explained.medians(steps, shares) if level is not None]
            if len(levels) < len(steps) or min(levels) <= USELESS:
                return False
            best = max(best, *levels)
            self._explained.extend(steps, shares)
            self._lost.miss(steps)
        if losses:
            self._loss.extend(steps, losses)
            for hold in (self._row, self._high, self._exploded):
                hold.miss(steps)
        self._lowest, self._best = lowest, best
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge value loss and explained variance of the last rows; return the divergence, if there is one."""
        self._follow(step)
        high, lost = self._high.lasted(ROWS, STEPS), self._lost.lasted(ROWS, STEPS)
        if not high and not lost:
            return []
        certain = (high and lost and self._worse) or self._exploded.lasted(ROWS, STEPS)
        return [self._finding(step, high, Severity.CRITICAL if certain else Severity.WARNING)]

    def _follow(self, step: ClosedStep) -> None:
        loss, explained = finite(step, LOSS), finite(step, EXPLAINED)
        if loss is not None:
            loss = abs(loss)
            self._loss.update(step.step, loss)
            self._loss_base.update(step.step, loss)
            times = self._risen()
            self._row.update(step.step, times > 0.0 and loss > TIMES * (self._lowest or 0.0))
            self._high.update(step.step, times >= TIMES)
            self._exploded.update(step.step, times >= EXPLOSION)
        if explained is not None:
            self._explained.update(step.step, explained)
            self._began = step.step if self._began is None else self._began
            self._lost.update(step.step, self._explains_nothing(step.step))

    def _risen(self) -> float:
        """Return the loss over its lowest level; 0 where it is below how the run began, or that is unknown."""
        now, start = self._loss.get(), self._loss_base.get()
        if now is None or start is None or not self._loss_base.done:
            return 0.0
        self._lowest = now if self._lowest is None else min(self._lowest, now)
        return now / self._lowest if self._lowest > 0.0 and now > start else 0.0

    def _explains_nothing(self, step: int) -> bool:
        now = self._explained.get()
        if now is None or self._began is None:
            return False
        self._best = now if self._best is None else max(self._best, now)
        if self._best >= USEFUL:
            return now <= USELESS
        return step - self._began >= LEARNT and now < WORSE

    @property
    def _worse(self) -> bool:
        now = self._explained.get()
        return now is not None and now < USELESS

    def _finding(self, step: ClosedStep, high: bool, severity: Severity) -> Finding:
        loss, explained = self._loss.get(), self._explained.get()
        parts = []
        if high and loss is not None and self._lowest is not None:
            parts.append(f"value loss rose from {number(self._lowest)} to {number(loss)}")
        if self._lost.lasted(ROWS, STEPS) and explained is not None:
            best = self._best or 0.0
            was = f", at its best {number(best)}" if best >= USEFUL else ", and never explained anything"
            parts.append(f"values explain {number(explained)} of the variance of the returns{was}")
        since = [hold.since for hold in (self._row, self._lost) if hold.since is not None]
        return self.finding(
            step,
            "value_divergence",
            severity,
            f"{'; '.join(parts)}: advantages from this critic are mostly its errors",
            onset=min(since, default=None),
            metric=LOSS if high else EXPLAINED,
            score=None if not high or loss is None else loss / (TIMES * max(self._lowest or 0.0, 1e-12)),
            baseline=self._lowest if high else self._best,
            evidence=rounded(
                {"value_loss": loss, "lowest": self._lowest, "explained_var": explained, "best": self._best}
            ),
        )


class ValueClipping(RiseDetector):
    """Detector of value clipping: the share of the values whose update is clipped rises, so that the critic cannot
    follow.
    """

    name: ClassVar[str] = "value_clipping"
    limits: ClassVar[tuple[RiseLimit, ...]] = (RiseLimit("critic/value_clipfrac", 0.3, 4.0, odds),)
    message: ClassVar[str] = (
        "{level:.0%} of the values are clipped in their update, at the start {start_share:.1%}: the critic may not "
        "follow the returns"
    )


VALUES, RETURNS = "critic/value_mean", "critic/returns_mean"


class ValueDrift(RiseDetector):
    """Detector of values that drift from the returns, or returns that drift from the reward, in units of the reward's
    size.

    Returns are rewards less penalties, summed and discounted, so they differ from the reward. A growing difference
    means that penalties, bootstrapping or normalisation dominate what is optimised.
    """

    name: ClassVar[str] = "value_drift"
    reads: ClassVar[tuple[str, ...]] = (VALUES, RETURNS)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((VALUES, RETURNS), (RETURNS, "reward/mean"))
    limits: ClassVar[tuple[RiseLimit, ...]] = (
        RiseLimit(VALUES, 1.0, 4.0, text="the mean value is {level} times the reward's size away from the mean return"),
        RiseLimit(
            RETURNS, 1.0, 4.0, text="the mean return is {level} times the reward's size away from the mean reward"
        ),
    )
    message: ClassVar[str] = "{text}, at the start {start}{reward}"
    follows_reward: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._size = 0.0

    def listen(self, step: ClosedStep) -> None:
        """Read the mean reward and its magnitude from the row ``step``."""
        super().listen(step)
        known = [abs(value) for name in ("reward/mean", "reward/std") if (value := finite(step, name)) is not None]
        self._size = max(self._size, *known, 0.0) if known else self._size

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if values and returns are close enough to what they are compared with; else return
        False.
        """
        values, returns, reward = map(rows.column, (VALUES, RETURNS, "reward/mean"))
        sizes = list(map(abs, reward))
        if spread := rows.column("reward/std"):
            sizes = list(map(max, map(abs, spread), sizes or [0.0] * len(spread)))
        sizes = list(accumulate(sizes, max, initial=self._size))[1:] or [self._size] * len(rows.steps)
        if sizes[0] <= 0.0:
            return False
        columns = [
            [abs(value - other) / size for value, other, size in zip(of, to, sizes, strict=True)] if of and to else []
            for of, to in ((values, returns), (returns, reward))
        ]
        taken = self.buffered(rows.steps, columns)
        if taken:
            self._size = sizes[-1]
        return taken

    def read(self, step: ClosedStep, limit: RiseLimit) -> float | None:
        """Return the distance between two means in the row ``step``, over the reward's magnitude; None if one is
        missing.

        ``limit``: the limit whose metric names the two means.
        """
        get = step.numbers.get
        other, value = get(RETURNS if limit.metric == VALUES else "reward/mean"), get(limit.metric)
        if value is None or other is None or self._size <= 0.0:
            return None
        return abs(value - other) / self._size
