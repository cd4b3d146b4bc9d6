"""The layer metrics that are stored beside the norms they are computed of."""

from __future__ import annotations

from collections.abc import Mapping

from rlwatch.layers.health import LayerHealth
from rlwatch.metrics import LAYER_PREFIX


def layer_norms(metrics: Mapping[str, float]) -> dict[str, float]:
    """Layer -> gradient norm, of the metrics called ``grad_layer/<layer>``."""
    cut = len(LAYER_PREFIX)
    return {name[cut:]: value for name, value in metrics.items() if name.startswith(LAYER_PREFIX)}


class DerivedLayers:
    """Adds ``layers/...`` to records that hold layer norms; others pass as they are."""

    def __init__(self) -> None:
        self._health = LayerHealth()

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Add to ``metrics`` of ``step`` what they say of the layers; what the source measured itself stays."""
        norms = layer_norms(metrics)
        told = self._health.update(step, norms) if norms else None
        if told is not None:
            for name, value in told.metrics().items():
                metrics.setdefault(name, value)
