"""``rlwatch watch`` of a log: read its rows and those appended later, store them, and judge them one by one."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.messages import Notification
from rlwatch.alerts.rules import AlertingConfig
from rlwatch.cli.background import deliver_once, delivering, unbroken
from rlwatch.cli.console import backlog, print_text, warn
from rlwatch.cli.import_log import NamedLog, holds
from rlwatch.cli.names import print_names
from rlwatch.cli.options import alerting_of, opened
from rlwatch.cli.view_text import print_forecast, print_outcome
from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import ImportFormatError, RunNotFoundError
from rlwatch.importers import ImportedRun, LogTail, Position, Tail, read_log
from rlwatch.importers.naming import NONE
from rlwatch.importers.tensorboard_events import trainings_until
from rlwatch.layers import DerivedLayers
from rlwatch.monitor.engine import Monitor
from rlwatch.monitor.forecasting import forecaster_for
from rlwatch.monitor.judge import MonitorSink, SinkProgress, past_of
from rlwatch.monitor.step_judge import MonitorOutcome
from rlwatch.ports import Checkpoint, Progress, RunWriter, Store
from rlwatch.records import AlertState, RunInfo, RunState, Severity, StepRecord
from rlwatch.run.alerting import Alerting
from rlwatch.wording import one_line

_SCHEME = "sqlite://"
_PLACE = ".watch"


class Positions:
    """Files with the read positions in the logs that ``store`` records as runs; none are written for a
    store in memory.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._directory = Path(unquote(store.url[len(_SCHEME) :])) / _PLACE if store.url.startswith(_SCHEME) else None

    def load(self, run_id: str) -> tuple[Position | None, int]:
        """Return the read position in the log of the run, and the number ``seq`` of its last stored record.

        Return None and 0 for a new run.
        """
        try:
            last = self._store.records(run_id, last=1)
        except RunNotFoundError:
            return None, 0
        data: object = None
        if self._directory is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                data = json.loads((self._directory / f"{run_id}.json").read_text("utf-8"))
        return Position.from_dict(data), last[-1].seq if last else 0

    def save(self, run_id: str, position: Position) -> None:
        """Store ``position`` as the read position in the log of the run, in place of the last one.

        A full disk is ignored here, since the store reports it.
        """
        if self._directory is None:
            return
        file = self._directory / f"{run_id}.json"
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._directory, suffix=".new", delete=False) as new:
                new.write(json.dumps(position.to_dict()))
            Path(new.name).replace(file)  # a random name, so that no one can prepare a link


# Recording and judging a growing log, row by row, as a trainer's process would.

HEARTBEAT_S = 5.0


class LogRecording:
    """One run that is read from a log, written to ``store``, and judged by ``policy``.

    The ``seq`` of a record is its position in the log. Records that ``store`` has from an earlier watch of the log are
    skipped. Each watch, and each start of the trainer in the log, is a separate attempt of the run.

    Parameters
    ----------
    policy, dashboard_url
        Rules and settings to judge by, and the address that messages link to.
    console
        True to write messages also for the channel ``console``.
    on_outcome
        Called with the outcome of each batch, in order.

    Raises
    ------
    RunLockedError
        If another process writes this run.
    """

    def __init__(
        self,
        store: Store,
        info: RunInfo,
        *,
        policy: AlertingConfig | None = None,
        dashboard_url: str = "",
        on_outcome: Callable[[MonitorOutcome], None],
        clock: Clock | None = None,
        console: bool = False,
    ) -> None:
        self.records = 0
        self._store = store
        self._info = info
        self._policy = policy or AlertingConfig()
        self._dispatcher = Dispatcher(
            store, self._policy, dashboard_url=dashboard_url, clock=clock or SystemClock(), console=console
        )
        self._on_outcome = on_outcome
        self._clock = clock or SystemClock()
        self._log_attempt: int | None = None
        self._beat_due = 0.0
        self._begin()

    @property
    def run(self) -> RunInfo:
        """Description of the recorded run in the store, with its present attempt."""
        return self.writer.run

    @property
    def kept(self) -> tuple[tuple[Notification, str], ...]:
        """Alert messages that were due at the last check but not sent, each with the reason."""
        return self._dispatcher.decision.held_back

    def take(self, records: Sequence[StepRecord]) -> None:
        """Store and judge the next ``records`` of the log."""
        fresh = [record for record in records if record.seq > self.writer.last_seq]
        for attempt, group in groupby(fresh, key=lambda record: record.attempt):
            if self._log_attempt not in (None, attempt):
                self._let_go()
                self._begin()
            self._log_attempt = attempt
            derived = self._layers.added(group)
            batch = [replace(record, attempt=self.writer.run.attempt) for record in derived]
            self.writer.write(batch)
            self._judging.take(batch)
            self.records += len(batch)

    def tick(self) -> None:
        """Send the run's heartbeat if it is due, and retry writes that a busy store refused."""
        self._judging.tick()
        if self._clock.monotonic() >= self._beat_due:
            self._beat_due = self._clock.monotonic() + HEARTBEAT_S
            self.writer.heartbeat(self._clock.now())

    def finish(self, reason: str) -> None:
        """Judge the last step, and end the run in the store with ``reason``."""
        self._judging.close()
        self.writer.finish(RunState.FINISHED, reason, self._clock.now())
        self.writer.close()

    def _begin(self) -> None:
        self.writer: RunWriter = self._store.open_run(self._info)
        self._layers = DerivedLayers()
        run = self.writer.run
        monitor = Monitor(
            run_id=run.run_id,
            source=run.source,
            rules=self._policy.rules,
            forecaster=forecaster_for(wanted=self._policy.forecast),
            history=past_of(self._store, run.run_id, lambda: monitor),
        )
        self._sink = MonitorSink(
            monitor,
            run,
            self._store,
            dispatcher=self._dispatcher,
            keep=self.writer.write,
            announce=self._on_outcome,
            clock=self._clock,
        )
        self._judging = SinkProgress(monitor, self._sink, self._store, run.run_id, judged=self._judged)
        self._judging.begin(self.writer.last_seq)
        while self._judging.stored():  # rows that an earlier watch stored but did not judge
            pass

    def _judged(self, seq: int, kept: Checkpoint | None) -> None:
        self.writer.write([], Progress(judged=seq, checkpoint=kept))

    def _let_go(self) -> None:
        self._judging.close()
        self.writer.close()


# Reading one log into a store: the existing rows, then the new ones.

MOST = 500
"""Most records read at a time, so that Ctrl-C is handled in between and memory does not grow with the log."""
SAVE_S = 30.0
QUIET_S = 30.0
"""Seconds without a write to a log after which its unfinished last row is read as it is."""


class LogWatch:
    """Reads a growing log piece by piece, and records it as a run.

    ``run_ids`` are the runs recorded so far: several for a directory with the event files of several trainings.

    Parameters
    ----------
    start
        Begins the recording, once the format of the log is known.
    tail
        Source of the records, if not the file at the log's path.
    beside
        Returns additional metrics, which are added to the newest row that is read live.
    """

    def __init__(
        self,
        log: NamedLog,
        positions: Positions,
        start: Callable[[Tail], LogRecording],
        *,
        tail: Tail | None = None,
        clock: Clock | None = None,
        beside: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.log = log
        self._extra_metrics = beside
        self._place = log.id_of()
        """Name under which the position is stored."""
        self.recording: LogRecording | None = None
        self.names: set[str] = set()
        """Names of the metrics in the rows taken so far."""
        self._positions, self._start, self._clock = positions, start, clock or SystemClock()
        position, last_seq = positions.load(self._place)
        if position is not None and log.path.is_dir():
            last_seq = positions.load(log.id_of(trainings_until(log.path, position.file)[0]))[1]
        self.tail: Tail = tail or LogTail(
            log.path, run=log.run, format=log.read_as, position=position, last_seq=last_seq, naming=log.naming or NONE
        )
        self._training = self.tail.training
        self._done = 0
        self.run_ids: dict[str, None] = {}
        self.is_new = position is None and last_seq == 0
        self._saved = position
        self._save_due = 0.0
        self._caught_up = False

    @property
    def run_id(self) -> str:
        """Id of the run that is being recorded."""
        return self.log.id_of(self._training)

    @property
    def records(self) -> int:
        """Number of records written to the store so far."""
        return self._done + (self.recording.records if self.recording else 0)

    @property
    def behind(self) -> bool:
        """True if the log has more rows to read at once."""
        return self.tail.behind

    @property
    def left_out(self) -> str:
        """Reasons that parts of the log could not be used, with their counts; empty if all could."""
        return "; ".join(f"{skipped.count:,} x {skipped.reason}" for skipped in self.tail.skipped)

    @property
    def why_nothing(self) -> str:
        """Reason that no row of the log has been recorded so far."""
        if self.tail.problem:
            return self.tail.problem
        left_out = self.left_out
        return f"holds no metrics of any step, read as {self.tail.format}{f'; skipped: {left_out}' if left_out else ''}"

    def look(self) -> int:
        """Read and record the next rows of the log; return their number."""
        records = self.tail.poll(MOST)
        if self._caught_up and records:
            newest = records[-1]
            records = [*records[:-1], replace(newest, metrics={**self._extra_metrics(), **newest.metrics})]
        self._take(_stamped(records, self._clock.now() if self._caught_up else 0.0))
        self._caught_up = self._caught_up or not self.tail.behind
        if self.recording is not None:
            self.recording.tick()
        return len(records)

    def end(self, reason: str, *, whole: bool = False) -> None:
        """Stop reading the log, and end its run with ``reason``.

        ``whole``: also read the unfinished last row, even if it may still be written.
        """
        if self.recording is None and not whole:
            self.tail.release()
            return
        try:
            if whole or self._quiet():
                self._take(_stamped(self.tail.close(), 0.0))
            self._save(self.tail.position)
        finally:
            self.abandon(reason)

    def abandon(self, reason: str) -> None:
        """End the run with ``reason`` without reading the log again."""
        self.tail.release()
        if self.recording is not None:
            self.recording.finish(reason)

    def _take(self, records: Sequence[StepRecord]) -> None:
        if records:
            if not self.tail.turned:
                self._note(self.tail.position)
            if self.tail.training != self._training:
                self.abandon("another training begins in its directory")
                self._done, self._training, self.recording = self.records, self.tail.training, None
            self.recording = self.recording or self._start(self.tail)
            self.run_ids[self.run_id] = None
            self.recording.take(records)
            self.names.update(*(record.metrics for record in records))
        if records or self._clock.monotonic() >= self._save_due:
            self._note(self.tail.position)

    def _note(self, position: Position | None) -> None:
        """Store the position: in a new file at once, else at intervals."""
        if position is None or position == self._saved:
            return
        new = self._saved is None or (position.file, position.base) != (self._saved.file, self._saved.base)
        if new or self._clock.monotonic() >= self._save_due:
            self._save(position)

    def _save(self, position: Position | None) -> None:
        if position is not None:
            self._positions.save(self._place, position)
            self._saved = position
            self._save_due = self._clock.monotonic() + SAVE_S

    def _quiet(self) -> bool:
        """Return whether the log has not been written to for :data:`QUIET_S` seconds."""
        try:
            return self._clock.now() - self.tail.modified >= QUIET_S
        except OSError:  # the log is gone
            return True


def _stamped(records: Sequence[StepRecord], now: float) -> list[StepRecord]:
    """Set the time of rows without one to ``now``, which is 0 (unknown) for rows written before the watch."""
    return [record if record.ts else replace(record, ts=now) for record in records]


# ``rlwatch watch`` of a log: read the existing rows, then the new ones.


def scan_once(log: NamedLog, store_url: str | None, config: Path | None, tail: Tail | None = None) -> int:
    """Record and judge a log as it is now, send alert messages, and return 1 if it caused a critical alert, else 0.

    ``store_url`` and ``config`` are the store and the configuration file; ``tail`` reads the records, if not the file.
    """
    with opened(store_url) as store:
        alerting = alerting_of(config, store)
        watch = watch_of(log, store, alerting, tail=tail)
        if tail is None and watch.is_new:
            runs = read_log(log.path, run=log.run, format=log.read_as, naming=log.naming or NONE)
            if not log.path.is_dir():  # each training in a directory is a run
                _only(runs, log)  # raises if it cannot be watched
        while watch.look() or watch.behind:
            pass
        if watch.tail.problem and not watch.records:
            raise ImportFormatError(str(log.path), watch.tail.problem)
        if watch.left_out:
            print_text(f"skipped: {watch.left_out}", style="dim")
        watch.end("end of the log reached", whole=True)
        delivered = deliver_once(store, alerting)
        for run_id in watch.run_ids:
            print_forecast(store.forecasts(run_id))
        print_names(watch.names, log.trainer or watch.tail.source)
        code = int(any(ever_critical(store, run_id) for run_id in watch.run_ids or (watch.run_id,)))
    several = len(watch.run_ids) > 1
    named = f"runs {', '.join(watch.run_ids)}" if several else f"run {watch.run_id}"
    print_text(f"{named}: {watch.records} new records{f'; alerts {delivered}' if delivered else ''}")
    return code


def follow(
    log: NamedLog,
    store_url: str | None,
    config: Path | None,
    pause: Callable[[], None],
    clock: Clock | None = None,
    *,
    tail: Tail | None = None,
    beside: Callable[[], Mapping[str, float]] = dict,
) -> None:
    """Record and judge a log as it grows, until ``pause`` raises ``KeyboardInterrupt``.

    Ctrl-C is handled only between two reads, so that it never interrupts one.

    Parameters
    ----------
    log, store_url, config
        The log, the store to record it in, and the configuration file.
    pause
        Waits between two reads.
    clock
        Source of the time; None: the system's.
    tail
        Source of the records, if not the file at the log's path.
    beside
        Returns additional metrics for the newest row.
    """
    with opened(store_url) as store:
        alerting = alerting_of(config, store)
        with delivering(store, alerting):
            watch = watch_of(log, store, alerting, clock=clock, tail=tail, beside=beside)
            print_text(f"watching {log.path}; stop with Ctrl-C", style="dim")
            try:
                with backlog(watch.tail) as shown:
                    catch_up(watch, shown)
                print_names(watch.names, log.trainer or watch.tail.source)
                problem = ""
                while True:
                    problem = report_problem(watch, problem)
                    pause()
                    catch_up(watch)
            except KeyboardInterrupt:
                print_text("stopped", style="dim")
            finally:
                with unbroken():
                    watch.end("watch ended")


def catch_up(watch: LogWatch, shown: Callable[[], None] = lambda: None) -> None:
    """Read and record all existing rows of the log in batches; after each, handle Ctrl-C and call ``shown``."""
    while True:
        known = set(watch.run_ids)
        with unbroken():
            watch.look()
        if watch.recording is not None and watch.run_id not in known:
            print_text(f"run {watch.run_id} ({watch.tail.format})", style="dim")
        shown()
        if not watch.behind:
            return


def report_problem(watch: LogWatch, reported: str) -> str:
    """Return the reason that the log cannot be read now ("" if it can), and print it on stderr unless it equals
    ``reported``.
    """
    problem = watch.tail.problem
    if problem and problem != reported:
        warn(f"waiting: {one_line(problem, 300)}")
    return problem


def watch_of(
    log: NamedLog,
    store: Store,
    alerting: Alerting,
    *,
    clock: Clock | None = None,
    tail: Tail | None = None,
    prefix: str = "",
    beside: Callable[[], Mapping[str, float]] = dict,
) -> LogWatch:
    """Return a watch that records a log into ``store`` and judges it by ``alerting``; ``prefix`` starts printed lines.

    ``tail`` reads the records, if not the file of ``log``; ``beside`` returns additional metrics for the newest row.
    """

    def start(tail: Tail) -> LogRecording:
        return _recording(log, tail, store, alerting, prefix=prefix)

    return LogWatch(log, Positions(store), start, tail=tail, clock=clock, beside=beside)


def ever_critical(store: Store, run_id: str) -> bool:
    """Return whether a critical alert of the run ever fired."""
    return any(
        alert.severity is Severity.CRITICAL and alert.state is not AlertState.PENDING for alert in store.alerts(run_id)
    )


def _recording(log: NamedLog, tail: Tail, store: Store, alerting: Alerting, *, prefix: str = "") -> LogRecording:
    info = log.info(tail.name, tail.source, time.time(), tail.about, tail.training)
    if holds(store, info.run_id):
        info = replace(info, name=log.name and info.name)  # without a new name it keeps its present one
    return LogRecording(
        store,
        info,
        policy=alerting.policy,
        dashboard_url=alerting.dashboard_url,
        on_outcome=partial(print_outcome, prefix=prefix),
    )


def _only(runs: list[ImportedRun], log: NamedLog) -> ImportedRun:
    if len(runs) != 1:
        names = ", ".join(repr(run.name) for run in runs[:10])
        raise ImportFormatError(str(log.path), f"holds {len(runs)} runs; choose one with --run: {names}")
    return runs[0]
