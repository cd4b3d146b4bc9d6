"""What a trainer must have for us to look into it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Engines of accelerate that keep no whole weight or gradient on a rank."""
HIDDEN = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Engines whose gradients are not in ``.grad`` when the trainer clips them."""
CLIP: Mapping[str, Sequence[str]] = {"_clip_grad_norm": ("model",)}
LOSS: Mapping[str, Sequence[str]] = {"training_step": ("model", "inputs")}
"""Methods, and the parameters by which we know them."""


def lacking(trainer: Any, needs: Mapping[str, Sequence[str]]) -> str | None:
    """Which of the methods ``needs`` names ``trainer`` lacks, in words; None if it has all."""
    for method, parameters in needs.items():
        found = getattr(trainer, method, None)
        if not callable(found):
            return f"{type(trainer).__name__} has no {method}"
        absent = [name for name in parameters if not _takes(found, name)]
        if absent:
            return f"{type(trainer).__name__}.{method} has no parameter {absent[0]!r}"
    return None


def _takes(method: Callable[..., Any], name: str) -> bool:
    """Whether ``method`` has the parameter, or passes on whatever it gets, as overriding methods do."""
    parameters = inspect.signature(method).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def sharding_engine(trainer: Any) -> str | None:
    """The engine that shards this trainer's weights or gradients, or None."""
    kind = trainer.accelerator.distributed_type
    name = str(getattr(kind, "value", kind))
    return name if name in SHARDED else None
