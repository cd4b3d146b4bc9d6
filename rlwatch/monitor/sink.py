"""The Monitor inside a live run: a sink on the writer thread that stores what the Monitor says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from rlwatch.alerts.desk import Desk
from rlwatch.alerts.kinds import HEARTBEAT_KINDS
from rlwatch.alerts.transitions import Reason, Transition
from rlwatch.clock import Clock, SystemClock
from rlwatch.control.policy import Health
from rlwatch.errors import StoreBusyError
from rlwatch.monitor.engine import Monitor, Outcome, joined
from rlwatch.monitor.news import Told
from rlwatch.ports import Item, RunWriter, Store
from rlwatch.records import Alert, AlertState, CompletionBatch, SpikeBatch, StepRecord

LOOK_S = 10.0
"""Seconds between looks at what has become due by time alone: repeats, escalations, the end of quiet hours."""


class MonitorSink:
    """Feeds the Monitor, stores findings and forecasts, puts alerts on the desk, and publishes the run's health.

    Delivery is not its work: the desk only inserts outbox rows. A busy store is tried again at the next tick. A
    resumed run relives its history; what the store holds of that already is not said again.

    Parameters
    ----------
    desk
        Takes alerts and writes what is to be told of them.
    publish
        Called with the run's new health after every batch; must be quick and not raise.
    announce
        Called with what was found, for this process's own log.
    wake
        Called when messages were queued.
    """

    def __init__(
        self,
        monitor: Monitor,
        writer: RunWriter,
        store: Store,
        *,
        desk: Desk,
        publish: Callable[[Health], None] | None = None,
        announce: Callable[[Outcome], None] | None = None,
        wake: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._monitor = monitor
        self._writer = writer
        self._store = store
        self._desk = desk
        self._publish = publish
        self._announce = announce
        self._wake = wake
        self._clock = clock or SystemClock()
        self._steps: deque[list[Alert]] = deque()
        self._alerted = writer.run.attempt > 1
        self._look_at = 0.0
        self._told = Told(store, writer.run.run_id) if writer.run.attempt > 1 else None
        self._abandoned_retired = writer.run.attempt == 1

    def write(self, batch: Sequence[Item]) -> None:
        """Judge the batch, item by item."""
        items = [item for item in batch if not isinstance(item, SpikeBatch | CompletionBatch)]
        self._keep(joined([self._monitor.observe(item) for item in items]))
        if not self._abandoned_retired:
            self._abandoned_retired = True
            self._keep(Outcome(transitions=tuple(self._abandoned(batch))))
        if self._publish is not None:
            self._publish(Health(self._monitor.active, self._monitor.firing, self._monitor.forecast))
        self.tick()

    def tick(self) -> None:
        """Put down alerts that are still waiting; now and then, look what time alone has made due."""
        self._put_down()
        waiting = self._alerted and (self._monitor.firing or self._desk.kept.kept)
        if waiting and self._clock.monotonic() >= self._look_at:
            self._look_at = self._clock.monotonic() + LOOK_S
            self._look()

    def close(self) -> None:
        """Judge the last step and put down what it brought; nothing waits for others any more."""
        self._keep(self._monitor.close())
        self._put_down()
        if self._alerted:
            self._look(last_word=True)

    def _put_down(self) -> None:
        """Step by step, so that what fired and was over within a batch is told as it happened."""
        written = 0
        with suppress(StoreBusyError):
            while self._steps:
                self._alerted = True
                written += len(self._desk.tell(self._writer.run.run_id, self._steps[0]))
                self._steps.popleft()
        if written and self._wake is not None:
            self._wake()

    def _look(self, *, last_word: bool = False) -> None:
        """What a busy store refuses here is written at the next look, or by whoever watches the store."""
        with suppress(StoreBusyError):
            if self._desk.tell(self._writer.run.run_id, last_word=last_word) and self._wake is not None:
                self._wake()

    def _keep(self, outcome: Outcome) -> None:
        if self._told is not None:
            outcome = self._told.news(outcome)
        for _, transitions in groupby(outcome.transitions, key=lambda transition: transition.alert.step):
            self._steps.append([transition.alert for transition in transitions])
        if outcome.findings or outcome.kept:
            self._writer.write([*outcome.findings, *outcome.kept])
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
            for alert in self._store.alerts(self._writer.run.run_id)
            if alert.state is not AlertState.RESOLVED and alert.alert_id not in known and alert.rule in rules
        ]

    def _why_over(self, alert: Alert) -> str:
        attempt = f"attempt {self._writer.run.attempt}"
        return f"{attempt} reports" if alert.kind in HEARTBEAT_KINDS else f"{attempt} resumed from before it"
