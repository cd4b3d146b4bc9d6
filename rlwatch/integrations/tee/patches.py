"""Replacing functions of another library, and putting them back."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from rlwatch.seam import Seam

Look = Callable[..., Any]
"""``before(*args, **kwargs)`` sees what a function is given; ``after(seen, *args, **kwargs)`` what it returned, too."""


class Patches:
    """Functions replaced by ones that call them once, unchanged, and look before or after.

    What a look raises ends at ``seam``; what the function raises passes as it is.
    """

    def __init__(self, seam: Seam | None = None) -> None:
        self.on = True
        self._seam = seam or Seam()
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def around(self, owner: Any, name: str, *, before: Look | None = None, after: Look | None = None) -> None:
        """Let ``before`` see the arguments of ``owner.name``, and ``after`` them too, unless the function raised."""
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return original(*args, **kwargs)
            seen = None if before is None else self._seam.attempt(name, before, *args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                self._seam.attempt(name, after, seen, *args, **kwargs)
            return result

        self.replace(owner, name, watched)

    def passing(self, owner: Any, name: str, see: Look) -> None:
        """Let ``see`` see what ``owner.name`` returns."""
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.on:
                self._seam.attempt(name, see, result)
            return result

        self.replace(owner, name, watched)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, remembering what it was."""
        self._undo.append((owner, name, getattr(owner, name), value))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, newest first.

        What somebody replaced after us stays; it calls ours, which only pass on from now on.
        """
        self.on = False
        while self._undo:
            owner, name, original, ours = self._undo.pop()
            if getattr(owner, name, None) is ours:
                setattr(owner, name, original)
