"""The Monitor inside a live run: a sink on the writer thread that stores what the Monitor says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlwatch.alerts.messages import messages_for
from rlwatch.control.policy import Health
from rlwatch.errors import StoreBusyError
from rlwatch.monitor.engine import Monitor, Outcome
from rlwatch.ports import AlertStore, Item, RunWriter
from rlwatch.records import Alert, AlertState, OutboxMessage, SpikeBatch

CONSOLE = "console"


class MonitorSink:
    """Feeds the Monitor, stores findings, alerts and outbox messages, and publishes the run's health.

    Delivery is not its work: it only inserts outbox rows. A busy store is tried again at the next tick.

    Parameters
    ----------
    publish
        Called with the run's new health after every batch; must be quick and not raise.
    """

    def __init__(
        self,
        monitor: Monitor,
        writer: RunWriter,
        store: AlertStore,
        publish: Callable[[Health], None],
        on_findings: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._monitor = monitor
        self._writer = writer
        self._store = store
        self._publish = publish
        self._on_outcome = on_findings
        self._alerts: dict[str, Alert] = {}
        self._messages: dict[str, OutboxMessage] = {}
        self._attempt: int | None = None

    def write(self, batch: Sequence[Item]) -> None:
        """Judge the batch, item by item."""
        outcome = Outcome()
        for item in batch:
            if not isinstance(item, SpikeBatch):
                outcome += self._monitor.observe(item)
        self._keep(outcome)
        if self._attempt is None:
            self._attempt = self._writer.run.attempt
            self._retire_abandoned()
        self._publish(Health(self._monitor.active))
        self.tick()

    def tick(self) -> None:
        """Store alerts and messages that are still waiting."""
        if not self._alerts and not self._messages:
            return
        try:
            self._store.put_alerts(list(self._alerts.values()), list(self._messages.values()))
        except StoreBusyError:
            return
        self._alerts, self._messages = {}, {}

    def close(self) -> None:
        """Judge the last step and store what it brought."""
        self._keep(self._monitor.close())
        self.tick()

    def _keep(self, outcome: Outcome) -> None:
        if outcome.findings:
            self._writer.write(outcome.findings)
        for transition in outcome.transitions:
            self._alerts[transition.alert.alert_id] = transition.alert
            for message in messages_for(transition, self._writer.run):
                if message.channel == CONSOLE:  # this process logs its own alerts, at once
                    continue
                self._messages[message.message_id] = message
        if self._on_outcome is not None and (outcome.findings or outcome.transitions):
            self._on_outcome(outcome)

    def _retire_abandoned(self) -> None:
        """Alerts of a branch this attempt left behind, by resuming before their onset, are over."""
        if self._attempt == 1:
            return
        live = self._monitor.open_alerts()
        for alert in self._store.alerts(self._writer.run.run_id):
            if alert.state is not AlertState.RESOLVED and alert.alert_id not in live:
                reason = f"attempt {self._attempt} resumed from before it"
                self._alerts.setdefault(alert.alert_id, replace(alert, state=AlertState.RESOLVED, reason=reason))
