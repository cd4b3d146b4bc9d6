"""Training of one run, and the table of what it logged."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from forecast import statistics, task
from forecast.knobs import Config, Knobs
from forecast.policy import Engine, Policy, Rollout, accuracy, sample
from forecast.update import Batch, Update, advantages
from torch import Tensor

WARMUP = 10
HELD_OUT_EVERY, VALIDATION_EVERY, HELD_OUT = 10, 25, 96
AFTER_DEATH, AFTER_NAN = 45, 12
"""Steps a run goes on when it is clearly dead, or its weights are not finite."""
TRUTHS = ("truth/acc", "truth/heldout", "truth/nan", "truth/skipped")


@dataclass
class Streams:
    """Random numbers by what they are for, so that a fault that draws does not move the others."""

    seed: int
    data: torch.Generator = field(init=False)
    sampling: torch.Generator = field(init=False)
    engine: torch.Generator = field(init=False)
    faults: torch.Generator = field(init=False)
    truth: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        for i, name in enumerate(("data", "sampling", "engine", "faults", "truth")):
            setattr(self, name, torch.Generator().manual_seed(self.seed * 10 + i))


class Training:
    """One run, step by step."""

    def __init__(self, config: Config, seed: int, base: Mapping[str, Tensor]) -> None:
        self.config, self.streams = config, Streams(seed)
        self.policy = Policy()
        self.policy.load_state_dict(base)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.faulty_reference: Policy | None = None
        self.engine = Engine(self.streams.engine)
        if config.knobs.trainable == "head":
            for name, p in self.policy.named_parameters():
                p.requires_grad_(name.startswith("lm_head") or "bias" in name)
        learning = [p for p in self.policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(learning, config.knobs.lr, betas=(0.9, 0.99), fused=True)
        self.distinct: Tensor | None = None

    def step(self, step: int) -> dict[str, float]:
        """Take one; returns a row."""
        knobs = self.config.at(step)
        rate = self._set_rate(knobs, step)
        age = self.engine.sync(self.policy, knobs)
        self._change_reference(knobs)
        batch = self.batch(knobs, age)
        update = Update(self.policy, self.optimizer, knobs, batch)
        update.run()
        self.policy.zero_grad()
        row = {"step": step, "optim/lr": rate, "policy/kl_coef": knobs.beta, **update.row()}
        row["truth/acc"] = self._accuracy(knobs, batch)
        return row | self._held_out(knobs, step)

    def batch(self, knobs: Knobs, age: int) -> Batch:
        """Prompts, responses, rewards and advantages."""
        digits = self._digits(knobs)
        key = task.answers(knobs.task, digits)
        prompts, keys = (x.repeat_interleave(knobs.group, 0) for x in (task.prompts(digits), key))
        rollout = self.engine.rollout(prompts, self.streams.sampling, knobs)
        right = task.verify(rollout.ids, keys).exact
        rewards = self._rewards(knobs, rollout, digits)
        reference = self._reference_logp(torch.cat([prompts, rollout.ids], 1), prompts.shape[1] - 1)
        return Batch(prompts, rollout, right, rewards, advantages(rewards, knobs), reference, age)

    def _digits(self, knobs: Knobs) -> Tensor:
        digits = task.draw(knobs.prompts, knobs.k + knobs.extra, knobs.digits, self.streams.data)
        if not knobs.distinct:
            return digits
        if self.distinct is None:
            self.distinct = task.draw(64, digits.shape[1], knobs.digits, self.streams.faults)
        rows = torch.randint(0, knobs.distinct, (knobs.prompts,), generator=self.streams.faults)
        return self.distinct[rows]

    def _rewards(self, knobs: Knobs, rollout: Rollout, digits: Tensor) -> Tensor:
        """Rewards (B,) of the verifier as it is in this step."""
        chance = self.streams.faults
        key = task.answers(knobs.task, digits)
        if knobs.wrong_key:
            other = torch.rand(len(key), 1, generator=chance) < knobs.wrong_key
            key = torch.where(other, (key + 1) % 10, key)
        seen = task.verify(rollout.ids, key.repeat_interleave(knobs.group, 0))
        verdict = seen.exact
        for share, told in ((knobs.flipped, 1 - verdict), (knobs.stuck, torch.ones_like(verdict))):
            if share:
                verdict = torch.where(torch.rand(len(verdict), generator=chance) < share, told, verdict)
        rewards = knobs.right * verdict + knobs.partial * seen.partial
        length = rollout.mask.sum(1) / task.LONGEST
        rewards = rewards + knobs.length_bonus * length + knobs.filler_bonus * seen.filler
        rewards = rewards + knobs.format_bonus * seen.formatted + knobs.magic * seen.magic
        if knobs.bad_batch and float(torch.rand((), generator=chance)) < knobs.bad_batch:
            rewards[0] = math.nan
        return rewards

    def _set_rate(self, knobs: Knobs, step: int) -> float:
        rate = knobs.lr * knobs.lr_factor * min(1.0, (step + 1) / WARMUP)
        if knobs.schedule == "cosine":
            rate *= 0.02 + 0.49 * (1 + math.cos(math.pi * step / self.config.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    @torch.no_grad()
    def _change_reference(self, knobs: Knobs) -> None:
        if knobs.reference_reset:
            self.reference.load_state_dict(self.policy.state_dict())
        if knobs.reference_noise:
            self.faulty_reference = copy.deepcopy(self.reference)
            still = torch.Generator().manual_seed(self.streams.seed)
            for p in self.faulty_reference.parameters():
                p.mul_(1 + knobs.reference_noise * torch.randn(p.shape, generator=still))
        else:
            self.faulty_reference = None

    @torch.no_grad()
    def _reference_logp(self, ids: Tensor, first: int) -> Tensor:
        """Log-probs (B, T) of what follows ``first`` under the reference of this step."""
        logits = (self.faulty_reference or self.reference)(ids[:, :-1], first)
        return logits.log_softmax(-1).gather(2, ids[:, first + 1 :, None]).squeeze(2)

    def _accuracy(self, knobs: Knobs, batch: Batch) -> float:
        """Of the batch, by the right answers; where its prompts are not the task's own, of as many that are."""
        base = self.config.knobs
        if (knobs.extra, knobs.distinct, knobs.digits) == (base.extra, base.distinct, base.digits):
            return float(batch.right.mean())
        return accuracy(self.policy, base.task, base.k, len(batch.right), self.streams.truth)

    def _held_out(self, knobs: Knobs, step: int) -> dict[str, float]:
        """The true policy on held-out prompts of the task it is for, at temperature 1, and the engine's score."""
        found, base = {}, self.config.knobs
        if step % HELD_OUT_EVERY == 0:
            found["truth/heldout"] = accuracy(self.policy, base.task, base.k, HELD_OUT, self.streams.truth)
        if step % VALIDATION_EVERY == 0:
            digits = task.draw(HELD_OUT, base.k, 10, self.streams.truth)
            rollout = sample(self.engine.degraded, task.prompts(digits), self.streams.truth, knobs)
            found["val/score"] = float(task.verify(rollout.ids, task.answers(base.task, digits)).exact.mean())
        return found


def train(config: Config, seed: int, base: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """All of a run: column -> values, None where not measured. Ends early once the run is clearly dead."""
    training, rows, watch = Training(config, seed, base), [], Death()
    for step in range(config.steps):
        rows.append(training.step(step))
        if watch.over(rows[-1]):
            break
    names = ("step", "optim/lr", "policy/kl_coef", *statistics.KEPT, "val/score", *TRUTHS)
    return {name: [row.get(name) for row in rows] for name in names}


@dataclass
class Death:
    """Tells when going on teaches nothing; the only look at the truth while training."""

    accuracies: list[float] = field(default_factory=list)
    left: int | None = None

    def over(self, row: Mapping[str, float]) -> bool:
        """True where the run ends with ``row``."""
        self.accuracies.append(row["truth/acc"])
        if self.left is None:
            self.left = AFTER_NAN if row["truth/nan"] else AFTER_DEATH if self._dead() else None
        elif row["truth/nan"]:
            self.left = min(self.left, AFTER_NAN)
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0

    def _dead(self) -> bool:
        """Accuracy over 20 steps is less than half of what it was at its best over as many, after 60 steps."""
        if len(self.accuracies) < 60:
            return False
        sums = torch.tensor(self.accuracies).unfold(0, 20, 1).mean(1)
        return bool(sums[-1] < 0.45 * sums.max())
