"""Ending a training before its last step, in good order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.records import JSON, Command


class Stop:
    """Handles ``stop`` with ``{"save": "yes" | "no"}``. Never vetoed: a person may always stop.

    ``end`` makes the trainer end at this step, after a checkpoint if it gets True, and returns words for the
    answer; it raises ``RLWatchError`` if the trainer cannot.
    """

    kind: str = "stop"

    def __init__(self, end: Callable[[bool], str]) -> None:
        self._end = end

    def check(self, command: Command) -> None:
        """Read the arguments."""
        COMMAND_KINDS[self.kind].read(command.args)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """End."""
        saved = COMMAND_KINDS[self.kind].read(command.args)["save"]
        return {"save": saved, "summary": self._end(saved == "yes")}
