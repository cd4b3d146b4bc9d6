"""Steps that are too large to be measured whole in the driver: which rows are read, and what is known of all rows.

verl's queue gives rows by key, so what is not chosen is never copied. A response's reward, length, group, task, age and
whether it was cut are read of every row; what is measured token by token is read of rows spread evenly over the
lengths, until the workers, who see all tokens, have been asked to measure them too (the step after the first such one:
:func:`~rlwatch.integrations.verl.taps.before_update`). What is of ids (repetition, loops) is always of the rows read.
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
"""Tokens of one column that are copied out of the queue at once."""

LEAST = 2**16
"""Tokens that are measured at least: a step of fewer is measured whole, whatever it costs."""

FIRST_GUESS = 1.5e-3
"""Milliseconds a token costs until that was measured, on the slow side."""

MEASURED_SHARE = "rlwatch/measured_share"
"""Share of a step's tokens that the driver measured, where it was not all."""

Fetch = Callable[[Sequence[str], Sequence[str]], Any]
"""Columns (a TensorDict) of the rows with these keys: ``fetch(keys, fields)``."""


@dataclass(slots=True)
class SamplingBudget:
    """Milliseconds that the driver may spend on the tokens of a step; None: as many as it takes.

    Counted are the CPU time of the thread that computes and what training waits for the queue; what a token costs is
    learnt from the steps before.
    """

    milliseconds: float | None
    per_token: float = FIRST_GUESS
    least: int = LEAST

    @property
    def tokens(self) -> float:
        """Return the number of tokens within the budget, as a power of two, so that small changes have no effect."""
        if self.milliseconds is None:
            return math.inf
        return max(self.least, 2.0 ** math.floor(math.log2(max(self.milliseconds / self.per_token, 1.0))))

    def spent(self, tokens: int, milliseconds: float) -> None:
        """Take into account what ``tokens`` did cost."""
        if tokens:
            self.per_token = (self.per_token + milliseconds / tokens) / 2

    def rows(self, lengths: Sequence[int], step: int) -> list[int] | None:
        """Rows to measure in a step of responses with ``lengths`` tokens; None for all.

        Every k-th in the order of length, from a start drawn anew each step: short and long responses are there in
        proportion, and each is as likely as any other.
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
    """The responses of a step without verl's padding, and which of them are ``chosen`` to be read token by token.

    None: all. ``lengths`` are empty if verl does not report them; no rows are chosen then.
    """

    keys: tuple[str, ...]
    tags: tuple[Mapping[str, Any], ...]
    lengths: tuple[int, ...]
    chosen: tuple[int, ...] | None

    @classmethod
    def of(
        cls, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], budget: SamplingBudget, step: int
    ) -> SampledRows:
        """Read the keys and tags of a ``KVBatchMeta``."""
        real = [row for row, tag in enumerate(tags) if not tag.get("is_padding", False)]
        kept, kept_tags = tuple(keys[row] for row in real), tuple(dict(tags[row]) for row in real)
        lengths = tuple(tag.get("response_len") for tag in kept_tags)
        known = tuple(int(n) for n in lengths if n is not None)
        chosen = budget.rows(known, step) if len(known) == len(lengths) else None
        return cls(kept, kept_tags, known, None if chosen is None else tuple(chosen))

    @property
    def to_read(self) -> tuple[tuple[str, ...], list[Mapping[str, Any]]]:
        """Keys and tags of the rows to read token by token."""
        rows = range(len(self.keys)) if self.chosen is None else self.chosen
        return tuple(self.keys[row] for row in rows), [self.tags[row] for row in rows]


@dataclass(frozen=True, slots=True)
class EveryResponse:
    """Everything known of all B responses of a step, one value each.

    ``rewards`` (B,) or None; ``lengths`` (B,); ``last`` (B,) the last id of a response as long as may be, else -1.
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
        """Copy it out of the queue, a few rows at a time; ``lengths`` are those of the responses with ``keys``."""
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
        """Return the per-response view of the whole step."""
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
