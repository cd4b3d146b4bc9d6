"""Detect level and growth of the mismatch between rollout engine and trainer: one samples from a policy that the other
does not train.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import RewardWatch
from rlwatch.detectors.rise import Rise, RiseDetector, RiseLimit, SustainedLevel, log_size, odds, spread_of_ess
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


# Detect a mismatch that KL does not show: its mean is flat and tiny while the tail grows or the reward falls.

QUIET = ("mismatch/k3", "mismatch/kl")
"""Estimates of KL between trainer and engine that stay flat."""
FLAT = 1.5
"""Factor over the start up to which an estimate counts as flat."""
TAILS = (
    RiseLimit("mismatch/logp_absdiff_p99", 0.1, 2.0),
    RiseLimit("mismatch/logp_absdiff_max", 3.0, 2.0),
    RiseLimit("mismatch/prob_absdiff_max", 0.75, 4.0, odds),
    RiseLimit("mismatch/factor2_frac", 0.002, 3.0),
    RiseLimit("mismatch/overconfident_frac", 1e-4, 3.0),
)
"""Limits of metrics that show single tokens. The largest difference of probability is 0.15 to 0.45 in healthy runs."""
EXTREME = 0.9
"""Median, over rows, of a batch's largest difference of probability that confirms a falling reward.

It counts even if the median has been so large since the start.
"""


class MismatchBlind(BaseDetector):
    """Detector of a mismatch between trainer and rollout engine in the tails, while the KL estimates stay flat.

    With recomputed old log-probs, k1 and k3 between trainer and engine stayed flat for 700 steps of a collapse, while
    the mean difference was tiny and the largest near 1 (VeXact, arXiv 2605.14220). Two tails, or a tail and a falling
    reward, are reported: one alone may be a few odd tokens.
    """

    name: ClassVar[str] = "mismatch_blind"
    reads: ClassVar[tuple[str, ...]] = tuple(tail.metric for tail in TAILS)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((mean, tail.metric) for mean in QUIET for tail in TAILS)
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._tails = [Rise(tail) for tail in TAILS]
        self._means = {name: (Window(rows=20, steps=20), Baseline()) for name in QUIET}
        self._extreme = Window(rows=20, steps=20, least=5)
        self._hold = Hold(forgive=2)

    def listen(self, step: ClosedStep) -> None:
        """Read the mean reward and the estimates of KL between trainer and rollout engine from the row ``step``."""
        self._reward.update(step)
        for name, (now, base) in self._means.items():
            value = finite(step, name)
            if value is not None:
                now.update(step.step, abs(value))
                base.update(step.step, abs(value))

    def listen_over(self, rows: Stretch) -> bool:
        """Read the estimates of KL of all ``rows`` at once."""
        for name, (now, base) in self._means.items():
            values = list(map(abs, rows.column(name)))
            if values:
                now.extend(rows.steps, values)
                base.extend(rows.steps, values)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the tails; return the mismatch if they have grown while the estimates are flat."""
        for tail in self._tails:
            tail.update(step.step, finite(step, tail.limit.metric))
        largest = finite(step, "mismatch/prob_absdiff_max")
        if largest is not None:
            self._extreme.update(step.step, largest)
        loud = [tail for tail in self._tails if tail.lasted]
        fallen = self._reward.fallen()
        enough = len(loud) >= 2 or (fallen and (bool(loud) or (self._extreme.get() or 0.0) >= EXTREME))
        self._hold.update(step.step, enough and self._flat())
        return [self._finding(step, loud)] if self._hold.lasted(3) else []

    def _flat(self) -> bool:
        """Return whether an estimate is measured, and each measured one is flat and below a severe level."""
        levels = [(name, now.get(), base.get()) for name, (now, base) in self._means.items()]
        known = [(name, now, then) for name, now, then in levels if now is not None and then is not None]
        return bool(known) and all(
            now < SCALES[name].severe and now <= FLAT * max(then, SCALES[name].noise / 10.0)
            for name, now, then in known
        )

    def _finding(self, step: ClosedStep, loud: list[Rise]) -> Finding:
        means = {name: now.get() for name, (now, _) in self._means.items() if now.get() is not None}
        tails = {tail.limit.metric: tail.level for tail in loud}
        if not tails:
            tails = {"mismatch/prob_absdiff_max": self._extreme.get()}
        flat = " and ".join(f"{name} {number(level or 0.0)}" for name, level in means.items())
        grown = ", ".join(f"{name} {number(level or 0.0)}" for name, level in tails.items())
        return self.finding(
            step,
            "mismatch_blind",
            Severity.WARNING,
            f"{flat} look unchanged, yet single tokens differ ever more between trainer and engine ({grown})"
            f"{self._reward.in_words()}: the KL does not see this mismatch",
            onset=min((tail.since for tail in loud if tail.since is not None), default=self._hold.since),
            metric=next(iter(tails)),
            score=max((tail.score for tail in loud), default=1.0),
            evidence=rounded({**means, **tails, "reward": self._reward.now, "reward_best": self._reward.best}),
        )


# Detect that the correlation between the token probabilities of trainer and rollout engine falls.

NARROWED = 0.7
"""Factor on the differences of probability below which a lower correlation only reflects a narrower range: a policy
that becomes certain has probabilities near 1, whose correlation is that of rounding.
"""


class MismatchCorrelation(RiseDetector):
    """Detector of a falling correlation between the token probabilities of trainer and rollout engine.

    It compares 1 - Pearson's correlation with its start (verl's users ask for 0.98 in smoke tests; healthy 0.995 and
    up).
    """

    name: ClassVar[str] = "mismatch_correlation"
    limits: ClassVar[tuple[RiseLimit, ...]] = (RiseLimit("mismatch/prob_corr", 0.98, 3.0, shortfall),)

    def __init__(self) -> None:
        super().__init__()
        self._gap = Window(rows=10, steps=10)
        self._gap_base = Baseline()

    def listen(self, step: ClosedStep) -> None:
        """Read the mean difference between the probabilities of trainer and rollout engine from the row ``step``."""
        gap = finite(step, "mismatch/prob_absdiff")
        if gap is not None:
            self._gap.update(step.step, gap)
            self._gap_base.update(step.step, gap)

    def listen_over(self, rows: Stretch) -> bool:
        """Read the mean differences of probability of all ``rows`` at once."""
        gaps = rows.column("mismatch/prob_absdiff")
        if gaps:
            self._gap.extend(rows.steps, gaps)
            self._gap_base.extend(rows.steps, gaps)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Return a finding if the correlation fell, unless the probabilities only came to lie closer together."""
        found = super().judge(step)
        now, then = self._gap.get(), self._gap_base.get()
        narrowed = now is not None and then is not None and now < NARROWED * then
        return [] if narrowed else found

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding at the row ``step``: the correlation now and at the start; ``rise``: the course of 1 -
        correlation.
        """
        level, start = rise.level or 0.0, 1.0 - (rise.began or 0.0)
        return self.finding(
            step,
            "mismatch_correlation",
            Severity.WARNING,
            f"the probabilities that trainer and rollout engine give to one token agree less: correlation "
            f"{level:.3f}, at the start {start:.3f}",
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            baseline=start,
            evidence=rounded({"correlation": level, "start": start, "prob_absdiff": self._gap.get()}),
        )
