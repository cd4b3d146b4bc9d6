"""The list of alerts as rows, each with what became of its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlwatch.alerts.dispatch import alert_ids
from rlwatch.alerts.silencing import acknowledge, find_alert
from rlwatch.clock import Clock
from rlwatch.ports import AlertStore
from rlwatch.records import Acknowledgement, Alert, AlertState, OutboxMessage, OutboxStatus, RunInfo, RunState, Silence

from . import evidence, table
from . import format as fmt
from .control import Principal
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
    table.Column("", "tight"),
)

TAKE = "take:"
"""What a click on "acknowledge" asks for begins so; the alert's id follows."""

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
    standing: str = ""
    """Why it is quiet though it fires: ``acknowledged by ann``, ``silenced by bob: repair``..."""

    @property
    def goes_on(self) -> bool:
        """Whether its run may still change it."""
        return self.run is None or self.run.state is RunState.RUNNING

    @property
    def firing(self) -> bool:
        """Whether it fires in a run that goes on."""
        return self.goes_on and self.alert.state is AlertState.FIRING

    @property
    def acknowledged(self) -> bool:
        """Whether somebody took it on."""
        return self.standing.startswith("acknowledged")

    @property
    def waits(self) -> bool:
        """Whether it may fire yet."""
        return self.goes_on and self.alert.state is AlertState.PENDING


def entries(
    alerts: Sequence[Alert],
    runs: Mapping[str, RunInfo],
    messages: Sequence[OutboxMessage],
    standing: Mapping[str, str] | None = None,
) -> list[Entry]:
    """Alerts, the one told last first, without those nobody was or will be told of.

    ``standing``: why some are quiet, by alert (:func:`rlwatch.alerts.silencing.quiet_reasons`).
    """
    by_alert: dict[str, list[OutboxMessage]] = {}
    for message in messages:
        for alert_id in alert_ids(message):
            by_alert.setdefault(alert_id, []).append(message)
    quiet = standing or {}
    all_entries = [
        Entry(alert, runs.get(alert.run_id), by_alert.get(alert.alert_id, ()), quiet.get(alert.alert_id, ""))
        for alert in alerts
    ]
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
    firing = [entry for entry in all_entries if entry.firing]
    taken = sum(entry.acknowledged for entry in firing)
    if not firing:
        return "No alert is firing"
    return f"{fmt.plural(len(firing), 'alert')} firing" + (f", {taken} acknowledged" if taken else "")


def silence_words(silence: Silence, now: float) -> str:
    """``kind kl_drift for 2 h more, by ann: new data``."""
    keys = ("run", "project", "kind", "rule")
    about = [f"{key} {getattr(silence, key)}" for key in keys if getattr(silence, key)]
    about += [f"label {key}={value}" for key, value in silence.labels.items()]
    left = fmt.duration(max(0.0, silence.until - now))
    return fmt.shorten(f"{', '.join(about) or 'everything'} for {left} more, by {silence.by}: {silence.why}", 300)


def take(store: AlertStore, alert_id: str, *, by: Principal, why: str, clock: Clock | None = None) -> Acknowledgement:
    """Take a firing alert on; returns whose it is now.

    Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and ``StoreError``.
    """
    by.require_command()
    return acknowledge(store, find_alert(store.alerts(), alert_id), by=by.name, why=why, clock=clock)


def row(entry: Entry, now: float, *, may_take: bool) -> table.Row:
    """The entry as a row of :data:`COLUMNS`; ``may_take``: whether whoever looks may take it on."""
    alert, run = entry.alert, entry.run
    project, name = ("", "") if run is None else (run.project, run.name)
    return table.Row(
        cells=[
            table.severity(alert.severity),
            table.text(state_words(entry), quiet=not entry.firing or bool(entry.standing), title=entry.standing),
            table.run_link(alert.run_id, project, name),
            table.details(alert.alert_id, message_words(alert), explanation(entry)),
            table.text(fmt.step(alert.onset_step), title=resolved_words(alert)),
            table.text(fmt.shorten(alert.rule, 40), quiet=True),
            delivery(entry.messages),
            table.text(fmt.age(alert.fired_at, now)),
            take_cell(entry) if may_take else table.text(""),
        ],
        opens="",
        quiet=not entry.firing or entry.acknowledged,
    )


def take_cell(entry: Entry) -> table.Cell:
    """What a person may do about it: take on what fires and nobody has taken on."""
    if not entry.firing or entry.acknowledged:
        return table.text("")
    return table.link("acknowledge", "alerts", TAKE + entry.alert.alert_id)


def state_words(entry: Entry) -> str:
    """``firing``, ``resolved``, ``pending``; ``acknowledged``, ``silenced``, ``inhibited`` where it is quiet though it
    fires; ``unresolved`` where the run ended before it was over.
    """
    if entry.firing and entry.standing:
        return entry.standing.partition(" ")[0]
    ended = entry.alert.state is AlertState.FIRING and not entry.firing
    return "unresolved" if ended else entry.alert.state.value


def message_words(alert: Alert) -> str:
    """The message, led by the kind unless it says so itself."""
    what, message = fmt.words(alert.kind), fmt.shorten(alert.message, 300)
    return message if what.casefold() in message.casefold() else f"{what}: {message}"


def explanation(entry: Entry) -> list[tuple[str, str]]:
    """Why it was told, why it is quiet, and the numbers it carries."""
    alert = entry.alert
    lines = [("because", alert.reason)] if alert.reason else []
    if entry.firing and entry.standing:
        lines.append(("quiet", fmt.shorten(entry.standing, 300)))
    if alert.resolved_step is not None:
        lines.append(("over", resolved_words(alert)))
    return lines + evidence.lines(alert.evidence)


def resolved_words(alert: Alert) -> str:
    """``over at step 4 900``; empty while it lasts."""
    return "" if alert.resolved_step is None else f"at step {fmt.step(alert.resolved_step)}"


def delivery(messages: Sequence[OutboxMessage]) -> table.Cell:
    """What became of the alert's messages: the worst of them, and each behind a click."""
    if not messages:
        return table.text("nobody told", quiet=True)
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
