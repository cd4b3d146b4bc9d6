"""Levels of detail at which a trainer is watched."""

from __future__ import annotations

from enum import StrEnum

from rlwatch.errors import ConfigError


class Level(StrEnum):
    """Each level adds to the one before; ``benchmarks/watching_cost.py`` measures what each costs."""

    SCALARS = "scalars"
    """The metrics that the trainer logs."""
    TOKENS = "tokens"
    """Statistics per token that cost a pass or two over (B, T)."""
    GRADIENTS = "gradients"
    """Gradient norms per layer."""
    FULL = "full"
    """Statistics that sort, group or compare: quantiles, covariances, repetition, groups."""

    @classmethod
    def of(cls, word: str) -> Level:
        """Return the level called ``word``. Raises ``ConfigError`` with the valid levels."""
        try:
            return cls(word)
        except ValueError:
            raise ConfigError(f"level must be one of {', '.join(cls)}, got {word!r}") from None

    def includes(self, other: Level) -> bool:
        """Return True if this level contains ``other``."""
        order = list(Level)
        return order.index(self) >= order.index(other)
