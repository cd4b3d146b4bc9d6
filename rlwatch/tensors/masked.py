"""Reductions over masked tensors: values outside the mask have no effect, non-finite values inside always show.

A NaN outside the mask (padding) changes no result here; a NaN inside makes the result NaN. (A loss that masks last
differs: padding can make its gradient NaN.) Half-precision input is widened to float32, float64 stays float64. ``mask``
broadcasts against ``x`` and is bool, int or float (0 or 1). A batch without elements counts as an empty mask. No
function indexes by a mask, because that makes a GPU wait.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import numpy as np
import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """Return ``x`` detached, in float32 unless it is float64 already."""
    if x.requires_grad:
        x = x.detach()
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def keep(x: Tensor, mask: Tensor, otherwise: float) -> Tensor:
    """Return ``x`` with ``otherwise`` in place of the elements outside ``mask``; same shape as ``x``, at least
    float32.
    """
    return torch.where(mask.bool(), widen(x), otherwise)


def indicator(holds: Tensor, *compared: Tensor) -> Tensor:
    """Return 1.0 where ``holds`` is true, else 0.0, but NaN where one of the values it ``compared`` is NaN.

    Every comparison with NaN is false, so a plain flag would count a broken value as within bounds: a clip fraction
    that stays finite while all else is NaN was seen in verl (#721).

    >>> ratio = torch.tensor([0.5, 2.0, float("nan")])
    >>> indicator(ratio > 1, ratio)
    tensor([0., 1., nan])
    """
    broken = reduce(torch.logical_or, [values.isnan() for values in compared])
    return torch.where(broken, torch.nan, holds)


class _Counted(threading.local):
    """Counts of the masks that this thread uses at present: identity, shape and type of a mask -> (mask, count)."""

    counts: dict[tuple[int, torch.Size, torch.dtype], tuple[Tensor, Tensor]] | None = None


_counted = _Counted()


@contextmanager
def counting_once() -> Iterator[None]:
    """Count each mask only once within the block, however many statistics need the count; no mask may change
    meanwhile.
    """
    before, _counted.counts = _counted.counts, {}
    try:
        yield
    finally:
        _counted.counts = before


def masked_count(mask: Tensor, like: Tensor) -> Tensor:
    """Return the number of elements of ``like`` inside the mask, 0-d, as float32 (float64 if ``like`` is)."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if _counted.counts is None:
        return _spread(mask, like).sum().to(dtype)
    key = (id(mask), like.shape, dtype)
    if key not in _counted.counts:
        _counted.counts[key] = (mask, _spread(mask, like).sum().to(dtype))
    return _counted.counts[key][1]


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of ``x`` inside the mask, 0-d; 0 if the mask is empty."""
    return keep(x, mask, 0.0).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``x`` inside the mask, 0-d; NaN if the mask is empty.

    >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1, 1, 0])).item()
    2.0
    """
    return masked_sum(x, mask) / masked_count(mask, x)


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value of ``x`` inside the mask, 0-d; -inf if the mask is empty, NaN if a value inside is
    NaN.
    """
    kept = keep(x, mask, -torch.inf)
    return kept.amax() if kept.numel() else kept.new_full((), -torch.inf)


def masked_min(x: Tensor, mask: Tensor) -> Tensor:
    """Return the smallest value of ``x`` inside the mask, 0-d; inf if the mask is empty, NaN if a value inside is
    NaN.
    """
    kept = keep(x, mask, torch.inf)
    return kept.amin() if kept.numel() else kept.new_full((), torch.inf)


def masked_quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """Return the ``q``-quantile of ``x`` inside the mask, linearly interpolated, 0-d; NaN for an empty mask or a NaN
    inside.

    It is exact, for any size (``torch.quantile`` refuses more than 2**24 values). On a GPU it sorts, O(n log n); on a
    CPU, where nothing is waited for, it selects, O(n).
    """
    if x.device.type == "cpu":
        inside = widen(x).numpy()[_spread(mask, x).numpy()]
        return torch.from_numpy(_quantile(inside, q))
    kept = keep(x, mask, torch.inf).flatten()
    if not kept.numel():
        return kept.new_full((), torch.nan)
    last = _spread(mask, x).sum() - 1
    # float64: a place beyond 2**24 is no whole number in float32 any more, and a step holds that many tokens.
    place = q * last.clamp(min=0).to(torch.float32 if x.device.type == "mps" else torch.float64)
    low = place.floor()
    left, right = kept.sort().values.gather(0, torch.stack([low, place.ceil()]).long()).unbind()
    # inf - inf is NaN: between two equal neighbours (both infinite, perhaps) there is nothing to interpolate.
    value = torch.where(left == right, left, left + (right - left) * (place - low).to(kept.dtype))
    undefined = (last < 0) | keep(x, mask, 0.0).isnan().any()  # NaN sorts last, so it would pass for a large value
    return torch.where(undefined, torch.nan, value)


def _quantile(x: np.ndarray, q: float) -> np.ndarray:
    """Return the quantile ``q`` of all of ``x`` (N,), 0-d and of its type, as :func:`masked_quantile` does."""
    if not len(x) or np.isnan(x).any():
        return np.full((), np.nan, x.dtype)
    place = q * (len(x) - 1)
    low, high = math.floor(place), math.ceil(place)
    ordered = np.partition(x, (low, high))
    left, right = ordered[low], ordered[high]
    return np.asarray(left if left == right else left + (right - left) * x.dtype.type(place - low))


def _spread(mask: Tensor, x: Tensor) -> Tensor:
    """Return ``mask`` as bool, broadcast to the shape of ``x``."""
    return mask.bool() if mask.shape == x.shape else mask.bool() & torch.ones_like(x, dtype=torch.bool)
