"""``rlwatch runs``: every run of a store, newest first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import SEVERITY_STYLES, STATUS_STYLES, Cell, print_json, print_table, say
from rlwatch.cli.options import Format, FormatOption, StoreOption, examples, opened
from rlwatch.metrics import canonicalise
from rlwatch.ports import Store
from rlwatch.records import JSON, RunInfo, RunState, Severity
from rlwatch.wording import duration, number, one_line, step

if TYPE_CHECKING:
    from rlwatch.control.liveness import Sign

EPILOG = examples(
    "rlwatch runs",
    "rlwatch runs --project math-rl --limit 10",
    "rlwatch runs --format json | jq -r '.runs[] | select(.status == \"dead\") | .run_id'",
)

KEY_METRICS = {
    "reward": ("reward/mean",),
    "entropy": ("policy/entropy",),
    "KL": ("policy/kl_ref", "policy/kl_ref_k3"),
    "grad norm": ("optim/grad_norm",),
}
"""Column -> canonical metrics, the first that was measured: what tells a healthy run from a dying one at a glance."""
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


def describe(store: Store, run: RunInfo, now: float) -> dict[str, JSON]:
    """One run as a row: who it is, how it is, and its last canonical values."""
    last = {name: value for name, (_, value) in store.last_values(run.run_id).items()}
    from rlwatch.control.liveness import last_sign, sign_of
    from rlwatch.view import stored_verdict

    seen = last_sign(run)
    return {
        "run_id": run.run_id,
        "project": run.project,
        "name": run.name,
        "source": run.source,
        "status": status(run, sign_of(store, run, now) if run.state is RunState.RUNNING else None),
        "verdict": stored_verdict(store, run).to_dict(),
        "state": run.state,
        "attempt": run.attempt,
        "last_step": run.last_step,
        "created_at": run.created_at,
        "age_s": None if seen is None else max(0.0, now - seen),
        "last_values": canonicalise(last, run.source)[0],
    }


def key_values(last: Mapping[str, float]) -> dict[str, float | None]:
    """Column -> last value, None where nothing of it was measured."""
    return {column: next((last[name] for name in names if name in last), None) for column, names in KEY_METRICS.items()}


def _verdict_cell(verdict: Mapping[str, JSON]) -> Cell:
    """The verdict in a word or two."""
    level = verdict["level"]
    if level not in (None, Severity.INFO):
        return (level, SEVERITY_STYLES[Severity(level)])
    return ("ok", "green") if verdict["judged"] else ("not judged", "yellow")


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


def status(run: RunInfo, sign: Sign | None = None) -> str:
    """``running``, ``paused``, ``stale`` (no step), ``dead`` (no sign of its process), ``finished`` or ``crashed``.

    The writer's word, doubted after a silence.
    """
    if run.state is not RunState.RUNNING or sign is None:
        return run.state.value
    if sign.pause is not None:
        return "paused"
    if sign.dead_since is not None:
        return "dead"
    return "running" if sign.silent_s is None else "stale"
