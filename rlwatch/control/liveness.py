"""Decide whether a run is alive: one definition for the dashboard, the command line and the heartbeat alert.

A run is *silent* when no step came for five times its median step time, for at least two minutes, and for at least 1.5
times the longest pause among its newest steps, so that checkpoints and evaluations raise no alert.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import median

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.errors import ControlUnavailableError
from rlwatch.ports import Store
from rlwatch.records import STALL_OVER, STALLED, Command, CommandStatus, Event, RunInfo, RunState, StepRecord
from rlwatch.wording import duration

_PAUSING = frozenset({"pause", "resume", "stop"})
"""Commands that begin or end a pause."""

PAUSE_ALIVE_S = 60.0
"""Largest age of the heartbeat of a paused trainer, in seconds: its writer goes on, so an older one means its end."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of a run that a user requested.

    ``step``: step at which it began. ``by``, ``why``: the user and the reason. ``until``: time at which it ends by
    itself, Unix seconds.
    """

    step: int
    by: str
    why: str
    until: float


def pause_of(run: RunInfo, commands: Sequence[Command], now: float) -> Pause | None:
    """Return the pause in which ``run`` is at ``now`` (Unix seconds); None if it trains, has ended, or is dead.

    ``commands``: all commands of the run.
    """
    done = [c for c in commands if c.kind in _PAUSING and c.status is CommandStatus.DONE and c.finished_at is not None]
    last = max(done, key=lambda command: command.finished_at or 0.0, default=None)
    if last is None or last.kind != "pause" or run.state is not RunState.RUNNING:
        return None
    pause = Pause(
        last.finished_step or 0, last.requested_by, last.why, (last.finished_at or 0.0) + _pause_length_s(last)
    )
    went_on = (run.last_step or 0) > pause.step
    dead = now - (run.heartbeat_at or now) > PAUSE_ALIVE_S
    return None if went_on or dead or now > pause.until + PAUSE_ALIVE_S else pause


def _pause_length_s(command: Command) -> float:
    minutes = command.args.get("minutes", COMMAND_KINDS["pause"].args["minutes"].default)
    return 60.0 * float(minutes)


FACTOR = 5.0
"""Number of median step times without a step that count as silence."""
LONGEST_FACTOR = 1.5
"""Multiple of the longest time between two of its newest rows that counts as silence."""
FLOOR_S = 120.0
"""Shortest silence, in seconds: longer than slow flushes and the snapshots on network file systems (one a minute)."""
BEATS_S = 15.0
"""Three heartbeat intervals: after this, a process that no longer exists on this machine counts as dead."""
UNKNOWN_S = 600.0
"""Silence, in seconds, while the pace of the attempt is unknown: models load slowly."""
TAIL = 64
"""Number of newest rows from which a run's pace is computed."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Training speed of a run, measured over its newest rows.

    Parameters
    ----------
    step_s
        Median seconds per step; None: not known.
    longest_s
        Longest time between two of the newest rows, in seconds; None: not known.
    seq, attempt
        Position of the newest row in the run's stream, and the process that logged it; 0 without rows.
    """

    step_s: float | None = None
    longest_s: float | None = None
    seq: int = 0
    attempt: int = 0

    @property
    def patience_s(self) -> float:
        """Number of seconds without a step after which the run counts as silent."""
        if self.step_s is None:
            return UNKNOWN_S
        return max(FLOOR_S, FACTOR * self.step_s, LONGEST_FACTOR * (self.longest_s or 0.0))


@dataclass(frozen=True, slots=True)
class LivenessSigns:
    """Signs that a run is alive, paused, silent or dead.

    Parameters
    ----------
    pace
        How fast it trains.
    pause
        The pause in which it is; None: not paused.
    silent_s
        Seconds since its last step; None: it is not silent.
    reports
        Whether its process gives signs of life, with or without steps.
    dead_since
        Time of the last sign of life (Unix seconds) of a dead process; None for a live one.
    stalls
        Stalls of its ranks (alive, but no progress), the first to stall first; empty while the run is not silent, or if
        its process recorded none.
    """

    pace: Pace
    pause: Pause | None = None
    silent_s: float | None = None
    reports: bool = False
    dead_since: float | None = None
    stalls: Sequence[Event] = ()


def pace_of(newest: Sequence[StepRecord], source: str = "") -> Pace:
    """Return how fast a run trains, from the times of its newest rows, else from the step times that the trainer
    measured.

    ``source``: the trainer, which decides how metric names are read.
    """
    if not newest:
        return Pace()
    pairs = [(a, b) for a, b in pairwise(newest) if b.step > a.step and b.ts > a.ts and a.attempt == b.attempt]
    gaps = [b.ts - a.ts for a, b in pairs]
    per_step = [(b.ts - a.ts) / (b.step - a.step) for a, b in pairs]
    if not per_step:
        from rlwatch.metrics import canonicalise  # a table that no start of a run needs

        measured = [canonicalise(record.metrics, source)[0].get("time/step") for record in newest]
        per_step = [value for value in measured if value is not None and isfinite(value)]
    last = newest[-1]
    return Pace(median(per_step) if per_step else None, max(gaps, default=None), last.seq, last.attempt)


def silent_for(run: RunInfo, pace: Pace, now: float) -> float | None:
    """Return the seconds from the run's last step to ``now`` (Unix seconds) if the run is silent, else None.

    ``pace``: how fast the run trains, from which the longest usual pause follows. Before the first step of an attempt
    (process of the run), a heartbeat counts as a step.
    """
    if pace.attempt and pace.attempt < run.attempt:
        pace, last = Pace(), run.heartbeat_at or run.created_at
    else:
        last = run.last_ts or run.heartbeat_at or run.created_at
    quiet = now - last
    return quiet if quiet > pace.patience_s else None


def last_sign(run: RunInfo) -> float | None:
    """Return the time of the last heartbeat, row or start of a run (Unix seconds); None if none is known."""
    signs = [sign for sign in (run.heartbeat_at, run.last_ts, run.created_at) if sign and isfinite(sign)]
    return max(signs, default=None)


def reports(run: RunInfo, now: float) -> bool:
    """Return whether the run's process is alive at ``now`` (Unix seconds).

    It must have given a sign of life within two minutes, and not be known to have gone since.
    """
    silent = now - (last_sign(run) or 0.0)
    if run.state is not RunState.RUNNING or silent > FLOOR_S:
        return False
    return silent <= BEATS_S or not _gone(run)


def dead_since(run: RunInfo, now: float) -> float | None:
    """Return the time of the last sign of life (Unix seconds) of an unfinished run whose process is dead; else None.

    ``now``: Unix seconds. Without any heartbeat it cannot be known whether the process is dead: the result is None.
    """
    if run.heartbeat_at is None or not isfinite(run.heartbeat_at):
        return None
    return None if run.state is not RunState.RUNNING or reports(run, now) else last_sign(run)


def _gone(run: RunInfo) -> bool:
    """Return whether the run's process was on this machine and no longer exists."""
    if not run.pid or run.pid < 0 or run.host != socket.gethostname():
        return False
    try:
        os.kill(run.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        return False
    return False


def sign_of(store: Store, run: RunInfo, now: float) -> LivenessSigns:
    """Return the signs of life of ``run`` at ``now`` (Unix seconds), read from its store. May raise ``StoreError``."""
    pace = pace_of(store.records(run.run_id, last=TAIL), run.source)
    alive = reports(run, now)
    if run.state is not RunState.RUNNING:
        return LivenessSigns(pace)
    silence = silent_for(run, pace, now)
    pause: Pause | None = None
    stalls: tuple[Event, ...] = ()
    if silence is not None:
        stalls = stalls_of(store.events(run.run_id, after_seq=pace.seq), run.attempt)
        with suppress(ControlUnavailableError):  # a store without commands has no pauses
            pause = pause_of(run, store.commands(run.run_id), now)
    dead = None if pause else dead_since(run, now)
    return LivenessSigns(pace, pause, None if pause else silence, alive, dead, () if pause else stalls)


WAITING = "waiting"
"""Kind of a stall: the rank waits for other ranks, of which one may be the cause."""


def stalls_of(events: Sequence[Event], attempt: int) -> tuple[Event, ...]:
    """Return the events of the stalls of one ``attempt`` (process of a run) that have not ended: at most one for each
    rank.

    A stall: the rank is alive but makes no progress. The events are in the order in which stalls began; ranks that wait
    for other ranks in a collective operation come last.
    """
    found: dict[int, Event] = {}
    for event in events:
        rank = event.body.get("rank", 0)
        if event.attempt != attempt or not isinstance(rank, int):
            continue
        if event.kind == STALLED:
            found[rank] = event
        elif event.kind == STALL_OVER:
            found.pop(rank, None)
    return tuple(sorted(found.values(), key=lambda event: (event.body.get("what") == WAITING, _since(event))))


def stalls_now(run: RunInfo, events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the stalls of ``run`` (a rank is alive but makes no progress) since its last row; none if the run has
    ended.
    """
    if run.state is not RunState.RUNNING:
        return ()
    return stalls_of([event for event in events if event.ts > (run.last_ts or 0.0)], run.attempt)


def stack_of(stall: Event, most: int = 12) -> list[str]:
    """Return the innermost ``most`` stack frames of the training thread that the event ``stall`` recorded, outermost
    first.
    """
    threads = stall.body.get("threads")
    first = threads[0] if isinstance(threads, list) and threads else {}
    stack = first.get("stack") if isinstance(first, dict) else None
    return [str(line) for line in stack[-most:]] if isinstance(stack, list) else []


def _since(event: Event) -> float:
    since = event.body.get("since")
    return float(since) if isinstance(since, int | float) else event.ts


def stage_words(run: RunInfo, now: float) -> str:
    r"""Return a text with the stage of ``run`` (sampling, reward ...) at its last heartbeat, and for how long; empty if
    unknown.

    >>> stage_words(RunInfo("r", stage="reward", stage_since=10.0, heartbeat_at=80.0), now=50.0).replace("\u202f", " ")
    'in stage reward for 40 s'
    """
    if not run.stage:
        return ""
    dead = dead_since(run, now)
    end, when = (now, "") if dead is None else (dead, ", at its last sign of life")
    lasts = "" if run.stage_since is None else f" for {duration(max(0.0, end - run.stage_since))}"
    return f"in stage {run.stage}{lasts}{when}"
