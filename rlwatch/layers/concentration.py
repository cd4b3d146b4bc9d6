"""How one step's squared gradient norm is spread over the layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def shares(norms: Floats) -> Floats:
    """``n_l^2 / sum n^2`` (L,), sums up to 1; of ``norms`` (L,), finite and >= 0. All zero where they all are.

    >>> shares(np.array([3.0, 4.0])).round(2).tolist()
    [0.36, 0.64]
    """
    largest = norms.max(initial=0.0)
    if largest == 0.0:
        return np.zeros_like(norms)
    squares = np.square(norms / largest)
    parts: Floats = squares / squares.sum()
    return parts


def participation(norms: Floats) -> float | None:
    """``(sum n^2)^2 / (L sum n^4)``, in [1/L, 1]: 1 if all layers carry the same, 1/L if one carries everything.

    ``norms`` (L,) are finite and >= 0; None where all are zero.

    >>> participation(np.array([1.0, 1.0, 0.0, 0.0]))
    0.5
    """
    parts = shares(norms)
    return None if not parts.any() else float(1.0 / (len(parts) * np.square(parts).sum()))
