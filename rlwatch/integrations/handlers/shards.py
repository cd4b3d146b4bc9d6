"""Tensors that may be sharded over ranks (DTensor, as FSDP2 makes them), and plain ones, in the same words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The shard of this rank; the tensor itself if it is not sharded. Shares its memory."""
    return tensor.to_local() if _sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all ranks, all of which must call this; itself if it is not sharded."""
    return tensor.full_tensor() if _sharded(tensor) else tensor  # type: ignore[attr-defined]


def copy_into(target: Tensor, source: Tensor) -> None:
    """``target[:] = source`` in the target's dtype, device and sharding; in place, without autograd.

    Equal shardings copy shard by shard. Otherwise the ranks exchange what they need, so all must call this.
    """
    if not _sharded(target):
        target.copy_(whole(source))
    elif not _sharded(source):
        local(target).copy_(local(_like(source, target)))
    else:
        same = source.device_mesh == target.device_mesh and source.placements == target.placements  # type: ignore[attr-defined]
        moved = source if same else source.redistribute(target.device_mesh, target.placements)  # type: ignore[attr-defined]
        local(target).copy_(local(moved))


def whole_marks(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and norm over all ranks, 0-d float64, accumulated in float64 where the device has it."""
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    total, norm = tensor.sum(dtype=wide), tensor.to(torch.float32).norm(dtype=wide)
    return whole(total).double(), whole(norm).double()


def _like(source: Tensor, target: Any) -> Tensor:
    """A whole tensor, which every rank has, cut as ``target`` is; no rank sends anything."""
    from torch.distributed.tensor import distribute_tensor

    moved = source.to(target.device)
    return distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)


def _sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "to_local")
