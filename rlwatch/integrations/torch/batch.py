"""Micro-batches and generations of a custom loop, read for statistics.

A micro-batch becomes a :class:`~rlwatch.tensors.tokens.TokenBatch`, a generation a
:class:`~rlwatch.tensors.responses.ResponseBatch`. An input that does not fit is left out with the reason; without
``logp`` or ``mask`` a micro-batch cannot be read. Never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlwatch.error_boundary import call_or, described, raised_by
from rlwatch.integrations.completions import (
    CompletionSampler,
    KeepCompletions,
    Lazy,
    SampledText,
    Values,
    prompt_id,
    spread,
)
from rlwatch.records import CompletionBatch
from rlwatch.rollouts import PART
from rlwatch.tensors.entropy import token_entropy, token_logp_entropy_collision
from rlwatch.tensors.padded import Padded, longest_row
from rlwatch.tensors.responses import ResponseBatch, TaskNames
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.text import Sample

if TYPE_CHECKING:
    from rlwatch.run import Run


TOKENS = ("entropy", "old_logp", "ref_logp", "rollout_logp", "ids", "environment", "collision")
"""Inputs of shape (B, T), one value for each token."""
RESPONSES = ("staleness",)
"""Inputs of shape (B,), one value for each response."""
ROUTES = ("experts", "rollout_experts", "old_experts")
"""Inputs of shape (B, T, layers, k)."""
OF_THE_LOSS = ("clip", "dual_clip", "truncation", "off_policy_delta", "eos", "control", "tags")
"""Settings of the loss, the same for every micro-batch."""
WHOLE = ("ids", *ROUTES)
"""Inputs that must be integers, because they are indices, not measurements."""


def why_misfit(misfit: Exception) -> str:
    """Return the reason why an input does not fit, as text: rlwatch's and torch's messages unchanged, others with their
    type.
    """
    return str(misfit) if type(misfit) in (ValueError, TypeError, RuntimeError, MisfitError) else described(misfit)


NO_DATA = "it is on the meta device, which holds no data"


class MisfitError(ValueError):
    """Error for an input whose shape or type does not fit its name."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Settings of the loss, the same for every micro-batch.

    ``clip`` is (low, high) of a PPO clip, ``dual_clip`` the cap of dual-clip PPO, ``truncation`` the largest importance
    weight. ``off_policy_delta`` is the threshold of a sequence mask in nats per token. ``eos`` are the ids that end a
    response, ``control`` and ``tags`` control tokens (:class:`~rlwatch.tensors.tokens.TokenBatch`), and logits are
    divided by ``temperature``.
    """

    clip: tuple[float, float] | None = None
    dual_clip: float | None = None
    truncation: float | None = None
    off_policy_delta: float | None = None
    eos: tuple[int, ...] = ()
    control: tuple[int, ...] = ()
    tags: tuple[tuple[int, int], ...] = ()
    temperature: float = 1.0


@dataclass(slots=True)
class BatchReader:
    """Reader of one micro-batch of a custom loop; ``refused`` maps each input that was left out to the reason."""

    settings: LossSettings
    refused: dict[str, str] = field(default_factory=dict)

    def read(self, inputs: Mapping[str, Any]) -> TokenBatch | None:
        """Return the batch of tokens from ``inputs``, or None if it has no tokens, or no valid ``logp`` or ``mask``."""
        given = {name: value for name, value in inputs.items() if value is not None}
        if "logits" in given:
            self._try("logits", self._from_logits, given)
        logp = self._try("logp", self._logp, given)
        if logp is None:
            return None
        mask = self._try("mask", self._mask, given, logp)
        if mask is None or not logp.values.numel():
            return None
        read = {name: self._try(name, self._one, name, value, logp) for name, value in given.items()}
        extras = {name: value for name, value in read.items() if value is not None}
        of_the_loss = {name: getattr(self.settings, name) for name in OF_THE_LOSS}
        return TokenBatch(logp.values, mask, **extras, **of_the_loss)

    def _try(self, name: str, read: Any, *args: Any) -> Any:
        """Return the result of ``read``, or None if it raises because the input does not fit."""

        def refused(misfit: Exception) -> None:
            self.refused[name] = why_misfit(misfit)

        return call_or(lambda: read(*args), refused)

    def _from_logits(self, given: dict[str, Any]) -> None:
        """Compute entropy, and log-probs if the ids are known, unless they were given."""
        logits, ids, heat = given["logits"], given.get("ids"), self.settings.temperature
        if ids is not None:
            computed = _over_rows(
                lambda x, i: token_logp_entropy_collision(*_paired(x, i), temperature=heat), logits, ids
            )
            for name, values in zip(("logp", "entropy", "collision"), computed, strict=True):
                given.setdefault(name, values)
        elif "entropy" not in given:
            (given["entropy"],) = _over_rows(lambda x: (token_entropy(x, temperature=heat),), logits)

    def _logp(self, given: dict[str, Any]) -> Padded:
        if "logp" not in given:
            raise MisfitError("neither logp= nor logits= with ids= was given")
        logp = Padded.of(measured(given["logp"]), longest=_longest(given))
        if logp.values.dim() != 2:
            raise MisfitError(f"it has shape {_shape(logp.values)} where (B, T) is needed{_packed(logp.values)}")
        if not logp.values.is_floating_point():
            raise MisfitError(f"it is of {logp.values.dtype}, which holds no log-probs")
        return logp

    def _mask(self, given: dict[str, Any], logp: Padded) -> Tensor:
        """Return the mask, limited to positions that have a token."""
        if "mask" not in given:
            if logp.valid is None:
                raise MisfitError("it was not given: which of the tokens are not padding?")
            return logp.valid
        mask = _beside(Padded.of(measured(given["mask"]), longest=logp.values.shape[1]), logp)
        inside = [part.bool() for part in (mask.values, mask.valid, logp.valid) if part is not None]
        return torch.stack(inside).all(0) if len(inside) > 1 else inside[0]

    def _one(self, name: str, value: Any, logp: Padded) -> Tensor | None:
        if name in ("logp", "mask", "logits"):
            return None
        value = Padded.of(measured(value), longest=logp.values.shape[1])
        if name in WHOLE and (value.values.is_floating_point() or value.values.is_complex()):
            raise MisfitError(f"it is of {value.values.dtype} where whole numbers are needed")
        if name == "advantages":
            return _advantages(value, logp)
        if name in RESPONSES:
            return _per_response(value, logp)
        return _beside(value, logp, more=2 if name in ROUTES else 0).values


def _over_rows(work: Any, *inputs: Any) -> tuple[Any, ...]:
    """Apply ``work`` to whole or jagged tensors, or to each row of a list, so that only small results are padded."""
    if all(isinstance(x, Tensor) and (not x.is_nested or x.layout == torch.jagged) for x in inputs):
        return tuple(work(*(measured(x) for x in inputs)))
    rows = [_rows(x) for x in inputs]
    if len({len(x) for x in rows}) > 1:
        raise MisfitError(f"it has {len(rows[0])} rows where ids has {len(rows[-1])}")
    return tuple(list(column) for column in zip(*(work(*row) for row in zip(*rows, strict=True)), strict=True))


def _rows(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged:
        raise MisfitError("one of logits and ids is jagged and the other is not")
    return x.unbind() if isinstance(x, Tensor) else x


def _paired(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    if not logits.is_nested and logits.shape[:-1] != ids.shape:
        raise MisfitError(f"it has shape {_shape(logits)} where ids has {_shape(ids)}; one more dimension is needed")
    return logits, ids


def there(x: Any) -> Any:
    """Return ``x`` unchanged. Raises ``MisfitError`` if it is a tensor on the meta device, which holds no data."""
    if isinstance(x, Tensor) and x.is_meta:
        raise MisfitError(NO_DATA)
    return x


def measured(x: Any) -> Any:
    """Return ``x`` unchanged. Raises ``MisfitError`` if it is a DTensor or complex, which cannot be measured."""
    if not isinstance(x, Tensor):
        return x
    if hasattr(x, "full_tensor"):
        raise MisfitError("it is a DTensor: pass what this rank holds of it (to_local), or all of it (full_tensor)")
    if x.is_complex():
        raise MisfitError("it is complex")
    return x


def _longest(given: Mapping[str, Any]) -> int | None:
    """Return the length of the longest row, from any jagged input that has it."""
    return next((known for value in given.values() if (known := longest_row(value)) is not None), None)


def _beside(x: Padded, logp: Padded, more: int = 0) -> Padded:
    """Return ``x`` if its first two dimensions match ``logp`` and ``more`` dimensions follow; else raise."""
    wanted = logp.values.shape
    if x.values.shape[:2] != wanted or x.values.dim() != 2 + more:
        raise MisfitError(f"it has shape {_shape(x.values)} where logp has {_shape(logp.values)}{_routed(more)}")
    if x.lengths is not None and logp.lengths is not None and x.lengths != logp.lengths:
        raise MisfitError(f"its rows have lengths {_few(x.lengths)} where those of logp have {_few(logp.lengths)}")
    return Padded(_moved(x.values, logp), None if x.valid is None else _moved(x.valid, logp), x.lengths)


def _advantages(x: Padded, logp: Padded) -> Tensor:
    rows, shape = logp.values.shape[0], tuple(x.values.shape)
    if shape in ((rows,), (rows, 1)):
        return _moved(x.values, logp)
    return _beside(x, logp).values


def _per_response(x: Padded, logp: Padded) -> Tensor:
    rows, shape = logp.values.shape[0], tuple(x.values.shape)
    if shape not in ((rows,), (rows, 1)):
        raise MisfitError(f"it has shape {_shape(x.values)} where ({rows},) is needed: one for each response")
    return _moved(x.values.reshape(rows), logp)


def _moved(x: Tensor, logp: Padded) -> Tensor:
    """Return ``x`` on the device of ``logp``. Nothing is copied to the CPU, which would wait for the device."""
    here = logp.values.device
    if x.device == here:
        return x
    if here.type == "cpu":
        raise MisfitError(f"it is on {x.device} where logp is on the CPU")
    return x.to(here, non_blocking=True)


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _few(lengths: tuple[int, ...]) -> str:
    return f"{lengths}" if len(lengths) <= 8 else f"{lengths[:8]}..."


def _routed(more: int) -> str:
    return " and routing needs (B, T, layers, k)" if more else ""


def _packed(x: Tensor) -> str:
    packed = "; packed tokens: torch.nested.nested_tensor_from_jagged(logp, offsets=..., max_seqlen=...)"
    return packed if x.dim() == 1 else ""


# Generations.
#
# An input with another number of responses than the first, or that cannot be read, is left out with the reason.

WIDE = ("ids", "mask")
"""Inputs of a generation with shape (B, T); all others are (B,)."""


class GenerationReader:
    """Reader of the generations of a run; ``refused`` maps inputs left out of the last generation to the reasons.

    ``eos`` are the token ids that end a response.
    """

    def __init__(self, eos: tuple[int, ...] = ()) -> None:
        self.refused: dict[str, str] = {}
        self._eos = eos
        self._tasks = TaskNames()

    def read(self, inputs: Mapping[str, Any]) -> ResponseBatch | None:
        """Return the batch of responses from ``inputs``, or None if no input fits."""
        self.refused = {}
        fitting = self._fitting({name: value for name, value in inputs.items() if value is not None})
        while fitting:
            made = call_or(partial(self._made, fitting), partial(self._without_one, fitting))
            if made is not None:
                return made
        return None

    def _without_one(self, fitting: dict[str, Any], misfit: Exception) -> None:
        name = self._culprit(fitting)
        self.refused[name] = why_misfit(misfit)
        del fitting[name]

    def _made(self, fitting: Mapping[str, Any]) -> ResponseBatch:
        return ResponseBatch.of(**fitting, task_names=self._tasks, eos=self._eos)

    def _culprit(self, fitting: Mapping[str, Any]) -> str:
        """Return the input that cannot be read by itself; else one that depends on others (mask, groups)."""
        for name, value in fitting.items():
            if name not in ("mask", "groups") and raised_by(self._made, {name: value}):
                return name
        return next((name for name in ("mask", "groups") if name in fitting), next(iter(fitting)))

    def _fitting(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs with as many responses as the first one."""
        fitting: dict[str, Any] = {}
        first: tuple[str, int] | None = None

        def take(name: str, value: Any) -> None:
            nonlocal first
            if name == "groups" and isinstance(value, Integral):
                fitting[name] = value
                return
            fitting[name] = column = _column(name, value)
            first = first or (name, len(column))
            if len(column) != first[1]:
                raise ValueError(f"it is of {len(column)} responses where {first[0]} is of {first[1]}")

        def refused(name: str, misfit: Exception) -> None:
            self.refused[name] = why_misfit(misfit)
            fitting.pop(name, None)

        for name, value in given.items():
            call_or(partial(take, name, value), partial(refused, name))
        return fitting


def _column(name: str, value: Any) -> Any:
    """Return ``value`` with one entry or one row for each response. Raises ``ValueError`` if it has neither."""
    if isinstance(value, Tensor) and value.is_nested and value.layout == torch.strided:
        return list(value.unbind())
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, Tensor) or value.is_nested:
        return value
    value = there(measured(value))
    wanted = "(B, T)" if name in WIDE else "(B,)"
    if name not in WIDE and value.dim() == 2 and value.shape[1] == 1:
        value = value.squeeze(1)
    if value.dim() != (2 if name in WIDE else 1):
        raise ValueError(f"it has shape {tuple(value.shape)} where {wanted} is needed")
    return value.detach() if name in WIDE else value.detach().clone()  # kept until the step ends


# A few completions of a generation: measured on a background thread, and kept as text if enabled.

COLUMNS = {
    "rewards": "reward", "advantages": "advantage", "kl": "kl", "lengths": "length", "tasks": "task",
    "prompt_index": "prompt_index",
}  # fmt: skip
"""Input of ``Watcher.rollouts`` that is recorded with kept text -> its column name."""


class Samples(SampledText):
    """Text of a custom loop's generations: a few completions are kept or measured.

    Only inputs that are on the CPU are used.
    """

    def __init__(
        self, run: Run, *, keep: KeepCompletions | None = None, measure: bool = True, tokenizer: Any = None
    ) -> None:
        super().__init__(keep, measure=measure, tokenizer=tokenizer, rank=run.rank)
        self._run = run

    def offer(self, step: int, inputs: Mapping[str, Any]) -> None:
        """Keep and measure completions of the generation that ``step`` trains on, if due.

        ``inputs`` are those of ``rollouts``.
        """
        texts = _listed(inputs.get("completions"))
        self._offer(
            self._run,
            step,
            lambda: _prompt_ids(inputs),
            lambda sampler: _to_keep(sampler, step, texts, inputs) if texts else None,
            lambda: _to_measure(texts, inputs),
        )


def _to_keep(
    sampler: CompletionSampler, step: int, texts: Sequence[Any], inputs: Mapping[str, Any]
) -> CompletionBatch | None:
    prompts = _listed(inputs.get("prompts")) or [""] * len(texts)
    columns: dict[str, Values | Lazy] = {
        column: values for name, column in COLUMNS.items() if (values := _listed(inputs.get(name)))
    }
    columns |= _reward_parts(inputs.get("reward_parts"))
    groups = _numbered(inputs.get("groups"), len(texts))
    if groups:
        columns["group"] = groups
    ids, mask = inputs.get("ids"), inputs.get("mask")
    return sampler.sample(
        step, prompts, texts, columns, ids=lambda i: _ids_of(ids, mask, i), prompt_ids=_prompt_ids(inputs)
    )


def _reward_parts(given: Any) -> dict[str, list[Any]]:
    """Return the columns of the reward functions, without those on a device."""
    parts = given if isinstance(given, Mapping) else {}
    return {f"{PART}{name}": values for name, column in parts.items() if (values := _listed(column))}


def _numbered(groups: Any, rows: int) -> list[int]:
    """Number prompt groups from 0 in order of appearance."""
    if isinstance(groups, Integral):
        return [i // max(1, int(groups)) for i in range(rows)]
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(group, len(numbers)) for group in _listed(groups) or []]


def _prompt_ids(inputs: Mapping[str, Any]) -> list[str]:
    """Return ids of the prompts, from their text or else from their rows in the dataset."""
    prompts = _listed(inputs.get("prompts"))
    if prompts:
        return [prompt_id(str(prompt)) for prompt in prompts]
    return [f"row {index}" for index in _listed(inputs.get("prompt_index")) or []]


def _to_measure(texts: Sequence[str] | None, inputs: Mapping[str, Any]) -> list[Sample]:
    ids, mask = inputs.get("ids"), inputs.get("mask")
    rows = spread(len(texts) if texts else _row_count(ids))
    samples = [Sample(texts[i] if texts else None, _ids_of(ids, mask, i)) for i in rows]
    return [sample for sample in samples if sample.text is not None or sample.ids]


def _row_count(ids: Any) -> int:
    return 0 if ids is None or (isinstance(ids, Tensor) and ids.is_nested) else len(ids)


def _ids_of(ids: Any, mask: Any, row: int) -> list[int] | None:
    """Return the sampled ids of one response, without padding; None if they are unknown, or on a device."""
    if isinstance(ids, Tensor):
        if ids.device.type != "cpu" or ids.is_nested or not isinstance(mask, Tensor) or mask.device.type != "cpu":
            return None
        return [int(token) for token in ids[row][mask[row].bool()].tolist()]
    one = None if ids is None or row >= len(ids) else _listed(ids[row])
    return None if one is None or mask is not None else [int(token) for token in one]


def _listed(x: Any) -> list[Any] | None:
    """Convert to a list, with NaN for None; None if it is not given, on a device, or a single number."""
    if x is None or (isinstance(x, Tensor) and (x.device.type != "cpu" or x.is_nested)):
        return None
    if hasattr(x, "tolist"):
        values = x.tolist()
        return values if isinstance(values, list) else None
    return [math.nan if value is None else value for value in x] if isinstance(x, Sequence) else None
