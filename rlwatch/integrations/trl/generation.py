"""What TRL generated and how it was rewarded: groups, lengths, tasks, and a few completions as text.

Read where TRL computes rewards and where a generation ends. Prompts, completions and the sampled ids lie on the CPU
there already; nothing is fetched from a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlwatch.integrations.completions import CompletionSampler
from rlwatch.records import CompletionBatch
from rlwatch.tensors.groups import consecutive
from rlwatch.tensors.mergeable import Stats
from rlwatch.tensors.responses import ResponseBatch, TaskNames, observe_responses
from rlwatch.text import Sample

TASK_COLUMNS = ("data_source", "task", "source")
"""Columns of a dataset that name the task, the first that is there."""
MEASURED = 4
"""Completions whose text is measured at a time."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One generation of this rank, N completions; ``rewards`` (N_all, functions) are of all ranks, NaN for none.

    ``own`` tells of each token whether the policy wrote it, where an environment wrote some.
    """

    rewards: Tensor
    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[Any]
    completions: Sequence[Any]
    ids: Sequence[Sequence[int]]
    own: Sequence[Sequence[int]] | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens the policy wrote, as TRL counts them."""
        return [len(one) for one in self.ids] if self.own is None else [int(sum(one)) for one in self.own]


class Generations:
    """Reads the generations of one trainer. ``full``: also what compares responses with each other."""

    def __init__(self, trainer: Any, *, full: bool = True) -> None:
        self._trainer = trainer
        self._full = full
        self._tasks = TaskNames()
        self._seen = 0
        self._scored: Scored | None = None
        self._own: Any = None

    def sampled(self, own: Any) -> None:
        """Completions were sampled; ``own`` tells of each token whether the policy wrote it, or is something else."""
        self._own = own

    def scored(self, scored: Scored) -> None:
        """Rewards were computed; the generation they belong to ends soon."""
        self._scored = scored

    def take(self, outputs: Mapping[str, Any]) -> tuple[Stats, Scored | None]:
        """The generation that ``outputs`` came from: its statistics, and itself if its rewards were seen."""
        scored, self._scored = self._scored, None
        own, self._own = self._own, None
        if scored is None:
            return {}, None
        if "tool_mask" in outputs:
            scored = replace(scored, own=own)
        stats = observe_responses(self._batch(scored, outputs))
        self._seen += 1
        return stats, scored

    def rewards(self, scored: Scored) -> Tensor:
        """(N,) total rewards of this rank's completions, NaN where none was given."""
        return total_rewards(scored.rewards, self._trainer.reward_weights)[self._mine(scored)]

    def _mine(self, scored: Scored) -> slice:
        first = self._trainer.accelerator.process_index * len(scored.completions)
        return slice(first, first + len(scored.completions))

    def _batch(self, scored: Scored, outputs: Mapping[str, Any]) -> ResponseBatch:
        rewards = total_rewards(scored.rewards, self._trainer.reward_weights)
        mine = self._mine(scored)
        ends = end_ids(self._trainer)
        ids = outputs.get("completion_ids") if self._full else None
        return ResponseBatch.of(
            rewards=rewards[mine],
            scored=~rewards[mine].isnan(),
            groups=self._groups(rewards.shape[0])[mine] if self._several else self._trainer.num_generations,
            lengths=scored.lengths,
            cut=[bool(one) and one[-1] not in ends for one in scored.ids] if ends else None,
            tasks=tasks_of(scored.rows),
            task_names=self._tasks,
            ids=ids,
            mask=None if ids is None else _sampled(outputs),
            eos=tuple(sorted(ends)) if ids is not None else (),
            device=rewards.device,
        )

    @property
    def _several(self) -> bool:
        """Whether a group may be spread over ranks."""
        return bool(self._trainer.accelerator.num_processes > 1)

    def _groups(self, n: int) -> Tensor:
        """Ids (N_all,) that are the same on every rank, and new in every generation."""
        local = -1 - consecutive(n, self._trainer.num_generations)
        return local + self._seen * n


def total_rewards(per_function: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums (N,) of rewards (N, functions), as TRL takes them: NaN where no function gave one."""
    known = per_function.detach()
    total = (known * weights.to(known.device, non_blocking=True)).nansum(1)
    return torch.where(known.isnan().all(1), torch.nan, total)


def tasks_of(rows: Sequence[Mapping[str, Any]]) -> list[object] | None:
    """The task each row of the dataset names (None: it names none), or None if the dataset has no such column."""
    column = next((name for name in TASK_COLUMNS if rows and name in rows[0]), None)
    return None if column is None else [row.get(column) for row in rows]


def end_ids(trainer: Any) -> frozenset[int]:
    """Token ids a completion that was not cut ends with."""
    ends = [*getattr(trainer, "eos_token_ids", ()), getattr(trainer.processing_class, "pad_token_id", None)]
    return frozenset(int(token) for token in ends if token is not None)


def completion_batch(sampler: CompletionSampler, trainer: Any, scored: Scored, step: int) -> CompletionBatch | None:
    """Some completions of the generation ``step`` trains on, with what TRL has copied of them to the CPU."""
    columns: dict[str, Sequence[float] | Sequence[str]] = {
        "reward": _logged_rewards(trainer, scored),
        "advantage": _mine(trainer, scored, trainer._logs["advantages"]),  # noqa: SLF001
        "length": scored.lengths,
    }
    tasks = tasks_of(scored.rows)
    if tasks is not None:
        columns["task"] = ["" if task is None else str(task) for task in tasks]
    texts = [as_text(one) for one in scored.completions]
    return sampler.sample(step, [as_text(one) for one in scored.prompts], texts, columns)


def _logged_rewards(trainer: Any, scored: Scored) -> list[float]:
    """Weighted sums of what TRL logs of each function: NaN where none gave a reward."""
    logged = trainer._logs["rewards"]  # noqa: SLF001
    weights = trainer.reward_weights.tolist()  # lies on the CPU
    functions = [_mine(trainer, scored, logged[name]) for name in trainer.reward_func_names]
    return [_weighted(given, weights) for given in zip(*functions, strict=True)]


def _weighted(given: Sequence[float], weights: Sequence[float]) -> float:
    known = [reward * weight for reward, weight in zip(given, weights, strict=True) if not math.isnan(reward)]
    return sum(known) if known else math.nan


def _mine(trainer: Any, scored: Scored, logged: Iterable[float]) -> list[float]:
    """Our rank's part of the newest generation, of one of TRL's logs; empty if that was cut short."""
    of_all = list(logged)[-scored.rewards.shape[0] :]
    first = int(trainer.accelerator.process_index) * len(scored.ids)
    return of_all[first : first + len(scored.ids)] if len(of_all) == scored.rewards.shape[0] else []


def samples_of(scored: Scored) -> list[Sample]:
    """A few completions, evenly spread, for a report on their text."""
    n = min(MEASURED, len(scored.ids))
    chosen = [i * len(scored.ids) // n for i in range(n)]
    return [Sample(ids=list(scored.ids[i])) for i in chosen]


def as_text(said: Any) -> str:
    """A prompt or completion as text: itself, or the messages of a conversation one below the other."""
    if isinstance(said, str):
        return said
    if isinstance(said, Sequence):
        return "\n".join(_message(one) for one in said)
    return str(said)


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return str(message)
    content = message.get("content")
    parts = [p.get("text", "") for p in content if isinstance(p, Mapping)] if isinstance(content, list) else [content]
    return f"{message.get('role', '?')}: {' '.join(str(part) for part in parts if part is not None)}"


def _sampled(outputs: Mapping[str, Any]) -> Tensor:
    """(B, T) tokens the policy sampled."""
    mask: Tensor = outputs["completion_mask"].bool()
    return mask & outputs["tool_mask"].bool() if "tool_mask" in outputs else mask
