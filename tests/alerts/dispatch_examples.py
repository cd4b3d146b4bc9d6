"""A dispatcher over a memory store, alerts to put on it, and what it wrote."""

from __future__ import annotations

from itertools import count

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.engine import alert_id
from rlwatch.alerts.rules import AlertingConfig, Rule
from rlwatch.clock import ManualClock
from rlwatch.records import Alert, AlertState, OutboxMessage, OutboxStatus, RunInfo, Severity, StepRecord
from rlwatch.store.url import open_store

WARNING, CRITICAL = Severity.WARNING, Severity.CRITICAL
FIRING, RESOLVED, PENDING = AlertState.FIRING, AlertState.RESOLVED, AlertState.PENDING
NOON = 43_200.0
"""Twelve o'clock UTC, on a Thursday."""
HOOK = Rule("r", channels=("hook",))

_places = count()


def alert(
    kind: str = "kl_drift",
    state: AlertState = FIRING,
    severity: Severity = WARNING,
    *,
    run: str = "run",
    **more: object,
) -> Alert:
    """An alert of rule ``r``, fired at noon; its id is that of its run and kind."""
    values = {"onset_step": 5, "step": 7, "message": f"{kind} is bad", "fired_at": NOON, "rule": "r"} | more
    return Alert(alert_id(run, str(values["rule"]), kind, 1), run, kind=kind, severity=severity, state=state, **values)


class Office:
    """A store with runs, a dispatcher, and a clock that begins at noon."""

    def __init__(self, *rules: Rule, runs: tuple[str, ...] = ("run",), live: bool = True, **policy: object) -> None:
        self.clock = ManualClock(NOON)
        self.store = open_store(f"memory://office{next(_places)}", clock=self.clock)
        self.policy = AlertingConfig(rules=rules or (HOOK,), **policy)
        self.live = live
        for run in runs:
            self.store.open_run(RunInfo(run, project="math", name=f"name of {run}", source="verl")).close()
        self.dispatcher = self.another_dispatcher()

    def another_dispatcher(self) -> Dispatcher:
        """As another process would have one: nothing is shared but the store."""
        return Dispatcher(self.store, self.policy, clock=self.clock, live=lambda _: self.live)

    def publish(self, *alerts: Alert, run: str = "run", final: bool = False) -> list[str]:
        """Put alerts down; what was written."""
        return summaries(self.dispatcher.publish(run, alerts, final=final))

    def reach(self, step: int, *alerts: Alert, run: str = "run") -> list[str]:
        """The run gets to this step, where these alerts change; what was written."""
        writer = self.store.open_run(RunInfo(run, project="math"))
        writer.write([StepRecord(step, {"kl": 0.1}, ts=self.clock.now())])
        writer.close()
        return self.publish(*alerts, run=run)

    def later(self, minutes: float, run: str = "run") -> list[str]:
        """Look again after so long; what was written."""
        self.clock.advance(60.0 * minutes)
        return summaries(self.dispatcher.publish(run))

    def kept(self) -> list[str]:
        """What the last plan kept back, and why."""
        return [f"{notice.case.alert.kind}: {why}" for notice, why in self.dispatcher.decision.held_back]

    def deliver(self) -> None:
        """All messages reach their channel."""
        for message in self.store.lease_messages(self.clock.now(), lease_s=60.0, limit=1000):
            self.store.settle_message(sent(message, self.clock.now()))


def sent(message: OutboxMessage, at: float) -> OutboxMessage:
    from dataclasses import replace

    return replace(message, status=OutboxStatus.SENT, attempts=1, sent_at=at)


def summaries(messages: list[OutboxMessage]) -> list[str]:
    """``hook firing warning kl_drift + grad_spike`` for each message."""
    return [" ".join([m.channel, m.payload["event"], m.payload["alert"]["severity"], kinds(m)]) for m in messages]


def kinds(message: OutboxMessage) -> str:
    """The kinds a message tells, the leading one first."""
    return " + ".join(part["kind"] for part in [message.payload["alert"], *message.payload["also"]])
