"""Layer-wise clipping of gradients: the cure if one layer's gradient spikes and a global clip would shrink all layers.

>>> from rlwatch.clipping import LayerClip  # or rlwatch.LayerClip

Tencent Hunyuan published that clipping each layer by a threshold of its own, adapted to that layer's statistics,
stabilises training where clipping of tokens and of sequences does not (LayerClip, 2026). The exact rule, its statistic,
window and defaults are not public, so no class of this package implements that rule. The package contains a robust rule
designed for rlwatch (:class:`LayerMedian`), related published rules under their names (:class:`AdaGC`, :class:`AGGC`,
:class:`ZClip`), constant thresholds (:class:`LayerMaxNorm`), and the protocol of further rules (:class:`ClipRule`).
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
