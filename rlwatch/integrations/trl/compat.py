"""Whether this trainer has the private methods the taps wrap."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlwatch.integrations.transformers.compat import lacking, sharding_engine

__all__ = ["obstacle", "sharding_engine", "trl_version"]

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


def obstacle(trainer: Any) -> str | None:
    """Why per-token taps cannot be attached to ``trainer``; None if they can."""
    installed = trl_version()
    if not installed.startswith(KNOWN):
        return f"TRL {installed or 'is not installed'}; tokens are read of TRL 1.x"
    reason = lacking(trainer, NEEDS)
    return None if reason is None else f"{reason}; tokens are read of GRPO and RLOO"


def trl_version() -> str:
    """The installed version of TRL, or ``""``."""
    try:
        return version("trl")
    except PackageNotFoundError:
        return ""
