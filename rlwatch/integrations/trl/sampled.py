"""What becomes of sampled text: a few completions are kept, if that was asked for, and a few are measured."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from rlwatch.integrations.completions import CompletionSampler, KeepCompletions
from rlwatch.integrations.trl.generation import Scored, completion_batch, samples_of
from rlwatch.text import TextProbe

if TYPE_CHECKING:
    from rlwatch.run import Run


class Sampled:
    """``sampler`` chooses the completions a run keeps as text, ``probe`` measures some; None: that is not done."""

    def __init__(self, sampler: CompletionSampler | None = None, probe: TextProbe | None = None) -> None:
        self._sampler = sampler
        self._probe = probe

    @classmethod
    def of(cls, trainer: Any, keep: KeepCompletions | None, *, measure: bool) -> Self:
        """For ``trainer``, whose tokenizer is copied: it may not be used by two threads at once."""
        sampler = None if keep is None else CompletionSampler(keep, trainer.args.process_index)
        if not measure:
            return cls(sampler)
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        return cls(sampler, TextProbe(copy.deepcopy(tokenizer)))

    def offer(self, run: Run, trainer: Any, scored: Scored) -> None:
        """A generation of the step that is under way."""
        step = int(trainer.state.global_step) + 1
        if self._sampler is not None and self._sampler.due(step):
            batch = completion_batch(self._sampler, trainer, scored, step)
            if batch is not None:
                run.log_completions(batch)
        if self._probe is not None and self._probe.due():
            self._probe.offer(samples_of(scored))

    def take(self) -> Mapping[str, float]:
        """The report on text that has become ready, if one has."""
        return {} if self._probe is None else self._probe.take()

    def close(self) -> None:
        """Measure nothing more."""
        if self._probe is not None:
            self._probe.close()
