"""What one step says of the layers, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 50
"""Rows that levels and correlations are computed over."""
TIMES = 6.0
"""Least factor over its level that makes a layer spike."""


@dataclass(frozen=True, slots=True)
class SpikingLayer:
    """A layer whose ``norm`` is ``times`` what it would be if it followed the others as it used to."""

    layer: str
    norm: float
    times: float
    deviations: float

    @property
    def usual(self) -> float:
        """The norm it would have."""
        return self.norm / self.times


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What one step says of the layers; None where the run is too young (or has too few layers) to tell.

    Parameters
    ----------
    layers
        How many were measured with a finite norm.
    max_share, heaviest
        Largest share of the squared norm, and the layer that has it.
    participation
        In [1/L, 1]: how evenly the squared norm is spread.
    heterogeneity
        1 - mean pairwise correlation of the norms over the last rows in which nothing spiked.
    rise
        max_l(n_l / usual_l) / median_l(n_l / usual_l), >= 1.
    spiking
        Layers far above their level relative to the others, worst first.
    total_times
        Norm of all layers together over its usual level.
    """

    layers: int
    max_share: float
    heaviest: str
    participation: float
    heterogeneity: float | None = None
    rise: float | None = None
    spiking: tuple[SpikingLayer, ...] | None = None
    total_times: float | None = None

    def metrics(self) -> dict[str, float]:
        """By their canonical names; what is not known is left out."""
        known = {
            "layers/heterogeneity": self.heterogeneity,
            "layers/participation": self.participation,
            "layers/max_share": self.max_share,
            "layers/rise": self.rise,
            "layers/spiking": None if self.spiking is None else float(len(self.spiking)),
        }
        return {name: value for name, value in known.items() if value is not None}
