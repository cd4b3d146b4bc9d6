"""Whether the layers' gradients still rise and fall together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STILL = 1e-9
"""Relative standard deviation below which a norm counts as constant: it correlates with nothing."""


def heterogeneity(norms: NDArray[np.float64]) -> float | None:
    """1 - mean pairwise Pearson correlation of the layers' norms over the rows: 0 in step, 1 unrelated; in [0, 2].

    Step-wise correlation of layer norms is how GradLoc (Tencent Hunyuan 2026) defines layer-wise heterogeneity. The
    mean over all pairs follows from the norm of the sum of the standardised columns, so the cost is O(W L).

    Parameters
    ----------
    norms
        (W, L), NaN where a layer was not measured. Layers with a NaN, and such as do not move, are left out; None if
        fewer than two are left, or fewer than three rows.
    """
    told = norms[:, np.isfinite(norms).all(axis=0)]
    told = told / told.max(axis=0, initial=np.finfo(float).tiny)
    deviations = told - told.mean(axis=0, keepdims=True) if told.size else told
    spread = deviations.std(axis=0) if told.size else np.zeros(0)
    moving = spread > STILL
    layers = int(moving.sum())
    if layers < 2 or len(norms) < 3:
        return None
    together = (deviations[:, moving] / spread[moving]).sum(axis=1)
    mean = (together @ together / len(norms) - layers) / (layers * (layers - 1))
    return float(np.clip(1.0 - mean, 0.0, 2.0))
