"""Move tensors and statistics off the device: to the CPU in one asynchronous copy, to another rank as bytes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlwatch.records import JSON
from rlwatch.tensors.mergeable import Stat, Stats


class Transfer:
    """One copy of several tensors to the CPU; call :meth:`read` for the values, which is immediate once :meth:`ready`.

    On CUDA the copy goes to pinned memory behind an event, so creating a transfer does not wait; elsewhere :meth:`read`
    copies. Values travel as float32, or as float64 if any tensor is float64 or int64 and the device supports float64.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self.flat = _flattened(tensors)
        self._event: torch.cuda.Event | None = None
        if self.flat.is_cuda:
            host = torch.empty(self.flat.shape, dtype=self.flat.dtype, device="cpu", pin_memory=True)
            host.copy_(self.flat, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(self.flat.device))
            self.flat = host

    def ready(self) -> bool:
        """Return True if :meth:`read` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[np.ndarray]:
        """Return the tensors, in their order and shape, as float64 arrays; wait for the copy if it is still under
        way.
        """
        if self._event is not None:
            self._event.synchronize()
        flat = self.flat.cpu().numpy().astype(np.float64)
        ends = [0, *accumulate(map(prod, self._shapes))]
        return [flat[a:b].reshape(shape) for (a, b), shape in zip(pairwise(ends), self._shapes, strict=True)]


def freed(tensor: Tensor) -> bool:
    """Return True if the tensor's memory was released (``untyped_storage().resize_(0)``): reading it would end the
    process.
    """
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except (RuntimeError, NotImplementedError):  # subclasses without a storage of their own
        return False


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements of ``tensors``, in order, as one tensor; tensors of one type are joined before the
    conversion.

    A conversion for each tensor would cost more than the copy.
    """
    if not tensors:
        return torch.empty(0, device="cpu")
    device = meeting_place(tensors)
    double = device.type != "mps" and any(tensor.dtype in (torch.float64, torch.int64) for tensor in tensors)
    dtype = torch.float64 if double else torch.float32
    runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: (tensor.device, tensor.dtype))]
    with torch.no_grad():
        joined = [torch.cat([tensor.reshape(-1) for tensor in run]) for run in runs]
        return torch.cat([one.to(device, dtype, non_blocking=True) for one in joined])


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; only a copy to the CPU is waited for, as it could be read half-written."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def meeting_place(tensors: Sequence[Tensor]) -> torch.device:
    """Return the first device among ``tensors`` that is not the CPU, to which all can be copied without waiting; else
    the CPU.
    """
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)


# Statistics taken apart into tensors and a plain description, and put together again elsewhere.
#
# So they go to the CPU in one copy and to another rank as bytes, and merge there as exactly as here: sums and means
# continue in float64. A statistic consists of tensors, other statistics, tuples of these, and JSON constants.

logger = logging.getLogger("rlwatch")
MOST_VALUES = 16_384
"""Most values that a statistic which keeps single values sends from a rank, approximately, if fewer suffice."""
_CONSTANTS = (bool, int, float, str, type(None))


def pack(stats: Mapping[str, Stat]) -> tuple[JSON, list[Tensor]]:
    """Return a JSON description of ``stats`` and the tensors that it refers to by number; a shared tensor is there
    once.

    A statistic that holds anything but tensors, statistics, tuples and constants is left out, with a warning.
    """
    tensors: dict[int, tuple[int, Tensor]] = {}
    layout = {}
    for name, stat in stats.items():
        try:
            layout[name] = _described(stat.compact(MOST_VALUES), tensors)
        except TypeError as error:
            logger.warning("%s cannot be sent to rank 0: %s", name, error)
    return layout, [tensor for _, tensor in tensors.values()]


def unpack(layout: JSON, arrays: Sequence[np.ndarray]) -> Stats:
    """Return the statistics that :func:`pack` described, given its tensors as arrays (floats in float64).

    Raises ``ValueError`` for a ``layout`` that describes no statistics.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    stats: Stats = {}
    for name, described in layout.items():
        stat = _rebuilt(described, tensors)
        if not isinstance(stat, Stat):
            raise ValueError(f"{name} is no statistic")
        stats[str(name)] = stat
    return stats


def _described(part: Any, tensors: dict[int, tuple[int, Tensor]]) -> JSON:
    if isinstance(part, Tensor):
        at, _ = tensors.setdefault(id(part), (len(tensors), part))
        return {"tensor": at, "dtype": str(part.dtype).removeprefix("torch.")}
    if isinstance(part, Stat):
        kind = f"{type(part).__module__}:{type(part).__qualname__}"
        return {"stat": kind, "fields": {f.name: _described(getattr(part, f.name), tensors) for f in fields(part)}}
    if isinstance(part, tuple):
        return {"tuple": [_described(item, tensors) for item in part]}
    if isinstance(part, _CONSTANTS):
        return {"constant": part}
    raise TypeError(f"it holds a {type(part).__name__}")


def _rebuilt(described: JSON, tensors: Sequence[Tensor]) -> Any:
    if "tensor" in described:
        dtype: torch.dtype = getattr(torch, described["dtype"])
        tensor = tensors[described["tensor"]]
        return tensor if dtype.is_floating_point and tensor.dtype is torch.float64 else _restored(tensor, dtype)
    if "stat" in described:
        parts = {name: _rebuilt(part, tensors) for name, part in described["fields"].items()}
        return _kind(described["stat"])(**parts)
    if "tuple" in described:
        return tuple(_rebuilt(item, tensors) for item in described["tuple"])
    return described["constant"]


def _restored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` in the type in which it is merged: whole numbers and booleans in ``dtype``, floats in
    float64.
    """
    return tensor.to(torch.float64 if dtype.is_floating_point else dtype)


@lru_cache(maxsize=256)
def _kind(name: str) -> type[Stat]:
    """Return the class of statistic called ``name``. Raises ``ValueError`` for any other name."""
    module, _, qualname = name.partition(":")
    kind: Any = import_module(module)
    for part in qualname.split("."):
        kind = getattr(kind, part, None)
    if not (isinstance(kind, type) and issubclass(kind, Stat)):
        raise ValueError(f"{name!r} is no statistic")
    return kind
