"""Detect that one part of the reward has reached its ceiling while the others are flat, or outweighs all others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from rlwatch.detectors.base import STILL, BaseDetector, SeriesHistory, finite, members, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold
from rlwatch.wording import number

PREFIX = "reward/part/"
PARTS = 12
"""Most parts that are followed; a run with more is not judged."""
PINNED, NEARLY_EVERYBODY = 0.99, 0.9
"""Share of the best row so far from which a level is a ceiling; and share of the answers that earn the part."""
CLIMB = 1 / 3
"""Share of its best row that a part of the reward must have gained to count as learnt."""
ROWS, STEPS = 30, 100
"""Rows and steps that a part must have been at its ceiling: sound runs learn the format first, and the answers after
it.
"""
ALL = 0.9
"""Share of the sum of all parts from which the parts at their ceiling dominate."""


class RewardPart(SeriesHistory):
    """Course of one part of the reward, such as that for the format: its level, its best, and how long it has been
    there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pinned = Hold(forgive=3)

    def update(self, step: int, value: float) -> None:
        """Read the next finite ``value`` of this part of the reward, at a training ``step``."""
        super().update(step, value)
        self._pinned.update(step, self.full)

    @property
    def moves(self) -> bool:
        """True if this part of the reward ever changed: some penalties never apply."""
        return self.high > self.low

    @property
    def full(self) -> bool:
        """True if this part of the reward is at its maximum.

        Half of the last rows match the best row so far, or nearly all answers earn the part.
        """
        if self.high <= 0.0 or not self.moves:
            return False
        return self.level >= PINNED * self.high or (self.share and self.level >= NEARLY_EVERYBODY)

    def learnt(self) -> float | None:
        """Return the step at which this part of the reward was halfway up; None unless it climbed and has long been at
        its maximum.
        """
        return self.climbed(CLIMB * self.high) if self._pinned.lasted(ROWS, STEPS) else None

    def still(self, since: float) -> bool:
        """Return True if the part has certainly gained next to nothing from step ``since`` on."""
        gained = self.gained(since)
        return gained is not None and gained[1] < STILL


class RewardParts(BaseDetector):
    """Detector of a part of the reward at its ceiling, while the other parts are flat or hardly count.

    Healthy runs also learn the format first, so a part at its ceiling alone proves nothing. It is gaming if the part is
    at its ceiling for ``STEPS`` steps, every other moving part has certainly gained nothing since it was halfway up,
    and one of them has room. It is domination if the parts at their ceiling are nearly all of the reward. Noise is not
    evidence of a flat part, and a part that never moved proves nothing. At most ``PARTS`` parts are followed.
    """

    name: ClassVar[str] = "reward_parts"
    reads: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((PREFIX,),)
    families: ClassVar[tuple[str, ...]] = (PREFIX,)

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, RewardPart] = {}
        self._dominated = Hold(forgive=3)
        self._domination: Finding | None = None

    def measured(self, step: ClosedStep) -> bool:
        """Return True if the row ``step`` has the mean of a part of the reward, such as that for the format."""
        return any(finite(step, name) is not None for name in members(step, PREFIX))

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Compare the parts of the reward in the row ``step``; return findings of a part that is gamed or dominates, if
        any.
        """
        for name in members(step, PREFIX):
            value = finite(step, name)
            if value is not None and (name in self._parts or len(self._parts) <= PARTS):
                self._parts.setdefault(name, RewardPart()).update(step.step, value)
        if not 2 <= len(self._parts) <= PARTS:
            return []
        moving = {name: part for name, part in self._parts.items() if part.moves}
        full = {name: part for name, part in moving.items() if part.full}
        rest = {name: part for name, part in moving.items() if name not in full}
        return [*self._gamed(step, full, rest), *self._dominates(step, full, rest)]

    def _gamed(self, step: ClosedStep, full: Mapping[str, RewardPart], rest: Mapping[str, RewardPart]) -> list[Finding]:
        """Return the part at its ceiling that climbed last, if the others have been flat since."""
        climbs = {name: part.learnt() for name, part in full.items()}
        since, name = max(((at, name) for name, at in climbs.items() if at is not None), default=(0.0, ""))
        if not name or not any(part.room for part in rest.values()):
            return []
        if not all(part.still(since) for part in rest.values()):
            return []
        others = " and ".join(f"{_named(other)} stands at {number(part.level)}" for other, part in rest.items())
        return [
            self.finding(
                step,
                "format_gaming",
                Severity.WARNING,
                f"{_named(name)} climbed to its ceiling of {number(full[name].level)} while {others}: "
                "the policy earns the part that pays and learns nothing else",
                onset=math.ceil(since),
                metric=name,
                evidence=rounded({other: part.level for other, part in self._parts.items()}),
            )
        ]

    def _dominates(
        self, step: ClosedStep, full: Mapping[str, RewardPart], rest: Mapping[str, RewardPart]
    ) -> list[Finding]:
        """Return the parts that nearly all answers earn, if they have long been nearly all of the reward."""
        earned, other = (sum(abs(part.level) for part in parts.values()) for parts in (full, rest))
        now = bool(rest) and earned > 0.0 and earned >= ALL * (earned + other)
        self._dominated.update(step.step, now)
        if not self._dominated.lasted(ROWS, STEPS):
            self._domination = None
            return []
        if now:
            names = " and ".join(map(_named, full))
            self._domination = self.finding(
                step,
                "format_domination",
                Severity.WARNING,
                f"{names}, which nearly every answer earns in full, is {earned / (earned + other):.0%} of all that the "
                f"parts add up to: {' and '.join(map(_named, rest))} hardly weighs",
                onset=self._dominated.since,
                metric=max(full, key=lambda name: full[name].level),
                evidence=rounded({name: part.level for name, part in self._parts.items()}),
            )
        # In a forgiven row no part need be at its ceiling; the earlier finding remains valid.
        newest = self._domination
        return [] if newest is None else [replace(newest, step=step.step, attempt=step.attempt, seq=step.seq)]


def _named(metric: str) -> str:
    return metric.removeprefix(PREFIX)
