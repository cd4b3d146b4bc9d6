"""A few completions of a generation: measured on a thread of their own, and kept as text where that is wanted."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlwatch.integrations.completions import CompletionSampler, KeepCompletions
from rlwatch.text import Sample, TextProbe

if TYPE_CHECKING:
    from rlwatch.run import Run

MEASURED = 4
"""Completions a report on text is made of."""
COLUMNS = {"rewards": "reward", "lengths": "length", "groups": "group", "tasks": "task"}
"""Inputs that are kept beside the text, and what they are called there."""


class Samples:
    """Takes what lies on the CPU already; nothing is fetched from a device.

    ``keep``: how much text may be stored (None: none). ``measure``: whether text is measured; ``tokenizer`` then
    tells whether ids survive decoding and encoding.
    """

    def __init__(
        self, run: Run, *, keep: KeepCompletions | None = None, measure: bool = True, tokenizer: Any = None
    ) -> None:
        self._run = run
        self._sampler = None if keep is None else CompletionSampler(keep, run.rank)
        self._probe = TextProbe(copy.deepcopy(tokenizer), most=MEASURED) if measure else None

    def offer(self, step: int, inputs: Mapping[str, Any]) -> None:
        """The generation that ``step`` trains on, as passed to ``rollouts``."""
        texts = _listed(inputs.get("completions"))
        if self._sampler is not None and texts and self._sampler.due(step):
            self._keep(step, texts, inputs)
        if self._probe is not None and self._probe.due():
            self._probe.offer(_to_measure(texts, inputs))

    def take(self) -> Mapping[str, float]:
        """The report on text that has become ready, if one has."""
        return {} if self._probe is None else self._probe.take()

    def close(self) -> None:
        """Measure nothing more."""
        if self._probe is not None:
            self._probe.close()

    def _keep(self, step: int, texts: Sequence[Any], inputs: Mapping[str, Any]) -> None:
        sampler = self._sampler
        prompts = _listed(inputs.get("prompts")) or [""] * len(texts)
        columns = {ours: values for theirs, ours in COLUMNS.items() if (values := _listed(inputs.get(theirs)))}
        batch = None if sampler is None else sampler.sample(step, prompts, texts, columns)
        if batch is not None:
            self._run.log_completions(batch)


def _to_measure(texts: Sequence[str] | None, inputs: Mapping[str, Any]) -> list[Sample]:
    ids, mask = inputs.get("ids"), inputs.get("mask")
    n = len(texts) if texts else _rows(ids)
    chosen = [i * n // min(MEASURED, n) for i in range(min(MEASURED, n))]
    samples = [Sample(texts[i] if texts else None, _ids_of(ids, mask, i)) for i in chosen]
    return [sample for sample in samples if sample.text is not None or sample.ids]


def _rows(ids: Any) -> int:
    return 0 if ids is None or (isinstance(ids, Tensor) and ids.is_nested) else len(ids)


def _ids_of(ids: Any, mask: Any, row: int) -> list[int] | None:
    """Sampled ids of one response, without padding; None where they are unknown, or on a device."""
    if isinstance(ids, Tensor):
        if ids.device.type != "cpu" or ids.is_nested or not isinstance(mask, Tensor) or mask.device.type != "cpu":
            return None
        return [int(token) for token in ids[row][mask[row].bool()].tolist()]
    one = None if ids is None or row >= len(ids) else _listed(ids[row])
    return None if one is None or mask is not None else [int(token) for token in one]


def _listed(x: Any) -> list[Any] | None:
    """As a list, with NaN for None; None where it is not given, lies on a device or is one number."""
    if x is None or (isinstance(x, Tensor) and (x.device.type != "cpu" or x.is_nested)):
        return None
    if hasattr(x, "tolist"):
        values = x.tolist()
        return values if isinstance(values, list) else None
    return [math.nan if value is None else value for value in x] if isinstance(x, Sequence) else None
