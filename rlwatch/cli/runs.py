"""``rlwatch runs``: every run of a store, newest first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

import typer

from rlwatch.analysis.rows import KEY_METRICS, describe, key_values
from rlwatch.cli.console import SEVERITY_STYLES, STATUS_STYLES, Cell, print_json, print_table, say
from rlwatch.cli.options import Format, FormatOption, StoreOption, examples, opened
from rlwatch.records import JSON, Severity
from rlwatch.wording import duration, number, one_line, step

EPILOG = examples(
    "rlwatch runs",
    "rlwatch runs --project math-rl --limit 10",
    "rlwatch runs --format json | jq -r '.runs[] | select(.status == \"dead\") | .run_id'",
)

LONGEST_NAME = 40


def runs(
    store: StoreOption = None,
    project: Annotated[str | None, typer.Option("--project", help="Only the runs of this project.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many runs; 0 for all.")] = 0,
    output: FormatOption = Format.TEXT,
) -> None:
    """List the runs of a store, newest first: status, last step, last values."""
    now = time.time()
    with opened(store) as source:
        found = [run for run in source.runs() if project is None or run.project == project]
        rows = [describe(source, run, now) for run in (found[:limit] if limit else found)]
        unreadable = dict(source.unreadable())
    if output is Format.JSON:
        print_json({"runs": rows, "unreadable": unreadable})
        return
    if rows:
        print_table(
            ("status", "verdict", "project", "name", "run", ">step", *(f">{key}" for key in KEY_METRICS), ">last sign"),
            [_cells(row) for row in rows],
        )
    elif not unreadable:
        say("no runs yet" if project is None else f"no runs in project {project!r}")
    for name, reason in unreadable.items():
        say(f"unreadable: {name}: {reason}", style="yellow")


def _verdict_cell(verdict: Mapping[str, JSON]) -> Cell:
    """The verdict in a word or two."""
    urgency = verdict["urgency"]
    return (verdict["name"], "green" if urgency is None else SEVERITY_STYLES[Severity(urgency)])


def _cells(row: dict[str, JSON]) -> list[Cell]:
    values = row["last_values"]
    return [
        (row["status"], STATUS_STYLES.get(row["status"], "")),
        _verdict_cell(row["verdict"]),
        row["project"],
        one_line(row["name"] or "-", LONGEST_NAME),
        row["run_id"],
        step(row["last_step"]),
        *(number(value) for value in key_values(values).values()),
        duration(row["age_s"]),
    ]
