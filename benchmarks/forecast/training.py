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
from torch import Tensor

from rlwatch.tensors.masked import counting_once
from rlwatch.tensors.tokens import TokenBatch

WARMUP = 10
HELD_OUT_EVERY, VALIDATION_EVERY, HELD_OUT = 10, 25, 96
AFTER_DEATH, AFTER_NAN = 45, 12
"""Steps a run goes on when it is clearly dead, or its weights are not finite."""
TRUTHS = ("truth/acc", "truth/heldout", "truth/nan", "truth/skipped")


@dataclass(frozen=True)
class Batch:
    """The rollouts of a step, (B, T), and what they are worth, (B,)."""

    prompts: Tensor
    rollout: Rollout
    right: Tensor
    rewards: Tensor
    advantages: Tensor


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
        batch = self.batch(knobs)
        update = Update(self, knobs, batch, age)
        update.run()
        self.policy.zero_grad()
        row = {"step": step, "optim/lr": rate, "policy/kl_coef": knobs.beta, **update.row()}
        row["truth/acc"] = float(batch.right.mean())
        return row | self._held_out(knobs, step)

    def batch(self, knobs: Knobs) -> Batch:
        """Prompts, responses, rewards and advantages."""
        digits = self._digits(knobs)
        key = task.answers(knobs.task, digits)
        prompts, keys = (x.repeat_interleave(knobs.group, 0) for x in (task.prompts(digits), key))
        rollout = self.engine.rollout(prompts, self.streams.sampling, knobs)
        right = task.verify(rollout.ids, keys).exact
        rewards = self._rewards(knobs, rollout, digits)
        return Batch(prompts, rollout, right, rewards, advantages(rewards, knobs))

    def _digits(self, knobs: Knobs) -> Tensor:
        digits = task.draw(knobs.prompts, knobs.k + knobs.extra, knobs.digits, self.streams.data)
        if not knobs.distinct:
            return digits
        if self.distinct is None:
            self.distinct = task.draw(64, digits.shape[1], knobs.digits, self.streams.faults)
        rows = torch.randint(0, knobs.distinct, (knobs.prompts,), generator=self.streams.faults)
        return self.distinct[rows]

    def _rewards(self, knobs: Knobs, rollout: Rollout, digits: Tensor) -> Tensor:
        """What the verifier, as it is in this step, gives (B,)."""
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
    def reference_logp(self, ids: Tensor, first: int) -> Tensor:
        """Log-probs (B, T) of what follows ``first`` under the reference of this step."""
        logits = (self.faulty_reference or self.reference)(ids[:, :-1], first)
        return logits.log_softmax(-1).gather(2, ids[:, first + 1 :, None]).squeeze(2)

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


def advantages(rewards: Tensor, knobs: Knobs) -> Tensor:
    """Of rewards (B,) in groups, with whatever is wrong with them."""
    grouped = rewards.view(-1, knobs.group)
    centred = grouped - grouped.mean(1, keepdim=True)
    if knobs.advantage == "rloo":
        centred = centred * knobs.group / (knobs.group - 1)
    elif knobs.advantage == "std":
        centred = centred / (grouped.std(1, keepdim=True) + knobs.advantage_eps)
    elif knobs.advantage == "batch":
        centred = centred / (grouped.std() + knobs.advantage_eps)
    elif knobs.advantage == "uncentred":
        centred = grouped / (grouped.std(1, keepdim=True) + 0.1)
    weighed = torch.where(centred > 0, centred * knobs.positive_weight, centred * knobs.negative_weight)
    return (weighed + knobs.advantage_shift).flatten()


class Update:
    """The optimizer steps of one step, and what was measured on the way."""

    def __init__(self, training: Training, knobs: Knobs, batch: Batch, age: int) -> None:
        self.training, self.knobs, self.batch = training, knobs, batch
        self.first = batch.prompts.shape[1] - 1
        self.ids = torch.cat([batch.prompts, batch.rollout.ids], 1)
        self.reference = training.reference_logp(self.ids, self.first)
        self.age = torch.full((len(self.ids),), float(age))
        self.cut = ~(batch.rollout.ids == task.END).any(1)
        self.views: list[TokenBatch] = []
        self.norms: list[statistics.GradNorms] = []
        self.losses: list[Tensor] = []
        self.skipped = self.broken = 0
        self.old: Tensor | None = None

    def run(self) -> None:
        """All epochs and mini-batches."""
        rows = torch.arange(len(self.ids))
        if self.knobs.minibatches > 1:
            with torch.no_grad():
                self.old = self._log_probs(rows)[0]
        for _ in range(self.knobs.mu):
            for part in rows.chunk(self.knobs.minibatches):
                self._take(part)

    def row(self) -> dict[str, float]:
        """What was measured."""
        right = self.batch.right.bool()
        with torch.no_grad(), counting_once():
            row = statistics.settled(
                statistics.of_tokens(statistics.joined(self.views)),
                statistics.of_rewards(self.batch.rewards, right, self.knobs.group),
                statistics.of_updates(self.norms, self.losses, self.skipped),
            )
        return row | {"truth/nan": float(self.broken > 0), "truth/skipped": float(self.skipped > 0)}

    def _take(self, rows: Tensor) -> None:
        """One optimizer step on ``rows``."""
        knobs, policy, optimizer = self.knobs, self.training.policy, self.training.optimizer
        logp, entropy = self._log_probs(rows)
        if self.old is None:
            self.old = logp.detach()
        loss = self._loss(rows, logp, entropy)
        optimizer.zero_grad()
        (loss * (knobs.loss_scale or 1.0)).backward()
        if knobs.loss_scale:
            for p in optimizer.param_groups[0]["params"]:
                p.grad.copy_(p.grad.half().float() / knobs.loss_scale)
        self.norms.append(statistics.of_gradients(policy))
        self.losses.append(loss.detach())
        finite = bool(loss.isfinite()) and bool(self.norms[-1].total.isfinite())
        if knobs.grad_clip and finite:
            scale = knobs.grad_clip / (float(self.norms[-1].total) + 1e-6)
            if scale < 1:
                torch._foreach_mul_([p.grad for p in optimizer.param_groups[0]["params"]], scale)
        if finite or not knobs.skip_nonfinite:
            optimizer.step()
            self.broken += not finite
        else:
            self.skipped += 1

    def _log_probs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of the sampled tokens, and entropies, (B, T); as measured, in the precision that the run trains in."""
        logits = self.training.policy(self.ids[rows, :-1], self.first)
        if self.knobs.loss_scale:
            logits = logits.half().float()
        logps = logits.log_softmax(-1)
        probs = logps.exp()
        if self.knobs.half_entropy:
            entropy = -(probs.half() * probs.half().log()).float().sum(-1)
        else:
            entropy = -(probs * logps).sum(-1)
        return logps.gather(2, self.ids[rows, self.first + 1 :, None]).squeeze(2), entropy

    def _loss(self, rows: Tensor, logp: Tensor, entropy: Tensor) -> Tensor:
        """Mean over the tokens of ``rows``; keeps what rlwatch is to see."""
        knobs, rollout = self.knobs, self.batch.rollout
        mask, engine, reference = rollout.mask[rows], rollout.logp[rows], self.reference[rows]
        trainer = self.old[rows]
        old = engine if knobs.old == "engine" else trainer
        advantage = self.batch.advantages[rows, None]
        bounds = (knobs.clip_low, knobs.clip_high)
        ratio = (logp - old).clamp(-20, 20).exp()
        policy = ratio * advantage
        if knobs.clip:
            policy = torch.minimum(policy, ratio.clamp(1 - bounds[0], 1 + bounds[1]) * advantage)
        if knobs.truncation:
            policy = policy * (trainer - engine).exp().clamp(max=knobs.truncation)
        loss = -policy
        if knobs.beta:
            loss = loss + knobs.beta * penalty(knobs.kl, reference - logp)
        if knobs.entropy or knobs.half_entropy:
            loss = loss - knobs.entropy * entropy
        self.views.append(self._view(rows, logp, entropy))
        return torch.where(mask, loss, 0.0).sum() / mask.sum()

    def _view(self, rows: Tensor, logp: Tensor, entropy: Tensor) -> TokenBatch:
        rollout, knobs = self.batch.rollout, self.knobs
        return TokenBatch(
            logp=logp.detach(),
            mask=rollout.mask[rows],
            entropy=entropy.detach(),
            ids=rollout.ids[rows],
            advantages=self.batch.advantages[rows],
            old_logp=self.old[rows],
            ref_logp=self.reference[rows],
            rollout_logp=rollout.logp[rows],
            clip=(knobs.clip_low, knobs.clip_high),
            truncation=knobs.truncation or None,
            cut=self.cut[rows],
            staleness=self.age[rows],
        )


def penalty(kind: str, gap: Tensor) -> Tensor:
    """The estimator of KL to the reference per token; ``gap`` is log reference - log policy."""
    if kind == "k1":
        return -gap
    return gap.square() / 2 if kind == "k2" else gap.exp() - 1 - gap


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
        """Whether the run ends with ``row``."""
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
