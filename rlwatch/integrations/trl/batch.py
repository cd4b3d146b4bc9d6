"""Reading of TRL's micro-batches and generations for statistics, and sampling of a few completions as text.

A micro-batch becomes a :class:`~rlwatch.tensors.tokens.TokenBatch`, a generation a
:class:`~rlwatch.tensors.responses.ResponseBatch`. Generations are read where TRL computes rewards and where a
generation ends. There prompts, completions and the sampled ids are on the CPU already, and nothing is fetched from a
device.
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
from rlwatch.integrations.control_tokens import NO_CONTROL, ControlTokens
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
from rlwatch.tensors.masked import indicator, keep, masked_count, shared, widen
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats, Std, nonfinite_stats
from rlwatch.tensors.responses import ResponseBatch, TaskNames, observe_responses
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.transfer import moved
from rlwatch.text import Sample

if TYPE_CHECKING:
    from rlwatch.run import Run


CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses of GRPOTrainer whose clip is the PPO clip. CISPO has a cap, and the other losses report no clip."""


def token_batch(
    trainer: Any,
    inputs: Mapping[str, Any],
    logp: Tensor,
    entropy: Tensor | None,
    control: ControlTokens = NO_CONTROL,
) -> TokenBatch:
    """Return a micro-batch of GRPO or RLOO as a batch of tokens, with ``logp`` (B, T) and ``entropy`` (B, T) of the
    forward pass.

    ``inputs`` are those of TRL's loss. ``old_per_token_logps`` is absent on-policy (the ratio is 1 by definition) and
    in RLOO. ``control`` are the tokenizer's control tokens.
    """
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
        control=control.ids,
        tags=control.tags,
    )


def sequence_stats(trainer: Any, inputs: Mapping[str, Any], batch: TokenBatch) -> Stats:
    """Return the importance ratios of whole responses, for losses that use them: RLOO's product and GSPO's geometric
    mean.

    Also returned is the share of tokens that their clip affects, which is every token of a clipped response. RLOO's old
    log-probs ``old_logps`` (B,) are sums over tokens, so that of tokens only the mean log-ratio is known. Empty for
    other losses.
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
    """Return statistics of the weights that correct the loss for the mismatch between trainer and vLLM, as TRL
    truncates or masks them.

    ``inputs`` are those of TRL's loss. The weights are (B, T), or (B, 1) for whole responses. Those of responses are
    counted once each, but ``mismatch/is_zero`` is a fraction of tokens. Empty if the loss has no correction.
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
    """Return advantages as they were before TRL's ``nan_to_num``, which writes an infinity as the largest float."""
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
    """Return the bounds of the PPO clip. The smaller of clip and ``delta`` counts. GMPO bounds log-ratios."""
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
    """Return the cap on token weights that correct for vLLM's log-probs, if the cap is the whole correction.

    Masking, weights of whole responses and a lower bound are other corrections.
    """
    floor, cap = (getattr(trainer, f"vllm_importance_sampling_clip_{end}", None) for end in ("min", "max"))
    corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
    of_tokens = getattr(trainer, "vllm_importance_sampling_mode", "") == "token_truncate"
    return float(cap) if corrects and of_tokens and floor is None and cap is not None else None


# The forward passes of a generation, whose log-probs RLOO sums up before its loss gets them.


class GenerationPasses:
    """Log-probs of the forward passes that TRL makes for one generation, in order: the policy's, then the reference's
    if there is one.

    GRPO passes them to its loss, where they are read. RLOO's are known only here. ``full``: also compute quantiles.
    """

    def __init__(self, *, full: bool = True) -> None:
        self._full = full
        self._logps: list[Tensor] = []

    def add(self, logps: Tensor) -> None:
        """Keep ``logps``, the log-probs (B, T) of one forward pass."""
        self._logps.append(logps.detach())

    def clear(self) -> None:
        """Drop the kept log-probs."""
        self._logps.clear()

    def with_reference(self, outputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return log-probs (B, T) of the policy that sampled ``outputs`` and of the reference, and the mask (B, T) of
        both.

        None if there is no reference, or if the policy's log-probs are computed in the loss only (GRPO on-policy).
        """
        policy, ref = (outputs.get(f"{name}_per_token_logps") for name in ("old", "ref"))
        if "old_logps" in outputs and len(self._logps) > 1:
            policy, ref = self._logps[:2]
        policy = outputs.get("sampling_per_token_logps") if policy is None else policy
        return None if policy is None or ref is None else (policy, ref, _sampled(outputs))

    def take(self, outputs: Mapping[str, Any]) -> Stats:
        """Return statistics of RLOO's generation ``outputs``: the KL divergence of the policy that sampled it from the
        reference.

        The kept log-probs are dropped. Empty for other trainers.
        """
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
"""Columns of a dataset that may name the task; the first that exists is used."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One generation of this rank: N completions with their prompts, token ids and rewards.

    ``rewards`` (N_all, functions) are those of all ranks, NaN where a function gave none. ``rows`` are the dataset
    rows. ``own`` marks the tokens written by the policy, if an environment wrote others.
    """

    rewards: Tensor
    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[Any]
    completions: Sequence[Any]
    ids: Sequence[Sequence[int]]
    own: Sequence[Sequence[int]] | None = None

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens that the policy wrote in each completion, as TRL counts them."""
        return [len(one) for one in self.ids] if self.own is None else [int(sum(one)) for one in self.own]


class Generations:
    """Reader of the batches of rollouts (generations) of one trainer: notes completions and rewards, and returns their
    statistics.

    ``full``: also compute statistics that compare responses with each other.
    """

    def __init__(self, trainer: Any, *, full: bool = True) -> None:
        self._trainer = trainer
        self._full = full
        self._tasks = TaskNames()
        self._seen = 0
        self._scored: Scored | None = None
        self._own: Any = None

    def sampled(self, own: Any) -> None:
        """Note that completions were sampled, and which of their tokens the policy wrote.

        ``own`` is a mask (B, T) of the tokens written by the policy, or another value if there is none.
        """
        self._own = own

    @property
    def ids(self) -> Sequence[Sequence[int]] | None:
        """Return the token ids of the generation whose rewards are known now, or None."""
        return None if self._scored is None else self._scored.ids

    def scored(self, scored: Scored) -> None:
        """Keep the current generation, whose rewards are known now."""
        self._scored = scored

    def take(self, outputs: Mapping[str, Any]) -> tuple[Stats, Scored | None]:
        """Return the statistics of the generation ``outputs``, and the generation itself if its rewards are known, else
        None.
        """
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
        """Return the total reward of each of this rank's completions in ``scored`` (N,), NaN where no function gave
        one.
        """
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


@shared
def total_rewards(per_function: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of rewards over functions (N,), as TRL computes it; NaN where no function gave one.

    ``per_function`` is (N, functions), ``weights`` (functions,).
    """
    known = per_function.detach()
    total = (known * moved(weights, known.device)).nansum(1)
    return torch.where(known.isnan().all(1), torch.nan, total)


def tasks_of(rows: Sequence[Mapping[str, Any]]) -> list[object] | None:
    """Return the task of each dataset row (None: the row names none), or None if the dataset has no column for it."""
    column = next((name for name in TASK_COLUMNS if rows and name in rows[0]), None)
    return None if column is None else [row.get(column) for row in rows]


def end_ids(trainer: Any) -> frozenset[int]:
    """Return the token ids that end a complete completion, from the trainer and its tokenizer."""
    ends = [*getattr(trainer, "eos_token_ids", ()), getattr(trainer.processing_class, "pad_token_id", None)]
    return frozenset(int(token) for token in ends if token is not None)


def completion_batch(
    sampler: CompletionSampler, trainer: Any, scored: Scored, step: int, logps: tuple[Tensor, Tensor, Tensor] | None
) -> CompletionBatch | None:
    """Return a sample of the generation that ``step`` trains on, with values that TRL has copied to the CPU, or None.

    ``sampler`` decides what is kept, ``scored`` is the generation. ``logps`` are log-probs (B, T) of the policy that
    sampled and of the reference, and their mask, if TRL computed both. The KL of the kept completions is fetched from a
    device that TRL has just waited for.
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
    """Return the unweighted rewards of each reward function, by its name."""
    logged = trainer._logs["rewards"]  # noqa: SLF001
    return {name: _mine(trainer, scored, logged[name]) for name in trainer.reward_func_names}


def _weighted(given: Sequence[float], weights: Sequence[float]) -> float:
    known = [reward * weight for reward, weight in zip(given, weights, strict=True) if not math.isnan(reward)]
    return sum(known) if known else math.nan


def _mine(trainer: Any, scored: Scored, logged: Iterable[float]) -> list[float]:
    """Return this rank's part of the newest generation in one of TRL's logs; empty if the log was truncated."""
    of_all = list(logged)[-scored.rewards.shape[0] :]
    first = int(trainer.accelerator.process_index) * len(scored.ids)
    return of_all[first : first + len(scored.ids)] if len(of_all) == scored.rewards.shape[0] else []


def samples_of(scored: Scored) -> list[Sample]:
    """Return a few completions of the generation ``scored``, evenly spread, for the measurement of their text."""
    return [Sample(ids=list(scored.ids[i])) for i in spread(len(scored.ids))]


def as_text(content: Any) -> str:
    """Return ``content``, a prompt or completion, as text: a string unchanged, and the messages of a conversation one
    below the other.
    """
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
    """Return a mask (B, T) of the tokens that the policy sampled."""
    mask: Tensor = outputs["completion_mask"].bool()
    return mask & outputs["tool_mask"].bool() if "tool_mask" in outputs else mask


# Sampled text: a few completions are kept, if enabled, and a few are measured.


class Sampled(SampledText):
    """Text of a TRL trainer's generations: a few completions are kept or measured."""

    def offer(self, run: Run, trainer: Any, scored: Scored, logps: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        """Keep and measure completions of a generation of the current step, if due.

        ``logps`` as for :func:`completion_batch`.
        """
        step = int(trainer.state.global_step) + 1
        self._offer(
            run,
            step,
            lambda: [prompt_id(as_text(one)) for one in scored.prompts],
            lambda sampler: completion_batch(sampler, trainer, scored, step, logps),
            lambda: samples_of(scored),
        )
