"""Settings of a run of the TRL part of the corpus: the trainer's, and what goes wrong when."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forecast.trl_tasks import Data

FAULTS = (
    "learning rate", "clip range", "kl weight", "entropy weight", "positive advantages", "reward sign", "random reward",
    "constant reward", "length reward", "engine noise", "engine staleness", "engine temperature", "half gradients",
    "lost weight", "format reward", "narrow data", "hard data",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is not as it should be from step ``start`` on (steps count from 1) until before ``end``.

    It grows on a line over ``ramp`` steps to ``strength``, whose meaning is that of its kind (see
    :mod:`trl_faults`).
    """

    kind: str
    start: int = 1
    strength: float = 1.0
    ramp: int = 0
    end: int | None = None

    def level(self, step: int) -> float:
        """Share of it that is there at ``step``, in [0, 1].

        >>> fault = Fault("engine noise", start=50, ramp=10, end=100)
        >>> [fault.level(step) for step in (49, 50, 54, 59, 99, 100)]
        [0.0, 0.1, 0.5, 1.0, 1.0, 0.0]
        """
        if step < self.start or (self.end is not None and step >= self.end):
            return 0.0
        return min(1.0, (step - self.start + 1) / max(1, self.ramp))


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. ``engine``: "" to sample with TRL itself, or the dtype of a rollout engine's own copy of the policy."""

    trainer: str = "grpo"
    task: str = "sort"
    start: int = 0
    steps: int = 200
    lr: float = 3e-4
    batch: int = 128
    generations: int = 8
    accumulation: int = 1
    num_iterations: int = 1
    epsilon: float = 0.2
    beta: float = 0.0
    entropy_coef: float = 0.0
    max_grad_norm: float = 1.0
    reward: str = "shaped"
    longest: int = 9
    engine: str = ""
    engine_noise: float = 0.0
    correction: bool = False
    skips: bool = False
    """Whether an update with a non-finite gradient is skipped, as a float16 loss scaler does."""
    faults: tuple[Fault, ...] = ()
    data: Data | None = None
    """Problems of a small-batch run (:mod:`trl_tasks`), instead of ``task``; the truth is then measured apart."""
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    importance: str = "token"
    steps_per_generation: int = 1
    """Updates from one batch of responses, each from a part of it: the last ones are off-policy."""
    lora: int = 0
    """Rank of the adapters that are trained alone; 0: all weights are."""
    warmup: int = 0
    decay: str = "constant"
    logging_steps: int = 1
    stop: int | None = None
    """Step after which it stops short of its schedule."""
    resumed: tuple[int, int] | None = None
    """The step after which it stopped, and that of the checkpoint it went on from."""

    def strength(self, kind: str, step: int) -> float:
        """Strength of the faults of ``kind`` at ``step``, 0 where there is none."""
        return sum(fault.level(step) * fault.strength for fault in self.faults if fault.kind == kind)

    def lr_at(self, step: int) -> float:
        """Learning rate of the update that ends ``step``: a ramp grows it by a fixed factor a step to ``strength``."""
        rate = self.lr * min(1.0, step / max(1, self.warmup)) * self._decayed(step)
        for fault in self.faults:
            if fault.kind == "learning rate":
                rate *= fault.strength ** fault.level(step)
        return rate

    def _decayed(self, step: int) -> float:
        done = min(1.0, step / self.steps)
        if self.decay == "linear":
            return 1.0 - 0.9 * done
        return 0.55 + 0.45 * math.cos(math.pi * done) if self.decay == "cosine" else 1.0
