"""Rehearsal of alert rules: process a log like a live run, and collect the messages that would have been sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from math import isfinite
from uuid import uuid4

from rlwatch.alerts.rules import AlertingConfig
from rlwatch.cli.watch_log import LogRecording
from rlwatch.clock import ManualClock
from rlwatch.importers import ImportedRun
from rlwatch.ports import Store
from rlwatch.records import OutboxMessage, OutboxStatus, RunInfo, StepRecord
from rlwatch.store.memory import forget
from rlwatch.store.url import open_store

NOON = 43_200.0
"""Start time of a log without times, in Unix seconds: noon UTC."""


@dataclass(frozen=True, slots=True)
class RehearsalEntry:
    """One alert message of a rehearsal at a step. ``at``: Unix seconds; ``kept``: reason that it was not sent, else
    empty.
    """

    step: int
    at: float
    event: str
    severity: str
    kinds: tuple[str, ...]
    channels: tuple[str, ...]
    text: str
    kept: str = ""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Alert messages that a log would have caused, sent or kept back, in order. ``timed``: True if the
    log has times.
    """

    name: str
    lines: tuple[RehearsalEntry, ...]
    timed: bool


def rehearse(imported: ImportedRun, policy: AlertingConfig, *, source: str = "", step_s: float = 60.0) -> Rehearsal:
    """Process a log's run like a live one under ``policy``, and return the alert messages it would have caused.

    ``source`` is the trainer if the log does not name it; ``step_s``: seconds a step if the log has no times. Nothing
    is sent.
    """
    records, timed = _timed(imported.records, step_s)
    place = f"rehearsal-{uuid4().hex}"
    clock = ManualClock(records[0].ts if records else NOON)
    store = open_store(f"memory://{place}", clock=clock)
    info = RunInfo("log", name=imported.name, source=source or imported.source, created_at=clock.now())
    recording = LogRecording(store, info, policy=policy, on_outcome=lambda _: None, clock=clock, console=True)
    notes = _Notes(store)
    for record in records:
        clock.advance(max(0.0, record.ts - clock.now()))
        recording.take([record])
        recording.tick()
        notes.take(record.step, clock.now(), recording)
    recording.finish("")
    notes.take(records[-1].step if records else 0, clock.now(), recording)
    forget(place)
    return Rehearsal(imported.name, tuple(notes.lines), timed)


class _Notes:
    """Collects the new messages after each row."""

    def __init__(self, store: Store) -> None:
        self.lines: list[RehearsalEntry] = []
        self._store = store
        self._seen = 0
        self._kept: set[tuple[str, str, str]] = set()

    def take(self, step: int, now: float, recording: LogRecording) -> None:
        new = self._store.outbox("log")[self._seen :]
        self._seen += len(new)
        for group in _together(new):
            self.lines.append(_published(step, now, group))
            for message in group:
                self._store.settle_message(replace(message, status=OutboxStatus.SENT, attempts=1, sent_at=now))
        for notice, why in recording.kept:
            alert, event = notice.case.alert, notice.event.value
            if (alert.alert_id, event, why) not in self._kept:
                self._kept.add((alert.alert_id, event, why))
                line = RehearsalEntry(step, now, event, notice.severity.value, (alert.kind,), (), alert.message, why)
                self.lines.append(line)


def _together(messages: Sequence[OutboxMessage]) -> list[list[OutboxMessage]]:
    """Group equal messages to several channels."""
    groups: dict[str, list[OutboxMessage]] = {}
    for message in messages:
        groups.setdefault(message.payload["text"], []).append(message)
    return list(groups.values())


def _published(step: int, now: float, messages: Sequence[OutboxMessage]) -> RehearsalEntry:
    payload = messages[0].payload
    alerts = [payload["alert"], *payload["also"]]
    return RehearsalEntry(
        step,
        now,
        payload["event"],
        payload["alert"]["severity"],
        tuple(alert["kind"] for alert in alerts),
        tuple(message.channel for message in messages),
        payload["text"],
    )


def _timed(records: Sequence[StepRecord], step_s: float) -> tuple[list[StepRecord], bool]:
    """Return the records with times, computed from their steps if any lacks one."""
    if records and all(isfinite(record.ts) and record.ts > 0 for record in records):
        return list(records), True
    first = records[0].step if records else 0
    return [replace(record, ts=NOON + step_s * max(0, record.step - first)) for record in records], False


def moment(at: float, zone: tzinfo | None = None) -> str:
    """Return month, day and time of ``at`` (Unix seconds) in ``zone``, or in this machine's time zone
    if that is None.
    """
    return datetime.fromtimestamp(at, zone).astimezone(zone).strftime("%m-%d %H:%M")
