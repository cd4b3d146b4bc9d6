"""Private methods of a TRL trainer that the taps wrap."""

from __future__ import annotations

from typing import Any

from rlwatch.integrations.compat import Needs, installed, lacking
from rlwatch.integrations.transformers.compat import sharding_engine

__all__ = ["obstacle", "sharding_engine"]

NEEDS: Needs = {
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("compute_entropy",),
    "_calculate_rewards": ("completion_ids_list",),
    "_generate_and_score_completions": (),
}
"""Private methods, and the parameters by which we know them."""


def obstacle(trainer: Any) -> str | None:
    """Explain that per-token taps cannot be attached to ``trainer``; None if they can."""
    reason = lacking(trainer, NEEDS)
    return None if reason is None else f"{reason} (TRL {installed('trl')}); tokens are read of GRPO and RLOO"
