"""TRL's micro-batches and generations, read for statistics; a few completions kept as text.

A micro-batch becomes a :class:`~rlwatch.tensors.tokens.TokenBatch`, a generation a
:class:`~rlwatch.tensors.responses.ResponseBatch`: read where TRL computes rewards and where a generation ends. Prompts,
completions and the sampled ids lie on the CPU there already; nothing is fetched from a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlwatch.integrations.completions import (
    CompletionSampler,
    Lazy,
    SampledText,
    Values,
    prompt_id,
    spread,
)
from rlwatch.integrations.transformers.compat import source_of
from rlwatch.records import CompletionBatch
from rlwatch.rollouts import PART
from rlwatch.tensors.groups import consecutive
from rlwatch.tensors.importance import (
    clip_stats,
    kl_of_responses,
    observe_kl,
    observe_kl_quantiles,
    sequence_log_ratio,
    sequence_ratio_stats,
)
from rlwatch.tensors.masked import indicator, keep, masked_count, widen
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats, Std, nonfinite_stats
from rlwatch.tensors.responses import ResponseBatch, TaskNames, observe_responses
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.transfer import moved
from rlwatch.text import Sample

if TYPE_CHECKING:
    from rlwatch.run import Run


CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses of GRPOTrainer whose clip is the PPO clip; of the others CISPO has a cap, and the rest report none."""


def token_batch(trainer: Any, inputs: Mapping[str, Any], logp: Tensor, entropy: Tensor | None) -> TokenBatch:
    """Read GRPO or RLOO. ``old_per_token_logps`` is absent on-policy (the ratio is 1 by definition) and in RLOO."""
    whole = inputs["completion_mask"].bool()
    sampled = inputs["tool_mask"].bool() if "tool_mask" in inputs else None
    return TokenBatch(
        logp=logp,
        mask=whole if sampled is None else whole & sampled,
        entropy=entropy,
        ids=inputs["completion_ids"],
        advantages=raw_advantages(inputs["advantages"]) if "advantages" in inputs else None,
        old_logp=inputs.get("old_per_token_logps"),
        ref_logp=inputs.get("ref_per_token_logps"),
        rollout_logp=inputs.get("sampling_per_token_logps"),
        clip=_clip(trainer),
        dual_clip=_dual_clip(trainer),
        truncation=_truncation(trainer),
        environment=None if sampled is None else whole & ~sampled,
        off_policy_delta=getattr(trainer, "off_policy_mask_threshold", None),
    )


def sequence_stats(trainer: Any, inputs: Mapping[str, Any], batch: TokenBatch) -> Stats:
    """Ratios of whole responses, for the losses that use them: RLOO's product and GSPO's geometric mean.

    And what their clip binds, which then is every token of a response. RLOO's old log-probs ``old_logps`` (B,) are sums
    over tokens, so of tokens only the mean log-ratio is known.
    """
    old_sums, measured = inputs.get("old_logps"), batch.mask.bool().any(1)
    if old_sums is not None:
        log_ratio = keep(batch.logp, batch.mask, 0.0).sum(1) - widen(old_sums)
        kl_old: Stats = {"policy/kl_old": Mean(masked_count(batch.mask, batch.logp), -log_ratio.sum())}
        clipped = _clipped_responses(log_ratio, batch, _bounds(trainer))
        return {**sequence_ratio_stats(log_ratio, measured), **clipped, **kl_old}
    if batch.old_logp is not None and getattr(trainer, "importance_sampling_level", "") == "sequence":
        log_ratio = sequence_log_ratio(batch.logp, batch.old_logp, batch.mask, per_token=True)
        bounds = _bounds(trainer) if getattr(trainer, "loss_type", "") in CLIPPED_LOSSES else None
        return {**sequence_ratio_stats(log_ratio, measured), **_clipped_responses(log_ratio, batch, bounds)}
    return {}


def _clipped_responses(log_ratio: Tensor, batch: TokenBatch, bounds: tuple[float, float] | None) -> Stats:
    """Return fractions of tokens in responses that the loss clips as a whole."""
    a = batch.advantages
    if bounds is None or a is None or a.dim() != 1:
        return {}
    low, high = bounds
    return clip_stats(log_ratio.unsqueeze(1), a.unsqueeze(1), batch.mask, low=low, high=high)


def correction_stats(inputs: Mapping[str, Any], batch: TokenBatch) -> Stats:
    """The weights between trainer and vLLM that the loss was multiplied by: truncated or set to 0, as TRL does it.

    (B, T), or (B, 1) of whole responses; those of responses are counted once each, but ``mismatch/is_zero`` is a
    fraction of tokens.
    """
    weights = inputs.get("importance_sampling_ratio")
    if weights is None:
        return {}
    weights = widen(weights)
    mask = batch.mask if weights.shape == batch.mask.shape else batch.mask.bool().any(1, keepdim=True)
    return {
        "mismatch/is_ratio": Mean.of(weights, mask),
        "mismatch/is_ratio_max": Max.of(weights, mask),
        "mismatch/is_ratio_min": Min.of(weights, mask),
        "mismatch/is_ratio_std": Std.of(weights, mask),
        "mismatch/is_zero": Mean.of(indicator(weights == 0, weights).expand_as(batch.mask), batch.mask),
    }


def raw_advantages(advantages: Tensor) -> Tensor:
    """Return advantages as before TRL's ``nan_to_num``, which writes an infinity as the largest float."""
    a = advantages.detach()
    if not a.is_floating_point():
        return a.float()
    largest = torch.finfo(a.dtype).max
    return a.masked_fill(a >= largest, torch.inf).masked_fill(a <= -largest, -torch.inf)


def _clip(trainer: Any) -> tuple[float, float] | None:
    """Return the bounds of a clip on token ratios, if this loss has one; CISPO has none below."""
    if getattr(trainer, "importance_sampling_level", "") != "token":
        return None
    loss = getattr(trainer, "loss_type", "")
    if loss == "cispo":
        return math.inf, float(trainer.epsilon_high) - 1
    return _bounds(trainer) if loss in CLIPPED_LOSSES else None


def _bounds(trainer: Any) -> tuple[float, float]:
    """Bounds of the PPO clip. ``delta`` caps ratios first: a smaller one is the bound; GMPO bounds log-ratios."""
    low, high = float(trainer.epsilon_low), float(trainer.epsilon_high)
    if source_of(trainer.args) == "trl/gmpo":
        return -math.expm1(-low), math.expm1(high)
    delta = getattr(trainer.args, "delta", None)
    return low, high if delta is None else min(high, float(delta) - 1)


def _dual_clip(trainer: Any) -> float | None:
    """Return the cap of two-sided clipping (``delta``), where the clip is on token ratios."""
    delta = getattr(trainer.args, "delta", None)
    clips = getattr(trainer, "loss_type", "") in CLIPPED_LOSSES and _clip(trainer) is not None
    return float(delta) if clips and delta is not None else None


def _truncation(trainer: Any) -> float | None:
    """Return the cap on the weights of tokens against vLLM's, where that is the whole correction.

    Masking, weights of whole responses and a bound from below are other corrections.
    """
    floor, cap = (getattr(trainer, f"vllm_importance_sampling_clip_{end}", None) for end in ("min", "max"))
    corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
    of_tokens = getattr(trainer, "vllm_importance_sampling_mode", "") == "token_truncate"
    return float(cap) if corrects and of_tokens and floor is None and cap is not None else None


# The forward passes of a generation, whose log-probs RLOO sums up before its loss sees them.


class GenerationPasses:
    """Keeps what the passes of one generation returned, in order: the policy, then the reference if there is one.

    GRPO hands both to its loss, where they are read; of RLOO only here.
    """

    def __init__(self, *, full: bool = True) -> None:
        self._full = full
        self._logps: list[Tensor] = []

    def add(self, logps: Tensor) -> None:
        """Log-probs (B, T) of one pass."""
        self._logps.append(logps.detach())

    def clear(self) -> None:
        """Forget what was kept."""
        self._logps.clear()

    def with_reference(self, outputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return (B, T) log-probs of the policy that sampled ``outputs`` and of the reference, and the mask of both.

        None where there is no reference, or where the policy's are computed in the loss only (GRPO on-policy).
        """
        policy, ref = (outputs.get(f"{name}_per_token_logps") for name in ("old", "ref"))
        if "old_logps" in outputs and len(self._logps) > 1:
            policy, ref = self._logps[:2]
        policy = outputs.get("sampling_per_token_logps") if policy is None else policy
        return None if policy is None or ref is None else (policy, ref, _sampled(outputs))

    def take(self, outputs: Mapping[str, Any]) -> Stats:
        """Statistics of the RLOO generation ``outputs`` came from: KL to the reference, of the policy that sampled."""
        passes, self._logps = self._logps, []
        if "old_logps" not in outputs or not passes:
            return {}
        policy, mask = passes[0], outputs["completion_mask"]
        stats = nonfinite_stats("old_logp", policy, mask)
        if len(passes) < 2:
            return stats
        batch = TokenBatch(policy, mask, advantages=outputs["advantages"], ref_logp=passes[1])
        return stats | observe_kl(batch) | (observe_kl_quantiles(batch) if self._full else {})


# Generations and their rewards: groups, lengths, tasks, and a few completions as text.

TASK_COLUMNS = ("data_source", "task", "source")
"""Columns of a dataset that name the task, the first that is there."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One generation of this rank, N completions; ``rewards`` (N_all, functions) are of all ranks, NaN for none.

    ``own`` marks the tokens written by the policy, if an environment wrote others.
    """

    rewards: Tensor
    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[Any]
    completions: Sequence[Any]
    ids: Sequence[Sequence[int]]
    own: Sequence[Sequence[int]] | None = None

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens written by the policy, as TRL counts them."""
        return [len(one) for one in self.ids] if self.own is None else [int(sum(one)) for one in self.own]


class Generations:
    """Reads the generations of one trainer. ``full``: also statistics that compare responses with each other."""

    def __init__(self, trainer: Any, *, full: bool = True) -> None:
        self._trainer = trainer
        self._full = full
        self._tasks = TaskNames()
        self._seen = 0
        self._scored: Scored | None = None
        self._own: Any = None

    def sampled(self, own: Any) -> None:
        """Note sampled completions; ``own`` marks the tokens written by the policy, or is not a mask."""
        self._own = own

    def scored(self, scored: Scored) -> None:
        """Note the rewards of the current generation."""
        self._scored = scored

    def take(self, outputs: Mapping[str, Any]) -> tuple[Stats, Scored | None]:
        """Return the statistics of the generation of ``outputs``, and the generation if its rewards are known."""
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
        """Return (N,) total rewards of this rank's completions, NaN where none was given."""
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
        """Return True if a group may be spread over ranks."""
        return bool(self._trainer.accelerator.num_processes > 1)

    def _groups(self, n: int) -> Tensor:
        """Return ids (N_all,) that are the same on every rank, and new in every generation."""
        local = -1 - consecutive(n, self._trainer.num_generations)
        return local + self._seen * n


def total_rewards(per_function: Tensor, weights: Tensor) -> Tensor:
    """Return weighted sums (N,) of rewards (N, functions), as TRL takes them: NaN where no function gave one."""
    known = per_function.detach()
    total = (known * moved(weights, known.device)).nansum(1)
    return torch.where(known.isnan().all(1), torch.nan, total)


def tasks_of(rows: Sequence[Mapping[str, Any]]) -> list[object] | None:
    """The task each row of the dataset names (None: it names none), or None if the dataset has no such column."""
    column = next((name for name in TASK_COLUMNS if rows and name in rows[0]), None)
    return None if column is None else [row.get(column) for row in rows]


def end_ids(trainer: Any) -> frozenset[int]:
    """Return the token ids that end a complete completion."""
    ends = [*getattr(trainer, "eos_token_ids", ()), getattr(trainer.processing_class, "pad_token_id", None)]
    return frozenset(int(token) for token in ends if token is not None)


def completion_batch(
    sampler: CompletionSampler, trainer: Any, scored: Scored, step: int, logps: tuple[Tensor, Tensor, Tensor] | None
) -> CompletionBatch | None:
    """Some completions of the generation ``step`` trains on, with what TRL has copied of them to the CPU.

    ``logps`` (B, T) of the policy that sampled and of the reference, and their mask, where TRL computed both: of those
    kept the KL is fetched, from a device that TRL has just waited for.
    """
    size = max(1, int(getattr(trainer, "num_generations", 1)))
    first = int(trainer.accelerator.process_index) * len(scored.completions)
    columns: dict[str, Values | Lazy] = {
        "reward": _logged_rewards(trainer, scored),
        **{f"{PART}{name}": values for name, values in _logged_parts(trainer, scored).items()},
        "advantage": _mine(trainer, scored, trainer._logs["advantages"]),  # noqa: SLF001
        "length": scored.lengths,
        "group": [(first + i) // size for i in range(len(scored.completions))],
    }
    tasks = tasks_of(scored.rows)
    if tasks is not None:
        columns["task"] = ["" if task is None else str(task) for task in tasks]
    if logps is not None:
        columns["kl"] = lambda rows: kl_of_responses(*(part[list(rows)] for part in logps)).tolist()
    texts = [as_text(one) for one in scored.completions]
    prompts = [as_text(one) for one in scored.prompts]
    return sampler.sample(step, prompts, texts, columns, ids=lambda i: scored.ids[i])


def _logged_rewards(trainer: Any, scored: Scored) -> list[float]:
    """Return weighted sums of the logged rewards of each function, NaN if no function gave one."""
    weights = trainer.reward_weights.tolist()  # lies on the CPU
    functions = _logged_parts(trainer, scored).values()
    return [_weighted(given, weights) for given in zip(*functions, strict=True)]


def _logged_parts(trainer: Any, scored: Scored) -> dict[str, list[float]]:
    """Reward function -> what it gave, unweighted."""
    logged = trainer._logs["rewards"]  # noqa: SLF001
    return {name: _mine(trainer, scored, logged[name]) for name in trainer.reward_func_names}


def _weighted(given: Sequence[float], weights: Sequence[float]) -> float:
    known = [reward * weight for reward, weight in zip(given, weights, strict=True) if not math.isnan(reward)]
    return sum(known) if known else math.nan


def _mine(trainer: Any, scored: Scored, logged: Iterable[float]) -> list[float]:
    """Our rank's part of the newest generation, of one of TRL's logs; empty if that was cut short."""
    of_all = list(logged)[-scored.rewards.shape[0] :]
    first = int(trainer.accelerator.process_index) * len(scored.ids)
    return of_all[first : first + len(scored.ids)] if len(of_all) == scored.rewards.shape[0] else []


def samples_of(scored: Scored) -> list[Sample]:
    """Return a few completions, evenly spread, for a report on their text."""
    return [Sample(ids=list(scored.ids[i])) for i in spread(len(scored.ids))]


def as_text(content: Any) -> str:
    """Return a prompt or completion as text: itself, or the messages of a conversation one below the other."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(_message(one) for one in content)
    return str(content)


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return str(message)
    content = message.get("content")
    parts = [p.get("text", "") for p in content if isinstance(p, Mapping)] if isinstance(content, list) else [content]
    return f"{message.get('role', '?')}: {' '.join(str(part) for part in parts if part is not None)}"


def _sampled(outputs: Mapping[str, Any]) -> Tensor:
    """Return (B, T) tokens the policy sampled."""
    mask: Tensor = outputs["completion_mask"].bool()
    return mask & outputs["tool_mask"].bool() if "tool_mask" in outputs else mask


# Sampled text: a few completions are kept, if enabled, and a few are measured.


class Sampled(SampledText):
    """The text of a TRL trainer's generations."""

    def offer(self, run: Run, trainer: Any, scored: Scored, logps: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        """Process a generation of the current step; ``logps`` as for :func:`completion_batch`."""
        step = int(trainer.state.global_step) + 1
        self._offer(
            run,
            step,
            lambda: [prompt_id(as_text(one)) for one in scored.prompts],
            lambda sampler: completion_batch(sampler, trainer, scored, step, logps),
            lambda: samples_of(scored),
        )
