"""Whether this trainer has the private methods the taps wrap."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

NEEDS = {
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("compute_entropy",),
    "_calculate_rewards": ("completion_ids_list",),
    "_generate_and_score_completions": (),
    "_clip_grad_norm": ("model",),
}
"""Private methods, and the parameters by which we know them."""
KNOWN = ("1.",)
"""TRL versions whose internals were read; tests run against 1.16."""
SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Engines of accelerate that keep no whole weight or gradient on a rank."""


def obstacle(trainer: Any) -> str | None:
    """Why per-token taps cannot be attached to ``trainer``; None if they can."""
    installed = trl_version()
    if not installed.startswith(KNOWN):
        return f"TRL {installed or 'is not installed'}; per-token taps know TRL 1.x"
    for method, parameters in NEEDS.items():
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


def trl_version() -> str:
    """The installed version of TRL, or ``""``."""
    try:
        return version("trl")
    except PackageNotFoundError:
        return ""
