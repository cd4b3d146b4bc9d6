"""What verl's policy losses do with the importance ratio, as far as statistics need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOKEN_CLIP = ("vanilla", "clip_cov")
"""Loss modes that clip token ratios to [1 - low, 1 + high] as PPO does."""
DUAL_CLIP = ("vanilla",)
"""Of these, the ones that also cap -r A at ``clip_ratio_c`` for A < 0."""
BYPASS = "bypass_mode"


@dataclass(frozen=True, slots=True)
class Clipping:
    """``clip``: (low, high) of a token-level PPO clip; ``dual``: the cap of dual-clip PPO; None where there is none."""

    clip: tuple[float, float] | None = None
    dual: float | None = None

    @classmethod
    def of(cls, mode: str, config: Any) -> Clipping:
        """Of the loss registered as ``mode`` under verl's ``ActorConfig``, as its losses read it."""
        if mode == BYPASS:  # dispatches to vanilla unless told otherwise
            mode = "vanilla" if _bypass_loss(config) == "ppo_clip" else "reinforce"
        if config is None or mode not in TOKEN_CLIP:
            return cls()
        low, high = (_or(getattr(config, f"clip_ratio_{side}", None), config.clip_ratio) for side in ("low", "high"))
        dual = float(getattr(config, "clip_ratio_c", 3.0)) if mode in DUAL_CLIP else None
        return cls((float(low), float(high)), dual)


def _bypass_loss(config: Any) -> str:
    policy_loss = getattr(config, "policy_loss", None)
    correction = policy_loss.get("rollout_correction", None) if policy_loss is not None else None
    return str(correction.get("loss_type", "ppo_clip")) if correction is not None else "ppo_clip"


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
