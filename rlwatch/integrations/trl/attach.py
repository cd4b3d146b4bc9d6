"""``watch(trainer)`` for a TRL trainer: all its measurements and commands."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import ConfigError
from rlwatch.integrations.canaries import Canaries, Canary, CanaryScorer
from rlwatch.integrations.completions import KeepCompletions
from rlwatch.integrations.held_updates import REWARD
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import Localise, localiser_of
from rlwatch.integrations.ranks import RunRanks
from rlwatch.integrations.snapshots import SnapshotKeeper, Snapshots, checked, keeper_of
from rlwatch.integrations.stages import tap_stages
from rlwatch.integrations.step_tally import Decode
from rlwatch.integrations.trainer_settings import SETTING
from rlwatch.integrations.transformers.attach import RLWatchCallback, StepCallback, refuse_twice, report_crashes, tap
from rlwatch.integrations.transformers.commands import holdings
from rlwatch.integrations.trl.batch import Sampled
from rlwatch.integrations.trl.commands import Control, steps_of_generation
from rlwatch.integrations.trl.localise import wished
from rlwatch.integrations.trl.swift_taps import SwiftTaps, lacks
from rlwatch.integrations.trl.taps import TrlTaps, obstacle
from rlwatch.integrations.trl.verifiers import canary_scores
from rlwatch.integrations.trl.verifiers import checked as checked_canaries
from rlwatch.integrations.weight_sync import EVENT
from rlwatch.integrations.weight_sync import TAP as SYNC_TAP

if TYPE_CHECKING:
    from rlwatch.run import Run


logger = logging.getLogger("rlwatch")


def watch(
    trainer: Any,
    *,
    run: Run | None = None,
    level: str = Level.FULL,
    text: bool = False,
    completions: bool | KeepCompletions = False,
    localise: bool | Localise | None = None,
    snapshots: bool | Snapshots = False,
    canaries: Sequence[Canary] | Canaries | None = None,
    **init_kwargs: Any,
) -> Run:
    """Watch a TRL trainer from now on, and return the run that is recorded.

    Recorded at every step are the scalars that the trainer logs, statistics of tokens, gradients per layer, non-finite
    counts and the most extreme tokens; also the exception that ends training. Commands are executed. Training is
    bit-identical with and without it. A trainer with unknown internals is watched like any ``Trainer``
    (:func:`rlwatch.integrations.transformers.watch`), with one warning. With several ranks every rank calls this, and
    their measurements are merged.

    Parameters
    ----------
    trainer
        A trainer that has not begun to train. Its instance is changed, its class is not.
    run
        A run to record into, which the caller ends. By default one is created now and finished with training.
    level
        ``"scalars"``, ``"tokens"``, ``"gradients"`` or ``"full"``: see :class:`~rlwatch.integrations.level.Level`.
    text
        True to keep the text of the extreme tokens with their ids.
    completions
        Whole completions to keep as text: True for a few, or settings
        (:class:`~rlwatch.integrations.completions.KeepCompletions`). Without this and ``text`` no text leaves the
        trainer, only measures of it.
    localise
        Report the tokens that cause a spike of the gradient or a gradient that is not finite: True, False, or settings
        (:class:`~rlwatch.integrations.localising.Localise`). On by default with level ``"full"``, unless weights are
        sharded over ranks. It waits for the device once a step, for the norm.
    snapshots
        Snapshots of the trained weights and the optimizer, to which a command can return: True, False, or settings
        (:class:`~rlwatch.integrations.snapshots.Snapshots`).
    canaries
        Answers that are known to be right or wrong, which the trainer's reward functions score at intervals, outside
        the batch: a list of :class:`~rlwatch.integrations.canaries.Canary`, or
        :class:`~rlwatch.integrations.canaries.Canaries` with the interval. Each is scored once now.
    init_kwargs
        Arguments of :func:`rlwatch.init`. Source, configuration, output directory and rank come from the trainer unless
        given.

    Returns
    -------
    Run
        The run that is recorded.

    Raises
    ------
    ConfigError
        If the trainer is watched already, or an argument is not valid.
    RLWatchError
        Errors of :func:`rlwatch.init`, before anything was changed.
    """
    refuse_twice(trainer)
    chosen, keep = Level.of(level), KeepCompletions.of(completions)
    wish, kept = wished(localise, chosen, trainer), Snapshots.of(snapshots)
    checked(kept, partial(holdings, trainer))
    scorer = _scorer(trainer, chosen, Canaries.of(canaries))
    scalars = RLWatchCallback(run, **init_kwargs)
    recording = scalars.begin(trainer.args, trainer.model, watched=chosen.includes(Level.TOKENS))
    steps = _steps(trainer, scalars.error_boundary, chosen, Wishes(keep, wish, kept, scorer, text=text))
    tap_stages(trainer, scalars.error_boundary)
    trainer.add_callback(scalars)
    report_crashes(trainer, scalars, steps)
    return recording


def _scorer(trainer: Any, level: Level, wish: Canaries | None) -> CanaryScorer | None:
    """Return the scorer of canaries, on the process that records. Raises if rewards cannot be tapped."""
    if wish is None:
        return None
    checked_canaries(wish)
    reason = obstacle(trainer) if level.includes(Level.TOKENS) else 'they need at least level="tokens"'
    if reason is not None:
        raise ConfigError(f"canaries: {reason}")
    return CanaryScorer(wish, canary_scores(trainer)) if trainer.args.process_index == 0 else None


@dataclass(frozen=True, slots=True)
class Wishes:
    """Settings of further records: text of completions and extreme tokens, localised spikes, snapshots, canaries.

    A setting of None switches the record off.
    """

    keep: KeepCompletions | None
    localise: Localise | None
    snapshots: Snapshots | None
    canaries: CanaryScorer | None
    text: bool


def _steps(trainer: Any, error_boundary: ErrorBoundary, level: Level, wishes: Wishes) -> StepCallback:
    reason = obstacle(trainer)
    if reason is None:
        return _tap(trainer, error_boundary, level, wishes)
    if lacks(trainer) is None:
        return _tap(trainer, error_boundary, level, replace(wishes, localise=None), SwiftTaps)
    logger.warning("rlwatch records the log, the raw loss and gradients, but nothing per token: %s", reason)
    return tap(trainer, error_boundary, level, wishes.snapshots)


def _tap(
    trainer: Any, error_boundary: ErrorBoundary, level: Level, wishes: Wishes, readers: type[TrlTaps] = TrlTaps
) -> RolloutStepCallback:
    """Attach the hooks. Their callback precedes that of the logged scalars, so that a step's tensors precede its log
    row.
    """
    sampled = Sampled(
        wishes.keep,
        measure=level.includes(Level.FULL),
        tokenizer=_tokenizer(trainer.processing_class),
        rank=trainer.args.process_index,
    )
    decode = _decoder(trainer.processing_class) if wishes.text else None
    localiser = localiser_of(error_boundary, wishes.localise, decode)
    taps = readers(trainer, error_boundary, level, sampled, localiser, canaries=wishes.canaries)
    if level.includes(Level.TOKENS):
        taps.attach()
    keeper = keeper_of(wishes.snapshots, partial(holdings, trainer), error_boundary)
    steps = RolloutStepCallback(trainer, taps, error_boundary, decode, keeper)
    trainer.add_callback(steps)
    if trainer.args.logging_nan_inf_filter:
        logger.info("the trainer hides NaN losses from its log (logging_nan_inf_filter); loss/raw is read from the tap")
    return steps


def _tokenizer(processing_class: Any) -> Any:
    """Return the tokenizer, also from a processor."""
    return getattr(processing_class, "tokenizer", processing_class)


def _decoder(processing_class: Any) -> Any:
    tokenizer = _tokenizer(processing_class)
    return lambda ids: str(tokenizer.decode(list(ids)))


# The end of a step in TRL: commands wait until the next generation begins, and TRL may change the reference itself.


class RolloutStepCallback(StepCallback):
    """Callback for GRPO and RLOO that records each step and executes commands.

    It waits for the device only before the rollouts. ``taps`` measure the trainer, ``error_boundary`` is the error
    boundary that leads to the run. ``decode`` converts token ids to text. ``snapshots`` takes snapshots (None: off).
    """

    def __init__(
        self,
        trainer: Any,
        taps: TrlTaps,
        error_boundary: ErrorBoundary,
        decode: Decode | None = None,
        snapshots: SnapshotKeeper | None = None,
    ) -> None:
        self._orders = Control(trainer, error_boundary, self.newest, RunRanks(error_boundary), snapshots=snapshots)
        self._trl_taps = taps
        self._reused = 0
        super().__init__(taps, error_boundary, lambda _latest: self._orders, decode)

    @override
    def deliver(self, *, wait: bool = True) -> None:
        before = self.latest
        super().deliver(wait=wait)
        if self.latest is not before:
            self._trl_taps.delivered(self.latest)
            self.error_boundary.attempt(SYNC_TAP, self._note_weights)

    @override
    def newest_after(self, measured: dict[str, float]) -> dict[str, float]:
        """Add the reward of the generation that this step trains on, if an earlier step was the first to train on it.

        Commands are executed before a generation, so after its last step.
        """
        reward = self.latest.get(REWARD)
        if REWARD in measured or reward is None:
            self._reused = 0
            return measured
        self._reused += 1
        return {**measured, REWARD: reward} if self._reused < steps_of_generation(self._trl_taps.trainer) else measured

    def _note_weights(self) -> None:
        """Record an event when the engine's weights begin or cease to equal the trainer's."""
        run, step = self.error_boundary.run, int(self._trl_taps.trainer.state.global_step)
        changed = self._trl_taps.comparison.changed(step, self.latest)
        if changed is not None and run is not None:
            run.event(EVENT, step, **changed)

    @override
    def noticed(self, args: Any, step: int) -> None:
        """Record changed settings at the end of ``step``, and changes of the reference by TRL's ``sync_ref_model``,
        which reset the KL.
        """
        run = self.error_boundary.run
        for change in (
            (self.error_boundary.attempt("settings", self._trl_taps.changed) or []) if run is not None else []
        ):
            run.event(SETTING, step, **change)
        if run is not None and getattr(args, "sync_ref_model", False) and step % args.ref_model_sync_steps == 0:
            mixup = args.ref_model_mixup_alpha
            run.event("reference_reset", step, by="SyncRefModelCallback", optimizer="keep", mixup=mixup)
            self._orders.kept.moved()
