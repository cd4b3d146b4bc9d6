"""What every ``Trainer`` can be told to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from rlwatch.integrations.controller import Controller
from rlwatch.integrations.handlers.trainer_loop import TrainerLoop
from rlwatch.integrations.ranks import Ranks, RunRanks
from rlwatch.seam import Seam

Latest = Callable[[], Mapping[str, float]]
"""The metrics measured last."""


class Commands(Protocol):
    """What a step's end asks for commands."""

    @property
    def loop(self) -> TrainerLoop:
        """The trainer, as its callbacks are shown it."""
        ...

    def begin(self, step: int) -> None:
        """Training begins at ``step``."""
        ...

    def obey(self, step: int) -> None:
        """Carry out what waits, if that is safe now that ``step`` has ended."""
        ...

    def saved(self, step: int) -> None:
        """The trainer has written the checkpoint of ``step``."""
        ...


class LoopControl:
    """Saves, stops, pauses and lowers the learning rate, at the end of any step."""

    def __init__(self, seam: Seam, latest: Latest, ranks: Ranks | None = None) -> None:
        self.loop = TrainerLoop()
        self._controller = Controller(seam, self.loop.handlers(seam), ranks or RunRanks(seam), latest)

    def begin(self, step: int) -> None:
        """Nothing of ours is kept in checkpoints."""

    def obey(self, step: int) -> None:
        """Every step's end is safe."""
        self._controller.obey(step)

    def saved(self, step: int) -> None:
        """Nothing of ours is kept in checkpoints."""
