"""The policy, the rollout engine that samples from a copy of it, and the demonstrations both start from."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
from forecast import task
from forecast.knobs import Knobs
from torch import Tensor, nn
from torch.nn import functional

WIDTH, EMBEDDING = 48, 24
BASES = 2
"""Policies fitted to demonstrations for each task and number of digits."""
LOOSE = (0.95, 0.98, 0.99, 0.997)
"""Cold policies, numbered from :data:`BASES` on: the share of their last demonstrations that lacks the ANSWER token."""
LOOSENED_FOR = 150
"""Steps on such demonstrations."""


class Policy(nn.Module):
    """An LSTM over 32 tokens, 17 thousand parameters: on a CPU it takes half the time of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(task.VOCABULARY, EMBEDDING)
        self.layers = nn.ModuleList([nn.LSTM(EMBEDDING, WIDTH, batch_first=True)])
        self.lm_head = nn.Linear(WIDTH, task.VOCABULARY)

    def forward(self, ids: Tensor, first: int) -> Tensor:
        """Logits (B, T - first, V) of what follows each position from ``first`` on."""
        hidden, _ = self.layers[0](self.embed(ids))
        return self.lm_head(hidden[:, first:])


@dataclass(frozen=True)
class Rollout:
    """Responses: ids, log-probs as the engine says and mask, (B, T) each; ``mask`` includes the END token."""

    ids: Tensor
    logp: Tensor
    mask: Tensor


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, generator: torch.Generator, knobs: Knobs | None = None) -> Rollout:
    """Token by token; ``knobs``: temperature, END bias and rounding of the engine, None: exact, at temperature 1.

    By the Gumbel trick, so that NaN logits give token id 0, as real engines do.
    """
    n, rounds = prompts.shape[0], knobs is not None and knobs.engine == "bf16"
    temperature, bias = (1.0, 0.0) if knobs is None else (knobs.temperature, knobs.end_bias)
    noise = torch.empty(task.LONGEST, n, task.VOCABULARY).exponential_(generator=generator).log_().neg_()
    lstm = policy.layers[0]
    inputs = policy.embed.weight @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + lstm.bias_hh_l0  # what each token adds
    hidden, cell = (state[0] for state in lstm(policy.embed(prompts))[1])
    ids, logps, masks, on = [], [], [], torch.ones(n, dtype=torch.bool)
    for gumbel in noise:
        logits = policy.lm_head(hidden)
        if rounds:
            logits = logits.bfloat16().float()
        if bias:
            logits = logits + bias * (torch.arange(task.VOCABULARY) == task.END)
        logp = (logits / temperature).log_softmax(-1)
        token = (logp + gumbel).argmax(-1)
        ids.append(torch.where(on, token, 0))
        logps.append(logp.gather(1, token[:, None]).squeeze(1))
        masks.append(on)
        on = on & (token != task.END)
        if not on.any():
            break
        hidden, cell = _next(inputs[token] + hidden @ lstm.weight_hh_l0.T, cell)
        if rounds:
            hidden = hidden.bfloat16().float()
    return Rollout(torch.stack(ids, 1), torch.stack(logps, 1), torch.stack(masks, 1))


def _next(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden state and cell of an LSTM after a step with ``gates`` (B, 4 WIDTH)."""
    given, kept, new, shown = gates.chunk(4, 1)
    cell = kept.sigmoid() * cell + given.sigmoid() * new.tanh()
    return shown.sigmoid() * cell.tanh(), cell


@dataclass
class Engine:
    """The rollout engine: weights of its own, synchronised now and then, in numerics of its own."""

    generator: torch.Generator
    degraded: Policy = field(default_factory=Policy)
    sound: Policy = field(default_factory=Policy)
    _age: int | None = None
    _frozen: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def sync(self, policy: Policy, knobs: Knobs) -> int:
        """Take the weights of ``policy`` where they are due; returns how many updates old they are. Once a step."""
        if knobs.share < 1:
            self.sound.load_state_dict(policy.state_dict())
        self._age = 0 if self._age is None or self._age + 1 >= knobs.stale else self._age + 1
        if self._age == 0:
            self.degraded.load_state_dict(policy.state_dict())
            self._degrade(knobs)
        return self._age

    def rollout(self, prompts: Tensor, generator: torch.Generator, knobs: Knobs) -> Rollout:
        """Responses to ``prompts``; of a share of them, from the degraded weights."""
        bad = round(knobs.share * knobs.group)
        if bad >= knobs.group:
            return sample(self.degraded, prompts, generator, knobs)
        worse = torch.arange(prompts.shape[0]) % knobs.group < bad
        parts = {True: sample(self.degraded, prompts[worse], generator, knobs)}
        parts[False] = sample(self.sound, prompts[~worse], generator)
        longest = max(part.ids.shape[1] for part in parts.values())
        return Rollout(*(_woven(parts, worse, name, longest) for name in ("ids", "logp", "mask")))

    def _degrade(self, knobs: Knobs) -> None:
        matrices = [p for p in self.degraded.parameters() if p.ndim == 2]
        if knobs.noise:
            if knobs.fresh_noise or not self._frozen:
                self._frozen = [torch.randn(p.shape, generator=self.generator) for p in matrices]
            for p, noise in zip(matrices, self._frozen, strict=True):
                p.mul_(1 + knobs.noise * noise)
        if knobs.engine == "bf16":
            for p in self.degraded.parameters():
                p.copy_(p.bfloat16().float())
        if knobs.engine.startswith("int"):
            for p in matrices:
                p.copy_(quantised(p, int(knobs.engine[3:])))


def _woven(parts: dict[bool, Rollout], worse: Tensor, name: str, longest: int) -> Tensor:
    """A field of both parts in the order of the prompts, padded to the ``longest``."""
    some = getattr(parts[True], name)
    whole = torch.zeros(len(worse), longest, dtype=some.dtype)
    for is_worse, part in parts.items():
        values = getattr(part, name)
        whole[worse == is_worse, : values.shape[1]] = values
    return whole


def quantised(weights: Tensor, bits: int) -> Tensor:
    """Symmetric, one scale a row."""
    top = 2 ** (bits - 1) - 1
    scale = weights.abs().amax(1, keepdim=True) / top + 1e-12
    return (weights / scale).round() * scale


def fitted(name: str, k: int, number: int, folder: Path | None = None, most: int = 3500) -> dict[str, Tensor]:
    """State of a policy fitted to noisy demonstrations until it is right in about 40 %, kept in ``folder``.

    ``number`` tells apart those of one task; they differ in seed and in how good they are. From :data:`BASES` on they
    are cold: such a policy, then taught to leave out the ANSWER token, so that next to nothing it says is in the format
    that is verified.
    """
    kept = None if folder is None else folder / f"{name}-{k}-{number}.pt"
    if kept is not None and kept.exists():
        return torch.load(kept, weights_only=True)
    if number < BASES:
        state = _fit(name, k, number, most)
    else:
        state = _loosened(fitted(name, k, number % BASES, folder, most), name, k, number)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside = kept.with_name(f".{kept.name}.{os.getpid()}.tmp")
        torch.save(state, beside)
        os.replace(beside, kept)  # noqa: PTH105  (atomic on one file system)
    return state


def _fit(name: str, k: int, number: int, most: int) -> dict[str, Tensor]:
    goal = 0.42 + 0.06 * (number % BASES)
    first = 1000 * number + 10 * k + task.TASKS.index(name)
    tries = (_taught(name, k, goal, most, first + 10_000 * attempt) for attempt in count())
    return next(policy for policy in tries if policy is not None).state_dict()


def _loosened(state: dict[str, Tensor], name: str, k: int, number: int) -> dict[str, Tensor]:
    """Policy that was shown demonstrations of which most lack the ANSWER token."""
    policy, generator, loose = Policy(), torch.Generator().manual_seed(number), LOOSE[number - BASES]
    policy.load_state_dict(state)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    for _ in range(LOOSENED_FOR):
        digits = task.draw(96, k, 10, generator)
        _show(policy, optimizer, task.demonstrations(name, digits, 0.07, generator, loose), k)
    return policy.state_dict()


def _taught(name: str, k: int, goal: float, most: int, seed: int) -> Policy | None:
    """A policy that reaches ``goal`` within ``most`` steps, None where it does not."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    for step in range(1, most + 1):
        _show(policy, optimizer, task.demonstrations(name, task.draw(96, k, 10, generator), 0.07, generator), k)
        if step % 25 == 0 and accuracy(policy, name, k, 400, generator) >= goal:
            return policy
    return None


def _show(policy: Policy, optimizer: torch.optim.Optimizer, ids: Tensor, k: int) -> None:
    """One step on the demonstrations ``ids`` (B, T), whose prompts have ``k`` digits."""
    logits = policy(ids[:, :-1], k + 1)
    loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, k + 2 :].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def accuracy(policy: Policy, name: str, k: int, n: int, generator: torch.Generator) -> float:
    """Share of exactly right answers to ``n`` new prompts, sampled at temperature 1."""
    digits = task.draw(n, k, 10, generator)
    rollout = sample(policy, task.prompts(digits), generator)
    return float(task.verify(rollout.ids, task.answers(name, digits)).exact.mean())
