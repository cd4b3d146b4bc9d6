"""Models that FSDP2 (``fully_shard``) keeps in shards, as far as looking at them needs care."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def sharded_modules(model: nn.Module) -> list[Any]:
    """Those that FSDP2 gathers and shards again by themselves, outermost first; none where it is not in use."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module) -> None:
    """Let every module hold its shards, which is where gradients are; FSDP2 gathers them again when it needs them."""
    for module in sharded_modules(model):
        module.reshard()
