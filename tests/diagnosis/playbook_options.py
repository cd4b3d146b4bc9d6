"""The option names a playbook mentions, to be looked up in the trainers themselves."""

import re
from collections.abc import Iterator

from rlwatch.diagnosis import Action, advice, kinds


def actions(source: str = "") -> Iterator[Action]:
    """Every action of every kind, once."""
    seen = {}
    for kind in kinds():
        known = advice(kind, source)
        assert known is not None
        for action in known.actions:
            seen[action.id, action.strength, action.what] = action
    yield from seen.values()


def mentioned(trainer: str, source: str = "") -> list[tuple[str, str]]:
    """(action, what stands in backticks) wherever the text for ``trainer`` has backticks."""
    found = {
        (action.id, quoted)
        for action in actions(source or trainer)
        for quoted in re.findall(r"`([^`]+)`", action.options.get(trainer, ""))
    }
    return sorted(found)
