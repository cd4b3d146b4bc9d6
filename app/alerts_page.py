"""Page with the incidents of all runs (related alerts as one row), the dialog of one incident, and the silences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlencode

import streamlit as st

from rlwatch.alerts.incidents import IncidentRecord, IncidentState
from rlwatch.alerts.silencing import matchers
from rlwatch.columns import ALERTS
from rlwatch.errors import RLWatchError
from rlwatch.records import Alert, AlertState, AuditEntry, OutboxMessage, OutboxStatus, Silence

from . import format as fmt
from . import incident_acts as acts
from . import layout, queries, table
from .health import AMBER, BLUE, LOOKS, SEVERITY_WORD, VERMILLION
from .incident_acts import unsilence
from .layout import GoToRun
from .markup import Markup, el, joined

CHOICES = ("all", "firing", "undelivered", "silent or crashed")
HEARTBEATS = CHOICES[3]

INCIDENT_COLUMNS = (
    *table.columns(ALERTS, severity="tight", state="tight", run_id="named", message="long", onset_step="tight"),
    table.TableColumn("symptoms", "long wide"),
    table.TableColumn("assignee", "tight wide"),
    table.TableColumn("delivery", "middling"),
    *table.columns(ALERTS, fired_at="right tight"),
    table.TableColumn("", "tight"),
)

OPENS = "incident:"
"""Prefix of the message of a click on an incident; the id of its leading alert follows."""
ACKNOWLEDGE = "take:"
"""Prefix of the message of a click on "acknowledge"; the id of the incident's leading alert follows."""

DELIVERY_LOOK = {
    OutboxStatus.SENT: ("✓", BLUE),
    OutboxStatus.PENDING: ("◌", AMBER),
    OutboxStatus.DEAD: ("✕", VERMILLION),
}


def matching(incident_records: Sequence[IncidentRecord], choice: str) -> list[IncidentRecord]:
    """Return the incidents in ``incident_records`` that match ``choice``, one of :data:`CHOICES`."""
    if choice == HEARTBEATS:
        return [record for record in incident_records if record.incident.heartbeat]
    found = [record for record in incident_records if not record.incident.heartbeat]
    if choice == "firing":
        return [record for record in found if record.open]
    if choice == "undelivered":
        return [d for d in found if any(m.status is not OutboxStatus.SENT for m in d.messages)]
    return found


def headline(incident_records: Sequence[IncidentRecord]) -> str:
    """Return the headline of the page for the incidents ``incident_records``, as ``2 incidents firing, 1
    acknowledged``.
    """
    firing = [record for record in incident_records if record.open and not record.incident.heartbeat]
    if not firing:
        return "No firing incidents"
    quiet = (IncidentState.ACKNOWLEDGED, IncidentState.SNOOZED, IncidentState.SILENCED)
    counts = [(standing, sum(record.standing is standing for record in firing)) for standing in quiet]
    return ", ".join(
        [f"{fmt.plural(len(firing), 'incident')} firing", *(f"{count} {what}" for what, count in counts if count)]
    )


def silence_words(silence: Silence, now: float) -> str:
    """Describe a silence, as ``kind kl_drift for 2 h more, by ann: new data``; ``now`` is in Unix seconds."""
    left = fmt.duration(max(0.0, silence.until - now))
    return fmt.shorten(f"{matchers(silence)} for {left} more, by {silence.by}: {silence.why}", 300)


def incident_row(record: IncidentRecord, now: float, *, may_take: bool) -> table.TableRow:
    """Return the incident ``record`` as a row of the table with :data:`INCIDENT_COLUMNS`.

    ``now``: Unix seconds. ``may_take``: the user may acknowledge the incident.
    """
    incident, run = record.incident, record.run
    project, name = ("", "") if run is None else (run.project, run.name)
    lead, quiet = incident.lead, record.standing is not IncidentState.FIRING
    symptoms = [each for each in dict.fromkeys(fmt.words(a.kind) for a in incident.symptoms) if each]
    return table.TableRow(
        cells=[
            table.severity(incident.severity),
            table.text(record.standing.value, quiet=quiet, title="; ".join(dict.fromkeys(record.quiet.values()))),
            table.run_link(incident.run_id, project, name),
            table.link(
                message_words(lead), f"alerts?incident={lead.alert_id}", OPENS + lead.alert_id, fmt.words(lead.kind)
            ),
            table.text(fmt.step(incident.onset_step), title=resolved_words(lead)),
            table.text(fmt.shorten(", ".join(symptoms), 160), quiet=True),
            table.text(fmt.shorten(", ".join(dict.fromkeys(a.by for a in record.acknowledgements)), 60)),
            delivery(record.messages),
            table.text(fmt.age(incident.fired_at, now)),
            acknowledge_cell(record) if may_take else table.text(""),
        ],
        opens="",
        quiet=quiet,
    )


def acknowledge_cell(record: IncidentRecord) -> table.Cell:
    """Return a table cell with a link that acknowledges the incident ``record``; empty if it is resolved or
    acknowledged.
    """
    taken = record.standing is IncidentState.ACKNOWLEDGED
    if not record.open or taken:
        return table.text("")
    return table.link("acknowledge", "alerts", ACKNOWLEDGE + record.incident.lead.alert_id, acts=True)


def resolved_words(alert: Alert) -> str:
    """Return ``resolved at step 4 900``, or an empty string while the alert fires."""
    over = alert.state is AlertState.RESOLVED and alert.resolved_step is not None
    return f"resolved at step {fmt.step(alert.resolved_step)}" if over else ""


def delivery(messages: Sequence[OutboxMessage]) -> table.Cell:
    """Return a cell with the worst delivery status of an incident's messages, and a list of all behind a click."""
    if not messages:
        return table.text("not sent", quiet=True)
    lines = [(message.channel, delivery_words(message)) for message in messages]
    worst = max(messages, key=lambda m: (OutboxStatus.SENT, OutboxStatus.PENDING, OutboxStatus.DEAD).index(m.status))
    shape, colour = DELIVERY_LOOK[worst.status]
    cell = table.details(f"delivery-{worst.alert_id}", delivery_words(worst), lines)
    return table.marked(cell, shape, colour)


# The page: incidents, the one that fired last first.


def page(go_to_run: GoToRun) -> None:
    """Draw the page with all incidents of the store, and refresh it while it is open; ``go_to_run`` opens the page of a
    run.
    """
    with layout.readable():
        dialog_if_open()
    st.fragment(_body, run_every=layout.REFRESH_S)(go_to_run)


def _body(go_to_run: GoToRun) -> None:
    with layout.readable():
        now = time.time()
        incident_records = queries.incident_records(now)
        head, store = st.columns([3, 2], vertical_alignment="bottom")
        head.html(el("div", headline(incident_records), cls="rl-head"))
        with store:
            layout.store_line(_counted(incident_records))
        _silences(now)
        if not incident_records:
            st.caption("No alerts yet. See Rules for what fires an alert.")
            return
        shown = matching(incident_records, _choice())
        may_take = layout.principal().may_command
        opened = table.show("alerts", INCIDENT_COLUMNS, [incident_row(d, now, may_take=may_take) for d in shown])
        if opened is not None and opened.startswith((OPENS, ACKNOWLEDGE)):
            open_incident(opened.partition(":")[2])
            st.rerun()  # the dialog lies outside the fragment that is redrawn
        elif opened is not None:
            go_to_run(opened)


def _counted(incident_records: Sequence[IncidentRecord]) -> str:
    beats = sum(record.incident.heartbeat for record in incident_records)
    quiet = f" · {fmt.plural(beats, 'run')} silent or crashed" if beats else ""
    return fmt.plural(len(incident_records) - beats, "incident") + quiet


def _silences(now: float) -> None:
    lasting = queries.silences(now)
    if not lasting:
        return
    may_end = layout.principal().may_command
    with st.expander(f"{fmt.plural(len(lasting), 'silence')}, matching alerts not sent", icon=":material/volume_off:"):
        for silence in lasting:
            words, end = st.columns([5, 1], vertical_alignment="center")
            words.text(silence_words(silence, now))
            if may_end and end.button("End now", key=f"unsilence-{silence.silence_id}", width="stretch"):
                _end(silence)


def _end(silence: Silence) -> None:
    try:
        unsilence(queries.store(), silence.silence_id, by=layout.principal())
    except RLWatchError as error:
        st.error(fmt.shorten(str(error), 600))
        return
    st.toast("Silence ended: alerts that still fire will be sent", icon=":material/volume_up:")
    st.rerun()


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


# The dialog of one incident: its alerts, notifications and history; and acknowledge, snooze, silence and note.

OPEN = "incident-open"
"""Session key under which the id of an alert of the open incident is stored."""
ADDRESS = "incident"
"""Query parameter with the id of an alert of the open incident, for shared links."""
ACTS = ("Acknowledge", "Snooze", "Silence", "Note")


def open_incident(alert_id: str) -> None:
    """Open the dialog of the incident that contains the alert with the given id."""
    st.session_state[OPEN] = alert_id


def close_incident() -> None:
    """Close the incident dialog and remove the incident from the page's address."""
    st.session_state.pop(OPEN, None)
    with suppress(KeyError):
        del st.query_params[ADDRESS]


def dialog_if_open() -> None:
    """Draw the incident dialog if it is open or the address names an incident. A rerun of the page
    does not close it.
    """
    alert_id = st.session_state.get(OPEN) or st.query_params.get(ADDRESS)
    if not alert_id:
        return
    st.session_state[OPEN] = alert_id
    found = [d for d in queries.incident_records(time.time()) if any(a.alert_id == alert_id for a in d.incident.alerts)]
    if found:
        st.dialog("Incident", width="large", on_dismiss=close_incident)(_dialog)(found[0])


def _dialog(record: IncidentRecord) -> None:
    incident = record.incident
    st.html(joined(subject(record)))
    st.html(joined(alerts_list(record)))
    delivery, done = st.columns(2)
    delivery.html(joined(delivery_list(record)))
    done.html(joined(history_list(record.audit, time.time())))
    if not record.open:
        st.caption("No longer firing. You can still leave a note.")
    chosen = st.segmented_control(
        "Action", ACTS if record.open else ACTS[3:], default=ACTS[0] if record.open else ACTS[3], key="act",
        label_visibility="collapsed", required=True,
    )  # fmt: skip
    {"Acknowledge": _acknowledge, "Snooze": _snooze, "Silence": _silence, "Note": _note}[chosen](record)
    if not layout.principal().may_command:
        st.caption(layout.LOOK_ONLY)
    close, leave = st.columns([1, 1])
    if close.button("Close", key="incident-close", width="stretch"):
        close_incident()
        st.rerun()
    leave.link_button("Open run", f"run?{urlencode({'run': incident.run_id})}", width="stretch")


def subject(record: IncidentRecord) -> Markup:
    """Return the head of the incident ``record`` as HTML: run, severity, onset, status and most likely cause.

    Kind and onset are left out if its only alert, which is listed below, has the same.
    """
    incident, run = record.incident, record.run
    project = el("span", f"{fmt.shorten(run.project, 60)} / ", cls="rl-project") if run else ""
    name = fmt.shorten((run.name if run else "") or incident.run_id, 240)
    facts = [
        _severity(incident.lead if incident.lead.severity is incident.severity else incident.alerts[0], record),
        *(
            [el("span", fmt.words(incident.lead.kind)), el("span", f"since step {fmt.step(incident.onset_step)}")]
            if len(incident.alerts) > 1
            else []
        ),
        el("span", record.standing.value),
        el("span", f"rule {fmt.shorten(incident.lead.rule, 40)}"),
    ]
    parts = [el("div", project, name, cls="rl-family"), el("div", *facts, cls="rl-facts")]
    if incident.cause is not None:
        label = el("span", "Likely cause", cls="label")
        cause = f" {incident.cause.title} ({incident.cause.sure.words}): {incident.cause.why}"
        parts.append(el("div", label, fmt.shorten(cause, 400), cls="rl-why"))
    return joined(*parts)


def _severity(alert: Alert, record: IncidentRecord) -> Markup:
    look = LOOKS[SEVERITY_WORD[record.incident.severity if alert is record.incident.lead else alert.severity]]
    shape = el("span", look.shape, style=f"color:{look.colour}")
    return el("span", shape, f" {alert.severity.value}", cls="rl-word")


def alerts_list(record: IncidentRecord) -> Markup:
    """Return the alerts of the incident ``record`` as an HTML list with message, onset, status and numbers."""
    items = []
    for alert in record.incident.alerts:
        look = LOOKS[SEVERITY_WORD[alert.severity]]
        shape = el("span", f"{look.shape} ", style=f"color:{look.colour}")
        facts = " · ".join(filter(None, _facts(alert, record)))
        items.append(
            el(
                "li",
                el("div", shape, message_words(alert)),
                el("div", fmt.shorten(facts, 400), cls="rl-quiet"),
                el("div", fmt.evidence_line(alert.evidence, 300), cls="rl-quiet") if alert.evidence else "",
            )
        )
    return joined(el("ul", *items, cls="rl-plain"))


def _facts(alert: Alert, record: IncidentRecord) -> list[str]:
    over = alert.state is AlertState.RESOLVED
    ended = f"resolved at step {fmt.step(alert.resolved_step)}" if over and alert.resolved_step is not None else ""
    state = "unresolved" if alert.state is AlertState.FIRING and not record.goes_on else alert.state.value
    return [
        f"since step {fmt.step(alert.onset_step)}",
        ended or state,
        record.quiet.get(alert.alert_id, ""),
        alert.reason,
    ]


def delivery_list(record: IncidentRecord) -> Markup:
    """Return the notifications of the incident ``record`` as an HTML list with channel, message and delivery status."""
    title = el("div", "Delivery", cls="rl-panel")
    if not record.messages:
        return joined(title, el("div", "not sent", cls="rl-quiet"))
    lines = [
        el("li", el("b", fmt.shorten(message.channel, 40)), f" {_event(message)}: {delivery_words(message)}")
        for message in record.messages
    ]
    return joined(title, el("ul", *lines, cls="rl-plain"))


def _event(message: OutboxMessage) -> str:
    return fmt.shorten(str(message.payload.get("event") or "alert"), 40)


def history_list(audit: tuple[AuditEntry, ...], now: float) -> Markup:
    """Return ``audit``, the user actions and notes of an incident, as an HTML list, the newest first; ``now`` is in
    Unix seconds.
    """
    title = el("div", "History", cls="rl-panel")
    if not audit:
        return joined(title, el("div", "nothing yet", cls="rl-quiet"))
    lines = [
        el(
            "li",
            el("b", fmt.shorten(entry.by, 60)),
            f" {DONE.get(entry.act, entry.act)}",
            f": {fmt.shorten(entry.text, 2000)}" if entry.text else "",
            el("span", f" {fmt.age(entry.at, now)}", cls="rl-quiet"),
        )
        for entry in reversed(audit)
    ]
    return joined(title, el("ul", *lines, cls="rl-plain"))


DONE = {"acknowledge": "acknowledged", "snooze": "snoozed", "note": "noted", "silence": "silenced"}
"""Actions of the audit log, in the past tense."""


def message_words(alert: Alert) -> str:
    """Return the message of an alert, preceded by the alert's kind unless the message contains it."""
    what, message = fmt.words(alert.kind), fmt.shorten(alert.message, 300)
    return message if what.casefold() in message.casefold() else f"{what}: {message}"


def delivery_words(message: OutboxMessage) -> str:
    """Return the delivery status of a message: ``sent``, ``pending after 2 tries: …`` or ``dead after 8 tries: …``."""
    error = fmt.shorten(message.last_error, 160)
    tries = fmt.plural(message.attempts, "try", "tries")
    if message.status is OutboxStatus.SENT:
        return "sent"
    if message.status is OutboxStatus.DEAD:
        return f"dead after {tries}" + (f": {error}" if error else "")
    if not message.attempts:
        return "pending"
    return f"pending after {tries}" + (f": {error}" if error else "")


# The forms, one for each action.


def _acknowledge(record: IncidentRecord) -> None:
    st.caption("Stops reminders and escalation unless the incident gets worse. Its resolution is still sent.")
    why = st.text_input(
        "What are you doing about it?", key="take-why", max_chars=300, placeholder="visible to everyone"
    )
    _send(
        "Acknowledge",
        "take",
        "The incident was not acknowledged.",
        lambda: (
            acts.acknowledge_all(
                queries.store(),
                record.incident.firing or record.incident.alerts[:1],
                by=layout.principal(),
                why=why or "",
            ).by
        ),
        "Acknowledged by {}",
    )


def _snooze(record: IncidentRecord) -> None:
    st.caption(
        "Sends nothing for this time unless the incident gets worse. Alerts that still fire afterwards are sent then."
    )
    length = st.selectbox("For", list(acts.LENGTHS), index=1, key="snooze-for")
    why = st.text_input("Reason", key="snooze-why", max_chars=300)
    _send(
        "Snooze",
        "snooze",
        "The incident was not snoozed.",
        lambda: (
            acts.snooze(queries.store(), record.incident.alerts, by=layout.principal(), length=length, why=why or "").by
        ),
        "Snoozed by {}",
    )


def _silence(record: IncidentRecord) -> None:
    run, lead = record.run, record.incident.lead
    name = (run.name if run else "") or record.incident.run_id
    offered = acts.scopes(lead, fmt.shorten(name, 60), run.project if run else "", fmt.words(lead.kind))
    st.caption(
        "Sends nothing for matching alerts, new and critical ones included, until the silence ends. "
        "They stay visible here."
    )
    scope = st.selectbox("Scope", offered, format_func=lambda scope: scope.label, key="silence-of")
    length = st.selectbox("For", list(acts.LENGTHS), index=1, key="silence-for")
    why = st.text_input("Reason (required)", key="silence-why", max_chars=300)
    _send(
        "Silence",
        "silence",
        "Nothing was silenced.",
        lambda: acts.silence(queries.store(), scope, by=layout.principal(), length=length, why=why or "").by,
        "Silenced by {}",
    )


def _note(record: IncidentRecord) -> None:
    text = st.text_area("Note", key="note-text", max_chars=2000, placeholder="visible to everyone")
    _send(
        "Add note",
        "note",
        "The note was not saved.",
        lambda: acts.note(queries.store(), record.incident.lead, by=layout.principal(), text=text or "").by,
        "Note added by {}",
    )


def _send(label: str, key: str, failed: str, act: Callable[[], str], done: str) -> None:
    layout.signature()
    if not st.button(label, type="primary", key=key):
        return
    try:
        who = act()
    except RLWatchError as error:
        st.error(failed)
        st.code(fmt.shorten(str(error), 600), language=None, wrap_lines=True)
        return
    close_incident()
    st.toast(done.format(fmt.shorten(who, 80)), icon=":material/check:")
    st.rerun()
