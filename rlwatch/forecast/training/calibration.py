"""Making log-odds honest: a straight line in log-odds, fitted on runs the trees have not seen (Platt, 1999)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.training.examples import Floats


def line(
    logits: Floats, hit: npt.NDArray[np.bool_], weight: Floats | None = None, *, rounds: int = 50
) -> tuple[float, float]:
    """Slope and offset that maximise the likelihood of ``hit``, by Newton's method; (1, 0) where all rows agree.

    ``logits``, ``hit``, ``weight``: (n,).
    """
    y = hit.astype(float)
    if not 0.0 < y.mean() < 1.0:
        return 1.0, 0.0
    w = np.ones_like(y) if weight is None else weight / weight.mean()
    design, beta = np.stack([logits, np.ones_like(logits)], axis=1), np.array([1.0, 0.0])
    for _ in range(rounds):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ beta, -30.0, 30.0)))
        gradient = design.T @ (w * (y - p)) - 1e-3 * (beta - np.array([1.0, 0.0]))
        curve = (design * (w * p * (1.0 - p))[:, None]).T @ design + 1e-3 * np.eye(2)
        step = np.linalg.solve(curve, gradient)
        beta = beta + np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-8:
            break
    return (float(beta[0]), float(beta[1])) if beta[0] > 0.0 else (1.0, 0.0)
