"""Findings, alarms and alerts as tables: the same columns wherever they appear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlwatch.cli.console import Cell, print_table
from rlwatch.cli.wording import SEVERITY_STYLES, one_line, step
from rlwatch.records import Finding, Severity

LONGEST = 300
"""Characters of a message in a table; a terminal folds them."""


def severity_cell(severity: str) -> Cell:
    """The word in its colour."""
    return (str(severity), SEVERITY_STYLES[Severity(severity)])


def print_findings(findings: Iterable[Finding], *, title: str = "Findings") -> None:
    """Kind, onset, step and message of each finding."""
    rows = [
        (severity_cell(f.severity), f.kind, step(f.onset_step), step(f.step), one_line(f.message, LONGEST))
        for f in findings
    ]
    if rows:
        print_table(("severity", "kind", ">onset", ">seen at", "what"), rows, title=title)


def print_alarms(alarms: Sequence[tuple[str, str, int, str]]) -> None:
    """Alarms as (severity, kind, step, reason): what would have been sent."""
    rows = [(severity_cell(s), kind, step(at), one_line(reason, LONGEST)) for s, kind, at, reason in alarms]
    if rows:
        print_table(("severity", "kind", ">step", "reason"), rows, title="Alarms (what would have been sent)")
