"""A scan as continuous integration takes it: annotations of GitHub, JUnit's XML, a table in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree as ET

from rlwatch.records import Severity
from rlwatch.wording import cut, for_markdown, one_line

if TYPE_CHECKING:
    from rlwatch.errors import ImportFormatError
    from rlwatch.scanner import Alarm, Report

    Problems = Sequence[ImportFormatError]
    """Why a log could not be read."""


class Scanned(NamedTuple):
    """Report of one run, its log as it was named, and the names in it."""

    log: str
    report: Report
    names: tuple[str, ...]


Found = Sequence[Scanned]
_LEVELS = {Severity.CRITICAL: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
LONGEST = 600
_WITHIN_XML = str.maketrans({code: "\N{REPLACEMENT CHARACTER}" for code in range(32) if code not in (9, 10, 13)})
"""Characters that no XML document may hold."""


def workflow_commands(found: Found, problems: Problems = ()) -> str:
    """A line of workflow commands for each alarm, for the verdict of each run, and for each log that was left out.

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
    """A suite for each run: a case for the verdict, and one for each kind of alarm, failed where it was critical.

    A log that could not be read is a case with an error.
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
            said = f"step {alarm.step}: {alarm.reason}"
            _case(suite, report.run, alarm.kind, said if alarm in failed else "", said)
    for one in problems:
        log = _xml(one.source)
        suite = ET.SubElement(
            root, "testsuite", name=log, file=log, tests="1", failures="0", errors="1", skipped="0"
        )  # fmt: skip
        case = ET.SubElement(suite, "testcase", classname=log, name="read")
        ET.SubElement(case, "error", message=_xml(cut(one.problem, LONGEST)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


def _case(suite: ET.Element, run: str, name: str, failure: str, said: str) -> None:
    case = ET.SubElement(suite, "testcase", classname=_xml(run), name=_xml(name))
    if failure:
        ET.SubElement(case, "failure", message=_xml(cut(failure, LONGEST)))
    ET.SubElement(case, "system-out").text = _xml(said)


def _xml(text: str) -> str:
    return text.translate(_WITHIN_XML)


def table(found: Found, problems: Problems = ()) -> str:
    """A table of Markdown: log, run, steps, verdict, and the alarms at their worst; then logs that were left out."""
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
    """Of each kind the first alarm of its worst severity, in order of their steps."""
    kept: dict[str, Alarm] = {}
    for alarm in alarms:
        known = kept.get(alarm.kind)
        if known is None or alarm.severity.rank < known.severity.rank:
            kept[alarm.kind] = alarm
    return sorted(kept.values(), key=lambda alarm: alarm.step)
