"""Selection of the responses that the driver measures token by token in steps that are too large to measure whole.

verl's queue returns rows by key, so rows that are not chosen are never copied. For every response the driver reads its
reward, length, group, task, age and whether it was truncated. Token statistics are computed on responses spread evenly
over the lengths. After the first such step the workers, who see all tokens, measure them too
(:func:`~rlwatch.integrations.verl.taps.before_update`). Statistics of token ids (repetition, loops) always come from
the chosen responses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlwatch.integrations.verl.batch import RESPONSE_FIELDS, BatchSettings, finals, listed
from rlwatch.tensors.responses import ResponseBatch

AT_ONCE = 2**20
"""Number of tokens of one column that are copied out of the queue in one call."""

LEAST = 2**16
"""Smallest number of tokens that is measured: a step with fewer tokens is measured whole, whatever it costs."""

FIRST_GUESS = 1.5e-3
"""Assumed cost of a token in milliseconds until it was measured, on the slow side."""

MEASURED_SHARE = "rlwatch/measured_share"
"""Metric for the share of a step's tokens that the driver measured, recorded if it did not measure all."""

Fetch = Callable[[Sequence[str], Sequence[str]], Any]
"""Function ``fetch(keys, fields)`` that returns the columns ``fields`` of the rows ``keys`` as a TensorDict."""


@dataclass(slots=True)
class SamplingBudget:
    """Time that the driver may spend on the tokens of a step, in milliseconds; None means no limit.

    The CPU time of the computing thread counts, and the time that training waits for the queue. The cost of a token is
    learnt from earlier steps: ``per_token`` is its running mean in milliseconds. ``least`` is the smallest number of
    tokens to measure.
    """

    milliseconds: float | None
    per_token: float = FIRST_GUESS
    least: int = LEAST

    @property
    def tokens(self) -> float:
        """Return the number of tokens within the budget, a power of two, so that small changes of the cost have no
        effect.
        """
        if self.milliseconds is None:
            return math.inf
        return max(self.least, 2.0 ** math.floor(math.log2(max(self.milliseconds / self.per_token, 1.0))))

    def spent(self, tokens: int, milliseconds: float) -> None:
        """Update the cost of a token from a step in which ``tokens`` tokens took ``milliseconds``."""
        if tokens:
            self.per_token = (self.per_token + milliseconds / tokens) / 2

    def rows(self, lengths: Sequence[int], step: int) -> list[int] | None:
        """Return the indices of the responses to measure, ascending, or None for all; ``lengths`` are in tokens.

        In the order of length every k-th response is chosen, from a start drawn anew for each ``step``. So short and
        long responses are represented in proportion, and each is chosen with equal probability.
        """
        total = sum(lengths)
        if total <= self.tokens:
            return None
        wanted = max(1, int(len(lengths) * self.tokens / total))
        stride, start = len(lengths) / wanted, random.Random(step).random()
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        return sorted(by_length[int((place + start) * stride)] for place in range(wanted))


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The responses of a step without verl's padding rows, and which of them to read token by token.

    ``keys`` and ``tags`` are those of verl's queue, one for each response. ``lengths`` are in tokens, empty if verl
    does not report them. ``chosen`` are indices of the responses to read; None means all, also without lengths.
    """

    keys: tuple[str, ...]
    tags: tuple[Mapping[str, Any], ...]
    lengths: tuple[int, ...]
    chosen: tuple[int, ...] | None

    @classmethod
    def of(
        cls, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], budget: SamplingBudget, step: int
    ) -> SampledRows:
        """Choose rows by the keys and tags of a ``KVBatchMeta``, within ``budget``, for ``step``."""
        real = [row for row, tag in enumerate(tags) if not tag.get("is_padding", False)]
        kept, kept_tags = tuple(keys[row] for row in real), tuple(dict(tags[row]) for row in real)
        lengths = tuple(tag.get("response_len") for tag in kept_tags)
        known = tuple(int(n) for n in lengths if n is not None)
        chosen = budget.rows(known, step) if len(known) == len(lengths) else None
        return cls(kept, kept_tags, known, None if chosen is None else tuple(chosen))

    @property
    def to_read(self) -> tuple[tuple[str, ...], list[Mapping[str, Any]]]:
        """Return keys and tags of the responses to read token by token."""
        rows = range(len(self.keys)) if self.chosen is None else self.chosen
        return tuple(self.keys[row] for row in rows), [self.tags[row] for row in rows]


@dataclass(frozen=True, slots=True)
class EveryResponse:
    """Values that are known of all B responses of a step, also if only some are read token by token.

    ``rewards`` (B,) or None; ``lengths`` (B,) in tokens. ``last`` (B,) is the last token id of each response that has
    the maximal length, and -1 for the others. ``named`` has the prompt group and the task of each response.
    """

    keys: tuple[str, ...]
    rewards: Tensor | None
    lengths: Tensor
    last: Tensor
    named: Mapping[str, Sequence[Any]]

    @classmethod
    def read(
        cls,
        keys: Sequence[str],
        lengths: Sequence[int],
        fetch: Fetch,
        reading: BatchSettings,
        *,
        at_once: int = AT_ONCE,
    ) -> EveryResponse:
        """Copy the values out of verl's queue, a few rows at a time.

        ``lengths`` (tokens) belong to the responses ``keys``. ``reading`` has the maximal length. ``at_once`` limits
        the tokens copied in one call of ``fetch``.
        """
        sums, last = [], torch.full((len(keys),), -1)
        for rows in _runs(lengths, at_once):
            data = fetch(keys[rows], ["rm_scores"])
            if "rm_scores" in data.keys():  # noqa: SIM118  (TensorDict)
                scores = data["rm_scores"]
                sums.append(torch.segment_reduce(scores.values().float(), "sum", offsets=scores.offsets(), initial=0))
        longest = [row for row, length in enumerate(lengths) if reading.longest and length >= reading.longest]
        for some in _runs([lengths[row] for row in longest], at_once):
            rows_of_them = longest[some]
            ids = fetch([keys[row] for row in rows_of_them], ["responses"])["responses"]
            last[rows_of_them] = ids.values()[ids.offsets()[1:] - 1].long()
        columns = fetch(keys, list(RESPONSE_FIELDS))
        present = set(columns.keys())
        named = {name: listed(columns[name]) for name in RESPONSE_FIELDS if name in present}
        rewards = torch.cat(sums) if sums else None
        return cls(tuple(keys), rewards, torch.tensor(lengths), last, named)

    def response_batch(self, reading: BatchSettings) -> ResponseBatch:
        """Return the responses of the whole step as a batch for response statistics; ``reading`` has the settings."""
        cut = None if reading.longest is None else (self.last >= 0) & (self.last != reading.eos)
        return ResponseBatch.of(
            rewards=self.rewards,
            scored=None if self.rewards is None else torch.tensor(finals(self.keys)),
            groups=self.named.get("uid"),
            lengths=self.lengths,
            cut=cut,
            tasks=self.named.get("data_source"),
            task_names=reading.tasks,
        )


def _runs(lengths: Sequence[int], at_once: int) -> Iterator[slice]:
    """Return consecutive rows that hold ``at_once`` tokens at most; a longer one goes alone."""
    first, held = 0, 0
    for row, length in enumerate(lengths):
        if row > first and held + length > at_once:
            yield slice(first, row)
            first, held = row, 0
        held += length
    if first < len(lengths):
        yield slice(first, len(lengths))
