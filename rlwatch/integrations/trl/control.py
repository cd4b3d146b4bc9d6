"""Commands, obeyed in the training thread where nothing in flight depends on the old state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlwatch.integrations.controller import Controller
from rlwatch.integrations.ranks import Ranks
from rlwatch.integrations.seam import Seam
from rlwatch.integrations.trl.reset import ResetReference


class Control:
    """Takes the run's commands at generation boundaries and answers every one of them.

    Between boundaries TRL still trains on rollouts whose reference log-probs are buffered: a reset there would
    mix two references or throw the rollouts away.
    """

    def __init__(
        self, trainer: Any, seam: Seam, latest: Callable[[], Mapping[str, float]], ranks: Ranks | None = None
    ) -> None:
        self._trainer = trainer
        self._controller = Controller(seam, [ResetReference(trainer, seam)], ranks, latest)

    def obey(self, step: int) -> None:
        """Carry out what waits, if ``step`` ended at a boundary."""
        if self.at_boundary():
            self._controller.obey(step)

    def at_boundary(self) -> bool:
        """Whether the next micro-batch will generate new rollouts."""
        trainer = self._trainer
        every = trainer.args.steps_per_generation * trainer.num_iterations
        return bool(trainer._step % every == 0)  # noqa: SLF001
