"""``rlwatch alerts incidents | snooze | note``: group related alerts into incidents, and record user
actions on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.cli.console import STATUS_STYLES, Cell, plain, print_json, print_table, print_text
from rlwatch.cli.options import ByOption, ConfigOption, FormatOption, OutputFormat, StoreOption, examples, me, opened
from rlwatch.cli.view_text import severity_cell
from rlwatch.clock import SystemClock
from rlwatch.columns import ALERTS, heads
from rlwatch.records import JSON, OutboxMessage, OutboxStatus
from rlwatch.wording import local_moment, one_line, plural, step, words

if TYPE_CHECKING:
    from rlwatch.alerts.incidents import IncidentRecord
    from rlwatch.ports import Store

AlertArgument = Annotated[
    str, typer.Argument(metavar="ALERT", help="Id (or unique prefix) of one of its alerts; see rlwatch alerts.")
]
INCIDENTS = examples(
    "rlwatch alerts incidents",
    "rlwatch alerts incidents math-7b-s3 --format json",
    "rlwatch alerts incidents --heartbeats",
)
SNOOZE = examples("rlwatch alerts snooze 3f2a --for 2h", "rlwatch alerts snooze 3f2a --for 1d --why 'after the demo'")
NOTE = examples("rlwatch alerts note 3f2a 'the judge was down from 14:00 on'")


def incidents(
    run: Annotated[str | None, typer.Argument(help="Only this run: id, name or unique prefix.")] = None,
    *,
    heartbeats: Annotated[
        bool, typer.Option("--heartbeats", help="Include runs that only stopped reporting or crashed.")
    ] = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List incidents, newest first: related alerts as one row, with state and assignee."""
    with opened(store) as source:
        every = _incident_records(source, None if run is None else find_run(source, run).run_id, config)
    found = [record for record in every if heartbeats or not record.incident.heartbeat]
    if output is OutputFormat.JSON:
        print_json([incident_row(record) for record in found])
        return
    if found:
        print_table(
            [
                *heads(ALERTS, ("alert_id", "state", "severity", "run_id", "message", "onset_step")),
                "symptoms",
                "who",
                "delivery",
            ],
            [_cells(record) for record in found],
        )
    else:
        print_text("no incidents")
    left = len(every) - len(found)
    if left:
        print_text(
            f"{plural(left, 'run')} that only stopped reporting or crashed hidden: show with --heartbeats", style="dim"
        )


def snooze(
    alert: AlertArgument,
    *,
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="Duration: 90m, 2h, 1d12h.")],
    by: ByOption = "",
    why: Annotated[str, typer.Option("--why", help="Reason, shown with the incident.")] = "",
    config: ConfigOption = None,
    store: StoreOption = None,
) -> None:
    """Pause notifications of an incident unless it gets worse; alerts that still fire afterwards are sent."""
    from rlwatch.alerts import silencing

    for_s = silencing.seconds_of(duration)
    with opened(store) as target:
        incident = incident_record(target, alert, config).incident
        fresh = silencing.snooze(target, incident.alerts, by=by or me(), for_s=for_s, why=why)
    kinds = ", ".join(dict.fromkeys(each.kind for each in incident.firing))
    print_text(
        f"{fresh.silence_id}: {kinds} on {incident.run_id} snoozed until {local_moment(fresh.until)}, unless it worsens"
    )


def note(
    alert: AlertArgument,
    text: Annotated[str, typer.Argument(help="Text of the note.")],
    by: ByOption = "",
    store: StoreOption = None,
) -> None:
    """Add a note to an alert and its incident."""
    from rlwatch.alerts.silencing import find_alert
    from rlwatch.alerts.silencing import note as noted

    with opened(store) as target:
        found = find_alert(target.alerts(), alert)
        entry = noted(target, found, by=by or me(), text=text)
    print_text(f"{found.alert_id}: noted by {entry.by}")


def incident_record(store: Store, reference: str, config: Path | None) -> IncidentRecord:
    """Return the incident that contains the alert whose id starts with ``reference``.

    ``config`` is the configuration file, or None for the default. Raises ``ConfigError`` if no alert matches, several
    do, or the alert never fired.
    """
    from rlwatch.alerts.silencing import find_alert
    from rlwatch.errors import ConfigError

    alert = find_alert(store.alerts(), reference)
    found = _incident_records(store, alert.run_id, config)
    mine = [d for d in found if any(each.alert_id == alert.alert_id for each in d.incident.alerts)]
    if not mine:
        raise ConfigError(f"alert {alert.alert_id} never fired, so it has no incident")
    return mine[0]


def _incident_records(store: Store, run_id: str | None, config: Path | None) -> list[IncidentRecord]:
    from rlwatch.alerts.config import load_config
    from rlwatch.alerts.incidents import incident_records

    policy = load_config(config, store_root=getattr(store, "root", None)).policy
    return incident_records(store, policy, SystemClock().now(), run_id=run_id)


def incident_row(record: IncidentRecord) -> dict[str, JSON]:
    """Return the incident and its state, alerts, acknowledgements and deliveries as plain values for JSON."""
    incident = record.incident
    cause = incident.cause
    row = {
        "incident": incident.lead.alert_id,
        "run_id": incident.run_id,
        "state": record.standing.value,
        "severity": incident.severity.value,
        "kind": incident.lead.kind,
        "onset_step": incident.onset_step,
        "fired_at": incident.fired_at,
        "heartbeat": incident.heartbeat,
        "cause": None if cause is None else {"kind": cause.kind, "title": cause.title, "sure": cause.sure.value},
        "alerts": [plain(alert) for alert in incident.alerts],
        "quiet": dict(record.quiet),
        "acknowledgements": [plain(each) for each in record.acknowledgements],
        "silences": [plain(each) for each in record.silences],
        "audit": [plain(each) for each in record.audit],
        "delivery": delivery_of(record.messages),
    }
    return dict(row)


def _cells(record: IncidentRecord) -> list[Cell]:
    incident = record.incident
    symptoms = ", ".join(dict.fromkeys(words(alert.kind) for alert in incident.symptoms))
    who = ", ".join(dict.fromkeys(each.by for each in record.acknowledgements))
    return [
        incident.lead.alert_id,
        (record.standing.value, STATUS_STYLES.get(record.standing.value, "")),
        severity_cell(incident.severity.value),
        incident.run_id,
        one_line(incident.lead.message, 80),
        step(incident.onset_step),
        one_line(symptoms, 60),
        one_line(who, 30),
        delivery_cell(delivery_of(record.messages)),
    ]


def delivery_of(messages: Sequence[OutboxMessage]) -> list[dict[str, JSON]]:
    """Return channel, status, tries, last error and time of each alert message as plain values."""
    return [
        plain(
            {
                "channel": m.channel,
                "status": m.status,
                "attempts": m.attempts,
                "last_error": m.last_error,
                "sent_at": m.sent_at,
            }
        )
        for m in messages
    ]


def delivery_cell(delivery: Sequence[dict[str, JSON]]) -> Cell:
    """Return the delivery of an alert in a few words for a table cell; a failed message takes precedence over a sent
    one.
    """
    if not delivery:
        return ("not sent", "dim")
    for status in (OutboxStatus.DEAD, OutboxStatus.PENDING, OutboxStatus.SENT):
        fitting = [entry for entry in delivery if entry["status"] == status]
        if fitting:
            entry = fitting[-1]
            tries = f" after {entry['attempts']} tries" if entry["attempts"] > 1 else ""
            why = f": {one_line(entry['last_error'], 40)}" if entry["last_error"] and status != "sent" else ""
            return (f"{entry['channel']} {status}{tries}{why}", STATUS_STYLES.get(status.value, "yellow"))
    return ("unknown", "dim")
