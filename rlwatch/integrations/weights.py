"""Access to a model's weights and gradients in place: wrapped, sharded (FSDP2's DTensor, FSDP1's flat units), or an
adapter.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rlwatch.errors import RLWatchError
from rlwatch.gradloc.distributed import whole_tensors
from rlwatch.tensors.gradnorm import GradNorms, grad_norms, layer_of

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts that torch.compile, activation checkpointing and FSDP insert into the names of parameters."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, DataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel | DataParallel) else None
        inner = getattr(model, "_orig_mod", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def plain_name(name: str) -> str:
    """Return the parameter name ``name`` without the parts that wrappers insert (torch.compile, checkpointing,
    FSDP).
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def resharded(model: nn.Module) -> nn.Module:
    """Return ``model`` after every FSDP2 module in it has dropped whole copies of its parameters and shows its shards.

    After a forward pass without a backward pass FSDP2's root keeps whole copies of its parameters, which the next
    forward pass discards. A change of those copies would be lost. Raises ``RLWatchError`` for FSDP1, whose flat
    parameters do not show whether they are shards.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise RLWatchError("the model is wrapped by FSDP1, whose weights cannot be copied in place; use FSDP2")
        if callable(getattr(module, "reshard", None)) and hasattr(module, "set_reshard_after_forward"):
            module.reshard()  # type: ignore[operator]
    return model


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers such as accelerate's."""
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer


def inner_scheduler(scheduler: Any) -> Any:
    """Return the learning-rate scheduler inside wrappers such as accelerate's."""
    while getattr(scheduler, "scheduler", None) is not None:
        scheduler = scheduler.scheduler
    return scheduler


# Operations on tensors that may be sharded over ranks (DTensor, as in FSDP2) and on plain ones.


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``, or ``tensor`` itself if it is not sharded.

    The result shares its memory.
    """
    return tensor.to_local() if sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Return ``tensor`` gathered from all ranks, all of which must call this.

    The result is ``tensor`` itself if it is not sharded.
    """
    return whole_tensors([tensor])[0] if sharded(tensor) else tensor


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``target``, in the target's dtype, device and sharding; in place, without autograd.

    Equal shardings are copied shard by shard. Otherwise the ranks exchange what they need, so all must call this.
    """
    if not sharded(target):
        target.copy_(whole(source))
    elif not sharded(source):
        local(target).copy_(local(_like(source, target)))
    else:
        same = source.device_mesh == target.device_mesh and source.placements == target.placements  # type: ignore[attr-defined]
        moved = source if same else source.redistribute(target.device_mesh, target.placements)  # type: ignore[attr-defined]
        local(target).copy_(local(moved))


def whole_marks(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the norm of ``tensor`` over all ranks, as 0-d float64 tensors.

    They are accumulated in float64 where the device has it. All ranks must call this for a sharded tensor.
    """
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    total, norm = tensor.sum(dtype=wide), tensor.to(torch.float32).norm(dtype=wide)
    return whole(total).double(), whole(norm).double()


def _like(source: Tensor, target: Any) -> Tensor:
    """Return a whole tensor, which every rank has, cut as ``target`` is; no rank sends anything."""
    from torch.distributed.tensor import distribute_tensor

    moved = source.to(target.device)
    return distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)


def sharded(tensor: Tensor) -> bool:
    """Return True if ``tensor`` is divided over ranks (a DTensor, as in FSDP2)."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "to_local")


# Pairs of tensors of policy and reference, and a copy of all of them or none.


class TensorPair(NamedTuple):
    """A tensor of the policy and the tensor of the reference that corresponds to it."""

    name: str
    policy: Tensor
    reference: Tensor


DIFFERENT = "policy and reference are different models"
REF = "ref"
"""Name of the frozen PEFT adapter that is used as the reference, if it exists."""


def model_pairs(policy: nn.Module, reference: nn.Module) -> list[TensorPair]:
    """Return pairs of the parameters and saved buffers of two whole models, however each is wrapped.

    Raises ``RLWatchError`` if they do not match one to one, or if the policy is not finite.
    """
    of_policy, of_reference = dict(named_tensors(policy)), dict(named_tensors(reference))
    _same_names(of_policy, of_reference, DIFFERENT)
    return _checked([TensorPair(name, of_policy[name], of_reference[name]) for name in of_policy])


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and saved buffers of ``model`` as (name, tensor), with names as in the model without
    wrappers.

    A sharded tensor is yielded as a DTensor. Raises ``RLWatchError`` for a model that FSDP1 wraps.
    """
    inner = resharded(unwrapped(model))
    for name, parameter in inner.named_parameters():
        yield plain_name(name), parameter
    for prefix, module in inner.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001  (has no public name)
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def adapter_of(policy: Any) -> str:
    """Return the name of the one trained PEFT adapter of ``policy``.

    Raises ``RLWatchError`` if there is not exactly one, if it has no weights or is not finite, or if the model is
    sharded and has no frozen adapter named ``ref``.
    """
    active = policy.active_adapter
    if isinstance(active, list) and len(active) == 1:
        active = active[0]
    if not isinstance(active, str) or active == REF:
        raise RLWatchError(f"a reset needs exactly one trained adapter, got {active!r}")
    weights = _weights_of(policy, active)
    if not weights:
        raise RLWatchError(f"the adapter {active!r} has no weights")
    if REF not in policy.peft_config and any(local(tensor) is not tensor for tensor in weights.values()):
        raise RLWatchError(
            f"the model is sharded: add a frozen adapter named {REF!r} before it is, so that it can be reset"
        )
    _checked([TensorPair(name, tensor, tensor) for name, tensor in weights.items()])
    return active


def adapter_pairs(policy: Any) -> list[TensorPair]:
    """Return pairs of the weights of the trained PEFT adapter and of the frozen adapter named ``ref``, which is added
    if missing.

    Raises ``RLWatchError`` if there is not exactly one active adapter, or if the two adapters do not match.
    """
    active = adapter_of(policy)
    made = REF not in policy.peft_config
    if made:
        add_reference_adapter(policy, active)
    try:
        return _mirrored(policy, active)
    except RLWatchError:
        if made:
            policy.delete_adapter(REF)
        raise


def copy_all(pairs: Iterable[TensorPair]) -> None:
    """Copy the policy tensor of each pair into the reference tensor, in the reference's own dtype, device and
    sharding.
    """
    with torch.no_grad():
        for pair in pairs:
            copy_into(pair.reference, pair.policy)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Return twelve hex digits computed from the sum and norm of each tensor.

    Equal weights give equal digits on every rank. A sharded tensor is reduced over its ranks, all of which must call
    this.
    """
    digest = hashlib.sha256()
    with torch.no_grad():
        marks = [mark.cpu() for tensor in tensors for mark in whole_marks(tensor)]
    if marks:
        digest.update(torch.stack(marks).numpy().tobytes())
    return digest.hexdigest()[:12]


def add_reference_adapter(policy: Any, active: str) -> None:
    """Add a frozen PEFT adapter named ``ref`` to ``policy``, with the configuration of the adapter ``active``.

    It is initialised plainly, because some initialisations alter the base weights. Its random initial values are drawn
    from a forked generator, so that training's random stream does not change.
    """
    config = copy.deepcopy(policy.peft_config[active])
    config.inference_mode = True
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True
    devices = sorted({p.device.index for p in policy.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices):
        policy.add_adapter(REF, config)
    for name, parameter in policy.named_parameters():
        if f".{REF}." in name:
            parameter.requires_grad_(False)


def _checked(pairs: list[TensorPair]) -> list[TensorPair]:
    """Return ``pairs`` if all can be copied, else raise ``RLWatchError``: a half-copied reference is worse than an old
    one.
    """
    for name, policy, reference in pairs:
        if policy.is_meta or reference.is_meta or hasattr(policy, "ds_id") or hasattr(reference, "ds_id"):
            raise RLWatchError(
                f"{name!r} is held elsewhere (offloaded, or partitioned by DeepSpeed): it cannot be read"
            )
        if policy.shape != reference.shape:
            raise RLWatchError(
                f"{name!r} has shape {tuple(policy.shape)} in the policy and {tuple(reference.shape)} in the reference"
            )
        if not bool(local(policy).isfinite().all()):
            raise RLWatchError(f"the policy's {name!r} is not finite: roll back to a checkpoint instead")
    return pairs


def _same_names(of_policy: Mapping[str, Tensor], of_reference: Mapping[str, Tensor], otherwise: str) -> None:
    odd = sorted(of_policy.keys() ^ of_reference.keys())
    if odd:
        raise RLWatchError(f"{otherwise}: {odd[0]!r} is in one only")


def _weights_of(policy: Any, adapter: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named_tensors(policy) if f".{adapter}." in f"{name}."}


def _mirrored(policy: Any, active: str) -> list[TensorPair]:
    everything, trained = dict(named_tensors(policy)), _weights_of(policy, active)
    mirror = {name: f"{name}.".replace(f".{active}.", f".{REF}.")[:-1] for name in trained}
    absent = [name for name, other in mirror.items() if other not in everything]
    if absent:
        raise RLWatchError(f"the adapter {active!r} cannot be mirrored: {absent[0]!r} has no counterpart")
    return _checked([TensorPair(name, tensor, everything[mirror[name]]) for name, tensor in trained.items()])


# FSDP1, verl's default: models whose parameters are flattened unit by unit and cut into one shard for each rank.


def flattened(model: nn.Module) -> bool:
    """Return True if ``model`` is wrapped by FSDP1, which flattens its parameters."""
    return isinstance(model, FullyShardedDataParallel)


def units_of(model: nn.Module) -> Iterator[tuple[str, FullyShardedDataParallel]]:
    """Yield the FSDP1 units inside ``model`` that have their own parameters, as (name, unit)."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:  # noqa: SLF001
            yield name, module


def shard_pairs(
    of_policy: Mapping[str, Tensor], of_reference: Mapping[str, Tensor], *, odd: str = DIFFERENT
) -> list[TensorPair]:
    """Return pairs of this rank's tensors of policy and reference, matched by name.

    ``of_policy``, ``of_reference``: name -> tensor. ``odd`` begins the message if names differ. Raises ``RLWatchError``
    if the models are sharded differently, or if the policy is not finite.
    """
    _same_names(of_policy, of_reference, odd)
    for name, tensor in of_policy.items():
        if tensor.shape != of_reference[name].shape:
            raise RLWatchError(f"{name!r} is sharded differently in the policy and in the reference")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RLWatchError(f"the policy's {name!r} is not finite: roll back to a checkpoint instead")
    return [TensorPair(name, tensor, of_reference[name]) for name, tensor in of_policy.items()]


def flat_pairs(policy: nn.Module, reference: nn.Module) -> list[TensorPair]:
    """Return pairs of this rank's shards and buffers of two models that FSDP1 wraps.

    Raises ``RLWatchError`` if the models are flattened or sharded differently.
    """
    return shard_pairs(_shards(policy), _shards(reference), odd="policy and reference are flattened differently")


def flat_resharded(model: nn.Module) -> nn.Module:
    """Return ``model``, which FSDP1 wraps, after its units have dropped whole copies of their parameters.

    The root keeps such copies after a forward pass without a backward pass.
    """
    for _, unit in units_of(model):
        handle = unit._handle  # noqa: SLF001
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(True)
    return model


def _shards(model: nn.Module) -> dict[str, Tensor]:
    flat_resharded(model)
    named = chain(model.named_parameters(), model.named_buffers())
    return {name.replace("_fsdp_wrapped_module.", ""): tensor.detach() for name, tensor in named}


# Gradient norms of a model by layer: by parameter for FSDP2 and plain models, by flattened unit for FSDP1.
#
# verl trains with FSDP1 unless configured otherwise. FSDP1 flattens the parameters of each unit into one tensor, whose
# shard a rank holds. A unit is a decoder layer, or the remaining parameters at the root (embeddings, last norm, head).

ROOT = "outside"
"""Layer name for all parameters outside the units of FSDP1."""


def gradients_of(model: nn.Module, rank: int) -> GradNorms | None:
    """Return norms of the gradients that ``model`` has now on ``rank``, by layer.

    The result is None if no gradient counts on this rank.
    """
    units = [(layer_of(f"{plain_name(f'{name}.')}weight") if name else ROOT, unit) for name, unit in units_of(model)]
    return _flat_norms(units, rank) if units else grad_norms(model.named_parameters(), rank=rank)


def _flat_norms(units: list[tuple[str, Any]], rank: int) -> GradNorms | None:
    """Return the gradient norms of FSDP1 units, by layer.

    Padding within a shard is zero. It counts among the elements on all ranks alike.
    """
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
    """Return the number of ranks over which a unit is sharded."""
    handle = module._handle  # noqa: SLF001
    return int(handle.world_size) if handle.uses_sharded_strategy else 1


def _counts_here(module: Any, rank: int) -> bool:
    """Return True if the gradient of a unit counts on this rank: its shard is the first of several equal copies."""
    if not module._handle.uses_sharded_strategy:  # noqa: SLF001
        return rank == 0
    copies = getattr(module, "_inter_node_pg", None)
    return copies is None or int(torch.distributed.get_rank(copies)) == 0
