"""Which of many tensors hold NaN or an infinity, how many, and where first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Broken:
    """A tensor of ``shape`` with ``count`` non-finite elements, the first at ``index``.

    Of a DTensor: this rank's shard of it.
    """

    name: str
    count: int
    index: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...] = ()


def broken(named: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> list[Broken]:
    """Those of ``named`` that hold NaN or an infinity, in order. Waits for the device once, and once for each found."""
    pairs = named.items() if isinstance(named, Mapping) else named
    here = [(name, local(tensor)) for name, tensor in pairs]
    here = [(name, tensor) for name, tensor in here if tensor.numel()]
    if not here:
        return []
    home = here[0][1].device
    counts = torch.stack([(~tensor.isfinite()).sum().to(home, non_blocking=True) for _, tensor in here]).tolist()
    return [
        Broken(name, count, first(~tensor.isfinite()), dtype_name(tensor), tuple(tensor.shape))
        for (name, tensor), count in zip(here, counts, strict=True)
        if count
    ]


def dtype_name(tensor: Tensor) -> str:
    """As ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def local(tensor: Tensor) -> Tensor:
    """What of it is on this rank, detached."""
    whole = tensor.detach()
    to_local = getattr(whole, "to_local", None)
    return whole if to_local is None else to_local()


def first(flags: Tensor) -> tuple[int, ...]:
    """Index of the first True of ``flags`` (at least one is); waits for the device."""
    at = int(flags.flatten().byte().argmax())
    index: list[int] = []
    for size in reversed(flags.shape):
        at, place = divmod(at, size)
        index.append(place)
    return tuple(reversed(index))
