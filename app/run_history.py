"""The history of a run: culprit tokens, findings, events, and commands with their outcomes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

import streamlit as st

from rlwatch.columns import EVENTS, FINDINGS
from rlwatch.errors import RLWatchError
from rlwatch.records import LOCALISED, Command, CommandStatus, Event, Finding

from . import commands, layout, queries, table, token_steps
from . import format as fmt
from .health import BLUE, GREY, VERMILLION
from .layout import GoToTokens
from .markup import Markup, el, joined
from .token_steps import LocalisationReport, TokenStep
from .tokens import Token, culprits_of

NAMED = 3
"""Most culprit tokens named in a line."""

GAP = "\u2003"
"""Separator of culprit tokens: an em space, because a dot represents a space within a token."""


def newest_localised(run_id: str) -> Event | None:
    """Return the event of the newest localised gradient spike, or None."""
    localised = [event for event in queries.localised(run_id) if event.step is not None]
    return localised[-1] if localised else None


def show_culprits(run_id: str) -> None:
    """Draw one line on the newest localised gradient spike, if there is one."""
    with layout.readable("This run"):
        newest = newest_localised(run_id)
        if newest is None:
            return
        batches = queries.of_step(run_id, int(newest.step or 0))
        with st.container(key="culprits"):
            st.html(joined(_line(newest, culprits_of([b for b in batches if b.attempt == newest.attempt]))))


def _line(event: Event, culprits: Sequence[Token]) -> Markup:
    """Return ``Culprit tokens  step 4 766  "…∑" share 41 %, ratio 148, layers.27 62 %``, or why there are none."""
    label = el("span", "Culprit tokens", cls="label")
    parts: list[str] = [label, el("span", f"step {fmt.step(event.step)}", cls="rl-word")]
    for token in culprits[:NAMED]:
        parts += [GAP, el("span", fmt.shorten(token.label, 24), cls="rl-token"), f" {token_steps.in_short(token)}"]
    if len(culprits) > NAMED:
        parts.append(f"{GAP}and {len(culprits) - NAMED} more")
    if not culprits:
        entry = TokenStep(event.attempt, event.step or 0, LocalisationReport.of(event.body))
        parts.append(f"{GAP}{token_steps.finding(entry, [])[0]}")
    return el("div", joined(*parts), cls="rl-why")


# Findings, events and commands as tables.

STATUS_LOOK = {
    CommandStatus.QUEUED: ("◌", GREY),
    CommandStatus.CLAIMED: ("◐", BLUE),
    CommandStatus.DONE: ("✓", BLUE),
    CommandStatus.REJECTED: ("✕", VERMILLION),
    CommandStatus.CANCELLING: ("◐", GREY),
    CommandStatus.FAILED: ("✕", VERMILLION),
    CommandStatus.EXPIRED: ("✕", GREY),
    CommandStatus.CANCELLED: ("✕", GREY),
}

CANCELLABLE = frozenset({CommandStatus.QUEUED, CommandStatus.CLAIMED})
MOST_BUTTONS = 5

MOST = 100
"""Most rows of a table; older ones are only counted."""
FEW = 6
"""Rows of a table that a phone shows at first."""

FINDING_COLUMNS = table.columns(
    FINDINGS, severity="tight", kind="tight", onset_step="tight", step="tight", message="long", detector="tight wide"
)
TOKENS_COLUMN = table.TableColumn("tokens", "tight")
EVENT_COLUMNS = table.columns(EVENTS, step="tight", kind="tight", body="long")
COMMAND_COLUMNS = (
    table.TableColumn("command", "tight lead"),
    table.TableColumn("status", "tight"),
    table.TableColumn("result", "long"),
    table.TableColumn("why", "long middling"),
    table.TableColumn("by", "tight wide"),
    table.TableColumn("sent", "right tight"),
)


@dataclass(frozen=True, slots=True)
class Localised:
    """The steps of a run whose gradient spike was localised to tokens."""

    run_id: str
    steps: frozenset[int] = frozenset()

    @classmethod
    def of(cls, run_id: str, happened: Sequence[Event]) -> Localised:
        """Read the localised steps of a run from its events ``happened``."""
        steps = (event.step for event in happened if event.kind == LOCALISED)
        return cls(run_id, frozenset(step for step in steps if step is not None))

    def step_of(self, finding: Finding) -> int | None:
        """Return the localised step that a finding concerns (its step, else its onset), or None."""
        return next((step for step in (finding.step, finding.onset_step) if step in self.steps), None)

    def link(self, finding: Finding) -> table.Cell:
        """Return a table cell with a link to the tokens of the finding's step; empty if that was not localised."""
        step = self.step_of(finding)
        if step is None:
            return table.text("")
        href = "tokens?" + urlencode({"run": self.run_id, "step": step})
        return table.link(f"tokens of step {fmt.step(step)}", href, str(step))


def show_findings(found: Sequence[Finding], localised: Localised, go_to_tokens: GoToTokens) -> None:
    """Draw the table of the findings ``found``, newest first; those of a localised step have a link to its tokens.

    ``go_to_tokens`` opens the page with the tokens of a step.
    """
    st.html(el("div", "Findings", cls="rl-family"))
    if not found:
        st.caption("No findings.")
        return
    grouped = once_each(found)
    newest = [finding for finding, _ in grouped[:MOST]]
    linked = any(localised.step_of(finding) is not None for finding in newest)
    rows = [finding_row(finding, repeats) for finding, repeats in grouped[:MOST]]
    if linked:
        rows = [table.TableRow([*row.cells, localised.link(f)]) for row, f in zip(rows, newest, strict=True)]
    opened = table.show("findings", (*FINDING_COLUMNS, *((TOKENS_COLUMN,) if linked else ())), rows, few=FEW)
    if opened is not None:
        go_to_tokens(localised.run_id, int(opened))
    _older(grouped, newest)


REPEATS = 3
"""Number of findings of one kind and severity from which on only the newest has a row."""


def once_each(found: Sequence[Finding]) -> list[tuple[Finding, str]]:
    """Return the findings ``found``, newest first, each with a text; repeated ones once, with their count and first
    step.
    """
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in found:
        groups.setdefault((finding.detector, finding.kind, finding.severity, finding.stage), []).append(finding)
    grouped: list[tuple[Finding, str]] = []
    for finding in reversed(found):
        same = groups[finding.detector, finding.kind, finding.severity, finding.stage]
        if len(same) < REPEATS or finding.stage.better:
            grouped.append((finding, ""))
        elif finding is same[-1]:
            first = min(one.onset_step for one in same)
            grouped.append((finding, f"{len(same)} times since step {fmt.step(first)}"))
    return grouped


def finding_row(finding: Finding, repeats: str = "") -> table.TableRow:
    """Return the table row of a finding or its update, with the evidence folded and ``repeats`` as tooltip."""
    key = f"{finding.detector}-{finding.kind}-{finding.seq}-{finding.severity}-{finding.stage}"
    better = finding.stage.better
    return table.TableRow(
        [
            table.text(finding.stage.value, quiet=True) if better else table.severity(finding.severity),
            table.text(fmt.words(finding.kind), repeats),
            table.text(fmt.step(finding.onset_step)),
            table.text(fmt.step(finding.step)),
            table.details(key, finding.message, finding_evidence(finding)),
            table.text(fmt.words(finding.detector), quiet=True),
        ]
    )


def finding_evidence(finding: Finding) -> list[tuple[str, str]]:
    """Return the evidence of a finding as names and formatted values."""
    lines = fmt.evidence_lines(finding.evidence)
    if finding.score is not None:
        lines.append(("threshold ratio", fmt.number(finding.score)))
    if finding.metric:
        lines.append(("metric", finding.metric))
    return lines


def show_events(happened: Sequence[Event]) -> None:
    """Draw the table of the events ``happened``, newest first, without localised steps, which have a page; nothing if
    there are none.
    """
    happened = [event for event in happened if event.kind != LOCALISED]
    if not happened:
        return
    st.html(el("div", "Events", cls="rl-family"))
    rows = [event_row(event) for event in list(reversed(happened))[:MOST]]
    table.show("events", EVENT_COLUMNS, rows, few=FEW)
    _older(happened, rows)


def event_row(event: Event) -> table.TableRow:
    """Return an event as a table row with step, name and description."""
    what, text = fmt.event_words(event)
    return table.TableRow([table.text(fmt.step(event.step)), table.text(what), table.text(text)])


def _older(everything: Sequence[object], shown: Sequence[object]) -> None:
    if left := len(everything) - len(shown):
        st.caption(f"and {fmt.step(left)} older")


def show_commands(run_id: str) -> None:
    """Draw commands to the run and their outcomes, newest first; nothing if there are none."""
    with layout.readable("The command history"):
        asked, now = queries.commands(run_id), time.time()
        waiting = commands.waiting(asked, now)
        if asked:
            st.html(el("div", "Commands", cls="rl-family"))
            table.show("commands", COMMAND_COLUMNS, [command_row(c, now) for c in reversed(asked)], few=FEW)
            _cancelling([c for c in asked if c.status in CANCELLABLE and not commands.missed(c, now)])
        if st.session_state.get("was-waiting", waiting) != waiting:
            st.session_state["was-waiting"] = waiting
            st.rerun()  # the page sets the refresh interval again
        st.session_state["was-waiting"] = waiting


def _cancelling(open_ones: Sequence[Command]) -> None:
    """Draw a cancel button for each command that was not started."""
    if not layout.principal().may_command:
        return
    for command in open_ones[-MOST_BUTTONS:]:
        st.button(
            f"Cancel {fmt.words(command.kind)}",
            key=f"cancel-{command.command_id}",
            on_click=_cancel,
            args=(command.run_id, command.command_id),
            help="Cancels it unless the trainer has started it",
        )


def _cancel(run_id: str, command_id: str) -> None:
    try:
        command = commands.cancel_command(queries.store(), run_id, command_id, by=layout.principal())
    except RLWatchError as error:
        st.toast(f"Not cancelled: {fmt.shorten(str(error), 200)}", icon=":material/error:")
        return
    words = {CommandStatus.CANCELLED: "Cancelled", CommandStatus.CANCELLING: "Cancellation requested"}
    st.toast(words.get(command.status, f"Too late: {command.status.value}"), icon=":material/undo:")


def command_row(command: Command, now: float) -> table.TableRow:
    """Return a command as a table row with status, result, reason, author and age."""
    status = CommandStatus.EXPIRED if commands.missed(command, now) else command.status
    shape, colour = STATUS_LOOK[status]
    return table.TableRow(
        [
            table.text(fmt.words(command.kind), commands.arguments(command)),
            table.mark(shape, colour, commands.outcome(command, now)),
            table.text(fmt.shorten(command.result, 300)),
            table.text(fmt.shorten(command.why, 300)),
            table.text(fmt.shorten(command.requested_by, 60), quiet=True),
            table.text(fmt.age(command.created_at, now)),
        ]
    )
