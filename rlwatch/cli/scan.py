"""``rlwatch scan LOG``: what happened in a log, and why, as rlwatch would have said it had it watched."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import print_json, progress_bar, reading, say
from rlwatch.cli.options import (
    ConfigOption,
    Format,
    FormatOption,
    LogArgument,
    ReadAsOption,
    RunOfLogOption,
    TrainerOption,
    examples,
    rules_of,
)
from rlwatch.cli.view_text import (
    print_alarms,
    print_diagnosis,
    print_findings,
    print_forecast,
    print_not_judged,
    print_verdict,
)
from rlwatch.wording import step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlwatch.scanner import Report

SHOWN = 12
"""Names in a line."""
EPILOG = examples(
    "rlwatch scan train.log",
    "rlwatch scan trainer_state.json --format json | jq .alarms",
    "rlwatch scan runs.csv --run seed3 || echo 'critical alarm'",
)


def scan(
    log: LogArgument,
    *,
    run: RunOfLogOption = None,
    read_as: ReadAsOption = None,
    source: TrainerOption = "",
    config: ConfigOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All advice, and each detector that could not judge, with what it needs.")
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Replay a log through the detectors and alert rules; each judgement uses only the steps before it.

    Exit code 0: no critical alarm, 1: a critical alarm, 2: the log cannot be read. With --format json a log
    of one run gives one object, a log of several a list.
    """
    reports = scanned(log, run, read_as, source, config)
    if output is Format.JSON:
        documents = [report.to_dict() for report in reports]
        print_json(documents[0] if len(documents) == 1 else documents)
    else:
        for report in reports:
            print_report(report, everything=everything)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def scanned(log: Path, run: str | None, read_as: str | None, source: str, config: Path | None) -> list[Report]:
    """One report for each run of the log, or for ``run`` only."""
    from rlwatch.errors import ImportFormatError
    from rlwatch.importers import read_log
    from rlwatch.scanner import replay

    with reading(log):
        runs = read_log(log, run=run, format=read_as)
    if not runs:
        raise ImportFormatError(str(log), "holds no run")
    rules = rules_of(config)
    return [replay(imported, source=source, rules=rules, progress=progress_bar) for imported in runs]


def print_report(report: Report, *, everything: bool = False) -> None:
    """The answer first: verdict, cause, what to do; then what was found, how the log was read, what was not judged."""
    view = report.view
    print_verdict(view.verdict)
    name = f"{report.source}  {report.run}".strip()
    say(f"{name}  ({report.format}, {step(report.steps)} steps, {len(report.metrics)} known metrics)", style="bold")
    print_diagnosis(view.diagnosis, everything=everything)
    print_forecast(view.forecasts)
    print_findings(view.told)
    print_alarms([(alarm.severity, alarm.kind, alarm.step, alarm.reason) for alarm in report.alarms])
    for note in report.notes:
        say(note, style="dim")
    for skipped in report.skipped:
        say(f"skipped {skipped}", style="dim")
    print_names(report)
    print_not_judged(view.not_judged, "--all", everything=everything)
    say()


def print_names(report: Report) -> None:
    """Print what names no trainer gives were taken for, and which names nothing reads."""
    if report.guessed:
        pairs = [f"{name} as {metric}" for name, metric in report.guessed.items()]
        say(f"read by their words: {some(pairs)}", style="dim")
    if report.unknown:
        say(f"not known, so nothing judges them: {some(report.unknown)}", style="dim")
    if report.unjudged:
        reasons = [f"{count} {reason}" for reason, count in Counter(report.unjudged.values()).most_common()]
        say(f"known and not judged: {some(reasons)}", style="dim")


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
