"""The list of alerts: published about which run, to whom, with what became of the messages; and acknowledging one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import streamlit as st

from rlwatch.alerts.matching import alert_ids
from rlwatch.alerts.silencing import acknowledge, find_alert
from rlwatch.clock import Clock
from rlwatch.errors import RLWatchError
from rlwatch.ports import AlertStore
from rlwatch.records import Acknowledgement, Alert, AlertState, OutboxMessage, OutboxStatus, RunInfo, RunState, Silence

from . import format as fmt
from . import layout, queries, table
from .health import AMBER, BLUE, LOOKS, SEVERITY_WORD, VERMILLION
from .layout import GoToRun
from .markup import Markup, el, joined
from .principal import Principal

CHOICES = ("all", "firing", "undelivered")

ALERT_COLUMNS = (
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

ACKNOWLEDGE = "take:"
"""Prefix of a click on "acknowledge"; the alert's id follows."""

DELIVERY_LOOK = {
    OutboxStatus.SENT: ("✓", BLUE),
    OutboxStatus.PENDING: ("◌", AMBER),
    OutboxStatus.DEAD: ("✕", VERMILLION),
}


@dataclass(frozen=True, slots=True)
class AlertEntry:
    """An alert, the run it concerns (None where it cannot be read) and its messages, oldest first."""

    alert: Alert
    run: RunInfo | None
    messages: Sequence[OutboxMessage]
    standing: str = ""
    """Reason for its being quiet though it fires: ``acknowledged by ann``, ``silenced by bob: repair``..."""

    @property
    def goes_on(self) -> bool:
        """True if its run may still change it."""
        return self.run is None or self.run.state is RunState.RUNNING

    @property
    def firing(self) -> bool:
        """True if it fires in a run that goes on."""
        return self.goes_on and self.alert.state is AlertState.FIRING

    @property
    def acknowledged(self) -> bool:
        """True if somebody took it on."""
        return self.standing.startswith("acknowledged")

    @property
    def waits(self) -> bool:
        """True if it may fire yet."""
        return self.goes_on and self.alert.state is AlertState.PENDING


def alert_entries(
    alerts: Sequence[Alert],
    runs: Mapping[str, RunInfo],
    messages: Sequence[OutboxMessage],
    standing: Mapping[str, str] | None = None,
) -> list[AlertEntry]:
    """Alerts, the one told last first, without those nobody was or will be told of.

    ``standing``: why some are quiet, by alert (:func:`rlwatch.alerts.silencing.quiet_reasons`).
    """
    by_alert: dict[str, list[OutboxMessage]] = {}
    for message in messages:
        for alert_id in alert_ids(message):
            by_alert.setdefault(alert_id, []).append(message)
    quiet = standing or {}
    all_entries = [
        AlertEntry(alert, runs.get(alert.run_id), by_alert.get(alert.alert_id, ()), quiet.get(alert.alert_id, ""))
        for alert in alerts
    ]
    published = [e for e in all_entries if e.firing or e.waits or e.alert.fired_at is not None]
    return sorted(published, key=lambda e: -(float("inf") if e.alert.fired_at is None else e.alert.fired_at))


def matching(all_entries: Sequence[AlertEntry], choice: str) -> list[AlertEntry]:
    """Entries of one of :data:`CHOICES`."""
    if choice == "firing":
        return [entry for entry in all_entries if entry.firing]
    if choice == "undelivered":
        return [e for e in all_entries if any(m.status is not OutboxStatus.SENT for m in e.messages)]
    return list(all_entries)


def headline(all_entries: Sequence[AlertEntry]) -> str:
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


def acknowledge_alert(
    store: AlertStore, alert_id: str, *, by: Principal, why: str, clock: Clock | None = None
) -> Acknowledgement:
    """Take a firing alert on; returns whose it is now.

    Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and ``StoreError``.
    """
    by.require_command()
    return acknowledge(store, find_alert(store.alerts(), alert_id), by=by.name, why=why, clock=clock)


def alert_row(entry: AlertEntry, now: float, *, may_take: bool) -> table.Row:
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
            acknowledge_cell(entry) if may_take else table.text(""),
        ],
        opens="",
        quiet=not entry.firing or entry.acknowledged,
    )


def acknowledge_cell(entry: AlertEntry) -> table.Cell:
    """Link to acknowledge it, where it fires and nobody has."""
    if not entry.firing or entry.acknowledged:
        return table.text("")
    return table.link("acknowledge", "alerts", ACKNOWLEDGE + entry.alert.alert_id)


def state_words(entry: AlertEntry) -> str:
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


def explanation(entry: AlertEntry) -> list[tuple[str, str]]:
    """Reasons for its publication and its quiet, and the numbers it carries."""
    alert = entry.alert
    lines = [("because", alert.reason)] if alert.reason else []
    if entry.firing and entry.standing:
        lines.append(("quiet", fmt.shorten(entry.standing, 300)))
    if alert.resolved_step is not None:
        lines.append(("over", resolved_words(alert)))
    return lines + fmt.evidence_lines(alert.evidence)


def resolved_words(alert: Alert) -> str:
    """``over at step 4 900``; empty while it lasts."""
    return "" if alert.resolved_step is None else f"at step {fmt.step(alert.resolved_step)}"


def delivery(messages: Sequence[OutboxMessage]) -> table.Cell:
    """Delivery of the alert's messages: the worst of them, and each behind a click."""
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


# The dialog in which a person takes an alert on.

ACKNOWLEDGE_PENDING = "take-pending"
"""Session key of the id of the alert that is to be taken on, while the dialog is open."""


def open_acknowledgement(alert_id: str) -> None:
    """Open the dialog for an alert."""
    st.session_state[ACKNOWLEDGE_PENDING] = alert_id


def close_acknowledgement() -> None:
    """Forget the dialog."""
    st.session_state.pop(ACKNOWLEDGE_PENDING, None)


def acknowledgement_dialog_if_open() -> None:
    """The dialog, if it is open. It lives in the session: a rerun does not close it."""
    alert_id = st.session_state.get(ACKNOWLEDGE_PENDING)
    found = [alert for alert in queries.alerts() if alert.alert_id == alert_id] if alert_id else []
    if found:
        st.dialog("Acknowledge the alert", width="medium", on_dismiss=close_acknowledgement)(_dialog)(found[0])


def _dialog(alert: Alert) -> None:
    st.html(joined(subject(alert, queries.runs_by_id().get(alert.run_id))))
    st.text(message_words(alert))
    st.caption(
        "Nobody is reminded of it and it does not escalate any more, unless it gets worse. Its end is still told."
    )
    why = st.text_input(
        "What you do about it", key="take-why", max_chars=300, placeholder="shown to whoever looks next"
    )
    layout.signature()
    send, cancel = st.columns([1, 1])
    if send.button("Acknowledge", type="primary", key="take", width="stretch"):
        _take(alert, why=why or "")
    if cancel.button("Cancel", key="take-cancel", width="stretch"):
        close_acknowledgement()
        st.rerun()


def subject(alert: Alert, run: RunInfo | None) -> Markup:
    """The run, what fires on it, how bad, since when and by which rule; ``run`` None: only its id is known."""
    look = LOOKS[SEVERITY_WORD[alert.severity]]
    project = el("span", f"{fmt.shorten(run.project, 60)} / ", cls="rl-project") if run else ""
    name = fmt.shorten((run.name if run else "") or alert.run_id, 240)
    bad = el("span", el("span", look.shape, style=f"color:{look.colour}"), f" {alert.severity.value}", cls="rl-word")
    facts = (fmt.words(alert.kind), f"since step {fmt.step(alert.onset_step)}", f"rule {fmt.shorten(alert.rule, 40)}")
    return joined(
        el("div", project, name, cls="rl-family"), el("div", bad, *(el("span", fact) for fact in facts), cls="rl-facts")
    )


def _take(alert: Alert, *, why: str) -> None:
    try:
        kept = acknowledge_alert(queries.store(), alert.alert_id, by=layout.principal(), why=why)
    except RLWatchError as error:
        st.error("The alert was not acknowledged.")
        st.code(fmt.shorten(str(error), 600), language=None, wrap_lines=True)
        return
    close_acknowledgement()
    st.toast(f"Acknowledged by {fmt.shorten(kept.by, 80)}", icon=":material/check:")
    st.rerun()


# The page: alerts, newest first.


def page(go_to_run: GoToRun) -> None:
    """Every alert of the store, refreshed while somebody looks."""
    with layout.readable():
        acknowledgement_dialog_if_open()
    st.fragment(_body, run_every=layout.REFRESH_S)(go_to_run)


def _body(go_to_run: GoToRun) -> None:
    with layout.readable():
        now, alerts, runs = time.time(), queries.alerts(), queries.runs_by_id()
        entries = alert_entries(alerts, runs, queries.outbox(), queries.standing(alerts, runs, now))
        head, store = st.columns([3, 2], vertical_alignment="bottom")
        head.html(el("div", headline(entries), cls="rl-head"))
        with store:
            layout.store_line(fmt.plural(len(entries), "alert"))
        _silences(now)
        if not entries:
            st.caption("Nothing has raised an alarm yet. What does is decided by the rules in rlwatch.toml.")
            return
        shown = matching(entries, _choice())
        may_take = layout.principal().may_command
        opened = table.show("alerts", ALERT_COLUMNS, [alert_row(e, now, may_take=may_take) for e in shown])
        if opened is not None and opened.startswith(ACKNOWLEDGE):
            open_acknowledgement(opened.removeprefix(ACKNOWLEDGE))
            st.rerun()  # the dialog lives outside of the part that is looked at again
        elif opened is not None:
            go_to_run(opened)


def _silences(now: float) -> None:
    lasting = queries.silences(now)
    if lasting:
        with st.expander(
            f"{fmt.plural(len(lasting), 'silence')}: nobody is told of these", icon=":material/volume_off:"
        ):
            st.text("\n".join(silence_words(silence, now) for silence in lasting))
            st.caption("`rlwatch alerts silences` lists them, `rlwatch alerts unsilence ID` ends one.")


def _choice() -> str:
    chosen = st.segmented_control(
        "Which",
        CHOICES,
        default=CHOICES[0],
        required=True,
        key="which",
        label_visibility="collapsed",
        bind="query-params",
    )
    return str(chosen or CHOICES[0])
