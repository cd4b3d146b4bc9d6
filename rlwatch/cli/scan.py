"""``rlwatch scan LOG``: what rlwatch would have said, and when, had it watched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
from rlwatch.cli.view_text import print_alarms, print_diagnosis, print_findings, print_forecast
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
            print_report(report)
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


def print_report(report: Report) -> None:
    """The report as text: what was read, what was forecast, what was found, what could not be judged, the verdict."""
    name = f"{report.source}  {report.run}".strip()
    say(f"{name}  ({report.format}, {step(report.steps)} steps, {len(report.metrics)} known metrics)", style="bold")
    for note in report.notes:
        say(note, style="dim")
    for skipped in report.skipped:
        say(f"skipped {skipped}", style="dim")
    print_names(report)
    print_forecast(report.forecasts)
    print_findings(report.findings)
    print_alarms([(alarm.severity, alarm.kind, alarm.step, alarm.reason) for alarm in report.alarms])
    print_diagnosis(report.diagnosis)
    for part in report.not_run:
        say(f"not run: {part.name}: {part.reason}", style="dim")
    say(*verdict(report))
    say()


def print_names(report: Report) -> None:
    """What the log's names were taken for, where that is not told by the trainer, and which nothing reads."""
    if report.guessed:
        pairs = [f"{name} as {metric}" for name, metric in report.guessed.items()]
        say(f"read by their words: {some(pairs)}", style="dim")
    if report.unknown:
        say(f"not known, so nothing judges them: {some(report.unknown)}", style="dim")


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def verdict(report: Report) -> tuple[str, str]:
    """The last line and its style."""
    from rlwatch.records import Severity

    critical = [alarm for alarm in report.alarms if alarm.severity is Severity.CRITICAL]
    if critical:
        kinds = ", ".join(dict.fromkeys(f"{alarm.kind} at step {step(alarm.step)}" for alarm in critical))
        return f"CRITICAL: {kinds}", "bold red"
    if report.alarms:
        return f"ok, with warnings: {len(report.alarms)}", "yellow"
    return "ok: no alarm", "green"
