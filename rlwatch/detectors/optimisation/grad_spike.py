"""Detect spikes of the gradient norm, which warn as long as they recur, and a level that stays high, which is
critical.
"""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import NEARLY, RewardWatch, kept_by_layer_clip, silent_share, silent_shares
from rlwatch.layers import SPIKE_TIMES, WINDOW_ROWS, LayerHealth, LayerStep, SpikingLayer, layer_norms
from rlwatch.metrics import LAYER_PREFIX
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Ranked, Window
from rlwatch.wording import number

SPIKE = 6.0
"""Factor over the recent upper decile that makes a row a spike (usually a full decade over the median)."""
SUSTAINED = 10.0
"""Factor of the recent median over the upper quartile of the run's first rows that counts as a sustained rise."""
HIGH = 5.0
"""Factor over the start that dates the beginning of a sustained rise."""
ADOPT = 0.25
"""Share of recent rows that are spikes from which on they are the new normal (for the spike test only)."""
AGAIN, LARGE, WITHIN = 3, 10.0, 100
"""Number of spikes, their least factor, and the steps within which they count as recurring: one odd batch is one
spike.
"""
HARMLESS = 1e-2
"""Gradient norm below which a spike is harmless. If no group has differing rewards, such a norm is no baseline
either.
"""
NOTHING = 1e-4
"""Gradient norm that counts as zero: relative to it, any batch with a signal would look like a spike."""


class GradSpike(BaseDetector):
    """Detector of gradient spikes and of a gradient norm that stays high, on a multiplicative scale, against upper
    quantiles.

    Upper quantiles, because batches without any signal (all groups agree) push the median towards zero and would make
    every informative batch look like a spike. Spikes stay out of the reference. A run that begins without a right
    answer has almost no gradient: later levels are compared with that of the take-off of its reward. If all groups
    agree again and again, the reference is the level of rows in which some differ. A spike that layer-wise clipping
    reduced to the usual norm moved the weights no further, and is ``info``.
    """

    name: ClassVar[str] = "grad_spike"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("optim/grad_norm",),)
    reads: ClassVar[tuple[str, ...]] = ("optim/grad_norm",)

    def __init__(self) -> None:
        super().__init__()
        self._base = Baseline()
        self._taught = Baseline()
        self._silent: float | None = None
        self._reward = RewardWatch()
        self._lifted = 0.0
        self._now = Window(rows=8, steps=8, least=5)
        self._normal = Ranked(rows=100, steps=500, least=8)
        self._spikes = Window(rows=50, steps=250, least=8)
        self._factors = Window(rows=WITHIN, steps=WITHIN, least=1)
        self._high = Hold(forgive=2)
        self._sustained = Hold(forgive=1)

    def listen(self, step: ClosedStep) -> None:
        """Remember the row's share of groups with equal rewards, which some trainers log for the first update of a
        batch only.
        """
        share = silent_share(step)
        self._silent = self._silent if share is None else share

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the gradient norm of the row ``step`` and the level of the last rows; return findings of a lasting rise
        or spikes.
        """
        norm = abs(finite(step, *self.reads) or 0.0)
        if self._rows_left:
            self._rows_left -= 1
            self._now.update(step.step, norm)
            self._reward.update(step)
            self._lift()
            return []
        usual = self._usual()
        spiked = usual is not None and norm > SPIKE * usual
        self._remember(step.step, norm, spiked)
        self._reward.update(step)
        self._lift()
        now, start = self._now.get(), self._start()
        if start is not None:
            start = max(start, self._lifted)
            self._high.update(step.step, norm > HIGH * start)
            self._sustained.update(step.step, now is not None and now > SUSTAINED * start)
            if now is not None and self._sustained.lasted(5):
                return [self._level(step, now, start)]
        return self._spiked(step, norm, usual if spiked else None)

    def _usual(self) -> float | None:
        """Return the upper decile of recent rows without spikes, bounded below by how the run began."""
        if len(self._normal) < self._normal.least:
            return None
        recent = self._normal.quantile(0.9)
        start = self._base.upper() or 0.0
        usual = max(recent, start / 3.0)
        return usual if usual > 0.0 else None

    def _start(self) -> float | None:
        """Return the level of the first rows with a signal; until there are any, that of the first rows."""
        taught, first = self._taught.upper(), self._base.upper()
        if taught is not None and taught > 0.0:
            return taught
        if first is None or first <= 0.0:
            return None
        return max(first, HARMLESS) if self._silent is not None else first

    def _lift(self) -> None:
        """Raise the level that later ones are compared with while the reward takes off."""
        now = self._now.get()
        if now is not None and now > max(self._lifted, self._least_start()) and self._reward.taking_off():
            self._lifted = now

    def pass_over(self, rows: Stretch) -> bool:
        """Take norms that are all far from a spike and from a rise at once.

        Where a level is above the first ones while the reward may take off, :meth:`judge` follows both row by row.
        """
        least, first, norms = self._least_start(), self._base.upper(), list(map(abs, rows.column("optim/grad_norm")))
        if first is None or first <= 0.0 or least <= 0.0 or self._sustained.since is not None:
            return False
        highest = max(*norms, self._now.most)
        few = len(self._normal) < self._normal.least or self._factors.most > LARGE
        if few or highest > NEARLY * min(SPIKE * first / 3.0, HIGH * least):
            return False
        still = [0.0] * len(norms)
        self._normal.extend(rows.steps, norms)
        self._spikes.extend(rows.steps, still)
        self._factors.extend(rows.steps, still)
        for hold in (self._high, self._sustained):
            hold.miss(rows.steps)
        course = self._reward.ahead(rows)
        last = self._now.last
        if course is None or last is None or rows.steps[0] <= last:
            self._rows_left = len(norms)
            return False
        bound = max(self._lifted, least)
        levels = [level for level in self._now.medians(rows.steps, norms) if level is not None]
        if max(levels, default=0.0) > bound and not course.cannot_take_off():
            self._rows_left = len(norms)
            return False
        self._now.extend(rows.steps, norms)
        self._reward.extend(rows)
        self._reward.wake()
        for share in silent_shares(rows)[-1:]:
            self._silent = share
        return True

    def _least_start(self) -> float:
        """Return a level that :meth:`_start` never falls below from now on: up to it a take-off changes nothing."""
        taught, first = self._taught.upper(), self._base.upper()
        if taught is None or first is None or not (self._base.done and self._taught.done):
            return -math.inf
        return taught if taught > 0.0 else first

    def _remember(self, step: int, norm: float, spiked: bool) -> None:
        self._base.update(step, norm)
        if self._silent is None or self._silent < 1.0:
            self._taught.update(step, norm)
        self._now.update(step, norm)
        self._spikes.update(step, float(spiked))
        share = self._spikes.mean
        if not spiked or (share is not None and share > ADOPT):
            self._normal.update(step, norm)

    def _spiked(self, step: ClosedStep, norm: float, usual: float | None) -> list[Finding]:
        """Report a spike in this row (relative to ``usual``), or repeated spikes, which persist between two of them."""
        left = norm * kept_by_layer_clip(step)
        factor = 0.0 if usual is None or usual <= NOTHING else left / usual
        self._factors.update(step.step, factor)
        if self._factors.most > LARGE:
            known = zip(self._factors.at, self._factors.values, strict=True)
            recent = [(at, times) for at, times in known if times > LARGE]
            if len(recent) >= AGAIN:
                return [self._habit(step, recent)]
        return [] if usual is None else [self._spike(step, norm, usual, left)]

    def _habit(self, step: ClosedStep, spikes: list[tuple[int, float]]) -> Finding:
        largest = max(factor for _, factor in spikes)
        return self.finding(
            step,
            "grad_spike",
            Severity.WARNING,
            f"repeated gradient spikes: {len(spikes)} in {WITHIN} steps, up to {number(largest)} "
            "times its recent upper range",
            onset=spikes[0][0],
            metric="optim/grad_norm",
            score=largest / SPIKE,
            evidence=rounded({"spikes": len(spikes), "factor": largest}),
        )

    def _spike(self, step: ClosedStep, norm: float, usual: float, left: float) -> Finding:
        """Return the finding; ``left``: the norm after layer-wise clipping, a remark where that is no spike."""
        held = left <= SPIKE * usual
        return self.finding(
            step,
            "grad_spike",
            Severity.INFO if held else Severity.WARNING,
            f"gradient norm {number(norm)} is {number(norm / usual)} times its recent upper range ({number(usual)}): "
            + (f"layer-wise clipping left about {number(left)} of it" if held else "a single spike so far"),
            metric="optim/grad_norm",
            score=norm / (SPIKE * usual),
            baseline=usual,
            evidence=rounded({"grad_norm": norm, "usual": usual, "factor": norm / usual}),
        )

    def _level(self, step: ClosedStep, now: float, start: float) -> Finding:
        rows = self._sustained.rows
        return self.finding(
            step,
            "grad_rise",
            Severity.CRITICAL,
            f"gradient norm has stayed around {number(now)} for {rows} rows, "
            f"{number(now / start)} times its level at the start ({number(start)})",
            onset=self._high.since if self._high.since is not None else self._sustained.since,
            metric="optim/grad_norm",
            score=now / (SUSTAINED * start),
            baseline=start,
            evidence=rounded({"grad_norm": now, "start": start, "factor": now / start, "rows": rows}),
        )


# Detect single layers whose gradient spikes relative to the others, and layers that no longer vary together.

FEW = 0.25
"""Largest share of the layers that may spike together for a finding: more are no matter of single layers."""
USUAL = 3.0
"""Factor over its usual level below which the global gradient norm looks fine although a layer spikes."""
BROKEN = 0.35
"""Fall of the mean correlation between layers below that at the run's start from which it counts."""
LASTED = 15
"""Rows for which the correlation must stay so low: the window turns over slowly, so a chance low lasts."""
ADVICE = "clipping layer by layer (LayerClip) would contain it, clipping the global norm scales every layer down"
NAMED = 3
"""Most layers that a message names."""


class LayerSpike(BaseDetector):
    """Detector of single layers whose gradient norm spikes, and of a lost correlation between layers.

    Each layer's gradient norm is compared with its own level, and the correlation between layers with the run's start.
    The third published class of anomaly (GradLoc, Tencent Hunyuan 2026): tokens whose ratios are harmless blow up a few
    layers while the others, and with them the global norm, stay as they were. Clipping by the global norm does not see
    it. Layers are judged relative to the others of the step, so a change common to all is no spike. Their correlation
    during the take-off of the reward, when ever more groups have a signal, is not the baseline.
    """

    name: ClassVar[str] = "layer_spike"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((LAYER_PREFIX,),)
    reads: ClassVar[tuple[str, ...]] = ()
    families: ClassVar[tuple[str, ...]] = (LAYER_PREFIX,)

    def __init__(self) -> None:
        super().__init__()
        self._health: LayerHealth | None = None
        self._reward = RewardWatch()
        self._start = Baseline(floor=0.02)
        self._rows = 0
        self._apart = Hold(forgive=1)

    def measured(self, step: ClosedStep) -> bool:
        """Return True if a layer has a finite gradient norm above 0; batches without a gradient have none."""
        return any(0.0 < norm < math.inf for norm in layer_norms(step.metrics).values())

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the layers' gradient norms; return findings of a spike in one layer and of a lost correlation between
        layers.
        """
        self._reward.update(step)
        self._health = self._health or LayerHealth()
        now = self._health.update(step.step, layer_norms(step.metrics))
        if now is None:
            return []
        found = (self._spike(step, now), self._heterogeneity(step, now))
        return [finding for finding in found if finding is not None]

    def _spike(self, step: ClosedStep, now: LayerStep) -> Finding | None:
        spiking = now.spiking or ()
        if not spiking or len(spiking) > max(1, FEW * now.layers):
            return None
        worst = spiking[0]
        kept = kept_by_layer_clip(step)
        held = kept < 1.0 and _held(worst, now, kept)
        return self.finding(
            step,
            "layer_spike",
            Severity.INFO if held else Severity.WARNING,
            f"{_subject(spiking)} {number(worst.times)} times the usual relative to the other layers "
            f"({number(worst.norm)} instead of {number(worst.usual)}), {_global(now)}: "
            + (f"layer-wise clipping left {number(worst.norm * kept)}" if held else ADVICE),
            metric="layers/rise",
            score=worst.times / SPIKE_TIMES,
            evidence={
                "layers": {one.layer: float(f"{one.times:.4g}") for one in spiking[:20]},
                "spiking": len(spiking),
                "of": now.layers,
                **rounded({"norm": worst.norm, "usual": worst.usual, "deviations": worst.deviations}),
                **rounded({"global_times": now.total_times}),
            },
        )

    def _heterogeneity(self, step: ClosedStep, now: LayerStep) -> Finding | None:
        """Judge the correlation once the window is full: correlations of few rows scatter."""
        apart = now.heterogeneity
        if self._reward.taking_off():
            self._start, self._rows = Baseline(floor=0.02), 0
        self._rows += 1
        if apart is None or self._rows < WINDOW_ROWS:
            return None
        self._start.update(step.step, apart)
        began = self._start.upper()
        self._apart.update(step.step, self._start.done and began is not None and apart - began > BROKEN)
        if began is None or not self._apart.lasted(LASTED):
            return None
        return self.finding(
            step,
            "layer_heterogeneity",
            Severity.WARNING,
            f"the layers' gradient norms no longer rise and fall together: over the last {WINDOW_ROWS} rows their mean "
            f"correlation is {number(1.0 - apart)}, at the start it was {number(1.0 - began)}; some layers respond to "
            "other tokens than the rest, which thresholds of their own (LayerClip) account for",
            onset=self._apart.since,
            metric="layers/heterogeneity",
            score=(apart - began) / BROKEN,
            baseline=began,
            evidence=rounded({"heterogeneity": apart, "start": began, "layers": now.layers, "rows": self._apart.rows}),
        )


def _subject(spiking: tuple[SpikingLayer, ...]) -> str:
    names = ", ".join(one.layer for one in spiking[:NAMED])
    if len(spiking) == 1:
        return f"the gradient norm of layer {names} is"
    more = f" and {len(spiking) - NAMED} more" if len(spiking) > NAMED else ""
    return f"the gradient norms of layers {names}{more} are up to"


def _held(worst: SpikingLayer, now: LayerStep, kept: float) -> bool:
    """Return whether layer-wise clipping left no spike, or made a raised global norm look normal."""
    if worst.norm * kept <= SPIKE_TIMES * worst.usual:
        return True
    times = now.total_times
    return times is not None and times >= USUAL >= times * kept


def _global(now: LayerStep) -> str:
    times = now.total_times
    if times is None or times < USUAL:
        return "while the global norm looks usual" + ("" if times is None else f" ({number(times)} times its level)")
    return f"and the global norm with it ({number(times)} times its level)"
