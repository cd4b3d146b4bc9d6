"""Results of an evaluation as tables of text, for terminals and pages alike, and the page of the leaderboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """One table: a title, a line on how to read it, headers and rows."""

    title: str
    note: str
    headers: Row
    rows: Sequence[Row]

    def markdown(self) -> str:
        """As a table of Markdown; figures are aligned to the right."""
        lines = ["| " + " | ".join(self.headers) + " |", "|---" + "|--:" * (len(self.headers) - 1) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in self.rows]
        return "\n".join((f"### {self.title}", "", self.note, "", *lines, ""))


def pages(evaluation: Mapping[str, Any], *, each: bool = True) -> list[Page]:
    """All tables of an evaluation (its ``to_dict()``); ``each``: also by recipe and type, not by family only."""
    tools = evaluation["tools"]
    transferred = bool(evaluation["about"]["folds"])
    kinds = ("time to warn", "family", "recipe", "type") if each else ("time to warn", "family")
    return [
        _alarms(tools, transferred=transferred),
        _budgets(tools),
        _skill(tools),
        *(page for kind in kinds if (page := _groups(tools, kind)) is not None),
        *_repositories(tools),
    ]


def facts(about: Mapping[str, Any]) -> str:
    """Facts of what was judged, a sentence each."""
    classes = ", ".join(f"{count} {name}" for name, count in about["classes"].items())
    types = ", ".join(f"{name or 'unnamed'} {count}" for name, count in about["types"].items()) or "none"
    split = f"{about['folds']} folds by {about['split']}" if about["folds"] else "no folds"
    return (
        f"{about['runs']} runs ({classes}) of {about['recipes']} recipes in {about['families']} families, "
        f"{about['rows']} rows, {about['healthy_steps']:.0f} healthy steps. Types of failure: {types}. "
        f"Labels {about['labels']}; {split}; {about['draws']} bootstrap draws over runs, seed {about['seed']}."
    )


def _alarms(tools: Sequence[Mapping[str, Any]], *, transferred: bool) -> Page:
    picked = "thresholds from the other folds" if transferred else "thresholds picked on these very runs: flattering"
    headers = (
        *("tool", "forecast", "by placebo", "p", "built up", "10 steps ahead", "by placebo", "p"),
        *("detected", "within 10 rows"),
        *("lead", "false per 1000 steps", "per 1000 rows", "occupancy", "clean runs alarmed", "early faults"),
    )
    note = (
        f"At 1 false alarm per 1000 healthy steps, {picked}; tools without a dial as they are. Forecast: events with "
        "an alarm 100 to 5 steps before the onset; detected: by 10 steps after it. Placebo: hits expected of alarms as "
        "frequent as in clean runs over the same steps; p: chance of as many. Built up: forecast, of those whose fault "
        "was there for 20 steps and of a kind that shows. In brackets: 90 % intervals; of the lead, quartiles; * marks "
        "what went beyond the budget."
    )
    return Page("Alarms", note, headers, [_alarm_row(tool) for tool in tools])


def _alarm_row(tool: Mapping[str, Any]) -> Row:
    at = tool["headline"]
    lead = at["lead"]
    return (
        _name(tool),
        _counted(at["forecast"], at["events"]) + interval(at["recall_interval"]),
        f"{at['placebo']:.1f}",
        f"{at['p']:.2g}",
        _counted(at["built_up_forecast"], at["built_up"]),
        _counted(at["early"], at["events"]),
        f"{at['placebo_early']:.1f}",
        f"{at['p_early']:.2g}",
        _counted(at["detected"], at["events"]),
        _counted(at["detected_rows"], at["events"]),
        "-" if lead is None else f"{lead[1]:.0f} [{lead[0]:.0f}, {lead[2]:.0f}]",
        figure(at["per_1000"]) + ("" if at["met"] else "*") + interval(at["per_1000_interval"]),
        figure(at["per_1000_rows"]),
        figure(at["occupancy"], 3),
        f"{at['clean_alarmed']}/{at['clean']}",
        f"{at['faults_detected']}/{at['faults']}",
    )


def _budgets(tools: Sequence[Mapping[str, Any]]) -> Page:
    budgets = ("0.5", "1", "2")
    kinds = {"transferred": "", "pooled": "pooled ", "strict": "all runs "}
    headers = ("tool", *(f"{name}{budget}" for name in kinds.values() for budget in budgets))
    rows = []
    for tool in tools:
        cells = [_realised(tool[kind].get(budget)) for kind in kinds for budget in budgets]
        if tool["as_is"] is not None:
            cells = [_realised(tool["as_is"]), *["-"] * (len(cells) - 1)]
        rows.append((_name(tool), *cells))
    note = (
        "Share of events forecast @ false alarms per 1000 steps that were realised, share of clean runs with an alarm "
        "(of those into which nothing was put that they had to get over); at budgets of 0.5, 1 and 2. Pooled: "
        "thresholds picked on the scored runs, so flattering. All runs: all alarms in ambiguous and in faulty runs are "
        "false too. A tool without a dial has its one setting in the first column; * marks what went beyond the budget."
    )
    return Page("Recall by budget", note, headers, rows)


def _realised(at: Mapping[str, Any] | None) -> str:
    if at is None:
        return "-"
    alarmed = f", {at['clean_alarmed'] / at['clean']:.0%}" if at["clean"] else ""
    alarmed += f" ({at['untouched_alarmed'] / at['untouched']:.0%})" if at["untouched"] else ""
    return f"{figure(at['recall'])} @ {figure(at['per_1000'])}{alarmed}" + ("" if at["met"] else "*")


def _skill(tools: Sequence[Mapping[str, Any]]) -> Page:
    horizons = list(tools[0]["skill"]) if tools else []
    headers = (
        *("tool", *(f"AUROC {h}" for h in horizons), *(f"AUPRC {h}" for h in horizons)),
        *("AUROC 50, built up", "Brier skill 50", "ECE 50", "rows with a forecast"),
    )
    rows = []
    for tool in tools:
        at = tool["skill"]
        rocs = [figure(at[h]["auroc"]) + interval(at[h]["auroc_interval"]) for h in horizons]
        precisions = [figure(at[h]["auprc"]) for h in horizons]
        middle = at["50"]
        told = share(middle["covered"], middle["rows"])
        calibrated = (figure(middle["brier_skill"]), figure(middle["ece"], 3))
        rows.append((_name(tool), *rocs, *precisions, figure(middle.get("auroc_built_up")), *calibrated, told))
    note = (
        "Of rows before an onset, does the tool tell those that fail within so many steps from the others? Rows near "
        "the end of a run without onset are left out; rows without a forecast rank last. Built up: without the runs "
        "whose failure came at once, or within 20 steps of its fault. Brier skill (against the base "
        "rate) and expected calibration error need chances."
    )
    return Page("Skill", note, headers, rows)


def _groups(tools: Sequence[Mapping[str, Any]], kind: str) -> Page | None:
    names = sorted({name for tool in tools for name in tool["groups"][kind]})
    if not names:
        return None
    rows = [(name, *(_group(tool["groups"][kind].get(name)) for tool in tools)) for name in names]
    note = "Events forecast / events, then detected by 10 steps after; in brackets clean runs alarmed / clean runs."
    return Page(f"By {kind}", note, (kind, *(_name(tool) for tool in tools)), rows)


def _group(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    events = f"{found['forecast']}/{found['events']}, {found['detected']}" if found["events"] else ""
    clean = f"({found['clean_alarmed']}/{found['clean']})" if found["clean"] else ""
    return f"{events} {clean}".strip() or "-"


def _repositories(tools: Sequence[Mapping[str, Any]]) -> list[Page]:
    """Of runs of others, a table; none where no repository is named."""
    names = list(tools[0].get("repositories", {})) if tools else []
    if not names:
        return []
    rows = [(name, *(_repository(tool["repositories"][name]) for tool in tools)) for name in names]
    note = (
        "Failures with an alarm from 100 steps before up to the onset / failures, how many by placebo (clean runs of "
        "each repository weigh the same), p; late: by 10 steps or 10 logged rows after it. Of an early failure both "
        "count from the start of monitoring. In brackets clean runs alarmed / clean runs. Last, each once: "
        "repositories found in half or more of their failures, in brackets those alarmed in half or more of their "
        "clean runs."
    )
    return [Page("By repository", note, ("repository", *(_name(tool) for tool in tools)), rows)]


def _repository(found: Mapping[str, Any]) -> str:
    told = "; late ".join(
        f"{hits['found']}/{found['failures']} by {hits['placebo']:.1f}, p {hits['p']:.2g}"
        for hits in (found["by_onset"], found["late"])
    )
    clean = f"({found['clean_alarmed']}/{found['clean']})" if found["clean"] else ""
    return f"{told if found['failures'] else ''} {clean}".strip() or "-"


def _name(tool: Mapping[str, Any]) -> str:
    return f"{tool['name']} ({tool['note']})" if tool["note"] else str(tool["name"])


def _counted(part: int, whole: int) -> str:
    return f"{part}/{whole} = {part / whole:.2f}" if whole else f"{part}/0"


def share(part: float, whole: float) -> str:
    """``part / whole`` as a figure; a dash of nothing."""
    return figure(part / whole) if whole else "-"


def figure(value: float | None, digits: int = 2) -> str:
    """A number with so many digits; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def interval(bounds: Sequence[float] | None) -> str:
    """`` [low, high]``, or nothing."""
    return "" if bounds is None else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"


# The leaderboard's page: evaluations as sections, how they were made, how to add to them.

_HEAD = """\
# Leaderboard: forecasting failures of RLVR runs

Made by `python -m benchmarks.forecast leaderboard`; do not edit it by hand. Runs are real policy-gradient training with
a fault (or none) at a known step; [the protocol](forecast-evaluation.md)
defines labels, budgets and every term. Every table has tools that use no metric (silence, noise, a clock): a tool that
does not beat them has no skill.
"""
_TAIL = """\
## Add a tool

Write its scores on the rows of the table, one row for each step, using only the rows up to that step, as CSV or
Parquet. The columns are `run, step, score` (the higher the worse; leave a cell empty without a forecast), or
`run, step, alarm` (0 or 1) for a tool without a threshold. `p20, p50, p100`, the chance of a failure within so many
steps, are optional. Then

    python -m benchmarks.forecast evaluate TABLE --split run --scores NAME=FILE

A tool that is fitted to runs is fitted once for each fold, to the runs outside it: `folds_of(table, split)` of
`rlwatch.forecast.examples` lists the runs of each fold. One setting serves all runs, and no recipe, configuration or
length of a run may be read.

## Add runs

One row for each logged step: `run`, `recipe`, `family`, `step`, metrics by their canonical names (names of TRL, verl,
OpenRLHF and others are read), and hidden columns for labels: `truth/acc`, `truth/nan`, `truth/skipped`. A second table,
NAME-runs, has `recipe`, `family` and `pair` of each run. Label them with `rlwatch forecast label TABLE`, or give
labels of your own (`run_id, severity, onset_step`; `repo`, to judge by repository as well) with `--index`.
"""


def leaderboard_page(evaluations: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The leaderboard's page, from (title, evaluation) pairs; a title "" is made from the split."""
    parts = [_HEAD]
    for title, evaluation in evaluations:
        about = evaluation["about"]
        made = f"`{about['command']}`, rlwatch {about['rlwatch']}" if "command" in about else "the scorer"
        parts += [f"## {title or _title(about)}\n", f"{facts(about)} Made by {made}.\n"]
        parts += [table.markdown() for table in pages(evaluation)]
    return "\n".join([*parts, _TAIL])


def _title(about: Mapping[str, Any]) -> str:
    titles = {"run": "Known recipes", "recipe": "Recipes held out", "family": "Families held out"}
    return titles.get(about["split"], "External runs")
