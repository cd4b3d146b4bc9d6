"""Reductions over masked tensors: values outside the mask have no effect, non-finite values inside always show.

A NaN outside the mask (padding) changes no result here; a NaN inside makes the result NaN. (A loss that masks last
differs: padding can make its gradient NaN.) Half-precision input is widened to float32, float64 stays float64. ``mask``
broadcasts against ``x`` and is bool, int or float (0 or 1). A batch without elements counts as an empty mask. No
function indexes by a mask, because that makes a GPU wait.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce, wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVarTuple


def widen(x: Tensor) -> Tensor:
    """Return ``x`` detached, in float32 unless it is float64 already."""
    if x.requires_grad:
        x = x.detach()
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def keep(x: Tensor, mask: Tensor, otherwise: float) -> Tensor:
    """Return ``x`` with ``otherwise`` in place of the elements outside ``mask``; same shape as ``x``, at least
    float32.
    """
    wide = widen(x)
    if _selects_all(mask, wide):
        return wide
    return torch.where(mask.bool(), wide, _scalar(otherwise, wide))


_SCALARS = {
    (x, dtype): torch.tensor(x, dtype=dtype, device="cpu")
    for x in (0.0, torch.inf, -torch.inf, torch.nan)
    for dtype in (torch.float32, torch.float64)
}


def _scalar(value: float, like: Tensor) -> Tensor | float:
    """Return ``value`` as ``torch.where`` takes it in the fewest operations: as a tensor (0-d), for one on the CPU."""
    return _SCALARS.get((value, like.dtype), value) if like.is_cpu else value


class _Shared(threading.local):
    """Results of this thread's shared functions at present: function and identity of arguments -> (arguments, result).

    The arguments are kept with the result, so that nothing else can have their identity.
    """

    results: dict[tuple[object, ...], tuple[object, Any]] | None = None
    whole: frozenset[int] = frozenset()
    """Identities of the masks among the results that are True everywhere."""
    later: dict[tuple[object, ...], _Reductions] | None = None
    on_cpu: bool = False


_shared = _Shared()
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


@contextmanager
def sharing() -> Iterator[None]:
    """Compute what several statistics of a batch need only once within the block; no tensor may change meanwhile.

    That is the count of each mask, and the result of each function that is :func:`shared`. A block within a block
    belongs to it.
    """
    before, whole = _shared.results, _shared.whole
    if before is None:
        _shared.results, _shared.whole = {}, frozenset()
    try:
        yield
    finally:
        _shared.results, _shared.whole = before, whole


def everywhere(like: Tensor) -> Tensor:
    """Return a mask, True everywhere, in the shape and on the device of ``like``.

    Within a :func:`sharing` block nothing is selected or counted by it, and all calls for one shape return one mask.
    """
    results = _shared.results
    if results is None:
        return torch.ones_like(like, dtype=torch.bool)
    key = (everywhere, like.shape, like.device)
    found = results.get(key)
    if found is None:
        mask = torch.ones(like.shape, dtype=torch.bool, device=like.device)
        found = results[key] = ((mask,), mask)
        _shared.whole |= {id(mask)}
    whole: Tensor = found[1]
    return whole


def _selects_all(mask: Tensor, x: Tensor) -> bool:
    """Return True if ``mask`` has the shape of ``x`` and is known to be True everywhere; see :func:`everywhere`."""
    return id(mask) in _shared.whole and mask.shape == x.shape


# Reductions together: a step has a hundred sums over tokens, each of which alone is several kernel launches.


@contextmanager
def reducing_together(*, on_cpu: bool = False) -> Iterator[None]:
    """Compute the reductions of all statistics made within the block together, when it ends: they are NaN until then.

    No tensor may change meanwhile. ``on_cpu``: tensors on the CPU, too, although their copies cost more than the calls
    they spare: by 0.4 ms for a micro-batch.
    """
    before, _shared.later = _shared.later, {}
    before_cpu, _shared.on_cpu = _shared.on_cpu, on_cpu
    try:
        yield
        for reductions in _shared.later.values():
            reductions.compute()
    finally:
        _shared.later, _shared.on_cpu = before, before_cpu


REDUCTIONS: Mapping[str, tuple[float, Callable[..., Tensor]]] = {
    "sum": (0.0, torch.sum),
    "max": (-torch.inf, torch.amax),
    "min": (torch.inf, torch.amin),
}
"""Reduction -> what it reads outside the mask, and its function."""
MANY = 2**22
"""Elements from which a group of tensors is reduced without waiting for more."""
SLOTS = 32
"""Results that are allocated at once."""


class _Reductions:
    """Reductions of one kind, of tensors of one shape, type and device, computed together in a few operations."""

    def __init__(self, kind: str) -> None:
        self._outside, self._function = REDUCTIONS[kind]
        self._free: list[Tensor] = []
        self._x: list[Tensor] = []
        self._masks: list[Tensor] = []

    def add(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the 0-d tensor that will hold the reduction of ``x`` inside ``mask``."""
        if not self._free or len(self._x) * x.numel() >= MANY:
            self.compute()
            self._results = x.new_full((SLOTS,), torch.nan)
            self._free = list(self._results.unbind()[::-1])
        self._x.append(x)
        self._masks.append(mask)
        return self._free.pop()

    def compute(self) -> None:
        """Fill the results given out so far."""
        if self._x:
            kept = torch.where(torch.stack(self._masks), torch.stack(self._x), self._outside)
            first = SLOTS - len(self._free) - len(self._x)
            self._function(kept.view(len(self._x), -1), -1, out=self._results[first : first + len(self._x)])
            self._x, self._masks = [], []


def reduced(kind: str, x: Tensor, mask: Tensor) -> Tensor:
    """Return the reduction ``kind`` of ``x`` inside the mask, 0-d, as :func:`masked_sum`, ``_max`` or ``_min`` does.

    Within a :func:`reducing_together` block it may have its value only once the block has ended.
    """
    together = _shared.later
    if together is None or (x.is_cpu and not _shared.on_cpu):
        return _DIRECT[kind](x, mask)
    wide = widen(x)
    if not 0 < wide.numel() <= MANY or mask.shape != wide.shape or mask.dtype is not torch.bool:
        return _DIRECT[kind](x, mask)
    key = (kind, wide.shape, wide.dtype, wide.device)
    group = together.get(key)
    if group is None:
        group = together[key] = _Reductions(kind)
    return group.add(wide, mask)


def shared(work: Callable[[*Arguments], Result]) -> Callable[[*Arguments], Result]:
    """Let ``work`` return the result of an earlier call with the very same arguments, within a :func:`sharing` block.

    Results must not be changed. Outside a block every call computes.
    """

    @wraps(work)
    def once(*args: *Arguments) -> Result:
        results = _shared.results
        if results is None:
            return work(*args)
        key = (work, *map(id, args))
        found = results.get(key)
        if found is None:
            found = results[key] = (args, work(*args))
        result: Result = found[1]
        return result

    return once


def ascending(x: Tensor) -> Tensor:
    """Return the integers ``x`` (..., N) sorted along the last dimension.

    On a CPU NumPy sorts, whose vectorised sort takes an eighteenth of the time of PyTorch's for rows of 512.
    """
    return torch.from_numpy(np.sort(x.numpy(), -1)) if x.is_cpu else x.sort(-1).values


@shared
def difference(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x - y``, detached, in float32 at least: the log-ratio of two log-probs."""
    return widen(x) - widen(y)


@shared
def exponential(x: Tensor) -> Tensor:
    """Return e to the power of ``x``, detached, in float32 at least."""
    return widen(x).exp()


@shared
def is_nan(x: Tensor) -> Tensor:
    """Return a mask, True where ``x`` is NaN."""
    return x.isnan()


@shared
def _any_nan(*compared: Tensor) -> Tensor:
    return reduce(torch.logical_or, map(is_nan, compared))


def indicator(holds: Tensor, *compared: Tensor) -> Tensor:
    """Return 1.0 where ``holds`` is true, else 0.0, but NaN where one of the values it ``compared`` is NaN.

    Every comparison with NaN is false, so a plain flag would count a broken value as within bounds: a clip fraction
    that stays finite while all else is NaN was seen in verl (#721).

    >>> ratio = torch.tensor([0.5, 2.0, float("nan")])
    >>> indicator(ratio > 1, ratio)
    tensor([0., 1., nan])
    """
    broken = _any_nan(*compared)
    return torch.where(broken, _SCALARS[torch.nan, torch.float32] if broken.is_cpu else torch.nan, holds)


def masked_count(mask: Tensor, like: Tensor) -> Tensor:
    """Return the number of elements of ``like`` inside the mask, 0-d, as float32 (float64 if ``like`` is)."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if _shared.results is None:
        return _number(_spread(mask, like)).to(dtype)
    key = (masked_count, id(mask), like.shape, dtype)
    found = _shared.results.get(key)
    if found is None:
        whole = _selects_all(mask, like)
        number = like.new_full((), like.numel(), dtype=dtype) if whole else _number(_spread(mask, like)).to(dtype)
        found = _shared.results[key] = (mask, number)
    count: Tensor = found[1]
    return count


def _number(on: Tensor) -> Tensor:
    """Return the number of True in ``on``, 0-d int64, by the operation that is the faster one where it is."""
    return on.count_nonzero() if on.is_cpu else on.sum()


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


_DIRECT: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": masked_sum, "max": masked_max, "min": masked_min,
}  # fmt: skip


def masked_quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """Return the ``q``-quantile of ``x`` inside the mask, linearly interpolated, 0-d; NaN for an empty mask or a NaN
    inside.

    It is exact, for any size (``torch.quantile`` refuses more than 2**24 values). On a GPU it sorts, O(n log n); on a
    CPU, where nothing is waited for, it selects, O(n).
    """
    if x.device.type == "cpu":
        return torch.from_numpy(_quantile(*_inside(x, mask), q))
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


@shared
def _inside(x: Tensor, mask: Tensor) -> tuple[np.ndarray, bool]:
    """Return the elements of ``x`` inside the mask, (N,), and whether one of them is NaN."""
    inside = widen(x).numpy()[_spread(mask, x).numpy()]
    return inside, bool(np.isnan(inside).any())


def _quantile(x: np.ndarray, broken: bool, q: float) -> np.ndarray:
    """Return the quantile ``q`` of all of ``x`` (N,), 0-d and of its type, as :func:`masked_quantile` does.

    ``broken``: one of them is NaN.
    """
    if not len(x) or broken:
        return np.full((), np.nan, x.dtype)
    place = q * (len(x) - 1)
    low, high = math.floor(place), math.ceil(place)
    ordered = np.partition(x, (low, high))
    left, right = ordered[low], ordered[high]
    with np.errstate(all="ignore"):  # else numpy warns in the trainer's log, or raises, at infinite values
        return np.asarray(left if left == right else left + (right - left) * x.dtype.type(place - low))


def _spread(mask: Tensor, x: Tensor) -> Tensor:
    """Return ``mask`` as bool, broadcast to the shape of ``x``."""
    return mask.bool() if mask.shape == x.shape else mask.bool() & torch.ones_like(x, dtype=torch.bool)
