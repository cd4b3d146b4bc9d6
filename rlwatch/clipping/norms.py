"""Norms of whole gradients, also where this rank holds a shard of each.

Gradients of plain data parallelism are the same on all ranks and need nothing. Of a DTensor (FSDP2, tensor
parallelism) the squares of the shards are summed over the mesh dimensions it is sharded on, and over no others: a sum
over replicas (HSDP) would count them twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


def local_gradient(parameter: Parameter) -> Tensor | None:
    """The part of its gradient on this rank, to be changed in place; None if it has none."""
    grad: Any = parameter.grad
    if grad is None:
        return None
    local: Tensor = grad.detach().to_local() if hasattr(grad, "to_local") else grad.detach()
    return local


def gradient_norms(parameters: Sequence[Parameter]) -> list[Tensor | None]:
    """L2 norm of each parameter's whole gradient, 0-d float32 on one device; None where there is no gradient.

    Accumulated in float32 whatever the gradients' type. With DTensors a collective: every rank passes the same
    parameters. What still waits to be summed over ranks is summed for this, and left as it is.
    """
    pieces = [_reduced(parameter) for parameter in parameters]
    held = [piece for piece in pieces if piece is not None]
    if not held and not any(map(_dimensions, parameters)):
        return [None] * len(parameters)
    device = held[0].device if held else parameters[0].device
    found = iter(torch._foreach_norm(held, 2, dtype=torch.float32) if held else ())  # noqa: SLF001  (as clip_grad_norm_)
    norms = [None if piece is None else next(found).to(device, non_blocking=True) for piece in pieces]
    _sum_shards(parameters, norms, device)
    return norms


def _reduced(parameter: Parameter) -> Tensor | None:
    grad: Any = parameter.grad
    if grad is not None and hasattr(grad, "to_local") and any(p.is_partial() for p in grad.placements):
        placed: Any = parameter
        return grad.detach().redistribute(placements=placed.placements).to_local()  # type: ignore[no-any-return]
    return local_gradient(parameter)


def _sum_shards(parameters: Sequence[Parameter], norms: list[Tensor | None], device: torch.device) -> None:
    """Replace norms of shards by those of whole gradients: one all-reduce for each mesh dimension."""
    meshes: dict[Any, list[int]] = {}
    for i, parameter in enumerate(parameters):
        if dimensions := _dimensions(parameter):
            meshes.setdefault((getattr(parameter, "device_mesh", None), dimensions), []).append(i)
    for (mesh, dimensions), places in meshes.items():
        zero = torch.zeros((), device=device)
        squares = torch.stack([zero if (norm := norms[i]) is None else norm for i in places]).square()
        squares = squares.to(mesh.device_type)
        for dimension in dimensions:
            dist.all_reduce(squares, group=mesh.get_group(dimension))
        for i, norm in zip(places, squares.sqrt().to(device).unbind(), strict=True):
            norms[i] = norm


def _dimensions(parameter: Parameter) -> tuple[int, ...]:
    """Mesh dimensions that a parameter with a gradient to come is sharded on."""
    placements = getattr(parameter, "placements", ()) if parameter.requires_grad else ()
    return tuple(i for i, placement in enumerate(placements) if placement.is_shard())
