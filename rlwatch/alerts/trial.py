"""A trial message on the real way: a row of an outbox, leased, delivered by the channel's notifier, settled."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from rlwatch.alerts.messages import SCHEMA_VERSION
from rlwatch.alerts.outbox import Deliverer
from rlwatch.clock import Clock, SystemClock
from rlwatch.ports import Delivery, Notifier
from rlwatch.records import JSON, OutboxMessage, RunInfo
from rlwatch.store.url import open_store

EVENT = "test"
ABSENT = Delivery(ok=False, reason="cannot be tried from here: only the trainer's own process has this channel")


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one trial message."""

    channel: str
    message_id: str
    delivery: Delivery


class _Overheard:
    """A notifier that remembers what came of it: rows keep no reason for a success."""

    def __init__(self, notifier: Notifier) -> None:
        self.name, self.outcome = notifier.name, ABSENT
        self.present = getattr(notifier, "present", lambda: True)
        self._notifier = notifier

    def deliver(self, message: OutboxMessage) -> Delivery:
        self.outcome = self._notifier.deliver(message)
        return self.outcome


def try_channels(
    notifiers: Mapping[str, Notifier], *, dashboard_url: str = "", clock: Clock | None = None
) -> list[Trial]:
    """Send one message to each channel, once, and tell what its receiver answered.

    The outbox is one of its own, in a temporary place: no run's alerts are touched.
    """
    clock = clock or SystemClock()
    overheard = {channel: _Overheard(notifier) for channel, notifier in notifiers.items()}
    messages = {channel: trial_message(channel, dashboard_url, clock.now()) for channel in notifiers}
    with TemporaryDirectory(prefix="rlwatch-trial-") as place:
        store = open_store(place)
        writer = store.open_run(RunInfo("trial", project="rlwatch", name="trial"))
        store.put_alerts([], list(messages.values()))
        Deliverer(store, overheard, clock).run_once()
        writer.close()
        store.close()
    return [Trial(channel, messages[channel].message_id, each.outcome) for channel, each in overheard.items()]


def trial_message(channel: str, dashboard_url: str, now: float) -> OutboxMessage:
    """A message with the parts of an alert's, that says it is none."""
    said = f"a trial message from {socket.gethostname()}: nothing is wrong, and this channel works"
    trial_id = uuid.uuid4().hex
    alert: dict[str, JSON] = {
        "id": f"trial-{trial_id[:8]}",
        "rule": "trial",
        "kind": "trial",
        "detector": "rlwatch alerts test",
        "severity": "info",
        "state": "firing",
        "message": said,
        "reason": "somebody ran rlwatch alerts test",
        "onset_step": 0,
        "step": 0,
        "resolved_step": None,
        "fired_at": now,
        "resolved_at": None,
        "labels": {},
        "run_id": "trial",
    }
    payload: dict[str, JSON] = {
        "schema_version": SCHEMA_VERSION,
        "event": EVENT,
        "text": f"[{EVENT}] {said}",
        "alert": alert,
        "also": [],
        "group": {"id": alert["id"], "firing": 0},
        "earlier": [],
        "finding": {"detector": alert["detector"], "evidence": {}},
        "advice": None,
        "run": {"id": "trial", "name": "trial", "project": "rlwatch", "source": ""},
        "links": {"dashboard": dashboard_url.partition("?")[0]} if dashboard_url else {},
    }
    return OutboxMessage(trial_id, "trial", alert["id"], channel, payload, created_at=now)
