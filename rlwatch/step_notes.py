"""Notes of users at a step of a run. The store keeps them as audit entries; an entry is never changed."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import ConfigError
from rlwatch.ports import Store
from rlwatch.records import AuditEntry

ACT, REMOVED = "step-note", "remove-step-note"
LONGEST = 2000
_TEXT = re.compile(r"step (-?\d{1,19}): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StepNote:
    """The ``text`` of a user (``by``) at a ``step`` of a run, written ``at`` (Unix seconds)."""

    note_id: str
    run_id: str
    step: int
    text: str
    by: str
    at: float


def add_step_note(store: Store, run_id: str, step: int, text: str, *, by: str, clock: Clock | None = None) -> StepNote:
    """Store a note of user ``by`` at a step of a run, and return it.

    Raises
    ------
    ConfigError
        If ``by`` or the text is empty, the text is longer than :data:`LONGEST`, or the step is no integer of 64 bits.
    StoreError
        If there is no such run, or the store cannot keep notes.
    """
    if not by.strip() or not text.strip():
        raise ConfigError(f"a note needs a name and a text, got {by!r} and {text!r}")
    if len(text) > LONGEST:
        raise ConfigError(f"a note has at most {LONGEST} characters, got {len(text)}")
    if not -(2**63) <= step < 2**63:
        raise ConfigError(f"a note is at a step of 64 bits, got {step}")
    run = store.run(run_id)
    note = StepNote(secrets.token_hex(8), run.run_id, step, text.strip(), by.strip(), (clock or SystemClock()).now())
    store.put_entry(AuditEntry(note.note_id, note.at, note.by, ACT, f"step {step}: {note.text}", run_id))
    return note


def remove_step_note(store: Store, note: StepNote, *, by: str, clock: Clock | None = None) -> None:
    """Remove a note at a step; the audit log keeps it and names the user ``by``.

    Raises ``ConfigError`` if ``by`` is empty, ``StoreError`` if the store cannot be written.
    """
    if not by.strip():
        raise ConfigError(f"a removal needs a name, got {by!r}")
    now = (clock or SystemClock()).now()
    store.put_entry(AuditEntry(secrets.token_hex(8), now, by.strip(), REMOVED, note.note_id, note.run_id))


def step_notes(store: Store, run_id: str) -> list[StepNote]:
    """Return the notes of a run in order of step, without removed ones."""
    found: dict[str, StepNote] = {}
    entries = store.audit(run_id)
    for entry in entries:
        parts = _TEXT.fullmatch(entry.text) if entry.act == ACT else None
        if parts is not None:
            step, text = int(parts[1]), parts[2]
            found[entry.entry_id] = StepNote(entry.entry_id, run_id, step, text, entry.by, entry.at)
    for entry in entries:
        if entry.act == REMOVED:
            found.pop(entry.text, None)
    return sorted(found.values(), key=lambda note: (note.step, note.at))
