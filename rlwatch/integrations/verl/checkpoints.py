"""Keeping a reset reference with verl's checkpoints, which hold the actor and the critic only."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rlwatch.errors import RLWatchError
from rlwatch.integrations.seam import Seam
from rlwatch.integrations.verl.keeper import FOLDER
from rlwatch.integrations.verl.replies import accepted
from rlwatch.integrations.verl.workers import Workers
from rlwatch.records import JSON

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
        return f"saved {self.here}"

    def kept(self) -> int | None:
        """How many verl keeps of the actor; None for all."""
        settings = self._trainer.config.trainer
        if settings.get("remove_previous_ckpt_in_save", False):
            return 1
        limit = settings.get("max_actor_ckpt_to_keep", None)
        return None if limit is None else int(limit)

    def saved(self) -> None:
        """One was just saved by verl: the reference goes with it, if it is no longer the one verl would load.

        If it still is, what an earlier attempt left there, of steps that were undone since, goes.
        """
        self._saved = self._trainer.global_steps
        self._seam.attempt("reference of a checkpoint", self._keep if self._reset else self._forget)

    def changed(self) -> None:
        """The reference has just been reset."""
        self._reset = True
        if self._saved == self._trainer.global_steps:
            self._seam.attempt("reference of a checkpoint", self._keep)

    def loaded(self) -> None:
        """One was loaded by verl: restore the reference that was kept beside it, if there is one."""
        self._seam.attempt("reference of a checkpoint", self._restore)

    @property
    def here(self) -> Path:
        """The checkpoint of this step."""
        return self._folder(self._trainer.global_steps)

    @property
    def origin(self) -> Path:
        """The checkpoint training went on from."""
        settings = self._trainer.config.trainer
        chosen = settings.resume_from_path if settings.resume_mode == "resume_path" else self.here
        return Path(str(chosen)).absolute()

    def _keep(self) -> None:
        try:
            accepted(self._workers.call("save_reference", str(self.here / "actor" / FOLDER)))
        except RLWatchError as problem:
            self._failed("reference_not_kept", self.here, problem)

    def _forget(self) -> None:
        accepted(self._workers.call("forget_reference", str(self.here / "actor" / FOLDER)))

    def _restore(self) -> None:
        directory = self.origin / "actor" / FOLDER
        try:
            found = accepted(self._workers.call("find_reference", str(directory)))
            if not any(reply["found"] for reply in found):
                return
            if not all(reply["found"] for reply in found):
                raise RLWatchError(f"some ranks do not find their part in {directory}")
            restored = accepted(self._workers.call("restore_reference", str(directory)))
        except RLWatchError as problem:
            self._failed("reference_not_restored", self.origin, problem)
            return
        self._reset = True
        self._event("reference_restored", self.origin, ranks=len(restored), **restored[0]["report"])

    def _failed(self, kind: str, checkpoint: Path, problem: RLWatchError) -> None:
        words = "keep the reference in" if kind == "reference_not_kept" else "take up the reference of"
        logger.warning("rlwatch did not %s %s (training goes on): %s", words, checkpoint, problem)
        self._event(kind, checkpoint, reason=str(problem))

    def _event(self, kind: str, checkpoint: Path, **body: JSON) -> None:
        if self._seam.run is not None:
            self._seam.run.event(kind, self._trainer.global_steps, checkpoint=str(checkpoint), **body)

    def _folder(self, step: int) -> Path:
        return Path(str(self._trainer.config.trainer.default_local_dir)).absolute() / f"global_step_{step}"
