"""The model inside its wrappers, and the optimizer inside its own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rlwatch.errors import RLWatchError

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile, activation checkpointing and FSDP put into the names of parameters."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel | DataParallel) else None
        inner = getattr(model, "_orig_mod", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def resharded(model: nn.Module) -> nn.Module:
    """``model``, with every FSDP2 module showing its shards.

    After a forward without backward FSDP2's root keeps whole copies of its parameters, which the next forward
    throws away: a reset of those would be lost. Raises ``RLWatchError`` for FSDP1, whose flat parameters hide
    whether they are shards.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise RLWatchError("the model is wrapped by FSDP1, whose weights cannot be copied in place; use FSDP2")
        if callable(getattr(module, "reshard", None)) and hasattr(module, "set_reshard_after_forward"):
            module.reshard()  # type: ignore[operator]
    return model


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside accelerate's, or whoever's, wrappers."""
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer


def inner_scheduler(scheduler: Any) -> Any:
    """The learning-rate scheduler inside accelerate's wrapper."""
    while getattr(scheduler, "scheduler", None) is not None:
        scheduler = scheduler.scheduler
    return scheduler
