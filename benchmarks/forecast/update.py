"""The optimizer steps of one step, and what is measured on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from forecast import statistics, task
from forecast.knobs import Knobs
from forecast.policy import Policy, Rollout
from torch import Tensor

from rlwatch.tensors.masked import sharing
from rlwatch.tensors.tokens import TokenBatch

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Batch:
    """The rollouts of a step, (B, T), what they are worth, (B,), and how many updates old their engine is.

    ``reference``: log-probs (B, T) of the responses under the reference.
    """

    prompts: Tensor
    rollout: Rollout
    right: Tensor
    rewards: Tensor
    advantages: Tensor
    reference: Tensor
    age: int

    @property
    def ids(self) -> Tensor:
        """Prompts and responses."""
        return torch.cat([self.prompts, self.rollout.ids], 1)

    @property
    def first(self) -> int:
        """Position that predicts the first token of a response."""
        return self.prompts.shape[1] - 1


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

    def __init__(self, policy: Policy, optimizer: Optimizer, knobs: Knobs, batch: Batch) -> None:
        self.policy, self.optimizer, self.knobs, self.batch = policy, optimizer, knobs, batch
        self.ids, self.first = batch.ids, batch.first
        self.age = torch.full((len(self.ids),), float(batch.age))
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
        """Metrics that were measured."""
        right = self.batch.right.bool()
        with torch.no_grad(), sharing():
            row = statistics.settled(
                statistics.of_tokens(statistics.joined(self.views)),
                statistics.of_rewards(self.batch.rewards, right, self.knobs.group),
                statistics.of_updates(self.norms, self.losses, self.skipped),
            )
        return row | {"truth/nan": float(self.broken > 0), "truth/skipped": float(self.skipped > 0)}

    def _take(self, rows: Tensor) -> None:
        """One optimizer step on ``rows``."""
        knobs, optimizer = self.knobs, self.optimizer
        logp, entropy = self._log_probs(rows)
        if self.old is None:
            self.old = logp.detach()
        loss = self._loss(rows, logp, entropy)
        optimizer.zero_grad()
        (loss * (knobs.loss_scale or 1.0)).backward()
        if knobs.loss_scale:
            for p in optimizer.param_groups[0]["params"]:
                p.grad.copy_(p.grad.half().float() / knobs.loss_scale)
        self.norms.append(statistics.of_gradients(self.policy))
        self.losses.append(loss.detach())
        self._apply(bool(loss.isfinite()) and bool(self.norms[-1].total.isfinite()))

    def _apply(self, finite: bool) -> None:
        """Clip the gradient and step, or skip."""
        if self.knobs.skip_nonfinite and not finite:
            self.skipped += 1
            return
        scale = self.knobs.grad_clip / (float(self.norms[-1].total) + 1e-6)
        if finite and 0 < scale < 1:
            torch._foreach_mul_([p.grad for p in self.optimizer.param_groups[0]["params"]], scale)
        self.optimizer.step()
        self.broken += not finite

    def _log_probs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of the sampled tokens, and entropies, (B, T); as measured, in the precision that the run trains in."""
        logits = self.policy(self.ids[rows, :-1], self.first)
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
        mask, engine, reference = rollout.mask[rows], rollout.logp[rows], self.batch.reference[rows]
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
            ref_logp=self.batch.reference[rows],
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
