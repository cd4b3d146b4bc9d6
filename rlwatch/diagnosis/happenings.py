"""What happened to a run round the time its failure began: resets, commands, resumes, localised gradients."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.diagnosis.causes import Evidence
from rlwatch.diagnosis.signs import Sign
from rlwatch.records import LOCALISED, Event

BEFORE = 60
"""Steps before the first sign within which an event may have to do with it."""
AFTER = 20
"""Steps after the last sign within which an event is still part of the story."""
MOST = 12
"""Events told with a cause: the first ones."""
TEXTS = {
    "reference_reset": "the reference was reset",
    "reference_restored": "the reference was restored from a checkpoint",
    "resume": "the run was resumed",
    "step_skipped": "the update of a culprit batch was skipped",
}


def happenings(events: Sequence[Event], shown: Sequence[Sign]) -> list[Evidence]:
    """Events near the signs, in order; of localisations only those that name something."""
    low = min(sign.onset_step for sign in shown) - BEFORE
    high = max(sign.seen_step for sign in shown) + AFTER
    near = [event for event in events if event.step is not None and low <= event.step <= high]
    told = [evidence for event in sorted(near, key=_order) if (evidence := _told(event)) is not None]
    return told[:MOST]


def _order(event: Event) -> tuple[int, int, int, str]:
    return (event.step or 0, event.attempt, event.seq, event.kind)


def _told(event: Event) -> Evidence | None:
    text = _text(event)
    return None if text is None else Evidence(event.step or 0, f"{text} at step {event.step}", event.kind)


def _text(event: Event) -> str | None:
    body = event.body
    if event.kind == LOCALISED:
        return str(body["message"]) if body.get("message") else None
    if event.kind == "command":
        return f"the command {body.get('command', '')} was carried out"
    if event.kind == "exception":
        return f"training ended with {str(body.get('error', 'an exception'))[:200]}"
    return TEXTS.get(event.kind)
