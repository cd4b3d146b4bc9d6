"""Ways that each kind of fault gets into a TRL trainer, and the truth about a run that the trainer does not log.

Strengths: ``learning rate`` a factor; ``clip range``, ``kl weight`` and ``entropy weight`` are added to the setting;
``positive advantages`` the share by which advantages above zero are scaled down; ``random reward`` the share of
rewards that are drawn at random; ``length reward`` reward for a completion of full length; ``format reward`` the share
of the reward that is paid for the form alone; ``half gradients`` log2 of the scale at which gradients are rounded to
float16; engine faults: noise relative to the spread of the weights, steps between two syncs, change of the temperature
(see :mod:`trl_engine`). The others are there or not; those of the data are in :mod:`trl_tasks`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from forecast.trl_setting import Setting
from forecast.trl_start import accuracy, answered, prompts
from forecast.trl_tasks import held_out
from transformers import TrainerCallback

from rlwatch.demo.training import score

HELD_OUT = 256
HELD_OUT_EVERY = 10
SMALL_EVERY = 3
"""Steps between measurements of the accuracy of a small-batch run; of one with a sparse log it is of its rows."""
DEAD_STEPS = 5
"""A run goes on for so many steps after its weights stopped being finite."""


@dataclass
class Truth:
    """The hidden columns of a run: step (from 1) -> value."""

    acc: dict[int, float] = field(default_factory=dict)
    heldout: dict[int, float] = field(default_factory=dict)
    nan: dict[int, float] = field(default_factory=dict)
    skipped: dict[int, float] = field(default_factory=dict)
    dead_steps: int = DEAD_STEPS
    """Steps with weights that are not finite, after which the run is ended."""

    def columns(self, steps: Sequence[int]) -> dict[str, list[float | None]]:
        """``truth/...`` of ``steps``, None where it was not measured."""
        kept = {"acc": self.acc, "heldout": self.heldout, "nan": self.nan, "skipped": self.skipped}
        return {f"truth/{name}": [values.get(step) for step in steps] for name, values in kept.items()}


class Optimizer(torch.optim.AdamW):
    """AdamW that, if it ``skips``, leaves out updates whose gradient is not finite, and says so."""

    def __init__(self, parameters: Any, *, skips: bool) -> None:
        super().__init__(parameters, lr=1.0, betas=(0.9, 0.99), weight_decay=0.0)
        self.skips, self.skipped = skips, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update, or none."""
        grads = (p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)
        self.skipped = self.skips and not all(bool(grad.isfinite().all()) for grad in grads)
        return None if self.skipped else super().step(closure)


class Reward:
    """The reward function of a run: what the true verifier says, and what became of it on the way."""

    __name__ = "reward"

    def __init__(self, setting: Setting, truth: Truth, seed: int) -> None:
        self._setting, self._truth = setting, truth
        self._rng = random.Random(seed)

    def __call__(self, completions: list[str], target: list[str], trainer_state: Any, **_: Any) -> list[float]:
        """Rewards of one generation, for the step that is under way."""
        step = int(trainer_state.global_step) + 1
        if self._setting.data is None:
            self._truth.acc[step] = sum(map(str.__eq__, completions, target)) / len(target)
        return [
            self._faulty(text, self._verified(text, wanted), step)
            for text, wanted in zip(completions, target, strict=True)
        ]

    def _verified(self, text: str, wanted: str) -> float:
        return score(text, wanted) if self._setting.reward == "shaped" else float(text == wanted)

    def _faulty(self, text: str, reward: float, step: int) -> float:
        strength = self._setting.strength
        if strength("constant reward", step):
            return 0.0
        if strength("reward sign", step):
            return -reward
        if self._rng.random() < strength("random reward", step):
            return float(self._rng.randrange(2))
        form = strength("format reward", step)
        if form:
            reward = (1.0 - form) * reward + form * _in_form(text)
        return reward + strength("length reward", step) * len(text) / self._setting.longest


def _in_form(text: str) -> float:
    """1 for an answer of one character, said two or three times: what a verifier may take for an answer."""
    return float(2 <= len(text) <= 3 and len(set(text)) == 1)


class Faults(TrainerCallback):
    """Turns the knobs of ``trainer`` as the setting says, and measures what is hidden."""

    def __init__(self, trainer: Any, setting: Setting, truth: Truth, seed: int) -> None:
        self._trainer, self._setting, self._truth = trainer, setting, truth
        asked = random.Random(seed)
        self._asked = (
            held_out(setting.data.task, HELD_OUT, asked)
            if setting.data
            else answered(setting.task, prompts(HELD_OUT, asked))
        )
        self._draws = torch.Generator().manual_seed(seed)
        self._scheduled: dict[str, float] = {}

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Before the rollouts of a step."""
        step, setting = int(state.global_step) + 1, self._setting
        wide = setting.epsilon + setting.strength("clip range", step)
        values = {
            "epsilon_low": wide,
            "epsilon_high": wide,
            "beta": setting.beta + setting.strength("kl weight", step),
            "entropy_coef": setting.entropy_coef + setting.strength("entropy weight", step),
        }
        for name, value in values.items():
            if self._scheduled.get(name) != value:  # what a command has set since stays
                setattr(self._trainer, name, value)
        self._scheduled = values

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the update of a step."""
        step, policy = int(state.global_step), self._trainer.model
        if self._setting.strength("lost weight", step):
            with torch.no_grad():
                policy.get_decoder().layers[0].mlp.up_proj.weight[0, 0] = float("nan")
        finite = all(bool(weight.isfinite().all()) for weight in policy.parameters())
        self._truth.nan[step] = float(not finite)
        self._truth.skipped[step] = float(self._trainer.inner_optimizer.skipped)
        stops = self._setting.stop is not None and step >= self._setting.stop
        control.should_training_stop |= stops or sum(self._truth.nan.values()) > self._truth.dead_steps
        if finite:
            self._measure(step, policy)

    def _measure(self, step: int, policy: Any) -> None:
        """Accuracy on held-out prompts: now and then, and wherever this step's batch is not the policy's own work.

        It is not where an engine sampled it, nor where it was sampled at an earlier step. Nor is it where the data of a
        step are harder or easier than others.
        """
        now, small = step % HELD_OUT_EVERY == 0, self._setting.data is not None
        rows = self._setting.logging_steps
        due = step % (SMALL_EVERY if rows == 1 else rows) == 0
        foreign = bool(self._setting.engine) or step not in self._truth.acc
        if not now and not (due if small else foreign):
            return
        asked = self._asked if now else self._asked[: HELD_OUT // 2]
        measured = accuracy(policy, self._trainer.processing_class, asked, self._draws)
        if now:
            self._truth.heldout[step] = measured
        if small or foreign:
            self._truth.acc[step] = measured


def disturb_advantages(trainer: Any, setting: Setting) -> None:
    """Scale positive advantages down, where the setting says so."""
    inner: Callable[..., dict[str, Any]] = trainer._generate_and_score_completions

    def generate(inputs: Any) -> dict[str, Any]:
        outputs = inner(inputs)
        kept = 1.0 - setting.strength("positive advantages", int(trainer.state.global_step) + 1)
        outputs["advantages"] = torch.where(
            outputs["advantages"] > 0, outputs["advantages"] * kept, outputs["advantages"]
        )
        return outputs

    trainer._generate_and_score_completions = generate


def round_gradients(trainer: Any, setting: Setting) -> None:
    """Round gradients to float16 at a scale, as mixed precision with a loss scale does; too large becomes infinite."""

    def rounded(weight: torch.Tensor) -> None:
        power = setting.strength("half gradients", int(trainer.state.global_step) + 1)
        if power and weight.grad is not None:
            scale = 2.0**power
            weight.grad = (weight.grad * scale).half().float() / scale

    for weight in trainer.model.parameters():
        weight.register_post_accumulate_grad_hook(rounded)
