"""Hooks (taps) that measure every token of a GRPO or RLOO trainer, in addition to those of any trainer.

:mod:`rlwatch.integrations.transformers.taps` describes how a hook works.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from rlwatch.error_boundary import ErrorBoundary, Tapped
from rlwatch.integrations.canaries import CanaryScorer
from rlwatch.integrations.compat import Needs, installed, lacking
from rlwatch.integrations.control_tokens import control_tokens
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import Localiser
from rlwatch.integrations.step_tally import StepTally
from rlwatch.integrations.trainer_settings import TrainerSettings, attributes
from rlwatch.integrations.transformers.taps import TrainerTaps, loss_stats
from rlwatch.integrations.trl.batch import (
    GenerationPasses,
    Generations,
    Sampled,
    Scored,
    correction_stats,
    sequence_stats,
    token_batch,
)
from rlwatch.integrations.trl.localise import TrainerLocalising
from rlwatch.integrations.trl.verifiers import RewardFunctions
from rlwatch.integrations.verifiers import TAP
from rlwatch.integrations.weight_sync import TAP as SYNC_TAP
from rlwatch.integrations.weight_sync import SyncComparison
from rlwatch.records import JSON
from rlwatch.tensors.masked import sharing
from rlwatch.tensors.mergeable import Stats

NUMBERS = {
    "policy/kl_coef": "beta",
    "policy/entropy_coef": "entropy_coef",
    "policy/clip_range": "epsilon_high",
    "rollout/temperature": "temperature",
}
"""Metric -> attribute of the trainer with its value; TRL does not log these settings."""
WITHIN_VLLM = ("llm", "llm_engine", "model_executor", "driver_worker", "model_runner", "model")
"""Attribute path from TRL's client to the model of a vLLM engine in the trainer's process. A server's model cannot be
read.
"""
OPTIONS = {
    name: name
    for name in (
        "epsilon_low", "loss_type", "scale_rewards", "importance_sampling_level", "num_iterations", "num_generations",
        "top_p", "top_k", "min_p", "repetition_penalty", "mask_truncated_completions", "top_entropy_quantile",
        "reward_weights",
    )
}  # fmt: skip
"""Attributes of the trainer whose changes are recorded as events."""


class TrlTaps(TrainerTaps):
    """Hooks that measure a GRPO or RLOO trainer up to ``level``, and collect the measurements of the current step.

    ``sampled`` gets every generation, for its text. ``localiser`` gets every forward pass of the loss, and the step's
    gradient. ``canaries`` are scored after the rewards of a batch.
    """

    rewards = "_calculate_rewards"
    """Name of the trainer's method that calls the reward functions."""

    def __init__(
        self,
        trainer: Any,
        error_boundary: ErrorBoundary,
        level: Level = Level.FULL,
        sampled: Sampled | None = None,
        localiser: Localiser | None = None,
        *,
        canaries: CanaryScorer | None = None,
    ) -> None:
        super().__init__(trainer, error_boundary, level)
        self._canaries = canaries
        self._localising = None if localiser is None else TrainerLocalising(trainer, error_boundary, localiser)
        self._generations = Generations(trainer, full=level.includes(Level.FULL))
        self.sampled = sampled or Sampled()
        self._forward: tuple[Tensor, Tensor | None] | None = None
        self._passes = GenerationPasses(full=level.includes(Level.FULL))
        self._settings = TrainerSettings(attributes(trainer, NUMBERS), attributes(trainer, OPTIONS))
        self._reward_functions = RewardFunctions(trainer, error_boundary)
        self.comparison = SyncComparison()
        tokenizer = getattr(trainer, "processing_class", None)
        self._control = control_tokens(getattr(tokenizer, "tokenizer", tokenizer))

    def attach(self) -> None:
        """Install the wrappers on the trainer's methods."""
        if self._localising is not None:
            self._localising.attach(lambda: self.live)
        self.wrap("_get_per_token_logps_and_entropies", self._after_forward)
        self.wrap("_compute_loss", self._after_loss)
        self._meter_rewards()
        self.wrap(self.rewards, self._after_rewards)
        if hasattr(self.trainer, "_generate"):
            self.wrap("_generate", self._after_sampling)
        self.wrap("_generate_and_score_completions", self._after_generation)
        self._tap_sync()
        self.tap_gradients()

    def _tap_sync(self) -> None:
        """Compare the weights of an engine in this process each time that the trainer has sent its own."""
        client = getattr(self.trainer, "vllm_generation", None)
        self._tap_sending(client)
        original = getattr(client, "sync_weights", None)
        if not callable(original):
            return

        def tapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            run = self._error_boundary.run
            if run is not None and run.measures:
                self._error_boundary.attempt(SYNC_TAP, self._compare_weights, client)
            return result

        client.sync_weights = Tapped(original, tapped)  # type: ignore[union-attr]

    def _tap_sending(self, client: Any) -> None:
        """Compare the weights that are sent to a server, which cannot be read, as they are sent."""
        server = getattr(client, "vllm_client", None)
        original = getattr(server, "update_named_params", None)
        if not callable(original):
            return

        def tapped(metadata: Any, named_params: Any, *args: Any, **kwargs: Any) -> Any:
            run = self._error_boundary.run
            if run is not None and run.measures:
                named_params = self.comparison.sent(
                    self.trainer.model, named_params, self._error_boundary, self._add_sent
                )
            return original(metadata, named_params, *args, **kwargs)

        server.update_named_params = Tapped(original, tapped)  # type: ignore[union-attr]

    def _add_sent(self, stats: Stats) -> None:
        self.tally.add_stats(stats)

    def _compare_weights(self, client: object) -> None:
        """Compare right after the sync, when an engine with a sleep mode is awake and its memory can be read."""
        engine: Any = client
        for name in WITHIN_VLLM:
            engine = getattr(engine, name, None)
        if isinstance(engine, nn.Module):
            self.tally.add_stats(self.comparison.compare(self.trainer.model, engine))

    def _meter_rewards(self) -> None:
        """Measure reward functions while the trainer calls them; calls are counted also if one raises."""
        original = getattr(self.trainer, self.rewards)

        def metered(*args: Any, **kwargs: Any) -> Any:
            if not self.live:
                return original(*args, **kwargs)
            with self._reward_functions.metered():
                try:
                    result = original(*args, **kwargs)
                finally:
                    self._error_boundary.attempt(TAP, self._count_rewards)
            self._error_boundary.attempt("canaries", self._score_canaries)
            return result

        setattr(self.trainer, self.rewards, Tapped(original, metered))

    def _count_rewards(self) -> None:
        self.tally.add_stats(self._reward_functions.meter.take())

    def _score_canaries(self) -> None:
        """Score canaries between the rewards of a batch and its updates, when nothing else calls the functions."""
        canaries = self._canaries
        for name, value in (
            {} if canaries is None else canaries.numbers(int(self.trainer.state.global_step) + 1).items()
        ):
            self.tally.add_number(name, value)

    @override
    def take(self) -> StepTally:
        tally = super().take()
        for name, value in (self._error_boundary.attempt("settings", self._settings.values) or {}).items():
            tally.add_number(name, value)
        for name, value in self.sampled.take().items():
            tally.add_number(name, value)
        return tally

    def changed(self) -> list[dict[str, JSON]]:
        """Return the settings that changed since the last step, each with its value before and after."""
        return self._settings.changes()

    @override
    def discard(self) -> None:
        super().discard()
        self._forward = None
        self._passes.clear()
        if self._localising is not None:
            self._localising.forget()

    @override
    def gradients_if_unclipped(self) -> None:
        super().gradients_if_unclipped()
        if self._localising is not None:
            self._localising.localiser.skip_culprit()

    @override
    def complete(self, total: Tensor | float | None) -> None:
        if self._localising is not None:
            self._error_boundary.attempt("localisation", self._complete, self._localising, total)

    def _complete(self, localising: TrainerLocalising, total: Tensor | float | None) -> None:
        localising.check(total)

    def delivered(self, metrics: Mapping[str, float]) -> None:
        """Update the usual shares of layers in the gradient from the ``metrics`` of a recorded step."""
        if self._localising is not None:
            self._localising.localiser.delivered(metrics)

    def _after_forward(self, result: Any, *_args: Any, compute_entropy: bool = False, **_kwargs: Any) -> None:
        """Keep a pass: only the loss asks for entropies, the passes for the old and the reference policy do not."""
        if not compute_entropy:
            self._passes.add(result[0])
            return
        entropy = result[1]
        self._forward = (result[0].detach(), None if entropy is None else entropy.detach())

    def _after_loss(self, result: Tensor, _model: Any, inputs: Mapping[str, Any]) -> None:
        forward, self._forward = self._forward, None
        self.look_at_gradients()
        with torch.no_grad():
            loss = result.detach()
            scaled = getattr(self.trainer, "loss_is_scaled_for_ga", None) is not False
            self.tally.add_stats(loss_stats(loss, scaled=scaled))
            if forward is not None:
                batch = token_batch(self.trainer, inputs, *forward, control=self._control)
                known = sequence_stats(self.trainer, inputs, batch) | correction_stats(inputs, batch)
                self.tally.add_batch(batch, full=self._level.includes(Level.FULL), instead=known)
                if self._localising is not None:
                    self._localising.keep(batch, inputs)

    def _after_sampling(self, result: Any, *_args: Any, **_kwargs: Any) -> None:
        """Note the sampled tuple ``result``; GRPO's third element (B, T) marks the tokens that the policy wrote."""
        self._generations.sampled(result[2])

    def _after_rewards(
        self, result: Tensor, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> None:
        """Note the rewards ``result`` (N, functions) of all ranks, NaN where a function gave no reward."""
        self._generations.scored(Scored(result.detach(), inputs, prompts, completions, completion_ids_list))

    def _after_generation(self, result: Any, *_args: Any, **_kwargs: Any) -> None:
        with sharing():  # the rewards
            stats, scored = self._generations.take(result)
            if self._localising is not None and scored is not None:
                self._localising.generated(result, self._generations.rewards(scored), scored)
        self.tally.add_stats(stats)
        with torch.no_grad():
            logps = self._passes.with_reference(result)
            self.tally.add_stats(self._passes.take(result))
        run = self._error_boundary.run
        if scored is not None and run is not None:
            self.sampled.offer(run, self.trainer, scored, logps)


# Checks of the private methods of a TRL trainer that rlwatch wraps.

NEEDS: Needs = {
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("compute_entropy",),
    "_calculate_rewards": ("completion_ids_list",),
    "_generate_and_score_completions": (),
}
"""Private methods that are wrapped, and the parameters by which each is recognised."""


def obstacle(trainer: Any) -> str | None:
    """Return the reason why tokens of ``trainer`` cannot be measured; None if they can."""
    reason = lacking(trainer, NEEDS) or _bypassed(type(trainer))
    return None if reason is None else f"{reason} (TRL {installed('trl')}); tokens are read of GRPO and RLOO"


def _bypassed(kind: type) -> str | None:
    """Return the reason if ``compute_loss`` of ``kind`` never calls ``_compute_loss``, as Unsloth's replacement."""
    for base in kind.__mro__:
        method = inspect.unwrap(base.__dict__["compute_loss"]) if "compute_loss" in base.__dict__ else None
        code = getattr(method, "__code__", None)
        if code is None or "super" in code.co_names:
            continue
        named = "_compute_loss" in code.co_names
        return None if named else f"{base.__name__}.compute_loss does not call _compute_loss"
    return None
