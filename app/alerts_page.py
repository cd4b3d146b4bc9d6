"""The list of incidents: alerts of each run, their symptoms, assignee and notifications; and the silences."""

from __future__ import annotations

import time
from collections.abc import Sequence

import streamlit as st

from rlwatch.alerts.incidents import IncidentRecord, IncidentState
from rlwatch.alerts.silencing import matchers
from rlwatch.columns import ALERTS
from rlwatch.errors import RLWatchError
from rlwatch.records import Alert, AlertState, OutboxMessage, OutboxStatus, Silence

from . import format as fmt
from . import incident_dialog, layout, queries, table
from .health import AMBER, BLUE, VERMILLION
from .incident_acts import unsilence
from .incident_dialog import message_words
from .layout import GoToRun
from .markup import el

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
"""Prefix of a click on an incident; the id of its leading alert follows."""
ACKNOWLEDGE = "take:"
"""Prefix of a click on "acknowledge"; the id of the incident's leading alert follows."""

DELIVERY_LOOK = {
    OutboxStatus.SENT: ("✓", BLUE),
    OutboxStatus.PENDING: ("◌", AMBER),
    OutboxStatus.DEAD: ("✕", VERMILLION),
}


def matching(dockets: Sequence[IncidentRecord], choice: str) -> list[IncidentRecord]:
    """Return the incidents that match one of :data:`CHOICES`."""
    if choice == HEARTBEATS:
        return [docket for docket in dockets if docket.incident.heartbeat]
    found = [docket for docket in dockets if not docket.incident.heartbeat]
    if choice == "firing":
        return [docket for docket in found if docket.open]
    if choice == "undelivered":
        return [d for d in found if any(m.status is not OutboxStatus.SENT for m in d.messages)]
    return found


def headline(dockets: Sequence[IncidentRecord]) -> str:
    """Return the headline, as ``2 incidents firing, 1 acknowledged``."""
    firing = [docket for docket in dockets if docket.open and not docket.incident.heartbeat]
    if not firing:
        return "No firing incidents"
    quiet = (IncidentState.ACKNOWLEDGED, IncidentState.SNOOZED, IncidentState.SILENCED)
    counts = [(standing, sum(docket.standing is standing for docket in firing)) for standing in quiet]
    return ", ".join(
        [f"{fmt.plural(len(firing), 'incident')} firing", *(f"{count} {what}" for what, count in counts if count)]
    )


def silence_words(silence: Silence, now: float) -> str:
    """Describe a silence, as ``kind kl_drift for 2 h more, by ann: new data``."""
    left = fmt.duration(max(0.0, silence.until - now))
    return fmt.shorten(f"{matchers(silence)} for {left} more, by {silence.by}: {silence.why}", 300)


def incident_row(docket: IncidentRecord, now: float, *, may_take: bool) -> table.TableRow:
    """Return the incident as a row of :data:`INCIDENT_COLUMNS`; ``may_take``: the user may acknowledge it."""
    incident, run = docket.incident, docket.run
    project, name = ("", "") if run is None else (run.project, run.name)
    lead, quiet = incident.lead, docket.standing is not IncidentState.FIRING
    symptoms = [each for each in dict.fromkeys(fmt.words(a.kind) for a in incident.symptoms) if each]
    return table.TableRow(
        cells=[
            table.severity(incident.severity),
            table.text(docket.standing.value, quiet=quiet, title="; ".join(dict.fromkeys(docket.quiet.values()))),
            table.run_link(incident.run_id, project, name),
            table.link(
                message_words(lead), f"alerts?incident={lead.alert_id}", OPENS + lead.alert_id, fmt.words(lead.kind)
            ),
            table.text(fmt.step(incident.onset_step), title=resolved_words(lead)),
            table.text(fmt.shorten(", ".join(symptoms), 160), quiet=True),
            table.text(fmt.shorten(", ".join(dict.fromkeys(a.by for a in docket.acknowledgements)), 60)),
            delivery(docket.messages),
            table.text(fmt.age(incident.fired_at, now)),
            acknowledge_cell(docket) if may_take else table.text(""),
        ],
        opens="",
        quiet=quiet,
    )


def acknowledge_cell(docket: IncidentRecord) -> table.Cell:
    """Return a link that acknowledges the incident, if it is firing and not acknowledged yet."""
    taken = docket.standing is IncidentState.ACKNOWLEDGED
    if not docket.open or taken:
        return table.text("")
    return table.link("acknowledge", "alerts", ACKNOWLEDGE + docket.incident.lead.alert_id)


def resolved_words(alert: Alert) -> str:
    """Return ``over at step 4 900``, or an empty string while the alert fires."""
    over = alert.state is AlertState.RESOLVED and alert.resolved_step is not None
    return f"resolved at step {fmt.step(alert.resolved_step)}" if over else ""


def delivery(messages: Sequence[OutboxMessage]) -> table.Cell:
    """Return the delivery status: the worst of the incident's messages, and a list of all behind a click."""
    if not messages:
        return table.text("not sent", quiet=True)
    lines = [(message.channel, incident_dialog.delivery_words(message)) for message in messages]
    worst = max(messages, key=lambda m: (OutboxStatus.SENT, OutboxStatus.PENDING, OutboxStatus.DEAD).index(m.status))
    shape, colour = DELIVERY_LOOK[worst.status]
    cell = table.details(f"delivery-{worst.alert_id}", incident_dialog.delivery_words(worst), lines)
    return table.marked(cell, shape, colour)


# The page: incidents, the one that fired last first.


def page(go_to_run: GoToRun) -> None:
    """Draw all incidents of the store, and refresh them while the page is open."""
    with layout.readable():
        incident_dialog.dialog_if_open()
    st.fragment(_body, run_every=layout.REFRESH_S)(go_to_run)


def _body(go_to_run: GoToRun) -> None:
    with layout.readable():
        now = time.time()
        dockets = queries.dockets(now)
        head, store = st.columns([3, 2], vertical_alignment="bottom")
        head.html(el("div", headline(dockets), cls="rl-head"))
        with store:
            layout.store_line(_counted(dockets))
        _silences(now)
        if not dockets:
            st.caption("No alerts yet. See Rules for what fires an alert.")
            return
        shown = matching(dockets, _choice())
        may_take = layout.principal().may_command
        opened = table.show("alerts", INCIDENT_COLUMNS, [incident_row(d, now, may_take=may_take) for d in shown])
        if opened is not None and opened.startswith((OPENS, ACKNOWLEDGE)):
            incident_dialog.open_incident(opened.partition(":")[2])
            st.rerun()  # the dialog lies outside the fragment that is redrawn
        elif opened is not None:
            go_to_run(opened)


def _counted(dockets: Sequence[IncidentRecord]) -> str:
    beats = sum(docket.incident.heartbeat for docket in dockets)
    quiet = f" · {fmt.plural(beats, 'run')} silent or crashed" if beats else ""
    return fmt.plural(len(dockets) - beats, "incident") + quiet


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
