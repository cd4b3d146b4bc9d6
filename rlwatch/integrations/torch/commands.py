"""What a loop of one's own can be told to do, and what of that outlives the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rlwatch.integrations.controller import Controller
from rlwatch.integrations.handlers.checkpoint import SaveCheckpoint
from rlwatch.integrations.handlers.kept_reference import KeptReference
from rlwatch.integrations.handlers.kept_settings import KeptSettings
from rlwatch.integrations.handlers.kl_coef import SetKLCoef
from rlwatch.integrations.handlers.learning_rate import LowerLR
from rlwatch.integrations.handlers.reference import ResetReference
from rlwatch.integrations.handlers.stop import Stop
from rlwatch.integrations.ranks import RunRanks
from rlwatch.integrations.torch.means import Means
from rlwatch.ports import CommandHandler
from rlwatch.records import JSON, Command
from rlwatch.seam import Seam


class Commands:
    """Obeys what people ask, and keeps in checkpoints what must outlive the process. One on every rank."""

    def __init__(
        self, means: Means, seam: Seam, step: Callable[[], int], latest: Callable[[], Mapping[str, float]]
    ) -> None:
        coefficient = SetKLCoef(means.changeable_kl_coef, means.change_kl_coef, seam)
        self._seam = seam
        self._step = step
        self._reference = KeptReference(means.anchored, seam, self._writes)
        self._settings = KeptSettings(coefficient, seam, self._writes)
        handlers: list[CommandHandler] = [
            ResetReference(means.anchored, seam, self._reset_done),
            SaveCheckpoint(means.save_now, means.kept, seam),
            LowerLR(means.paced, seam),
            coefficient,
            Stop(means.stop),
        ]
        self._controller = Controller(seam, handlers, RunRanks(seam), latest)

    def obey(self) -> None:
        """Carry out what waits, at the step that has ended."""
        self._controller.obey(self._step())

    def saved(self, checkpoint: Path) -> None:
        """The loop has written ``checkpoint``, a directory: keep with it what it leaves out."""
        self._reference.save(checkpoint, self._controller, self._step())
        self._settings.save(checkpoint)

    def resumed(self, checkpoint: Path) -> None:
        """The loop has read ``checkpoint``: take up what was kept with it."""
        self._reference.restore(checkpoint, self._controller, self._step())
        self._settings.restore(checkpoint, self._controller, self._step())

    def _reset_done(self, command: Command, report: Mapping[str, JSON]) -> None:
        self._reference.reset_done(command, report, self._step())

    def _writes(self) -> bool:
        run = self._seam.run
        return run is not None and run.rank == 0
