"""What was found, what happened, and what was asked of the run: tables."""

from __future__ import annotations

import time
from collections.abc import Sequence

import streamlit as st

from rlwatch.records import Command, CommandStatus, Event, Finding

from .. import control, evidence, queries, shell, table
from .. import format as fmt
from ..health import BLUE, GREY, VERMILLION
from ..markup import el

STATUS_LOOK = {
    CommandStatus.QUEUED: ("◌", GREY),
    CommandStatus.CLAIMED: ("◐", BLUE),
    CommandStatus.DONE: ("✓", BLUE),
    CommandStatus.REJECTED: ("✕", VERMILLION),
    CommandStatus.EXPIRED: ("✕", GREY),
}

MOST = 100
"""Rows a table shows; the older ones are counted."""

FINDING_COLUMNS = (
    table.Column("severity", "tight"),
    table.Column("what", "tight"),
    table.Column("began", "right tight"),
    table.Column("seen at", "right tight"),
    table.Column("evidence", "long"),
    table.Column("detector", "tight wide"),
)
EVENT_COLUMNS = (table.Column("step", "right tight"), table.Column("event", "tight"), table.Column("what", "long"))
COMMAND_COLUMNS = (
    table.Column("command", "tight"),
    table.Column("status", "tight"),
    table.Column("result", "long"),
    table.Column("why", "long middling"),
    table.Column("by", "tight wide"),
    table.Column("asked", "right tight"),
)


def findings(found: Sequence[Finding]) -> None:
    """Published findings, newest first."""
    st.html(el("div", "Findings", cls="rl-family"))
    if not found:
        st.caption("Nothing found.")
        return
    newest = list(reversed(found))[:MOST]
    table.show("findings", FINDING_COLUMNS, [finding_row(finding) for finding in newest])
    _older(found, newest)


def finding_row(finding: Finding) -> table.Row:
    """One finding, its evidence behind a click."""
    key = f"{finding.detector}-{finding.kind}-{finding.seq}-{finding.severity}"
    return table.Row(
        [
            table.severity(finding.severity),
            table.text(fmt.words(finding.kind)),
            table.text(fmt.step(finding.onset_step)),
            table.text(fmt.step(finding.step)),
            table.details(key, finding.message, evidence_lines(finding)),
            table.text(finding.detector, quiet=True),
        ]
    )


def evidence_lines(finding: Finding) -> list[tuple[str, str]]:
    """The numbers behind a finding, named."""
    lines = evidence.lines(finding.evidence)
    if finding.score is not None:
        lines.append(("times its threshold", fmt.number(finding.score)))
    if finding.metric:
        lines.append(("metric", finding.metric))
    return lines


def events(happened: Sequence[Event]) -> None:
    """Events, newest first; nothing where nothing happened."""
    if not happened:
        return
    st.html(el("div", "Events", cls="rl-family"))
    rows = [event_row(event) for event in list(reversed(happened))[:MOST]]
    table.show("events", EVENT_COLUMNS, rows)
    _older(happened, rows)


def event_row(event: Event) -> table.Row:
    """One event."""
    what, text = evidence.of_event(event)
    return table.Row([table.text(fmt.step(event.step)), table.text(what), table.text(text)])


def _older(everything: Sequence[object], shown: Sequence[object]) -> None:
    if left := len(everything) - len(shown):
        st.caption(f"and {fmt.step(left)} older")


def commands(run_id: str) -> None:
    """What was asked of the run and what became of it, newest first; nothing where nothing was asked."""
    with shell.readable("The history of commands"):
        asked, now = queries.commands(run_id), time.time()
        waiting = control.waiting(asked, now)
        if asked:
            st.html(el("div", "Commands", cls="rl-family"))
            table.show("commands", COMMAND_COLUMNS, [command_row(c, now) for c in reversed(asked)])
        if st.session_state.get("was-waiting", waiting) != waiting:
            st.session_state["was-waiting"] = waiting
            st.rerun()  # the page decides anew how often to look
        st.session_state["was-waiting"] = waiting


def command_row(command: Command, now: float) -> table.Row:
    """One command."""
    status = CommandStatus.EXPIRED if control.missed(command, now) else command.status
    shape, colour = STATUS_LOOK[status]
    return table.Row(
        [
            table.text(fmt.words(command.kind), control.arguments(command)),
            table.mark(shape, colour, control.outcome(command, now)),
            table.text(fmt.shorten(command.result, 300)),
            table.text(fmt.shorten(command.why, 300)),
            table.text(fmt.shorten(command.requested_by, 60), quiet=True),
            table.text(fmt.age(command.created_at, now)),
        ]
    )
