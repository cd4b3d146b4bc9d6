"""Statistics taken apart into tensors and a plain description, and put together again elsewhere.

So they go to the CPU in one copy and to another rank as bytes, where they merge as exactly as they would have here:
sums and means continue in float64. What a statistic is made of: tensors, other statistics, tuples of these, and
constants that JSON knows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlwatch.records import JSON
from rlwatch.tensors.mergeable import Stat, Stats

logger = logging.getLogger("rlwatch")
MOST_VALUES = 16_384
"""A statistic that keeps values sends about this many of a rank at most, where it can do with fewer."""
_CONSTANTS = (bool, int, float, str, type(None))


def pack(stats: Mapping[str, Stat]) -> tuple[JSON, list[Tensor]]:
    """A description of ``stats``, and the tensors it speaks of; a tensor that several share is there once.

    A statistic made of something else is left out, with a warning.
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
    """What :func:`pack` described, of its tensors as arrays (floats in float64).

    Raises ``ValueError`` for a layout that describes no statistics.
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
        return _restored(tensors[described["tensor"]], getattr(torch, described["dtype"]))
    if "stat" in described:
        parts = {name: _rebuilt(part, tensors) for name, part in described["fields"].items()}
        return _kind(described["stat"])(**parts)
    if "tuple" in described:
        return tuple(_rebuilt(item, tensors) for item in described["tuple"])
    return described["constant"]


def _restored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole numbers and truths as they were; floats in float64, in which they are merged."""
    return tensor.to(torch.float64 if dtype.is_floating_point else dtype)


def _kind(name: str) -> type[Stat]:
    """The class of a statistic. Raises ``ValueError`` for any other."""
    module, _, qualname = name.partition(":")
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Stat)):
        raise ValueError(f"{name!r} is no statistic")
    return found
