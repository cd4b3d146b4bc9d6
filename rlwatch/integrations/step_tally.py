"""Measurements of one optimizer step: collected on the device, copied to the CPU at once, and merged over ranks.

A :class:`StepTally` collects on the device. :meth:`StepTally.seal` makes it a :class:`WholeStep` (one rank) or a
:class:`SharedStep` (the part of one rank of several, which rank 0 merges). If a driver process controls workers,
:func:`merge_workers` merges their tallies.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rlwatch.distributions import batch_of
from rlwatch.error_boundary import ErrorBoundary, raised_by
from rlwatch.integrations.stages import clock_of
from rlwatch.records import FAR_OUT, JSON, NON_FINITE, SpikeBatch
from rlwatch.run.stages import Span, batch_of_spans, seconds_of
from rlwatch.tensors.histogram import observe_distributions, taken_apart
from rlwatch.tensors.masked import sharing
from rlwatch.tensors.mergeable import Stats, merge, merge_ranks, read
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import SpikeTable, TokenBatch, alike, joined, top_tokens
from rlwatch.tensors.transfer import Transfer, pack, unpack

if TYPE_CHECKING:
    from rlwatch.run import Run


POOLED = 2**18
"""Number of positions (responses times the longest) up to which micro-batches are pooled and measured together.

That is some 10 MB, and twice as much while they are concatenated. Batches with experts are never pooled.
"""
PADDING = 1.5
"""Largest ratio of padded to actual positions in a pool, because padding costs time on a CPU."""

Measure = Callable[[TokenBatch], Stats]
"""Function that measures the responses of a batch; its result does not depend on how they are batched."""


def everything(batch: TokenBatch) -> Stats:
    """Return all statistics of ``batch``, and the distributions of its token quantities."""
    with sharing():
        return observe(batch) | observe_distributions(batch)


def core(batch: TokenBatch) -> Stats:
    """Return the statistics of ``batch`` that take one or two passes over its tokens, and the distributions of token
    quantities.
    """
    with sharing():
        return observe(batch, full=False) | observe_distributions(batch)


class StepTally:
    """Collector of the measurements of one step. Everything stays on the device until :meth:`seal`.

    Copies of small micro-batches are pooled and measured together, because a statistic is a few device operations whose
    time is mostly launch overhead. ``stats`` are statistics to begin with.
    """

    __slots__ = ("_measure", "_pool", "_spikes", "_stats", "numbers", "rows", "stages")

    def __init__(self, stats: Stats | None = None) -> None:
        self.numbers: dict[str, list[float]] = {}
        self.rows = 0
        self.stages: list[Span] = []
        self._stats: Stats = {} if stats is None else stats
        self._spikes: SpikeTable | None = None
        self._pool: list[tuple[TokenBatch, frozenset[str]]] = []
        self._measure: Measure = everything

    @property
    def empty(self) -> bool:
        """Return True if nothing was collected."""
        return not (self._pool or self._stats or self.numbers)

    @property
    def stats(self) -> Stats:
        """Return the statistics so far, after measuring the pooled micro-batches."""
        self.measure()
        return self._stats

    @stats.setter
    def stats(self, stats: Stats) -> None:
        self._stats = stats

    @property
    def spikes(self) -> SpikeTable | None:
        """Return the most extreme tokens so far, or None if there were no tokens."""
        self.measure()
        return self._spikes

    def add_batch(
        self, batch: TokenBatch, *, full: bool = True, instead: Stats | None = None, by: Measure | None = None
    ) -> TokenBatch:
        """Add a micro-batch, and return the copy that is kept of it.

        ``full``: compute also the statistics that sort, group or compare tokens.

        ``instead`` are the trainer's own statistics of this micro-batch, which replace measured ones of the same name.
        ``by`` measures the batch instead of the usual functions. Raises the error of a pooled earlier batch that could
        not be measured; ``batch`` is added nevertheless.
        """
        known = frozenset(instead or ())
        measure = by or (everything if full else core)
        apart = self._pool and (self._measure != measure or not self._fits(batch, known))
        error = raised_by(self.measure) if apart else None  # an error of other batches; this one is added all the same
        self._measure = measure
        copy = batch.copied()
        self._pool.append((copy, known))
        if instead:
            self.add_stats(instead)
        if batch.routed or _padded([one for one, _ in self._pool]) >= POOLED:
            self.measure()
        if error is not None:
            raise error
        return copy

    def add_stats(self, stats: Stats) -> None:
        """Merge ``stats``, further statistics of a micro-batch, into those of the step."""
        self._stats = merge(self._stats, stats)

    def _fits(self, batch: TokenBatch, known: frozenset[str]) -> bool:
        """Return True if a micro-batch can be pooled without much padding."""
        first, names = self._pool[0]
        every = [*(one for one, _ in self._pool), batch]
        return (
            names == known and alike(first, batch) and _padded(every) <= min(POOLED, PADDING * sum(map(_size, every)))
        )

    def measure(self) -> None:
        """Measure the pooled micro-batches. Those that fail are left out of the step.

        Raises the first error after all were tried; a batch that fails affects no other.
        """
        pool, self._pool = self._pool, []
        if not pool or raised_by(self._take, pool) is None:
            return
        errors = [error for one in pool if (error := raised_by(self._take, [one])) is not None]
        if errors:
            raise errors[0]

    def _take(self, pool: Sequence[tuple[TokenBatch, frozenset[str]]]) -> None:
        """Measure a pool, completely or not at all."""
        with torch.no_grad():
            batch = joined([one for one, _ in pool])
            measured = {name: stat for name, stat in self._measure(batch).items() if name not in pool[0][1]}
            table = top_tokens(batch, first_row=self.rows)
            spikes = table if self._spikes is None else self._spikes.join(table)
            self._stats, self._spikes = merge(self._stats, measured), spikes
            self.rows += batch.logp.shape[0]

    def add_number(self, name: str, value: float) -> None:
        """Add ``value`` of the metric ``name``, a number that is on the CPU already.

        Several values in one step are averaged.
        """
        self.numbers.setdefault(name, []).append(float(value))

    def end_stages(self, step: int, run: Run | None) -> None:
        """End the timing of the stages of ``step`` in ``run``: add the seconds of each stage as metrics, and its spans
        as a record.
        """
        clock = clock_of(run)
        if clock is not None:
            clock.tapped = True
            self.stages = clock.end_step(step)
            for name, seconds in seconds_of(self.stages).items():
                self.add_number(name, seconds)

    def seal(self, step: int, *, shared: bool = False) -> SealedStep:
        """End the collection of ``step`` and start copying everything to the CPU at once.

        ``shared``: the result is the part of one rank, which rank 0 merges (:attr:`rlwatch.run.Run.linked`).
        """
        with torch.no_grad():
            if shared:
                return SharedStep.of(step, self.stats, self.spikes, _averages(self.numbers), self.stages)
            stats, histograms = taken_apart(self.stats)
            readings = read(stats)
            values, counts = [one.values for one in readings], [one.counts for one in readings]
            table = [] if self.spikes is None else [self.spikes.rows]
            columns = () if self.spikes is None else self.spikes.names
            bins = [one.bins for one in histograms.values()]
            transfer = Transfer([*values, *counts, *table, *bins])
            names = tuple(one.names for one in readings)
            numbers = _averages(self.numbers)
            return WholeStep(step, list(stats), names, numbers, columns, tuple(histograms), transfer, self.stages)


def _size(batch: TokenBatch) -> int:
    return batch.logp.shape[0] * batch.logp.shape[1]


def _padded(batches: Sequence[TokenBatch]) -> int:
    """Return the number of positions of ``batches`` padded to the longest response."""
    return sum(len(one.logp) for one in batches) * max(one.logp.shape[1] for one in batches)


class SealedStep(Protocol):
    """Measurements of one step that are being copied to the CPU: of the whole step, or of this rank's part."""

    @property
    def step(self) -> int:
        """Return the trainer's global step that was measured."""
        ...

    def ready(self) -> bool:
        """Return True if :meth:`deliver` would not wait for the device."""
        ...

    def deliver(self, run: Run, decode: Decode | None = None) -> dict[str, float]:
        """Record the step in ``run``, or send this rank's part to rank 0. Returns the metrics.

        For a part the metrics are filled in later, and only on rank 0. ``decode`` converts the ids of the extreme
        tokens to text, which is recorded with them.
        """
        ...


@dataclass(frozen=True, slots=True)
class WholeStep:
    """Measurements of a step that this rank measured completely, being copied to the CPU.

    ``order``: names of the metrics as they are recorded; ``names``: as their values arrive, one array for each tuple.
    ``quantities`` are the token quantities with recorded distributions, ``columns`` those of the table of extreme
    tokens.
    """

    step: int
    order: list[str]
    names: tuple[tuple[str, ...], ...]
    numbers: Mapping[str, float]
    columns: tuple[str, ...]
    quantities: tuple[str, ...]
    transfer: Transfer
    stages: Sequence[Span] = ()

    def ready(self) -> bool:
        """Return True if :meth:`deliver` would not wait for the device."""
        return self.transfer.ready()

    def deliver(self, run: Run, decode: Decode | None = None) -> dict[str, float]:
        """Record the step in ``run`` and return its metrics, without those that were never measured (with a count of
        0).

        ``decode`` converts the ids of the extreme tokens to text, which is recorded with them.
        """
        arrays = self.transfer.read()
        n = len(self.names)
        values, counts, rest = arrays[:n], arrays[n : 2 * n], arrays[2 * n :]
        table = rest.pop(0) if self.columns else None
        measured = _measured(self.order, self.names, values, counts)
        measured |= self.numbers
        run.log(measured, step=self.step)
        spikes = None if table is None else self._spikes(table, decode)
        distributions = batch_of(self.step, dict(zip(self.quantities, rest, strict=True)))
        for batch in (spikes, distributions, batch_of_spans(self.step, self.stages)):
            if batch is not None:
                run.log_spikes(batch)
        return measured

    def _spikes(self, table: np.ndarray, decode: Decode | None) -> SpikeBatch | None:
        return spike_batch(self.step, table, self.columns, texts_of(table, self.columns, decode))


def _measured(
    order: Iterable[str], names: Sequence[Sequence[str]], values: Sequence[np.ndarray], counts: Sequence[np.ndarray]
) -> dict[str, float]:
    """Return the metrics with a count above 0, in ``order``; ``values`` and ``counts`` hold one array for each of
    ``names``.
    """
    rows = (zip(*row, strict=True) for row in zip(names, map(_listed, values), map(_listed, counts), strict=True))
    found = {name: value for row in rows for name, value, count in row if count > 0}
    return {name: found[name] for name in order if name in found}


def _listed(array: np.ndarray) -> list[float]:
    numbers: list[float] = array.tolist()
    return numbers


def _averages(numbers: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: sum(values) / len(values) for name, values in numbers.items()}


# One step of several ranks: each measures its part of the batch (a share), and rank 0 merges the shares.

_HEAD = struct.Struct("!I")
_TYPES = {torch.float32: "f4", torch.float16: "f4", torch.bfloat16: "f4", torch.bool: "b1"}
MOST_SPIKES = 64
"""Largest number of extreme tokens recorded for a step, over all ranks."""


@dataclass(frozen=True, slots=True)
class RankPayload:
    """Measurements of one rank for one step, on the CPU.

    ``rows`` (K, 1 + C) has the score of each extreme token and its values in ``columns``, ``texts`` the tokens as text.
    """

    stats: Stats
    columns: tuple[str, ...] = ()
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    texts: tuple[str, ...] = ()
    stages: Sequence[Span] = ()


@dataclass(frozen=True, slots=True)
class SharedStep:
    """Measurements of one rank for one step, being copied to the CPU, to be sent to rank 0 and merged there.

    It is a :class:`~rlwatch.ports.PendingRecord` for :meth:`rlwatch.run.Run.send`. ``numbers`` are taken from rank 0,
    because a trainer computes its logged metrics over all ranks.
    """

    step: int
    layout: JSON
    types: tuple[str, ...]
    columns: tuple[str, ...]
    numbers: Mapping[str, float]
    transfer: Transfer
    texts: list[str] = field(default_factory=list)
    stages: Sequence[Span] = ()

    @classmethod
    def of(
        cls,
        step: int,
        stats: Stats,
        spikes: SpikeTable | None,
        numbers: Mapping[str, float],
        stages: Sequence[Span] = (),
    ) -> SharedStep:
        """Start copying all measurements of ``step`` on this rank to the CPU at once, and return them.

        ``stats``: statistics. ``spikes``: the most extreme tokens, or None. ``numbers``: metrics that are known
        already. ``stages``: times of the step's stages.
        """
        layout, tensors = pack(stats)
        if spikes is not None:
            tensors.append(spikes.rows)
        types = tuple(_TYPES.get(tensor.dtype, "f8") for tensor in tensors)
        columns = () if spikes is None else spikes.names
        return cls(step, layout, types, columns, numbers, Transfer(tensors), stages=stages)

    def ready(self) -> bool:
        """Return True if the measurements can be read without waiting for the device."""
        return self.transfer.ready()

    def deliver(self, run: Run, decode: Decode | None = None) -> dict[str, float]:
        """Send the measurements to rank 0.

        ``decode`` converts the ids of the extreme tokens to text, which is sent with them. Returns the metrics of the
        merged steps on rank 0, which are filled in later.
        """
        if decode is not None and self.columns:  # on this thread, because two threads must not share a tokenizer
            self.texts.extend(texts_of(self.transfer.read()[-1], self.columns, decode))
        run.send(self)
        return {} if run.ranks is None else run.ranks.latest

    def encode(self) -> bytes:
        """Return the measurements encoded as bytes for rank 0."""
        arrays = [a.astype(kind) for a, kind in zip(self.transfer.read(), self.types, strict=True)]
        shapes = [list(array.shape) for array in arrays]
        head = {"layout": self.layout, "types": self.types, "shapes": shapes, "columns": self.columns}
        text = json.dumps({**head, "texts": self.texts, "stages": self.stages}).encode()
        return b"".join([_HEAD.pack(len(text)), text, *map(_bytes_of, arrays)])

    def merged(self, others: Mapping[int, bytes]) -> tuple[Mapping[str, float], Sequence[SpikeBatch]]:
        """Merge the measurements of this rank, rank 0, with the encoded ones of the ``others`` (rank -> bytes).

        Returns the metrics, and records of the extreme tokens of each rank, the distributions of token quantities and
        the times of stages.
        """
        shares = {0: self._own(), **{rank: decoded_share(others[rank]) for rank in sorted(others)}}
        stats: Stats = {}
        for share in shares.values():
            stats = merge_ranks(stats, share.stats)
        spikes = _spikes_of_ranks(self.step, shares) + _distributions(self.step, stats)
        timed = [batch_of_spans(self.step, share.stages, rank) for rank, share in shares.items()]
        spikes += [batch for batch in timed if batch is not None]
        return {**read_stats(stats), **self.numbers}, spikes

    def _own(self) -> RankPayload:
        own = _share(self.layout, self.transfer.read(), self.columns, tuple(self.texts))
        return replace(own, stages=self.stages)


def decoded_share(data: bytes) -> RankPayload:
    """Return the measurements of one rank that :meth:`SharedStep.encode` encoded as ``data``."""
    (length,) = _HEAD.unpack_from(data)
    at = _HEAD.size + length
    head: dict[str, Any] = json.loads(data[_HEAD.size : at])
    arrays = list(_arrays(data, at, zip(head["types"], head["shapes"], strict=True)))
    share = _share(head["layout"], arrays, tuple(head["columns"]), tuple(head["texts"]))
    return replace(share, stages=[Span(*span) for span in head.get("stages", ())])


def read_stats(stats: Stats) -> dict[str, float]:
    """Return the metrics of all statistics in ``stats`` that were measured (with a count above 0)."""
    numbers = taken_apart(stats)[0]
    readings = read(numbers)
    arrays = Transfer([x for one in readings for x in (one.values, one.counts)]).read()
    return _measured(numbers, [one.names for one in readings], arrays[::2], arrays[1::2])


def _distributions(step: int, stats: Stats) -> list[SpikeBatch]:
    """Return the histograms in ``stats`` as a record; empty if there are none."""
    batch = batch_of(step, {name: one.bins.numpy() for name, one in taken_apart(stats)[1].items()})
    return [] if batch is None else [batch]


def _share(layout: JSON, arrays: Sequence[np.ndarray], columns: tuple[str, ...], texts: tuple[str, ...]) -> RankPayload:
    if not columns:
        return RankPayload(unpack(layout, arrays))
    return RankPayload(unpack(layout, arrays[:-1]), columns, arrays[-1], texts)


def _spikes_of_ranks(step: int, shares: Mapping[int, RankPayload]) -> list[SpikeBatch]:
    """Return the most extreme tokens of all ranks, in one batch for each rank."""
    having = {rank: share for rank, share in shares.items() if share.columns}
    if not having:
        return []
    tables = most_extreme([share.rows for share in having.values()], MOST_SPIKES)
    batches = [
        spike_batch(step, rows, share.columns, share.texts, rank=rank)
        for (rank, share), rows in zip(having.items(), tables, strict=True)
    ]
    return [batch for batch in batches if batch is not None]


def _bytes_of(array: np.ndarray) -> bytes:
    return np.packbits(array).tobytes() if array.dtype == bool else array.tobytes()


def _arrays(data: bytes, at: int, described: Iterable[tuple[str, Sequence[int]]]) -> Iterator[np.ndarray]:
    """Yield the arrays from offset ``at``, each with a dtype and shape, as float64; each dtype is read at once."""
    for kind, of_one_type in groupby(described, key=itemgetter(0)):
        shapes = [shape for _, shape in of_one_type]
        if kind == "b1":
            for shape in shapes:
                count = prod(shape)
                packed = np.frombuffer(data, np.uint8, -(-count // 8), at)
                yield np.unpackbits(packed, count=count).astype(np.float64).reshape(shape)
                at += len(packed)
            continue
        ends = [0, *accumulate(map(prod, shapes))]
        array = np.frombuffer(data, np.dtype(kind), ends[-1], at)
        at, whole = at + array.nbytes, array.astype(np.float64)
        for (first, last), shape in zip(pairwise(ends), shapes, strict=True):
            yield whole[first:last].reshape(shape)


# One global step, merged from what the driver measured of the batch and the workers of the update.


WAITING = 2
"""Largest number of steps whose statistics are still being computed. Further steps get no statistics, and are
counted.
"""
SLOW = "statistics take longer than training steps; a step goes without them"


class StepThread:
    """Background thread that computes and records steps in order, and counts the steps that it drops.

    ``error_boundary`` is the error boundary that leads to the run, ``name`` the prefix of the thread's name.
    """

    def __init__(self, error_boundary: ErrorBoundary, name: str) -> None:
        self.pending: list[Future[object]] = []
        self._error_boundary = error_boundary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._errors: dict[str, int] = {}

    def room(self) -> bool:
        """Return True if one more step may be submitted. If too many wait, count a dropped step and return False."""
        self.pending = [future for future in self.pending if not future.done()]
        run = self._error_boundary.run
        if run is None or not run.active:
            return False
        if len(self.pending) < WAITING:
            return True
        run.counters.warn("dropped", SLOW)
        return False

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Queue ``work(*args)``, which belongs to a step. It must not raise: see ``ErrorBoundary.guard_background``."""
        self.pending.append(self._thread.submit(work, *args))

    def run(self, work: Callable[..., object], *args: Any) -> None:
        """Queue ``work(*args)``, which belongs to no step and does not count towards the limit of waiting steps."""
        self._thread.submit(work, *args)

    def close(self, deadline_s: float) -> None:
        """Wait for the queued steps, at most ``deadline_s`` seconds.

        Steps that take longer are lost, and counted as dropped.
        """
        self._thread.shutdown(wait=False)
        late = wait(self.pending, deadline_s).not_done
        if late and self._error_boundary.run is not None:
            self._error_boundary.run.counters.warn(
                "dropped", "the statistics of the last steps took too long", len(late)
            )

    def count_errors(self, process: str, total: int) -> None:
        """Add the contained errors of another ``process``, which has no run, to the run's count.

        ``total`` is the number of all errors of that process so far.
        """
        new = total - self._errors.get(process, 0)
        self._errors[process] = total
        if new > 0 and self._error_boundary.run is not None:
            self._error_boundary.run.counters.warn("errors", f"the taps of {process} failed; see its log", new)


@dataclass(frozen=True, slots=True)
class MergedStep:
    """Metrics and records of extreme tokens of one step, merged over driver and workers and ready to record."""

    metrics: Mapping[str, float]
    spikes: Sequence[SpikeBatch]


BEFORE = "before the update: "
"""Prefix of the statistics that a worker measures of the policy before the update."""

BEFORE_THE_UPDATE = {"nonfinite/logp": "nonfinite/old_logp"}
"""Name of a statistic of the policy's log-probs -> its name if it was measured before the update, on the old
log-probs.
"""


def encoded_tally(tally: StepTally, step: int) -> bytes:
    """Encode ``tally``, a worker's measurements of ``step``, as bytes for :func:`merge_workers`. Waits for the
    device.
    """
    return SharedStep.of(step, tally.stats, tally.spikes, {}).encode()


def merge_workers(
    step: int, batch: StepTally, workers: Mapping[int, bytes], decode: Decode | None = None, *, sampled: bool = False
) -> MergedStep:
    """Merge the driver's measurements ``batch`` of ``step`` with the encoded tallies of ``workers`` (rank -> bytes).

    ``decode`` converts token ids to text; None: no text is kept. Ranks merge exactly. For statistics that both driver
    and workers measure, the driver's are used: it sees every response once, and workers see it once per update. The
    driver's extreme tokens come first, as those of rank 0. If the driver measured only a sample of the batch
    (``sampled``), the workers' statistics from before the update are used, because they cover every token.
    """
    shares = {rank: decoded_share(workers[rank]) for rank in sorted(workers)}
    update: Stats = {}
    for share in shares.values():
        during = {name: stat for name, stat in share.stats.items() if not name.startswith(BEFORE)}
        update = merge_ranks(update, during)
    tables = [] if batch.spikes is None else [(0, batch.spikes.names, batch.spikes.rows.double().numpy())]
    tables += [(rank, share.columns, share.rows) for rank, share in shares.items() if share.columns]
    before = _before_update(shares.values()) if sampled else {}
    both = {**update, **batch.stats, **before}
    spikes = _spikes_of_workers(step, tables, decode) + _distributions(step, both)
    return MergedStep({**read_stats(both), **_averages(batch.numbers)}, spikes)


def _before_update(shares: Iterable[RankPayload]) -> Stats:
    """Merge the workers' statistics from before the update; empty if a worker that reports tokens has none."""
    reporting = [share.stats for share in shares if any(name.startswith("policy/") for name in share.stats)]
    stats: Stats = {}
    for one in reporting:
        mine = {name.removeprefix(BEFORE): stat for name, stat in one.items() if name.startswith(BEFORE)}
        if not mine:
            return {}
        stats = merge_ranks(stats, mine)
    return {BEFORE_THE_UPDATE.get(name, name): stat for name, stat in stats.items()}


def _spikes_of_workers(
    step: int, tables: Sequence[tuple[int, tuple[str, ...], np.ndarray]], decode: Decode | None
) -> list[SpikeBatch]:
    if not tables:
        return []
    kept = most_extreme([rows for _, _, rows in tables], MOST_SPIKES)
    batches = [
        spike_batch(step, rows, names, texts_of(rows, names, decode), rank=rank)
        for (rank, names, _), rows in zip(tables, kept, strict=True)
    ]
    return [batch for batch in batches if batch is not None]


# Conversion of rows of extreme tokens from a device to a record.

Decode = Callable[[Sequence[int]], str]
"""Function that converts token ids to their text."""

_WHOLE = ("sequence", "position", "token_id")


def spike_batch(
    step: int, rows: np.ndarray, names: Sequence[str], texts: Sequence[str] = (), *, rank: int = 0
) -> SpikeBatch | None:
    """Return a record of the tokens at or beyond a limit (score >= 1), worst first; None if there are none.

    ``rows`` (K, 1 + C) hold the score and the columns ``names``, as in :class:`rlwatch.tensors.tokens.SpikeTable`.
    ``texts`` are the texts of the rows, if they are kept.
    """
    far = np.flatnonzero(rows[:, 0] >= 1)
    if not len(far):
        return None
    worst = far[np.argsort(-rows[far, 0], kind="stable")]
    chosen = rows[worst]
    columns: dict[str, np.ndarray | list[str]] = {
        name: chosen[:, i].astype(np.int64) if name in _WHOLE else chosen[:, i] for i, name in enumerate(names, 1)
    }
    if texts:
        columns["text"] = [texts[row] for row in worst]
    reason = NON_FINITE if np.isinf(chosen[0, 0]) else FAR_OUT
    return SpikeBatch(step, columns, reason=reason, rank=rank)


def texts_of(rows: np.ndarray, names: Sequence[str], decode: Decode | None) -> list[str]:
    """Return the text of the token of each row with a score >= 1, ``""`` for other rows; empty if ``decode`` is None.

    ``rows`` (K, 1 + C) hold the score and the columns ``names``. The result is also empty if there is no column
    ``token_id``.
    """
    if decode is None or "token_id" not in names:
        return []
    ids = rows[:, 1 + list(names).index("token_id")]
    return [decode([int(token)]) if score >= 1 else "" for score, token in zip(rows[:, 0], ids, strict=True)]


def most_extreme(tables: Sequence[np.ndarray], most: int) -> list[np.ndarray]:
    """Return copies of ``tables``, each (K, 1 + C) with scores first, in which only the ``most`` highest scores remain.

    The other rows get the score -inf, so that every row keeps its index.
    """
    scores = np.concatenate([table[:, 0] for table in tables])
    beyond = np.argsort(-scores, kind="stable")[most:]
    scores[beyond] = -np.inf
    ends = np.cumsum([len(table) for table in tables])[:-1]
    pieces = np.split(scores, ends)
    return [np.column_stack([score, table[:, 1:]]) for score, table in zip(pieces, tables, strict=True)]
