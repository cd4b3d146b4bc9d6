"""Whether a live run is paused, read from what it was told and what it did since (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlwatch.control.kinds import KINDS
from rlwatch.records import Command, CommandStatus, RunInfo, RunState

TURNS = frozenset({"pause", "resume", "stop"})
"""Commands that begin or end a pause."""

ALIVE_S = 60.0
"""A paused trainer's writer lives: a heartbeat older than this, in seconds, is no pause but an end."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Since which step, who asked for it, why, and when it ends by itself (Unix seconds)."""

    step: int
    by: str
    why: str
    until: float


def pause_of(run: RunInfo, commands: Sequence[Command], now: float) -> Pause | None:
    """The pause ``run`` is in; None if it trains, has ended, or does not live."""
    done = [c for c in commands if c.kind in TURNS and c.status is CommandStatus.DONE and c.finished_at is not None]
    last = max(done, key=lambda command: command.finished_at or 0.0, default=None)
    if last is None or last.kind != "pause" or run.state is not RunState.RUNNING:
        return None
    pause = Pause(last.finished_step or 0, last.requested_by, last.why, (last.finished_at or 0.0) + _length(last))
    went_on = (run.last_step or 0) > pause.step
    dead = now - (run.heartbeat_at or now) > ALIVE_S
    return None if went_on or dead or now > pause.until + ALIVE_S else pause


def _length(command: Command) -> float:
    minutes = command.args.get("minutes", KINDS["pause"].args["minutes"].default)
    return 60.0 * float(minutes)
