"""Handlers of commands that change a setting of the trainer (``set-clip``, ``set-entropy-coef`` and similar ones) and
of ``sync-weights``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.errors import RLWatchError
from rlwatch.records import JSON, Command
from rlwatch.wording import cell

Values = Mapping[str, JSON]
"""Arguments of a command and their values."""
ADJUSTABLE = ("set-clip", "set-grad-clip", "set-entropy-coef", "set-is-correction")
"""Kinds of commands that only change a setting of the trainer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the trainer that a command can change, as functions that read and write it.

    Attributes
    ----------
    read
        Returns the current values, by the names of the command's arguments. Raises ``RLWatchError`` with the reason why
        they cannot be changed.
    write
        Sets the values, which the trainer's later computations use. An argument that was left out of the command is
        None.
    """

    read: Callable[[], Values]
    write: Callable[[Values], None]


class Adjust:
    """Handler of one of the commands in :data:`ADJUSTABLE`. ``kind`` is the command's name, ``setting`` what it
    changes.
    """

    def __init__(self, kind: str, setting: Setting) -> None:
        self.kind = kind
        self._setting = setting
        self.kept: Values | None = None
        """Values set last by a command; None while the trainer's own configuration is in force."""

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if the trainer has no such setting, or does not read it while it runs."""
        COMMAND_KINDS[self.kind].read(command.args)
        self._setting.read()

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Set the values. Return a report with all values ``before`` and ``after`` and the command that reverts the
        change.
        """
        args, before = COMMAND_KINDS[self.kind].read(command.args), self._setting.read()
        self._setting.write(args)
        after = self._setting.read()
        self.kept = dict(after)
        changed = [name for name in after if after[name] != before.get(name)]
        words = ", ".join(f"{name} {cell(before.get(name))} -> {cell(after[name])}" for name in changed)
        return {
            "before": dict(before),
            "after": dict(after),
            "summary": words or "it was so already",
            "undo": {"kind": self.kind, "args": dict(before)},
        }


class SyncWeights:
    """Handler of the command ``sync-weights``, which makes the trainer send its weights to the rollout engine.

    ``sync`` sends the weights, or makes the trainer send them, and returns a message.
    """

    kind: str = "sync-weights"

    def __init__(self, sync: Callable[[], str]) -> None:
        self._sync = sync

    def check(self, command: Command) -> None:
        """Raise ``ConfigError`` if the command's arguments are not valid."""
        COMMAND_KINDS[self.kind].read(command.args)

    def __call__(self, command: Command) -> Mapping[str, JSON]:  # noqa: ARG002  (the signature of the port)
        """Send the weights to the rollout engine and return a report with a ``summary``."""
        return {"summary": self._sync()}


def unchangeable(reason: str) -> Setting:
    """Return a setting whose reading raises ``RLWatchError`` with ``reason``, for a setting that cannot be changed."""

    def refuse() -> Values:
        raise RLWatchError(reason)

    return Setting(refuse, lambda _values: None)
