"""The batch of one of verl's global steps, as the driver finds it in the TransferQueue, read for statistics.

Everything is of the policy before the update (verl recomputes its log-probs and entropy for the whole batch);
what happens during the update the workers measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlwatch.tensors.masked import keep
from rlwatch.tensors.padded import Padded
from rlwatch.tensors.responses import ResponseBatch, TaskNames
from rlwatch.tensors.tokens import TokenBatch

TOKEN_FIELDS = (
    "responses",
    "response_mask",
    "loss_mask",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_prob",
    "entropy",
    "advantages",
    "rm_scores",
)
"""Per token, jagged over responses; ``loss_mask`` is the mask before verl rejected anything."""
RESPONSE_FIELDS = ("uid", "data_source")
PROMPTS = "prompts"
"""Read only where completions are kept as text."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read a batch: what the configuration says.

    ``longest``: most tokens of a response; ``eos``: the token that ends one; ``truncation``: largest weight of verl's
    token-level importance sampling; ``bypass``: whether old log-probs are the rollout engine's own.
    """

    longest: int | None = None
    eos: int | None = None
    truncation: float | None = None
    bypass: bool = False
    tasks: TaskNames = field(default_factory=TaskNames)

    @classmethod
    def of(cls, config: Any, tokenizer: Any) -> Reading:
        """From verl's whole configuration."""
        correction = config.algorithm.get("rollout_correction", None) or {}
        rollout = config.actor_rollout_ref.rollout
        return cls(
            longest=rollout.get("response_length", None),
            eos=getattr(tokenizer, "eos_token_id", None),
            truncation=_threshold(correction),
            bypass=bool(correction.get("bypass_mode", False)),
        )


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of a batch that are no padding: ``tokens`` (B, T) by verl's field name, NaN or 0 beyond a response."""

    tokens: dict[str, Tensor]
    lengths: Tensor
    keys: tuple[str, ...]
    named: dict[str, list[Any]]
    staleness: Tensor | None
    prompts: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], data: Any, step: int) -> StepBatch:
        """Of the keys and tags of a ``KVBatchMeta`` and ``data``, the TensorDict of its fields."""
        rows = [i for i, tag in enumerate(tags) if not tag.get("is_padding", False)]
        keep = torch.tensor(rows, dtype=torch.int64)
        present = set(data.keys())
        tokens = {name: Padded.of(data[name]).values[keep] for name in TOKEN_FIELDS if name in present}
        lengths = data["responses"].offsets().diff()[keep]
        named = {name: [_listed(data[name])[i] for i in rows] for name in RESPONSE_FIELDS if name in present}
        versions: list[Any] = [tags[i].get("max_global_steps") for i in rows]
        stale = None if None in versions else torch.tensor([step - 1 - version for version in versions])
        asked = data[PROMPTS].unbind() if PROMPTS in present else ()
        prompts = tuple(asked[i].clone() for i in rows if asked)
        return cls(tokens, lengths, tuple(keys[i] for i in rows), named, stale, prompts)

    @property
    def responses(self) -> list[Tensor]:
        """The ids of each response, without padding."""
        rows = zip(self.tokens["responses"], self.lengths.tolist(), strict=True)
        return [ids[:length] for ids, length in rows]

    def token_batch(self, reading: Reading) -> TokenBatch | None:
        """The per-token view; None where the trainer's own log-probs are not known."""
        logp, mask = self.tokens.get("old_log_probs"), self.tokens.get("response_mask")
        if logp is None or mask is None or reading.bypass:
            return None
        return TokenBatch(
            logp=logp,
            mask=mask.bool(),
            entropy=self.tokens.get("entropy"),
            ids=self.tokens["responses"],
            advantages=self.tokens.get("advantages"),
            ref_logp=self.tokens.get("ref_log_prob"),
            rollout_logp=self.tokens.get("rollout_log_probs"),
            truncation=reading.truncation,
            environment=self.environment(),
            staleness=self.staleness,
        )

    def response_batch(self, reading: Reading) -> ResponseBatch:
        """The per-response view. Of a session with several outputs only the last one has the reward."""
        scores, final = self.tokens.get("rm_scores"), finals(self.keys)
        mask = self.tokens.get("response_mask")
        return ResponseBatch.of(
            rewards=None if scores is None else _within(scores, self.lengths).sum(-1),
            scored=None if scores is None else torch.tensor(final),
            groups=self.named.get("uid"),
            lengths=self.lengths,
            cut=self._cut(reading),
            entropy=self._entropy(),
            tasks=self.named.get("data_source"),
            task_names=reading.tasks,
            ids=self.tokens["responses"],
            mask=None if mask is None else mask.bool(),
            eos=() if reading.eos is None else (reading.eos,),
        )

    def environment(self) -> Tensor | None:
        """Tokens of a response that no loss was to count: tools and users wrote them."""
        first = self.tokens.get("loss_mask")
        if first is None or first.shape != self.tokens["responses"].shape:
            return None
        return _inside(self.lengths, first.shape[1]) & ~first.bool()

    def _cut(self, reading: Reading) -> Tensor | None:
        """Responses of the greatest length that do not end with the end-of-sequence token."""
        if reading.longest is None:
            return None
        last = (self.lengths - 1).clamp(min=0).unsqueeze(1)
        unended = self.tokens["responses"].gather(1, last).squeeze(1) != reading.eos
        return (self.lengths >= reading.longest) & unended

    def _entropy(self) -> Tensor | None:
        entropy, mask = self.tokens.get("entropy"), self.tokens.get("response_mask")
        if entropy is None or mask is None:
            return None
        return keep(entropy, mask, 0.0).sum(-1) / mask.bool().sum(-1)


def finals(keys: Sequence[str]) -> list[bool]:
    """Which of ``{uid}_{session}_{index}`` is the last output of its session; a key of another form stands alone."""
    last: dict[str, tuple[int, int]] = {}
    for row, key in enumerate(keys):
        session, _, index = key.rpartition("_")
        known = index.isdigit() and key.count("_") >= 2
        name, number = (session, int(index)) if known else (key, 0)
        if name not in last or last[name][0] < number:
            last[name] = (number, row)
    rows = {row for _, row in last.values()}
    return [row in rows for row in range(len(keys))]


def _threshold(correction: Any) -> float | None:
    """``rollout_is_threshold`` where weights are truncated per token; an IcePop band ("0.5_5") is no truncation."""
    threshold = str(correction.get("rollout_is_threshold", 2.0))
    if correction.get("rollout_is", None) != "token" or "_" in threshold:
        return None
    return float(threshold)


def _inside(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) < lengths.unsqueeze(1)


def _within(x: Tensor, lengths: Tensor) -> Tensor:
    """``x`` (B, T) with 0 beyond each response; what is not a number within it stays."""
    return torch.where(_inside(lengths, x.shape[1]), x, torch.zeros_like(x))


def _listed(x: Any) -> list[Any]:
    """A column of anything, however the queue gives it back."""
    return list(x.tolist() if hasattr(x, "tolist") else x)
