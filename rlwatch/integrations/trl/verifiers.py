"""Reward functions of a GRPO or RLOO trainer, measured while it calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.integrations.verifiers import TAP, VerifierMeter


class RewardFunctions:
    """Those of one trainer. Meters are in their places during the call that computes rewards, and only then.

    Between calls ``trainer.reward_funcs`` are the user's own objects, which a callback may read, change or replace.
    Reward models are left alone: TRL calls a module in another way, and its time is that of a device.
    """

    def __init__(self, trainer: Any, seam: ErrorBoundary) -> None:
        self.meter = VerifierMeter(seam)
        self._trainer = trainer
        self._seam = seam

    def names(self) -> list[str]:
        """Names of all functions; of several with one name the later ones are numbered."""
        return numbered(self._trainer.reward_func_names)

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Have the functions measured that are called inside the block. What the block raises passes unchanged."""
        trainer, given = self._trainer, getattr(self._trainer, "reward_funcs", None)
        measured = self._seam.attempt(TAP, self._measured)
        if measured is not None:
            trainer.reward_funcs = measured
        try:
            yield
        finally:
            if measured is not None and trainer.reward_funcs is measured:
                trainer.reward_funcs = given

    def _measured(self) -> list[Any]:
        names = self.names()
        functions = list(self._trainer.reward_funcs)
        return [self._with_meter(name, one) for name, one in zip(names, functions, strict=True)]

    def _with_meter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if isinstance(function, nn.Module) else self.meter.metered(name, function)


def numbered(names: Sequence[str]) -> list[str]:
    """Make names unique.

    >>> numbered(["exact", "format", "exact"])
    ['exact', 'format', 'exact#2']
    """
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique
