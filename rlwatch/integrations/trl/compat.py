"""Checks of the private methods of a TRL trainer that rlwatch wraps."""

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
"""Private methods that are wrapped, and the parameters by which each is recognised."""


def obstacle(trainer: Any) -> str | None:
    """Return the reason why tokens of ``trainer`` cannot be measured; None if they can."""
    reason = lacking(trainer, NEEDS)
    return None if reason is None else f"{reason} (TRL {installed('trl')}); tokens are read of GRPO and RLOO"
