"""A rollout engine for TRL on a CPU: its own copy of the policy samples and returns its own log-probs.

It stands where TRL expects vLLM, so TRL's own importance-sampling correction and our mismatch taps run as they do
there. What can be wrong with it: the precision of its copy, noise in it, its age, its temperature.
"""

from __future__ import annotations

from typing import Any

import torch
from forecast.trl_setting import Setting
from forecast.trl_start import sample

from rlwatch.demo.training import random_policy


class Engine:
    """Samples for ``trainer``; every fault of ``setting`` that lies in the engine is one of this object."""

    def __init__(self, trainer: Any, setting: Setting, seed: int) -> None:
        state = torch.get_rng_state()
        self._policy = random_policy(trainer.processing_class).to(getattr(torch, setting.engine)).eval()
        torch.set_rng_state(state)
        self._trainer, self._setting = trainer, setting
        self._noise = torch.Generator().manual_seed(seed)
        self._draws = torch.Generator().manual_seed(seed + 1)

    @property
    def _step(self) -> int:
        """The step that is under way, counted from 1."""
        return int(self._trainer.state.global_step) + 1

    def sync_weights(self) -> None:
        """Take the policy's weights, unless they are to grow old."""
        every = max(1, round(self._setting.strength("engine staleness", self._step)))
        if self._step % every:
            return
        amount = self._setting.engine_noise + self._setting.strength("engine noise", self._step)
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        with torch.no_grad():
            for mine, theirs in zip(self._policy.parameters(), policy.parameters(), strict=True):
                mine.copy_(theirs + amount * theirs.std() * torch.randn(theirs.shape, generator=self._noise))

    def generate(self, prompts: list[list[int]], *_: Any, **__: Any) -> tuple[Any, ...]:
        """As ``VLLMGeneration.generate``: prompts, ids, log-probs of the sampled tokens alone, nothing else."""
        change = self._setting.strength("engine temperature", self._step)
        sampled = sample(self._policy, prompts, self._setting.longest, self._draws, temperature=1.0 + change)
        return prompts, sampled.ids, [[[value] for value in row] for row in sampled.logps], None


def install(trainer: Any, setting: Setting, seed: int) -> None:
    """Let ``trainer`` sample from an engine of its own."""
    trainer.vllm_generation = Engine(trainer, setting, seed)
    trainer.use_vllm = True
    trainer._last_loaded_step = -1
