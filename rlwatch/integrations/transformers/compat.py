"""What a trainer must have for us to look into it."""

from __future__ import annotations

from typing import Any

from rlwatch.integrations.compat import Needs, lacking

SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Engines of accelerate that keep no whole weight or gradient on a rank."""
HIDDEN = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Engines whose gradients are not in ``.grad`` when the trainer clips them."""
CLIP: Needs = {"_clip_grad_norm": ("model",)}
ACCELERATOR: Needs = {"clip_grad_norm_": ("parameters", "max_norm")}
LOSS: Needs = {"training_step": ("model", "inputs")}
"""Methods, and the parameters by which we know them. Before transformers 5.3 the loop clipped through the accelerator,
without a method of its own."""


def unclippable(trainer: Any) -> str | None:
    """Why nobody can be there when ``trainer`` clips; None if one can."""
    reason = lacking(trainer, CLIP)
    return None if reason is None or lacking(trainer.accelerator, ACCELERATOR) is None else reason


def sharding_engine(trainer: Any) -> str | None:
    """The engine that shards this trainer's weights or gradients, or None."""
    kind = trainer.accelerator.distributed_type
    name = str(getattr(kind, "value", kind))
    return name if name in SHARDED else None
