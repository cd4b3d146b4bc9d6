"""The faults, put into a TRL trainer from outside: nothing that rlwatch reads is told of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from real_model.plan import Fault, Run, Size
from real_model.tasks import TASKS
from transformers import TrainerCallback

TIMES, RAMP_STEPS = 30.0, 20
TOP_P = 0.8
BONUS = 0.5
"""Weight of the entropy bonus; the loss of a token is of the order of its advantage, 1."""
HARMLESS_BONUS = 1e-6
PADDING_STEPS = 3
GARBAGE = -200.0
"""An old log-prob at a padded place: its ratio is exp(200), beyond float32."""


@dataclass
class Truth:
    """What the trainer does not log: the share of right answers of each step, and where a token was planted."""

    right: dict[int, float] = field(default_factory=dict)
    planted: list[tuple[int, int, int]] = field(default_factory=list)
    """Step, row, position."""


class Reward:
    """The verifier, and what became of it."""

    __name__ = "right"

    def __init__(self, run: Run, size: Size, truth: Truth) -> None:
        self._run, self._begins, self._truth = run, size.begins, truth

    def __call__(self, completions: list[Any], answer: list[str], trainer_state: Any, **_: Any) -> list[float]:
        """Rewards of a generation, for the step under way."""
        step, right = int(trainer_state.global_step) + 1, TASKS[self._run.task].right
        marks = [float(right(one[0]["content"], wanted)) for one, wanted in zip(completions, answer, strict=True)]
        self._truth.right[step] = sum(marks) / len(marks)
        if step < self._begins:
            return marks
        if self._run.fault is Fault.FLIPPED:
            return [1.0 - mark for mark in marks]
        return [1.0] * len(marks) if self._run.fault is Fault.FULL_MARKS else marks


class Knobs(TrainerCallback):
    """Turns the optimizer's own learning rate, which the log of the scheduler does not show, or the entropy bonus."""

    def __init__(self, trainer: Any, run: Run, size: Size) -> None:
        self._trainer, self._run, self._size = trainer, run, size

    def on_step_begin(self, _args: Any, state: Any, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Before the rollouts of a step."""
        since = int(state.global_step) + 1 - self._size.begins
        if since < 0:
            return
        if self._run.fault in (Fault.RATE, Fault.RAMP):
            ramp = min(1.0, (since + 1) / RAMP_STEPS) if self._run.fault is Fault.RAMP else 1.0
            for group in optimizer.param_groups:
                group["lr"] = self._size.rate * (1.0 + (TIMES - 1.0) * ramp)
        if self._run.fault is Fault.ENTROPY:
            self._trainer.entropy_coef = BONUS


def plant_overflow(trainer: Any, size: Size, truth: Truth) -> None:
    """An old log-prob far off at a place that is no token: the loss stays finite, the gradient does not."""
    inner = trainer._compute_loss

    def loss(model: Any, inputs: dict[str, Any]) -> Any:
        step = int(trainer.state.global_step) + 1
        if model.training and size.begins <= step < size.begins + PADDING_STEPS:
            inputs = dict(inputs)
            padded = (inputs["completion_mask"] == 0) & (inputs["advantages"] > 0)[:, None]
            for row, position in padded.nonzero()[:1].tolist():
                inputs["old_per_token_logps"] = inputs["old_per_token_logps"].clone()
                inputs["old_per_token_logps"][row, position] = GARBAGE
                truth.planted.append((step, row, position))
        return inner(model, inputs)

    trainer._compute_loss = loss


class Engine:
    """A sampler apart, where TRL expects vLLM: its own copy of the weights, and log-probs of what it drew from."""

    def __init__(self, trainer: Any, run: Run, size: Size, copy: Any) -> None:
        self._trainer, self._run, self._size = trainer, run, size
        self._policy = copy.eval().requires_grad_(False)
        self._draws = torch.Generator(copy.device).manual_seed(run.seed)

    @property
    def _broken(self) -> bool:
        return int(self._trainer.state.global_step) + 1 >= self._size.begins

    def sync_weights(self) -> None:
        """Take the policy's weights, unless they are to grow old."""
        if self._run.fault is Fault.STALE and self._broken:
            return
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        with torch.no_grad():
            for mine, theirs in zip(self._policy.parameters(), policy.parameters(), strict=True):
                mine.copy_(theirs)

    def generate(self, prompts: list[list[int]], *_: Any, **__: Any) -> tuple[Any, ...]:
        """As ``VLLMGeneration.generate`` returns it: prompts, ids, log-probs of the sampled tokens, nothing else."""
        top_p = TOP_P if self._run.fault is Fault.TOP_P and self._broken else 1.0
        ids, logps = sample(self._policy, prompts, self._size.longest, self._draws, top_p)
        return prompts, ids, [[[value] for value in row] for row in logps], None


@torch.no_grad()
def sample(
    policy: Any, prompts: list[list[int]], longest: int, draws: torch.Generator, top_p: float
) -> tuple[list[list[int]], list[list[float]]]:
    """Completions, and their log-probs in the distribution they were drawn from."""
    device, pad, end = policy.device, policy.config.pad_token_id, policy.config.eos_token_id
    width = max(map(len, prompts))
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device)
    tokens = torch.tensor([[pad] * (width - len(row)) + row for row in prompts], device=device)
    places, past = (mask.cumsum(-1) - 1).clamp(min=0), None
    drawn, logps = [], []
    for _ in range(longest):
        out = policy(
            input_ids=tokens, attention_mask=mask, position_ids=places, past_key_values=past, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        past, logp = out.past_key_values, nucleus(out.logits[:, -1].float().log_softmax(-1), top_p)
        tokens = torch.multinomial(logp.exp().nan_to_num(nan=1.0), 1, generator=draws)
        drawn.append(tokens)
        logps.append(logp.gather(-1, tokens))
        mask, places = torch.cat([mask, torch.ones_like(tokens)], -1), places[:, -1:] + 1
    rows = torch.cat(drawn, -1).tolist()
    lengths = [row.index(end) + 1 if end in row else len(row) for row in rows]
    values = torch.cat(logps, -1).tolist()
    return (
        [row[:length] for row, length in zip(rows, lengths, strict=True)],
        [row[:length] for row, length in zip(values, lengths, strict=True)],
    )


def nucleus(logp: torch.Tensor, top_p: float) -> torch.Tensor:
    """Log-probs (N, V) of the likeliest tokens that together have ``top_p``, made to sum to 1; -inf of the others."""
    if top_p >= 1.0:
        return logp
    ordered, order = logp.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.empty_like(logp).scatter_(-1, order, ordered.masked_fill(before >= top_p, -torch.inf))
    return kept.log_softmax(-1)
