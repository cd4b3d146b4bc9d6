"""Levels of detail at which a trainer is watched."""

from __future__ import annotations

from enum import StrEnum

from rlwatch.errors import ConfigError


class Level(StrEnum):
    """Level of detail at which a trainer is watched; each level adds measurements to the one before it.

    ``benchmarks/watching_cost.py`` measures what each level costs.
    """

    SCALARS = "scalars"
    """Only the metrics that the trainer logs."""
    TOKENS = "tokens"
    """Also statistics of tokens that cost one or two passes over tensors of shape (responses, tokens)."""
    GRADIENTS = "gradients"
    """Also the norm of the gradient of each layer."""
    FULL = "full"
    """Also statistics that sort, group or compare: quantiles, covariances, repetition, statistics of prompt groups."""

    @classmethod
    def of(cls, word: str) -> Level:
        """Return the level called ``word``, for example ``"tokens"``.

        Raises ``ConfigError``, which lists the valid words, for any other word.
        """
        try:
            return cls(word)
        except ValueError:
            raise ConfigError(f"level must be one of {', '.join(cls)}, got {word!r}") from None

    def includes(self, other: Level) -> bool:
        """Return True if this level measures everything that the level ``other`` measures."""
        order = list(Level)
        return order.index(self) >= order.index(other)
