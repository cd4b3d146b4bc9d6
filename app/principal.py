"""Principals: name and role of whoever looks at a page, as the login gate says, and the right to command."""

from __future__ import annotations

from dataclasses import dataclass

from rlwatch.errors import RLWatchError

NAME_HEADER, ROLE_HEADER = "x-rlwatch-name", "x-rlwatch-role"
"""Headers in which the gate names whoever it let in; from outside they never arrive."""

SESSION_END = "rlwatch.session-end"
"""Key of a request's scope in which the gate says when the session is over (Unix seconds)."""


class NotPermittedError(RLWatchError):
    """Whoever asks may only look."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Whoever looks at a page, as the door let them in; by default a nobody, who may do nothing."""

    name: str = ""
    role: str = ""

    @property
    def may_command(self) -> bool:
        """True if they may change anything."""
        return self.role == "operator" and bool(self.name)

    def require_command(self) -> None:
        """Raise ``NotPermittedError`` unless they may change something."""
        if not self.may_command:
            raise NotPermittedError(
                f"{self.name or 'a visitor without a login'} has read-only access: open the operator link of rlwatch ui"
            )
