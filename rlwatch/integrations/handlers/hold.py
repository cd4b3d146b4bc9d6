# ruff: noqa: ARG002  (the signatures are those of the port)
"""Pause and resume: the training thread waits at a safe boundary until a person, or the time limit, lets it go on."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlwatch.clock import Clock, SystemClock
from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.errors import RLWatchError
from rlwatch.records import JSON, Command

ROUND_S = 0.5
"""How long a paused trainer waits between two looks for commands, in seconds."""
GRACE_S = 30.0
"""A rank that hears nothing any more goes on this long after the pause should have ended, in seconds."""


class Hold:
    """Whether training is held, since when and until when at the latest. One for each rank."""

    def __init__(self, clock: Clock | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._since: float | None = None
        self._until = 0.0

    @property
    def on(self) -> bool:
        """Whether training waits."""
        return self._since is not None

    @property
    def expired(self) -> bool:
        """Whether the longest time allowed has passed; rank 0 then resumes all ranks."""
        return self.on and self._clock.monotonic() >= self._until

    @property
    def forsaken(self) -> bool:
        """Whether it should have ended long ago: rank 0 is gone, or cannot be heard."""
        return self.on and self._clock.monotonic() >= self._until + GRACE_S

    def begin(self, minutes: float) -> None:
        """Hold for at most ``minutes`` from now."""
        self._since = self._clock.monotonic()
        self._until = self._since + 60.0 * minutes

    def end(self) -> float:
        """Let go; returns the seconds held, 0 if it was not."""
        held = 0.0 if self._since is None else self._clock.monotonic() - self._since
        self._since = None
        return held

    def wait(self) -> None:
        """One round."""
        self._sleep(ROUND_S)


@dataclass(slots=True)
class Pause:
    """Handles ``pause`` with ``{"minutes": at most}``. The waiting itself is the controller's."""

    hold: Hold
    kind: str = "pause"

    def check(self, command: Command) -> None:
        """Refuse a second pause."""
        COMMAND_KINDS[self.kind].read(command.args)
        if self.hold.on:
            raise RLWatchError("training is paused already")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Begin to hold."""
        minutes = float(COMMAND_KINDS[self.kind].read(command.args)["minutes"])
        self.hold.begin(minutes)
        return {"minutes": minutes, "summary": f"paused for at most {minutes:g} minutes; resume or stop ends it"}


@dataclass(slots=True)
class Resume:
    """Handles ``resume``."""

    hold: Hold
    kind: str = "resume"

    def check(self, command: Command) -> None:
        """Refuse where nothing is paused."""
        if not self.hold.on:
            raise RLWatchError("training is not paused")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Let go."""
        held = round(self.hold.end(), 1)
        return {"held_s": held, "summary": f"resumed after {held:g} s"}


def time_is_up() -> Command:
    """The ``resume`` rank 0 sends all ranks when a pause has lasted as long as it may."""
    return Command(uuid.uuid4().hex[:16], "", "resume", requested_by="rlwatch", why="the pause reached its time limit")
