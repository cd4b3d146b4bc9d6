"""Detect level and growth of the mismatch between rollout engine and trainer: one samples from a policy that the other
does not train.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.detectors.rise import RiseLimit, SustainedLevel, log_size, spread_of_ess
from rlwatch.metrics import unit_of
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Cusum, Hold, Window, mad, theil_sen
from rlwatch.wording import number


def shortfall(share: float) -> float:
    """Return the distance of a share or a correlation below 1, at least 0, as the scale of a limit."""
    return max(1.0 - share, 0.0)


@dataclass(frozen=True, slots=True)
class MismatchScale:
    """Bounds of a mismatch metric, both counted from ``zero``, its value for engines that agree.

    Below ``noise`` engines merely round differently; above ``severe`` the gradient is off-policy whatever the run's
    history.
    """

    noise: float
    severe: float
    zero: float = 0.0


SCALES = {
    "mismatch/k3": MismatchScale(noise=0.005, severe=0.05),
    "mismatch/kl": MismatchScale(noise=0.01, severe=0.1),
    "mismatch/logp_absdiff": MismatchScale(noise=0.02, severe=0.1),
    "mismatch/prob_absdiff": MismatchScale(noise=0.015, severe=0.05),
    "mismatch/log_ppl_absdiff": MismatchScale(noise=0.04, severe=0.25),
    "mismatch/mult_prob_error": MismatchScale(noise=0.02, severe=0.1, zero=1.0),
}
"""Bounds of the mismatch metrics.

Healthy: bf16 sampler mean |d| 0.0014-0.004, MoE 0.027, probability 0.006-0.008; k3 dense below 1e-3, MoE to 1e-1;
log-perplexity 0.003-0.07. Alarmed elsewhere: |kl| 0.1 (verl's example), logprob difference 0.1 (slime's gate),
multiplicative error past 1.01 to 1.02, and 1.05 to 1.1 fails (NeMo-RL). A public collapse went from 0.069 to 0.38 in
log-perplexity.
"""

BANDS = (
    RiseLimit("mismatch/k3", 0.1, 0.0),
    RiseLimit("mismatch/kl", 0.1, 0.0),
    RiseLimit("mismatch/logp_absdiff", 0.1, 0.0),
    RiseLimit("mismatch/prob_absdiff", 0.05, 0.0),
    RiseLimit("mismatch/log_ppl_absdiff", 0.1, 0.0),
    RiseLimit("mismatch/mult_prob_error", 1.05, 0.0, log_size),
    RiseLimit("mismatch/prob_corr", 0.98, 0.0, shortfall),
    RiseLimit("mismatch/ess", 0.3, 0.0, spread_of_ess),
    RiseLimit("mismatch/chi2", 1.0, 0.0),
    RiseLimit("mismatch/is_ratio", 0.5, 0.0, log_size),
    RiseLimit("mismatch/is_ratio_std", 1.0, 0.0),
)
"""Levels of mismatch at which other projects alarm whatever the run's history, on both sides if the metric is a ratio.

They are from verl's examples, the gates of slime and NeMo-RL, and smoke tests of the correlation.
"""


# A steady rise of a positive quantity, as mismatch that feeds on itself grows: by a factor per step.

LEAST = math.log(1.25)
"""Rise of the logarithm over the window; a smaller one may be chance."""
SURE = 4.0
"""Standard errors from which a rise is significant; neighbouring rows are correlated, so 2 would be few."""
STEADY = 0.35
"""Share of the slope that both halves must show: a single step up is a shift, which CUSUM detects."""


class LogTrend:
    """Trend of a positive metric: Theil-Sen slope of its logarithm over the last rows, if both halves of them rise."""

    def __init__(self) -> None:
        self._window = Window(rows=40, steps=400, least=12)

    def update(self, step: int, log: float) -> None:
        """Read the logarithm ``log`` of the metric in the next row, which is at ``step``."""
        self._window.update(step, log)

    def doubling(self) -> float | None:
        """Return the steps in which the metric doubles; None without a certain rise. Takes a few hundred
        microseconds.
        """
        steps, values = self._window.at, self._window.values
        if len(steps) < self._window.least or steps[-1] == steps[0]:
            return None
        slope = theil_sen(steps, values)
        rise = slope * (steps[-1] - steps[0])
        if rise <= LEAST:
            return None
        noise = mad([value - slope * step for step, value in zip(steps, values, strict=True)])
        if rise <= SURE * noise * math.sqrt(12.0 / len(steps)):
            return None
        half = len(steps) // 2
        halves = (theil_sen(steps[:half], values[:half]), theil_sen(steps[half:], values[half:]))
        return math.log(2.0) / slope if min(halves) >= STEADY * slope else None


# Engine mismatch grows: the rollout engine samples from another policy than the one being trained.

GROWN, MUCH = 2.0, 3.0
"""Factor over the run's baseline for a warning, and for critical."""
DRIFTED = 1.35
"""Factor over the start that warns if CUSUM finds a lasting shift of the logarithm, or Theil-Sen's slope a steady
rise.
"""
SHIFT = 12.0
"""Decision level of CUSUM, in standard deviations."""


class _Channel:
    """Course of one mismatch metric in log space: its start, level, persistent shift and trend."""

    def __init__(self, name: str, scale: MismatchScale) -> None:
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
        """Update the level now, and that of the beginning, which is never below rounding noise."""
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
    """Detector of growing mismatch between rollout engine and trainer, by its level and a persistent shift, in log
    space.

    Mismatch amplifies itself (it compounds once it steers the update), so growth counts even before the reward reacts.
    The worst of the logged metrics is reported.
    """

    name: ClassVar[str] = "mismatch_growth"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in SCALES)
    reads: ClassVar[tuple[str, ...]] = tuple(SCALES)

    def __init__(self) -> None:
        super().__init__()
        self._channels = [_Channel(name, scale) for name, scale in SCALES.items()]

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge each mismatch metric of the row ``step``; return a finding for the one that has grown most, if any."""
        for channel in self._channels:
            value = finite(step, channel.name)
            if value is not None:
                channel.update(step.step, value)
        worst = max(self._channels, key=lambda c: (-1 if c.severity is None else c.severity.rank, c.factor))
        return [] if worst.severity is None else [self._finding(step, worst, worst.severity)]

    def _finding(self, step: ClosedStep, channel: _Channel, severity: Severity) -> Finding:
        zero, doubling = channel.scale.zero, channel.trend.doubling()
        unit = " nats/token" if unit_of(channel.name) == "nats/token" else ""
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


# Mismatch beyond what healthy runs of any kind show, whatever this run began with.


class MismatchLevel(BaseDetector):
    """Detector of mismatch beyond published bounds, which a relative test of growth cannot detect if the run began so.

    A warning if the run began beyond them. If the mismatch grew to that level, it is information in addition to
    ``mismatch_growth``.
    """

    name: ClassVar[str] = "mismatch_level"
    reads: ClassVar[tuple[str, ...]] = tuple(band.metric for band in BANDS)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def __init__(self) -> None:
        super().__init__()
        self._bands = [SustainedLevel(band) for band in BANDS]

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge each mismatch metric of the row ``step`` against a fixed bound; return one finding about those beyond,
        if any.

        Metrics that began beyond their bound are named first.
        """
        for band in self._bands:
            band.update(step.step, finite(step, band.limit.metric))
        beyond = [band for band in self._bands if band.lasted]
        return [self._finding(step, beyond)] if beyond else []

    def _finding(self, step: ClosedStep, beyond: list[SustainedLevel]) -> Finding:
        worst = max(beyond, key=lambda band: (band.always, band.score))
        levels = {band.limit.metric: band.level for band in beyond}
        shown = ", ".join(
            f"{band.limit.metric} {number(band.level or 0.0)} (alarm level elsewhere: {number(band.limit.floor)})"
            for band in sorted(beyond, key=lambda band: band is not worst)[:3]
        )
        how = "which it was not when the run began"
        if worst.always:
            began, look = ("was so", ", not at training") if worst.began_beyond else ("was close to that", " first")
            how = f"and {began} when the run began: look at weight sync, precision and sampling settings{look}"
        return self.finding(
            step,
            "mismatch_level",
            Severity.WARNING if worst.always else Severity.INFO,
            f"rollout engine and trainer disagree more than in healthy runs: {shown}; {how}",
            onset=worst.since,
            metric=worst.limit.metric,
            score=worst.score,
            evidence=rounded(levels) | {"from_the_start": worst.always},
        )
