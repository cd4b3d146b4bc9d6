"""Asking a trainer for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlwatch.control.policy import veto_save_checkpoint
from rlwatch.errors import RLWatchError
from rlwatch.records import JSON, Command
from rlwatch.seam import Seam


class SaveCheckpoint:
    """Handles ``save-checkpoint``.

    Parameters
    ----------
    save
        Saves, or makes the trainer save; returns words for the answer, e.g. where.
    kept
        How many checkpoints the trainer keeps, None for all. Raises ``RLWatchError`` if it cannot save.
    seam
        Where the run's health is asked, for the veto during a collapse.
    """

    kind: str = "save-checkpoint"

    def __init__(self, save: Callable[[], str], kept: Callable[[], int | None], seam: Seam) -> None:
        self._save = save
        self._kept = kept
        self._seam = seam

    def check(self, command: Command) -> None:
        """Refuse where a save would delete an older checkpoint while the run collapses."""
        kept, run = self._kept(), self._seam.run
        veto = None if run is None else veto_save_checkpoint(run.health(), kept=kept, force=command.force)
        if veto is not None:
            raise RLWatchError(veto)

    def __call__(self, command: Command) -> Mapping[str, JSON]:  # noqa: ARG002  (the signature of the port)
        """Save."""
        return {"summary": self._save()}
