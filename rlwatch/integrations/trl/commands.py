"""Commands to a TRL trainer, executed at steps where no pending rollout depends on the old state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.checkpoints import KeptReference, KeptSettings
from rlwatch.integrations.commands import Controller, SetKLCoef
from rlwatch.integrations.ranks import Ranks
from rlwatch.integrations.reference import Anchored, ResetReference
from rlwatch.integrations.rollback import Rollback, RollbackMeans
from rlwatch.integrations.snapshots import SnapshotKeeper, TakeTogether
from rlwatch.integrations.trainer_settings import Adjust, Setting, SyncWeights, Values
from rlwatch.integrations.transformers.commands import TrainerLoop
from rlwatch.integrations.transformers.compat import ResumedFrom, fsdp2, sharding_engine
from rlwatch.ports import CommandHandler
from rlwatch.records import JSON, Command

TO_SAMPLE_ANEW: Mapping[str, Any] = {"_buffered_inputs": None, "_last_loaded_step": -1}
"""Attribute of TRL's trainers -> the value with which it samples anew, and sends weights to vLLM, at the next step."""
OFF = "off"
"""Mode of the importance-sampling correction in which nothing is corrected."""
NO_KL_TERM = "there is no reference: beta is 0, so the loss has no KL term"
NO_REFERENCE = "beta was 0 when the trainer was made, so no reference was loaded and there is no KL to weigh"


class Control:
    """Executor of the run's commands in TRL, at steps after which new rollouts are generated.

    Between such steps TRL still trains on rollouts whose reference log-probs are buffered: a reset there would mix two
    references or discard the rollouts. ``latest`` returns the newest metrics, ``ranks`` are the ranks of the run,
    ``snapshots`` takes snapshots (None: off).
    """

    def __init__(
        self,
        trainer: Any,
        error_boundary: ErrorBoundary,
        latest: Callable[[], Mapping[str, float]],
        ranks: Ranks | None = None,
        *,
        snapshots: SnapshotKeeper | None = None,
    ) -> None:
        self.loop = TrainerLoop()
        self._error_boundary = error_boundary
        self._snapshots = snapshots
        self.kept = KeptReference(lambda: anchored(trainer), error_boundary, self._writes)
        self._trainer = trainer
        coefficient = SetKLCoef(lambda: kl_coef(trainer), lambda value: set_kl_coef(trainer, value), error_boundary)
        adjusts = [Adjust(kind, setting) for kind, setting in settings_of(trainer).items()]
        adjusts.append(self.loop.clipping())
        self._settings = KeptSettings([coefficient, *adjusts], error_boundary, self._writes)
        self._resumed = ResumedFrom(trainer, error_boundary)
        handlers: list[CommandHandler] = [
            ResetReference(lambda: anchored(trainer), error_boundary, self._reset_done),
            coefficient,
            Rollback(snapshots, RollbackMeans(self.loop.step, self.loop.paced, lambda _step: drop_rollouts(trainer))),
            *adjusts,
            SyncWeights(lambda: synced(trainer)),
            *self.loop.handlers(error_boundary, latest),
        ]
        handlers += [] if snapshots is None else [TakeTogether(snapshots)]
        self._controller = Controller(error_boundary, handlers, ranks, latest)

    def obey(self, step: int) -> None:
        """Execute waiting commands after ``step``, if new rollouts are generated next.

        Take a snapshot if one is due.
        """
        if self.at_boundary():
            self._controller.obey(step)
            if self._snapshots is not None:
                self._error_boundary.attempt("snapshot", self._snapshots.look, step)

    def begin(self, step: int) -> None:
        """Restore the reference and the settings from the checkpoint that training resumes from, if any, and take the
        first snapshot.

        ``step`` is the step at which training begins.
        """
        checkpoint = self._resumed.checkpoint
        if checkpoint is not None:
            self.kept.restore(checkpoint, self._controller, step)
            self._settings.restore(checkpoint, self._controller, step)
        if self._snapshots is not None:
            self._error_boundary.attempt("snapshot", self._snapshots.begin, step)
        self._controller.begin(step)

    def saved(self, step: int) -> None:
        """Add a reset reference and changed settings to the checkpoint of ``step``, which the trainer has written."""
        checkpoint = Path(self._trainer.args.output_dir) / f"checkpoint-{step}"
        self.kept.save(checkpoint, self._controller, step)
        self._settings.save(checkpoint)

    def _writes(self) -> bool:
        return bool(self._trainer.args.should_save)

    def _reset_done(self, command: Command, report: Mapping[str, JSON]) -> None:
        self.kept.reset_done(command, report, int(self._trainer.state.global_step))

    def at_boundary(self) -> bool:
        """Return True if the trainer generates new rollouts at the next micro-batch."""
        trainer = self._trainer
        every = trainer.args.steps_per_generation * trainer.num_iterations
        return bool(trainer._step % every == 0)  # noqa: SLF001


def steps_of_generation(trainer: Any) -> int:
    """Return the number of optimizer steps that ``trainer`` trains on the rollouts of one generation."""
    micro_batches = trainer.args.steps_per_generation * trainer.num_iterations
    return max(1, int(micro_batches // trainer.args.gradient_accumulation_steps))


def anchored(trainer: Any) -> Anchored:
    """Return the trainer's policy, reference and optimizer.

    Raises ``RLWatchError`` with the reason if the reference cannot be reset.
    """
    engine = sharding_engine(trainer)
    if engine is not None and not fsdp2(trainer):
        raise RLWatchError(f"weights are sharded by {engine}, where a reset is not supported (it is with FSDP2)")
    if trainer.ref_model is None and not getattr(trainer, "beta", 0.0):
        raise RLWatchError(NO_KL_TERM)
    return Anchored(trainer.model, trainer.ref_model, [trainer.optimizer])


def drop_rollouts(trainer: Any) -> str:
    """Make the trainer sample anew, with its current weights; return a message, "" without vLLM.

    The trainer forgets the rollouts that it buffers, and the step at which vLLM loaded the weights.
    """
    for name, value in TO_SAMPLE_ANEW.items():
        if hasattr(trainer, name):
            setattr(trainer, name, value)
    return "vLLM loads the weights again before it samples" if getattr(trainer, "use_vllm", False) else ""


def kl_coef(trainer: Any) -> float:
    """Return the trainer's current KL coefficient. Raises ``RLWatchError`` with the reason if it cannot be changed."""
    if not trainer.args.beta:
        raise RLWatchError(NO_REFERENCE)
    return float(trainer.beta)


def set_kl_coef(trainer: Any, value: float) -> None:
    """Set the trainer's KL coefficient to ``value``.

    TRL reads it for every batch; older versions keep a copy in the fused loss.
    """
    trainer.beta = value
    fused = getattr(trainer, "liger_grpo_loss", None)
    if fused is not None:
        fused.beta = value


def synced(trainer: Any) -> str:
    """Make the trainer send its weights to vLLM before it samples; return a message.

    Raises ``RLWatchError`` without vLLM.
    """
    if not getattr(trainer, "use_vllm", False):
        raise RLWatchError("there is no rollout engine: this trainer samples with the model that it trains")
    return drop_rollouts(trainer)


# Settings that TRL reads for every batch.


def settings_of(trainer: Any) -> dict[str, Setting]:
    """Return the settings that can be changed while ``trainer`` runs, by the command that changes each."""
    return {
        "set-clip": Setting(lambda: clip_range(trainer), lambda values: set_clip_range(trainer, values)),
        "set-entropy-coef": Setting(lambda: entropy_coef(trainer), lambda values: set_entropy_coef(trainer, values)),
        "set-is-correction": Setting(lambda: correction(trainer), lambda values: set_correction(trainer, values)),
    }


def clip_range(trainer: Any) -> Values:
    """Return the distances from 1 at which the trainer clips importance ratios, as ``{"low": ..., "high": ...}``."""
    return {"low": float(trainer.epsilon_low), "high": float(trainer.epsilon_high)}


def set_clip_range(trainer: Any, values: Values) -> None:
    """Set the distances from 1 at which the trainer clips importance ratios, also in the fused loss, which keeps a
    copy.

    ``values`` has ``low`` and ``high``; ``high`` None means the same as ``low``.
    """
    low = values["low"]
    high = low if values["high"] is None else values["high"]
    fused = getattr(trainer, "liger_grpo_loss", None)
    for holder in (trainer, fused):
        if holder is not None:
            holder.epsilon_low, holder.epsilon_high = low, high


def entropy_coef(trainer: Any) -> Values:
    """Return the coefficient of the entropy bonus, as ``{"value": ...}``.

    Raises ``RLWatchError`` if the loss has no entropy bonus, or if the coefficient is adaptive.
    """
    if getattr(trainer, "use_adaptive_entropy", False):
        raise RLWatchError("the coefficient is adaptive (use_adaptive_entropy): the trainer would set it again")
    if not getattr(trainer, "_entropy_bonus_enabled", False):
        raise RLWatchError("the loss has no entropy bonus: entropy_coef was 0 when the trainer was made")
    return {"value": float(trainer.entropy_coef)}


def set_entropy_coef(trainer: Any, values: Values) -> None:
    """Set the coefficient of the entropy bonus to ``values["value"]``."""
    trainer.entropy_coef = values["value"]


def correction(trainer: Any) -> Values:
    """Return the mode and the cap of the correction for the mismatch between trainer and vLLM.

    Raises ``RLWatchError`` if the trainer does not sample with vLLM, or has no correction.
    """
    if not getattr(trainer, "use_vllm", False):
        raise RLWatchError("there is no rollout engine to correct for: the trainer samples with the model it trains")
    if not hasattr(trainer, "vllm_importance_sampling_mode"):
        raise RLWatchError(f"{type(trainer).__name__} has no correction of importance ratios")
    mode = trainer.vllm_importance_sampling_mode if trainer.vllm_importance_sampling_correction else OFF
    return {"mode": mode, "cap": trainer.vllm_importance_sampling_clip_max}


def set_correction(trainer: Any, values: Values) -> None:
    """Set ``mode`` and ``cap`` of the correction for the mismatch between trainer and vLLM, from the next batch on.

    A ``cap`` of None leaves the cap as it is.
    """
    trainer.vllm_importance_sampling_correction = values["mode"] != OFF
    if values["mode"] != OFF:
        trainer.vllm_importance_sampling_mode = values["mode"]
    if values["cap"] is not None:
        trainer.vllm_importance_sampling_clip_max = values["cap"]
