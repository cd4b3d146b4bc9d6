"""The gradients of an engine's model, by layer: FSDP2's and plain ones by parameter, FSDP1's by flattened unit.

verl trains with FSDP1 unless told otherwise. It flattens the parameters of each unit (a decoder layer; and what is
left at the root: embeddings, last norm, head) into one, whose shard a rank holds. The norm of a unit needs no names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.integrations.handlers.unwrapping import plain_name
from rlwatch.integrations.verl.flat import units_of
from rlwatch.tensors.gradnorm import GradNorms, grad_norms, layer_of

ROOT = "outside"
"""The layer of what lies outside all units."""


def gradients_of(model: nn.Module, rank: int) -> GradNorms | None:
    """Norms of the gradients that ``model`` holds now on ``rank``; None if it holds none that count here."""
    units = [(layer_of(f"{plain_name(f'{name}.')}weight") if name else ROOT, unit) for name, unit in units_of(model)]
    return _flat_norms(units, rank) if units else grad_norms(model.named_parameters(), rank=rank)


def _flat_norms(units: list[tuple[str, Any]], rank: int) -> GradNorms | None:
    """Padding within a shard is zero; it counts among the elements on all ranks alike."""
    squares: dict[str, list[Tensor]] = {}
    held: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for layer, module in units:
        grad = module._handle.flat_param.grad  # noqa: SLF001  (torch has no public name for it)
        if grad is None:
            continue
        here = _counts_here(module, rank)
        square = torch.linalg.vector_norm(grad.detach(), dtype=torch.float32).square()
        squares.setdefault(layer, []).append(square if here else torch.zeros_like(square))
        held[layer] = held.get(layer, 0) + (grad.numel() if here else 0)
        sizes[layer] = sizes.get(layer, 0) + grad.numel() * _parts(module)
    if not squares:
        return None
    every = [square for pieces in squares.values() for square in pieces]
    return GradNorms(
        tuple(squares),
        torch.stack([torch.stack(pieces).sum() for pieces in squares.values()]),
        tuple(held.values()),
        tuple(sizes.values()),
        (~torch.stack(every).isfinite()).float(),
    )


def _parts(module: Any) -> int:
    """Ranks a unit is sharded over."""
    handle = module._handle  # noqa: SLF001
    return int(handle.world_size) if handle.uses_sharded_strategy else 1


def _counts_here(module: Any, rank: int) -> bool:
    """Whether this rank's shard is the first of its copies."""
    if not module._handle.uses_sharded_strategy:  # noqa: SLF001
        return rank == 0
    copies = getattr(module, "_inter_node_pg", None)
    return copies is None or int(torch.distributed.get_rank(copies)) == 0
