"""Localising gradient spikes in GRPO and RLOO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlwatch.errors import ConfigError
from rlwatch.gradloc.passes import LossPass
from rlwatch.gradloc.recording import Context
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import Localise, Localiser
from rlwatch.integrations.localising.localiser import Spike
from rlwatch.integrations.transformers.compat import HIDDEN, sharding_engine
from rlwatch.integrations.trl.loss_passes import LossPassTap
from rlwatch.seam import Seam
from rlwatch.tensors.tokens import TokenBatch

IDS = ("prompt_ids", "completion_ids")
"""By which a sequence is known again: TRL shuffles a generation before it trains on it."""
MASKS = ("prompt_mask", "completion_mask")


def wished(wish: bool | Localise | None, level: Level, trainer: Any) -> Localise | None:
    """What to do of ``wish``; None stands for the default. Raises ``ConfigError`` if it cannot be had."""
    engine = sharding_engine(trainer)
    if wish is None:
        return Localise() if level.includes(Level.FULL) and engine is None else None
    settings = Localise.of(wish)
    if settings is not None and engine in HIDDEN:
        raise ConfigError(f"localise: gradients cannot be seen under {engine}; leave localise= out, or pass False")
    if settings is not None and not level.includes(Level.TOKENS):
        raise ConfigError(f'localise: it needs level="tokens" or closer, got {level.value!r}')
    return settings


class Localising:
    """Offers a trainer's loss passes and gradients to ``localiser``."""

    def __init__(self, trainer: Any, seam: Seam, localiser: Localiser) -> None:
        self.localiser = localiser
        self._trainer = trainer
        self._tap = LossPassTap(trainer, seam, localiser.passes)
        self._inputs: list[Mapping[str, Any]] = []
        self._generated: tuple[Mapping[str, Any], Tensor] | None = None
        localiser.rewards = self._add_rewards
        localiser.contexts = self._contexts
        localiser.autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision, "")

    def attach(self, live: Callable[[], bool]) -> None:
        """Watch the forward of the loss while ``live``."""
        self._tap.attach(live)

    def generated(self, outputs: Mapping[str, Any], rewards: Tensor) -> None:
        """A generation, and the rewards (N,) of its sequences."""
        self._generated = {name: outputs[name] for name in IDS if name in outputs}, rewards

    def keep(self, tokens: TokenBatch, inputs: Mapping[str, Any]) -> None:
        """A loss pass is over, its backward comes next."""
        self._tap.keep(tokens)
        self._inputs.append({name: inputs[name] for name in (*IDS, *MASKS) if name in inputs})

    def forget(self) -> None:
        """Training begins anew."""
        self._tap.forget()
        self._inputs.clear()

    def check(self, total: Tensor | float | None) -> None:
        """The gradient is complete; ``total`` is its norm before clipping, if the trainer computed it."""
        try:
            model = self._trainer.accelerator.unwrap_model(self._trainer.model)
            step = int(self._trainer.state.global_step) + 1
            self.localiser.check(Spike(model, step, total, self._loss_scale()))
        finally:
            self._inputs.clear()

    def _loss_scale(self) -> float | None:
        """By the time the norm is known, the gradients no longer carry it."""
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        return None if scaler is None else float(scaler.get_scale())

    def _add_rewards(self, passes: list[LossPass]) -> None:
        """Find each sequence of the step in the generation it came from."""
        if self._generated is None or len(passes) != len(self._inputs):
            return
        known, rewards = self._generated
        for one, inputs in zip(passes, self._inputs, strict=True):
            if known.keys() <= inputs.keys():
                one.rewards = _looked_up(inputs, known, rewards.to(one.tokens.logp.device))

    def _contexts(self) -> list[Context]:
        """What the forward of each micro-batch read."""
        temperature = float(self._trainer.temperature)
        return [Context(_whole(inputs, IDS), _whole(inputs, MASKS), temperature) for inputs in self._inputs]


def _whole(inputs: Mapping[str, Tensor], names: tuple[str, str]) -> Tensor:
    """Prompt and completion, (B, L)."""
    return torch.cat([inputs[name] for name in names], 1)


def _looked_up(inputs: Mapping[str, Tensor], known: Mapping[str, Tensor], rewards: Tensor) -> Tensor | None:
    """(B,) the reward of the sequence with the same ids; NaN where there is none, None where the widths differ."""
    if any(inputs[name].shape[1:] != known[name].shape[1:] for name in known):
        return None
    same = torch.stack([(inputs[n][:, None] == known[n][None]).all(-1) for n in known]).all(0)
    return torch.where(same.any(1), rewards[same.to(torch.uint8).argmax(1)], torch.nan)
