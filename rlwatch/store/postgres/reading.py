"""Read what a run holds: the reading half of the store, each answer one snapshot."""

from __future__ import annotations

import heapq
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from operator import attrgetter

from rlwatch.errors import RunNotFoundError, StoreCorruptError
from rlwatch.ports import Checkpoint, Series
from rlwatch.records import (
    JSON,
    CompletionBatch,
    Event,
    Finding,
    ForecastRecord,
    RunInfo,
    Severity,
    SpikeBatch,
    Stage,
    StepRecord,
)
from rlwatch.store.postgres import runrow
from rlwatch.store.postgres.connection import Connection, Row
from rlwatch.store.postgres.curating import as_edited
from rlwatch.store.postgres.series import metric_sets, read_columns, read_series, read_spans
from rlwatch.store.sqlite.reading import as_named_now
from rlwatch.store.sqlite.rows import FINDING_BODY, loads, packing, unpack_columns
from rlwatch.store.thinning import bounds_of, thinned

_RECORDS = "SELECT seq, attempt, rank, step, ts, mset, v FROM record "
_EVENTS = "SELECT seq, attempt, step, ts, kind, body FROM event "
_AT_ONCE = 500  # rows of a branch
Opened = AbstractContextManager[Connection]


class Runs(ABC):
    """Answers about runs (``RunReader``), over two hooks: a snapshot of the store, and of one run."""

    url: str

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Connection | None]:
        """The tables as they are now; None where there are none yet."""

    @abstractmethod
    def snapshot(self, run_id: str) -> Opened:
        """The same, of a run that exists. Raises ``RunNotFoundError``."""

    def at_once(self, run_id: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Nothing to gain here: connections are kept."""
        return nullcontext()

    def runs(self, *, deleted: bool = False) -> list[RunInfo]:
        """All runs, newest first, or those that are ``deleted``."""
        with self._reading() as db:
            found = [] if db is None else as_edited(db, runrow.all_runs(db))
        return [run for run in found if run.curation.deleted is deleted]

    def unreadable(self) -> Mapping[str, str]:
        """None: there are no files to be damaged."""
        return {}

    def run(self, run_id: str) -> RunInfo:
        """One run, as people edited it."""
        with self._reading() as db:
            run = None if db is None else runrow.load(db, run_id)
            if db is None or run is None:
                raise RunNotFoundError(f"no run {run_id!r} in {self.url}; `rlwatch runs` lists what there is")
            return as_edited(db, [run], run_id)[0]

    def configs(self, run_id: str) -> dict[int, Mapping[str, JSON]]:
        """Attempt -> what it was started with."""
        with self.snapshot(run_id) as db:
            return runrow.configs(db, run_id)

    def records(
        self, run_id: str, *, after_seq: int = 0, limit: int | None = None, last: int | None = None
    ) -> list[StepRecord]:
        """Records with ``seq > after_seq`` in order of ``seq``; of these the ``last`` newest if given."""
        order, most = ("ASC", limit) if last is None else ("DESC", last)
        with self.snapshot(run_id) as db:
            rows = db.execute(
                f"{_RECORDS} WHERE run_id = %s AND seq > %s ORDER BY seq {order} LIMIT %s",
                (run_id, after_seq, most),
                binary=True,
            ).fetchall()
            found = list(_decoded(metric_sets(db, run_id), rows))
        return found if last is None else found[::-1]

    def branch(
        self, run_id: str, attempt: int, before_step: int, *, after_seq: int = 0
    ) -> Iterator[StepRecord | Event]:
        """The history that ``attempt``, starting at ``before_step``, continues."""
        self.branch_bounds(run_id, attempt, before_step)  # an unknown run is an error now, not at the first item
        return self._branch(run_id, attempt, before_step, after_seq)

    def _branch(self, run_id: str, attempt: int, before_step: int, after_seq: int) -> Iterator[StepRecord | Event]:
        with self.snapshot(run_id) as db, db.cursor("branch", binary=True) as cursor:
            cursor.itersize = _AT_ONCE
            sets, below = metric_sets(db, run_id), _bounds(db, run_id, attempt, before_step)
            events = _events(db, run_id, after_seq)
            cursor.execute(
                _RECORDS + "WHERE run_id = %s AND seq > %s AND attempt < %s ORDER BY seq", (run_id, after_seq, attempt)
            )
            cut: set[int] = set()  # attempts that have left the branch: their later events do not belong to it
            for item in _merged(_decoded(sets, cursor), events):
                bound = below.get(item.attempt)
                if bound is None or (isinstance(item, Event) and item.attempt in cut):
                    continue
                if item.step is None or item.step < bound:
                    yield item
                elif isinstance(item, StepRecord):
                    cut.add(item.attempt)

    def branch_bounds(self, run_id: str, attempt: int, before_step: int) -> Mapping[int, int]:
        """Earlier attempt -> the step below which :meth:`branch` has its records."""
        with self.snapshot(run_id) as db:
            return _bounds(db, run_id, attempt, before_step)

    def stream(self, run_id: str, *, after_seq: int, limit: int) -> list[StepRecord | Event]:
        """The next ``limit`` records and events above ``after_seq``."""
        with self.snapshot(run_id) as db:
            rows = db.execute(
                _RECORDS + "WHERE run_id = %s AND seq > %s ORDER BY seq LIMIT %s",
                (run_id, after_seq, limit),
                binary=True,
            ).fetchall()
            events = _events(db, run_id, after_seq, limit)
            return list(islice(_merged(_decoded(metric_sets(db, run_id), rows), events), limit))

    def judged(self, run_id: str) -> tuple[int, int]:
        """Up to which ``seq`` the run is judged, and its last."""
        with self.snapshot(run_id) as db:
            return runrow.judged(db, run_id)

    def first_seq(self, run_id: str, attempt: int) -> int:
        """The first ``seq`` that ``attempt`` may have written."""
        with self.snapshot(run_id) as db:
            return runrow.first_seq(db, run_id, attempt)

    def checkpoint(
        self, run_id: str, made_by: str, fits: Callable[[int, int, int], bool] = lambda *_: True
    ) -> Checkpoint | None:
        """The newest checkpoint that fits."""
        with self.snapshot(run_id) as db:
            return runrow.newest_checkpoint(db, run_id, made_by, fits)

    def steps(self, run_id: str) -> dict[int, list[int]]:
        """Attempt -> the steps it has records of, ascending."""
        found: dict[int, list[int]] = {}
        with self.snapshot(run_id) as db:
            rows = db.execute(
                "SELECT attempt, step FROM record WHERE run_id = %s GROUP BY 1, 2 ORDER BY 1, 2", (run_id,), binary=True
            )
            for attempt, step in rows:
                found.setdefault(attempt, []).append(step)
        return found

    def metric_names(self, run_id: str) -> list[str]:
        """Every metric name ever recorded, sorted."""
        with self.snapshot(run_id) as db:
            return sorted(set().union(*metric_sets(db, run_id).values()))

    def spans(self, run_id: str) -> dict[int, tuple[int, int]]:
        """Attempt -> its lowest and its highest step."""
        with self.snapshot(run_id) as db:
            return read_spans(db, run_id)

    def series(
        self,
        run_id: str,
        names: Sequence[str],
        *,
        after_seq: int = 0,
        steps: tuple[int, int] | None = None,
        points: int | None = None,
    ) -> dict[str, Series]:
        """Series of ``names``: whole, new, of a range of steps, or thinned once they are read."""
        with self.snapshot(run_id) as db:
            found = read_series(db, run_id, names, after_seq, steps)
            if points is None:
                return found
            bounds = bounds_of(read_spans(db, run_id))
        return {name: thinned(one, points, bounds) for name, one in found.items()}

    def moments(self, run_id: str) -> Series:
        """Unix seconds of every record."""
        with self.snapshot(run_id) as db:
            columns = read_columns(db, run_id, "record", "float8send(ts)", "")
        seqs, steps, attempts, moments = columns
        return Series("ts", steps, moments, attempts, seqs)

    def last_values(self, run_id: str) -> dict[str, tuple[int, float]]:
        """Metric name -> (step, value) as last recorded."""
        with self.snapshot(run_id) as db:
            sets = metric_sets(db, run_id)
            newest = [
                row
                for number in sets
                for table in ("record", "forecast")
                for row in db.execute(
                    f"SELECT seq, step, v, mset FROM {table} WHERE run_id = %s AND mset = %s ORDER BY seq DESC LIMIT 1",
                    (run_id, number),
                    binary=True,
                )
            ]
        last: dict[str, tuple[int, float]] = {}
        for _, step, blob, number in sorted(newest, key=lambda row: row[0]):
            last.update({name: (step, value) for name, value in _values(sets[number], blob).items()})
        return last

    def spikes(
        self, run_id: str, *, last: int | None = None, reason: str | None = None, step: int | None = None
    ) -> list[SpikeBatch]:
        """Spike batches by step, or the ``last`` newest; of one ``reason`` or one ``step`` only, where it is said."""
        asked = {"run": run_id, "reason": reason, "step": step, "last": last}
        with self.snapshot(run_id) as db:
            rows = db.execute(
                """SELECT step, v, reason, ts, attempt, rank FROM (SELECT * FROM spike_batch WHERE run_id = %(run)s
                   AND (%(reason)s::text IS NULL OR reason = %(reason)s)
                   AND (%(step)s::bigint IS NULL OR step = %(step)s) ORDER BY id DESC LIMIT %(last)s) AS newest
                   ORDER BY step, id""",
                asked,
                binary=True,
            ).fetchall()
        return [
            SpikeBatch(at, as_named_now(why, unpack_columns(blob)), why, ts, attempt, rank)
            for at, blob, why, ts, attempt, rank in rows
        ]

    def top_spikes(self, run_id: str, *, limit: int = 50) -> list[Mapping[str, JSON]]:
        """The worst rows of all spike batches, worst first, with their step, attempt and rank."""
        with self.snapshot(run_id) as db:
            rows = db.execute(
                """SELECT top.step, top.attempt, top.rank, body, reason FROM spike_top AS top
                   JOIN spike_batch AS whole ON whole.run_id = top.run_id AND whole.id = top.batch
                   WHERE top.run_id = %s ORDER BY score DESC, top.id LIMIT %s""",
                (run_id, limit),
            ).fetchall()
        return [
            {"step": step, "attempt": attempt, "rank": rank, **as_named_now(reason, loads(body))}
            for step, attempt, rank, body, reason in rows
        ]

    def completions(self, run_id: str, *, last: int | None = None) -> list[CompletionBatch]:
        """Recorded completions by step, or the ``last`` newest batches."""
        with self.snapshot(run_id) as db:
            rows = db.execute(
                """SELECT step, v, ts, attempt, rank FROM (SELECT * FROM completion_batch WHERE run_id = %s
                   ORDER BY id DESC LIMIT %s) AS newest ORDER BY step, id""",
                (run_id, last),
                binary=True,
            ).fetchall()
        return [
            CompletionBatch(step, unpack_columns(blob), ts, attempt, rank) for step, blob, ts, attempt, rank in rows
        ]

    def findings(self, run_id: str) -> list[Finding]:
        """Findings in order of ``seq``: those that began or became worse."""
        return [finding for finding in self._findings(run_id) if not finding.stage.better]

    def recoveries(self, run_id: str) -> list[Finding]:
        """In order of ``seq``: of the findings, that they eased or are over."""
        return [finding for finding in self._findings(run_id) if finding.stage.better]

    def _findings(self, run_id: str) -> list[Finding]:
        with self.snapshot(run_id) as db:
            rows = db.execute(
                "SELECT detector, kind, severity, step, onset_step, attempt, seq, body FROM finding "
                "WHERE run_id = %s ORDER BY seq, id",
                (run_id,),
            )
            return [_finding(row) for row in rows]

    def forecasts(self, run_id: str, *, last: int | None = None) -> list[ForecastRecord]:
        """Forecasts in order of ``seq``."""
        with self.snapshot(run_id) as db:
            rows = db.execute(
                "SELECT seq, attempt, step, ts, mset, v, body FROM forecast WHERE run_id = %s "
                "ORDER BY seq DESC LIMIT %s",
                (run_id, last),
                binary=True,
            ).fetchall()
            sets = metric_sets(db, run_id)
        return [
            ForecastRecord(step, _values(sets[mset], blob), loads(body), ts, attempt, seq)
            for seq, attempt, step, ts, mset, blob, body in rows[::-1]
        ]

    def events(self, run_id: str, *, after_seq: int = 0) -> list[Event]:
        """Events in order of ``seq``."""
        with self.snapshot(run_id) as db:
            return list(_events(db, run_id, after_seq))


def _events(db: Connection, run_id: str, after_seq: int, limit: int | None = None) -> Iterator[Event]:
    rows = db.execute(_EVENTS + "WHERE run_id = %s AND seq > %s ORDER BY seq LIMIT %s", (run_id, after_seq, limit))
    for seq, attempt, step, ts, kind, body in rows.fetchall():
        yield Event(kind, step, loads(body), ts, attempt, seq)


def _decoded(sets: Mapping[int, tuple[str, ...]], rows: Iterable[Row]) -> Iterator[StepRecord]:
    for seq, attempt, rank, step, ts, mset, blob in rows:
        yield StepRecord(step, _values(sets[mset], blob), ts, attempt, rank, seq)


def _merged(records: Iterator[StepRecord], events: Iterator[Event]) -> Iterator[StepRecord | Event]:
    parts: tuple[Iterator[StepRecord | Event], ...] = (records, events)
    return heapq.merge(*parts, key=attrgetter("seq"))


def _bounds(db: Connection, run_id: str, attempt: int, before_step: int) -> dict[int, int]:
    firsts = db.execute(
        """SELECT attempt, min(step) FROM record WHERE run_id = %(run)s AND attempt < %(attempt)s GROUP BY attempt
           UNION ALL SELECT DISTINCT attempt, NULL::bigint FROM event WHERE run_id = %(run)s AND attempt < %(attempt)s
           ORDER BY 1 DESC, 2 DESC NULLS LAST""",
        {"run": run_id, "attempt": attempt},
    )
    below: dict[int, int] = {}
    for earlier, first_step in firsts:
        below.setdefault(earlier, before_step)
        if first_step is not None:
            before_step = min(before_step, first_step)
    return below


def _values(names: tuple[str, ...], blob: bytes) -> dict[str, float]:
    try:
        return dict(zip(names, packing(names).unpack(blob), strict=True))
    except struct.error as error:
        raise StoreCorruptError(f"packed values: {error}") from error


def _finding(row: Row) -> Finding:
    detector, kind, severity, step, onset_step, attempt, seq, body = row
    rest = loads(body)
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
