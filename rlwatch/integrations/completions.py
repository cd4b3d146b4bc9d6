"""Completions kept as text: few, chosen without chance, cut, and within a budget."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlwatch.errors import ConfigError
from rlwatch.records import CompletionBatch
from rlwatch.text import Sample, TextProbe

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")

CUT = " […] "
"""Stands where the middle of a long text was."""
MEASURED = 4
"""Completions a report on text is made of."""


@dataclass(frozen=True, slots=True)
class KeepCompletions:
    """Limits on the text that leaves the trainer.

    Parameters
    ----------
    every
        Steps between two samples: a generation is sampled if this many steps have passed since the last one.
    rows
        Completions a sample keeps at most.
    max_chars
        Longest prompt and longest completion kept, in characters: of a longer one the beginning and the end.
    budget_mb
        Text of one process in all, in megabytes of UTF-8; after that no more is kept, with one warning.
    """

    every: int = 10
    rows: int = 8
    max_chars: int = 4000
    budget_mb: float = 64.0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("rows", 1), ("max_chars", 20), ("budget_mb", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise ConfigError(f"completions: {name} must be a number of at least {least}, got {value!r}")

    @classmethod
    def of(cls, wish: bool | KeepCompletions) -> KeepCompletions | None:
        """None for False, the defaults for True, else ``wish`` itself. Raises ``ConfigError`` for anything else."""
        if isinstance(wish, cls):
            return wish
        if isinstance(wish, bool):
            return cls() if wish else None
        raise ConfigError(f"completions must be True, False or KeepCompletions(...), got {wish!r}")


class CompletionSampler:
    """Makes a :class:`~rlwatch.records.CompletionBatch` of a generation whenever one is due."""

    def __init__(self, keep: KeepCompletions, rank: int = 0) -> None:
        self._keep = keep
        self._rank = rank
        self._last: int | None = None
        self._bytes_left = keep.budget_mb * 1e6

    def due(self, step: int) -> bool:
        """True if the generation for ``step`` should be sampled; a step before the last one (a resume) is."""
        if self._bytes_left <= 0:
            return False
        return self._last is None or step < self._last or step - self._last >= self._keep.every

    def sample(
        self,
        step: int,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[float] | Sequence[str]],
    ) -> CompletionBatch | None:
        """Sample the generation that ``step`` trains on; None if there is nothing to keep.

        ``columns`` are further values, one a completion; ``reward`` among them decides which are kept. Columns of
        another length than ``completions`` are left out: nothing tells which completion a value belongs to.
        """
        rows = min(len(prompts), len(completions))
        fitting = {name: values for name, values in columns.items() if len(values) == rows}
        chosen = choose(fitting.get("reward"), rows, self._keep.rows)
        if not chosen:
            return None
        texts = {
            "prompt": [self._cut(prompts[i]) for i in chosen],
            "completion": [self._cut(completions[i]) for i in chosen],
        }
        self._last = step
        self._spend(texts)
        more = {name: _column([values[i] for i in chosen]) for name, values in fitting.items()}
        return CompletionBatch(step, {**texts, **more}, rank=self._rank)

    def _cut(self, text: str) -> str:
        most = self._keep.max_chars
        if len(text) <= most:
            return text
        half = (most - len(CUT)) // 2
        return text[:half] + CUT + text[-half:]

    def _spend(self, texts: Mapping[str, Sequence[str]]) -> None:
        self._bytes_left -= sum(len(text.encode(errors="replace")) for column in texts.values() for text in column)
        if self._bytes_left <= 0:
            logger.warning("rlwatch keeps no more completions: the %g MB of this run are spent", self._keep.budget_mb)


class SampledText:
    """Text of generations: a few completions are kept, if that is wanted, and a few measured on a thread of their own.

    ``keep``: how much may be stored (None: none). ``measure``: whether text is measured; the ``tokenizer``, which is
    copied because two threads may not use one at once, then tells whether ids survive decoding and encoding.
    """

    def __init__(
        self, keep: KeepCompletions | None = None, *, measure: bool = False, tokenizer: Any = None, rank: int = 0
    ) -> None:
        self._sampler = None if keep is None else CompletionSampler(keep, rank)
        self.probe = TextProbe(copy.deepcopy(tokenizer), most=MEASURED) if measure else None

    def take(self, *, wait: bool = False) -> Mapping[str, float]:
        """The report on text that has become ready, if one has; ``wait`` for one under way."""
        return {} if self.probe is None else self.probe.take(wait=wait)

    def close(self) -> None:
        """Measure nothing more."""
        if self.probe is not None:
            self.probe.close()

    def _offer(
        self,
        run: Run,
        step: int,
        batch: Callable[[CompletionSampler], CompletionBatch | None],
        samples: Callable[[], Sequence[Sample]],
    ) -> None:
        """The generation of ``step``: ``batch`` and ``samples`` are made only if they are due."""
        if self._sampler is not None and self._sampler.due(step):
            kept = batch(self._sampler)
            if kept is not None:
                run.log_completions(kept)
        if self.probe is not None and self.probe.due():
            self.probe.offer(samples())


def spread(rows: int) -> list[int]:
    """The rows to measure of a generation of ``rows``, evenly spread.

    >>> spread(10), spread(2)
    ([0, 2, 5, 7], [0, 1])
    """
    chosen = min(MEASURED, rows)
    return [i * rows // chosen for i in range(chosen)]


def choose(rewards: Sequence[float] | Sequence[str] | None, rows: int, most: int) -> list[int]:
    """At most ``most`` of ``rows`` indices, ascending: those with a reward that is no number, the best, the worst,
    and the others spread evenly.

    >>> choose([0.1, 0.9, 0.4, 0.2, 0.3], 5, 3)
    [0, 1, 3]
    """
    if rows <= most:
        return list(range(rows))
    wanted = [] if rewards is None else _telling([float(reward) for reward in rewards])[:most]
    spread = (i * rows // most for i in range(most))
    everything = dict.fromkeys([*wanted, *spread, *range(rows)])
    return sorted(list(everything)[:most])


def _telling(rewards: Sequence[float]) -> list[int]:
    broken = [i for i, reward in enumerate(rewards) if math.isnan(reward)]
    whole = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    if whole:
        broken += [max(whole, key=lambda i: rewards[i]), min(whole, key=lambda i: rewards[i])]
    return broken


def _column(values: Sequence[float | str]) -> np.ndarray | list[str]:
    if all(isinstance(value, str) for value in values):
        return [str(value) for value in values]
    return np.asarray(values, dtype=np.int64 if all(isinstance(v, int) for v in values) else np.float64)
