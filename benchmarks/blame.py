"""What localisation says of spikes that were planted: verdict, cause, cure and record, beside an oracle.

    python benchmarks/blame.py [--seeds 3] [--first 0] [--only own|trl] [--verbose]

Kinds of plants, in a loop of one's own (a real ``Watcher``) and in the real TRL trainer, tiny random Qwen2 models on
one CPU thread. A run trains on for some healthy steps between two plants; each plant is in one step. Judged are

- ``verdict`` and ``cause``: among those that are right for the plant;
- ``cure``: the norm that the first cure promises against the norm reached when it is applied and the step run again,
  with the same weights and rollouts: the relative error;
- ``recall``, ``precision`` of the tokens recorded, where tokens are to blame. The oracle takes the own gradient of
  every token by a backward of it alone, with and without the plant: tokens that matter are the fewest that hold 95 %
  of what the plant added; a token that the plant did not touch is none. Where no token is to blame, to name one is a
  miss;
- ``passes``: forwards of the whole step, and backwards of single responses, or whole micro-batches;
- ``identical``: parameters after training, watched and not watched, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "gradloc"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "integrations"))
from tiny_step import outputs, policy

import rlwatch
from rlwatch.integrations.localising import Localise
from rlwatch.records import CULPRITS

FIRST, EVERY = 14, 4
"""Step of the first plant, and healthy steps from one to the next."""
SETTINGS = Localise(share=0.9, allowance_s=600.0)
COVERED = 0.95


@dataclass
class Judged:
    """One plant: what was said of it, and whether that is right."""

    where: str
    kind: str
    seed: int
    found: bool = False
    verdict: bool = False
    cause: bool = False
    cure: float | None = None
    recall: float | None = None
    precision: float | None = None
    forwards: int = 0
    backwards: int = 0
    said: str = ""


@dataclass(frozen=True)
class Expected:
    """Right answers for a plant."""

    verdicts: Sequence[str]
    causes: Sequence[str]

    @property
    def of_tokens(self) -> bool:
        """True where tokens are to blame."""
        return self.verdicts[0] not in {"batch-wide", "not from tokens", "layer"}


TOKEN = ("token", "stretch")
REWARD = Expected(TOKEN, ["reward outlier"])
RATIO = Expected(TOKEN, ["token ratio"])
KL = Expected(TOKEN, ["KL term"])
WEIGHT = Expected(TOKEN, ["importance weight"])
RESPONSE = Expected(["response"], ["reward outlier"])
DRIFT = Expected(["response"], ["sequence ratio"])
PROMPTED = Expected(["prompt group"], ["reward outlier"])
TASKED = Expected(["task"], ["reward outlier"])
SCALE = Expected(["batch-wide"], ["advantage scale"])
NORMALISER = Expected(["batch-wide"], ["normaliser"])
KL_WEIGHT = Expected(["batch-wide"], ["KL term"])
ENTROPY = Expected(["batch-wide"], ["entropy term"])
OUTSIDE = Expected(["not from tokens"], ["another term"])
LAYERED = Expected(["layer"], ["layer"])


def matters(before: Tensor, after: Tensor) -> set[tuple[int, int]]:
    """The fewest tokens (row, position) that hold most of what was added to own norms (B, T)."""
    added = (after - before).clamp(min=0)
    order = added.flatten().argsort(descending=True)
    held = added.flatten()[order].cumsum(0)
    count = int((held < COVERED * held[-1]).sum()) + 1
    width = added.shape[1]
    return {(int(i) // width, int(i) % width) for i in order[:count]}


def touched(before: Tensor, after: Tensor) -> set[tuple[int, int]]:
    """Tokens (row, position) whose coefficient (B, T) the plant changed by more than a per cent of the largest."""
    return {tuple(at) for at in ((after - before).abs() > 0.01 * after.abs().max()).nonzero().tolist()}


def recorded(spikes: Sequence[Any], step: int) -> set[tuple[int, int]]:
    """(sequence, position) of the culprits of a step."""
    batches = [batch for batch in spikes if batch.step == step and batch.reason == CULPRITS]
    return {
        (int(row), int(position))
        for batch in batches
        for row, position in zip(batch.columns["sequence"], batch.columns["position"], strict=True)
    }


def norm_of(model: Any) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))


def token_norms(logp: Tensor, mask: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """(B, T) norm of the gradient of each token's log-prob, by a backward of it alone."""
    norms = torch.zeros(mask.shape, dtype=torch.float64)
    for row, position in mask.nonzero().tolist():
        grads = torch.autograd.grad(logp[row, position], parameters, retain_graph=True, allow_unused=True)
        norms[row, position] = math.sqrt(sum(float(g.double().square().sum()) for g in grads if g is not None))
    return norms


def judge(judged: Judged, expected: Expected, body: dict[str, Any] | None) -> None:
    """Compare what was said with what is right."""
    if body is None or body.get("why_not"):
        judged.said = "not localised" if body is None else f"not localised: {body['why_not']}"
        return
    judged.found = True
    judged.verdict = body["verdict"] in expected.verdicts
    judged.cause = body["cause"] in expected.causes
    judged.forwards, judged.backwards = body["cost"]["forwards"], body["cost"]["backwards"]
    judged.said = f"{body['verdict']} | {body['cause']} | {body['message']}"


def judge_record(
    judged: Judged, expected: Expected, named: set[tuple[int, int]], coefficients: Sequence[Tensor], norms: Tensor
) -> None:
    """``coefficients``: without and with the plant; ``norms`` those of log-probs."""
    if not expected.of_tokens:
        judged.precision = float(not named)
        return
    before, after = (a.double().abs() * norms for a in coefficients)
    true, planted = matters(before, after), touched(*coefficients)
    judged.recall = len(true & named) / len(true)
    judged.precision = len(planted & named) / len(named) if named else 0.0


# A loop of one's own: PPO or GSPO or CISPO with importance weights, a KL term and an entropy bonus.

PROMPTS, GROUP, LENGTH, PROMPT = 4, 4, 12, 4
TASKS = ["math", "math", "code", "code"]


@dataclass
class Batch:
    """Rollouts (B, ...), and what a plant does to the loss."""

    ids: Tensor
    mask: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    advantages: Tensor
    beta: float = 0.01
    entropy: float = 0.001
    scale: float = 1.0
    penalty: float = 0.0
    layer: float = 1.0
    cure: tuple[str, float | None] = ("", None)


LAYER = "model.layers.1"


def rebalanced(model: Any, factor: float) -> None:
    """Values of a layer's attention ``factor`` times smaller, its output weights as much larger: the same function."""
    if factor == 1.0:
        return
    attention = model.get_submodule(LAYER).self_attn
    with torch.no_grad():
        attention.v_proj.weight /= factor
        attention.v_proj.bias /= factor
        attention.o_proj.weight *= factor


def clipped(parameters: Sequence[Tensor], limit: float) -> None:
    """Clip the gradient of some parameters to a norm."""
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))
    for p in parameters:
        if p.grad is not None:
            p.grad *= min(1.0, limit / norm)


@dataclass(frozen=True)
class Loss:
    """Shape of the loss of a run."""

    level: str = "token"
    capped: bool = False
    weighted: bool = False

    def __call__(self, model: Any, logp: Tensor, entropy: Tensor, b: Batch) -> Tensor:
        log_ratio = logp - b.old
        if self.level == "response":
            log_ratio = ((log_ratio * b.mask).sum(1) / b.mask.sum(1)).unsqueeze(1).expand_as(logp)
        advantages = b.advantages
        kind, value = b.cure
        if kind == "clip advantages":
            advantages = advantages.clamp(-value, value)
        ratio = log_ratio.exp()
        if self.capped:
            term = -ratio.detach() * advantages * logp
        else:
            term = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        if self.weighted:
            weight = (b.old - b.rollout).exp()
            term = term * (weight.clamp(max=value) if kind == "truncate weights" else weight)
        if kind in {"clip ratios", "clip response ratios"}:
            term = torch.where(ratio > value, 0.0, term)
        gap = b.ref - logp
        if kind == "clip KL":
            gap = gap.clamp(-value, value)
        term = term + b.beta * (gap.exp() - gap - 1) - b.entropy * entropy
        loss = b.scale * (term * b.mask).sum() / b.mask.sum()
        return loss + b.penalty * sum(p.square().sum() for p in model.parameters())


def fresh(model: Any, seed: int) -> Batch:
    """A healthy step: policies 0.05 nats apart, advantages centred by group."""
    draw = torch.Generator().manual_seed(seed)
    rows = PROMPTS * GROUP
    ids = torch.randint(3, model.config.vocab_size, (rows, PROMPT + LENGTH), generator=draw)
    with torch.no_grad():
        logp = outputs(model, ids, PROMPT).logp
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=draw)
    mask = torch.arange(LENGTH).expand(rows, LENGTH) < lengths
    noise = torch.randn(3, rows, LENGTH, generator=draw) * 0.05
    rewards = torch.rand(PROMPTS, GROUP, generator=draw)
    grouped = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    advantages = grouped.flatten()[:, None].expand(rows, LENGTH).clone()
    old = logp + noise[0]
    return Batch(ids, mask, old, old + noise[2], logp + noise[1], advantages)


def places(batch: Batch, k: int, seed: int, *, negative: bool = False) -> tuple[Tensor, Tensor]:
    """``k`` tokens, of responses with a negative advantage where asked."""
    allowed = (batch.mask & (batch.advantages < -0.3) if negative else batch.mask).nonzero()
    chosen = allowed[torch.randperm(len(allowed), generator=torch.Generator().manual_seed(seed))[:k]]
    return chosen[:, 0], chosen[:, 1]


def at_tokens(name: str, k: int, change: Callable[[Tensor], Tensor], *, negative: bool = False) -> Callable[..., None]:
    def plant(batch: Batch, seed: int) -> None:
        at, column = places(batch, k, seed, negative=negative), getattr(batch, name)
        column[at] = change(column[at])

    return plant


def shrunk(batch: Batch, seed: int) -> None:
    """Advantage x 6000 where the ratio is 0.05."""
    at = places(batch, 1, seed)
    batch.advantages[at] = 6000.0
    batch.old[at] += 3.0


def with_ref(batch: Batch, seed: int) -> None:
    """Advantage x 300 where the reference is 2 nats away, which the KL term weighs with next to nothing."""
    at = places(batch, 1, seed)
    batch.advantages[at] = 300.0
    batch.ref[at] += 2.0


def at_rows(rows: Callable[[int], Sequence[int]], factor: float) -> Callable[..., None]:
    def plant(batch: Batch, seed: int) -> None:
        batch.advantages[[row % len(batch.advantages) for row in rows(seed)]] *= factor

    return plant


def one_row(batch: Batch, seed: int) -> None:
    """A response with a signal."""
    signal = (batch.advantages[:, 0].abs() > 0.3).nonzero()[:, 0]
    batch.advantages[int(signal[(5 + seed) % len(signal)])] *= 60


def drifted(batch: Batch, seed: int) -> None:
    """A response of negative advantage, every token of which is e^3 times as likely as before."""
    row = int(batch.advantages[:, 0].argsort()[seed % 3])
    batch.old[row] -= 3.0


def one_token_drifted(batch: Batch, seed: int) -> None:
    """One token that moves the ratio of its response."""
    row = int(batch.advantages[:, 0].argsort()[seed % 3])
    batch.old[row, 2] -= 4.0 * int(batch.mask[row].sum())


def setting(name: str, factor: float) -> Callable[..., None]:
    def plant(batch: Batch, _seed: int) -> None:
        setattr(batch, name, getattr(batch, name) * factor if getattr(batch, name) else factor)

    return plant


def whole_batch(factor: float) -> Callable[..., None]:
    def plant(batch: Batch, _seed: int) -> None:
        batch.advantages *= factor

    return plant


PPO, GSPO, WEIGHTED = Loss(), Loss("response"), Loss(capped=True, weighted=True)
OWN: dict[str, tuple[Loss, Callable[..., None], Expected]] = {
    "advantage of a token": (PPO, at_tokens("advantages", 1, lambda a: a.sign() * 400), REWARD),
    "advantages of 20 tokens": (PPO, at_tokens("advantages", 20, lambda a: a.sign() * 90), REWARD),
    "ratio of a token": (PPO, at_tokens("old", 1, lambda x: x - 6, negative=True), RATIO),
    "ratios of 20 tokens": (PPO, at_tokens("old", 20, lambda x: x - 5, negative=True), RATIO),
    "reference of a token": (PPO, at_tokens("ref", 1, lambda x: x + 10), KL),
    "advantage, KL of no weight": (PPO, with_ref, REWARD),
    "advantage, ratio 0.05": (WEIGHTED, shrunk, REWARD),
    "weight of a token": (WEIGHTED, at_tokens("rollout", 1, lambda x: x - 6), WEIGHT),
    "advantage of a response": (PPO, one_row, RESPONSE),
    "a response that drifted": (PPO, drifted, DRIFT),
    "one token, ratio of its response": (GSPO, one_token_drifted, DRIFT),
    "a prompt group": (PPO, at_rows(lambda seed: range(4 * seed, 4 * seed + 4), 50), PROMPTED),
    "a task": (PPO, at_rows(lambda seed: range(8 * (seed % 2), 8 * (seed % 2) + 8), 50), TASKED),
    "all advantages": (PPO, whole_batch(12), SCALE),
    "the normaliser": (PPO, setting("scale", 20), NORMALISER),
    "the KL weight": (PPO, setting("beta", 20_000), KL_WEIGHT),
    "the entropy weight": (PPO, setting("entropy", 20_000), ENTROPY),
    "a term outside": (PPO, setting("penalty", 1.0), OUTSIDE),
    "a layer": (PPO, setting("layer", 60.0), LAYERED),
}  # fmt: skip


class OwnRun:
    """A loop that plants each of ``kinds`` in a step of its own."""

    def __init__(self, loss: Loss, kinds: Sequence[str], seed: int) -> None:
        self.loss, self.kinds, self.seed = loss, list(kinds), seed
        self.snapshots: dict[str, tuple[dict[str, Tensor], Batch, Batch]] = {}
        self.steps = {FIRST + EVERY * i: kind for i, kind in enumerate(self.kinds)}

    def backward(self, model: Any, batch: Batch, forward: Callable[..., Any] | None = None) -> Any:
        out = outputs(model, batch.ids, PROMPT) if forward is None else forward(batch)
        loss = self.loss(model, out.logp, out.entropy, batch)
        return out, loss

    def train(self, watched: bool) -> tuple[Any, Any]:
        from tiny_loop import FakeRun

        model = policy(seed=self.seed, std=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        run = FakeRun()
        watcher = rlwatch.Watcher(model, optimizer, run=run, localise=SETTINGS, strict=True) if watched else None
        for step in range(1, max(self.steps) + 2):
            clean = fresh(model, 1000 * self.seed + step)
            batch = copy.deepcopy(clean)
            if step in self.steps:
                OWN[self.steps[step]][1](batch, self.seed)
                if watched:
                    weights = {name: value.clone() for name, value in model.state_dict().items()}
                    self.snapshots[self.steps[step]] = weights, clean, batch
            optimizer.zero_grad()
            rebalanced(model, batch.layer)
            if watcher is None:
                out = outputs(model, batch.ids, PROMPT)
                logp, entropy = out.logp, out.entropy
            else:
                watcher.rollouts(
                    rewards=clean.advantages[:, 0], groups=[i // GROUP for i in range(PROMPTS * GROUP)],
                    tasks=[TASKS[i // GROUP] for i in range(PROMPTS * GROUP)],
                    ids=batch.ids[:, PROMPT:], mask=batch.mask,
                )  # fmt: skip
                logp, entropy = watcher.forward(_parts, model, batch.ids)
                watcher.observe(
                    logp=logp, entropy=entropy, ids=batch.ids[:, PROMPT:], mask=batch.mask,
                    advantages=batch.advantages, old_logp=batch.old, ref_logp=batch.ref,
                    rollout_logp=batch.rollout if self.loss.weighted else None,
                )  # fmt: skip
            self.loss(model, logp, entropy, batch).backward()
            if watcher is not None:
                watcher.gradients()
            rebalanced(model, 1 / batch.layer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if watcher is not None:
                watcher.step(step)
        if watcher is not None:
            watcher.finish()
        return model, run

    def judged(self) -> tuple[list[Judged], bool]:
        """Every plant; and whether training is the same unwatched."""
        model, run = self.train(True)
        unwatched, _ = self.train(False)
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), unwatched.parameters(), strict=True))
        bodies = {event.step: event.body for event in run.events if event.kind == "gradient_localised"}
        return [self._one(step, kind, bodies.get(step), run) for step, kind in self.steps.items()], same

    def _one(self, step: int, kind: str, body: dict[str, Any] | None, run: Any) -> Judged:
        judged, expected = Judged("own loop", kind, self.seed), OWN[kind][2]
        judge(judged, expected, body)
        if not judged.found or body is None:
            return judged
        weights, clean, batch = self.snapshots[kind]
        model = policy(seed=self.seed, std=0.1)
        model.load_state_dict(weights)
        rebalanced(model, batch.layer)
        coefficients = []
        for one in (clean, batch):
            out = outputs(model, one.ids, PROMPT)
            coefficients.append(torch.autograd.grad(self.loss(model, out.logp, out.entropy, one), out.logp)[0])
        norms = torch.zeros(batch.mask.shape, dtype=torch.float64)
        if expected.of_tokens:
            norms = token_norms(outputs(model, batch.ids, PROMPT).logp, batch.mask, list(model.parameters()))
        judge_record(judged, expected, recorded(run.spikes, step), coefficients, norms)
        if body["cures"]:
            cured = self._cured(batch, body["cures"][0])
            model.zero_grad()
            out = outputs(model, cured.ids, PROMPT)
            self.loss(model, out.logp, out.entropy, cured).backward()
            if body["cures"][0]["kind"] == "clip layer":
                clipped([p for n, p in model.named_parameters() if n.startswith(LAYER)], body["cures"][0]["value"])
            judged.cure = abs(body["cures"][0]["after"] / norm_of(model) - 1)
        return judged

    def _cured(self, batch: Batch, cure: dict[str, Any]) -> Batch:
        cured = copy.deepcopy(batch)
        kind, value = cure["kind"], cure["value"]
        if kind == "rescale advantages":
            cured.advantages *= value
        elif kind == "rescale loss":
            cured.scale *= value
        elif kind == "rescale KL":
            cured.beta *= value
        elif kind == "rescale entropy":
            cured.entropy *= value
        elif kind == "without the term":
            cured.penalty = 0.0
        else:
            cured.cure = kind, value
        return cured


def _parts(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    out = outputs(model, ids, PROMPT)
    return out.logp, out.entropy


# The real TRL trainer: what is planted are the inputs of its loss, and its settings.


@dataclass
class Step:
    """One call of the trainer's loss: its inputs, and settings of the trainer that differ in it."""

    inputs: dict[str, Any]
    settings: dict[str, float] = field(default_factory=dict)
    penalty: float = 0.0
    scale: float = 1.0
    delta: float | None = None


def _trl_places(step: Step, k: int, *, negative: bool = False) -> tuple[Tensor, Tensor]:
    allowed = step.inputs["completion_mask"].bool()
    if negative:
        allowed &= (step.inputs["advantages"] < 0)[:, None]
    every = allowed.nonzero()
    chosen = every[torch.linspace(1, len(every) - 1, k).long()]
    return chosen[:, 0], chosen[:, 1]


def _wide(step: Step) -> Tensor:
    advantages = step.inputs["advantages"]
    width = step.inputs["completion_ids"].shape[1]
    step.inputs["advantages"] = advantages[:, None].expand(-1, width).clone() if advantages.dim() == 1 else advantages
    return step.inputs["advantages"]


def trl_tokens(name: str, k: int, change: Callable[[Tensor], Tensor], *, negative: bool = False) -> Callable[..., None]:
    def plant(step: Step, _seed: int) -> None:
        at = _trl_places(step, k, negative=negative)
        column = _wide(step) if name == "advantages" else step.inputs[name].clone()
        column[at] = change(column[at])
        step.inputs[name] = column

    return plant


def huge(size: float) -> Callable[[Tensor], Tensor]:
    """Of that size, with their signs."""
    return lambda a: a.sign() * size + size * (a == 0)


def every_row(step: Step, _seed: int) -> Tensor:
    """All of them."""
    return torch.arange(len(step.inputs["advantages"]))


def trl_rows(choose: Callable[[Step, int], Tensor], change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def plant(step: Step, seed: int) -> None:
        advantages, rows = step.inputs["advantages"].clone(), choose(step, seed)
        advantages[rows] = change(advantages[rows])
        step.inputs["advantages"] = advantages

    return plant


def _first_row(step: Step, seed: int) -> Tensor:
    """A response with a signal."""
    return step.inputs["advantages"].abs().argsort(descending=True)[seed % 2][None]


def _group(step: Step, _seed: int) -> Tensor:
    """Responses to the prompt of the response with the largest advantage."""
    first = int(step.inputs["advantages"].abs().argmax())
    return (step.inputs["prompt_ids"] == step.inputs["prompt_ids"][first]).all(1).nonzero()[:, 0]


def trl_drifted(step: Step, _seed: int) -> None:
    old = step.inputs["old_per_token_logps"].clone()
    old[int(step.inputs["advantages"].argmin())] -= 4.0
    step.inputs["old_per_token_logps"] = old


def trl_setting(name: str, factor: float) -> Callable[..., None]:
    def plant(step: Step, _seed: int) -> None:
        if name in {"penalty", "scale"}:
            setattr(step, name, factor)
        else:
            step.settings[name] = factor

    return plant


OLD = "old_per_token_logps"
TRL: dict[str, tuple[str, Callable[..., None], Expected]] = {
    "advantage of a token": ("token", trl_tokens("advantages", 1, huge(400)), REWARD),
    "advantages of 15 tokens": ("token", trl_tokens("advantages", 15, huge(90)), REWARD),
    "ratio of a token": ("token", trl_tokens(OLD, 1, lambda x: x - 7, negative=True), RATIO),
    "ratios of 5 tokens": ("token", trl_tokens(OLD, 5, lambda x: x - 6, negative=True), RATIO),
    "reference of a token": ("token", trl_tokens("ref_per_token_logps", 1, lambda x: x + 11), KL),
    "advantage of a response": ("token", trl_rows(_first_row, lambda a: a * 60), RESPONSE),
    "a prompt group": ("token", trl_rows(_group, lambda a: a * 60), PROMPTED),
    "a response that drifted": ("token", trl_drifted, DRIFT),
    "one token, ratio of its response": ("sequence", trl_drifted, DRIFT),
    "all advantages": ("token", trl_rows(every_row, lambda a: a * 12), SCALE),
    "the normaliser": ("token", trl_setting("scale", 20.0), NORMALISER),
    "the KL weight": ("token", trl_setting("beta", 30_000.0), KL_WEIGHT),
    "the entropy weight": ("token", trl_setting("entropy_coef", 30_000.0), ENTROPY),
    "a term outside": ("token", trl_setting("penalty", 0.5), OUTSIDE),
}  # fmt: skip


class TrlRun:
    """A GRPO trainer whose loss has a plant in some steps."""

    def __init__(self, level: str, kinds: Sequence[str], seed: int) -> None:
        self.level, self.kinds, self.seed = level, list(kinds), seed
        self.steps = {FIRST + EVERY * i: kind for i, kind in enumerate(self.kinds)}
        self.snapshots: dict[str, tuple[dict[str, Tensor], Step, Step]] = {}

    def trainer(self, folder: str, run: Any) -> Any:
        from tiny_trl import make_trainer

        from rlwatch.integrations.trl import watch

        trainer = make_trainer(
            Path(folder), seed=self.seed, num_iterations=2, max_steps=max(self.steps) + 1, max_completion_length=12,
            per_device_train_batch_size=16, num_generations=4, learning_rate=1e-6, beta=0.01, entropy_coef=0.001,
            importance_sampling_level=self.level, loss_type="dapo", use_bias_correction_kl=False, logging_steps=100,
            columns={"data_source": lambda i: ("math", "code")[i % 2]},
        )  # fmt: skip
        if run is not None:
            watch(trainer, run=run, localise=SETTINGS)
        self.original = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: self.planted(trainer, model, inputs, keep=run is not None)
        return trainer

    def planted(self, trainer: Any, model: Any, inputs: Any, *, keep: bool) -> Tensor:
        number = trainer.state.global_step + 1
        kind, clean = self.steps.get(number), Step(dict(inputs))
        # The reference of so short a run is the policy: one that is not lets the KL term count.
        ref = clean.inputs["ref_per_token_logps"]
        noise = torch.randn(ref.shape, generator=torch.Generator().manual_seed(number)) * 0.05
        clean.inputs["ref_per_token_logps"] = ref + noise
        if kind is None or not model.training:
            return self.loss(trainer, model, clean)
        step = Step(dict(clean.inputs))
        TRL[kind][1](step, self.seed)
        if keep:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            self.snapshots[kind] = weights, clean, step
        return self.loss(trainer, model, step)

    def loss(self, trainer: Any, model: Any, step: Step) -> Tensor:
        before, delta = {name: getattr(trainer, name) for name in step.settings}, trainer.args.delta
        for name, factor in step.settings.items():
            setattr(trainer, name, getattr(trainer, name) * factor)
        trainer.args.delta = step.delta
        try:
            loss = self.original(model, step.inputs) * step.scale
        finally:
            trainer.args.delta = delta
            for name, value in before.items():
                setattr(trainer, name, value)
        return loss + step.penalty * sum(p.square().sum() for p in model.parameters())

    def train(self, watched: bool) -> tuple[Any, Any]:
        from tiny_trl import FakeRun

        run = FakeRun() if watched else None
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = self.trainer(folder, run)
            trainer.train()
        return trainer, run

    def judged(self) -> tuple[list[Judged], bool]:
        trainer, run = self.train(True)
        unwatched, _ = TrlRun(self.level, self.kinds, self.seed).train(False)
        pairs = zip(trainer.model.parameters(), unwatched.model.parameters(), strict=True)
        same = all(torch.equal(a, b) for a, b in pairs)
        bodies = {event.step: event.body for event in run.events if event.kind == "gradient_localised"}
        return [self._one(trainer, step, kind, bodies.get(step), run) for step, kind in self.steps.items()], same

    def _one(self, trainer: Any, step: int, kind: str, body: dict[str, Any] | None, run: Any) -> Judged:
        judged, expected = Judged("TRL", kind, self.seed), TRL[kind][2]
        judge(judged, expected, body)
        if not judged.found or body is None:
            return judged
        weights, clean, planted = self.snapshots[kind]
        model = trainer.model
        model.load_state_dict(weights)
        model.train()
        results = [self._again(trainer, model, one) for one in (clean, planted)]
        mask = planted.inputs["completion_mask"].bool()
        norms = torch.zeros(mask.shape, dtype=torch.float64)
        if expected.of_tokens:
            logp = results[0][0]
            norms = token_norms(logp, mask, [p for p in model.parameters() if p.requires_grad])
        coefficients = [torch.where(mask, a, 0.0) for _, a in results]
        judge_record(judged, expected, recorded(run.spikes, step), coefficients, norms)
        if body["cures"]:
            model.zero_grad()
            self.loss(trainer, model, self._cured(planted, body["cures"][0])).backward()
            judged.cure = abs(body["cures"][0]["after"] / norm_of(model) - 1)
        return judged

    def _again(self, trainer: Any, model: Any, step: Step) -> tuple[Tensor, Tensor]:
        """Log-probs (B, T) with their graph, and the coefficients that the loss gives them."""
        kept: list[Tensor] = []
        tap = trainer._get_per_token_logps_and_entropies

        def keeping(*args: Any, **kwargs: Any) -> Any:
            result = tap(*args, **kwargs)
            kept.append(result[0])
            return result

        trainer._get_per_token_logps_and_entropies = keeping
        try:
            loss = self.loss(trainer, model, step)
        finally:
            trainer._get_per_token_logps_and_entropies = tap
        return kept[-1], torch.autograd.grad(loss, kept[-1], retain_graph=True)[0]

    def _cured(self, planted: Step, cure: dict[str, Any]) -> Step:
        kind, value = cure["kind"], cure["value"]
        cured = Step(dict(planted.inputs), dict(planted.settings), planted.penalty, planted.scale)
        if kind == "clip advantages":
            cured.inputs["advantages"] = cured.inputs["advantages"].clamp(-value, value)
        elif kind == "rescale advantages":
            cured.inputs["advantages"] = cured.inputs["advantages"] * value
        elif (kind in {"clip ratios", "clip response ratios"} and self.level == "sequence") or kind == "clip ratios":
            cured.delta = value
        elif kind == "clip response ratios":  # TRL has no such mask: its effect on the loss is that of no advantage
            advantages = cured.inputs["advantages"].clone()
            advantages[int(advantages.argmin())] = 0.0
            cured.inputs["advantages"] = advantages
        elif kind == "clip KL":
            cured.inputs["ref_per_token_logps"] = _within(cured, value)
        elif kind == "rescale loss":
            cured.scale *= value
        elif kind in {"rescale KL", "rescale entropy"}:
            name = "beta" if kind == "rescale KL" else "entropy_coef"
            cured.settings[name] = cured.settings.get(name, 1.0) * value
        elif kind == "without the term":
            cured.penalty = 0.0
        return cured


def _within(step: Step, cap: float) -> Tensor:
    """Reference log-probs that the old policy's stand in for where they are further away: there the term is flat."""
    ref, old = step.inputs["ref_per_token_logps"], step.inputs["old_per_token_logps"]
    return torch.where((ref - old).abs() > cap, old, ref)


# All of them.


def runs_of(where: str, seeds: Sequence[int]) -> list[OwnRun | TrlRun]:
    table: dict[str, Any] = OWN if where == "own" else TRL
    settings = list(dict.fromkeys(entry[0] for entry in table.values()))
    make: Any = OwnRun if where == "own" else TrlRun
    return [
        make(setting, [kind for kind, entry in table.items() if entry[0] == setting], seed)
        for seed in seeds
        for setting in settings
    ]


def summary(every: Sequence[Judged], same: Sequence[bool]) -> None:
    heads = ["n", "found", "verdict", "cause", "cure, worst error", "recall", "precision", "passes"]
    widths = (4, 7, 9, 7, 19, 8, 11, 14)
    print("\n" + " " * 34 + "".join(head.rjust(width) for head, width in zip(heads, widths, strict=True)))
    for where in dict.fromkeys(one.where for one in every):
        kinds = dict.fromkeys(one.kind for one in every if one.where == where)
        for kind in [*kinds, "all"]:
            rows = [one for one in every if one.where == where and kind in {one.kind, "all"}]
            cures = [one.cure for one in rows if one.cure is not None]
            recalls = [one.recall for one in rows if one.recall is not None]
            precisions = [one.precision for one in rows if one.precision is not None]
            passes = f"{median(one.forwards for one in rows):.0f} + {median(one.backwards for one in rows):.0f}"
            print(
                f"{where + ': ' + kind:34.34}{len(rows):4}{mean(one.found for one in rows):7.2f}"
                f"{mean(one.verdict for one in rows):9.2f}{mean(one.cause for one in rows):7.2f}"
                f"{max(cures, default=math.nan):19.4f}{mean(recalls) if recalls else math.nan:8.2f}"
                f"{mean(precisions) if precisions else math.nan:11.2f}{passes:>14}"
            )
    within = [one.cure <= 0.05 for one in every if one.cure is not None]
    print(f"\ncures within 5 %: {sum(within)} of {len(within)}; identical: {sum(same)} of {len(same)} runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--only", choices=["own", "trl"])
    parser.add_argument("--verbose", action="store_true", help="every plant, and what was said of it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin, every, same = time.perf_counter(), [], []
    for where in [options.only] if options.only else ["own", "trl"]:
        for run in runs_of(where, range(options.first, options.first + options.seeds)):
            judged, identical = run.judged()
            every += judged
            same.append(identical)
            for one in judged if options.verbose else ():
                right = "".join("+" if ok else "-" for ok in (one.found, one.verdict, one.cause))
                figures = [f"{x:.3f}" if x is not None else "-" for x in (one.cure, one.recall, one.precision)]
                print(f"{right} {one.where} {one.kind} {one.seed} | {' '.join(figures)} | {one.said}", flush=True)
    summary(every, same)
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
