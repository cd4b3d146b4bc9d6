"""What was generated, as text: a few completions are kept, if that was asked for, and a few are measured."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from rlwatch.integrations.completions import CompletionSampler
from rlwatch.integrations.level import Level
from rlwatch.integrations.step_tally import Decode
from rlwatch.integrations.verl.batch import PROMPTS, Reading, StepBatch
from rlwatch.integrations.verl.settings import Settings
from rlwatch.text import Sample, TextProbe

if TYPE_CHECKING:
    from rlwatch.run import Run

MEASURED = 4
"""Completions a report on text is made of."""


class Texts:
    """Called on the thread of the statistics; measures on another one. Tokenizers are copied for each thread."""

    def __init__(self, settings: Settings, tokenizer: Any) -> None:
        keep, self._tokenizer = settings.completions, copy.deepcopy(tokenizer)
        self.fields = () if keep is None else (PROMPTS,)
        self._sampler = None if keep is None else CompletionSampler(keep)
        measure = settings.level.includes(Level.FULL)
        self._probe = TextProbe(copy.deepcopy(tokenizer), most=MEASURED) if measure else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, on the thread of the statistics only."""
        return str(self._tokenizer.decode(list(ids)))

    def offer(self, run: Run, step: int, batch: StepBatch, reading: Reading) -> None:
        """The generation of ``step``."""
        if self._sampler is not None and self._sampler.due(step):
            prompts, said = Decoded(batch.prompts, self.decode), Decoded(batch.responses, self.decode)
            found = self._sampler.sample(step, prompts, said, _columns(batch, reading))
            if found is not None:
                run.log_completions(found)
        if self._probe is not None and self._probe.due():
            self._probe.offer(self._samples(batch))

    def take(self) -> Mapping[str, float]:
        """The report on text that has become ready, if one has."""
        return {} if self._probe is None else self._probe.take()

    def close(self) -> None:
        """Measure nothing more."""
        if self._probe is not None:
            self._probe.close()

    def _samples(self, batch: StepBatch) -> list[Sample]:
        """Evenly spread. Where a tool answered in between, ids are no single text of the policy: only its text is."""
        said, elsewhere = batch.responses, batch.environment()
        chosen = [i * len(said) // min(MEASURED, len(said)) for i in range(min(MEASURED, len(said)))]
        mixed = [elsewhere is not None and bool(elsewhere[i].any()) for i in chosen]
        return [
            Sample(text=self.decode(said[i].tolist())) if tools else Sample(ids=said[i].tolist())
            for i, tools in zip(chosen, mixed, strict=True)
            if len(said[i])
        ]


class Decoded(Sequence[str]):
    """Texts of ``rows`` of ids, each decoded when it is looked at: few are."""

    def __init__(self, rows: Sequence[Tensor], decode: Decode) -> None:
        self._rows = rows
        self._decode = decode

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self._decode(ids.tolist()) for ids in self._rows[row]]
        return self._decode(self._rows[row].tolist())


def _columns(batch: StepBatch, reading: Reading) -> Mapping[str, Sequence[float] | Sequence[str]]:
    """What is kept beside the text."""
    rewards = batch.response_batch(reading).rewards
    columns: dict[str, Sequence[float] | Sequence[str]] = {"length": batch.lengths.tolist()}
    if rewards is not None:
        columns["reward"] = rewards.tolist()
    if "uid" in batch.named:
        numbers: dict[Any, int] = {}
        columns["group"] = [numbers.setdefault(uid, len(numbers)) for uid in batch.named["uid"]]
    if "data_source" in batch.named:
        columns["task"] = [str(task) for task in batch.named["data_source"]]
    return columns
