"""Which tensor of the reference belongs to which of the policy, and copying all of them or none."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.errors import RLWatchError

Pairs = list[tuple[Tensor, Tensor]]
"""(policy tensor, reference tensor), in the policy's order."""

REF = "ref"
"""The frozen adapter TRL takes as the reference, if it exists."""


def model_pairs(policy: nn.Module, reference: nn.Module) -> Pairs:
    """Parameters and buffers of two whole models. Raises ``RLWatchError`` if they do not match."""
    ours, theirs = dict(_tensors(policy)), dict(_tensors(reference))
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise RLWatchError(f"policy and reference are different models: {odd[0]!r} is in one only")
    return _checked([(name, ours[name], theirs[name]) for name in ours])


def adapter_pairs(policy: Any) -> Pairs:
    """Weights of the trained PEFT adapter and of the frozen one named ``ref``, which is made if it is not there.

    Raises ``RLWatchError`` if there is not exactly one active adapter or it cannot be mirrored.
    """
    active = policy.active_adapter
    if not isinstance(active, str) or active == REF:
        raise RLWatchError(f"a reset needs exactly one trained adapter, got {active!r}")
    made = REF not in policy.peft_config
    if made:
        _add_adapter(policy, active)
    try:
        return _mirrored(policy, active)
    except RLWatchError:
        if made:
            policy.delete_adapter(REF)
        raise


def copy_all(pairs: Pairs) -> None:
    """Copy every policy tensor into its reference tensor."""
    with torch.no_grad():
        for ours, theirs in pairs:
            theirs.copy_(ours)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Twelve hex digits of the sum and norm of each tensor: equal weights give equal ones."""
    digest = hashlib.sha256()
    with torch.no_grad():
        marks = [mark.cpu() for tensor in tensors for mark in _marks(tensor)]
    if marks:
        digest.update(torch.stack(marks).numpy().tobytes())
    return digest.hexdigest()[:12]


def _marks(tensor: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    return tensor.sum(dtype=wide).double(), tensor.to(torch.float32).norm(dtype=wide).double()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        yield name.replace("_orig_mod.", ""), tensor


def _checked(named: list[tuple[str, Tensor, Tensor]]) -> Pairs:
    """Refuse before anything is copied: a half-copied reference is worse than an old one."""
    for name, ours, theirs in named:
        if ours.shape != theirs.shape:
            raise RLWatchError(
                f"{name!r} has shape {tuple(ours.shape)} in the policy and {tuple(theirs.shape)} in the reference"
            )
        if not bool(ours.isfinite().all()):
            raise RLWatchError(f"the policy's {name!r} is not finite: roll back to a checkpoint instead")
    return [(ours, theirs) for _, ours, theirs in named]


def _add_adapter(policy: Any, active: str) -> None:
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


def _mirrored(policy: Any, active: str) -> Pairs:
    everything = dict(_tensors(policy))
    ours = {name: tensor for name, tensor in everything.items() if f".{active}." in f"{name}."}
    mirror = {name: f"{name}.".replace(f".{active}.", f".{REF}.")[:-1] for name in ours}
    absent = [name for name, other in mirror.items() if other not in everything]
    if absent or not ours:
        raise RLWatchError(f"the adapter {active!r} cannot be mirrored: {(absent or ['it'])[0]!r} has no counterpart")
    return _checked([(name, tensor, everything[mirror[name]]) for name, tensor in ours.items()])
