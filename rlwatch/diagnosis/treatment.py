"""Which advice a cause gets: undo first in a collapse, and never a reference reset then."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.diagnosis.actions import RESET, Action, advice
from rlwatch.diagnosis.signs import Sign

UNDO = ("roll-back", "lower-lr")
"""What every collapse is answered with first: measured, undoing alone and repairing alone both fail."""
CRASH = "reward_drop"
"""The kind whose words for undoing are the general ones."""


def treatment(root: Sign, chain: Sequence[Sign], found: Sequence[Sign], source: str) -> tuple[tuple[Action, ...], str]:
    """The actions for a cause in order, and which advice was withheld and why ("" if none)."""
    known = advice(root.kind, source)
    actions = known.actions if known is not None else ()
    if any(sign.entry.undone and sign.bad for sign in chain):
        actions = _undo_first(actions, source)
    trouble = [sign for sign in found if sign.bad and sign.kind != root.kind and _at_that_time(sign, root)]
    if trouble and any(action.id == RESET for action in actions):
        kept = tuple(action for action in actions if action.id not in (RESET, "warm-up"))
        return (
            kept,
            f"no reference reset: {trouble[-1].entry.title.lower()} at the same time (it would become the anchor)",
        )
    return actions, ""


def _at_that_time(sign: Sign, root: Sign) -> bool:
    """Not long over when the root began."""
    return sign.seen_step >= root.onset_step - sign.entry.reach


def _undo_first(actions: Sequence[Action], source: str) -> tuple[Action, ...]:
    """Roll back and lower the learning rate, in the cause's own words where it has them, then the rest."""
    general = advice(CRASH, source)
    own = {action.id: action for action in (*(general.actions if general else ()), *actions)}
    return (*(own[id_] for id_ in UNDO), *(action for action in actions if action.id not in UNDO))
