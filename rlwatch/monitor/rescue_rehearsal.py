"""Rehearsal of a rescue on a recorded run: the first acts of the policy that saves failing runs, and what the run did.

A recording is not the run that the policy would have made. Up to the rollback the rehearsal is faithful but for one
thing: the rows of the probe were trained in the recording. The rewards of restored weights are not known; what became
of the run without them is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlwatch.control.commands import ROLLBACK
from rlwatch.control.rescue import NEAR, RescueCourse, RescuePolicy
from rlwatch.monitor.engine import Monitor
from rlwatch.records import JSON, Event, StepRecord


@dataclass(frozen=True, slots=True)
class RehearsedAct:
    """A command that the rescue policy (permission to save a failing run) would have sent after ``step``.

    ``do``, ``args``: kind and arguments of the command. ``why``: its reason.
    """

    step: int
    do: str
    args: dict[str, JSON]
    why: str


@dataclass(frozen=True, slots=True)
class RescueRehearsal:
    """Commands that a rescue policy (permission to save a failing run) would have sent to a recorded run, and how the
    recording ended without them.

    Attributes
    ----------
    acts
        Commands, in order, up to the first that would have changed the run; empty where no rescue would have begun.
    restored
        Step of the snapshot that would have been restored; None where none was.
    level, ended
        Median reward before the failure, and of the last rows of the recording, in the reward's unit; None where
        unknown.
    steps_after, hours_after
        Steps and hours of the recording after the decision.
    """

    acts: tuple[RehearsedAct, ...] = ()
    restored: int | None = None
    level: float | None = None
    ended: float | None = None
    steps_after: int = 0
    hours_after: float = 0.0

    @property
    def wasted(self) -> bool | None:
        """True where the recording ended with a reward clearly below the level before the failure; None where that is
        not known.
        """
        if self.level is None or self.ended is None:
            return None
        return self.ended < self.level - (1.0 - NEAR) * abs(self.level)


def rehearse_rescue(
    items: Iterable[StepRecord | Event], monitor: Monitor, policy: RescuePolicy, *, every: int = 10
) -> RescueRehearsal:
    """Return what a rescue policy (permission to save a failing run) would have done to a recorded run.

    The result ends with the first command that would have changed the run.

    Parameters
    ----------
    items
        Rows and events of the run, in order.
    monitor
        A fresh monitor, which judges them.
    policy
        The permission and its limits.
    every
        Number of steps between two snapshots of the weights that are assumed to exist.
    """
    taken = [0]

    def last_good() -> int | None:
        health = monitor.health(forecast=False)
        return next((step for step in reversed(taken) if health.unsound_after(step) == ""), None)

    course = RescueCourse(replace(policy, dry_run=False, skip_nonfinite=False), last_good)
    acts: list[RehearsedAct] = []
    decided: StepRecord | None = None
    last: StepRecord | None = None
    restored: int | None = None
    for item in items:
        monitor.observe(item)
        if isinstance(item, Event):
            continue
        last = item
        if decided is not None or not monitor.judged_rows:
            continue
        row = monitor.judged_rows[-1]
        if row.step >= taken[-1] + every:
            taken.append(row.step)
        command = course.next(row.step, monitor.health(forecast=False), row.reward)
        if command is None:
            continue
        acts.append(RehearsedAct(row.step, command.kind, dict(command.args), command.why))
        if command.kind != "hold":
            decided, restored = item, last_good() if command.kind == ROLLBACK else None
    monitor.close()
    ended = monitor.judged_rows[-1].level if monitor.judged_rows else None
    if decided is None or last is None:
        return RescueRehearsal(tuple(acts), None, course.level, ended)
    hours = max(last.ts - decided.ts, 0.0) / 3600.0
    return RescueRehearsal(tuple(acts), restored, course.level, ended, last.step - decided.step, hours)
