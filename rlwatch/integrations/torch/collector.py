"""Putting what a loop passes into the step under way. May raise: the watcher calls it through its seam."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlwatch.gradloc.passes import Passes, RandomState
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising.localiser import Localiser, Spike
from rlwatch.integrations.torch.generation import GenerationReader
from rlwatch.integrations.torch.gradients import read_gradients, scales
from rlwatch.integrations.torch.loss_passes import Call, LossPasses
from rlwatch.integrations.torch.means import Means
from rlwatch.integrations.torch.microbatch import NO_DATA, Reader, Settings
from rlwatch.integrations.torch.samples import Samples
from rlwatch.integrations.torch.steps import Steps
from rlwatch.integrations.vocabulary import vocab_size_of
from rlwatch.recorder.intake import step_index
from rlwatch.tensors.mergeable import nonfinite
from rlwatch.tensors.responses import observe_responses
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.transfer import freed

KEPT = ("logp", "mask", "entropy", "advantages", "old_logp", "ref_logp", "rollout_logp")
"""Fields of a batch whose values a statistic may keep."""
TEXTS = ("prompts", "completions")
"""Inputs that never become tensors."""
Refused = Mapping[str, str]
"""Input that was left out -> why."""


@dataclass(slots=True)
class Collector:
    """Reads, measures and adds to ``steps.tally``, as closely as ``level`` says."""

    steps: Steps
    level: Level
    settings: Settings
    means: Means
    generation: GenerationReader
    samples: Samples
    scaler: Any = None
    localiser: Localiser | None = None
    _rate: float | Tensor | None = field(default=None, init=False)
    _loss_passes: LossPasses = field(init=False)

    def __post_init__(self) -> None:
        self._loss_passes = LossPasses(Passes() if self.localiser is None else self.localiser.passes)

    @property
    def localises(self) -> bool:
        """Whether forward passes are worth keeping."""
        return self.localiser is not None and self.steps.seam.works("localisation")

    def ran(self, call: Call, result: Any, before: RandomState) -> None:
        """The forward of a loss ran; its log-probs are observed next."""
        self._loss_passes.ran(call, result, before)

    def rollouts(self, inputs: Mapping[str, Any]) -> Refused:
        """One generation."""
        self._begin()
        batch = self.generation.read({name: value for name, value in inputs.items() if name not in TEXTS})
        if batch is not None:
            self.steps.tally.add_stats(observe_responses(batch))
        self.steps.seam.attempt("completions", self.samples.offer, self.steps.last + 1, inputs)
        return self.generation.refused

    def observe(self, inputs: Mapping[str, Any]) -> Refused:
        """One micro-batch."""
        self._begin()
        if not self.level.includes(Level.TOKENS):
            return {}
        reader = Reader(self.settings)
        full = self.level.includes(Level.FULL)
        with torch.no_grad():
            batch = reader.read(inputs)
            if batch is not None and batch.logp.is_meta:
                reader.refused["logp"], batch = NO_DATA, None
            if batch is not None:
                self.steps.tally.add_batch(_copied(batch) if full else batch, full=full)
        if batch is not None and self.localises:
            reader.refused.update(self._loss_passes.observed(inputs, _copied(batch)))
        return reader.refused

    def gradients(self) -> None:
        """Those the model holds now."""
        self._begin()
        if self.means.model is not None and self.level.includes(Level.GRADIENTS):
            with torch.no_grad():
                run = self.steps.seam.run
                rank = 0 if run is None else run.rank
                stats = read_gradients(self.means.model, self.means.optimizer, self.scaler, rank=rank)
            self.steps.tally.add_stats(stats)
        self.steps.seam.attempt("localisation", self._localise)

    def _localise(self) -> None:
        """The gradient is complete and not used yet."""
        model, localiser = self.means.model, self.localiser
        if localiser is not None and model is not None and model.training:
            scale, left = scales(self.means.optimizer, self.scaler)
            localiser.check(Spike(model, self.steps.last + 1, scale=scale, left=left))
            localiser.skip_culprit()

    def end(self, step: int | None, inputs: Mapping[str, Any], scalars: Mapping[str, Any]) -> Refused:
        """Seal the step."""
        self._begin()
        broken = self.steps.seam.attempt("loss", _broken, inputs["loss"])
        refused = self.steps.add_all({**self._standing(), **_named(inputs, broken), **scalars})
        number = self.steps.last + 1
        if step is not None:
            try:
                number = step_index(step)
            except ValueError as wrong:
                refused["step"] = str(wrong)
        self._rate = None
        self._loss_passes.forget()
        self.steps.seal(number)
        return refused

    def _begin(self) -> None:
        """The step is under way, and is taken with the rate that holds now: a scheduler moves on after it."""
        self.steps.begin()
        if self._rate is None:
            self._rate = self.steps.seam.attempt("learning rate", self.means.rate)

    @property
    def _rank(self) -> int:
        return 0 if self.steps.seam.run is None else self.steps.seam.run.rank

    def _standing(self) -> dict[str, Any]:
        """What holds for the step without being passed."""
        return {
            "optim/lr": self._rate,
            "policy/kl_coef": self.steps.seam.attempt("kl_coef", self.means.read_kl_coef),
            "policy/vocab_size": vocab_size_of(self.means.model),
            **(self.steps.seam.attempt("text of completions", self.samples.take) or {}),
        }


def _copied(batch: TokenBatch) -> TokenBatch:
    """With tensors of our own: some statistics keep values until the step ends, and a loop may write over its own."""
    mine = {name: x.clone() for name in KEPT if (x := getattr(batch, name)) is not None}
    return replace(batch, **mine)


def _named(inputs: Mapping[str, Any], broken: float | Tensor | None) -> dict[str, Any]:
    """What ``step`` was passed, by canonical names, and whether the loss was ``broken``."""
    loss = {"loss/raw": inputs["loss"], "nonfinite/loss": broken}
    named = {**loss, "optim/lr": inputs["lr"], "optim/grad_norm": inputs["grad_norm"]}
    return {name: value for name, value in named.items() if value is not None}


def _broken(loss: Any) -> float | Tensor | None:
    """Whether it is NaN or infinite, as a number; None where there is none."""
    if isinstance(loss, Tensor):
        return None if freed(loss) else nonfinite(loss.detach())
    if isinstance(loss, int):
        return 0.0  # also one that is too large for a float
    return float(not math.isfinite(loss)) if isinstance(loss, float) else None
