"""Stores with messages in them, and notifiers that do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rlwatch.alerts.outbox import Backoff, Patience
from rlwatch.ports import Delivery, Store
from rlwatch.records import OutboxMessage, OutboxStatus, RunInfo

OK = Delivery(ok=True)
LATER = Delivery(ok=False, reason="HTTP 500")
NEVER = Delivery(ok=False, reason="HTTP 404", retryable=False)
RUN = RunInfo("run-1", project="math", name="seed3")


@dataclass
class ScriptedNotifier:
    """Answers with the script, the last answer for ever; an exception in it is raised."""

    answers: list[Delivery | Exception] = field(default_factory=lambda: [OK])
    name: str = "webhook"
    seen: list[str] = field(default_factory=list)
    then: Callable[[], None] = lambda: None

    def deliver(self, message: OutboxMessage) -> Delivery:
        self.seen.append(message.message_id)
        self.then()
        answer = self.answers[min(len(self.seen), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


def message(message_id: str, event: str = "firing", *, channel: str = "webhook", at: float, alert: str = "a1"):
    return OutboxMessage(message_id, RUN.run_id, alert, channel, {"event": event}, created_at=at)


def put(store: Store, *messages: OutboxMessage) -> None:
    store.put_alerts([], list(messages))


def row(store: Store, message_id: str) -> OutboxMessage:
    return next(m for m in store.outbox() if m.message_id == message_id)


def statuses(store: Store) -> dict[str, OutboxStatus]:
    return {m.message_id: m.status for m in store.outbox()}


def doubling(attempts: int) -> float:
    return 10.0 * 2 ** (attempts - 1)


def patience(backoff: Backoff = doubling, **more: float) -> Patience:
    return Patience(backoff, **more)
