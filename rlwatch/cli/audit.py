"""``rlwatch audit``: who did what to which run, and when."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rlwatch.cli.console import print_json, print_table, say
from rlwatch.cli.options import FormatOption, OutputFormat, StoreOption, examples, opened
from rlwatch.clock import SystemClock
from rlwatch.errors import ControlUnavailableError
from rlwatch.ports import Store
from rlwatch.records import AuditEntry, Command, Purge, RunEdit
from rlwatch.wording import local_moment, one_line

# The actions of users on the runs of a store, in one list.


_PINS = "pin"
"""Prefix of acts on a user's own view of the dashboard, which change nothing for other users."""


def acts_of_people(store: Store, run_id: str | None = None) -> list[AuditEntry]:
    """Return notes, acknowledgements, silences, prunings, commands, edits and purges, oldest first.

    Parameters
    ----------
    store
        The store to read.
    run_id
        The run; None for all runs.

    Raises
    ------
    StoreError
        If the run, or the store, cannot be read.
    """
    runs = [store.run(run_id)] if run_id is not None else [*store.runs(), *store.runs(deleted=True)]
    found = [entry for entry in store.audit(run_id) if not entry.act.startswith(_PINS)]
    for run in runs:
        found += [_edit(edit) for edit in store.edits(run.run_id)]
        try:
            found += [_command(command) for command in store.commands(run.run_id)]
        except ControlUnavailableError:
            continue  # a store without commands
    found += [_purge(purge) for purge in store.purges() if run_id in (None, purge.run_id)]
    return sorted(found, key=lambda entry: entry.at)


def _command(command: Command) -> AuditEntry:
    args = f" {json.dumps(command.args, default=str)}" if command.args else ""
    parts = [f"{command.kind}{args}{', by force' if command.force else ''}", command.why, command.status.value]
    text = "; ".join(filter(None, (*parts, command.result)))
    who = command.requested_by or "nobody named"
    return AuditEntry(command.command_id, command.created_at, who, "command", one_line(text, 400), command.run_id)


def _edit(edit: RunEdit) -> AuditEntry:
    changes = {
        "name": edit.name,
        "notes": edit.notes,
        "tagged": ", ".join(edit.tagged) or None,
        "untagged": ", ".join(edit.untagged) or None,
        "archived": edit.archived,
        "deleted": edit.deleted,
    }
    parts = [f"{name}: {_word(value)}" for name, value in changes.items() if value is not None]
    text = "; ".join(parts)
    return AuditEntry(f"edit-{edit.run_id}-{edit.at}", edit.at, edit.by, "edit", one_line(text, 400), edit.run_id)


def _word(value: str | bool) -> str:
    return value if isinstance(value, str) else "yes" if value else "no"


def _purge(purge: Purge) -> AuditEntry:
    text = f"removed {purge.name or purge.run_id} of {purge.project} for good; deleted by {purge.deleted_by}"
    return AuditEntry(
        f"purge-{purge.run_id}-{purge.at}", purge.at, purge.by, "purge", one_line(text, 400), purge.run_id
    )


# ``rlwatch audit``: who did what to which run, and when.


EPILOG = examples("rlwatch audit", "rlwatch audit math-7b-s3", "rlwatch audit --by ann --since 7d --format json")


def audit(
    run: Annotated[str | None, typer.Argument(help="Only this run: id, name or unique prefix.")] = None,
    *,
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="Only acts of this person.")] = "",
    act: Annotated[
        list[str] | None,
        typer.Option("--act", help="Only these acts: command, acknowledge, silence, note, edit, ... Repeatable."),
    ] = None,
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="Only the last 2h, 7d, ...")] = "",
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List user actions, oldest first: commands, acknowledgements, silences, notes, edits, prunings, purges."""
    from rlwatch.alerts.silencing import seconds_of
    from rlwatch.analysis.lookup import find_run
    from rlwatch.cli.audit import acts_of_people

    after = SystemClock().now() - seconds_of(since) if since else float("-inf")
    with opened(store) as source:
        found = acts_of_people(source, None if run is None else find_run(source, run).run_id)
    found = [
        entry for entry in found if entry.at >= after and (not by or entry.by == by) and (not act or entry.act in act)
    ]
    if output is OutputFormat.JSON:
        print_json(found)
    elif found:
        rows = [(local_moment(entry.at), entry.by, entry.act, entry.run_id, entry.text) for entry in found]
        print_table(("when", "who", "act", "run", "what"), rows)
    else:
        say("no recorded acts")
