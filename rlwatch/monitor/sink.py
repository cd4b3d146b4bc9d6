"""The Monitor beside a store: what it says of a run's rows is stored, put down as alerts and told.

One class for all who judge stored rows: a live run's judge (:mod:`rlwatch.monitor.judge`), a log on its way into a
store, and whoever finds that a dead process left rows unjudged.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.engine import Reason, Transition
from rlwatch.alerts.rules import HEARTBEAT_KINDS
from rlwatch.clock import Clock, SystemClock
from rlwatch.control.policy import Health
from rlwatch.errors import StoreBusyError, StoreError
from rlwatch.monitor.engine import Monitor, Outcome, joined
from rlwatch.monitor.news import Told
from rlwatch.ports import Item, Storable, Store
from rlwatch.recorder.judge import Interrupted
from rlwatch.records import Alert, AlertState, CompletionBatch, Event, RunInfo, SpikeBatch, StepRecord

logger = logging.getLogger("rlwatch")
LOOK_S = 10.0
"""Seconds between looks at what has become due by time alone: repeats, escalations, the end of quiet hours."""
AT_ONCE = 256
"""Outcomes that are put down together: a relived history has one for each of its rows."""


class MonitorSink:
    """Feeds the Monitor, stores findings and forecasts, hands alerts to the dispatcher, and publishes the run's health.

    Delivery is not its work: the dispatcher only inserts outbox rows. Alerts that the store cannot take are kept in
    order and put down at a later tick. A resumed run relives its history; what the store holds of that already is not
    published again.

    Parameters
    ----------
    run
        As its attempt began.
    dispatcher
        Takes alerts and writes what is due of them to the outbox.
    keep
        Stores findings and forecasts.
    publish
        Called with the run's new health after every batch; must be quick and not raise.
    announce
        Called with what was found, for this process's own log.
    wake
        Called when messages were queued.
    amends
        Whether rows of an attempt that is over are judged: what is stored of that is not said again.
    enough
        Asked between rows; judging stops with :class:`Interrupted` once it says yes.
    """

    def __init__(
        self,
        monitor: Monitor,
        run: RunInfo,
        store: Store,
        *,
        dispatcher: Dispatcher,
        keep: Callable[[Sequence[Storable]], object],
        publish: Callable[[Health], None] | None = None,
        announce: Callable[[Outcome], None] | None = None,
        wake: Callable[[], None] | None = None,
        clock: Clock | None = None,
        amends: bool = False,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        self._monitor = monitor
        self.seq = 0
        """Of the last item that was taken, whatever came of it."""
        self.holding = False
        """Whether alerts are kept back until :meth:`release`."""
        self._run = run
        self._store = store
        self._dispatcher = dispatcher
        self._keep_found = keep
        self._publish = publish
        self._announce = announce
        self._wake = wake
        self._clock = clock or SystemClock()
        self._enough = enough
        self._steps: deque[list[Alert]] = deque()
        self._relives = amends or self._run.attempt > 1
        self._alerted = self._relives
        self._look_at = 0.0
        self._told: Told | None = None
        self._abandoned_retired = amends or self._run.attempt == 1
        self._refused = False

    @property
    def settled(self) -> bool:
        """Whether everything that was found is written."""
        return not self._steps

    def write(self, batch: Sequence[Item]) -> None:
        """Judge the batch, item by item. Raises ``Interrupted``."""
        outcomes: list[Outcome] = []
        try:
            for item in batch:
                if not isinstance(item, SpikeBatch | CompletionBatch):
                    self.seq = item.seq
                    self._observe(item, outcomes)
        finally:
            self._keep(joined(outcomes))
        if not self._abandoned_retired and any(item.attempt == self._run.attempt for item in batch):
            self._abandoned_retired = True
            self._keep(Outcome(transitions=tuple(self._abandoned(batch))))
        if self._publish is not None:
            self._publish(Health(self._monitor.active, self._monitor.firing, self._monitor.forecast))
        self.tick()

    def _observe(self, item: StepRecord | Event, outcomes: list[Outcome]) -> None:
        with closing(self._monitor.observing(item)) as observing:
            for outcome in observing:
                outcomes.append(outcome)
                if len(outcomes) >= AT_ONCE:
                    some = joined(outcomes)
                    outcomes.clear()
                    self._keep(some)
                if self._enough():
                    raise Interrupted

    def release(self) -> None:
        """Put down what was found while ``holding``."""
        self.holding = False
        self._put_down()

    def tick(self) -> None:
        """Put down alerts that are still waiting; now and then, look what time alone has made due."""
        self._put_down()
        waiting = self._alerted and not self.holding and (self._monitor.firing or self._dispatcher.decision.held_back)
        if waiting and self._clock.monotonic() >= self._look_at:
            self._look_at = self._clock.monotonic() + LOOK_S
            self._look()

    def end_attempt(self) -> None:
        """Judge the last step of an attempt that is over."""
        self._keep(self._monitor.close())
        self._put_down()

    def close(self) -> None:
        """Judge the last step and put down what it brought; nothing waits for others any more."""
        self.end_attempt()
        if self._alerted and not self.holding:
            self._look(final=True)

    def _put_down(self) -> None:
        """Step by step, so that what fired and was over within a batch is told as it happened."""
        written = 0
        try:
            while self._steps and not self.holding:
                self._alerted = True
                written += len(self._dispatcher.publish(self._run.run_id, self._steps[0]))
                self._steps.popleft()
            self._refused = False
        except StoreError as error:
            self._later(error)
        if written and self._wake is not None:
            self._wake()

    def _look(self, *, final: bool = False) -> None:
        """What a store refuses here is written at the next look, or by whoever watches the store."""
        try:
            if self._dispatcher.publish(self._run.run_id, final=final) and self._wake is not None:
                self._wake()
        except StoreError as error:
            self._later(error)

    def _later(self, error: StoreError) -> None:
        """A busy store is nothing to speak of; a full or broken one is, once."""
        if not isinstance(error, StoreBusyError) and not self._refused:
            self._refused = True
            logger.warning("alerts cannot be written now and are kept, in order, until they can: %s", error)

    def _keep(self, outcome: Outcome) -> None:
        if self._relives:
            if self._told is None:
                self._told = Told(self._store, self._run.run_id)
            outcome = self._told.news(outcome)
        for _, transitions in groupby(outcome.transitions, key=lambda transition: transition.alert.step):
            self._steps.append([transition.alert for transition in transitions])
        if outcome.findings or outcome.kept:
            self._keep_found([*outcome.findings, *outcome.kept])
        if self._announce is not None and (outcome.findings or outcome.transitions):
            self._announce(outcome)

    def _abandoned(self, batch: Sequence[Item]) -> list[Transition]:
        """Alerts of a branch this attempt left behind, by resuming before their onset, are over; that the run was
        gone is over at its first new step.
        """
        ts, step = batch[-1].ts, max((item.step for item in batch if isinstance(item, StepRecord)), default=None)
        known = self._monitor.open_alerts() | {alert.alert_id for alerts in self._steps for alert in alerts}
        rules = {rule.name: rule for rule in self._monitor.rules}
        return [
            Transition(
                replace(
                    alert,
                    state=AlertState.RESOLVED,
                    reason=self._why_over(alert),
                    resolved_step=step if alert.kind in HEARTBEAT_KINDS else None,
                ),
                Reason.RESOLVED,
                rules[alert.rule],
                ts,
            )
            for alert in self._store.alerts(self._run.run_id)
            if alert.state is not AlertState.RESOLVED and alert.alert_id not in known and alert.rule in rules
        ]

    def _why_over(self, alert: Alert) -> str:
        attempt = f"attempt {self._run.attempt}"
        return f"{attempt} reports" if alert.kind in HEARTBEAT_KINDS else f"{attempt} resumed from before it"
