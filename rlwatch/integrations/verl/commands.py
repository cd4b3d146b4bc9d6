"""Commands to a verl training: each is checked and executed on every worker, or in the driver."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlwatch.control.policy import veto_raise_lr, veto_reset_reference
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.checkpoints import FACTS_FILE, ReferenceFacts, read_facts, why_none
from rlwatch.integrations.commands import SaveCheckpoint, Stop
from rlwatch.integrations.verl.ranks import Reply, Workers, accepted, joint
from rlwatch.ports import CommandHandler
from rlwatch.records import JSON, Command


class OnWorkers:
    """Handler of a command that all workers execute, or none: every rank checks before any rank acts.

    ``kind`` is the command, ``workers`` makes remote calls to all ranks.
    """

    def __init__(self, kind: str, workers: Workers) -> None:
        self.kind = kind
        self._workers = workers

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` with the reason if a rank refuses."""
        accepted(self._workers.call("check", self.kind, dict(command.args)))

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Execute the command on every rank and return the report of rank 0."""
        replies = accepted(self._workers.call("do", self.kind, dict(command.args)))
        return dict(replies[0]["report"])


class ResetOnWorkers(OnWorkers):
    """Handler of the command ``reset-reference`` in verl, at a point of training where no log-probs of the reference
    wait to be used.

    ``checkpoints`` saves the new reference. ``error_boundary`` is the error boundary that leads to the run's health,
    for the veto during a collapse.
    """

    def __init__(self, trainer: Any, workers: Workers, checkpoints: Checkpoints, error_boundary: ErrorBoundary) -> None:
        super().__init__("reset-reference", workers)
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._error_boundary = error_boundary

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if there is no reference, during a collapse, or with the reason of any rank that
        refuses.
        """
        trainer, run = self._trainer, self._error_boundary.run
        if not trainer.use_reference_policy:
            raise RLWatchError("there is no reference: neither actor.use_kl_loss nor algorithm.use_kl_in_reward is set")
        if trainer.ref_policy_wg is not trainer.actor_rollout_wg:
            raise RLWatchError(
                "the reference is a worker group of its own (hybrid_engine=False), which the actor's weights do not "
                "reach; save a checkpoint and start again from it"
            )
        veto = None if run is None else veto_reset_reference(run.health(), force=command.force)
        if veto is not None:
            raise RLWatchError(veto)
        super().check(command)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Reset the reference on every rank, and add it to the checkpoint of this step, if there is one.

        Return a report.
        """
        replies = accepted(self._workers.call("do", self.kind, dict(command.args)))
        report = merged(replies)
        self._checkpoints.changed(command, str(report["fingerprint"]))
        cleared = f"optimizer state of {report['cleared']} parameters cleared"
        kept = cleared if report["optimizer"] == "clear" else "optimizer state kept"
        summary = f"reference = policy ({report['tensors']} tensors on {len(replies)} ranks), {kept}"
        return {**report, "forced": command.force, "summary": summary}


class LowerLROnWorkers(OnWorkers):
    """Handler of the command ``lower-lr`` in verl; the worker of rank 0 knows when the schedule applies again."""

    def __init__(self, workers: Workers) -> None:
        super().__init__("lower-lr", workers)
        self._until: int | None = None

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Lower the learning rate on every rank and return rank 0's report."""
        report = super().__call__(command)
        self._until = int(report.get("until") or 0)
        return report

    def due(self, step: int) -> Command | None:
        """Return the command that restores the schedule if its limit is at or before ``step``, else None.

        At the first call the limit is read from the workers, because it may come from a checkpoint.
        """
        if self._until is None:
            self._until = int(accepted(self._workers.call("lowered"))[0]["until"])
        if not 0 < self._until <= step:
            return None
        why = f"lowered until step {self._until}"
        return Command("", "", self.kind, {"scale": 1.0}, requested_by="rlwatch", why=why)

    def replaced(self) -> None:
        """Read the limit anew: another command has set the rate."""
        self._until = None


class RaiseLROnWorkers(OnWorkers):
    """Handler of the command ``raise-lr`` in verl. It replaces what ``lower``, the handler of ``lower-lr``, has set.

    ``error_boundary`` is the error boundary that leads to the run's health, for the veto during a collapse: workers
    have no run.
    """

    def __init__(self, workers: Workers, lower: LowerLROnWorkers, error_boundary: ErrorBoundary) -> None:
        super().__init__("raise-lr", workers)
        self._lower = lower
        self._error_boundary = error_boundary

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` during a collapse unless ``command`` is forced, or with the reason of any rank that
        refuses.
        """
        run = self._error_boundary.run
        veto = None if run is None else veto_raise_lr(run.health(), force=command.force)
        if veto is not None:
            raise RLWatchError(veto)
        super().check(command)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Raise the learning rate on every rank and return rank 0's report."""
        report = super().__call__(command)
        self._lower.replaced()
        return report


def handlers(
    trainer: Any, workers: Workers, checkpoints: Checkpoints, error_boundary: ErrorBoundary
) -> list[CommandHandler]:
    """Return the handlers of commands for verl's ``trainer``, except ``set-kl-coef``, pause and resume.

    ``workers`` makes remote calls to all ranks, ``checkpoints`` saves, and ``error_boundary`` is the error boundary
    that leads to the run.
    """
    lower = LowerLROnWorkers(workers)
    return [
        ResetOnWorkers(trainer, workers, checkpoints, error_boundary),
        lower,
        RaiseLROnWorkers(workers, lower, error_boundary),
        SaveCheckpoint(checkpoints.save, checkpoints.kept, error_boundary),
        Stop(stopper(trainer, checkpoints)),
    ]


class Coefficient:
    """Access to the coefficient of the KL term: in the loss (on the workers), or in the reward (in the driver)."""

    def __init__(self, trainer: Any, workers: Workers) -> None:
        self._trainer = trainer
        self._workers = workers

    def read(self) -> float:
        """Return the coefficient. Raises ``RLWatchError`` if there is no KL term."""
        if self._in_loss:
            return float(accepted(self._workers.call("kl_coef"))[0]["value"])
        return float(self._controller.value)

    def write(self, value: float) -> None:
        """Set the coefficient to ``value`` until the process ends; verl does not save it."""
        if self._in_loss:
            accepted(self._workers.call("kl_coef", value))
        else:
            self._controller.value = value

    @property
    def _in_loss(self) -> bool:
        return bool(self._trainer.config.actor_rollout_ref.actor.use_kl_loss)

    @property
    def _controller(self) -> Any:
        controller = getattr(self._trainer, "kl_ctrl_in_reward", None)
        if controller is None:
            raise RLWatchError("there is no KL term, in the loss or in the reward")
        return controller


def stopper(trainer: Any, checkpoints: Checkpoints) -> Callable[[bool], str]:
    """Return a function that ends training with the current step, because verl's loop runs while steps are left.

    Its argument is True to save a checkpoint first. It returns a message, and raises ``RLWatchError`` if this verl
    cannot be stopped so.
    """

    def stop(save: bool) -> str:
        if not hasattr(trainer, "total_training_steps"):
            raise RLWatchError("this verl does not end by total_training_steps: nothing would stop")
        if save:
            checkpoints.save()
        trainer.total_training_steps = trainer.global_steps
        return f"training ends with step {trainer.global_steps}" + (", after saving a checkpoint" if save else "")

    return stop


def merged(replies: Sequence[Reply]) -> dict[str, JSON]:
    """Return one report of a reset from the ``replies`` of all ranks, each for its own shards."""
    reports = [reply["report"] for reply in replies]
    whole = joint([str(report["fingerprint"]) for report in reports])
    return {**reports[0], "fingerprint": whole, "exact": all(r["exact"] for r in reports), "ranks": len(reports)}


# Saving of a reset reference with verl's checkpoints, which hold only the actor and the critic.

logger = logging.getLogger("rlwatch")

FOLDER = "rlwatch_reference"
"""Directory of the reference inside the actor's directory of a checkpoint, so that verl removes both together."""


class Checkpoints:
    """verl's checkpoints of one trainer, and the reference that is saved with each of them once it was reset.

    A reset belongs to the checkpoint of the step that it followed, and to all later ones. So a resume from any
    checkpoint has the reference that training had there. ``workers`` makes remote calls to all ranks,
    ``error_boundary`` is the error boundary that leads to the run.
    """

    def __init__(self, trainer: Any, workers: Workers, error_boundary: ErrorBoundary) -> None:
        self._trainer = trainer
        self._workers = workers
        self._error_boundary = error_boundary
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
        self._error_boundary.attempt("reference of a checkpoint", self._forget if self._facts is None else self._keep)

    def changed(self, command: Command, fingerprint: str) -> None:
        """Record that ``command`` has just reset the reference, which now has this ``fingerprint``."""
        step = int(self._trainer.global_steps)
        self._facts = ReferenceFacts(step, command.command_id, fingerprint, command.requested_by, command.why)
        if self._saved == self._trainer.global_steps:
            self._error_boundary.attempt("reference of a checkpoint", self._keep)

    def loaded(self) -> None:
        """Restore the reference saved with the checkpoint that verl has just loaded, if there is one."""
        self._error_boundary.attempt("reference of a checkpoint", self._restore)

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
        if self._error_boundary.run is not None:
            self._error_boundary.run.event(kind, self._trainer.global_steps, checkpoint=str(checkpoint), **body)

    @staticmethod
    def _reference_of(checkpoint: Path) -> Path:
        return checkpoint / "actor" / FOLDER

    def _folder(self, step: int) -> Path:
        return Path(str(self._trainer.config.trainer.default_local_dir)).absolute() / f"global_step_{step}"
