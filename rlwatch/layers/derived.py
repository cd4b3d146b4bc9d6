"""The layer metrics that are stored beside the norms they are computed of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rlwatch.metrics import LAYER_PREFIX
from rlwatch.records import StepRecord

if TYPE_CHECKING:
    from rlwatch.layers.health import LayerHealth


def layer_norms(metrics: Mapping[str, float]) -> dict[str, float]:
    """Layer -> gradient norm, of the metrics called ``grad_layer/<layer>``."""
    cut = len(LAYER_PREFIX)
    return {name[cut:]: value for name, value in metrics.items() if name.startswith(LAYER_PREFIX)}


def layer_health() -> LayerHealth:
    """A fresh one. Runs without layers never load numpy for it."""
    from rlwatch.layers.health import LayerHealth

    return LayerHealth()


class DerivedLayers:
    """Adds ``layers/...`` to records that hold layer norms; others pass as they are."""

    def __init__(self) -> None:
        self._health: LayerHealth | None = None

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Add to ``metrics`` of ``step`` what they say of the layers; what the source measured itself stays."""
        norms = layer_norms(metrics)
        if not norms:
            return
        self._health = self._health or layer_health()
        told = self._health.update(step, norms)
        for name, value in (told.metrics() if told is not None else {}).items():
            metrics.setdefault(name, value)

    def added(self, records: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """The same of records, in order: those of a log that somebody else wrote."""
        for record in records:
            metrics = dict(record.metrics)
            self.add(record.step, metrics)
            yield record if len(metrics) == len(record.metrics) else replace(record, metrics=metrics)
