"""``rlwatch scan LOG``: what happened in a log, and why, as rlwatch would have said it had it watched."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import SEVERITY_STYLES, print_json, progress_bar, reading, say, warn
from rlwatch.cli.fetching import STDIN, fetched
from rlwatch.cli.names_text import map_hint, print_names, print_roles
from rlwatch.cli.options import (
    ConfigOption,
    MapOption,
    PatternOption,
    ReadAsOption,
    RunOfLogOption,
    TrainerOption,
    examples,
    format_of,
    naming_of,
    rules_of,
)
from rlwatch.cli.view_text import (
    print_alarms,
    print_answer,
    print_diagnosis,
    print_findings,
    print_forecast,
    print_headline,
    print_not_judged,
)
from rlwatch.wording import step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlwatch.cli.continuous import Scanned
    from rlwatch.errors import ImportFormatError

EPILOG = examples(
    "rlwatch scan train.log",
    "rlwatch scan trainer_state.json --format json | jq .alarms",
    "rlwatch scan runs.csv --run seed3 || echo 'critical alarm'",
    "rlwatch scan outputs/ --format markdown",
    "rlwatch scan own_loop.jsonl --map reward=my_score",
    "kubectl logs trainer-0 | rlwatch scan -",
    "rlwatch scan odd.log --pattern 'it (?P<step>\\d+).* R=(?P<reward>\\S+) H=(?P<entropy>\\S+)'",
)


class Output(StrEnum):
    """Form in which a scan prints."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    JUNIT = "junit"
    MARKDOWN = "markdown"


def scan(
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG...",
            help="Logs of any trainer rlwatch reads: console text, JSON lines, trainer_state.json, CSV, Parquet, a "
            "wandb file, TensorBoard's event files, a database of trackio, MLflow or Aim, packed or not; a directory "
            "of logs; a URL (http, https); - for stdin.",
        ),
    ],
    *,
    run: RunOfLogOption = None,
    read_as: ReadAsOption = None,
    pattern: PatternOption = None,
    source: TrainerOption = "",
    mapped: MapOption = None,
    config: ConfigOption = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            "--all",
            help="Print all findings, alarms, actions, name mappings and skipped checks.",
        ),
    ] = False,
    output: Annotated[
        Output,
        typer.Option(
            "--format",
            help="text for people; json for scripts; github: annotations of a workflow; junit: a report that CI "
            "systems show; markdown: a table for a pull request.",
        ),
    ] = Output.TEXT,
) -> None:
    """Replay logs through the detectors and alert rules; each finding uses only the steps up to it.

    Exit code 0: nothing critical, 1: a failure or a critical finding, 2: no log could be read ( unreadable logs of
    several are listed on stderr), 3: not judged (too few steps, or no reward metric). Several runs print one line
    each; with --format json a log of one run prints an object, several runs a list.
    """
    found, problems = scanned(logs, run, format_of(read_as, pattern), source, config, mapped=mapped or ())
    reports = [one.report for one in found]
    if output is Output.TEXT:
        for one in found:
            if len(found) > 1 and not everything:
                print_line(one)
            else:
                print_report(one, everything=everything)
    elif output is Output.JSON:
        documents = [report.to_dict() for report in reports]
        print_json(documents[0] if len(documents) == 1 else documents)
    else:
        from rlwatch.cli import continuous

        written = {
            Output.GITHUB: continuous.workflow_commands,
            Output.JUNIT: continuous.junit,
            Output.MARKDOWN: continuous.table,
        }
        typer.echo(written[output](found, problems))
    codes = {report.view.verdict.exit_code for report in reports}
    if code := next((code for code in (1, 3) if code in codes), 0):
        raise typer.Exit(code)


def scanned(
    given: Sequence[str],
    run: str | None,
    read_as: str | None,
    source: str,
    config: Path | None,
    *,
    mapped: Sequence[str] = (),
) -> tuple[list[Scanned], list[ImportFormatError]]:
    """Each run of the logs, or ``run`` only, and why a log could not be read, which is named on stderr, too.

    Raises ``ImportFormatError`` where none can be read.
    """
    from rlwatch.cli.continuous import Scanned
    from rlwatch.errors import ImportFormatError
    from rlwatch.importers import logs_in, read_log
    from rlwatch.scanner import replay

    rules, naming = rules_of(config), naming_of(mapped, config)
    found: list[Scanned] = []
    problems: list[ImportFormatError] = []
    for named in given:
        with fetched(named) as path:
            logs = logs_in(path)
            for log in logs:
                try:
                    with reading(log):
                        runs = read_log(log, run=run, format=read_as, naming=naming)
                except ImportFormatError as error:
                    problems.append(error)
                    continue
                name = str(log) if log != path else "standard input" if named == STDIN else named
                for one in runs:
                    report = replay(one, source=source, rules=rules, progress=progress_bar)
                    found.append(Scanned(name, report, tuple({n for r in one.records for n in r.metrics})))
            if not logs:
                problems.append(ImportFormatError(named, "is a directory without a log"))
    if not found and len(problems) == 1:
        raise problems[0]
    for problem in problems:
        warn(f"skipped: {problem}")
    if not found:
        raise ImportFormatError(", ".join(given), f"could not read any of {len(problems)} files")
    return found, problems


def print_report(found: Scanned, *, everything: bool = False) -> None:
    """Print the answer; with ``everything`` also all findings, advice, alarms, names and what was not judged."""
    report, view = found.report, found.report.view
    facts = f"{report.format}, {step(report.steps)} steps, {len(report.metrics)} known metrics"
    read = [*report.notes, *(f"skipped {skipped}" for skipped in report.skipped)]
    if not everything:
        alarms = [(alarm.severity, alarm.kind, alarm.step) for alarm in report.alarms]
        print_answer(view, alarms, [facts, *map_hint(found.names, view.source), *read], "-v")
        return
    print_headline(view, detail=True)
    say(f"{found.log}  {report.run}".strip() + f"  ({facts})", style="bold")
    print_diagnosis(view.explanation, everything=True)
    print_forecast(view.forecasts)
    print_findings(view.told)
    print_alarms([(alarm.severity, alarm.kind, alarm.step, alarm.reason) for alarm in report.alarms])
    for note in [report.rows] * bool(report.rows) + read:
        say(note, style="dim")
    print_names(found.names, view.source)
    print_roles(found.names, view.source)
    print_not_judged(view.not_judged, "-v", everything=True)
    say()


def print_line(found: Scanned) -> None:
    """Print the headline of one run of several, behind its name."""
    report = found.report
    name = found.log if report.run in found.log else f"{found.log} {report.run}"
    urgency = report.view.verdict.urgency
    say(f"{name}: {report.view.headline}", style="green" if urgency is None else SEVERITY_STYLES[urgency])
