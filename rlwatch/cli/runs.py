"""``rlwatch runs``: list the runs of a store, newest first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from rlwatch.analysis.rows import KEY_METRICS, describe, key_values
from rlwatch.cli.console import SEVERITY_STYLES, Cell, cell_of, print_json, print_table, say
from rlwatch.cli.options import FormatOption, OutputFormat, StoreOption, examples, opened
from rlwatch.columns import RUNS, heads
from rlwatch.records import JSON, Severity
from rlwatch.wording import meant, one_line

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
    project: Annotated[str | None, typer.Option("--project", help="Only runs of this project.")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Only runs with this tag. Repeatable.")] = None,
    search: Annotated[
        str,
        typer.Option(
            "--search",
            metavar="QUERY",
            help="Only matching runs: words of id, name, tags, notes or config, and settings such as lr=3e-5, beta>0, "
            "model~qwen; all must match, a leading - negates.",
        ),
    ] = "",
    archived: Annotated[bool, typer.Option("--archived", help="Include archived runs.")] = False,
    deleted: Annotated[bool, typer.Option("--deleted", help="Show deleted runs instead.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Maximum number of runs; 0: all.")] = 0,
    output: FormatOption = OutputFormat.TEXT,
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
    if output is OutputFormat.JSON:
        print_json({"runs": rows, "unreadable": unreadable})
        return
    if rows:
        tags = ["tags"] if any(row["tags"] for row in rows) else []
        names = ("status", "verdict", "project", "name", *tags, "run_id", "last_step", *KEY_METRICS, "age_s")
        print_table(heads(RUNS, names), [_cells(row, names) for row in rows])
    elif not unreadable:
        asked = {"in project": project, "with tag": ", ".join(tag or ()), "matching": search}
        given = [f"{word} {value!r}" for word, value in asked.items() if value]
        hint = meant(project, dict.fromkeys(run.project for run in every)) if project else ""
        what = " ".join(["no deleted runs" if deleted else "no runs", *given])
        say(what + hint if given or deleted else "no runs yet")
    for name, reason in unreadable.items():
        say(f"unreadable: {name}: {reason}", style="yellow")


def _verdict_cell(verdict: Mapping[str, JSON]) -> Cell:
    """Return the verdict in a word or two."""
    urgency = verdict["urgency"]
    return (verdict["name"], "green" if urgency is None else SEVERITY_STYLES[Severity(urgency)])


def _cells(row: dict[str, JSON], names: Sequence[str]) -> list[Cell]:
    values = row | key_values(row["last_values"]) | {"tags": ", ".join(row["tags"])}
    cells = {name: cell_of(RUNS[name], values[name]) for name in names if name != "verdict"}
    cells["verdict"] = _verdict_cell(row["verdict"])
    cells |= {name: one_line(values[name] or "-" * (name == "name"), LONGEST_NAME) for name in ("name", "tags")}
    return [cells[name] for name in names]
