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
from rlwatch.wording import duration, meant, number, one_line, step

EPILOG = examples(
    "rlwatch runs",
    "rlwatch runs --project math-rl --limit 10",
    "rlwatch runs --tag paper --search 'lr=3e-5 -ablation'",
    "rlwatch runs --format json | jq -r '.runs[] | select(.status == \"dead\") | .run_id'",
)

LONGEST_NAME = 40


def runs(
    *,
    store: StoreOption = None,
    project: Annotated[str | None, typer.Option("--project", help="Only the runs of this project.")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Only runs with this tag; may be given again.")] = None,
    search: Annotated[
        str,
        typer.Option(
            "--search",
            metavar="QUERY",
            help="Only runs that fit: words of id, name, tags, notes or config, and settings as lr=3e-5, beta>0, "
            "model~qwen; all must fit, - before one turns it round.",
        ),
    ] = "",
    archived: Annotated[bool, typer.Option("--archived", help="Archived runs, too.")] = False,
    deleted: Annotated[bool, typer.Option("--deleted", help="Instead those that are deleted.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many runs; 0 for all.")] = 0,
    output: FormatOption = Format.TEXT,
) -> None:
    """List the runs of a store, newest first: status, last step, last values."""
    from rlwatch.curation.search import matching

    now = time.time()
    with opened(store) as source:
        every = source.runs(deleted=deleted)
        found = [
            run
            for run in matching(every, search)
            if (project is None or run.project == project)
            and set(tag or ()) <= set(run.tags)
            and (archived or deleted or not run.curation.archived)
        ]
        rows = [describe(source, run, now) for run in (found[:limit] if limit else found)]
        unreadable = dict(source.unreadable())
    if output is Format.JSON:
        print_json({"runs": rows, "unreadable": unreadable})
        return
    if rows:
        tags, values = ["tags"] if any(row["tags"] for row in rows) else [], [f">{key}" for key in KEY_METRICS]
        print_table(
            ("status", "verdict", "project", "name", *tags, "run", ">step", *values, ">last sign"),
            [_cells(row, tagged=bool(tags)) for row in rows],
        )
    elif not unreadable:
        asked = {"in project": project, "with tag": ", ".join(tag or ()), "that fit": search}
        given = [f"{word} {value!r}" for word, value in asked.items() if value]
        hint = meant(project, dict.fromkeys(run.project for run in every)) if project else ""
        what = " ".join(["no deleted runs" if deleted else "no runs", *given])
        say(what + hint if given or deleted else "no runs yet")
    for name, reason in unreadable.items():
        say(f"unreadable: {name}: {reason}", style="yellow")


def _verdict_cell(verdict: Mapping[str, JSON]) -> Cell:
    """The verdict in a word or two."""
    urgency = verdict["urgency"]
    return (verdict["name"], "green" if urgency is None else SEVERITY_STYLES[Severity(urgency)])


def _cells(row: dict[str, JSON], *, tagged: bool) -> list[Cell]:
    values = row["last_values"]
    return [
        (row["status"], STATUS_STYLES.get(row["status"], "")),
        _verdict_cell(row["verdict"]),
        row["project"],
        one_line(row["name"] or "-", LONGEST_NAME),
        *([one_line(", ".join(row["tags"]), LONGEST_NAME)] if tagged else []),
        row["run_id"],
        step(row["last_step"]),
        *(number(value) for value in key_values(values).values()),
        duration(row["age_s"]),
    ]
