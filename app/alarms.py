"""The list of alerts as rows, each with what became of its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlwatch.records import Alert, AlertState, OutboxMessage, OutboxStatus, RunInfo, RunState

from . import evidence, table
from . import format as fmt
from .health import AMBER, BLUE, VERMILLION

CHOICES = ("all", "firing", "undelivered")

COLUMNS = (
    table.Column("severity", "tight"),
    table.Column("state", "tight"),
    table.Column("run", "long"),
    table.Column("what", "long"),
    table.Column("since step", "right tight"),
    table.Column("rule", "tight wide"),
    table.Column("delivery", "long middling"),
    table.Column("fired", "right tight"),
)

DELIVERY_LOOK = {
    OutboxStatus.SENT: ("✓", BLUE),
    OutboxStatus.PENDING: ("◌", AMBER),
    OutboxStatus.DEAD: ("✕", VERMILLION),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """An alert, the run it concerns (None where it cannot be read) and its messages, oldest first."""

    alert: Alert
    run: RunInfo | None
    messages: Sequence[OutboxMessage]

    @property
    def goes_on(self) -> bool:
        """Whether its run may still change it."""
        return self.run is None or self.run.state is RunState.RUNNING

    @property
    def firing(self) -> bool:
        """Whether it fires in a run that goes on."""
        return self.goes_on and self.alert.state is AlertState.FIRING

    @property
    def waits(self) -> bool:
        """Whether it may fire yet."""
        return self.goes_on and self.alert.state is AlertState.PENDING


def entries(alerts: Sequence[Alert], runs: Mapping[str, RunInfo], messages: Sequence[OutboxMessage]) -> list[Entry]:
    """Alerts, the one told last first, without those nobody was or will be told of."""
    by_alert: dict[str, list[OutboxMessage]] = {}
    for message in messages:
        by_alert.setdefault(message.alert_id, []).append(message)
    all_entries = [Entry(alert, runs.get(alert.run_id), by_alert.get(alert.alert_id, ())) for alert in alerts]
    told = [e for e in all_entries if e.firing or e.waits or e.alert.fired_at is not None]
    return sorted(told, key=lambda e: -(float("inf") if e.alert.fired_at is None else e.alert.fired_at))


def matching(all_entries: Sequence[Entry], choice: str) -> list[Entry]:
    """Entries of one of :data:`CHOICES`."""
    if choice == "firing":
        return [entry for entry in all_entries if entry.firing]
    if choice == "undelivered":
        return [e for e in all_entries if any(m.status is not OutboxStatus.SENT for m in e.messages)]
    return list(all_entries)


def headline(all_entries: Sequence[Entry]) -> str:
    """``2 alerts firing``."""
    count = sum(entry.firing for entry in all_entries)
    return f"{fmt.plural(count, 'alert')} firing" if count else "No alert is firing"


def row(entry: Entry, now: float) -> table.Row:
    """The entry as a row of :data:`COLUMNS`."""
    alert, run = entry.alert, entry.run
    project, name = ("", "") if run is None else (run.project, run.name)
    return table.Row(
        cells=[
            table.severity(alert.severity),
            table.text(state_words(entry), quiet=not entry.firing),
            table.run_link(alert.run_id, project, name),
            table.details(alert.alert_id, message_words(alert), explanation(alert)),
            table.text(fmt.step(alert.onset_step), title=resolved_words(alert)),
            table.text(fmt.shorten(alert.rule, 40), quiet=True),
            delivery(entry.messages),
            table.text(fmt.age(alert.fired_at, now)),
        ],
        opens="",
        quiet=not entry.firing,
    )


def state_words(entry: Entry) -> str:
    """``firing``, ``resolved``, ``pending``; ``unresolved`` where the run ended before it was over."""
    ended = entry.alert.state is AlertState.FIRING and not entry.firing
    return "unresolved" if ended else entry.alert.state.value


def message_words(alert: Alert) -> str:
    """The message, led by the kind unless it says so itself."""
    what, message = fmt.words(alert.kind), fmt.shorten(alert.message, 300)
    return message if what.casefold() in message.casefold() else f"{what}: {message}"


def explanation(alert: Alert) -> list[tuple[str, str]]:
    """Why it was told, and the numbers it carries."""
    lines = [("because", alert.reason)] if alert.reason else []
    if alert.resolved_step is not None:
        lines.append(("over", resolved_words(alert)))
    return lines + evidence.lines(alert.evidence)


def resolved_words(alert: Alert) -> str:
    """``over at step 4 900``; empty while it lasts."""
    return "" if alert.resolved_step is None else f"at step {fmt.step(alert.resolved_step)}"


def delivery(messages: Sequence[OutboxMessage]) -> table.Cell:
    """What became of the alert's messages: the worst of them, and each behind a click."""
    if not messages:
        return table.text("no channel", quiet=True)
    lines = [(message.channel, delivery_words(message)) for message in messages]
    worst = max(messages, key=lambda m: (OutboxStatus.SENT, OutboxStatus.PENDING, OutboxStatus.DEAD).index(m.status))
    shape, colour = DELIVERY_LOOK[worst.status]
    cell = table.details(f"delivery-{worst.alert_id}", delivery_words(worst), lines)
    return table.marked(cell, shape, colour)


def delivery_words(message: OutboxMessage) -> str:
    """``sent`` · ``pending, 2 tries, last error: …`` · ``dead after 8 tries: …``."""
    error = fmt.shorten(message.last_error, 160)
    tries = fmt.plural(message.attempts, "try", "tries")
    if message.status is OutboxStatus.SENT:
        return "sent"
    if message.status is OutboxStatus.DEAD:
        return f"dead after {tries}" + (f": {error}" if error else "")
    if not message.attempts:
        return "pending"
    return f"pending after {tries}" + (f": {error}" if error else "")
