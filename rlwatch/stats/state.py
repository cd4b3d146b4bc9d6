"""What every remembering statistic shares: saving and restoring its memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar


class Stateful:
    """Names its memory in ``MEMORY``; the rest of an instance is settings."""

    MEMORY: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """The memory as plain lists and numbers (JSON can write it)."""
        return {name: _plain(getattr(self, name)) for name in self.MEMORY}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Raises ``KeyError`` if a part is missing."""
        for name in self.MEMORY:
            current = getattr(self, name)
            value = state[name]
            setattr(self, name, deque(map(_item, value), current.maxlen) if isinstance(current, deque) else value)


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return [list(item) if isinstance(item, tuple) else item for item in value]
    return value


def _item(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
