"""What a run holds, read over an open connection to ``run.db``."""

from __future__ import annotations

import heapq
import math
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar

from rlwatch.records import (
    FAR_OUT,
    JSON,
    NON_FINITE,
    CompletionBatch,
    Event,
    Finding,
    ForecastRecord,
    Severity,
    SpikeBatch,
    StepRecord,
)
from rlwatch.store.sqlite.batch import FINDING_BODY, packing
from rlwatch.store.sqlite.codec import loads
from rlwatch.store.sqlite.columns import unpack

_V = TypeVar("_V")
_Row = tuple[int, int, int, int, float | None, int, bytes]
_RECORDS = "SELECT seq, attempt, rank, step, ts, mset, v FROM record "


def metric_sets(db: sqlite3.Connection) -> dict[int, tuple[str, ...]]:
    """Metric set id -> its names, in the order of the packed values."""
    return {number: tuple(loads(names)) for number, names in db.execute("SELECT id, names FROM metric_set")}


def records(db: sqlite3.Connection, after_seq: int, limit: int | None) -> list[StepRecord]:
    """Records with a higher seq, in order of seq."""
    most = -1 if limit is None else limit
    return _decode(db, db.execute(_RECORDS + "WHERE seq > ? ORDER BY seq LIMIT ?", (after_seq, most)))


def newest(db: sqlite3.Connection, after_seq: int, last: int) -> list[StepRecord]:
    """The ``last`` records with a higher seq, in order of seq."""
    rows = db.execute(_RECORDS + "WHERE seq > ? ORDER BY seq DESC LIMIT ?", (after_seq, last)).fetchall()
    return _decode(db, rows[::-1])


def events(db: sqlite3.Connection, after_seq: int, limit: int = -1) -> list[Event]:
    """Events with a higher seq, in order of seq."""
    found = db.execute(
        "SELECT seq, attempt, step, ts, kind, body FROM event WHERE seq > ? ORDER BY seq LIMIT ?", (after_seq, limit)
    )
    return [Event(kind, step, loads(body), _moment(ts), attempt, seq) for seq, attempt, step, ts, kind, body in found]


def branch(db: sqlite3.Connection, attempt: int, before_step: int, after_seq: int = 0) -> Iterator[StepRecord | Event]:
    """The history ``attempt`` continues from ``before_step`` on, above ``after_seq``, in order of seq."""
    below = bounds(db, attempt, before_step)
    cut: set[int] = set()  # attempts that have left the branch: their later events do not belong to it
    for item in _merged(_records(db, after_seq, attempt), iter(events(db, after_seq))):
        bound = below.get(item.attempt)
        if bound is None or (isinstance(item, Event) and item.attempt in cut):
            continue
        if item.step is None or item.step < bound:
            yield item
        elif isinstance(item, StepRecord):
            cut.add(item.attempt)


def stream(db: sqlite3.Connection, after_seq: int, limit: int) -> list[StepRecord | Event]:
    """The next records and events, in order of seq."""
    return list(islice(_merged(_records(db, after_seq, None, limit), iter(events(db, after_seq, limit))), limit))


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


def last_values(db: sqlite3.Connection) -> dict[str, tuple[int, float]]:
    """Metric name -> (step, value) of the record with the highest seq that held it."""
    newest, held = [], tables(db)
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


def findings(db: sqlite3.Connection) -> list[Finding]:
    """Findings in order of seq, then of writing."""
    found = db.execute(
        "SELECT detector, kind, severity, step, onset_step, attempt, seq, body FROM finding ORDER BY seq, id"
    )
    return [_finding(row) for row in found]


def forecasts(db: sqlite3.Connection, last: int | None) -> list[ForecastRecord]:
    """The ``last`` newest (None: all), in order of seq."""
    if "forecast" not in tables(db):
        return []
    sets = {number: (names, packing(names)) for number, names in metric_sets(db).items()}
    found = db.execute(
        "SELECT seq, attempt, step, ts, mset, v, body FROM forecast ORDER BY seq DESC LIMIT ?",
        (-1 if last is None else last,),
    ).fetchall()
    return [
        ForecastRecord(step, _values(*sets[mset], blob), loads(body), _moment(ts), attempt, seq)
        for seq, attempt, step, ts, mset, blob, body in found[::-1]
    ]


def tables(db: sqlite3.Connection) -> tuple[str, ...]:
    """Those that hold metrics; a file from before there were forecasts has only that of the records."""
    found = db.execute("SELECT name FROM sqlite_master WHERE name IN ('record', 'forecast') ORDER BY name DESC")
    return tuple(name for (name,) in found)


def spikes(
    db: sqlite3.Connection, last: int | None, reason: str | None = None, step: int | None = None
) -> list[SpikeBatch]:
    """The ``last`` batches written (None: all), by step; of one ``reason`` or one ``step``, or (None) of all."""
    most = -1 if last is None else last
    found = db.execute(
        "SELECT step, v, reason, ts, attempt, rank FROM (SELECT * FROM spike_batch "
        "WHERE (?2 IS NULL OR reason = ?2) AND (?3 IS NULL OR step = ?3) ORDER BY id DESC LIMIT ?1) ORDER BY step, id",
        (most, reason, step),
    )
    return [
        SpikeBatch(at, _as_named_now(why, unpack(blob)), why, _moment(ts), attempt, rank)
        for at, blob, why, ts, attempt, rank in found
    ]


def completions(db: sqlite3.Connection, last: int | None) -> list[CompletionBatch]:
    """The ``last`` batches written (None: all), by step; none in a file from before there were any."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'completion_batch'").fetchone():
        return []
    found = db.execute(
        "SELECT step, v, ts, attempt, rank FROM "
        "(SELECT * FROM completion_batch ORDER BY id DESC LIMIT ?) ORDER BY step, id",
        (-1 if last is None else last,),
    )
    return [CompletionBatch(step, unpack(blob), _moment(ts), attempt, rank) for step, blob, ts, attempt, rank in found]


def top_spikes(db: sqlite3.Connection, limit: int) -> list[Mapping[str, JSON]]:
    """The worst rows over all batches, worst first, each with its step, attempt and rank."""
    found = db.execute(
        "SELECT top.step, top.attempt, top.rank, body, reason FROM spike_top AS top "
        "JOIN spike_batch AS whole ON whole.id = top.batch ORDER BY score DESC, top.id LIMIT ?",
        (limit,),
    )
    return [
        {"step": step, "attempt": attempt, "rank": rank, **_as_named_now(reason, loads(body))}
        for step, attempt, rank, body, reason in found
    ]


def _as_named_now(reason: str, columns: dict[str, _V]) -> dict[str, _V]:
    """The screen of far-out tokens was stored as ``contribution`` before contributions were."""
    if reason not in {FAR_OUT, NON_FINITE} or "contribution" not in columns:
        return columns
    return {"screen" if name == "contribution" else name: column for name, column in columns.items()}


def bounds(db: sqlite3.Connection, attempt: int, before_step: int) -> dict[int, int]:
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
    rest = loads(body)
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
