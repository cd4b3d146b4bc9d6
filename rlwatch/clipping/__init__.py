"""Clipping gradients layer by layer: the cure where one layer spikes and a global clip would starve the others.

>>> from rlwatch.clipping import LayerClip  # or rlwatch.LayerClip

Tencent Hunyuan published that clipping each layer by a threshold of its own, adapted to that layer's statistics,
stabilises training where clipping of tokens and of sequences does not (LayerClip, 2026). The exact rule, its statistic,
window and defaults are not public, so nothing here is that rule. What is here: a robust rule of our own
(:class:`LayerMedian`), the published neighbours under their names (:class:`AdaGC`, :class:`AGGC`, :class:`ZClip`),
constant thresholds (:class:`LayerMaxNorm`), and a protocol for more (:class:`ClipRule`).
"""

from __future__ import annotations

from rlwatch.errors import MissingExtraError

try:
    import torch as _torch
except ImportError as error:
    raise MissingExtraError("torch", "torch", "layer-wise clipping") from error

from rlwatch.clipping.layer_clip import Clipped, LayerClip
from rlwatch.clipping.rules import AGGC, AdaGC, By, ClipRule, LayerMaxNorm, LayerMedian, State, ZClip
from rlwatch.clipping.skip import SkipDecision, SkipOnSpike, skip_step

__all__ = [
    "AGGC",
    "AdaGC",
    "By",
    "ClipRule",
    "Clipped",
    "LayerClip",
    "LayerMaxNorm",
    "LayerMedian",
    "SkipDecision",
    "SkipOnSpike",
    "State",
    "ZClip",
    "skip_step",
]
del _torch
