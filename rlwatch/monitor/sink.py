"""The Monitor inside a live run: a sink on the writer thread that stores what the Monitor says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlwatch.alerts.transitions import Reason, Transition
from rlwatch.control.policy import Health
from rlwatch.errors import StoreBusyError
from rlwatch.monitor.engine import Monitor, Outcome
from rlwatch.monitor.news import Told
from rlwatch.ports import Item, RunWriter, Store
from rlwatch.records import Alert, AlertState, CompletionBatch, OutboxMessage, SpikeBatch

Compose = Callable[[Transition], Sequence[OutboxMessage]]
"""Makes the messages a transition calls for."""


class MonitorSink:
    """Feeds the Monitor, stores findings, alerts and outbox messages, and publishes the run's health.

    Delivery is not its work: it only inserts outbox rows. A busy store is tried again at the next tick. A
    resumed run relives its history; what the store holds of that already is not said again.

    Parameters
    ----------
    compose
        Makes the outbox messages of a transition.
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
        compose: Compose,
        publish: Callable[[Health], None] | None = None,
        announce: Callable[[Outcome], None] | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._monitor = monitor
        self._writer = writer
        self._store = store
        self._compose = compose
        self._publish = publish
        self._announce = announce
        self._wake = wake
        self._alerts: dict[str, Alert] = {}
        self._messages: dict[str, OutboxMessage] = {}
        self._told = Told(store, writer.run.run_id) if writer.run.attempt > 1 else None
        self._abandoned_retired = writer.run.attempt == 1

    def write(self, batch: Sequence[Item]) -> None:
        """Judge the batch, item by item."""
        outcome = Outcome()
        for item in batch:
            if not isinstance(item, SpikeBatch | CompletionBatch):
                outcome += self._monitor.observe(item)
        self._keep(outcome)
        if not self._abandoned_retired:
            self._abandoned_retired = True
            self._keep(Outcome(transitions=tuple(self._abandoned(batch[-1].ts))))
        if self._publish is not None:
            self._publish(Health(self._monitor.active, self._monitor.firing))
        self.tick()

    def tick(self) -> None:
        """Store alerts and messages that are still waiting."""
        if not self._alerts and not self._messages:
            return
        try:
            self._store.put_alerts(list(self._alerts.values()), list(self._messages.values()))
        except StoreBusyError:
            return
        queued, self._alerts, self._messages = bool(self._messages), {}, {}
        if queued and self._wake is not None:
            self._wake()

    def close(self) -> None:
        """Judge the last step and store what it brought."""
        self._keep(self._monitor.close())
        self.tick()

    def _keep(self, outcome: Outcome) -> None:
        if self._told is not None:
            outcome = self._told.news(outcome)
        for transition in outcome.transitions:
            self._alerts[transition.alert.alert_id] = transition.alert
            for message in self._compose(transition):
                self._messages[message.message_id] = message
        if outcome.findings:
            self._writer.write(outcome.findings)
        if self._announce is not None and (outcome.findings or outcome.transitions):
            self._announce(outcome)

    def _abandoned(self, ts: float) -> list[Transition]:
        """Alerts of a branch this attempt left behind, by resuming before their onset, are over."""
        known = self._monitor.open_alerts() | self._alerts.keys()
        rules = {rule.name: rule for rule in self._monitor.rules}
        reason = f"attempt {self._writer.run.attempt} resumed from before it"
        return [
            Transition(replace(alert, state=AlertState.RESOLVED, reason=reason), Reason.RESOLVED, rules[alert.rule], ts)
            for alert in self._store.alerts(self._writer.run.run_id)
            if alert.state is not AlertState.RESOLVED and alert.alert_id not in known and alert.rule in rules
        ]
