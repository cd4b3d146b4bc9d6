"""Taps on one trainer: closures put on the *instance*, so that subclasses and other trainers never notice.

Every closure calls the method it replaces exactly once, with what it was given, and returns what that
returned; only then does it look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rlwatch.integrations.level import Level
from rlwatch.integrations.seam import Seam
from rlwatch.integrations.step_tally import StepTally
from rlwatch.integrations.trl.compat import sharding_engine
from rlwatch.integrations.trl.generation import Generations, Scored
from rlwatch.integrations.trl.inputs import sequence_stats, token_batch
from rlwatch.integrations.trl.sampled import Sampled
from rlwatch.integrations.vocabulary import vocab_size_of
from rlwatch.tensors.finite import nonfinite
from rlwatch.tensors.gradnorm import GradNorms, grad_norms
from rlwatch.tensors.mergeable import Latest, Mean, Total


class Taps:
    """Reads a GRPO or RLOO trainer while it trains, as closely as ``level``, into the tally of the current step.

    ``sampled`` is offered every generation, for its text.
    """

    def __init__(self, trainer: Any, seam: Seam, level: Level = Level.FULL, sampled: Sampled | None = None) -> None:
        self.trainer = trainer
        self.tally = StepTally()
        self._seam = seam
        self._level = level
        self._generations = Generations(trainer, full=level.includes(Level.FULL))
        self._sampled = sampled or Sampled()
        self._forward: tuple[Tensor, Tensor | None] | None = None
        self._clipped = False

    def attach(self) -> None:
        """Put the closures in place."""
        self._wrap("_get_per_token_logps_and_entropies", self._after_forward)
        self._wrap("_compute_loss", self._after_loss)
        self._wrap("_calculate_rewards", self._after_rewards)
        self._wrap("_generate_and_score_completions", self._after_generation)
        if self._level.includes(Level.GRADIENTS):
            self._wrap_clip()

    def take(self) -> StepTally:
        """The step's tally, complete with what holds for every step; the next one begins empty."""
        tally, self.tally = self.tally, StepTally()
        self._clipped = False
        vocabulary = vocab_size_of(self.trainer.model)
        if vocabulary is not None:
            tally.add_number("policy/vocab_size", vocabulary)
        beta = getattr(self.trainer, "beta", None)
        if beta is not None:
            tally.add_number("policy/kl_coef", beta)
        for name, value in self._sampled.take().items():
            tally.add_number(name, value)
        return tally

    def discard(self) -> None:
        """Begin anew: training starts."""
        self.tally, self._forward, self._clipped = StepTally(), None, False

    def gradients_if_unclipped(self) -> None:
        """Without clipping the trainer never asks for the norm: read it before the optimizer steps."""
        if not self._clipped and self.live and self._level.includes(Level.GRADIENTS):
            self._add_gradients(self._read_gradients(self.trainer.model), None)

    @property
    def live(self) -> bool:
        """Whether to look: training (not evaluation), in a recording process, while steps are still taken away."""
        run = self._seam.run
        return run is not None and run.active and self.trainer.model.training and self._seam.works("on_step_end")

    @property
    def _scales_loss(self) -> bool:
        """float16: gradients carry a scale until they are clipped, and may overflow while it is sought."""
        return getattr(self.trainer.accelerator, "scaler", None) is not None

    def _wrap(self, name: str, look: Callable[..., None]) -> None:
        """Let ``look`` see what ``name`` returned and what it was given."""
        original = getattr(self.trainer, name)

        @wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.live:
                self._seam.attempt(name, look, result, *args, **kwargs)
            return result

        setattr(self.trainer, name, tapped)

    def _wrap_clip(self) -> None:
        """Gradients are read before the original clips them in place, its norm after."""
        original = self.trainer._clip_grad_norm  # noqa: SLF001

        @wraps(original)
        def tapped(model: Any, *args: Any, **kwargs: Any) -> Any:
            self._clipped = True
            norms = self._seam.attempt("gradients", self._read_gradients, model) if self.live else None
            total = original(model, *args, **kwargs)
            if self.live:
                self._seam.attempt("gradients", self._add_gradients, norms, total)
            return total

        self.trainer._clip_grad_norm = tapped  # noqa: SLF001

    def _read_gradients(self, model: Any) -> GradNorms | None:
        """Per layer, where a rank holds whole gradients."""
        return grad_norms(model.named_parameters()) if sharding_engine(self.trainer) is None else None

    def _add_gradients(self, norms: GradNorms | None, total: Tensor | float | None) -> None:
        """``total`` is the trainer's own norm: of all ranks, and without a loss scale."""
        if norms is not None and self._scales_loss:
            self.tally.add_stats(norms.unscaled_stats(total if isinstance(total, Tensor) else norms.total))
            return
        if norms is not None:
            self.tally.add_stats(norms.stats())
        if isinstance(total, Tensor):
            self.tally.add_stats({"optim/grad_norm": Latest.of(total, torch.ones_like(total))})
        elif total is not None:
            self.tally.add_number("optim/grad_norm", total)

    def _after_forward(self, result: Any, *_args: Any, compute_entropy: bool = False, **_kwargs: Any) -> None:
        """Only the loss pass asks for entropies; the passes for the old and the reference policy do not."""
        if compute_entropy:
            entropy = result[1]
            self._forward = (result[0].detach(), None if entropy is None else entropy.detach())

    def _after_loss(self, result: Tensor, _model: Any, inputs: Mapping[str, Any]) -> None:
        forward, self._forward = self._forward, None
        with torch.no_grad():
            loss = result.detach()
            one = torch.ones_like(loss, dtype=torch.bool)
            scaled = getattr(self.trainer, "loss_is_scaled_for_ga", None) is not False
            self.tally.add_stats(
                {
                    "loss/raw": Total.of(loss, one) if scaled else Mean.of(loss, one),
                    "nonfinite/loss": Total.of(nonfinite(loss), one),
                }
            )
            if forward is not None:
                logp, entropy = forward
                batch = token_batch(self.trainer, inputs, logp, entropy)
                self.tally.add_batch(batch, full=self._level.includes(Level.FULL))
                self.tally.add_stats(sequence_stats(self.trainer, inputs, batch))

    def _after_rewards(
        self, result: Tensor, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> None:
        """``result`` (N, functions) is of all ranks, NaN where a function gave no reward."""
        self._generations.scored(Scored(result.detach(), inputs, prompts, completions, completion_ids_list))

    def _after_generation(self, result: Any, *_args: Any, **_kwargs: Any) -> None:
        stats, scored = self._generations.take(result)
        self.tally.add_stats(stats)
        run = self._seam.run
        if scored is not None and run is not None:
            self._sampled.offer(run, self.trainer, scored)
