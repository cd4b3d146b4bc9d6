"""What was done to a run without asking anybody, would have been done, or was not, and why: the audit of a policy."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.cli.console import Cell, print_table
from rlwatch.cli.wording import one_line, step
from rlwatch.records import JSON, Command, Event

EVENT = "action"
"""Kind of event, as :mod:`rlwatch.run.acting` records them."""


def action_rows(events: Sequence[Event], commands: Sequence[Command]) -> list[dict[str, JSON]]:
    """The decisions of all actions, oldest first; ``answer`` is what became of the command, where one was requested."""
    answers = {command.idempotency_key: command for command in commands}
    return [_row(event, answers) for event in events if event.kind == EVENT]


def _row(event: Event, commands: dict[str, Command]) -> dict[str, JSON]:
    said = event.body
    command = commands.get(f"{said.get('action')}/{said.get('alert')}@{event.step}")
    answer = f"{command.status.value}: {command.result}".removesuffix(": ") if command else ""
    return {"step": event.step, **said, "answer": answer if said.get("outcome") == "requested" else ""}


def print_actions(rows: Sequence[dict[str, JSON]]) -> None:
    """A table; nothing where no action ever decided."""
    if not rows:
        return
    print_table(
        (">step", "action", "command", "upon", "outcome", "why not, or answer"),
        [_cells(row) for row in rows],
        title="Actions",
    )


def _cells(row: dict[str, JSON]) -> list[Cell]:
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
