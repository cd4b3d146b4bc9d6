"""Detect a verifier that scores its canaries (answers known to be right or wrong) differently than at first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, members, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.wording import number

RIGHT, WRONG = "verifier/canary_right/", "verifier/canary_wrong/"
PREFIXES = (RIGHT, WRONG)
CANARIES = 64
"""Most canaries that are followed."""
LARGEST = 1e6
"""Largest size of a score that is judged; a larger one means that something other than the verifier is broken."""
CONFIRMED = 2
"""Number of scorings in succession that must differ from the first: a single one can be an outage of the verifier."""
EDGE = 0.05
"""Share of the distance between no and full marks within which a score counts as one of the two."""
CHANGED, TIMES = 0.1, 2.0
"""A score must differ by this share of the distance between no and full marks, and by this multiple of the spread of
the first ``LEARNT`` scores.
"""
LEARNT = 3


@dataclass(slots=True)
class CanaryHistory:
    """Scores of one canary: the first ones, the newest, and the step since which it is scored differently.

    ``right``: True if the answer is known to be right. ``turned``, ``moved``: number of consecutive scorings with the
    opposite mark, or with another score.
    """

    right: bool
    early: list[float] = field(default_factory=list)
    last: float = 0.0
    turned: int = 0
    turned_since: int | None = None
    moved: int = 0
    moved_since: int | None = None

    @property
    def first(self) -> float:
        """First score that the verifier gave to the canary (an answer whose score is known)."""
        return self.early[0]

    def update(self, step: int, value: float, none: float, full: float) -> None:
        """Read a score at a step; ``none`` and ``full``: no and full marks of the function that scores it.

        These marks come from the first scores of the function's canaries.
        """
        if len(self.early) < LEARNT:
            self.early.append(value)
        self.last = value
        self._turn(step, self._turned(value, none, full))
        self._move(step, self._moved(value, abs(full - none)))

    def _turned(self, value: float, none: float, full: float) -> bool:
        """Return whether a wrong answer gets full marks or a right one none, unlike at first."""
        span = full - none
        if span <= 0.0:
            return False
        if self.right:
            return value <= none + EDGE * span and self.first >= none + span / 2
        return value >= full - EDGE * span and self.first <= full - span / 2

    def _moved(self, value: float, span: float) -> bool:
        middle = sorted(self.early)[len(self.early) // 2]
        spread = max(self.early) - min(self.early)
        return len(self.early) == LEARNT and abs(value - middle) > max(CHANGED * span, TIMES * spread)

    def _turn(self, step: int, now: bool) -> None:
        self.turned = self.turned + 1 if now else 0
        self.turned_since = (self.turned_since if self.turned > 1 else step) if now else None

    def _move(self, step: int, now: bool) -> None:
        self.moved = self.moved + 1 if now else 0
        self.moved_since = (self.moved_since if self.moved > 1 else step) if now else None


class VerifierChanged(BaseDetector):
    """Detector of a changed verifier: a known answer is scored differently than at first, in two consecutive scorings.

    Critical: a known-wrong answer gets full marks, or a known-right one none, unlike at first. Full marks are the best
    first score of the known-right answers of the same function, no marks the lowest first score of the known-wrong
    ones; without such answers they are 1 and 0. Any other change is a warning, if it is more than a tenth of the
    distance between them and more than twice the spread of the first three scores: the scores of a model as judge vary.
    Between scorings the last finding remains.
    """

    name: ClassVar[str] = "verifier_changed"
    reads: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((RIGHT,), (WRONG,))
    families: ClassVar[tuple[str, ...]] = PREFIXES

    def __init__(self) -> None:
        super().__init__()
        self._canaries: dict[str, CanaryHistory] = {}
        self._newest: Finding | None = None

    def measured(self, step: ClosedStep) -> bool:
        """Return True if a canary was scored in this row, or if the last finding remains."""
        return self._newest is not None or any(_scored(step, name) is not None for name in _names(step))

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Read the canaries' scores of the row; return a finding for the one that changed most."""
        scores = {name: score for name in _names(step) if (score := _scored(step, name)) is not None}
        if not scores:
            newest = self._newest
            still = newest is not None and newest.onset_step <= step.step
            return [replace(newest, step=step.step, attempt=step.attempt, seq=step.seq)] if newest and still else []
        marks = {function: self._marks(function, scores) for function in {_function(name) for name in scores}}
        for name, score in scores.items():
            if name in self._canaries or len(self._canaries) < CANARIES:
                history = self._canaries.setdefault(name, CanaryHistory(name.startswith(RIGHT)))
                history.update(step.step, score, *marks[_function(name)])
        self._newest = self._worst(step)
        return [] if self._newest is None else [self._newest]

    def _marks(self, function: str, scores: dict[str, float]) -> tuple[float, float]:
        """Return no and full marks of a function; a new canary is known by its score in this row."""
        first = {name: one.first for name, one in self._canaries.items() if _function(name) == function}
        first = {name: score for name, score in scores.items() if _function(name) == function} | first
        right = [score for name, score in first.items() if name.startswith(RIGHT)]
        wrong = [score for name, score in first.items() if name.startswith(WRONG)]
        return min(wrong, default=0.0), max(right, default=1.0)

    def _worst(self, step: ClosedStep) -> Finding | None:
        turned = {name: one for name, one in self._canaries.items() if one.turned >= CONFIRMED}
        moved = {name: one for name, one in self._canaries.items() if one.moved >= CONFIRMED}
        if not turned and not moved:
            return None
        changed, since = (turned, "turned_since") if turned else (moved, "moved_since")
        name = min(changed, key=lambda one: (getattr(changed[one], since), one))
        one, others = changed[name], len(changed) - 1
        function, canary = _function(name), name.rpartition("/")[2]
        more = f", and so are {others} more canaries" if others > 1 else ", and so is another canary" if others else ""
        known = "right" if one.right else "wrong"
        return self.finding(
            step,
            self.name,
            Severity.CRITICAL if turned else Severity.WARNING,
            f"{function} changed: the known-{known} answer {canary} is scored {number(one.last)}, "
            f"{number(one.first)} at first{more}",
            onset=getattr(one, since),
            metric=name,
            baseline=one.first,
            evidence={
                "function": function,
                "canary": canary,
                "known": known,
                **rounded({"before": one.first, "after": one.last, "canaries_changed": others + 1}),
            },
        )


def _names(step: ClosedStep) -> list[str]:
    return [name for prefix in PREFIXES for name in members(step, prefix)]


def _function(name: str) -> str:
    """Return the name of the function that scored the canary: the part between prefix and the canary's own name."""
    return name.removeprefix(RIGHT).removeprefix(WRONG).rpartition("/")[0]


def _scored(step: ClosedStep, name: str) -> float | None:
    value = finite(step, name)
    return value if value is not None and abs(value) <= LARGEST else None
