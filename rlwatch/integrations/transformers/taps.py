"""Hooks (taps) on one Hugging Face trainer that measure it: closures set on the *instance*, not on its class.

Every closure calls the method that it replaces exactly once, with unchanged arguments, and returns its result. The
measurement comes after the call, except that gradients are read just before they are clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlwatch.clipping import Clipped
from rlwatch.error_boundary import ErrorBoundary, Tapped
from rlwatch.integrations.compat import lacking, vocab_size_of
from rlwatch.integrations.level import Level
from rlwatch.integrations.step_tally import StepTally
from rlwatch.integrations.trainer_settings import rates
from rlwatch.integrations.transformers.compat import CLIP, HIDDEN, deepspeed_engine, fsdp2, sharding_engine, unseen
from rlwatch.integrations.transformers.layer_clipping import clipping_of
from rlwatch.tensors.grad_agreement import GradientTrail
from rlwatch.tensors.gradnorm import GradNorms, named_weights
from rlwatch.tensors.megatron import model_norms
from rlwatch.tensors.mergeable import Latest, Mean, RankMean, Stats, Total, nonfinite
from rlwatch.tensors.weight_gap import UpdateSample

UPDATE_TAP = "size of the update"
AGREEMENT_TAP = "gradients of micro-batches"


class TrainerTaps:
    """Hooks that measure a ``Trainer`` up to ``level``, into the tally of the current step.

    ``error_boundary`` is the error boundary that leads to the run and contains errors of the measurement.
    """

    def __init__(self, trainer: Any, error_boundary: ErrorBoundary, level: Level = Level.FULL) -> None:
        self.trainer = trainer
        self.tally = StepTally()
        self._error_boundary = error_boundary
        self._level = level
        self._clipped = False
        self._reads_gradients = False
        self._wraps_late = False
        self._engine: Any = None
        self._update: UpdateSample | None = None
        self._updates = 0
        self._trail = GradientTrail()

    def tap_loss(self) -> None:
        """Wrap ``training_step`` to read the loss of every micro-batch, before the trainer's NaN filter."""
        self.wrap("training_step", self._after_step)

    def tap_gradients(self) -> None:
        """Wrap the trainer's clipping to read gradients before they are clipped, if the level includes gradients."""
        if self._level.includes(Level.GRADIENTS):
            self._reads_gradients = True
            if lacking(self.trainer, CLIP) is None:
                self._wrap_clip(self.trainer, "_clip_grad_norm")
            else:
                self._wraps_late = True

    def take(self) -> StepTally:
        """Return the measurements of the step, with the metrics that every step has, and begin an empty collection."""
        self._error_boundary.attempt(UPDATE_TAP, self._measure_update)
        self._trail.forget()
        tally, self.tally = self.tally, StepTally()
        self._clipped = False
        vocabulary = vocab_size_of(self.trainer.model)
        if vocabulary is not None:
            tally.add_number("policy/vocab_size", vocabulary)
        return tally

    def discard(self) -> None:
        """Reset the measurements at the start of training, and wrap what did not exist before.

        The accelerator is wrapped only now, after layer clipping has wrapped it, so that gradients are read before
        layers are clipped.
        """
        self.tally, self._clipped, self._update = StepTally(), False, None
        self._trail.forget()
        if self._wraps_late:
            self._wraps_late = False
            self._wrap_clip(self.trainer.accelerator, "clip_grad_norm_")
        engine = deepspeed_engine(self.trainer)
        if engine is not None and engine is not self._engine:
            self._engine = engine
            if unseen(self.trainer) is None:
                self._wrap_engine(engine)

    def read_rates(self, optimizer: Any) -> None:
        """Read the learning rates before ``optimizer`` steps.

        The trainer logs those that the scheduler sets afterwards. Also samples the weights before the step, to measure
        the size of the update.
        """
        for name, rate in rates(optimizer).items():
            self.tally.numbers[name] = [rate]
        if self._reads_gradients and self.live:
            self._error_boundary.attempt(UPDATE_TAP, self._sample_update)

    def _sample_update(self) -> None:
        """Sample the weights before the step, as far as they count on this rank, unless an engine hides them."""
        run = self._error_boundary.run
        if run is not None and (sharding_engine(self.trainer) is None or fsdp2(self.trainer)):
            self._updates += 1
            named = named_weights(self.trainer.model)
            self._update = UpdateSample.of(named, self._updates, rank=run.rank)

    def _measure_update(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            with torch.no_grad():
                self.tally.add_stats(update.stats())

    def look_at_gradients(self) -> None:
        """Read the gradients that the micro-batches so far have added up in ``.grad``, to measure how well they agree.

        Call it between a forward pass of the loss and its backward pass.
        """
        self._error_boundary.attempt(AGREEMENT_TAP, self._look)

    def _look(self) -> None:
        if self._reads_gradients and sharding_engine(self.trainer) is None:
            with torch.no_grad():
                self._trail.look(self.trainer.model.parameters(), self._updates)

    def _agree(self) -> None:
        """Measure how the micro-batches' gradients agree; over several ranks the last is a mean over them, left out."""
        if getattr(self.trainer.accelerator, "num_processes", 1) == 1:
            self._look()
        with torch.no_grad():
            self.tally.add_stats(self._trail.stats())
        self._trail.forget()

    def gradients_if_unclipped(self) -> None:
        """Read gradients before the optimizer steps if the trainer does not clip, and so computes no norm."""
        if self._clipped:
            return
        if self._reads_gradients and self.live:
            self._add_gradients(self._read_gradients(self.trainer.model), None)
        self.complete(None)

    def complete(self, total: Tensor | float | None) -> None:
        """Handle the complete gradient before the optimizer uses it; does nothing here, subclasses override it.

        ``total`` is the gradient norm before clipping, if known. Raises nothing, because it is called in the middle of
        training.
        """

    @property
    def live(self) -> bool:
        """Return True while the model trains (not evaluates) in a process that measures, and measured steps are
        recorded.
        """
        return bool(self._error_boundary.attempt("mode of the trainer", self._looks))

    def _looks(self) -> bool:
        run = self._error_boundary.run
        return (
            run is not None
            and run.measures
            and self.trainer.model.training
            and self._error_boundary.works("on_step_end")
        )

    @property
    def _scales_loss(self) -> bool:
        """Return True for float16: gradients are scaled until they are clipped, and may overflow."""
        return getattr(self.trainer.accelerator, "scaler", None) is not None

    def wrap(self, name: str, look: Callable[..., None]) -> None:
        """Replace the trainer's method ``name`` by a wrapper that calls ``look`` with the result and the arguments of
        each call.
        """
        original = getattr(self.trainer, name)

        def tapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.live:
                self._error_boundary.attempt(name, look, result, *args, **kwargs)
            return result

        setattr(self.trainer, name, Tapped(original, tapped))

    def _wrap_clip(self, owner: Any, name: str) -> None:
        """Read gradients before the original clips them in place, and its norm afterwards."""
        original = getattr(owner, name)

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if self._clipped and self._engine is not None:  # the engine has stepped, and its gradients were read before
                total = original(*args, **kwargs)
                if self.live:
                    self._error_boundary.attempt("gradients", self._add_gradients, None, total)
                return total
            self._clipped = True
            model = getattr(self.trainer, "model_wrapped", self.trainer.model)
            norms = self._error_boundary.attempt("gradients", self._read_gradients, model) if self.live else None
            layers = self._error_boundary.attempt("clipped layers", clipping_of, self.trainer)
            if layers is not None:
                layers.before = self.complete
            total = original(*args, **kwargs)
            if self.live:
                self._error_boundary.attempt("gradients", self._add_gradients, norms, total)
            if layers is not None and layers.clipped is not None:
                self._error_boundary.attempt("clipped layers", self._add_clipped, layers.clipped)
            else:
                self.complete(total)
            return total

        setattr(owner, name, Tapped(original, tapped))

    def _wrap_engine(self, engine: Any) -> None:
        """Read gradients before DeepSpeed's ``engine`` clips and steps in one call."""
        original = engine.step

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                self._clipped = True
                if self._reads_gradients and self.live:
                    self._error_boundary.attempt("gradients", self._add_parted, engine.module)
                self.complete(None)
            return original(*args, **kwargs)

        engine.step = Tapped(original, tapped)

    def _add_parted(self, model: Any) -> None:
        run = self._error_boundary.run
        self._add_gradients(None if run is None else model_norms(model, rank=run.rank), None)

    def _add_clipped(self, clipped: Clipped) -> None:
        if self.live:
            self.tally.add_stats(clipped.stats())

    def _read_gradients(self, model: Any) -> GradNorms | None:
        """Return gradient norms per layer, if gradients are readable."""
        run = self._error_boundary.run
        self._error_boundary.attempt(AGREEMENT_TAP, self._agree)
        if run is None or sharding_engine(self.trainer) in HIDDEN:
            return None
        return model_norms(model, rank=run.rank)

    def _add_gradients(self, norms: GradNorms | None, total: Tensor | float | None) -> None:
        """Add gradient norms; ``total`` is the trainer's own norm, over all ranks and without loss scale."""
        if norms is not None and self._scales_loss:
            self.tally.add_stats(norms.unscaled_stats(total if isinstance(total, Tensor) else norms.total))
            return
        if norms is not None:
            self.tally.add_stats(norms.stats())
        if hasattr(total, "full_tensor"):  # in parts, and only all ranks together may ask for the whole
            return
        if isinstance(total, Tensor):
            self.tally.add_stats({"optim/grad_norm": Latest.of(total, torch.ones_like(total))})
        elif total is not None:
            self.tally.add_number("optim/grad_norm", total)

    def _after_step(self, result: Tensor, *_args: Any, **_kwargs: Any) -> None:
        with torch.no_grad():
            self.tally.add_stats(loss_stats(result.detach()))


def loss_stats(loss: Tensor, *, scaled: bool = True) -> Stats:
    """Return statistics of the loss of one micro-batch, 0-d.

    The loss of the step is the sum over micro-batches if each was divided by their number (``scaled``), else the mean.
    """
    one = torch.ones_like(loss, dtype=torch.bool)
    raw = RankMean.of(loss, one) if scaled else Mean.of(loss, one)
    return {"loss/raw": raw, "nonfinite/loss": Total.of(nonfinite(loss), one)}
