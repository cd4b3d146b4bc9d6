"""The steps of a loop on their way to the run: collected, sealed, recorded as soon as their copy is there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlwatch.integrations.step_tally import Decode, SealedStep, StepTally
from rlwatch.seam import Seam, by_a_signal, shown
from rlwatch.tensors.mergeable import Mean
from rlwatch.tensors.transfer import freed

IN_FLIGHT = 8
"""Steps that may wait for their copy; beyond that the oldest is waited for, so that nothing piles up."""


@dataclass(slots=True, weakref_slot=True)
class Steps:
    """``tally`` is the step under way, ``last`` the number of the one before.

    ``delivered`` is told the step and metrics of every recorded one.
    """

    seam: Seam
    delivered: Callable[[int, dict[str, float]], None]
    decode: Decode | None = None
    tally: StepTally = field(default_factory=StepTally)
    last: int = 0
    _sealed: deque[SealedStep] = field(default_factory=deque)
    _begun: float | None = None

    def begin(self) -> None:
        """The step's first input is here: from now on its time counts."""
        if self._begun is None:
            self._begun = time.monotonic()

    def add_all(self, numbers: Mapping[str, Any]) -> dict[str, str]:
        """Numbers of the step, None for what was not measured; returns name -> why of those that are none.

        Tensors with one element are not waited for. With several ranks each is the mean over them.
        """
        refused = {}
        for name, value in numbers.items():
            try:
                self._add(name, value)
            except Exception as error:
                if by_a_signal(error):
                    raise
                refused[name] = f"it is not one number: got {_described(value)}"
        return refused

    def _add(self, name: str, value: Any) -> None:
        if value is None:
            return
        if isinstance(value, str | bytes):
            raise TypeError(name)
        if isinstance(value, Tensor):
            self._add_tensor(name, value.detach())
        elif self._linked:
            self._add_tensor(name, torch.tensor(float(value), dtype=torch.float64, device="cpu"))
        else:
            self.tally.add_number(name, float(value))

    def _add_tensor(self, name: str, value: Tensor) -> None:
        """A mean, so that with several ranks it is the mean over them; it stands for what was measured by that name."""
        if hasattr(value, "full_tensor"):
            raise TypeError(name)
        if freed(value) or value.is_meta:
            raise ValueError(name)
        number = value.reshape(())
        self.tally.stats[name] = Mean.of(number, torch.ones_like(number, dtype=torch.bool))

    @property
    def _linked(self) -> bool:
        """Whether this is one of several ranks, whose shares of a step are put together."""
        return self.seam.run is not None and self.seam.run.linked

    def seal(self, step: int) -> None:
        """End the step under way; the next one begins now."""
        now = time.monotonic()
        if self._begun is not None:
            self.tally.add_number("time/step", now - self._begun)
        self._begun, self.last = now, step
        tally, self.tally = self.tally, StepTally()
        self._sealed.append(tally.seal(step, shared=self._linked))

    def deliver(self, *, wait: bool = False) -> None:
        """Record sealed steps, in order; without ``wait`` only those whose copy has arrived."""
        while self._sealed and (wait or len(self._sealed) > IN_FLIGHT or self._sealed[0].ready()):
            sealed = self._sealed.popleft()
            if self.seam.run is not None:
                self.delivered(sealed.step, sealed.deliver(self.seam.run, self.decode))


def _described(value: Any) -> str:
    if isinstance(value, Tensor) and hasattr(value, "full_tensor"):
        return "a DTensor; pass its full_tensor()"
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
