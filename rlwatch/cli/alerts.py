"""``rlwatch alerts [RUN]``: what fired, whether anybody was told, and why one is quiet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import Cell, print_json, print_table, say
from rlwatch.cli.findings_table import severity_cell
from rlwatch.cli.lookup import find_run
from rlwatch.cli.options import ConfigOption, Format, FormatOption, StoreOption, examples
from rlwatch.cli.stores import opened
from rlwatch.cli.strict_json import plain
from rlwatch.cli.wording import STATUS_STYLES, one_line, step
from rlwatch.clock import SystemClock
from rlwatch.records import JSON, Alert, OutboxMessage, OutboxStatus

if TYPE_CHECKING:
    from rlwatch.ports import Store

EPILOG = examples(
    "rlwatch alerts list",
    "rlwatch alerts list math-7b-s3",
    "rlwatch alerts list --format json | jq '.[] | select(.state == \"firing\")'",
)


def alerts(
    run: Annotated[str | None, typer.Argument(help="Only this run: id, name or unambiguous prefix.")] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """List alerts, newest first: what they are, who was told, and why one is quiet."""
    with opened(store) as source:
        run_id = None if run is None else find_run(source, run).run_id
        found = source.alerts(run_id)
        messages = source.outbox(run_id)
        quiet = _quiet(source, found, run_id, config)
    rows = [as_row(alert, messages) | {"quiet": quiet.get(alert.alert_id, "")} for alert in found]
    if output is Format.JSON:
        print_json(rows)
    elif not rows:
        say("no alerts")
    else:
        print_table(
            ("id", "state", "severity", "kind", "run", ">onset", ">step", "delivery", "what"),
            [_cells(row) for row in rows],
        )


def _quiet(store: Store, found: Sequence[Alert], run_id: str | None, config: Path | None) -> dict[str, str]:
    from rlwatch.alerts.config import load_config
    from rlwatch.alerts.people import standing

    policy = load_config(config, store_root=getattr(store, "root", None)).policy
    runs = {run.run_id: run for run in store.runs()}
    return standing(
        found,
        policy,
        SystemClock().now(),
        runs=runs,
        acknowledgements=store.acknowledgements(run_id),
        silences=store.silences(),
    )


def as_row(alert: Alert, messages: Sequence[OutboxMessage]) -> dict[str, JSON]:
    """The alert and, under ``delivery``, the messages that tell of it, without their payload."""
    from rlwatch.alerts.told import alert_ids

    mine = [message for message in messages if alert.alert_id in alert_ids(message)]
    delivery = [
        {
            "channel": m.channel,
            "status": m.status,
            "attempts": m.attempts,
            "last_error": m.last_error,
            "sent_at": m.sent_at,
        }
        for m in mine
    ]
    return dict(plain(alert)) | {"delivery": plain(delivery)}


def _cells(row: dict[str, JSON]) -> list[Cell]:
    what = one_line(row["message"], 80)
    return [
        row["alert_id"],
        (row["state"], STATUS_STYLES.get(row["state"], "")),
        severity_cell(row["severity"]),
        row["kind"],
        row["run_id"],
        step(row["onset_step"]),
        step(row["step"]),
        delivery_cell(row["delivery"]),
        f"{what} ({one_line(row['quiet'], 80)})" if row["quiet"] else what,
    ]


def delivery_cell(delivery: Sequence[dict[str, JSON]]) -> Cell:
    """The delivery in a few words; what went wrong wins over what went well."""
    if not delivery:
        return ("nobody told", "dim")
    for status in (OutboxStatus.DEAD, OutboxStatus.PENDING, OutboxStatus.SENT):
        fitting = [entry for entry in delivery if entry["status"] == status]
        if fitting:
            entry = fitting[-1]
            tries = f" after {entry['attempts']} tries" if entry["attempts"] > 1 else ""
            why = f": {one_line(entry['last_error'], 40)}" if entry["last_error"] and status != "sent" else ""
            return (f"{entry['channel']} {status}{tries}{why}", STATUS_STYLES.get(status.value, "yellow"))
    return ("unknown", "dim")
