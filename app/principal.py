"""The user of a page: name and role, as the login gate passes them on, and the permission to make changes."""

from __future__ import annotations

from dataclasses import dataclass

from rlwatch.errors import RLWatchError

NAME_HEADER, ROLE_HEADER = "x-rlwatch-name", "x-rlwatch-role"
"""Headers in which the gate passes name and role; the gate drops them from incoming requests."""

SESSION_END = "rlwatch.session-end"
"""Key of a request's scope under which the gate stores the end of the session (Unix seconds)."""


class NotPermittedError(RLWatchError):
    """Error for a user with read-only access who tries to change something."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Name and role of a user; the default has neither and no permissions."""

    name: str = ""
    role: str = ""

    @property
    def may_command(self) -> bool:
        """True if the user may send commands and make changes."""
        return self.role == "operator" and bool(self.name)

    def require_command(self) -> None:
        """Raise ``NotPermittedError`` unless the user may send commands and make changes."""
        if not self.may_command:
            raise NotPermittedError(
                f"{self.name or 'a visitor without a login'} has read-only access: open the operator link of rlwatch ui"
            )
