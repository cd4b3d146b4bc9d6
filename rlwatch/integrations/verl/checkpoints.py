"""Saving of a reset reference with verl's checkpoints, which hold only the actor and the critic."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.checkpoints import FACTS_FILE, ReferenceFacts, read_facts, why_none
from rlwatch.integrations.verl.ranks import Workers, accepted, joint
from rlwatch.records import JSON, Command

logger = logging.getLogger("rlwatch")

FOLDER = "rlwatch_reference"
"""Directory of the reference inside the actor's directory of a checkpoint, so that verl removes both together."""


class Checkpoints:
    """verl's checkpoints of one trainer, and the reference that is saved with each of them once it was reset.

    A reset belongs to the checkpoint of the step that it followed, and to all later ones. So a resume from any
    checkpoint has the reference that training had there. ``workers`` makes remote calls to all ranks, ``seam`` is the
    error boundary that leads to the run.
    """

    def __init__(self, trainer: Any, workers: Workers, seam: ErrorBoundary) -> None:
        self._trainer = trainer
        self._workers = workers
        self._seam = seam
        self._saved: int | None = None
        self._facts: ReferenceFacts | None = None

    def save(self) -> str:
        """Save a checkpoint now, unless this step has one. Return a message with its path.

        Raises ``RLWatchError`` if this verl's trainer cannot save.
        """
        if not hasattr(self._trainer, "_save_checkpoint"):
            raise RLWatchError("this verl's trainer has no _save_checkpoint")
        if self._saved != self._trainer.global_steps:
            self._trainer._save_checkpoint()  # noqa: SLF001  (verl has no public name for it)
        return f"saved {self.here}"

    def kept(self) -> int | None:
        """Return the number of the actor's checkpoints that verl keeps; None for all."""
        settings = self._trainer.config.trainer
        if settings.get("remove_previous_ckpt_in_save", False):
            return 1
        limit = settings.get("max_actor_ckpt_to_keep", None)
        return None if limit is None else int(limit)

    def saved(self) -> None:
        """Add the reference to the checkpoint that verl has just saved, if the reference was reset.

        If it was not, a reference that an earlier attempt left there, of steps that were undone since, is removed.
        """
        self._saved = self._trainer.global_steps
        self._seam.attempt("reference of a checkpoint", self._forget if self._facts is None else self._keep)

    def changed(self, command: Command, fingerprint: str) -> None:
        """Record that ``command`` has just reset the reference, which now has this ``fingerprint``."""
        step = int(self._trainer.global_steps)
        self._facts = ReferenceFacts(step, command.command_id, fingerprint, command.requested_by, command.why)
        if self._saved == self._trainer.global_steps:
            self._seam.attempt("reference of a checkpoint", self._keep)

    def loaded(self) -> None:
        """Restore the reference saved with the checkpoint that verl has just loaded, if there is one."""
        self._seam.attempt("reference of a checkpoint", self._restore)

    @property
    def here(self) -> Path:
        """Return the directory of the checkpoint of the current step."""
        return self._folder(self._trainer.global_steps)

    @property
    def origin(self) -> Path:
        """Return the directory of the checkpoint from which training continued."""
        settings = self._trainer.config.trainer
        chosen = settings.resume_from_path if settings.resume_mode == "resume_path" else self.here
        return Path(str(chosen)).absolute()

    def _keep(self) -> None:
        """Write the shards, and then the facts on them; without facts the shards are not restored."""
        try:
            self._forget_facts()
            accepted(self._workers.call("save_reference", str(self._reference_of(self.here))))
            self._write_facts()
        except (RLWatchError, OSError) as problem:
            self._failed("reference_not_kept", self.here, problem)

    def _write_facts(self) -> None:
        if self._facts is not None:
            path = self._reference_of(self.here) / FACTS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)  # the workers' disks may be others
            path.write_text(json.dumps(asdict(self._facts), indent=1), encoding="utf-8")

    def _forget(self) -> None:
        self._forget_facts()
        accepted(self._workers.call("forget_reference", str(self._reference_of(self.here))))

    def _forget_facts(self) -> None:
        (self._reference_of(self.here) / FACTS_FILE).unlink(missing_ok=True)

    def _restore(self) -> None:
        directory = str(self._reference_of(self.origin))
        try:
            facts = read_facts(self.origin / "actor")
            if facts is None:
                self._none_kept()
                return
            prints = [reply["found"] for reply in accepted(self._workers.call("find_reference", directory))]
            if not all(prints):
                raise RLWatchError(f"some ranks do not find their part in {directory}")
            if joint(prints) != facts.fingerprint:
                raise RLWatchError(f"{directory} is not the reference of the reset at step {facts.step}")
            restored = accepted(self._workers.call("restore_reference", directory))
        except RLWatchError as problem:
            self._failed("reference_not_restored", self.origin, problem)
            return
        self._facts = facts
        body = {**restored[0]["report"], "fingerprint": facts.fingerprint, "reset_step": facts.step}
        self._event("reference_restored", self.origin, ranks=len(restored), **body)

    def _none_kept(self) -> None:
        """Warn if other checkpoints have a reset reference that this one lacks."""
        nearby = {}
        for path in self.origin.parent.glob(f"global_step_*/actor/{FOLDER}"):
            with suppress(RLWatchError):
                facts = read_facts(path.parent)
                if facts is not None:
                    nearby[path.parents[1].name] = facts
        problem = why_none(nearby, int(self._trainer.global_steps))
        if problem is not None:
            self._failed("reference_not_restored", self.origin, problem)

    def _failed(self, kind: str, checkpoint: Path, problem: object) -> None:
        words = "keep the reference in" if kind == "reference_not_kept" else "take up the reference of"
        logger.warning("rlwatch did not %s %s (training goes on): %s", words, checkpoint, problem)
        self._event(kind, checkpoint, reason=str(problem))

    def _event(self, kind: str, checkpoint: Path, **body: JSON) -> None:
        if self._seam.run is not None:
            self._seam.run.event(kind, self._trainer.global_steps, checkpoint=str(checkpoint), **body)

    @staticmethod
    def _reference_of(checkpoint: Path) -> Path:
        return checkpoint / "actor" / FOLDER

    def _folder(self, step: int) -> Path:
        return Path(str(self._trainer.config.trainer.default_local_dir)).absolute() / f"global_step_{step}"
