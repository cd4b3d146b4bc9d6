"""``rlwatch show RUN``: one run in detail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from rlwatch.cli.action_rows import action_rows, print_actions
from rlwatch.cli.completion_rows import completion_rows, print_completions
from rlwatch.cli.console import print_json, print_table, say
from rlwatch.cli.culprit_rows import culprit_rows, localisations, print_culprits
from rlwatch.cli.diagnosis_rows import print_diagnosis
from rlwatch.cli.findings_table import print_findings
from rlwatch.cli.forecast_rows import newest_row, print_forecast
from rlwatch.cli.lookup import find_run
from rlwatch.cli.options import Format, FormatOption, StoreOption, examples
from rlwatch.cli.runs import describe, key_values
from rlwatch.cli.spike_rows import print_token_spikes, spike_rows
from rlwatch.cli.stores import opened
from rlwatch.cli.wording import STATUS_STYLES, age, number, step
from rlwatch.diagnosis import Diagnosis, diagnose
from rlwatch.metrics import BY_NAME, known, resolve
from rlwatch.ports import Store
from rlwatch.records import CULPRITS, JSON, Finding, RunInfo
from rlwatch.redaction import recordable

EPILOG = examples(
    "rlwatch show math-7b-s3",
    "rlwatch show 4f2a --metrics --spikes --completions",
    "rlwatch show math-7b-s3 --findings --format json",
)

MOST_SPIKES = 20


def show(
    run: Annotated[str, typer.Argument(help="A run: its id, its name, or the unambiguous beginning of either.")],
    *,
    metrics: Annotated[bool, typer.Option("--metrics", help="Every metric: last value, step, family.")] = False,
    spikes: Annotated[
        bool, typer.Option("--spikes", help="Tokens to blame for gradient spikes, and far-out tokens.")
    ] = False,
    completions: Annotated[bool, typer.Option("--completions", help="The newest completions recorded.")] = False,
    findings: Annotated[
        bool, typer.Option("--findings", help="Every finding, not only the newest, and all advice.")
    ] = False,
    store: StoreOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show one run: its state, last values, findings, what actions did; on demand metrics, tokens and completions."""
    now = time.time()
    with opened(store) as source:
        info = find_run(source, run)
        row = describe(source, info, now)
        found = source.findings(info.run_id)
        forecasts = source.forecasts(info.run_id, last=1 if output is Format.JSON else None)
        said = diagnosis_of(source, info, found)
        actions = action_rows(source.events(info.run_id), source.commands(info.run_id))
        every = last_metrics(source, info) if metrics else None
        tokens = _spikes(source, info.run_id) if spikes else None
        texts = completion_rows(source.completions(info.run_id, last=MOST_SPIKES)) if completions else None
    if output is Format.JSON:
        extra = {"metrics": every, "completions": texts, **(tokens or {})}
        print_json(
            row
            | {
                "config": recordable(info.config),
                "tags": info.tags,
                "host": info.host,
                "pid": info.pid,
                "findings": found,
            }
            | {"diagnosis": said.to_dict(), "forecast": newest_row(forecasts), "actions": actions}
            | {name: part for name, part in extra.items() if part is not None}
        )
        return
    _print_head(info, row)
    print_forecast(forecasts, now=True)
    print_diagnosis(said, everything=findings)
    _print_found(found, everything=findings)
    print_actions(actions)
    if every is not None:
        _print_metrics(every)
    if tokens is not None:
        _print_spikes(tokens)
    if texts is not None:
        print_completions(texts)


def diagnosis_of(store: Store, run: RunInfo, findings: Sequence[Finding]) -> Diagnosis:
    """What most likely caused the run's findings."""
    if not findings:
        return Diagnosis(why_not="nothing was found")
    names = known(store.metric_names(run.run_id), run.source)
    return diagnose(findings, events=store.events(run.run_id), source=run.source, measured=names)


def _spikes(store: Store, run_id: str) -> dict[str, list[dict[str, JSON]]]:
    """Culprits first, then far-out tokens; and what each localisation said."""
    culprits = culprit_rows(store.spikes(run_id, last=MOST_SPIKES, reason=CULPRITS))
    far_out = spike_rows(store.spikes(run_id, last=MOST_SPIKES))
    return {"spikes": culprits + far_out, "localisations": localisations(store.events(run_id))}


def _print_spikes(found: dict[str, list[dict[str, JSON]]]) -> None:
    culprits = [row for row in found["spikes"] if row["reason"] == CULPRITS]
    print_culprits(culprits, found["localisations"])
    far_out = [row for row in found["spikes"] if row["reason"] != CULPRITS]
    if far_out or not culprits:
        print_token_spikes(far_out)


def last_metrics(store: Store, run: RunInfo) -> list[dict[str, JSON]]:
    """Each recorded metric: its name, what it is canonically, unit, last step and value."""
    rows = []
    for name, (at, value) in sorted(store.last_values(run.run_id).items()):
        reading = resolve(name, run.source)
        canonical = reading.metric.name if reading else ""
        unit = BY_NAME[canonical].unit if reading else ""
        rows.append({"metric": name, "canonical": canonical, "unit": unit, "step": at, "value": value})
    return rows


def _print_head(run: RunInfo, row: dict[str, JSON]) -> None:
    say(f"{run.name or run.run_id}  {row['status']}", style=STATUS_STYLES.get(row["status"], "bold"))
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_at)) if run.created_at else "-"
    where = f"{run.host or '-'}, pid {run.pid}" if run.pid is not None else run.host or "-"
    facts = {
        "run": run.run_id,
        "project": run.project,
        "source": run.source or "-",
        "step": f"{step(run.last_step)}  (attempt {run.attempt})",
        "started": started,
        "last sign": f"{age(row['age_s'])} ago" if row["age_s"] is not None else "-",
        "where": where,
        "why ended": run.state_reason,
        "tags": ", ".join(run.tags),
    }
    for label, text in facts.items():
        if text:
            say(f"  {label:<10} {text}")
    values = row["last_values"]
    shown = [f"{label} {number(value)}" for label, value in key_values(values).items() if value is not None]
    if shown:
        say(f"  {'last':<10} {'  '.join(shown)}")


def _print_found(findings: list[Finding], *, everything: bool, newest: int = 10) -> None:
    if not findings:
        say("no findings")
        return
    shown = findings if everything else findings[-newest:]
    hidden = len(findings) - len(shown)
    print_findings(reversed(shown), title=f"Findings, newest first{f' ({hidden} older: --findings)' if hidden else ''}")


def _print_metrics(rows: list[dict[str, JSON]]) -> None:
    print_table(
        ("metric", "reads as", "unit", ">step", ">last"),
        [(r["metric"], r["canonical"] or "-", r["unit"] or "-", step(r["step"]), number(r["value"])) for r in rows],
        title="Metrics",
    )
