"""Engine mismatch grows: the rollout engine samples from another policy than the one being trained."""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.log_trend import LogTrend
from rlwatch.detectors.mismatch_scales import SCALES, Scale
from rlwatch.metrics import BY_NAME
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Cusum, Hold, Window

GROWN, MUCH = 2.0, 3.0
"""Factor over the run's baseline for a warning and for critical."""
DRIFTED = 1.35
"""Factor that warns if a CUSUM finds a persistent shift of the logarithm, or Theil-Sen's slope a steady rise of it."""
SHIFT = 12.0
"""CUSUM decision level, in standard deviations."""


class _Channel:
    """One mismatch metric, in log space."""

    def __init__(self, name: str, scale: Scale) -> None:
        self.name = name
        self.scale = scale
        self.base = Baseline(floor=0.1)
        self.now = Window(rows=10, steps=10)
        self.shift = Cusum(drift=0.75)
        self.trend = LogTrend()
        self.warned = Hold(forgive=2)
        self.confirmed = Hold(forgive=2)
        self._measure()

    def update(self, step: int, value: float) -> None:
        log = math.log(max(abs(value - self.scale.zero), self.scale.noise * 1e-3))
        self.base.update(step, log)
        self.now.update(step, log)
        self.trend.update(step, log)
        level = self.base.get()
        if self.base.done and level is not None:
            self.shift.update(step, (log - level) / self.base.spread)
        self._measure()
        self.warned.update(step, self._grown())
        self.confirmed.update(step, self.level >= self.scale.severe and self.factor >= MUCH)

    def _grown(self) -> bool:
        if self.level < self.scale.noise:
            return False
        if self.factor >= GROWN:
            return True
        if self.factor < DRIFTED:
            return False
        drifted = self.shift.get() > SHIFT and self.level > 2.0 * self.scale.noise
        return drifted or self.trend.doubling() is not None

    def _measure(self) -> None:
        """Level now, and how the run began, which is never less than rounding noise."""
        now, begun = self.now.get(), [level for level in (self.base.get(), self.base.first) if level is not None]
        self.level = 0.0 if now is None else math.exp(now)
        self.normal = max(math.exp(min(begun)), self.scale.noise / 2.0) if begun else math.inf
        self.factor = self.level / self.normal

    @property
    def severity(self) -> Severity | None:
        if self.confirmed.lasted(3, 2):
            return Severity.CRITICAL
        return Severity.WARNING if self.warned.lasted(3) else None

    @property
    def onset(self) -> int | None:
        starts = [s for s in (self.shift.since, self.warned.since) if s is not None]
        return min(starts) if starts else None


class MismatchGrowth(BaseDetector):
    """Level and persistent shift of the mismatch between rollout engine and trainer, in log space.

    Mismatch feeds on itself (it compounds once it steers the update), so growth counts even before the
    reward notices. The worst metric of those logged speaks.
    """

    name: ClassVar[str] = "mismatch_growth"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in SCALES)
    reads: ClassVar[tuple[str, ...]] = tuple(SCALES)

    def __init__(self) -> None:
        super().__init__()
        self._channels = [_Channel(name, scale) for name, scale in SCALES.items()]

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge each metric that was measured; report the worst."""
        for channel in self._channels:
            value = finite(step, channel.name)
            if value is not None:
                channel.update(step.step, value)
        worst = max(self._channels, key=lambda c: (-1 if c.severity is None else c.severity.rank, c.factor))
        return [] if worst.severity is None else [self._finding(step, worst, worst.severity)]

    def _finding(self, step: ClosedStep, channel: _Channel, severity: Severity) -> Finding:
        zero, doubling = channel.scale.zero, channel.trend.doubling()
        unit = " nats/token" if BY_NAME[channel.name].unit == "nats/token" else ""
        soon = "" if doubling is None else f"; it doubles every {number(doubling)} steps"
        message = (
            f"rollout engine and trainer drift apart: {channel.name} {number(zero + channel.level)}{unit}, "
            f"{number(channel.factor)} times its {'distance from 1' if zero else 'level'} at the start "
            f"({number(zero + channel.normal)}){soon}"
        )
        return self.finding(
            step,
            "mismatch_growth",
            severity,
            message,
            onset=channel.onset,
            metric=channel.name,
            score=channel.factor / DRIFTED,
            baseline=zero + channel.normal,
            evidence=rounded(
                {
                    "level": zero + channel.level,
                    "factor": channel.factor,
                    "cusum": channel.shift.get(),
                    "doubling_steps": doubling,
                }
            ),
        )
