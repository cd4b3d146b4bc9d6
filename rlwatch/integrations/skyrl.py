"""Integration with SkyRL: what it logs, every token of its batches, and commands between its steps.

>>> from rlwatch.integrations.skyrl import watch

SkyRL steers its workers from a driver, which has each step's batch on the CPU. :func:`watch` changes the instance of
the driver's trainer and adds a callback of SkyRL's own interface.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from rlwatch.control.commands import COMMAND_KINDS, ROLLBACK
from rlwatch.control.policy import veto_reset_reference
from rlwatch.errors import RLWatchError
from rlwatch.integrations.commands import RESET, Controller, SaveCheckpoint, SetKLCoef, Stop
from rlwatch.integrations.compat import Needs, installed
from rlwatch.integrations.driven import DrivenTraining, check_trainer
from rlwatch.integrations.level import Level
from rlwatch.integrations.rollback import chosen
from rlwatch.integrations.snapshot_state import Holdings
from rlwatch.integrations.snapshots import Snapshot, SnapshotKeeper, Snapshots
from rlwatch.integrations.step_tally import BEFORE_THE_UPDATE, StepTally, StepThread, merge_workers
from rlwatch.integrations.verl.batch import pieces
from rlwatch.records import JSON, Command
from rlwatch.redaction import recordable
from rlwatch.tensors.responses import ResponseBatch, observe_responses
from rlwatch.tensors.tokens import TokenBatch

if TYPE_CHECKING:
    from rlwatch.error_boundary import ErrorBoundary
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")

NEEDS: Needs = {
    "train": (),
    "compute_advantages_and_returns": ("data",),
    "add_callback": ("callback",),
    "save_checkpoints": (),
    "update_ref_with_policy": (),
}
SETTINGS = (
    "tracker.log",
    "global_step",
    "cfg.trainer.ckpt_path",
    "cfg.trainer.project_name",
    "cfg.trainer.run_name",
    "cfg.trainer.max_training_steps",
    "cfg.trainer.max_ckpts_to_keep",
    "cfg.trainer.algorithm.kl_loss_coef",
    "cfg.trainer.algorithm.use_kl_loss",
)
"""Methods and attributes of ``RayPPOTrainer`` that are used."""
DEADLINE_S = 30.0
"""Longest time that the end of training waits for the statistics of the last steps, in seconds."""


def watch(trainer: Any, *, level: str = Level.FULL, **init_kwargs: Any) -> Run:
    """Watch a trainer of SkyRL from now on, and return the run that is recorded.

    Recorded are the rows that SkyRL's tracker gets, statistics of the tokens and responses of each step's batch before
    its update, and the exception that ends training. Commands are executed after the update of a step and before its
    weights are sent to the engines. The fully asynchronous trainer calls no callbacks, so that it executes none.

    Parameters
    ----------
    trainer
        A ``RayPPOTrainer`` or subclass, before ``train()``: override ``get_trainer`` of ``BasePPOExp``.
    level
        ``"scalars"``: the rows alone. ``"tokens"``: also tokens and responses; ``"gradients"`` means the same.
        ``"full"``: also what compares tokens with each other.
    init_kwargs
        Arguments of :func:`rlwatch.init`. Project, name, configuration and output directory are SkyRL's unless given.

    Returns
    -------
    Run
        The run that is recorded. It ends when training ends.

    Raises
    ------
    ConfigError
        If the trainer is watched already, is none of SkyRL's, or lacks what is read.
    RLWatchError
        Errors of :func:`rlwatch.init`.
    """
    chosen_level = Level.of(level)
    check_trainer(trainer, NEEDS, SETTINGS, of="SkyRL", written_for="RayPPOTrainer of SkyRL 0.3")
    driven = DrivenTraining(trainer, init_arguments(trainer.cfg, init_kwargs))
    steps = SkyRLSteps(trainer, driven, chosen_level)
    driven.after(trainer.tracker, "log", steps.logged)
    if chosen_level.includes(Level.TOKENS):
        driven.after(trainer, "compute_advantages_and_returns", steps.sampled)
    trainer.add_callback(SkyRLCallback(trainer, driven, steps))
    driven.closes(steps.close)
    driven.ends_with(trainer)
    return driven.run


def init_arguments(cfg: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of :func:`rlwatch.init` from SkyRL's configuration ``cfg``; those ``given`` take precedence."""
    place = str(cfg.trainer.ckpt_path)
    known: dict[str, Any] = {
        "project": str(cfg.trainer.project_name),
        "name": str(cfg.trainer.run_name),
        "config": recordable(cfg),
        "source": "skyrl",
        "output_dir": None if "://" in place else place,
    }
    return {**{name: value for name, value in known.items() if value is not None}, **given}


# The batch of a step, in the driver, before its update.


class SkyRLSteps:
    """Recorder of the rows and batches of a trainer; statistics are computed on a background thread.

    ``latest`` are the metrics of the batch measured last.
    """

    def __init__(self, trainer: Any, driven: DrivenTraining, level: Level) -> None:
        self.latest: Mapping[str, float] = {}
        self._trainer = trainer
        self._driven = driven
        self._full = level.includes(Level.FULL)
        self._thread = StepThread(driven.error_boundary, "rlwatch-skyrl")

    def logged(self, _result: Any, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        """Record a row that SkyRL's tracker got."""
        self._driven.record(data, step)

    def sampled(self, result: Any, data: Any) -> None:
        """Queue the statistics of a step's batch, whose advantages SkyRL scales later."""
        if self._thread.room():
            columns = {name: result.get(name) for name in COLUMNS}
            self._thread.submit(self._guarded, int(self._trainer.global_step), columns, dict(result.metadata))

    def close(self) -> None:
        """Wait for the queued steps, at most ``DEADLINE_S``."""
        self._thread.close(DEADLINE_S)

    def _guarded(self, step: int, columns: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self._driven.error_boundary.guard_background("statistics", self._measure, step, columns, about)

    def _measure(self, step: int, columns: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        batch, tally = StepColumns(columns, about), StepTally()
        tokens = batch.tokens()
        if tokens is not None:
            for piece in pieces(tokens, batch.lengths):
                tally.add_batch(piece, full=self._full)
            tally.measure()
            for of_the_loss, of_the_batch in BEFORE_THE_UPDATE.items():
                if of_the_loss in tally.stats:
                    tally.stats[of_the_batch] = tally.stats.pop(of_the_loss)
        tally.add_stats(observe_responses(batch.responses(full=self._full)))
        whole = merge_workers(step, tally, {}, None)
        self.latest = whole.metrics
        self._driven.run.log(whole.metrics, step=step)
        for spikes in whole.spikes:
            self._driven.run.log_spikes(spikes)


COLUMNS = (
    "sequences",
    "response_mask",
    "loss_mask",
    "action_log_probs",
    "base_action_log_probs",
    "rollout_logprobs",
    "advantages",
    "rewards",
)
"""Fields of SkyRL's ``TrainingInputBatch`` that are read, (B, T) each; ``sequences`` begins with the prompt."""


class StepColumns:
    """Fields of one ``TrainingInputBatch`` without padding rows; ``about`` is its metadata.

    ``lengths`` are those of the responses, tokens of the environment included.
    """

    def __init__(self, columns: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        rows = len(columns["response_mask"]) - int(about.get("pad_size", 0) or 0)
        self._columns = {name: None if x is None else x[:rows].detach() for name, x in columns.items()}
        self._inside = self._columns["response_mask"].bool()  # type: ignore[union-attr]
        self._groups = list(about.get("uids") or ())[:rows]
        last = about.get("is_last_step")
        self._final = None if last is None else list(last)[:rows]
        self.lengths: Sequence[int] = self._inside.sum(1).tolist()

    def tokens(self) -> TokenBatch | None:
        """Return the batch for token statistics, of the policy before the update; None if it has no log-probs."""
        logp = self._columns["action_log_probs"]
        if logp is None:
            return None
        own = self._own()
        return TokenBatch(
            logp=logp,
            mask=own,
            ids=self._ids(),
            advantages=self._columns["advantages"],
            ref_logp=self._columns["base_action_log_probs"],
            rollout_logp=self._columns["rollout_logprobs"],
            environment=self._inside & ~own,
        )

    def responses(self, *, full: bool) -> ResponseBatch:
        """Return the batch for response statistics; of a trajectory of several steps only the last has the reward."""
        rewards = self._columns["rewards"]
        return ResponseBatch.of(
            rewards=None if rewards is None else rewards.float().sum(1),
            scored=None if self._final is None else self._inside.new_tensor(self._final),
            groups=self._groups or None,
            lengths=self.lengths,
            ids=self._ids() if full else None,
            mask=self._own() if full else None,
        )

    def _own(self) -> Any:
        mask = self._columns["loss_mask"]
        return self._inside if mask is None else self._inside & (mask > 0)

    def _ids(self) -> Any:
        sequences = self._columns["sequences"]
        return None if sequences is None else sequences[:, -self._inside.shape[1] :]


# Commands, after the update of a step and before its weights are sent to the engines.


class SkyRLCallback:
    """Callback of SkyRL (the methods of its ``TrainingCallback``) that executes commands at the end of a step."""

    def __init__(self, trainer: Any, driven: DrivenTraining, steps: SkyRLSteps) -> None:
        self._driven = driven
        self._commands = SkyRLCommands(trainer, driven.error_boundary, steps)

    # ruff: noqa: ARG002  (the signatures are SkyRL's)
    def on_train_start(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Find the checkpoints to which a command can return."""
        self._driven.error_boundary.attempt("checkpoints", self._commands.ledger.find_saved, callback_input.global_step)

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Execute the waiting commands."""
        self._driven.error_boundary.attempt("commands", self._commands.obey, callback_input.global_step, control)

    def on_save(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Note a checkpoint."""
        self._driven.error_boundary.attempt("checkpoints", self._commands.ledger.saved, callback_input.global_step)

    def on_train_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Do nothing: the run ends when ``train()`` returns."""

    on_epoch_start = on_epoch_end = on_step_start = on_eval_start = on_eval_end = on_log = on_train_end


class SkyRLCommands:
    """Executor of commands: save a checkpoint, return to one, stop, pause, change the KL coefficient and the learning
    rate, reset the reference.
    """

    def __init__(self, trainer: Any, error_boundary: ErrorBoundary, steps: SkyRLSteps) -> None:
        self._trainer = trainer
        self._control: Any = None
        self.ledger = CheckpointLedger(str(trainer.cfg.trainer.ckpt_path), error_boundary)
        self._controller = Controller(
            error_boundary,
            [
                SaveCheckpoint(self._save, self._kept, error_boundary),
                Stop(self._stop),
                SetKLCoef(self._kl_coef, self._set_kl_coef, error_boundary),
                RollbackToCheckpoint(trainer, self.ledger),
                LowerLRInWorkers(trainer),
                ResetInWorkers(trainer, error_boundary),
            ],
            latest=lambda: steps.latest,
        )

    def obey(self, step: int, control: Any) -> None:
        """Execute the waiting commands after ``step``; ``control`` is SkyRL's ``TrainingControl``."""
        self._control = control
        self._controller.obey(step)

    def _save(self) -> str:
        self._control.should_save = True
        return f"a checkpoint is saved under {self._trainer.cfg.trainer.ckpt_path} as soon as this step has ended"

    def _kept(self) -> int | None:
        limit = int(self._trainer.cfg.trainer.max_ckpts_to_keep)
        return limit if limit > 0 else None

    def _stop(self, save: bool) -> str:
        self._trainer.cfg.trainer.max_training_steps = int(self._trainer.global_step)
        return f"training ends with step {self._trainer.global_step}" + (f"; {self._save()}" if save else "")

    def _kl_coef(self) -> float:
        algorithm, controller = self._trainer.cfg.trainer.algorithm, self._trainer.reward_kl_controller
        if controller is not None:
            return float(controller.value)
        if not algorithm.use_kl_loss:
            raise RLWatchError("there is no KL term: neither use_kl_loss nor use_kl_in_reward is set")
        return float(algorithm.kl_loss_coef)

    def _set_kl_coef(self, value: float) -> None:
        controller = self._trainer.reward_kl_controller
        if controller is not None:
            controller.value = value
            return
        self._trainer.dispatch.set_algorithm_config("policy", kl_loss_coef=value)
        self._trainer.cfg.trainer.algorithm.kl_loss_coef = value


class CheckpointLedger(SnapshotKeeper):
    """SkyRL's checkpoints in ``where``, as the states to which a command can return, and which of them are good."""

    def __init__(self, where: str, error_boundary: ErrorBoundary) -> None:
        super().__init__(Snapshots(), _elsewhere, error_boundary)
        self._where = where

    def saved(self, step: int) -> None:
        """Add the checkpoint of ``step``, which has just been saved."""
        self.forget_after(step - 1)
        self.taken.append(Snapshot(step, None))

    def find_saved(self, step: int) -> None:
        """Add the checkpoints of earlier steps that an earlier attempt left, up to ``step``; they are not judged."""
        names = [path.name for path in Path(self._where).glob("global_step_*")] if self._local else []
        steps = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"global_step_(\d+)", name)))
        self.taken += [Snapshot(one, None) for one in steps if one <= step]

    def path(self, step: int) -> str:
        """Return the directory of the checkpoint of ``step``. Raises ``RLWatchError`` if it is gone."""
        place = f"{self._where.rstrip('/')}/global_step_{step}"
        if self._local and not Path(place, "policy").is_dir():
            raise RLWatchError(f"{place} is gone: SkyRL keeps max_ckpts_to_keep checkpoints")
        return place

    @property
    def _local(self) -> bool:
        return "://" not in self._where

    @override
    def _write_good(self) -> None:
        """Do nothing, because SkyRL writes checkpoints."""


def _elsewhere() -> Holdings:
    raise RLWatchError("weights and optimizer are with SkyRL's workers")


class RollbackToCheckpoint:
    """Handler of the command ``rollback``: the workers load a checkpoint of SkyRL, weights, optimizer and schedule.

    SkyRL sends the weights to its engines right after commands, so that the next batch is sampled with them. The step
    counter, the data and the reference stay as they are.
    """

    kind: str = ROLLBACK

    def __init__(self, trainer: Any, ledger: CheckpointLedger) -> None:
        self._trainer = trainer
        self._ledger = ledger

    def last_good(self) -> int | None:
        """Return the step of the newest checkpoint that was judged good, or None."""
        return self._ledger.newest_good()

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if there is no such checkpoint."""
        self._ledger.path(self._chosen(command).step)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Load the checkpoint in all workers and return a report with a ``summary``."""
        snapshot, step = self._chosen(command), int(self._trainer.global_step)
        place, models = self._ledger.path(snapshot.step), ["policy"]
        models += ["critic"] if self._trainer.has_critic else []
        for model in models:
            self._trainer.dispatch.load_checkpoint(model, f"{place}/{model}")
        self._ledger.forget_after(snapshot.step)
        known = {True: "good", False: snapshot.why_not, None: "not judged"}[snapshot.good]
        summary = (
            f"{' and '.join(models)} are those of {place} ({known}); undone: steps {snapshot.step + 1} to {step}; the "
            "engines get the weights before they sample"
        )
        return {"to_step": snapshot.step, "from_step": step, "good": snapshot.good, "summary": summary}

    def _chosen(self, command: Command) -> Snapshot:
        return chosen(self._ledger, command, int(self._trainer.global_step), None)


class LowerLRInWorkers:
    """Handler of the command ``lower-lr``: before each update the workers' rate is scaled, because the schedule sets it
    again after each.
    """

    kind: str = "lower-lr"

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._scale = 1.0
        self._until = 0
        self._base = 0.0
        self._set: float | None = None
        self._wrapped = False

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if the rate cannot be read or set."""
        if COMMAND_KINDS[self.kind].read(command.args)["freeze"] == "yes":
            raise RLWatchError("SkyRL's schedule runs in its workers and cannot be frozen; leave freeze out")
        if not hasattr(self._trainer.dispatch, "set_lr"):
            raise RLWatchError(f"SkyRL {installed('skyrl')} has no dispatch.set_lr")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Scale the rate of all following updates and return a report with the command that reverts it."""
        args, before = COMMAND_KINDS[self.kind].read(command.args), self._scale
        self._scale, until = float(args["scale"]), args["until"]
        self._until = until if isinstance(until, int) else 0
        if not self._wrapped:
            self._wrapped = True
            self._wrap(self._trainer.dispatch)
        limit = f" until step {self._until}" if self._until else ""
        return {
            "before": before,
            "after": self._scale,
            "until": self._until or None,
            "summary": f"learning rate {before:g} -> {self._scale:g} of the schedule's, from the next update on{limit}",
            "undo": {"kind": self.kind, "args": {"scale": before}},
        }

    def due(self, step: int) -> Command | None:
        """Return the command that restores the schedule if its limit is at or before ``step``, else None."""
        if not 0 < self._until <= step:
            return None
        why = f"lowered until step {self._until}"
        return Command("", "", self.kind, {"scale": 1.0}, requested_by="rlwatch", why=why)

    def _wrap(self, dispatch: Any) -> None:
        original = dispatch.optim_step
        boundary = self._trainer.rlwatch.error_boundary

        def optim_step(model: str, *args: Any, **kwargs: Any) -> Any:
            if model == "policy":
                boundary.attempt("learning rate", self._apply, dispatch)
            return original(model, *args, **kwargs)

        dispatch.optim_step = optim_step

    def _apply(self, dispatch: Any) -> None:
        """Scale the rate that the schedule has set; a rate that it did not set again is scaled already."""
        if self._scale == 1.0 and self._set is None:
            return
        import ray

        group = self._trainer.policy_model
        now = ray.get(group.async_run_ray_method("pass_through", "get_lr"))[0]
        if now is None:
            return
        self._base = self._base if now == self._set else float(now)
        self._set = None if self._scale == 1.0 else self._base * self._scale
        dispatch.set_lr("policy", self._base * self._scale)


class ResetInWorkers:
    """Handler of the command ``reset-reference``: SkyRL saves the policy and loads it as the reference, as with
    ``update_ref_every_epoch``.
    """

    kind: str = RESET

    def __init__(self, trainer: Any, error_boundary: ErrorBoundary) -> None:
        self._trainer = trainer
        self._error_boundary = error_boundary

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if there is no reference, or during a collapse unless ``command`` is forced."""
        if self._trainer.ref_model is None:
            raise RLWatchError("there is no reference: neither use_kl_loss nor use_kl_in_reward is set")
        if command.args.get("optimizer") == "clear":
            raise RLWatchError("SkyRL's optimizer is in its workers and cannot be cleared; use optimizer=keep")
        run = self._error_boundary.run
        veto = None if run is None else veto_reset_reference(run.health(), force=command.force)
        if veto is not None:
            raise RLWatchError(veto)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Reset the reference and return a report with a ``summary``."""
        self._trainer.update_ref_with_policy()
        summary = "reference = policy, loaded from a copy that SkyRL saved and removed; optimizer state kept"
        return {"optimizer": "keep", "forced": command.force, "summary": summary}
