"""Health of layers, from the norms of their gradients: who carries the step, who is far off its own level.

Norms come as ``grad_layer/<layer>``, one number a layer and step, before clipping. Plain arithmetic on numpy arrays;
no torch, and no numpy either until there are layers. A norm that is NaN or infinite, or zero (an expert no token was
routed to), enters no statistic of the run.
"""

from __future__ import annotations

from rlwatch.layers.derived import DerivedLayers, layer_health, layer_norms
from rlwatch.layers.step import LayerStep, SpikingLayer

__all__ = ["DerivedLayers", "LayerStep", "SpikingLayer", "layer_health", "layer_norms"]
