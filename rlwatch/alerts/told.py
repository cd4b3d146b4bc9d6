"""Who was told what about which alert: read from the outbox, which is the record of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rlwatch.alerts.transitions import AlertEvent
from rlwatch.records import JSON, OutboxMessage, OutboxStatus, Severity


@dataclass(frozen=True, slots=True)
class Told:
    """One alert in one message. ``thread``: the alert whose message this is, which others of its group share.
    ``waits``: it is not delivered yet.
    """

    alert_id: str
    event: AlertEvent
    severity: Severity
    channel: str
    at: float
    thread: str
    waits: bool = False


class Telling:
    """What a set of messages told, by alert."""

    def __init__(self, messages: Iterable[OutboxMessage]) -> None:
        self._by_alert: dict[str, list[Told]] = {}
        for message in messages:
            for told in _read(message):
                self._by_alert.setdefault(told.alert_id, []).append(told)

    def of(self, alert_id: str, channel: str | None = None) -> list[Told]:
        """What was said of the alert, on one channel or on any, in order of writing."""
        said = self._by_alert.get(alert_id, [])
        return [told for told in said if channel is None or told.channel == channel]

    def channels(self, alert_id: str) -> tuple[str, ...]:
        """Those that were told of it."""
        return tuple(dict.fromkeys(told.channel for told in self.of(alert_id)))

    def thread(self, alert_id: str, channel: str) -> str:
        """The alert under which ``channel`` was told of this one; itself where it was not."""
        said = self.of(alert_id, channel)
        return said[0].thread if said else alert_id

    def sharing(self, thread: str, channel: str) -> list[str]:
        """Alerts that ``channel`` was told of under this one."""
        return [
            alert_id
            for alert_id in self._by_alert
            if self.of(alert_id, channel) and self.thread(alert_id, channel) == thread
        ]


def alert_ids(message: OutboxMessage) -> tuple[str, ...]:
    """The alerts the message is about, the one it is led by first."""
    return tuple(dict.fromkeys([message.alert_id, *(str(alert.get("id", "")) for alert in _alerts(message))]))


def _read(message: OutboxMessage) -> Iterator[Told]:
    event = message.payload.get("event")
    if event not in set(AlertEvent):
        return  # not ours: a trial message, say
    for alert in _alerts(message):
        severity = alert.get("severity")
        yield Told(
            alert_id=str(alert.get("id", "")),
            event=AlertEvent(event),
            severity=Severity(severity) if severity in set(Severity) else Severity.WARNING,
            channel=message.channel,
            at=message.created_at,
            thread=message.alert_id,
            waits=message.status is OutboxStatus.PENDING,
        )


def _alerts(message: OutboxMessage) -> list[Mapping[str, JSON]]:
    payload = message.payload
    found = [payload.get("alert"), *(payload.get("also") or ())]
    return [alert for alert in found if isinstance(alert, Mapping)] or [{"id": message.alert_id}]
