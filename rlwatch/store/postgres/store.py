"""The store of a team: runs, commands and alerts in one schema of a PostgreSQL database."""

from __future__ import annotations

import heapq
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from operator import attrgetter, itemgetter

from rlwatch import codec
from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import RunNotFoundError
from rlwatch.ports import Checkpoint, Progress, RunWriter, Series, Storable, Topic
from rlwatch.records import (
    JSON,
    CompletionBatch,
    Event,
    Finding,
    ForecastRecord,
    RunInfo,
    RunState,
    SpikeBatch,
    StepRecord,
)
from rlwatch.store import check_run_id
from rlwatch.store.fields import EVENT, FINDING, FORECAST, loads
from rlwatch.store.postgres import runrow, spool, writer
from rlwatch.store.postgres.address import read_address
from rlwatch.store.postgres.carrier import RowRange, SeriesBackend
from rlwatch.store.postgres.connection import Connection, Row, UnreachableError
from rlwatch.store.postgres.control import Alerts, CommandQueries
from rlwatch.store.postgres.curating import Curating, as_edited
from rlwatch.store.postgres.news import PostgresNews, tell
from rlwatch.store.postgres.ownership import lock_of, locked
from rlwatch.store.postgres.rows import CopiedBatch
from rlwatch.store.postgres.series import metric_sets, read_series
from rlwatch.store.postgres.server import Server
from rlwatch.store.postgres.spool import begun
from rlwatch.store.postgres.tables import newest_rows, values_of
from rlwatch.store.postgres.writer import PostgresWriter, new_name, ship_left
from rlwatch.store.sqlite.journal import JournalPosition
from rlwatch.store.sqlite.reading import as_named_now, completions_of, spikes_of
from rlwatch.store.thinning import bounds_of, thinned

# Read what a run holds from PostgreSQL: the reading part of a store, with one snapshot for each answer.

Opened = AbstractContextManager[Connection]


class RunQueries(ABC):
    """Part of a store on PostgreSQL that reads runs; implements ``RunReader``.

    Subclasses provide the engine that holds records, tokens and completions, and snapshots of the store and of one run.
    """

    url: str

    @property
    @abstractmethod
    def _carrier(self) -> SeriesBackend:
        """Return the engine that holds rows, localised tokens and completions."""

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Connection | None]:
        """Open the tables for reading; None if there are none yet."""

    @abstractmethod
    def snapshot(self, run_id: str) -> Opened:
        """Give a connection with a read-only snapshot, if the run exists. Raises ``RunNotFoundError``."""

    def at_once(self, run_id: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Do nothing: connections are kept between calls, so that a shared snapshot would save little."""
        return nullcontext()

    def runs(self, *, deleted: bool = False) -> list[RunInfo]:
        """Return all runs, newest first; with ``deleted`` only those that people deleted, else only the others."""
        with self._reading() as db:
            found = [] if db is None else as_edited(db, runrow.all_runs(db))
        return [run for run in found if run.curation.deleted is deleted]

    def unreadable(self) -> Mapping[str, str]:
        """Return an empty mapping: a PostgreSQL store has no files that could be damaged."""
        return {}

    def run(self, run_id: str) -> RunInfo:
        """Return one run, with people's edits of its name and tags applied. Raises ``RunNotFoundError``."""
        with self._reading() as db:
            run = None if db is None else runrow.load(db, run_id)
            if db is None or run is None:
                raise RunNotFoundError(f"no run {run_id!r} in {self.url}; `rlwatch runs` lists what there is")
            return as_edited(db, [run], run_id)[0]

    def configs(self, run_id: str) -> dict[int, Mapping[str, JSON]]:
        """Return attempt -> the configuration that the attempt's process passed to rlwatch."""
        with self.snapshot(run_id) as db:
            return runrow.configs(db, run_id)

    def records(
        self, run_id: str, *, after_seq: int = 0, limit: int | None = None, last: int | None = None
    ) -> list[StepRecord]:
        """Return records with ``seq > after_seq`` in order of ``seq``: the first ``limit``, or the ``last`` newest, if
        given.
        """
        most, newest = (limit, False) if last is None else (last, True)
        with self.snapshot(run_id) as db:
            rows = self._carrier.rows(db, run_id, after_seq, limit=most, newest=newest)
            found = list(_decoded(metric_sets(db, run_id), rows))
        return found if last is None else found[::-1]

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
            sets, below = metric_sets(db, run_id), self._bounds(db, run_id, attempt, before_step)
            events = _events(db, run_id, after_seq)
            rows = self._carrier.rows_before(db, run_id, after_seq, attempt)
            cut: set[int] = set()  # attempts that have left the branch: their later events do not belong to it
            for item in _merged(_decoded(sets, rows), events):
                bound = below.get(item.attempt)
                if bound is None or (isinstance(item, Event) and item.attempt in cut):
                    continue
                if item.step is None or item.step < bound:
                    yield item
                elif isinstance(item, StepRecord):
                    cut.add(item.attempt)

    def branch_bounds(self, run_id: str, attempt: int, before_step: int) -> Mapping[int, int]:
        """Return earlier attempt -> the step below which :meth:`branch` has its records."""
        with self.snapshot(run_id) as db:
            return self._bounds(db, run_id, attempt, before_step)

    def stream(self, run_id: str, *, after_seq: int, limit: int) -> list[StepRecord | Event]:
        """Return the next ``limit`` records and events with sequence numbers above ``after_seq``, in order of
        ``seq``.
        """
        with self.snapshot(run_id) as db:
            rows = self._carrier.rows(db, run_id, after_seq, limit=limit)
            events = _events(db, run_id, after_seq, limit)
            return list(islice(_merged(_decoded(metric_sets(db, run_id), rows), events), limit))

    def judged(self, run_id: str) -> tuple[int, int]:
        """Return two sequence numbers of the run: up to which findings, forecasts and alerts are written, and the last
        one.
        """
        with self.snapshot(run_id) as db:
            return runrow.judged(db, run_id)

    def first_seq(self, run_id: str, attempt: int) -> int:
        """Return the lowest sequence number that the attempt may have given to a record or an event."""
        with self.snapshot(run_id) as db:
            return runrow.first_seq(db, run_id, attempt)

    def checkpoint(
        self, run_id: str, made_by: str, fits: Callable[[int, int, int], bool] = lambda *_: True
    ) -> Checkpoint | None:
        """Return the newest checkpoint of the analysis that the program ``made_by`` wrote and for which ``fits`` is
        true.

        ``fits(seq, attempt, step)``. None if there is no such checkpoint.
        """
        with self.snapshot(run_id) as db:
            return runrow.newest_checkpoint(db, run_id, made_by, fits)

    def steps(self, run_id: str) -> dict[int, list[int]]:
        """Return attempt -> the steps that it has records of, ascending."""
        found: dict[int, list[int]] = {}
        with self.snapshot(run_id) as db:
            for attempt, step in self._carrier.steps(db, run_id):
                found.setdefault(attempt, []).append(step)
        return found

    def metric_names(self, run_id: str) -> list[str]:
        """Return the name of every metric ever recorded for the run, sorted."""
        with self.snapshot(run_id) as db:
            return sorted(set().union(*metric_sets(db, run_id).values()))

    def spans(self, run_id: str) -> dict[int, tuple[int, int]]:
        """Return attempt -> its lowest and its highest step; attempts without records are left out."""
        with self.snapshot(run_id) as db:
            return self._carrier.spans(db, run_id)

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
        ``points``: thinned for a chart of this width, after all rows were read.
        """
        asked = RowRange(after_seq, *(steps or (-(1 << 63), (1 << 63) - 1)))
        with self.snapshot(run_id) as db:
            found = read_series(db, self._carrier, run_id, names, asked)
            if points is None:
                return found
            bounds = bounds_of(self._carrier.spans(db, run_id))
        return {name: thinned(one, points, bounds) for name, one in found.items()}

    def moments(self, run_id: str) -> Series:
        """Return the Unix seconds of every record as a series in order of ``seq``."""
        with self.snapshot(run_id) as db:
            seqs, steps, attempts, moments = self._carrier.moments(db, run_id)
        return Series("ts", steps, moments, attempts, seqs)

    def last_values(self, run_id: str) -> dict[str, tuple[int, float]]:
        """Return metric name -> (step, value) of the last row that has the metric."""
        with self.snapshot(run_id) as db:
            sets = metric_sets(db, run_id)
            newest = [*self._carrier.last_values(db, run_id, sets), *newest_rows(db, run_id, "forecast", sets)]
        last: dict[str, tuple[int, float]] = {}
        for _, step, values in sorted(newest, key=itemgetter(0)):
            last.update({name: (step, value) for name, value in values.items()})
        return last

    def spikes(
        self, run_id: str, *, last: int | None = None, reason: str | None = None, step: int | None = None
    ) -> list[SpikeBatch]:
        """Return the run's token batches by step, or the ``last`` newest; if given, of one ``reason`` or one ``step``
        only.
        """
        with self.snapshot(run_id) as db:
            rows = list(self._carrier.spikes(db, run_id, last=last, reason=reason, step=step))
        return [spikes_of(*row) for row in rows]

    def top_spikes(self, run_id: str, *, limit: int = 50) -> list[Mapping[str, JSON]]:
        """Return the ``limit`` worst tokens of all batches, worst first, each with its columns, step, attempt and
        rank.
        """
        with self.snapshot(run_id) as db:
            rows = list(self._carrier.top_spikes(db, run_id, limit))
        return [
            {"step": step, "attempt": attempt, "rank": rank, **as_named_now(reason, loads(body))}
            for step, attempt, rank, body, reason in rows
        ]

    def completions(self, run_id: str, *, last: int | None = None) -> list[CompletionBatch]:
        """Return the recorded batches of completions by step, or only the ``last`` newest."""
        with self.snapshot(run_id) as db:
            rows = list(self._carrier.completions(db, run_id, last))
        return [completions_of(*row) for row in rows]

    def _bounds(self, db: Connection, run_id: str, attempt: int, before_step: int) -> dict[int, int]:
        firsts = {of: low for of, (low, _) in self._carrier.spans(db, run_id).items()}
        events = db.execute("SELECT DISTINCT attempt FROM event WHERE run_id = %s", (run_id,))
        known = firsts.keys() | {of for (of,) in events}
        below: dict[int, int] = {}
        for earlier in sorted((of for of in known if of < attempt), reverse=True):
            below[earlier] = before_step
            before_step = min(before_step, firsts.get(earlier, before_step))
        return below

    def findings(self, run_id: str) -> list[Finding]:
        """Return the findings that began or became worse, in order of ``seq``."""
        return [finding for finding in self._findings(run_id) if not finding.stage.better]

    def recoveries(self, run_id: str) -> list[Finding]:
        """Return the findings that eased or ended, in order of ``seq``."""
        return [finding for finding in self._findings(run_id) if finding.stage.better]

    def _findings(self, run_id: str) -> list[Finding]:
        with self.snapshot(run_id) as db:
            rows = db.execute(FINDING.select("WHERE run_id = %s ORDER BY seq, id", "body").encode(), (run_id,))
            return [FINDING.record(row, body) for body, *row in rows]

    def forecasts(self, run_id: str, *, last: int | None = None) -> list[ForecastRecord]:
        """Return the forecasts in order of ``seq``, or only the ``last`` newest."""
        with self.snapshot(run_id) as db:
            which = FORECAST.select("WHERE run_id = %s ORDER BY seq DESC LIMIT %s", "mset", "v", "extra")
            rows = db.execute(which.encode(), (run_id, last), binary=True).fetchall()
            sets = metric_sets(db, run_id)
        return [
            FORECAST.record(row, extra, metrics=values_of(sets[mset], blob)) for mset, blob, extra, *row in rows[::-1]
        ]

    def events(self, run_id: str, *, after_seq: int = 0) -> list[Event]:
        """Return the events with sequence numbers above ``after_seq``, in order of ``seq``."""
        with self.snapshot(run_id) as db:
            return list(_events(db, run_id, after_seq))


def _events(db: Connection, run_id: str, after_seq: int, limit: int | None = None) -> Iterator[Event]:
    which = EVENT.select("WHERE run_id = %s AND seq > %s ORDER BY seq LIMIT %s", "extra")
    for extra, *row in db.execute(which.encode(), (run_id, after_seq, limit)).fetchall():
        yield EVENT.record(row, extra)


def _decoded(sets: Mapping[int, tuple[str, ...]], rows: Iterable[Row]) -> Iterator[StepRecord]:
    for seq, attempt, rank, step, ts, mset, blob, extra in rows:
        record = StepRecord(step, values_of(sets[mset], blob), ts, attempt, rank, seq)
        yield codec.enriched(record, loads(extra)) if extra else record


def _merged(records: Iterator[StepRecord], events: Iterator[Event]) -> Iterator[StepRecord | Event]:
    parts: tuple[Iterator[StepRecord | Event], ...] = (records, events)
    return heapq.merge(*parts, key=attrgetter("seq"))


PATIENCE_S, TRAINER_PATIENCE_S = 60.0, 20.0
"""Longest wait for an answer of the server, in seconds: of other programs, and of a trainer."""
SHORTEST_LOCK_WAIT_S = 0.2


class PostgresStore(RunQueries, CommandQueries, Alerts, Curating):
    """A team's store of runs in one schema of a PostgreSQL database.

    Parameters
    ----------
    url
        ``postgresql://user@host:5432/database?sslmode=verify-full&schema=team``: options of libpq, ``schema``,
        and ``series=clickhouse://...`` if rows, tokens and completions are stored in ClickHouse.
    control_timeout_s
        Seconds that calls about commands, alerts and outgoing messages wait for another process before they raise
        ``StoreBusyError``. A trainer passes 0; an unreachable server is then tried only now and then.
    clock
        Source of creation times; the machine's clock by default.
    """

    def __init__(self, url: str, *, control_timeout_s: float = 2.0, clock: Clock | None = None) -> None:
        hurried = control_timeout_s == 0
        address = read_address(url)
        self.url = address.url
        self._clock = clock or SystemClock()
        self._control_timeout_s = control_timeout_s
        self.server = Server(
            address,
            patience_s=TRAINER_PATIENCE_S if hurried else PATIENCE_S,
            lock_wait_s=max(SHORTEST_LOCK_WAIT_S, control_timeout_s),
            hurried=hurried,
        )

    def usage(self) -> dict[str, dict[str, int]]:
        """Return table -> its bytes on the server, by ``rows`` and ``indexes``."""
        with self.server.reading() as db:
            if db is None:
                return {}
            rows = db.execute(
                "SELECT c.relname, pg_table_size(c.oid), pg_indexes_size(c.oid) FROM pg_class c "
                "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relkind IN ('r', 'p')",
                (self.server.address.schema,),
            ).fetchall()
        own = {str(name): {"rows": int(table), "indexes": int(indexes)} for name, table, indexes in rows}
        return own | self._carrier.usage()

    def open_run(self, run: RunInfo) -> RunWriter:
        """Create the run, or begin its next attempt if it exists, and return its writer.

        If the server cannot be reached, a trainer's attempt begins on this node alone. Raises ``RunLockedError`` while
        another process writes the run.
        """
        check_run_id(run.run_id)
        try:
            return writer.open_run(self.server, run, self._clock.now())
        except UnreachableError as error:
            if not self.server.hurried:
                raise
            return begin_away(self.server, run, error)

    def amend_run(self, run_id: str) -> RunWriter | None:
        """Return a writer for a run whose process is gone, without a new attempt.

        None if a process writes the run, or if this role may not write it.
        """
        return writer.amend_run(self.server, run_id)

    def news(self, topic: Topic, run_id: str | None = None) -> PostgresNews:
        """Return notifications of a topic from now on; ``run_id``: the run to watch, None for all."""
        return PostgresNews(self.server, topic, run_id)

    def close(self) -> None:
        """Close connections that are not in use; idempotent."""
        self.server.close()

    @property
    def _carrier(self) -> SeriesBackend:
        return self.server.carrier

    def _reading(self) -> AbstractContextManager[Connection | None]:
        return self.server.reading()

    @contextmanager
    def snapshot(self, run_id: str) -> Iterator[Connection]:
        """Give a connection with a read-only snapshot of the store, if it holds the run. Raises
        ``RunNotFoundError``.
        """
        with self.server.reading() as db:
            if db is None or db.execute("SELECT 1 FROM run WHERE run_id = %s", (run_id,)).fetchone() is None:
                raise RunNotFoundError(f"no run {run_id!r} in {self.url}; `rlwatch runs` lists what there is")
            yield db

    @contextmanager
    def _changing(self, run_id: str) -> Iterator[Connection]:
        """Open a transaction on a run that exists. Raises ``RunNotFoundError``."""
        with self.server.connection() as db:
            made = self.server.is_made(db)
            if not made or db.execute("SELECT 1 FROM run WHERE run_id = %s", (run_id,)).fetchone() is None:
                raise RunNotFoundError(f"no run {run_id!r} in {self.url}; `rlwatch runs` lists what there is")
            with db.transaction():
                yield db
                tell(db, self.server.address, "pages", run_id)


# Begin a run while the server cannot be reached: in the journal on the node's own disk, and on the server later.

logger = logging.getLogger("rlwatch")


class AwayWriter(PostgresWriter):
    """Writer of an attempt that the server does not have yet, because it could not be reached when the attempt began.

    Until it can be reached the run counts as new. If the server then has the run already, the attempt's number and its
    sequence numbers are shifted there, while the trainer continues with its own. ``kept``: the journal on this node.
    """

    def __init__(self, server: Server, run: RunInfo, kept: spool.Spool) -> None:
        super().__init__(server, None, replace(run, attempt=1, state=RunState.RUNNING), new_name(), kept)
        self._kept, self._born = kept, False
        self._attempt, self._base = 1, 0

    def _take_again(self, db: Connection) -> None:
        if self._born:
            super()._take_again(db)
            return
        self._server.make(db)
        if not locked(db, lock_of(self._server.address, self.run.run_id, self.run.project)):
            raise UnreachableError(f"run {self.run.run_id!r} is written by another process: what is logged waits here")
        ship_left(self._server, db, self.run.run_id)
        note = begun(db, self._kept.directory, spool.note_of(self._server.address, self.run, 0), self._name)
        self._load(db)
        self._attempt, self._base, self._born = note.attempt, self.last_seq, True
        self._place = self._moved if self._attempt != 1 or self._base else None

    def _moved(self, item: Storable) -> Storable:
        """Return the item with the server's numbers."""
        if isinstance(item, SpikeBatch | CompletionBatch):
            return replace(item, attempt=self._attempt)
        return replace(item, attempt=self._attempt, seq=item.seq + self._base if item.seq else 0)

    def _note(
        self, db: Connection, batch: CopiedBatch, progress: Progress | None, mark: JournalPosition | None
    ) -> None:
        kept = None if progress is None else progress.checkpoint
        if progress is not None and self._place is not None:
            judged = None if progress.judged is None else progress.judged + self._base
            kept = None if kept is None else replace(kept, attempt=self._attempt, seq=kept.seq + self._base)
            progress = replace(progress, judged=judged, checkpoint=kept)
        super()._note(db, batch, progress, mark)


def begin_away(server: Server, run: RunInfo, why: UnreachableError) -> AwayWriter:
    """Return a writer that records the run's attempt only in this node's journal, until the server can be reached.

    Raises ``why``, the error of the connection, if this node's disk cannot hold a journal.
    """
    kept = spool.begin(server.address, run, 0)
    if kept is None:
        raise why
    message = "%s: the run begins without it; what is logged is kept in %s and shipped when it is back"
    logger.warning(message, why, kept.directory)
    return AwayWriter(server, run, kept)
