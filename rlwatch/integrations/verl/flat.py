"""FSDP1, verl's default: models whose parameters are flattened unit by unit and cut into one shard for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.weights import Pair


def flattened(model: nn.Module) -> bool:
    """Whether FSDP1 holds ``model``."""
    return isinstance(model, FullyShardedDataParallel)


def units_of(model: nn.Module) -> Iterator[tuple[str, FullyShardedDataParallel]]:
    """The units of ``model`` that have parameters of their own, by name."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:  # noqa: SLF001
            yield name, module


def flat_pairs(policy: nn.Module, reference: nn.Module) -> list[Pair]:
    """The shards of this rank, and the buffers. Raises ``RLWatchError`` if the models are cut differently."""
    ours, theirs = _shards(policy), _shards(reference)
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise RLWatchError(f"policy and reference are flattened differently: {odd[0]!r} is in one only")
    for name, tensor in ours.items():
        if tensor.shape != theirs[name].shape:
            raise RLWatchError(f"{name!r} is sharded differently in the policy and in the reference")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RLWatchError(f"the policy's {name!r} is not finite: roll back to a checkpoint instead")
    return [Pair(name, tensor, theirs[name]) for name, tensor in ours.items()]


def flat_resharded(model: nn.Module) -> nn.Module:
    """``model``, with shards and nothing beside: a forward without a backward keeps the root's whole for the next."""
    for _, unit in units_of(model):
        handle = unit._handle  # noqa: SLF001
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(True)
    return model


def _shards(model: nn.Module) -> dict[str, Tensor]:
    flat_resharded(model)
    named = chain(model.named_parameters(), model.named_buffers())
    return {name.replace("_fsdp_wrapped_module.", ""): tensor.detach() for name, tensor in named}
