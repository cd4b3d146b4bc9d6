"""Which tensor of the reference belongs to which of the policy, and copying all of them or none."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.shards import copy_into, local, whole_marks
from rlwatch.integrations.handlers.unwrapping import plain_name, resharded, unwrapped


class Pair(NamedTuple):
    """A tensor of the policy and its counterpart in the reference."""

    name: str
    ours: Tensor
    theirs: Tensor


REF = "ref"
"""The frozen adapter that is taken as the reference, if it exists."""


def model_pairs(policy: nn.Module, reference: nn.Module) -> list[Pair]:
    """Parameters and saved buffers of two whole models, however each is wrapped.

    Raises ``RLWatchError`` if they do not match one to one, or if the policy is not finite.
    """
    ours, theirs = dict(named_tensors(policy)), dict(named_tensors(reference))
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise RLWatchError(f"policy and reference are different models: {odd[0]!r} is in one only")
    return _checked([Pair(name, ours[name], theirs[name]) for name in ours])


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers of ``model`` by their names without wrappers; shards where it is sharded."""
    inner = resharded(unwrapped(model))
    for name, parameter in inner.named_parameters():
        yield plain_name(name), parameter
    for prefix, module in inner.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001  (has no public name)
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def adapter_of(policy: Any) -> str:
    """The one trained PEFT adapter. Raises ``RLWatchError`` if there is not exactly one, or it is not finite."""
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
    _checked([Pair(name, tensor, tensor) for name, tensor in weights.items()])
    return active


def adapter_pairs(policy: Any) -> list[Pair]:
    """Weights of the trained PEFT adapter and of the frozen one named ``ref``, which is made if it is not there.

    Raises ``RLWatchError`` if there is not exactly one active adapter or it cannot be mirrored.
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


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copy every policy tensor into its reference tensor, in the reference's own dtype, device and sharding."""
    with torch.no_grad():
        for pair in pairs:
            copy_into(pair.theirs, pair.ours)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Twelve hex digits of the sum and norm of each tensor: equal weights give equal ones, on every rank.

    A sharded tensor is reduced over its ranks, all of which must call this.
    """
    digest = hashlib.sha256()
    with torch.no_grad():
        marks = [mark.cpu() for tensor in tensors for mark in whole_marks(tensor)]
    if marks:
        digest.update(torch.stack(marks).numpy().tobytes())
    return digest.hexdigest()[:12]


def add_reference_adapter(policy: Any, active: str) -> None:
    """A frozen adapter like ``active``: initialised plainly, because some initialisations alter the base weights.

    Its random initial values are drawn from a fork, so that training's random stream does not notice.
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


def _checked(pairs: list[Pair]) -> list[Pair]:
    """Refuse before anything is copied: a half-copied reference is worse than an old one."""
    for name, ours, theirs in pairs:
        if ours.is_meta or theirs.is_meta or hasattr(ours, "ds_id") or hasattr(theirs, "ds_id"):
            raise RLWatchError(
                f"{name!r} is held elsewhere (offloaded, or partitioned by DeepSpeed): it cannot be read"
            )
        if ours.shape != theirs.shape:
            raise RLWatchError(
                f"{name!r} has shape {tuple(ours.shape)} in the policy and {tuple(theirs.shape)} in the reference"
            )
        if not bool(local(ours).isfinite().all()):
            raise RLWatchError(f"the policy's {name!r} is not finite: roll back to a checkpoint instead")
    return pairs


def _weights_of(policy: Any, adapter: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named_tensors(policy) if f".{adapter}." in f"{name}."}


def _mirrored(policy: Any, active: str) -> list[Pair]:
    everything, ours = dict(named_tensors(policy)), _weights_of(policy, active)
    mirror = {name: f"{name}.".replace(f".{active}.", f".{REF}.")[:-1] for name in ours}
    absent = [name for name, other in mirror.items() if other not in everything]
    if absent:
        raise RLWatchError(f"the adapter {active!r} cannot be mirrored: {absent[0]!r} has no counterpart")
    return _checked([Pair(name, tensor, everything[mirror[name]]) for name, tensor in ours.items()])
