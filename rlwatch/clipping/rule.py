"""What a rule of clipping is: norms of groups in, factors out, and a state of tensors that it hands back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from rlwatch.clipping.grouping import By
from rlwatch.errors import ConfigError

State = Mapping[str, Tensor]
"""What a rule remembers: tensors on the device, by name. A rule never changes one in place."""


class ClipRule(Protocol):
    """Decides by what factor each group of gradients (a layer, a tensor...) is scaled.

    A rule is settings and arithmetic: deterministic, without random numbers, and without asking the device for a
    number (no ``.item()``, no ``if`` on a tensor). All it remembers it takes as ``state`` and returns anew, so that a
    checkpoint of the state is a checkpoint of the rule.
    """

    @property
    def by(self) -> By:
        """How the rule wants parameters grouped, unless the user says otherwise."""
        ...

    def start(self, like: Tensor) -> State:
        """The state before anything was seen; ``like`` (L,) has the shape, type and device of the norms to come."""
        ...

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Factors for the gradients of this step, and the state after it.

        Parameters
        ----------
        norms
            (L,) L2 norms before clipping, all finite and > 0; 1 where not ``seen``.
        seen
            (L,) bool: the groups that have a finite gradient other than zero. The others (frozen, experts that got
            no token, NaN) must leave the state as it was; their factors are ignored.
        state
            What :meth:`start` or the last call returned.
        """
        ...


def positive(rule: str, **settings: float | None) -> None:
    """Raise ``ConfigError`` unless every setting that is given is a finite number > 0."""
    for name, value in settings.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{rule}: {name} must be a finite number > 0, got {value!r}")


def within_one(rule: str, **settings: float) -> None:
    """Raise ``ConfigError`` unless every setting is in [0, 1)."""
    for name, value in settings.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{rule}: {name} must be in [0, 1), got {value!r}")
