"""Which tokens of a long response are drawn: some around every one that matters (pure)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST = 2000
"""Tokens drawn at most: a browser lays them out within a blink."""


def drawn(positions: np.ndarray, anchors: Sequence[int], most: int = MOST) -> np.ndarray:
    """Indices into ``positions`` (N,), in order: at most ``most``, with as wide a stretch as fits around each anchor.

    ``anchors`` are positions, the one that matters most first; where there are more than ``most``, the first ones
    are drawn. Without any the beginning is drawn.
    """
    count = len(positions)
    if count <= most:
        return np.arange(count)
    places = [int(i) for i in np.searchsorted(positions, list(dict.fromkeys(anchors))[:most]) if i < count] or [0]
    low, high = 0, count
    while low < high:  # the widest stretch that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _covered(count, places, middle).sum() <= most else (low, middle - 1)
    return np.flatnonzero(_covered(count, places, low))


def _covered(count: int, places: Sequence[int], width: int) -> np.ndarray:
    """Which of ``count`` are within ``width`` of one of ``places``."""
    ends = np.zeros(count + 1, dtype=np.int64)
    np.add.at(ends, np.maximum(np.asarray(places) - width, 0), 1)
    np.add.at(ends, np.minimum(np.asarray(places) + width + 1, count), -1)
    return np.asarray(np.cumsum(ends[:-1]) > 0)


def gaps(indices: Sequence[int] | np.ndarray, positions: np.ndarray) -> list[tuple[int, int]]:
    """Before each drawn token, and after the last: (recorded tokens left out, tokens that were not recorded).

    What comes after the last recorded token is not known, and counts as nothing.
    """
    ends = np.concatenate(([-1], indices, [len(positions)]))
    left_out = np.diff(ends) - 1
    at = np.concatenate(([-1], positions[indices], positions[-1:] + 1))
    unrecorded = np.diff(at) - 1 - left_out
    return list(zip(left_out.tolist(), np.maximum(unrecorded, 0).tolist(), strict=True))
