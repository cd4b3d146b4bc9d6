"""Keeping a reset reference with verl's checkpoints, which hold the actor and the critic only."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlwatch.errors import RLWatchError
from rlwatch.integrations.seam import Seam
from rlwatch.integrations.verl.keeper import FOLDER
from rlwatch.integrations.verl.replies import accepted
from rlwatch.integrations.verl.workers import Workers

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")


class Checkpoints:
    """verl's checkpoints of one trainer, and the reference beside each of them once it was reset.

    A reset belongs to the checkpoint of the step it followed, and to all later ones: a resume from any checkpoint
    has the reference that training had there.
    """

    def __init__(self, trainer: Any, workers: Workers, seam: Seam) -> None:
        self._trainer = trainer
        self._workers = workers
        self._seam = seam
        self._saved: int | None = None
        self._reset = False

    def save(self) -> str:
        """Save one now, unless this step has one; returns words for the answer."""
        if self._saved != self._trainer.global_steps:
            self._trainer._save_checkpoint()  # noqa: SLF001  (verl has no public name for it)
        return f"saved {self._folder(self._trainer.global_steps)}"

    def kept(self) -> int | None:
        """How many verl keeps of the actor; None for all."""
        settings = self._trainer.config.trainer
        if settings.get("remove_previous_ckpt_in_save", False):
            return 1
        limit = settings.get("max_actor_ckpt_to_keep", None)
        return None if limit is None else int(limit)

    def saved(self) -> None:
        """One was just saved by verl: the reference goes with it, if it is no longer the one verl would load."""
        self._saved = self._trainer.global_steps
        if self._reset:
            self._seam.attempt("reference checkpoint", self._keep)

    def changed(self) -> None:
        """The reference has just been reset."""
        self._reset = True
        if self._saved == self._trainer.global_steps:
            self._seam.attempt("reference checkpoint", self._keep)

    def loaded(self, run: Run) -> None:
        """One was loaded by verl, or none: restore the reference that was kept beside it."""
        if self._trainer.global_steps:
            self._seam.attempt("reference of the checkpoint", self._restore, run)

    def _keep(self) -> None:
        directory = self._folder(self._trainer.global_steps) / "actor" / FOLDER
        accepted(self._workers.call("save_reference", str(directory)))

    def _restore(self, run: Run) -> None:
        step = self._trainer.global_steps
        directory = self._loaded_folder() / "actor" / FOLDER
        try:
            found = accepted(self._workers.call("find_reference", str(directory)))
            if not any(reply["found"] for reply in found):
                return
            if not all(reply["found"] for reply in found):
                raise RLWatchError(f"some ranks do not find their part in {directory}")
            restored = accepted(self._workers.call("restore_reference", str(directory)))
        except RLWatchError as problem:
            logger.warning("the reference kept at step %d was not restored: %s", step, problem)
            run.event("reference_lost", step, reason=str(problem), checkpoint=str(directory))
            return
        self._reset = True
        report = restored[0]["report"]
        run.event("reference_restored", step, checkpoint=str(directory), ranks=len(restored), **report)

    def _loaded_folder(self) -> Path:
        settings = self._trainer.config.trainer
        if settings.resume_mode == "resume_path":
            return Path(str(settings.resume_from_path)).absolute()
        return self._folder(self._trainer.global_steps)

    def _folder(self, step: int) -> Path:
        return Path(str(self._trainer.config.trainer.default_local_dir)).absolute() / f"global_step_{step}"
