"""Read what a run holds: rows over an open connection to ``run.db``, and the reading part of a store."""

from __future__ import annotations

import heapq
import math
import sqlite3
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from operator import attrgetter
from typing import TypeVar

from rlwatch import codec
from rlwatch.errors import StoreError
from rlwatch.ports import Checkpoint, Series
from rlwatch.records import (
    APART,
    FAR_OUT,
    JSON,
    NON_FINITE,
    CompletionBatch,
    Event,
    Finding,
    ForecastRecord,
    RunEdit,
    RunInfo,
    SpikeBatch,
    StepRecord,
)
from rlwatch.store.fields import EVENT, FINDING, FORECAST, RECORD, loads
from rlwatch.store.sqlite import runrow
from rlwatch.store.sqlite.blocks import Block, blocked_sets, blocks_of
from rlwatch.store.sqlite.curating import curated
from rlwatch.store.sqlite.rows import packing, unpack_batch
from rlwatch.store.sqlite.schema import Extra, extra_of
from rlwatch.store.sqlite.series import (
    SeriesQuery,
    metric_sets,
    metric_tables,
    read_moments,
    read_series,
    read_spans,
    read_steps,
    record_blocks,
)

_V = TypeVar("_V")
_Row = tuple[int, int, int, int, float | None, int, bytes]
_AT_ONCE = 256  # rows of a block that are made into records together
_RECORDS = "SELECT seq, attempt, rank, step, ts, mset, v FROM record "


def read_records(db: sqlite3.Connection, after_seq: int, limit: int | None) -> list[StepRecord]:
    """Return up to ``limit`` records (None: all) with sequence numbers above ``after_seq``, in order of ``seq``."""
    return list(islice(_records(db, after_seq, None, -1 if limit is None else limit), limit))


def newest_records(db: sqlite3.Connection, after_seq: int, last: int) -> list[StepRecord]:
    """Return the ``last`` newest records with sequence numbers above ``after_seq``, in order of ``seq``."""
    rows = db.execute(_RECORDS + "WHERE seq > ? ORDER BY seq DESC LIMIT ?", (after_seq, last)).fetchall()
    floor = rows[-1][0] if 0 < last == len(rows) else after_seq  # what is in blocks may be newer than a late set's row
    older = [block for block in record_blocks(db) if block.last_seq > floor]
    if not older or not last:
        return _decode(db, rows[::-1])
    above = [seq for block in older for seq in block.seqs.tolist() if seq > floor]
    below = sorted((*above, *(row[0] for row in rows)), reverse=True)[:last][-1] - 1
    return list(_records(db, below, None))


def read_events(db: sqlite3.Connection, after_seq: int, limit: int = -1) -> list[Event]:
    """Return up to ``limit`` events (-1: all) with sequence numbers above ``after_seq``, in order of ``seq``."""
    rows = db.execute(EVENT.select("WHERE seq > ? ORDER BY seq LIMIT ?"), (after_seq, limit))
    extra = extra_of(db, EVENT, after_seq)
    return [EVENT.record(row, extra.get(row[0])) if extra else EVENT.record(row) for row in rows]


def read_branch(
    db: sqlite3.Connection, attempt: int, before_step: int, after_seq: int = 0
) -> Iterator[StepRecord | Event]:
    """Iterate over the earlier records and events that ``attempt``, which begins at ``before_step``, continues.

    In order of ``seq``, only those above ``after_seq``; rows that a later attempt replaced are left out.
    """
    below = branch_bounds(db, attempt, before_step)
    cut: set[int] = set()  # attempts that have left the branch: their later events do not belong to it
    for item in _merged(_records(db, after_seq, attempt), iter(read_events(db, after_seq))):
        bound = below.get(item.attempt)
        if bound is None or (isinstance(item, Event) and item.attempt in cut):
            continue
        if item.step is None or item.step < bound:
            yield item
        elif isinstance(item, StepRecord):
            cut.add(item.attempt)


def read_stream(db: sqlite3.Connection, after_seq: int, limit: int) -> list[StepRecord | Event]:
    """Return the next ``limit`` records and events with sequence numbers above ``after_seq``, in order of ``seq``."""
    return list(islice(_merged(_records(db, after_seq, None, limit), iter(read_events(db, after_seq, limit))), limit))


def _records(
    db: sqlite3.Connection, after_seq: int, before_attempt: int | None, limit: int = -1
) -> Iterator[StepRecord]:
    """Iterate over the records, so that not all are in memory at once."""
    names = metric_sets(db)
    sources = [_of_rows(db, names, after_seq, before_attempt, limit)]
    for mset in blocked_sets(db, "record"):
        blocks = blocks_of(db, "record", mset, after_seq)
        if blocks:
            sources.append(_of_blocks(db, blocks, names[mset], after_seq, before_attempt, limit))
    found = heapq.merge(*sources, key=attrgetter("seq")) if len(sources) > 1 else sources[0]
    extra = extra_of(db, RECORD, after_seq)
    yield from _with_extra(found, extra) if extra else found


def _with_extra(records: Iterable[StepRecord], extra: Extra) -> Iterator[StepRecord]:
    return (codec.enriched(record, loads(extra[record.seq])) if record.seq in extra else record for record in records)


def _of_rows(
    db: sqlite3.Connection,
    names: Mapping[int, tuple[str, ...]],
    after_seq: int,
    before_attempt: int | None,
    limit: int,
) -> Iterator[StepRecord]:
    sets = {number: (of_set, packing(of_set)) for number, of_set in names.items()}
    rows = db.execute(
        _RECORDS + "WHERE seq > ?1 AND (?2 IS NULL OR attempt < ?2) ORDER BY seq LIMIT ?3",
        (after_seq, before_attempt, limit),
    )
    for seq, attempt, rank, step, ts, mset, blob in rows:
        yield StepRecord(step, _values(*sets[mset], blob), _moment(ts), attempt, rank, seq)


def _of_blocks(  # noqa: PLR0917  (as it is asked for)
    db: sqlite3.Connection,
    blocks: Sequence[Block],
    names: Sequence[str],
    after_seq: int,
    before_attempt: int | None,
    limit: int,
) -> Iterator[StepRecord]:
    for block in blocks:
        axes = [block.steps, block.attempts, block.ranks(db), block.seqs]
        wanted = axes[3] > after_seq
        if before_attempt is not None:
            wanted &= axes[1] < before_attempt
        places = wanted.nonzero()[0][: limit if limit >= 0 else None]  # not thousands where some are asked for
        values, moments = block.values(db, range(len(names)), places), block.moments(db)
        for begin in range(0, len(places), _AT_ONCE):
            some = places[begin : begin + _AT_ONCE]
            numbers = (axis[some].tolist() for axis in axes)
            columns = (values[:, begin : begin + _AT_ONCE].T.tolist(), moments[some].tolist())
            for row, ts, step, attempt, rank, seq in zip(*columns, *numbers, strict=True):
                yield StepRecord(step, dict(zip(names, row, strict=True)), ts, attempt, rank, seq)


def _merged(records: Iterator[StepRecord], events: Iterator[Event]) -> Iterator[StepRecord | Event]:
    parts: tuple[Iterator[StepRecord | Event], ...] = (records, events)
    return heapq.merge(*parts, key=attrgetter("seq"))


def read_last_values(db: sqlite3.Connection) -> dict[str, tuple[int, float]]:
    """Return metric name -> (step, value) of the record with the highest ``seq`` that has the metric."""
    newest, held = [], metric_tables(db)
    for number, names in metric_sets(db).items():
        for table in held:
            row = db.execute(
                f"SELECT seq, step, v FROM {table} WHERE mset = ? ORDER BY seq DESC LIMIT 1",  # noqa: S608  (our tables)
                (number,),
            ).fetchone()
            if row is not None:
                newest.append((*row, names))
    last: dict[str, tuple[int, float]] = {}
    for _, step, blob, names in sorted(newest, key=lambda entry: entry[0]):
        last.update({name: (step, value) for name, value in _values(names, packing(names), blob).items()})
    return last


def read_findings(db: sqlite3.Connection) -> list[Finding]:
    """Return the findings of every stage, also those that eased or ended, in order of ``seq``, then of writing."""
    rows = db.execute(FINDING.select("ORDER BY seq, id", "body"))
    return [FINDING.record(row, body) for body, *row in rows]


def read_forecasts(db: sqlite3.Connection, last: int | None) -> list[ForecastRecord]:
    """Return the ``last`` newest forecasts (None: all), in order of ``seq``."""
    if "forecast" not in metric_tables(db):
        return []
    sets = {number: (names, packing(names)) for number, names in metric_sets(db).items()}
    rows = db.execute(
        FORECAST.select("ORDER BY seq DESC LIMIT ?", "mset", "v"),
        (-1 if last is None else last,),
    ).fetchall()
    extra = extra_of(db, FORECAST)
    return [
        FORECAST.record(row, extra.get(row[0]), metrics=_values(*sets[mset], blob)) for mset, blob, *row in rows[::-1]
    ]


def read_spikes(
    db: sqlite3.Connection, last: int | None, reason: str | None = None, step: int | None = None
) -> list[SpikeBatch]:
    """Return the ``last`` token batches that were written (None: all), by step; if given, of one ``reason`` or
    ``step``.

    Batches without tokens, such as distributions, are returned only if their reason is given.
    """
    most = -1 if last is None else last
    rows = db.execute(
        "SELECT step, v, reason, ts, attempt, rank FROM (SELECT * FROM spike_batch "
        "WHERE (reason = ?2 OR (?2 IS NULL AND reason NOT IN (?4, ?5))) AND (?3 IS NULL OR step = ?3) "
        "ORDER BY id DESC LIMIT ?1) ORDER BY step, id",
        (most, reason, step, *APART),
    )
    return [spikes_of(at, blob, why, _moment(ts), attempt, rank) for at, blob, why, ts, attempt, rank in rows]


def spikes_of(  # noqa: PLR0917  (a row, as it is selected)
    step: int, blob: bytes, reason: str, ts: float, attempt: int, rank: int
) -> SpikeBatch:
    """Return the token batch of one row of the table ``spike_batch``, whatever engine holds it.

    ``blob``: the packed columns. ``ts``: Unix seconds. Raises ``ValueError`` if the blob is damaged.
    """
    columns, rest = unpack_batch(blob)
    named = as_named_now(reason, columns)
    found = SpikeBatch(step=step, columns=named, reason=reason, ts=ts, attempt=attempt, rank=rank)
    return codec.enriched(found, rest)


def completions_of(step: int, blob: bytes, ts: float, attempt: int, rank: int) -> CompletionBatch:
    """Return the batch of completions of one row of the table ``completion_batch``.

    ``blob``: the packed columns. ``ts``: Unix seconds. Raises ``ValueError`` if the blob is damaged.
    """
    columns, rest = unpack_batch(blob)
    return codec.enriched(CompletionBatch(step=step, columns=columns, ts=ts, attempt=attempt, rank=rank), rest)


def read_completions(db: sqlite3.Connection, last: int | None) -> list[CompletionBatch]:
    """Return the ``last`` batches of completions that were written (None: all), by step; none in an old file without
    them.
    """
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'completion_batch'").fetchone():
        return []
    rows = db.execute(
        "SELECT step, v, ts, attempt, rank FROM "
        "(SELECT * FROM completion_batch ORDER BY id DESC LIMIT ?) ORDER BY step, id",
        (-1 if last is None else last,),
    )
    return [completions_of(step, blob, _moment(ts), attempt, rank) for step, blob, ts, attempt, rank in rows]


def read_top_spikes(db: sqlite3.Connection, limit: int) -> list[Mapping[str, JSON]]:
    """Return the ``limit`` worst tokens over all batches, worst first, each with its columns, step, attempt and
    rank.
    """
    rows = db.execute(
        "SELECT top.step, top.attempt, top.rank, body, reason FROM spike_top AS top "
        "JOIN spike_batch AS whole ON whole.id = top.batch ORDER BY score DESC, top.id LIMIT ?",
        (limit,),
    )
    return [
        {"step": step, "attempt": attempt, "rank": rank, **as_named_now(reason, loads(body))}
        for step, attempt, rank, body, reason in rows
    ]


def as_named_now(reason: str, columns: dict[str, _V]) -> dict[str, _V]:
    """Return the columns of a token batch under their present names.

    In old files the screening value of far-out tokens is stored as ``contribution``, which is now another quantity.
    """
    if reason not in {FAR_OUT, NON_FINITE} or "contribution" not in columns:
        return columns
    return {"screen" if name == "contribution" else name: column for name, column in columns.items()}


def branch_bounds(db: sqlite3.Connection, attempt: int, before_step: int) -> dict[int, int]:
    """Return earlier attempt -> the step below which its records belong to the history that ``attempt`` continues.

    ``before_step``: first step of ``attempt``.
    """
    firsts = {earlier: low for earlier, (low, _) in read_spans(db).items()}
    with_events = {earlier for (earlier,) in db.execute("SELECT DISTINCT attempt FROM event")}
    below: dict[int, int] = {}
    for earlier in sorted(firsts.keys() | with_events, reverse=True):
        if earlier < attempt:
            below[earlier] = before_step
            before_step = min(before_step, firsts.get(earlier, before_step))
    return below


def _decode(db: sqlite3.Connection, rows: Sequence[_Row]) -> list[StepRecord]:
    sets = {number: (names, packing(names)) for number, names in metric_sets(db).items()}
    found = (
        StepRecord(step, _values(*sets[mset], blob), _moment(ts), attempt, rank, seq)
        for seq, attempt, rank, step, ts, mset, blob in rows
    )
    extra = extra_of(db, RECORD, rows[0][0] - 1) if rows else {}
    return list(_with_extra(found, extra) if extra else found)


def _values(names: tuple[str, ...], packed: struct.Struct, blob: bytes) -> dict[str, float]:
    try:
        return dict(zip(names, packed.unpack(blob), strict=True))
    except struct.error as error:
        raise ValueError(f"packed values: {error}") from error


def _moment(ts: float | None) -> float:
    return math.nan if ts is None else ts  # SQLite keeps a NaN as NULL


# Queries about runs, over two hooks: which runs there are, and where a run's tables are.


class RunTables(ABC):
    """Part of a store that reads runs from tables; implements ``RunReader``. Each call is answered from one snapshot.

    Subclasses provide the list of runs and access to their tables.
    """

    url: str

    @abstractmethod
    def _run_ids(self) -> list[str]:
        """Return the names of all directories or rows that may be runs, readable or not."""

    @abstractmethod
    def snapshot(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        """Give a connection to the run's tables as they are now.

        Raises ``RunNotFoundError``, or another ``StoreError`` if they cannot be read.
        """

    def at_once(self, run_id: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Do nothing: here every answer is a snapshot of its own."""
        return nullcontext()

    def runs(self, *, deleted: bool = False) -> list[RunInfo]:
        """Return all readable runs, newest first; with ``deleted`` only those that people deleted, else only the
        others.
        """
        found = [run for run in self._listed()[0] if run.curation.deleted is deleted]
        return sorted(found, key=lambda run: (run.created_at, run.run_id), reverse=True)

    def unreadable(self) -> Mapping[str, str]:
        """Return name of each run that cannot be read -> reason."""
        return self._listed()[1]

    def run(self, run_id: str) -> RunInfo:
        """Return one run, with people's edits of its name and tags applied. Raises ``RunNotFoundError``."""
        with self.snapshot(run_id) as db:
            run = runrow.load(db, run_id)
        return curated(run, self._edits(run_id))

    def _edits(self, run_id: str) -> Sequence[RunEdit]:  # noqa: ARG002
        """Return edits of the run, oldest first; none if the store keeps none, or they cannot be read now."""
        return ()

    def configs(self, run_id: str) -> dict[int, Mapping[str, JSON]]:
        """Return attempt -> the configuration that the attempt's process passed to rlwatch, ``{}`` if it passed
        none.
        """
        with self.snapshot(run_id) as db:
            return runrow.configs(db)

    def records(
        self, run_id: str, *, after_seq: int = 0, limit: int | None = None, last: int | None = None
    ) -> list[StepRecord]:
        """Return records with ``seq > after_seq`` in order of ``seq``: the first ``limit``, or the ``last`` newest, if
        given.
        """
        with self.snapshot(run_id) as db:
            return read_records(db, after_seq, limit) if last is None else newest_records(db, after_seq, last)

    def branch(
        self, run_id: str, attempt: int, before_step: int, *, after_seq: int = 0
    ) -> Iterator[StepRecord | Event]:
        """Iterate over the earlier records and events that ``attempt``, which begins at ``before_step``, continues.

        In order of ``seq``, only those above ``after_seq``. Raises ``RunNotFoundError`` at once.
        """
        self.branch_bounds(run_id, attempt, before_step)  # an unknown run is an error now, not at the first item
        return self._branch(run_id, attempt, before_step, after_seq)

    def _branch(self, run_id: str, attempt: int, before_step: int, after_seq: int) -> Iterator[StepRecord | Event]:
        with self.snapshot(run_id) as db:
            yield from read_branch(db, attempt, before_step, after_seq)

    def branch_bounds(self, run_id: str, attempt: int, before_step: int) -> Mapping[int, int]:
        """Return earlier attempt -> the step below which :meth:`branch` has its records."""
        with self.snapshot(run_id) as db:
            return branch_bounds(db, attempt, before_step)

    def stream(self, run_id: str, *, after_seq: int, limit: int) -> list[StepRecord | Event]:
        """Return the next ``limit`` records and events with sequence numbers above ``after_seq``, in order of
        ``seq``.
        """
        with self.snapshot(run_id) as db:
            return read_stream(db, after_seq, limit)

    def judged(self, run_id: str) -> tuple[int, int]:
        """Return the ``seq`` up to which findings, forecasts and alerts are written, and the run's last ``seq``."""
        with self.snapshot(run_id) as db:
            return runrow.judged_seq(db), runrow.last_seq(db)

    def first_seq(self, run_id: str, attempt: int) -> int:
        """Return the lowest sequence number that the attempt may have given to a record or an event."""
        with self.snapshot(run_id) as db:
            return runrow.first_seq(db, attempt)

    def checkpoint(
        self, run_id: str, made_by: str, fits: Callable[[int, int, int], bool] = lambda *_: True
    ) -> Checkpoint | None:
        """Return the newest checkpoint of the analysis that the program ``made_by`` wrote and for which ``fits`` is
        true.

        ``fits(seq, attempt, step)``. None if there is no such checkpoint.
        """
        with self.snapshot(run_id) as db:
            return runrow.newest_checkpoint(db, made_by, fits)

    def steps(self, run_id: str) -> dict[int, list[int]]:
        """Return attempt -> the steps that it has records of, ascending."""
        with self.snapshot(run_id) as db:
            return read_steps(db)

    def metric_names(self, run_id: str) -> list[str]:
        """Return the name of every metric ever recorded for the run, sorted."""
        with self.snapshot(run_id) as db:
            return sorted(set().union(*metric_sets(db).values()))

    def spans(self, run_id: str) -> dict[int, tuple[int, int]]:
        """Return attempt -> its lowest and its highest step; attempts without records are left out."""
        with self.snapshot(run_id) as db:
            return read_spans(db)

    def series(
        self,
        run_id: str,
        names: Sequence[str],
        *,
        after_seq: int = 0,
        steps: tuple[int, int] | None = None,
        points: int | None = None,
    ) -> dict[str, Series]:
        """Return metric name -> series of its values over all attempts; an unknown name has an empty one.

        ``after_seq``: only rows with higher numbers. ``steps``: only rows between these two steps, both included.
        ``points``: thinned for a chart of this width.
        """
        with self.snapshot(run_id) as db:
            return read_series(db, names, SeriesQuery(after_seq, steps, points))

    def moments(self, run_id: str) -> Series:
        """Return the Unix seconds of every record as a series in order of ``seq``; NaN where a record has none."""
        with self.snapshot(run_id) as db:
            return read_moments(db)

    def last_values(self, run_id: str) -> dict[str, tuple[int, float]]:
        """Return metric name -> (step, value) as last recorded."""
        with self.snapshot(run_id) as db:
            return read_last_values(db)

    def spikes(
        self, run_id: str, *, last: int | None = None, reason: str | None = None, step: int | None = None
    ) -> list[SpikeBatch]:
        """Return the run's token batches by step, or the ``last`` newest; if given, of one ``reason`` or one ``step``
        only.
        """
        with self.snapshot(run_id) as db:
            return read_spikes(db, last, reason, step)

    def top_spikes(self, run_id: str, *, limit: int = 50) -> list[Mapping[str, JSON]]:
        """Return the ``limit`` worst tokens of all batches, worst first, each with its columns, step, attempt and
        rank.
        """
        with self.snapshot(run_id) as db:
            return read_top_spikes(db, limit)

    def completions(self, run_id: str, *, last: int | None = None) -> list[CompletionBatch]:
        """Return the recorded batches of completions by step, or only the ``last`` newest."""
        with self.snapshot(run_id) as db:
            return read_completions(db, last)

    def findings(self, run_id: str) -> list[Finding]:
        """Return the findings that began or became worse, in order of ``seq``."""
        with self.snapshot(run_id) as db:
            return [finding for finding in read_findings(db) if not finding.stage.better]

    def recoveries(self, run_id: str) -> list[Finding]:
        """Return the findings that eased or ended, in order of ``seq``."""
        with self.snapshot(run_id) as db:
            return [finding for finding in read_findings(db) if finding.stage.better]

    def forecasts(self, run_id: str, *, last: int | None = None) -> list[ForecastRecord]:
        """Return the forecasts in order of ``seq``, or only the ``last`` newest."""
        with self.snapshot(run_id) as db:
            return read_forecasts(db, last)

    def events(self, run_id: str, *, after_seq: int = 0) -> list[Event]:
        """Return the events with sequence numbers above ``after_seq``, in order of ``seq``."""
        with self.snapshot(run_id) as db:
            return read_events(db, after_seq)

    def _listed(self) -> tuple[list[RunInfo], dict[str, str]]:
        runs: list[RunInfo] = []
        unreadable: dict[str, str] = {}
        for run_id in self._run_ids():
            try:
                runs.append(self.run(run_id))
            except StoreError as error:
                unreadable[run_id] = str(error)
        return runs, unreadable
