"""Commands to a verl training: each is checked and executed on every worker, or in the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlwatch.control.policy import veto_reset_reference
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.commands import SaveCheckpoint, Stop
from rlwatch.integrations.verl.checkpoints import Checkpoints
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
    """Handler of the command ``reset-reference`` in verl, at a boundary where no log-probs of the reference wait to be
    used.

    ``checkpoints`` saves the new reference. ``seam`` is the error boundary that leads to the run's health, for the veto
    during a collapse.
    """

    def __init__(self, trainer: Any, workers: Workers, checkpoints: Checkpoints, seam: ErrorBoundary) -> None:
        super().__init__("reset-reference", workers)
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._seam = seam

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if there is no reference, during a collapse, or with the reason of any rank that
        refuses.
        """
        trainer, run = self._trainer, self._seam.run
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
        """Reset the reference on every rank, and add it to the checkpoint of this step, if there is one. Return a
        report.
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


def handlers(trainer: Any, workers: Workers, checkpoints: Checkpoints, seam: ErrorBoundary) -> list[CommandHandler]:
    """Return the handlers of commands for verl's ``trainer``, except ``set-kl-coef``, pause and resume."""
    return [
        ResetOnWorkers(trainer, workers, checkpoints, seam),
        LowerLROnWorkers(workers),
        SaveCheckpoint(checkpoints.save, checkpoints.kept, seam),
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
