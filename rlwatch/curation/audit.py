"""Everything people did to the runs of a store, in one list: who, when, and in words."""

from __future__ import annotations

import json

from rlwatch.errors import ControlUnavailableError
from rlwatch.ports import Store
from rlwatch.records import AuditEntry, Command, Purge, RunEdit
from rlwatch.wording import one_line

_PINS = "pin"
"""Acts about a person's own view of the dashboard, which change nothing for anybody else."""


def acts_of_people(store: Store, run_id: str | None = None) -> list[AuditEntry]:
    """Notes, acknowledgements, silences, prunings, commands, edits and purges; oldest first, of one run or of all.

    Raises ``StoreError`` where the run, or the store, cannot be read.
    """
    runs = [store.run(run_id)] if run_id is not None else [*store.runs(), *store.runs(deleted=True)]
    found = [entry for entry in store.audit(run_id) if not entry.act.startswith(_PINS)]
    for run in runs:
        found += [_edit(edit) for edit in store.edits(run.run_id)]
        try:
            found += [_command(command) for command in store.commands(run.run_id)]
        except ControlUnavailableError:
            continue  # a place that carries none
    found += [_purge(purge) for purge in store.purges() if run_id in (None, purge.run_id)]
    return sorted(found, key=lambda entry: entry.at)


def _command(command: Command) -> AuditEntry:
    args = f" {json.dumps(command.args, default=str)}" if command.args else ""
    parts = [f"{command.kind}{args}{', by force' if command.force else ''}", command.why, command.status.value]
    text = "; ".join(filter(None, (*parts, command.result)))
    who = command.requested_by or "nobody named"
    return AuditEntry(command.command_id, command.created_at, who, "command", one_line(text, 400), command.run_id)


def _edit(edit: RunEdit) -> AuditEntry:
    said = {
        "name": edit.name,
        "notes": edit.notes,
        "tagged": ", ".join(edit.tagged) or None,
        "untagged": ", ".join(edit.untagged) or None,
        "archived": edit.archived,
        "deleted": edit.deleted,
    }
    parts = [f"{name}: {_word(value)}" for name, value in said.items() if value is not None]
    text = "; ".join(parts)
    return AuditEntry(f"edit-{edit.run_id}-{edit.at}", edit.at, edit.by, "edit", one_line(text, 400), edit.run_id)


def _word(value: str | bool) -> str:
    return value if isinstance(value, str) else "yes" if value else "no"


def _purge(purge: Purge) -> AuditEntry:
    text = f"removed {purge.name or purge.run_id} of {purge.project} for good; deleted by {purge.deleted_by}"
    return AuditEntry(
        f"purge-{purge.run_id}-{purge.at}", purge.at, purge.by, "purge", one_line(text, 400), purge.run_id
    )
