"""Judge the rows of a run: live, from a log that is imported, or those that a dead process left unjudged.

To judge means to run detectors, the forecaster and alert rules over the rows. Rows that are not judged yet are read
from the store, in order of ``seq``; a live judge that keeps up (:mod:`rlwatch.recorder.judge_thread`) receives the rows
directly. A :class:`MonitorSink` stores the findings and forecasts of the Monitor and queues its alerts. The position of
the judge, and from time to time its whole state (:mod:`rlwatch.monitor.checkpoint`), are stored with the run, so that
the next attempt or ``rlwatch watch`` continues from there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import groupby

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.engine import DecisionReason, Transition
from rlwatch.alerts.rules import HEARTBEAT_KINDS, AlertingConfig
from rlwatch.clock import Clock, SystemClock
from rlwatch.control.policy import RunHealth
from rlwatch.error_boundary import call_or, described
from rlwatch.errors import StoreBusyError, StoreError
from rlwatch.monitor import checkpoint
from rlwatch.monitor.engine import Monitor
from rlwatch.monitor.forecasting import forecaster_for
from rlwatch.monitor.step_judge import MonitorOutcome, joined
from rlwatch.ports import Checkpoint, History, Item, Progress, Storable, Store
from rlwatch.recorder.judge_thread import Interrupted
from rlwatch.records import (
    FORECAST_SWITCH,
    ORIGIN,
    Alert,
    AlertState,
    CompletionBatch,
    Event,
    Finding,
    RunInfo,
    Severity,
    SpikeBatch,
    StepRecord,
)
from rlwatch.view import judged_at_import

_STATES = (AlertState.PENDING, AlertState.FIRING, AlertState.RESOLVED)


class StoredFindings:
    """Findings, forecasts and alerts of a run that the store held when a process began to judge it."""

    def __init__(self, store: Store, run_id: str) -> None:
        stored = (*store.findings(run_id), *store.recoveries(run_id))
        self._findings = {_identity(finding) for finding in stored}
        self._forecast = max((record.seq for record in store.forecasts(run_id, last=1)), default=0)
        self._alerts = {alert.alert_id: _progress(alert) for alert in store.alerts(run_id)}
        self._judged, _ = store.judged(run_id)

    def without_stored(self, outcome: MonitorOutcome) -> MonitorOutcome:
        """Return the outcome without the findings, forecasts and alert states that the store already holds."""
        findings, recoveries = (
            tuple(finding for finding in found if _identity(finding) not in self._findings)
            for found in (outcome.findings, outcome.recoveries)
        )
        transitions = tuple(transition for transition in outcome.transitions if self._is_news(transition))
        kept = tuple(record for record in outcome.kept if record.seq > self._forecast)
        self._findings.update(map(_identity, (*findings, *recoveries)))  # unjudged rows may be replayed once more
        self._alerts.update({each.alert.alert_id: _progress(each.alert) for each in transitions})
        self._forecast = max([self._forecast, *(record.seq for record in kept)])
        return MonitorOutcome(findings, transitions, outcome.forecasts, kept, recoveries)

    def _is_news(self, transition: Transition) -> bool:
        """Return whether the alert change is new: not stored yet, nor a change of severity at rows judged before."""
        state, rank = _progress(transition.alert)
        stored = self._alerts.get(transition.alert.alert_id)
        if stored is None or state != stored[0]:
            return stored is None or state > stored[0]
        changed = rank < stored[1] if transition.reason is DecisionReason.EASED else rank > stored[1]
        return changed and transition.seq > self._judged


def _identity(finding: Finding) -> tuple[object, ...]:
    return (finding.seq, finding.detector, finding.kind, finding.severity, finding.stage)


def _progress(alert: Alert) -> tuple[int, int]:
    return (_STATES.index(alert.state), alert.severity.rank)


logger = logging.getLogger("rlwatch")
LOOK_S = 10.0
"""Seconds between checks for messages that become due by time alone: repeats, escalations, the end of quiet hours."""
OUTCOMES_AT_ONCE = 256
"""Number of outcomes that are stored together: a replayed history has one for each of its rows."""


class AlertQueue:
    """Queue of a run's alerts to store, in order: those that the store cannot take now are kept and stored later.

    Parameters
    ----------
    run_id
        Id of the run.
    dispatcher
        Takes alerts and writes due messages about them to the outbox.
    wake
        Called when messages were queued; None: nothing is called.
    clock
        Clock for the times at which due messages are looked for.
    looks
        Whether the run may have open alerts from before this queue was made, so that due messages must be looked for.
    """

    def __init__(
        self, run_id: str, dispatcher: Dispatcher, wake: Callable[[], None] | None, clock: Clock, *, looks: bool
    ) -> None:
        self.holding = False
        """Whether alerts are kept back until :meth:`release`."""
        self._run_id = run_id
        self._dispatcher = dispatcher
        self._wake = wake
        self._clock = clock
        self._steps: deque[list[Alert]] = deque()
        self._alerted = looks
        self._look_at = 0.0
        self._refused = False

    @property
    def empty(self) -> bool:
        """True once all alerts are stored."""
        return not self._steps

    def add(self, alerts: list[Alert]) -> None:
        """Queue the alerts of one step."""
        self._steps.append(alerts)

    def waiting_ids(self) -> set[str]:
        """Return the ids of the alerts that are not stored yet."""
        return {alert.alert_id for alerts in self._steps for alert in alerts}

    def release(self) -> None:
        """Store the alerts that were kept back while ``holding`` was True."""
        self.holding = False
        self.put_down()

    def put_down(self) -> None:
        """Store the queued alerts step by step, so that an alert that fired and ended within a batch is reported as
        both.
        """
        written = 0
        try:
            while self._steps and not self.holding:
                self._alerted = True
                written += len(self._dispatcher.publish(self._run_id, self._steps[0]))
                self._steps.popleft()
            self._refused = False
        except StoreError as error:
            self._later(error)
        if written and self._wake is not None:
            self._wake()

    def look_if_due(self, *, firing: bool) -> None:
        """Publish, at intervals, the messages that are due by time alone; ``firing``: whether an alert fires now."""
        waiting = self._alerted and not self.holding and (firing or self._dispatcher.decision.held_back)
        if waiting and self._clock.monotonic() >= self._look_at:
            self._look_at = self._clock.monotonic() + LOOK_S
            self._look()

    def close(self) -> None:
        """Publish the alerts that waited to be grouped with others: no more will come."""
        if self._alerted and not self.holding:
            self._look(final=True)

    def _look(self, *, final: bool = False) -> None:
        """Publish messages that are due by time; if the store refuses, the next check or another
        process writes them.
        """
        try:
            if self._dispatcher.publish(self._run_id, final=final) and self._wake is not None:
                self._wake()
        except StoreError as error:
            self._later(error)

    def _later(self, error: StoreError) -> None:
        """Keep the alerts for later; log a full or broken store once, a busy one never."""
        if not isinstance(error, StoreBusyError) and not self._refused:
            self._refused = True
            logger.warning("alerts cannot be written now and are kept, in order, until they can: %s", error)


class MonitorSink:
    """Feeds the Monitor with a run's rows, stores findings and forecasts, passes alerts on, and publishes the run's
    health.

    Sending messages is not its work: the dispatcher only inserts outbox rows. Alerts that the store cannot take are
    kept in order and stored at a later tick. A resumed run replays its history; what the store already holds is not
    published again.

    Parameters
    ----------
    monitor
        Judges the rows.
    run
        Description of the run when its attempt (process) began.
    store
        Store of the run.
    dispatcher
        Takes alerts and writes due messages about them to the outbox.
    keep
        Stores findings and forecasts.
    publish
        Called with the run's new health after every batch; must be quick and not raise.
    announce
        Called with findings and alerts, for this process's own log.
    wake
        Called when messages were queued.
    clock
        Clock; None: the machine's.
    amends
        Whether rows of an attempt that is over are judged; findings stored for it are not published again.
    enough
        Called between rows; judging stops with :class:`Interrupted` once it returns True.
    """

    def __init__(
        self,
        monitor: Monitor,
        run: RunInfo,
        store: Store,
        *,
        dispatcher: Dispatcher,
        keep: Callable[[Sequence[Storable]], object],
        publish: Callable[[RunHealth], None] | None = None,
        announce: Callable[[MonitorOutcome], None] | None = None,
        wake: Callable[[], None] | None = None,
        clock: Clock | None = None,
        amends: bool = False,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        self._monitor = monitor
        self.seq = 0
        """``seq`` of the last item taken, whether or not it was judged."""
        self._run = run
        self._store = store
        self._keep_found = keep
        self._publish = publish
        self._announce = announce
        self._enough = enough
        self._relives = amends or self._run.attempt > 1
        self.alerts = AlertQueue(run.run_id, dispatcher, wake, clock or SystemClock(), looks=self._relives)
        self._stored: StoredFindings | None = None
        self._abandoned_retired = amends or self._run.attempt == 1

    @property
    def settled(self) -> bool:
        """True once all alerts are stored."""
        return self.alerts.empty

    def write(self, batch: Sequence[Item]) -> None:
        """Judge a batch of rows and events. Raises ``Interrupted`` if the judge is asked to stop."""
        outcomes: list[MonitorOutcome] = []
        try:
            self._observe(batch, outcomes)
        finally:
            self._keep(joined(outcomes))
        if not self._abandoned_retired and any(item.attempt == self._run.attempt for item in batch):
            self._abandoned_retired = True
            self._keep(MonitorOutcome(transitions=tuple(self._abandoned(batch))))
        if self._publish is not None:
            self._publish(self._monitor.health())
        self.tick()

    def _taken(self, batch: Sequence[Item]) -> Iterator[StepRecord | Event]:
        for item in batch:
            if not isinstance(item, SpikeBatch | CompletionBatch):
                self.seq = item.seq
                yield item

    def _observe(self, batch: Sequence[Item], outcomes: list[MonitorOutcome]) -> None:
        """Judge the items as a batch: the outcomes are the same, and a forecast takes a sixth of the time."""
        with closing(self._monitor.observing_all(self._taken(batch))) as observing:
            for outcome in observing:
                outcomes.append(outcome)
                if len(outcomes) >= OUTCOMES_AT_ONCE:
                    some = joined(outcomes)
                    outcomes.clear()
                    self._keep(some)
                if self._enough():
                    raise Interrupted

    def tick(self) -> None:
        """Store alerts that are still waiting; at intervals, publish the messages that are due by time alone."""
        self.alerts.put_down()
        self.alerts.look_if_due(firing=bool(self._monitor.firing))

    def end_attempt(self) -> None:
        """Judge the last step of an attempt (process of the run) that is over."""
        self._keep(self._monitor.close())
        self.alerts.put_down()

    def close(self) -> None:
        """Judge the last step and store its outcome, without waiting for alerts to group with."""
        self.end_attempt()
        self.alerts.close()

    def _keep(self, outcome: MonitorOutcome) -> None:
        if self._relives:
            if self._stored is None:
                self._stored = StoredFindings(self._store, self._run.run_id)
            outcome = self._stored.without_stored(outcome)
        for _, transitions in groupby(outcome.transitions, key=lambda transition: transition.alert.step):
            self.alerts.add([transition.alert for transition in transitions])
        found = [*outcome.findings, *outcome.recoveries]
        if found or outcome.kept:
            self._keep_found([*found, *outcome.kept])
        if self._announce is not None and (found or outcome.transitions):
            self._announce(outcome)

    def _abandoned(self, batch: Sequence[Item]) -> list[Transition]:
        """Resolve the alerts whose onset lies after the step from which this attempt resumed.

        At the first new step, also resolve the alert that the run was gone.
        """
        ts, step = batch[-1].ts, max((item.step for item in batch if isinstance(item, StepRecord)), default=None)
        known = self._monitor.open_alerts() | self.alerts.waiting_ids()
        rules = {rule.name: rule for rule in self._monitor.rules}
        return [
            Transition(
                replace(
                    alert,
                    state=AlertState.RESOLVED,
                    reason=self._why_over(alert),
                    resolved_step=step if alert.kind in HEARTBEAT_KINDS else None,
                ),
                DecisionReason.RESOLVED,
                rules[alert.rule],
                ts,
            )
            for alert in self._store.alerts(self._run.run_id)
            if alert.state is not AlertState.RESOLVED and alert.alert_id not in known and alert.rule in rules
        ]

    def _why_over(self, alert: Alert) -> str:
        attempt = f"attempt {self._run.attempt}"
        return f"{attempt} reports" if alert.kind in HEARTBEAT_KINDS else f"{attempt} resumed from before it"


ROWS_AT_ONCE = 256
"""Number of rows that are read from the store at a time; judging can be stopped in between."""
CHECKPOINT_S, CHECKPOINT_ROWS, CHECKPOINT_SHARE = 60.0, 500, 0.01
"""A checkpoint is made after so many seconds or rows, and takes at most this share of the judge's time."""


def past_of(store: Store, run_id: str, monitor: Callable[[], Monitor]) -> History:
    """Return a function that yields the rows that an attempt (process of a run) continues.

    It loads the newest checkpoint of the monitor and yields the rows after it; without one, it yields all rows.
    ``monitor`` returns the fresh monitor into which the checkpoint's state is loaded.
    """

    def history(attempt: int, before_step: int) -> Iterator[StepRecord | Event]:
        after = 0
        by = checkpoint.made_by(monitor())
        if by:
            bounds = store.branch_bounds(run_id, attempt, before_step)
            kept = store.checkpoint(run_id, by, lambda _, of, step: step < bounds.get(of, -1))
            if kept is not None and checkpoint.opened(kept, monitor()):
                after = kept.seq
        yield from store.branch(run_id, attempt, before_step, after_seq=after)

    return history


def judge_rest(
    store: Store,
    run_id: str,
    policy: AlertingConfig,
    dispatcher: Dispatcher,
    announce: Callable[[MonitorOutcome], None] | None = None,
) -> bool:
    """Judge the rows that a dead process of a run left unjudged, and publish the outcome; return whether there were
    any.

    Does nothing while another process writes the run. The run's lock is held only to write, so that a new attempt need
    not wait: one that begins meanwhile judges the rows itself. A log that was judged when it was imported is only
    marked as judged: its alerts are of the past.

    Parameters
    ----------
    store, run_id
        The store, and the id of the run in it.
    policy
        Alert rules and their settings.
    dispatcher
        Takes alerts and writes due messages about them to the outbox.
    announce
        Called with findings and alerts; None: nothing is called.
    """
    done, last = store.judged(run_id)
    if done >= last or not _is_left(store, run_id):
        return False
    run, found = store.run(run_id), list[Storable]()
    if done == 0 and judged_at_import(store, run):
        _note_judged(store, run_id, last)
        return False
    monitor = Monitor(
        run_id=run_id,
        source=run.source,
        rules=policy.rules,
        forecaster=forecaster_for(wanted=policy.forecast and not without_forecasts(run)),
        history=past_of(store, run_id, lambda: monitor),
    )
    sink = MonitorSink(monitor, run, store, dispatcher=dispatcher, keep=found.extend, announce=announce, amends=True)
    sink.alerts.holding = True
    judging = SinkProgress(monitor, sink, store, run_id, judged=lambda *_: None)
    judging.begin(last)
    while judging.stored():
        pass
    judging.close()
    writer = store.amend_run(run_id)
    if writer is None:
        return False
    with closing(writer):
        writer.write(found)
        sink.alerts.release()
        if not sink.settled:
            return False  # the next look judges the same rows again
        writer.write([], Progress(judged=judging.seq))
    return True


def _note_judged(store: Store, run_id: str, seq: int) -> None:
    """Store that a run is judged up to the position ``seq``, unless another process writes it."""
    writer = store.amend_run(run_id)
    if writer is not None:
        with closing(writer):
            writer.write([], Progress(judged=seq))


def without_forecasts(run: RunInfo) -> bool:
    """Return whether the run was started with ``forecast=False``."""
    origin = run.config.get(ORIGIN)
    return isinstance(origin, Mapping) and origin.get(FORECAST_SWITCH) is False


def _is_left(store: Store, run_id: str) -> bool:
    """Return whether no process writes the run and this one may."""
    writer = store.amend_run(run_id)
    if writer is not None:
        writer.close()
    return writer is not None


class SinkProgress:
    """Judges the rows of a run through a sink, and keeps track of the position up to which they are judged.

    Parameters
    ----------
    monitor, sink
        The monitor, and the sink that feeds it.
    store, run_id
        The store, and the id of the run in it.
    judged
        Called with the position ``seq`` up to which everything is judged and written, and perhaps a checkpoint.
    checkpoint_share
        Largest share of the judge's time that making checkpoints may take, > 0.
    """

    def __init__(
        self,
        monitor: Monitor,
        sink: MonitorSink,
        store: Store,
        run_id: str,
        *,
        judged: Callable[[int, Checkpoint | None], None],
        checkpoint_share: float = CHECKPOINT_SHARE,
    ) -> None:
        self._checkpoint_share = checkpoint_share
        self.seq = 0
        """``seq`` of the last item taken."""
        self._monitor, self._sink, self._store, self._run_id = monitor, sink, store, run_id
        self._judged = judged
        self._attempt = 0
        self._noted_seq = -1
        self._highest = -1
        self._by: str | None = None
        self._kept_at, self._kept_seq, self._cost_s = time.monotonic(), 0, 0.0

    @property
    def settled(self) -> bool:
        """True once all alerts are stored."""
        return self._sink.settled

    @property
    def calm(self) -> bool:
        """True while no finding holds that is more than a remark, so that rows may wait for others."""
        return all(finding.severity is Severity.INFO for finding in self._monitor.active)

    def begin(self, up_to: int) -> None:
        """Set the position to ``up_to``, the run's last ``seq``, or, if rows are unjudged, to where judging must
        resume.
        """
        done, last = self._store.judged(self._run_id)
        self.seq = self._kept_seq = up_to
        if done >= min(last, up_to):
            return
        first = self._store.stream(self._run_id, after_seq=done, limit=1)
        if not first:
            return
        of = self._attempt = first[0].attempt
        self.seq = self._store.first_seq(self._run_id, of) - 1
        by = checkpoint.made_by(self._monitor)
        kept = (
            self._store.checkpoint(self._run_id, by, lambda seq, attempt, _: seq <= done and attempt == of)
            if by
            else None
        )
        if kept is not None and checkpoint.opened(kept, self._monitor):
            self.seq, self._highest = kept.seq, kept.step
        self._kept_seq = self.seq

    def stored(self) -> bool:
        """Judge the next rows of the store; return whether there were any."""
        rows = self._store.stream(self._run_id, after_seq=self.seq, limit=ROWS_AT_ONCE)
        if rows:
            self.take(rows)
        return bool(rows)

    def take(self, rows: Sequence[StepRecord | Event]) -> None:
        """Judge a batch of rows and events, and note the position. Raises ``Interrupted`` if the judge is asked to
        stop.
        """
        for attempt in dict.fromkeys(row.attempt for row in rows):
            if self._attempt not in (0, attempt):
                self._sink.end_attempt()
                self._highest = -1
            self._attempt = attempt
            of_it = [row for row in rows if row.attempt == attempt]
            self._highest = max([self._highest, *(row.step for row in of_it if row.step is not None)])
            try:
                self._sink.write(of_it)
            finally:
                self.seq = max(self.seq, self._sink.seq)
        self.note()

    def tick(self) -> None:
        """Publish the messages that are due by time alone, and retry writes that failed before."""
        self._sink.tick()
        self.note()

    def note(self) -> None:
        """Report the position up to which rows are judged, if all outcomes so far are stored."""
        if not self._sink.settled:
            return
        since = self._monitor.open_since
        upto = self.seq if since is None else since - 1
        kept = self._checkpoint()
        if kept is not None or upto != self._noted_seq:
            self._noted_seq = upto
            self._judged(upto, kept)

    def close(self) -> None:
        """Judge the last step, because no further row will come, and report the position."""
        self._sink.close()
        if self._sink.settled:
            self._judged(self.seq, None)

    def _checkpoint(self) -> Checkpoint | None:
        now, rows = time.monotonic(), self.seq - self._kept_seq
        since = now - self._kept_at
        due = rows > 0 and (since >= CHECKPOINT_S or rows >= CHECKPOINT_ROWS)
        if not due or since < self._cost_s / self._checkpoint_share or self._monitor.waits:
            return None
        if self._by is None:
            self._by = checkpoint.made_by(self._monitor)
        self._kept_at, self._kept_seq = now, self.seq
        if not self._by:
            return None
        kept = call_or(partial(self._sealed, self._by), self._not_kept)
        if kept is not None:
            self._cost_s = time.monotonic() - now
        return kept

    def _sealed(self, by: str) -> Checkpoint:
        return checkpoint.sealed(self._monitor, by, seq=self.seq, attempt=self._attempt, step=self._highest)

    def _not_kept(self, error: Exception) -> None:
        """Give up making checkpoints after ``error``: a resume replays the rows instead."""
        self._by = ""
        logger.debug("what the judge knows cannot be kept: %s", described(error))
