"""Constant thresholds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlwatch.clipping.grouping import By
from rlwatch.clipping.rule import State, positive
from rlwatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerMaxNorm:
    """Each layer's norm is at most a constant: min(1, c / ||g_l||).

    Parameters
    ----------
    each
        c, the same for all layers.
    total
        Instead of ``each``: c = total / sqrt(L) for the L layers that have a gradient, so that the norm of all is at
        most ``total``. By default 1.
    by
        What is clipped as one.

    Raises
    ------
    ConfigError
        If both are given, or one is not a finite number > 0.
    """

    each: float | None = None
    total: float | None = None
    by: By = By.LAYER

    def __post_init__(self) -> None:
        positive("LayerMaxNorm", each=self.each, total=self.total)
        if self.each is not None and self.total is not None:
            raise ConfigError("LayerMaxNorm: pass each or total, not both")

    def start(self, like: Tensor) -> State:  # noqa: ARG002  (the protocol's signature)
        """Nothing to remember."""
        return {}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """See :class:`~rlwatch.clipping.rule.ClipRule`."""
        if self.each is not None:
            return (self.each / norms).clamp(max=1.0), state
        layers = seen.sum().clamp(min=1).to(norms)
        return ((self.total or 1.0) / layers.sqrt() / norms).clamp(max=1.0), state
