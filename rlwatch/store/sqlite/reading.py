"""Read what a run holds: rows over an open connection to ``run.db``, and the half of a store that answers with them."""

from __future__ import annotations

import heapq
import math
import sqlite3
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from rlwatch.errors import StoreError
from rlwatch.ports import Checkpoint, Series
from rlwatch.records import (
    FAR_OUT,
    JSON,
    NON_FINITE,
    CompletionBatch,
    Event,
    Finding,
    ForecastRecord,
    RunEdit,
    RunInfo,
    Severity,
    SpikeBatch,
    Stage,
    StepRecord,
)
from rlwatch.store.sqlite import runrow
from rlwatch.store.sqlite.curating import curated
from rlwatch.store.sqlite.rows import FINDING_BODY, loads, packing, unpack_columns

if TYPE_CHECKING:
    import numpy as np


_V = TypeVar("_V")
_Row = tuple[int, int, int, int, float | None, int, bytes]
_RECORDS = "SELECT seq, attempt, rank, step, ts, mset, v FROM record "


def metric_sets(db: sqlite3.Connection) -> dict[int, tuple[str, ...]]:
    """Metric set id -> its names, in the order of the packed values."""
    return {number: tuple(loads(names)) for number, names in db.execute("SELECT id, names FROM metric_set")}


def read_records(db: sqlite3.Connection, after_seq: int, limit: int | None) -> list[StepRecord]:
    """Records with a higher seq, in order of seq."""
    most = -1 if limit is None else limit
    return _decode(db, db.execute(_RECORDS + "WHERE seq > ? ORDER BY seq LIMIT ?", (after_seq, most)))


def newest_records(db: sqlite3.Connection, after_seq: int, last: int) -> list[StepRecord]:
    """The ``last`` records with a higher seq, in order of seq."""
    rows = db.execute(_RECORDS + "WHERE seq > ? ORDER BY seq DESC LIMIT ?", (after_seq, last)).fetchall()
    return _decode(db, rows[::-1])


def read_events(db: sqlite3.Connection, after_seq: int, limit: int = -1) -> list[Event]:
    """Events with a higher seq, in order of seq."""
    rows = db.execute(
        "SELECT seq, attempt, step, ts, kind, body FROM event WHERE seq > ? ORDER BY seq LIMIT ?", (after_seq, limit)
    )
    return [Event(kind, step, loads(body), _moment(ts), attempt, seq) for seq, attempt, step, ts, kind, body in rows]


def read_branch(
    db: sqlite3.Connection, attempt: int, before_step: int, after_seq: int = 0
) -> Iterator[StepRecord | Event]:
    """The history ``attempt`` continues from ``before_step`` on, above ``after_seq``, in order of seq."""
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
    """The next records and events, in order of seq."""
    return list(islice(_merged(_records(db, after_seq, None, limit), iter(read_events(db, after_seq, limit))), limit))


def _records(
    db: sqlite3.Connection, after_seq: int, before_attempt: int | None, limit: int = -1
) -> Iterator[StepRecord]:
    """One after the other, so that not all are held at once."""
    sets = {number: (names, packing(names)) for number, names in metric_sets(db).items()}
    rows = db.execute(
        _RECORDS + "WHERE seq > ?1 AND (?2 IS NULL OR attempt < ?2) ORDER BY seq LIMIT ?3",
        (after_seq, before_attempt, limit),
    )
    for seq, attempt, rank, step, ts, mset, blob in rows:
        yield StepRecord(step, _values(*sets[mset], blob), _moment(ts), attempt, rank, seq)


def _merged(records: Iterator[StepRecord], events: Iterator[Event]) -> Iterator[StepRecord | Event]:
    parts: tuple[Iterator[StepRecord | Event], ...] = (records, events)
    return heapq.merge(*parts, key=attrgetter("seq"))


def read_last_values(db: sqlite3.Connection) -> dict[str, tuple[int, float]]:
    """Metric name -> (step, value) of the record with the highest seq that held it."""
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
    """Findings of every stage in order of seq, then of writing."""
    rows = db.execute(
        "SELECT detector, kind, severity, step, onset_step, attempt, seq, body FROM finding ORDER BY seq, id"
    )
    return [_finding(row) for row in rows]


def read_forecasts(db: sqlite3.Connection, last: int | None) -> list[ForecastRecord]:
    """The ``last`` newest (None: all), in order of seq."""
    if "forecast" not in metric_tables(db):
        return []
    sets = {number: (names, packing(names)) for number, names in metric_sets(db).items()}
    rows = db.execute(
        "SELECT seq, attempt, step, ts, mset, v, body FROM forecast ORDER BY seq DESC LIMIT ?",
        (-1 if last is None else last,),
    ).fetchall()
    return [
        ForecastRecord(step, _values(*sets[mset], blob), loads(body), _moment(ts), attempt, seq)
        for seq, attempt, step, ts, mset, blob, body in rows[::-1]
    ]


def metric_tables(db: sqlite3.Connection) -> tuple[str, ...]:
    """Those that hold metrics; a file from before there were forecasts has only that of the records."""
    rows = db.execute("SELECT name FROM sqlite_master WHERE name IN ('record', 'forecast') ORDER BY name DESC")
    return tuple(name for (name,) in rows)


def read_spikes(
    db: sqlite3.Connection, last: int | None, reason: str | None = None, step: int | None = None
) -> list[SpikeBatch]:
    """The ``last`` batches written (None: all), by step; of one ``reason`` or one ``step``, or (None) of all."""
    most = -1 if last is None else last
    rows = db.execute(
        "SELECT step, v, reason, ts, attempt, rank FROM (SELECT * FROM spike_batch "
        "WHERE (?2 IS NULL OR reason = ?2) AND (?3 IS NULL OR step = ?3) ORDER BY id DESC LIMIT ?1) ORDER BY step, id",
        (most, reason, step),
    )
    return [
        SpikeBatch(at, as_named_now(why, unpack_columns(blob)), why, _moment(ts), attempt, rank)
        for at, blob, why, ts, attempt, rank in rows
    ]


def read_completions(db: sqlite3.Connection, last: int | None) -> list[CompletionBatch]:
    """The ``last`` batches written (None: all), by step; none in a file from before there were any."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'completion_batch'").fetchone():
        return []
    rows = db.execute(
        "SELECT step, v, ts, attempt, rank FROM "
        "(SELECT * FROM completion_batch ORDER BY id DESC LIMIT ?) ORDER BY step, id",
        (-1 if last is None else last,),
    )
    return [
        CompletionBatch(step, unpack_columns(blob), _moment(ts), attempt, rank)
        for step, blob, ts, attempt, rank in rows
    ]


def read_top_spikes(db: sqlite3.Connection, limit: int) -> list[Mapping[str, JSON]]:
    """The worst rows over all batches, worst first, each with its step, attempt and rank."""
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
    """The screen of far-out tokens was stored as ``contribution`` before contributions were."""
    if reason not in {FAR_OUT, NON_FINITE} or "contribution" not in columns:
        return columns
    return {"screen" if name == "contribution" else name: column for name, column in columns.items()}


def read_steps(db: sqlite3.Connection) -> dict[int, list[int]]:
    """Attempt -> the steps it has records of, ascending."""
    found: dict[int, list[int]] = {}
    for attempt, step in db.execute("SELECT DISTINCT attempt, step FROM record ORDER BY attempt, step"):
        found.setdefault(attempt, []).append(step)
    return found


def read_moments(db: sqlite3.Connection) -> Series:
    """Unix seconds of every record, in order of seq."""
    import numpy as np

    rows = db.execute("SELECT seq, step, attempt, ts FROM record ORDER BY seq").fetchall()
    seqs, steps, attempts, moments = zip(*rows, strict=True) if rows else ((), (), (), ())
    whole = (np.array(column, dtype=np.int64) for column in (steps, attempts, seqs))
    at, attempt, seq = whole
    return Series("ts", at, np.array([_moment(ts) for ts in moments], dtype=np.float64), attempt, seq)


def branch_bounds(db: sqlite3.Connection, attempt: int, before_step: int) -> dict[int, int]:
    """Earlier attempt -> the step below which its records are what ``attempt`` continues."""
    firsts = db.execute(
        "SELECT attempt, min(step) FROM record WHERE attempt < ?1 GROUP BY attempt "
        "UNION ALL SELECT DISTINCT attempt, NULL FROM event WHERE attempt < ?1 ORDER BY 1 DESC, 2 DESC",
        (attempt,),
    )
    below: dict[int, int] = {}
    for earlier, first_step in firsts:
        below.setdefault(earlier, before_step)
        if first_step is not None:
            before_step = min(before_step, first_step)
    return below


def _decode(db: sqlite3.Connection, rows: Iterable[_Row]) -> list[StepRecord]:
    sets = {number: (names, packing(names)) for number, names in metric_sets(db).items()}
    return [
        StepRecord(step, _values(*sets[mset], blob), _moment(ts), attempt, rank, seq)
        for seq, attempt, rank, step, ts, mset, blob in rows
    ]


def _values(names: tuple[str, ...], packed: struct.Struct, blob: bytes) -> dict[str, float]:
    try:
        return dict(zip(names, packed.unpack(blob), strict=True))
    except struct.error as error:
        raise ValueError(f"packed values: {error}") from error


def _moment(ts: float | None) -> float:
    return math.nan if ts is None else ts  # SQLite keeps a NaN as NULL


def _finding(row: tuple[Any, ...]) -> Finding:
    detector, kind, severity, step, onset_step, attempt, seq, body = row
    rest = {"stage": Stage.BEGAN, **loads(body)}  # a file from before there were stages
    rest["stage"] = Stage(rest["stage"])
    return Finding(
        detector=detector,
        kind=kind,
        severity=Severity(severity),
        step=step,
        onset_step=onset_step,
        attempt=attempt,
        seq=seq,
        **{name: rest[name] for name in FINDING_BODY},
    )


# Whole series out of packed rows, by column and without a Python object a value.

_WIDTH = 8  # bytes of a float64
_Part = tuple["np.ndarray", "np.ndarray", "np.ndarray", "np.ndarray"]


def read_series(db: sqlite3.Connection, names: Sequence[str]) -> dict[str, Series]:
    """The series of ``names`` in order of seq; a name never recorded gives an empty one."""
    parts: dict[str, list[_Part]] = {name: [] for name in names}
    tables_held = metric_tables(db)
    for number, held in metric_sets(db).items():
        places = {name: held.index(name) for name in parts if name in held}
        for table in tables_held if places else ():
            for name, part in _of_set(db, table, number, places):
                parts[name].append(part)
    return {name: _joined(name, of_name) for name, of_name in parts.items()}


def _of_set(db: sqlite3.Connection, kept_in: str, number: int, places: dict[str, int]) -> list[tuple[str, _Part]]:
    import numpy as np

    low, high = min(places.values()), max(places.values()) + 1
    rows = db.execute(
        f"SELECT seq, step, attempt, substr(v, ?, ?) FROM {kept_in} WHERE mset = ? ORDER BY seq",  # noqa: S608  (our tables)
        (1 + _WIDTH * low, _WIDTH * (high - low), number),
    ).fetchall()
    if not rows:
        return []
    *whole, blobs = zip(*rows, strict=True)
    seqs, steps, attempts = (np.array(column, dtype=np.int64) for column in whole)
    table = np.frombuffer(b"".join(blobs), dtype="<f8").reshape(len(rows), high - low)
    return [(name, (seqs, steps, attempts, table[:, place - low])) for name, place in places.items()]


def _joined(name: str, parts: list[_Part]) -> Series:
    import numpy as np

    if not parts:
        none = np.empty(0, dtype=np.int64)
        return Series(name, none, np.empty(0), none.copy(), none.copy())
    seqs, steps, attempts, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(seqs, kind="stable")
    return Series(name, steps[order], values[order].astype(np.float64), attempts[order], seqs[order])


# What a store answers about runs, over two hooks: which runs there are, and where a run's tables are.


class RunTables(ABC):
    """The reading half (``RunReader``): one snapshot a call."""

    url: str

    @abstractmethod
    def _run_ids(self) -> list[str]:
        """Names of what may be runs, readable or not."""

    @abstractmethod
    def snapshot(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        """The run's tables as they are now. Raises ``RunNotFoundError`` and what reading may raise."""

    def runs(self, *, deleted: bool = False) -> list[RunInfo]:
        """All readable runs, newest first, or those that are ``deleted``."""
        found = [run for run in self._listed()[0] if run.curation.deleted is deleted]
        return sorted(found, key=lambda run: (run.created_at, run.run_id), reverse=True)

    def unreadable(self) -> Mapping[str, str]:
        """Name of each unreadable run -> why."""
        return self._listed()[1]

    def run(self, run_id: str) -> RunInfo:
        """One run, as people edited it."""
        with self.snapshot(run_id) as db:
            run = runrow.load(db, run_id)
        return curated(run, self._edits(run_id))

    def _edits(self, run_id: str) -> Sequence[RunEdit]:  # noqa: ARG002
        """Edits of the run, oldest first; none where the place keeps none, or they cannot be read now."""
        return ()

    def configs(self, run_id: str) -> dict[int, Mapping[str, JSON]]:
        """Attempt -> what it was started with."""
        with self.snapshot(run_id) as db:
            return runrow.configs(db)

    def records(
        self, run_id: str, *, after_seq: int = 0, limit: int | None = None, last: int | None = None
    ) -> list[StepRecord]:
        """Records with ``seq > after_seq`` in order of ``seq``; of these the ``last`` newest if given."""
        with self.snapshot(run_id) as db:
            return read_records(db, after_seq, limit) if last is None else newest_records(db, after_seq, last)

    def branch(
        self, run_id: str, attempt: int, before_step: int, *, after_seq: int = 0
    ) -> Iterator[StepRecord | Event]:
        """The history that ``attempt``, starting at ``before_step``, continues."""
        self.branch_bounds(run_id, attempt, before_step)  # an unknown run is an error now, not at the first item
        return self._branch(run_id, attempt, before_step, after_seq)

    def _branch(self, run_id: str, attempt: int, before_step: int, after_seq: int) -> Iterator[StepRecord | Event]:
        with self.snapshot(run_id) as db:
            yield from read_branch(db, attempt, before_step, after_seq)

    def branch_bounds(self, run_id: str, attempt: int, before_step: int) -> Mapping[int, int]:
        """Earlier attempt -> the step below which :meth:`branch` has its records."""
        with self.snapshot(run_id) as db:
            return branch_bounds(db, attempt, before_step)

    def stream(self, run_id: str, *, after_seq: int, limit: int) -> list[StepRecord | Event]:
        """The next ``limit`` records and events above ``after_seq``."""
        with self.snapshot(run_id) as db:
            return read_stream(db, after_seq, limit)

    def judged(self, run_id: str) -> tuple[int, int]:
        """Up to which ``seq`` the run is judged, and its last."""
        with self.snapshot(run_id) as db:
            return runrow.judged_seq(db), runrow.last_seq(db)

    def first_seq(self, run_id: str, attempt: int) -> int:
        """The first ``seq`` that ``attempt`` may have written."""
        with self.snapshot(run_id) as db:
            return runrow.first_seq(db, attempt)

    def checkpoint(
        self, run_id: str, made_by: str, fits: Callable[[int, int, int], bool] = lambda *_: True
    ) -> Checkpoint | None:
        """The newest checkpoint that fits."""
        with self.snapshot(run_id) as db:
            return runrow.newest_checkpoint(db, made_by, fits)

    def steps(self, run_id: str) -> dict[int, list[int]]:
        """Attempt -> the steps it has records of, ascending."""
        with self.snapshot(run_id) as db:
            return read_steps(db)

    def metric_names(self, run_id: str) -> list[str]:
        """Every metric name ever recorded, sorted."""
        with self.snapshot(run_id) as db:
            return sorted(set().union(*metric_sets(db).values()))

    def series(self, run_id: str, names: Sequence[str]) -> dict[str, Series]:
        """Whole series of ``names``."""
        with self.snapshot(run_id) as db:
            return read_series(db, names)

    def moments(self, run_id: str) -> Series:
        """Unix seconds of every record."""
        with self.snapshot(run_id) as db:
            return read_moments(db)

    def last_values(self, run_id: str) -> dict[str, tuple[int, float]]:
        """Metric name -> (step, value) as last recorded."""
        with self.snapshot(run_id) as db:
            return read_last_values(db)

    def spikes(
        self, run_id: str, *, last: int | None = None, reason: str | None = None, step: int | None = None
    ) -> list[SpikeBatch]:
        """Spike batches by step, or the ``last`` newest; of one ``reason`` or one ``step`` only, where it is said."""
        with self.snapshot(run_id) as db:
            return read_spikes(db, last, reason, step)

    def top_spikes(self, run_id: str, *, limit: int = 50) -> list[Mapping[str, JSON]]:
        """The worst rows of all spike batches, worst first, with their step, attempt and rank."""
        with self.snapshot(run_id) as db:
            return read_top_spikes(db, limit)

    def completions(self, run_id: str, *, last: int | None = None) -> list[CompletionBatch]:
        """Recorded completions by step, or the ``last`` newest batches."""
        with self.snapshot(run_id) as db:
            return read_completions(db, last)

    def findings(self, run_id: str) -> list[Finding]:
        """Findings in order of ``seq``: those that began or became worse."""
        with self.snapshot(run_id) as db:
            return [finding for finding in read_findings(db) if not finding.stage.better]

    def recoveries(self, run_id: str) -> list[Finding]:
        """In order of ``seq``: of the findings, that they eased or are over."""
        with self.snapshot(run_id) as db:
            return [finding for finding in read_findings(db) if finding.stage.better]

    def forecasts(self, run_id: str, *, last: int | None = None) -> list[ForecastRecord]:
        """Forecasts in order of ``seq``."""
        with self.snapshot(run_id) as db:
            return read_forecasts(db, last)

    def events(self, run_id: str, *, after_seq: int = 0) -> list[Event]:
        """Events in order of ``seq``."""
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
