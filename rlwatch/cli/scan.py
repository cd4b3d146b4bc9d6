"""``rlwatch scan LOG``: replay a log, and report failures and their causes as for a live run."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

import typer

from rlwatch.cli.console import SEVERITY_STYLES, print_json, print_text, progress_bar, reading, warn
from rlwatch.cli.names import map_hint, print_names, print_roles
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
from rlwatch.errors import ImportFormatError
from rlwatch.records import Severity
from rlwatch.wording import cut, for_markdown, one_line, step

if TYPE_CHECKING:
    from rlwatch.alerts.rules import Rule
    from rlwatch.importers import ImportedRun
    from rlwatch.scanner import Alarm, Report


# Logs that are not local files: standard input and URLs (http, https), stored in temporary files while they are read.


STDIN = "-"
MOST = 4 << 30
"""Most bytes that are downloaded from a URL."""
PATIENCE_S = 60.0


@contextmanager
def fetched(named: str) -> Iterator[Path]:
    """Provide the log called ``named`` (a path, a URL, or ``-`` for stdin) as a local file or directory within the
    block.

    Raises ``ImportFormatError`` if it cannot be downloaded.
    """
    if named != STDIN and not is_address(named):
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="rlwatch-") as home:
        target = Path(home) / (Path(urlsplit(named).path).name or "log" if named != STDIN else "stdin")
        if named == STDIN:
            with target.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        else:
            _download(named, target)
        yield target


def is_address(named: str) -> bool:
    """Return whether ``named`` is an ``http://`` or ``https://`` URL."""
    return named.startswith(("http://", "https://"))


def _download(address: str, target: Path) -> None:
    """Download ``address`` to ``target``, following redirects."""
    import httpx

    got = 0
    try:
        with (
            target.open("wb") as file,
            httpx.stream("GET", address, follow_redirects=True, timeout=PATIENCE_S) as answer,
        ):
            answer.raise_for_status()
            for block in answer.iter_bytes():
                got += len(block)
                if got > MOST:
                    raise ImportFormatError(address, f"is larger than the {MOST >> 30} GiB that that rlwatch downloads")
                file.write(block)
    except httpx.HTTPStatusError as error:
        status = f"{error.response.status_code} {error.response.reason_phrase}"
        raise ImportFormatError(address, f"the server answered {status}; is this the URL of the raw file?") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ImportFormatError(address, f"cannot be fetched: {error or type(error).__name__}") from None


# Output of a scan for continuous integration: GitHub annotations, JUnit XML, a Markdown table.


Problems = Sequence[ImportFormatError]
"""Errors of the logs that could not be read."""


class Scanned(NamedTuple):
    """Scan report of one run, with the name of its log and the metric names in it."""

    log: str
    report: Report
    names: tuple[str, ...]


Found = Sequence[Scanned]
_LEVELS = {Severity.CRITICAL: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
LONGEST = 600
_WITHIN_XML = str.maketrans({code: "\N{REPLACEMENT CHARACTER}" for code in range(32) if code not in (9, 10, 13)})
"""Characters that no XML document may hold."""


def workflow_commands(found: Found, problems: Problems = ()) -> str:
    """Return a GitHub workflow command for each alarm and verdict in ``found``, and each unreadable log in
    ``problems``.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    lines = []
    for log, report, _ in found:
        for alarm in worst(report.alarms):
            title = f"{report.run}: {alarm.kind} at step {alarm.step}"
            lines.append(_command(_LEVELS[alarm.severity], log, title, alarm.reason))
        level = "warning" if report.view.verdict.exit_code else "notice"
        lines.append(_command(level, log, f"{report.run}: verdict", report.view.headline))
    lines += [_command("warning", one.source, "not read", one.problem) for one in problems]
    return "\n".join(lines)


def _command(level: str, log: str, title: str, message: str) -> str:
    return f"::{level} file={_property(log)},title={_property(one_line(title))}::{_data(cut(message, LONGEST))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def junit(found: Found, problems: Problems = ()) -> str:
    """Return scan results as JUnit XML: a suite for each run, with a case for its verdict and one for each kind of
    alarm.

    A critical alarm is a failure; a log in ``problems``, which could not be read, is a case with an error.
    """
    root = ET.Element("testsuites", name="rlwatch")
    for log, report, _ in found:
        alarms = worst(report.alarms)
        failed = [alarm for alarm in alarms if alarm.severity is Severity.CRITICAL]
        suite = ET.SubElement(
            root, "testsuite", name=_xml(report.run), file=_xml(log), tests=str(len(alarms) + 1),
            failures=str(len(failed) + bool(report.view.verdict.exit_code)), errors="0", skipped="0",
        )  # fmt: skip
        headline = report.view.headline
        _case(suite, report.run, "verdict", headline if report.view.verdict.exit_code else "", headline)
        for alarm in alarms:
            text = f"step {alarm.step}: {alarm.reason}"
            _case(suite, report.run, alarm.kind, text if alarm in failed else "", text)
    for one in problems:
        log = _xml(one.source)
        suite = ET.SubElement(
            root, "testsuite", name=log, file=log, tests="1", failures="0", errors="1", skipped="0"
        )  # fmt: skip
        case = ET.SubElement(suite, "testcase", classname=log, name="read")
        ET.SubElement(case, "error", message=_xml(cut(one.problem, LONGEST)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


def _case(suite: ET.Element, run: str, name: str, failure: str, output: str) -> None:
    case = ET.SubElement(suite, "testcase", classname=_xml(run), name=_xml(name))
    if failure:
        ET.SubElement(case, "failure", message=_xml(cut(failure, LONGEST)))
    ET.SubElement(case, "system-out").text = _xml(output)


def _xml(text: str) -> str:
    return text.translate(_WITHIN_XML)


def table(found: Found, problems: Problems = ()) -> str:
    """Return scan results as a Markdown table of run, steps, verdict and worst alarms, with unreadable
    logs at the end.
    """
    lines = ["| run | steps | verdict | alarms |", "|---|---|---|---|"]
    for log, report, _ in found:
        name = report.run if report.run in log else f"{report.run} ({log})"
        alarms = ", ".join(f"{alarm.kind} {alarm.severity.value} at {alarm.step}" for alarm in worst(report.alarms))
        cells = (name, str(report.steps), cut(report.view.headline, LONGEST), alarms or "none")
        lines.append("| " + " | ".join(for_markdown(one_line(cell, LONGEST)) for cell in cells) + " |")
    for one in problems:
        cells = (one.source, "", f"not read: {one.problem}", "")
        lines.append("| " + " | ".join(for_markdown(one_line(cell, LONGEST)) for cell in cells) + " |")
    return "\n".join(lines)


def worst(alarms: Iterable[Alarm]) -> list[Alarm]:
    """Return for each kind of alarm the first one of its highest severity, in order of steps."""
    kept: dict[str, Alarm] = {}
    for alarm in alarms:
        known = kept.get(alarm.kind)
        if known is None or alarm.severity.rank < known.severity.rank:
            kept[alarm.kind] = alarm
    return sorted(kept.values(), key=lambda alarm: alarm.step)


# ``rlwatch scan LOG``: replay a log, and report failures and their causes as for a live run.


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
    """Form in which ``rlwatch scan`` prints its results."""

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
    _print(found, problems, output, everything=everything)
    codes = {one.report.view.verdict.exit_code for one in found}
    if code := next((code for code in (1, 3) if code in codes), 0):
        raise typer.Exit(code)


def _print(
    found: Sequence[Scanned], problems: Sequence[ImportFormatError], output: Output, *, everything: bool
) -> None:
    if output is Output.TEXT:
        for one in found:
            if len(found) > 1 and not everything:
                print_line(one)
            else:
                print_report(one, everything=everything)
    elif output is Output.JSON:
        documents = [one.report.to_dict() for one in found]
        print_json(documents[0] if len(documents) == 1 else documents)
    else:
        written = {
            Output.GITHUB: workflow_commands,
            Output.JUNIT: junit,
            Output.MARKDOWN: table,
        }
        typer.echo(written[output](found, problems))


def scanned(
    given: Sequence[str],
    run: str | None,
    read_as: str | None,
    source: str,
    config: Path | None,
    *,
    mapped: Sequence[str] = (),
) -> tuple[list[Scanned], list[ImportFormatError]]:
    """Scan the logs in ``given`` and return a report for each run, and the errors of unreadable logs.

    Errors are also printed on stderr.

    Parameters
    ----------
    given
        Paths or URLs of logs, or ``-`` for stdin.
    run
        The only run to scan, of a log with several.
    read_as
        Format of the logs; None to detect it.
    source
        Trainer, if the log does not name it.
    config
        File with alert rules.
    mapped
        Metric names to map to roles, as ``ROLE=NAME``.

    Raises
    ------
    ImportFormatError
        If no log can be read.
    """
    from rlwatch.errors import ImportFormatError
    from rlwatch.importers import logs_in, read_log

    rules, naming = rules_of(config), naming_of(mapped, config)
    found: list[Scanned] = []
    problems: list[ImportFormatError] = []
    for named in given:
        with fetched(named) as path:
            logs = logs_in(path)
            for log in logs:
                name = str(log) if log != path else "standard input" if named == STDIN else named
                try:
                    with reading(log):
                        runs = read_log(log, run=run, format=read_as, naming=naming)
                except ImportFormatError as error:
                    problems.append(error)
                else:
                    found += [_judged(name, one, source, rules) for one in runs]
            if not logs:
                problems.append(ImportFormatError(named, "is a directory without a log"))
    if not found and len(problems) == 1:
        raise problems[0]
    for problem in problems:
        warn(f"skipped: {problem}")
    if not found:
        raise ImportFormatError(", ".join(given), f"could not read any of {len(problems)} files")
    return found, problems


def _judged(name: str, imported: ImportedRun, source: str, rules: Sequence[Rule] | None) -> Scanned:
    from rlwatch.scanner import replay

    report = replay(imported, source=source, rules=rules, progress=progress_bar)
    return Scanned(name, report, tuple({metric for record in imported.records for metric in record.metrics}))


def print_report(found: Scanned, *, everything: bool = False) -> None:
    """Print the scan report of one run; with ``everything``, also all findings, alarms, names and skipped checks."""
    report, view = found.report, found.report.view
    facts = f"{report.format}, {step(report.steps)} steps, {len(report.metrics)} known metrics"
    read = [*report.notes, *(f"skipped {skipped}" for skipped in report.skipped)]
    if not everything:
        alarms = [(alarm.severity, alarm.kind, alarm.step) for alarm in report.alarms]
        print_answer(view, alarms, [facts, *map_hint(found.names, view.source), *read], "-v")
        return
    print_headline(view, detail=True)
    print_text(f"{found.log}  {report.run}".strip() + f"  ({facts})", style="bold")
    print_diagnosis(view.explanation, everything=True)
    print_forecast(view.forecasts)
    print_findings(view.all_findings)
    print_alarms([(alarm.severity, alarm.kind, alarm.step, alarm.reason) for alarm in report.alarms])
    for note in [report.rows] * bool(report.rows) + read:
        print_text(note, style="dim")
    print_names(found.names, view.source)
    print_roles(found.names, view.source)
    print_not_judged(view.not_judged, "-v", everything=True)
    print_text()


def print_line(found: Scanned) -> None:
    """Print the name and headline of one of several scanned runs in one line."""
    report = found.report
    name = found.log if report.run in found.log else f"{found.log} {report.run}"
    urgency = report.view.verdict.urgency
    print_text(f"{name}: {report.view.headline}", style="green" if urgency is None else SEVERITY_STYLES[urgency])
