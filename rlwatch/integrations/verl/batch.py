"""Reading of verl's batches for statistics: the batch of a global step in the driver, and that of a policy loss in a
worker.

All values in the driver belong to the policy before the update, because verl recomputes log-probs and entropy for the
whole batch. Workers measure what happens during the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import nan
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rlwatch.errors import RLWatchError
from rlwatch.gradloc.passes import Outputs
from rlwatch.tensors.masked import keep
from rlwatch.tensors.padded import Padded, longest_row
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
"""Fields of verl's batch with a value for each token, jagged over responses; ``loss_mask`` is the mask before verl
rejected tokens.
"""
RESPONSE_FIELDS = ("uid", "data_source")
PROMPTS, EXTRA = "prompts", "extra_fields"
"""Fields that are read only if completions are kept as text; the second has the values of each reward function."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings from verl's configuration that determine how a batch is read.

    ``longest`` is the maximal length of a response in tokens. ``eos`` is the id of the token that ends a response.
    ``truncation`` is the largest weight of verl's token-level importance sampling. ``bypass`` is True if the old
    log-probs are the rollout engine's own. ``tasks`` maps names of tasks to metrics.
    """

    longest: int | None = None
    eos: int | None = None
    truncation: float | None = None
    bypass: bool = False
    tasks: TaskNames = field(default_factory=TaskNames)

    @classmethod
    def of(cls, config: Any, tokenizer: Any) -> BatchSettings:
        """Read the settings from verl's whole configuration and its tokenizer."""
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
    """The B responses in a step's batch, without padding rows.

    ``tokens`` maps verl's field name to values (B, T), NaN or 0 beyond a response. ``lengths`` (B,) are in tokens,
    ``staleness`` (B,) in policy versions. ``named`` has prompt group and task. ``prompts`` are token ids, and ``extra``
    what reward functions returned, if they were read.
    """

    tokens: dict[str, Tensor]
    lengths: Tensor
    keys: tuple[str, ...]
    named: dict[str, list[Any]]
    staleness: Tensor | None
    prompts: tuple[Tensor, ...] = ()
    extra: tuple[Any, ...] = ()

    @classmethod
    def of(cls, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], data: Any, step: int) -> StepBatch:
        """Read a batch from ``data``, the TensorDict of its fields, with the keys and tags of a ``KVBatchMeta``.

        ``step`` is the current global step, from which the staleness of responses is computed.
        """
        rows = [i for i, tag in enumerate(tags) if not tag.get("is_padding", False)]
        keep = slice(None) if len(rows) == len(tags) else torch.tensor(rows, dtype=torch.int64)
        present = set(data.keys())
        tokens = {name: Padded.of(data[name]).values[keep] for name in TOKEN_FIELDS if name in present}
        lengths = data["responses"].offsets().diff()[keep]
        named = {name: [listed(data[name])[i] for i in rows] for name in RESPONSE_FIELDS if name in present}
        versions: list[Any] = [tags[i].get("max_global_steps") for i in rows]
        stale = None if None in versions else torch.tensor([step - 1 - version for version in versions])
        asked = data[PROMPTS].unbind() if PROMPTS in present else ()
        prompts = tuple(asked[i].clone() for i in rows if asked)
        beside = listed(data[EXTRA]) if EXTRA in present else []
        extra = tuple(getattr(beside[i], "data", beside[i]) for i in rows if beside)
        return cls(tokens, lengths, tuple(keys[i] for i in rows), named, stale, prompts, extra)

    @property
    def responses(self) -> list[Tensor]:
        """Return the token ids of each response, without padding."""
        rows = zip(self.tokens["responses"], self.lengths.tolist(), strict=True)
        return [ids[:length] for ids, length in rows]

    @property
    def rewards(self) -> Tensor | None:
        """Return the reward of each response (B,), or None if the batch has none."""
        scores = self.tokens.get("rm_scores")
        return None if scores is None else _within(scores, self.lengths).sum(-1)

    @property
    def reward_parts(self) -> dict[str, list[float]]:
        """Return the numbers that a reward function reported for each response, by name; NaN for missing ones."""
        extras = [one.get("reward_extra_info") if isinstance(one, Mapping) else None for one in self.extra]
        known = [one if isinstance(one, Mapping) else {} for one in extras]
        names = dict.fromkeys(name for one in known for name in one)
        columns = {str(name): [one.get(name) for one in known] for name in names}
        return {
            name: [nan if value is None else float(value) for value in values]
            for name, values in columns.items()
            if all(value is None or isinstance(value, int | float | np.number | np.bool_) for value in values)
        }

    def token_batch(self, reading: BatchSettings) -> TokenBatch | None:
        """Return the batch for token statistics, as the settings ``reading`` require; None if the trainer's own
        log-probs are not known.
        """
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

    def response_batch(self, reading: BatchSettings) -> ResponseBatch:
        """Return the batch for response statistics, as the settings ``reading`` require.

        Of a session with several outputs only the last one has the reward.
        """
        scores, final = self.tokens.get("rm_scores"), finals(self.keys)
        mask = self.tokens.get("response_mask")
        return ResponseBatch.of(
            rewards=self.rewards,
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
        """Return a mask (B, T) of the tokens written by tools and users, which the loss must not count.

        The result is None if these tokens are not known.
        """
        first = self.tokens.get("loss_mask")
        if first is None or first.shape != self.tokens["responses"].shape:
            return None
        return _inside(self.lengths, first.shape[1]) & ~first.bool()

    def _cut(self, reading: BatchSettings) -> Tensor | None:
        """Return responses of the greatest length that do not end with the end-of-sequence token."""
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
    """Return True for each key ``{uid}_{session}_{index}`` that is the last of its session, and for keys of another
    form.
    """
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
    """Return ``rollout_is_threshold`` if weights are truncated per token; None otherwise and for a band ("0.5_5")."""
    threshold = str(correction.get("rollout_is_threshold", 2.0))
    if correction.get("rollout_is", None) != "token" or "_" in threshold:
        return None
    return float(threshold)


def _inside(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) < lengths.unsqueeze(1)


def _within(x: Tensor, lengths: Tensor) -> Tensor:
    """Return ``x`` (B, T) with 0 beyond each response; what is not a number within it stays."""
    return torch.where(_inside(lengths, x.shape[1]), x, torch.zeros_like(x))


def listed(x: Any) -> list[Any]:
    """Return the column ``x`` of a batch as a list, from any type that verl's queue returns."""
    return list(x.tolist() if hasattr(x, "tolist") else x)


# Division of a step's tokens into pieces, because verl's whole batch as one padded tensor is large.

CELLS = 2**19
"""Default number of positions in a piece, padding included."""


def pieces(batch: TokenBatch, lengths: Sequence[int], *, cells: int = CELLS) -> Iterator[TokenBatch]:
    """Yield ``batch`` in pieces of consecutive responses, each truncated to the longest response in it.

    ``lengths`` are those of the responses in tokens. A piece has at most ``cells`` positions, padding included; a
    longer response is a piece by itself. Statistics of pieces merge exactly.
    """
    for rows, width in _spans(lengths, cells):
        parts = {one.name: getattr(batch, one.name) for one in fields(batch)}
        cut: Any = {name: _cut(part, rows, width) for name, part in parts.items() if isinstance(part, Tensor)}
        yield replace(batch, **cut)


def _cut(part: Tensor, rows: slice, width: int) -> Tensor:
    return part[rows] if part.dim() == 1 else part[rows, :width]


def _spans(lengths: Sequence[int], cells: int) -> Iterator[tuple[slice, int]]:
    first, width = 0, 0
    for row, length in enumerate(lengths):
        longest = max(width, length)
        if row > first and (row + 1 - first) * longest > cells:
            yield slice(first, row), width
            first, longest = row, length
        width = longest
    if first < len(lengths):
        yield slice(first, len(lengths)), width


# verl's inputs of one micro-batch, read as a :class:`~rlwatch.tensors.tokens.TokenBatch`.

COLUMNS = {
    "ids": "responses", "advantages": "advantages", "old_logp": "old_log_probs", "ref_logp": "ref_log_prob",
    "rollout_logp": "rollout_log_probs",
}  # fmt: skip
"""rlwatch's name -> the field of verl's micro-batch that its loss may use."""
BESIDE = {"ids": "responses", "ref_logp": "ref_log_prob", "rollout_logp": "rollout_log_probs", "entropy": "entropy"}
"""rlwatch's name -> an optional field of verl's micro-batch; entropy is that of the policy before the update."""


def loss_batch(given: Mapping[str, Any], clipping: Clipping, beside: Mapping[str, Any]) -> TokenBatch:
    """Return the arguments of a policy loss, all (B, T), as a batch of tokens.

    ``given`` maps verl's name of an argument to its value. ``clipping`` is that of the loss. ``beside`` has further
    columns of the same shape.
    """
    batch = TokenBatch(
        logp=given["log_prob"].detach(),
        mask=given["response_mask"].bool(),
        old_logp=given["old_log_prob"].detach(),
        advantages=given["advantages"].detach(),
        clip=clipping.clip,
        dual_clip=clipping.dual,
    )
    return replace(batch, **beside)


def columns_beside(data: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return further columns of the micro-batch ``data`` (a TensorDict of jagged responses) by rlwatch's names.

    They are right-padded to ``shape`` (B, T); a column of another shape is left out.
    """
    columns = {name: data[verl_name] for name, verl_name in BESIDE.items() if verl_name in data.keys()}  # noqa: SIM118  (TensorDict)
    padded = {name: Padded.of(x, longest=shape[1]).values for name, x in columns.items() if isinstance(x, Tensor)}
    return {name: x for name, x in padded.items() if tuple(x.shape) == shape}


def tokens_of(data: Any, outputs: Outputs, where: Packed) -> TokenBatch:
    """Return the tokens of the micro-batch ``data``, with the ``outputs`` (B, T) of its forward pass, right-padded with
    0.

    If the forward pass computed no entropy, that of the policy before the update is used, if verl knows it. ``where``
    has the positions of the responses.
    """
    columns: dict[str, Any] = {name: _column(data, verl_name, where.width) for name, verl_name in COLUMNS.items()}
    entropy = _column(data, "entropy", where.width) if outputs.entropy is None else outputs.entropy
    mask = _column(data, "response_mask", where.width)
    return TokenBatch(outputs.logp, where.valid if mask is None else mask != 0, entropy=entropy, **columns)


def rewards_of(data: Any, where: Packed) -> Tensor | None:
    """Return the reward of each response (B,) in the micro-batch ``data``, or None if verl did not send rewards to the
    worker.

    ``where`` has the positions of the responses.
    """
    scores = _column(data, "rm_scores", where.width)
    return None if scores is None else scores.sum(1)


NAMED = {"uid": "group", "data_source": "task", "request_id": "rollout", "index": "prompt_index"}
"""verl's name of a field that identifies a response, where it sends that to workers -> rlwatch's name."""


def identity_of(data: Any, rows: int) -> dict[str, list[Any]]:
    """Return the columns that identify the ``rows`` responses in ``data`` (group, task, rollout, prompt index), as far
    as verl sent them.

    The names are those of :data:`rlwatch.gradloc.passes.IDENTITY`.
    """
    given = {ours: data.get(name, None) for name, ours in NAMED.items()}
    found = {name: listed(values) for name, values in given.items() if values is not None}
    extra = data.get("extra_info", None)
    if "prompt_index" not in found and extra is not None:
        infos = listed(extra)
        found["prompt_index"] = [info.get("index") if isinstance(info, Mapping) else None for info in infos]
    return {name: values for name, values in found.items() if len(values) == rows}


def _column(data: Any, name: str, width: int) -> Tensor | None:
    """Return a field as (B, T) with zeros for padding, as verl's losses see it.

    The result is None if the field is missing or has another shape.
    """
    column = data.get(name, None)
    if not isinstance(column, Tensor):
        return None
    padded = Padded.of(column, longest=width)
    values = padded.values if padded.valid is None else torch.where(padded.valid, padded.values, 0)
    return values if values.dim() == 2 and values.shape[1] == width else None


# verl packs sequences of unequal length one after the other; a loss uses the positions that predict the responses.


@dataclass(frozen=True, slots=True)
class Packed:
    """Positions of a micro-batch's responses: ``places`` (B, T) are indices into the packed values, ``valid`` (B, T)
    marks real tokens.

    An output at a position predicts the next token, so a response begins one position before its first token.
    """

    places: Tensor
    valid: Tensor

    @classmethod
    def of(cls, data: Any, width: int | None = None) -> Self:
        """Compute the positions from verl's micro-batch ``data`` of jagged sequences.

        They are padded to ``width``, by default the longest response. Waits for the device if ``width`` is not given
        and the jagged tensor does not know it. Raises ``RLWatchError`` if the sequences are not jagged.
        """
        sequences, responses = data["input_ids"], data["responses"]
        if not (sequences.is_nested and responses.is_nested):
            raise RLWatchError("verl's sequences are not jagged")
        ends, lengths = sequences.offsets()[1:], responses.offsets().diff()
        known = longest_row(responses) if width is None else width
        column = torch.arange(int(lengths.max()) if known is None else known, device=ends.device)
        valid = column < lengths.unsqueeze(1)
        return cls(torch.where(valid, (ends - lengths - 1).unsqueeze(1) + column, 0), valid)

    @property
    def width(self) -> int:
        """Return T, the number of positions of the longest response."""
        return int(self.places.shape[1])

    def take(self, packed: Tensor) -> Tensor:
        """Return the values of ``packed``, jagged over whole sequences, at the responses (B, T); 0 elsewhere.

        The operation is differentiable.
        """
        return torch.where(self.valid, packed.values()[self.places], 0.0)


# Clipping of the importance ratio in verl's policy losses, as far as statistics need to know.

TOKEN_CLIP = ("vanilla", "clip_cov")
"""verl's loss modes that clip token ratios to [1 - low, 1 + high] as PPO does."""
DUAL_CLIP = ("vanilla",)
"""verl's loss modes that also cap -r A at ``clip_ratio_c`` for A < 0."""
BYPASS = "bypass_mode"


@dataclass(frozen=True, slots=True)
class Clipping:
    """Clipping of the importance ratio in a policy loss.

    ``clip`` is (low, high) of a token-level PPO clip, ``dual`` the cap of dual-clip PPO; None if the loss has none.
    """

    clip: tuple[float, float] | None = None
    dual: float | None = None

    @classmethod
    def of(cls, mode: str, config: Any) -> Clipping:
        """Return the clipping of the loss registered as ``mode``, under verl's ``ActorConfig``."""
        if mode == BYPASS:  # dispatches to vanilla by default
            mode = "vanilla" if _bypass_loss(config) == "ppo_clip" else "reinforce"
        if config is None or mode not in TOKEN_CLIP:
            return cls()
        low, high = (_or(getattr(config, f"clip_ratio_{side}", None), config.clip_ratio) for side in ("low", "high"))
        dual = float(getattr(config, "clip_ratio_c", 3.0)) if mode in DUAL_CLIP else None
        return cls((float(low), float(high)), dual)


def _bypass_loss(config: Any) -> str:
    policy_loss = getattr(config, "policy_loss", None)
    correction = policy_loss.get("rollout_correction", None) if policy_loss is not None else None
    return str(correction.get("loss_type", "ppo_clip")) if correction is not None else "ppo_clip"


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
