"""``rlwatch show RUN``: print one run in detail, and on request its metrics, outlier tokens and completions."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.analysis.rows import Row, describe, key_values, last_metrics, layer_row
from rlwatch.cli.console import STATUS_STYLES, Cell, print_fitting, print_json, print_table, print_text
from rlwatch.cli.options import FormatOption, OutputFormat, StoreOption, examples, opened
from rlwatch.cli.rollouts import (
    MOST,
    FromOption,
    MostOption,
    PromptOption,
    ReverseOption,
    SortOption,
    ToOption,
    Wish,
    newest_rollouts,
    print_completions,
    print_recurring,
    print_rollouts,
    recurring_rows,
)
from rlwatch.cli.view_text import (
    newest_row,
    print_diagnosis,
    print_findings,
    print_forecast,
    print_headline,
    print_not_judged,
)
from rlwatch.control.liveness import stack_of, stage_words, stalls_now
from rlwatch.ports import Store
from rlwatch.records import (
    CULPRITS,
    JSON,
    LOCALISED,
    RESPONSES,
    Command,
    Event,
    Finding,
    RunInfo,
    RunState,
    SpikeBatch,
)
from rlwatch.redaction import recordable
from rlwatch.rollouts import column_values, completion_rows
from rlwatch.wording import duration, local_moment, number, one_line, percent, step

if TYPE_CHECKING:
    from rlwatch.view import RunView

EPILOG = examples(
    "rlwatch show math-7b-s3",
    "rlwatch show 4f2a --metrics --spikes",
    "rlwatch show 4f2a --completions --sort repetition --from 900",
    "rlwatch show math-7b-s3 --findings --format json",
)

MOST_SPIKES = 20
MOST_RECURRING = 400
"""Most batches of culprit tokens that are searched for recurring properties."""


def show(
    run: Annotated[str, typer.Argument(help="Run: id, name or unique prefix.")],
    *,
    metrics: Annotated[bool, typer.Option("--metrics", help="List every metric: last value, step, family.")] = False,
    spikes: Annotated[
        bool, typer.Option("--spikes", help="List culprit tokens of gradient spikes, and outlier tokens.")
    ] = False,
    completions: Annotated[
        bool, typer.Option("--completions", help="List recorded completions, newest first or by --sort.")
    ] = False,
    findings: Annotated[
        bool,
        typer.Option("--findings", help="List every finding, action and skipped check."),
    ] = False,
    sort: SortOption = None,
    reverse: ReverseOption = False,
    first: FromOption = None,
    last: ToOption = None,
    prompt: PromptOption = "",
    most: MostOption = MOST,
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Show one run: state, last values, findings and commands; on demand metrics, tokens and completions."""
    from rlwatch.view import view_of_run

    now, wish = time.time(), Wish(sort, reverse, first, last, prompt, most)
    completions = completions or wish != Wish()
    with opened(store) as source:
        info = find_run(source, run)
        row = describe(source, info, now)
        view = view_of_run(source, info, gone=row["status"] == "dead")
        actions = action_rows(view.events, view.commands)
        every = last_metrics(source, info) if metrics else None
        layers = layer_row(source, info)
        tokens = _spikes(source, info.run_id) if spikes else None
        every_text = completion_rows(source.completions(info.run_id)) if completions else []
    texts = wish.of(every_text) if completions else None
    if output is OutputFormat.JSON:
        document = _document(info, row, view, layers, actions)
        extra = {"metrics": every, "completions": texts, **(tokens or {})}
        print_json(document | {name: part for name, part in extra.items() if part is not None})
        return
    _print_head(info, row)
    _print_stalls(info, view.events)
    _print_layers(layers)
    _print_shed(view.shed)
    print_headline(view, detail=True)
    print_diagnosis(view.explanation, everything=findings)
    if view.forecast is not None:
        print_forecast(view.forecasts, now=True)
    _print_found(view.all_findings, everything=findings)
    print_actions(actions)
    if every is not None:
        _print_metrics(every)
    if tokens is not None:
        _print_spikes(tokens)
    if texts is not None:
        print_completions(texts, wish, len(every_text))
    print_not_judged(view.not_judged, "--findings", everything=findings)


def _print_shed(lines: Sequence[str]) -> None:
    for line in lines:
        print_text(line, style="yellow")


def _document(info: RunInfo, row: Row, view: RunView, layers: object, actions: object) -> dict[str, Any]:
    """Return the run as plain values."""
    return row | {
        "config": recordable(info.config),
        "tags": info.tags,
        "host": info.host,
        "pid": info.pid,
        "stage": info.stage,
        "stage_since": info.stage_since,
        "stalls": [event.body for event in stalls_now(info, view.events)],
        "findings": view.findings,
        "recoveries": view.recoveries,
        "layers": layers,
        "shed": list(view.shed),
        "headline": view.headline,
        "diagnosis": view.explanation.to_dict(),
        "actions": actions,
        "forecast": newest_row(view.forecasts) if view.forecast is not None else None,
    }


def _spikes(store: Store, run_id: str) -> dict[str, list[dict[str, JSON]]]:
    """Return culprits first, then outlying tokens, and the result of each localisation."""
    culprits = culprit_rows(store.spikes(run_id, last=MOST_SPIKES, reason=CULPRITS))
    far_out = spike_rows(store.spikes(run_id, last=MOST_SPIKES))
    return {
        "spikes": culprits + far_out,
        "localisations": localisations(store.events(run_id)),
        "responses": newest_rollouts(store, run_id),
        "recurring": recurring_rows(store.spikes(run_id, last=MOST_RECURRING, reason=CULPRITS)),
    }


def _print_spikes(found: dict[str, list[dict[str, JSON]]]) -> None:
    culprits = [row for row in found["spikes"] if row["reason"] == CULPRITS]
    print_culprits(culprits, found["localisations"])
    print_rollouts(found["responses"])
    print_recurring(found["recurring"])
    far_out = [row for row in found["spikes"] if row["reason"] != CULPRITS]
    if far_out or not culprits:
        print_token_spikes(far_out)


def _print_head(run: RunInfo, row: dict[str, JSON]) -> None:
    print_text(f"{run.name or run.run_id}  {row['status']}", style=STATUS_STYLES.get(row["status"], "bold"))
    started = local_moment(run.created_at) if run.created_at else "-"
    where = f"{run.host or '-'}, pid {run.pid}" if run.pid is not None else run.host or "-"
    facts = {
        "run": run.run_id,
        "project": run.project,
        "source": run.source or "-",
        "step": f"{step(run.last_step)}  (attempt {run.attempt})",
        "started": started,
        "last seen": f"{duration(row['age_s'])} ago" if row["age_s"] is not None else "-",
        "where": where,
        "stage": stage_words(run, time.time()) if run.state is RunState.RUNNING else "",
        "end reason": run.state_reason,
        "tags": ", ".join(run.tags),
        "notes": one_line(run.curation.notes, 400),
        "logged as": run.curation.logged_name if run.curation.logged_name != run.name else "",
        "archived": f"by {run.curation.edited_by}" if run.curation.archived else "",
        "deleted": f"by {run.curation.deleted_by}" if run.curation.deleted else "",
    }
    for label, text in facts.items():
        if text:
            print_text(f"  {label:<10} {text}")
    values = row["last_values"]
    shown = [f"{label} {number(value)}" for label, value in key_values(values).items() if value is not None]
    if shown:
        print_text(f"  {'last':<10} {'  '.join(shown)}")


def _print_stalls(run: RunInfo, events: Sequence[Event]) -> None:
    """Print the stage in which each rank stalls, and the innermost frames of its training thread."""
    for stall in stalls_now(run, events):
        print_text(f"  {'stalled':<10} {one_line(str(stall.body.get('says', '')), 400)}", style="red")
        for frame in stack_of(stall):
            print_text(f"  {'':<10}   {one_line(frame, 200)}", style="dim")


def _print_layers(row: Row | None) -> None:
    """Print one line; nothing if too few layers or steps were measured."""
    if row is None:
        return
    largest = f"largest {number(row['largest'])} at step {step(row['largest_step'])}"
    text = f"heterogeneity {number(row['heterogeneity'])} (usually {number(row['median'])}, {largest}; 0: all in step)"
    heaviest = f"  {row['heaviest']} holds {percent(row['max_share'])}" if math.isfinite(row["max_share"]) else ""
    print_text(f"  {'layers':<10} {text}{heaviest}")


def _print_found(findings: Sequence[Finding], *, everything: bool, newest: int = 10) -> None:
    if not findings:
        print_text("no findings")
        return
    shown = findings if everything else findings[-newest:]
    hidden = len(findings) - len(shown)
    print_findings(reversed(shown), title=f"Findings, newest first{f' ({hidden} older: --findings)' if hidden else ''}")


def _print_metrics(rows: list[dict[str, JSON]]) -> None:
    print_table(
        ("metric", "read as", "unit", ">step", ">last"),
        [(r["metric"], r["canonical"] or "-", r["unit"] or "-", step(r["step"]), number(r["value"])) for r in rows],
        title="Metrics",
    )


# Decisions of automatic actions on a run: carried out, dry run, or refused, with the reason.

ACTION_EVENT = "action"
"""Kind of the events that :mod:`rlwatch.run.alerting` records for automatic actions."""


def action_rows(events: Sequence[Event], commands: Sequence[Command]) -> list[dict[str, JSON]]:
    """Return the automatic actions in ``events``, oldest first, each with its outcome.

    ``answer`` is the trainer's result if the action sent one of ``commands``.
    """
    answers = {command.idempotency_key: command for command in commands}
    return [_action_row(event, answers) for event in events if event.kind == ACTION_EVENT]


def _action_row(event: Event, commands: dict[str, Command]) -> dict[str, JSON]:
    body = event.body
    command = commands.get(f"{body.get('action')}/{body.get('alert')}@{event.step}")
    answer = f"{command.status.value}: {command.result}".removesuffix(": ") if command else ""
    return {"step": event.step, **body, "answer": answer if body.get("outcome") == "requested" else ""}


def print_actions(rows: Sequence[dict[str, JSON]]) -> None:
    """Print a table of automatic actions; nothing if there are none."""
    if not rows:
        return
    print_table(
        (">step", "action", "command", "upon", "outcome", "result"),
        [_action_cells(row) for row in rows],
        title="Actions",
    )


def _action_cells(row: dict[str, JSON]) -> list[Cell]:
    args = " ".join(f"{name}={value}" for name, value in (row.get("args") or {}).items() if value is not None)
    outcome = row.get("outcome", "")
    return [
        step(row["step"]),
        one_line(str(row.get("action", ""))),
        one_line(f"{row.get('do', '')} {args}".strip()),
        str(row.get("kind_of_alert", "")),
        str(outcome),
        one_line(str(row.get("why_not") or row["answer"] or "-")),
    ]


# Token spikes as rows: from columns of equal length to one dictionary per token, the worst first.

MOST_ROWS = 50
WORST_BY = ("contribution", "screen", "ratio", "advantage", "entropy")
"""Columns that rank outlier tokens; the first of these that a batch has is used."""
SPIKE_IMPORTANCE = (
    "step", "rank", "sequence", "position", "token_id", "text", "logp", "old_logp", "rollout_logp", "ratio",
    "advantage", "screen", "entropy", "ref_logp", "reason",
)  # fmt: skip
"""Columns of the table of outlier tokens; on a narrow terminal the first are kept longest."""


def spike_rows(batches: Sequence[SpikeBatch], most: int = MOST_ROWS) -> list[dict[str, JSON]]:
    """Return at most ``most`` outlier tokens, newest step first, within a step the largest or non-finite first.

    Batches of culprit tokens and of whole responses are left out.
    """
    rows: list[dict[str, JSON]] = []
    far_out = [batch for batch in batches if batch.reason not in {CULPRITS, RESPONSES}]
    for batch in sorted(far_out, key=lambda batch: batch.step, reverse=True):
        rows.extend(_worst_first(batch))
        if len(rows) >= most:
            break
    return rows[:most]


def print_token_spikes(rows: list[dict[str, JSON]]) -> None:
    """Print a table of outlier tokens, or a note that none are recorded."""
    if not rows:
        print_text("no token spikes recorded")
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    if all(row["rank"] == 0 for row in rows):
        names.remove("rank")
    print_fitting(
        [name if name in {"text", "reason"} else f">{name}" for name in names],
        [[_spike_cell(row.get(name)) for name in names] for row in rows],
        SPIKE_IMPORTANCE,
        title="Outlier tokens",
    )


def _spike_cell(value: JSON) -> str:
    if isinstance(value, float) or value is None:
        return number(value)
    return one_line(value, 40)


def rows_of(batch: SpikeBatch) -> list[dict[str, JSON]]:
    """Return each token of ``batch`` as a row with step, rank and reason, in recorded order."""
    columns = {name: column_values(column) for name, column in batch.columns.items()}
    return [
        {"step": batch.step, "rank": batch.rank, "reason": batch.reason}
        | {name: column[index] for name, column in columns.items()}
        for index in range(len(batch))
    ]


def _worst_first(batch: SpikeBatch) -> list[dict[str, JSON]]:
    rows = rows_of(batch)
    decisive = next((name for name in WORST_BY if name in batch.columns), None)
    return rows if decisive is None else sorted(rows, key=lambda row: -_badness(row[decisive], decisive))


def _badness(value: float, name: str) -> float:
    """Return the distance from the normal value: a ratio of 1/8 is as far from 1 as one of 8; NaN is largest."""
    if math.isnan(value):
        return math.inf
    if name == "ratio":
        return abs(math.log(value)) if value > 0 else math.inf
    return abs(value)


# Culprits of gradient localisation as rows, and how a terminal shows them.

MOST_CULPRITS = 50
MOST_SUMMARIES = 3


def culprit_rows(batches: Sequence[SpikeBatch], most: int = MOST_CULPRITS) -> list[Row]:
    """Return at most ``most`` culprit tokens (those that dominate a gradient spike), newest step first.

    Within a step they are in recorded order, the worst first.
    """
    newest = sorted((b for b in batches if b.reason == CULPRITS), key=lambda batch: -batch.step)
    rows = [row for batch in newest for row in rows_of(batch)]
    return [row | {"layers": _layers(row)} for row in rows[:most]]


def localisations(events: Sequence[Event], most: int = MOST_CULPRITS) -> list[Row]:
    """Return at most ``most`` results of localising a gradient spike to tokens, newest first."""
    found = [event for event in events if event.kind == LOCALISED]
    return [{"step": event.step, **event.body} for event in reversed(found[-most:])]


def print_culprits(rows: Sequence[Row], summaries: Sequence[Row]) -> None:
    """Print the newest localisations of gradient spikes in ``summaries``, then a table of culprit tokens from ``rows``.

    Nothing is printed if both are empty.
    """
    for summary in summaries[:MOST_SUMMARIES]:
        print_text(f"step {step(summary.get('step'))}: {_localisation_summary(summary)}", style="bold")
        for line in _localisation_details(summary):
            print_text(f"  {line}")
    if rows:
        ranks = any(row["rank"] != 0 for row in rows)
        shown = {name: show for name, show in _CULPRIT_COLUMNS.items() if ranks or name != ">rank"}
        cells = [[show(row) for show in shown.values()] for row in rows]
        known = [i for i in range(len(shown)) if any(line[i] != "-" for line in cells)]
        headers = [list(shown)[i] for i in known]
        print_fitting(
            headers,
            [[line[i] for i in known] for line in cells],
            _CULPRIT_IMPORTANCE,
            title="Culprit tokens, newest step first",
        )


def _localisation_summary(found: Mapping[str, JSON]) -> str:
    """Return a summary: ``gradient norm 8.31 (threshold 1.2), token ratio; by fd, gap 1e-04, complete``."""
    threshold, gap, method = found.get("threshold"), found.get("gap"), found.get("method")
    verdict = found.get("verdict")
    limit = "" if threshold is None else f" (threshold {number(threshold)})"
    text = f"gradient norm {number(found.get('norm'))}{limit}"
    if verdict:
        text += f", {verdict}: {found.get('cause') or 'unexplained'}"
    elif found.get("culprits"):
        text += f", {found.get('cause') or 'unexplained'}"
    if method:
        text += f"; by {method}"
    if gap is not None:
        text += f", gap {number(gap)}, {'complete' if found.get('complete') else 'incomplete'}"
    return text


def _localisation_details(found: Mapping[str, JSON]) -> list[str]:
    lines = [f"not localised: {found['why_not']}"] if found.get("why_not") else []
    heads = {"Verdict": "statement", "Cause": "because", "Cure": "remedy"}
    lines += [f"{head}: {found[name]}" for head, name in heads.items() if found.get(name)]
    if found.get("message") and not found.get("statement"):
        lines.append(str(found["message"]))
    lines += [f"or {cure}" for cure in _other_cures(found)]
    lines += _recorded(found)
    chain = (found.get("trace") or {}).get("chain")
    if chain:
        lines.append(f"not finite, in order of time: {', '.join(chain)}")
    lines += [f"note: {note}" for note in found.get("notes") or []]
    cost = found.get("cost") or {}
    if cost.get("forwards") or cost.get("backwards"):
        passes = f"{cost.get('forwards', 0)} forwards, {cost.get('backwards', 0)} backwards"
        lines.append(f"cost: {passes}, {number(float(cost.get('seconds') or 0.0))} s")
    return lines


def _other_cures(found: Mapping[str, JSON]) -> list[str]:
    """Return the remedies after the first, as text."""
    cures = [cure for cure in (found.get("cures") or [])[1:] if isinstance(cure, Mapping)]
    return [f"{c.get('action')} to {number(c.get('after'))}" for c in cures if c.get("action")]


def _recorded(found: Mapping[str, JSON]) -> list[str]:
    """Describe the outlying tokens, the part that the recorded ones hold, and the units that hold the norm."""
    lines = []
    count, explained = found.get("count") or 0, found.get("explained")
    if count:
        held = "" if explained is None else f", those recorded hold {percent(explained)} of what is unusual"
        lines.append(f"{count} {'token stands' if count == 1 else 'tokens stand'} out{held}")
    units = [unit for unit in found.get("units") or [] if isinstance(unit, Mapping)]
    if len(units) > 1:
        parts = [f"{unit.get('name')} {percent(unit.get('share'))}" for unit in units]
        lines.append(f"shares of the norm: {', '.join(parts)}")
    return lines


def _layers(row: Row) -> dict[str, float]:
    """Return the stored JSON object; empty if there is none."""
    text = row.get("layers")
    found = json.loads(text) if isinstance(text, str) and text else {}
    return found if isinstance(found, dict) else {}


def _token(row: Row) -> str:
    """Return the text of a token, if recorded, and its id."""
    token, text = row.get("token_id"), row.get("text")
    known = "-" if token is None else str(token)
    return f"{one_line(repr(text), 16)} {known}" if text else known


def _layer(row: Row) -> str:
    """Return the layer with the largest share of the token's gradient."""
    layers = row["layers"]
    if not layers:
        return "-"
    name = max(layers, key=layers.__getitem__)
    return f"{name.removeprefix('model.')} {percent(layers[name])}"


def _share(row: Row) -> str:
    return percent(row.get("share"))


def _own(row: Row) -> str:
    return number(row.get("own_norm")) if row.get("verified") else "-"


def _plain(name: str) -> Callable[[Row], str]:
    return lambda row: number(row.get(name))


_CULPRIT_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    ">step": lambda row: step(row["step"]),
    ">rank": lambda row: str(row["rank"]),
    ">seq": lambda row: str(row.get("sequence", "-")),
    ">prompt": lambda row: str(row.get("prompt_index", "-")),
    ">group": lambda row: one_line(str(row.get("group", "-")), 12),
    ">sample": lambda row: str(row.get("sample", "-")),
    "task": lambda row: one_line(str(row.get("task") or "-"), 16),
    ">pos": lambda row: str(row.get("position", "-")),
    "token": _token,
    "cause": lambda row: str(row.get("cause", "-")),
    ">share": _share,
    ">contribution": _plain("contribution"),
    ">own norm": _own,
    ">ratio": _plain("ratio"),
    ">advantage": _plain("advantage"),
    ">reward": _plain("reward"),
    ">logp": _plain("logp"),
    ">old": _plain("old_logp"),
    ">rollout": _plain("rollout_logp"),
    ">ref": _plain("ref_logp"),
    ">entropy": _plain("entropy"),
    ">coefficient": _plain("coefficient"),
    "layer": _layer,
    "why": lambda row: str(row.get("why") or "-"),
}
_CULPRIT_IMPORTANCE = (
    "step", "rank", "seq", "pos", "token", "cause", "share", "own norm", "ratio", "advantage", "logp", "layer",
    "prompt", "group", "sample", "task", "entropy", "contribution", "old", "rollout", "ref", "reward", "coefficient",
)  # fmt: skip
