"""Sampling of completions to record as text: a few of each generation, chosen deterministically, truncated, within a
budget.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from rlwatch.errors import ConfigError
from rlwatch.records import CompletionBatch
from rlwatch.rollouts import CUT, PART
from rlwatch.text import Sample, TextProbe

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")

MEASURED = 4
"""Number of completions of a generation whose text is measured for one report."""
FLOATS = ("reward", "advantage", "kl", "repetition")
"""Columns that are stored as floats, even if all their values are integers."""
FOLLOWED = 16
"""Largest number of prompts that are followed, whose completions are kept again whenever the prompt recurs."""


@dataclass(frozen=True, slots=True)
class KeepCompletions:
    """Limits on the completions that are recorded as text.

    Parameters
    ----------
    every
        Steps between two samples. A generation is sampled if this many steps have passed since the last sample. A
        prompt of an early sample is kept again whenever it recurs, so that its answers can be compared.
    rows
        Largest number of completions in one sample.
    max_chars
        Longest prompt and longest completion that is kept whole, in characters. Of a longer one the beginning and the
        end are kept.
    budget_mb
        Text that one process may record in all, in megabytes of UTF-8. ``every`` grows fourfold whenever half of the
        remaining budget is spent, so that a long run is sampled to its end. Completions left out for that reason are
        counted.

    Raises
    ------
    ConfigError
        For a value out of range.
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
        """Return the limits for ``wish``: None for False, the defaults for True, and ``KeepCompletions`` objects
        unchanged.

        Raises ``ConfigError`` for any other value.
        """
        if isinstance(wish, cls):
            return wish
        if isinstance(wish, bool):
            return cls() if wish else None
        raise ConfigError(f"completions must be True, False or KeepCompletions(...), got {wish!r}")


Values = Sequence[float] | Sequence[str]
Lazy = Callable[[Sequence[int]], Values]
"""Function that returns the values of a column for the given row indices; it is called only for rows that are kept."""
IdsOf = Callable[[int], Sequence[int] | None]
"""Function that returns the token ids of a completion, given its row index, or None if the ids are unknown."""


class CompletionSampler:
    """Sampler that makes a :class:`~rlwatch.records.CompletionBatch` of a generation whenever a sample is due.

    ``keep`` has the limits, ``rank`` is stored in each batch. ``left_out`` counts completions dropped because of the
    budget.
    """

    def __init__(self, keep: KeepCompletions, rank: int = 0) -> None:
        self._keep = keep
        self._rank = rank
        self._last: int | None = None
        self._last_by_settings: int | None = None
        self._followed: dict[str, int] = {}
        self._budget = self._bytes_left = keep.budget_mb * 1e6
        self.left_out = 0

    @property
    def every(self) -> float:
        """Return the current number of steps between two samples; infinite once the budget is spent."""
        if self._bytes_left <= 0:
            return math.inf
        return self._keep.every * 4.0 ** math.floor(math.log2(self._budget / self._bytes_left))

    def due(self, step: int) -> bool:
        """Return True if the generation for ``step`` should be sampled.

        A step before the last sample (after a resume) is due.
        """
        return self._bytes_left > 0 and _passed(self._last, step, self.every)

    def wants(self, step: int, prompt_ids: Callable[[], Sequence[str]]) -> bool:
        """Return True if the generation for ``step`` has completions to keep: a sample is due, or a followed prompt
        recurs.

        ``prompt_ids`` returns the ids of the generation's prompts; it is called only if prompts are followed.
        """
        due = self.due(step)
        if _passed(self._last_by_settings, step, self._keep.every):
            self._last_by_settings = step
            self.left_out += 0 if due else self._keep.rows
        back = {name for name, last in self._followed.items() if _passed(last, step, self.every)}
        return due or (bool(back) and self._bytes_left > 0 and not back.isdisjoint(prompt_ids()))

    def sample(
        self,
        step: int,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Values | Lazy],
        *,
        ids: IdsOf | None = None,
        prompt_ids: Sequence[str] = (),
    ) -> CompletionBatch | None:
        """Return a sample of the generation that ``step`` trains on, or None if there is nothing to keep.

        ``prompts`` and ``completions`` are texts, one for each completion. ``columns`` are further values, one for each
        completion; ``reward`` and ``length`` among them decide which completions are kept. A column of another length
        than ``completions`` is left out, because its values cannot be matched to completions. ``ids`` returns the token
        ids of a completion. ``prompt_ids`` name the prompts, by default by a hash of their text.
        """
        rows = min(len(prompts), len(completions))
        given = {name: values for name, values in columns.items() if callable(values) or len(values) == rows}
        names = prompt_ids if len(prompt_ids) == rows else [prompt_id(prompts[i]) for i in range(rows)]
        chosen = self._choose(step, given, names, rows)
        if not chosen:
            return None
        wholes = [completions[i] for i in chosen]
        texts = {"prompt": [self._cut(prompts[i]) for i in chosen], "completion": [self._cut(one) for one in wholes]}
        if not self._spend(texts):
            return None
        self._note(step, [names[i] for i in chosen], due=self.due(step))
        more = {name: _column(_values(name, values, chosen)) for name, values in given.items()}
        facts: dict[str, Sequence[str] | np.ndarray] = {
            "prompt_id": [names[i] for i in chosen],
            "chars": _column([len(one) for one in wholes]),
            "generated": _column([rows] * len(chosen)),
            "repetition": _column([_repetition(ids, i, one) for i, one in zip(chosen, wholes, strict=True)]),
        }
        return CompletionBatch(step, {**texts, **facts, **more}, rank=self._rank)

    def _choose(self, step: int, columns: Mapping[str, Values | Lazy], names: Sequence[str], rows: int) -> list[int]:
        rewards, lengths = (_numbers(columns.get(name)) for name in ("reward", "length"))
        back = [
            i for i in range(rows) if names[i] in self._followed and _passed(self._followed[names[i]], step, self.every)
        ]
        most = self._keep.rows
        if not self.due(step):
            return sorted(_ends(back, names, rewards)[:most])
        return choose(rewards, rows, most, lengths=lengths, wanted=_ends(back, names, rewards)[: most // 2])

    def _note(self, step: int, names: Sequence[str], *, due: bool) -> None:
        if due:
            self._last = step
        for name in names:
            if name in self._followed or (name and len(self._followed) < FOLLOWED):
                self._followed[name] = step

    def _cut(self, text: str) -> str:
        most = self._keep.max_chars
        if len(text) <= most:
            return text
        half = (most - len(CUT)) // 2
        return text[:half] + CUT + text[-half:]

    def _spend(self, texts: Mapping[str, Sequence[str]]) -> bool:
        """Take the texts from the budget; return False if it does not suffice, and never will."""
        size = sum(len(text.encode(errors="replace")) for column in texts.values() for text in column)
        self._bytes_left -= size
        if self._bytes_left >= 0:
            return True
        self.left_out += len(texts["completion"])
        logger.warning("rlwatch keeps no more completions: the %g MB of this run are spent", self._keep.budget_mb)
        return False


class SampledText:
    """Text of generations: a few completions are kept as text, and a few are measured on a background thread.

    ``keep`` has the limits of kept text (None: no text is kept). ``measure`` switches the measurement on, which
    includes whether token ids survive decoding and encoding by the ``tokenizer``. The tokenizer is copied, because
    threads must not share one. ``rank`` is stored with kept text.
    """

    def __init__(
        self, keep: KeepCompletions | None = None, *, measure: bool = False, tokenizer: Any = None, rank: int = 0
    ) -> None:
        self._sampler = None if keep is None else CompletionSampler(keep, rank)
        self.probe = TextProbe(copy.deepcopy(tokenizer), most=MEASURED) if measure else None

    def take(self, *, wait: bool = False) -> Mapping[str, float]:
        """Return the metrics of the last measurement of text if one is ready, else none.

        ``wait``: wait for one in progress.
        """
        return {} if self.probe is None else self.probe.take(wait=wait)

    def close(self) -> None:
        """Stop the background thread that measures text."""
        if self.probe is not None:
            self.probe.close()

    def _offer(
        self,
        run: Run,
        step: int,
        prompt_ids: Callable[[], Sequence[str]],
        batch: Callable[[CompletionSampler], CompletionBatch | None],
        samples: Callable[[], Sequence[Sample]],
    ) -> None:
        """Process the generation of ``step``; ``batch`` and ``samples`` are called only if they are due."""
        if self._sampler is not None:
            kept = batch(self._sampler) if self._sampler.wants(step, prompt_ids) else None
            if kept is not None:
                run.log_completions(kept)
            if self._sampler.left_out:
                run.counters.add("completions_left_out", self._sampler.left_out)
                self._sampler.left_out = 0
        if self.probe is not None and self.probe.due():
            self.probe.offer(samples())


def spread(rows: int) -> list[int]:
    """Return the indices of the completions to measure in a generation of ``rows`` completions, evenly spread.

    >>> spread(10), spread(2)
    ([0, 2, 5, 7], [0, 1])
    """
    chosen = min(MEASURED, rows)
    return [i * rows // chosen for i in range(chosen)]


def choose(
    rewards: Sequence[float] | None,
    rows: int,
    most: int,
    *,
    lengths: Sequence[float] | None = None,
    wanted: Sequence[int] = (),
) -> list[int]:
    """Return at most ``most`` of ``rows`` row indices, ascending. Chosen first are rows with a NaN reward, then the
    best and the worst reward, the longest row, the rows in ``wanted``, and last rows that are spread evenly.

    ``rewards`` and ``lengths`` have one value for each row, or are None.

    >>> choose([0.1, 0.9, 0.4, 0.2, 0.3], 5, 3)
    [0, 1, 3]
    >>> choose([0.1, 0.9, 0.4, 0.2, 0.3], 5, 4, lengths=[1, 1, 1, 1, 7], wanted=[3])
    [0, 1, 3, 4]
    """
    if rows <= most:
        return list(range(rows))
    notable = [] if rewards is None else _notable(rewards)
    notable += [] if lengths is None else [max(range(rows), key=lambda i: lengths[i])]
    spread = (i * rows // most for i in range(most))
    everything = dict.fromkeys([*notable[:most], *wanted, *spread, *range(rows)])
    return sorted(list(everything)[:most])


def _notable(rewards: Sequence[float]) -> list[int]:
    broken = [i for i, reward in enumerate(rewards) if math.isnan(reward)]
    whole = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    if whole:
        broken += [max(whole, key=lambda i: rewards[i]), min(whole, key=lambda i: rewards[i])]
    return broken


def _ends(rows: Sequence[int], names: Sequence[str], rewards: Sequence[float] | None) -> list[int]:
    """Return the best and the worst row of each prompt among ``rows``, all the best first."""
    found: list[list[int]] = []
    for name in dict.fromkeys(names[i] for i in rows):
        own = [i for i in rows if names[i] == name]
        found.append(own[:2] if rewards is None else _notable([rewards[i] for i in own]))
        if rewards is not None:
            found[-1] = [own[i] for i in found[-1]]
    return list(dict.fromkeys([one[0] for one in found] + [i for one in found for i in one[1:]]))


def prompt_id(prompt: str | bytes) -> str:
    """Return the id of a prompt, a hash of its text that is the same in every run and process.

    The result is empty for an empty prompt.

    >>> prompt_id("1+1="), prompt_id("")
    ('56a54d937498', '')
    """
    raw = prompt.encode(errors="surrogatepass") if isinstance(prompt, str) else prompt
    return blake2b(raw, digest_size=6).hexdigest() if raw else ""


_BASE = 2**21
"""Larger than any vocabulary; three digits of it fit an int64."""


def repetition(ids: Sequence[int]) -> float:
    """Return the share of token trigrams in ``ids`` that repeat an earlier one: 0 without repetition, near 1 in a loop.

    The value is 1 - distinct-3. The metric ``text/repetition`` is the same for all responses together.

    >>> round(repetition([1, 2, 3, 1, 2, 3, 4]), 3), repetition([5] * 102), repetition([])
    (0.2, 0.99, 0.0)
    """
    if len(ids) < 3:
        return 0.0
    x = np.asarray(ids, dtype=np.int64)
    grams = (x[:-2] * _BASE + x[1:-1]) * _BASE + x[2:]
    return 1 - len(np.unique(grams)) / len(grams)


_WORD = re.compile(r"\w+|[^\w\s]")


def _repetition(ids: IdsOf | None, row: int, text: str) -> float:
    """Return the repetition of the tokens if they are known, else of the words."""
    known = None if ids is None else ids(row)
    if known is None:
        numbers: dict[str, int] = {}
        known = [numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text)]
    return repetition(known)


def _passed(last: int | None, step: int, every: float) -> bool:
    return last is None or step < last or step - last >= every


def _numbers(values: Values | Lazy | None) -> list[float] | None:
    return None if values is None or callable(values) else [float(value) for value in values]


def _values(name: str, values: Values | Lazy, chosen: Sequence[int]) -> Sequence[float | str]:
    found = values(chosen) if callable(values) else [values[i] for i in chosen]
    return [float(value) for value in found] if name in FLOATS or name.startswith(PART) else list(found)


def _column(values: Sequence[float | str]) -> np.ndarray | list[str]:
    if all(isinstance(value, str) for value in values):
        return [str(value) for value in values]
    return np.asarray(values, dtype=np.int64 if all(isinstance(v, int) for v in values) else np.float64)
