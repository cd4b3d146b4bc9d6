"""Detect single layers whose gradient spikes relative to the others, and layers that no longer vary together."""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, rounded
from rlwatch.detectors.context import RewardWatch, kept_by_layer_clip
from rlwatch.layers import SPIKE_TIMES, WINDOW_ROWS, LayerHealth, LayerStep, SpikingLayer, layer_norms
from rlwatch.metrics import LAYER_PREFIX
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold
from rlwatch.wording import number

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
