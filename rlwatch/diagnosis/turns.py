"""Changes of a run's settings, found in its rows as they arrive: jumps, and departures from a schedule.

A warm-up is no change, nor is a schedule that only falls or was followed from the first row. A change is a value that
leaves its course in a direction that is known to hurt. Memory is bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from rlwatch import catalogue
from rlwatch.wording import number


class ChangeSource(StrEnum):
    """Source from which a change of a setting is known.

    ``logged`` by the trainer, from its ``config``, from a ``command``, or ``inferred`` from values that only this
    setting can move at once. ``moved``: a metric moved without a changed setting. ``standing``: the setting is large
    from the start. ``measured``: the cause of a mismatch between trainer and rollout engine, from the shape of the gap.
    """

    LOGGED = "logged"
    CONFIG = "config"
    COMMAND = "command"
    INFERRED = "inferred"
    MOVED = "moved"
    STANDING = "standing"
    MEASURED = "measured"


StepValue = tuple[int, float]
"""A step, and the value at it."""


@dataclass(frozen=True, slots=True)
class KnobChange:
    """A change of one setting during a run, or from its start.

    Parameters
    ----------
    knob
        Name of the setting in ``knobs.toml``.
    name
        Metric, option or command that shows the change.
    step
        First step with the changed value.
    before
        Value before the change; may be NaN. Text where an option is not a number, and where ``text`` describes the
        change.
    path
        Steps and values since, wherever it had moved on by an eighth or more: the first and the farthest among them.
    source
        How the change is known.
    until
        Step at which the old value returned; None: it did not.
    warming
        Whether the setting was in its warm-up, which is no departure: a suspect only if there is no other.
    text
        Description of the change, where a factor cannot describe it.
    why
        Evidence for the change, where that is not the change itself.
    """

    knob: str
    name: str
    step: int
    before: float | str
    path: tuple[tuple[int, float | str], ...]
    source: ChangeSource = ChangeSource.LOGGED
    until: int | None = None
    warming: bool = False
    text: str = ""
    why: str = ""

    def at(self, step: int) -> float | str:
        """Return the value of the setting at ``step``: the newest of the path that is not later; the first if all are
        later.
        """
        return next((value for at, value in reversed(self.path) if at <= step), self.path[0][1])

    def factor(self, step: int) -> float | None:
        """Return the value at ``step`` divided by the value before; None where that is undefined (0, NaN, a sign, a
        text).
        """
        before, after = self.before, self.at(step)
        if isinstance(before, str) or isinstance(after, str) or not (math.isfinite(before) and math.isfinite(after)):
            return None
        if 0 in (before, after) or (before > 0) != (after > 0):
            return None
        ratio = after / before
        return ratio if 0 < ratio < math.inf else None

    def words(self, step: int) -> str:
        """Return a description of the change of the setting up to ``step``, in words.

        >>> KnobChange("learning_rate", "optim/lr", 170, 4e-4, ((170, 5e-4), (198, 4.8e-3))).words(200)
        'x 12 since step 170 (0.0004 to 0.0048)'
        """
        if self.text:
            return self.text if self.source is ChangeSource.STANDING else f"{self.text} from step {self.step}"
        factor, before, after = self.factor(step), self.before, self.at(step)
        ends = f"{_cell(before)} to {_cell(after)}"
        if self.warming:
            return f"still in its warm-up at step {step} ({ends} since step {self.step})"
        how = "" if factor is None else f"x {number(factor, 2)} " if factor >= 1 else f"/ {number(1 / factor, 2)} "
        ending = "" if self.until is None else f", until step {self.until}"
        return f"{how}since step {self.step} ({ends}{ending})" if how else f"{ends} since step {self.step}{ending}"


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else number(value, 3)


# One metric in one direction: its level, and how it leaves it.

NEAR = math.log(1.02)
"""Log factor up to which a value is still at its level."""
SAME = 1e-6
"""Relative difference up to which two values are equal: a long warm-up rises by little in each row."""
ON = math.log(1.125)
"""Log factor by which a value must move on to be added to the path of a change."""
PLACES = 64
"""Length of a path; the farthest value replaces the last once it is full."""
STALLED = 3
"""Rows without a rise that end a warm-up."""
SETTLED = 60
"""Number of rows without movement after which the changed value is the level from which further
changes are measured.
"""
USUAL = 48
"""Number of rows over which the usual movement from row to row is measured."""
TIMES_USUAL = 6.0
"""Number of usual movements that a change must exceed: a measured value, unlike a set one, moves all the time."""
KEPT = 8
"""Number of changes of one metric and direction that are kept: the newest ones."""
TINY = 1e-12
"""Magnitudes below count as 0, which is a valid value: from 0 to anything is a jump."""


LARGEST = 709.0
"""The largest logarithm of a magnitude that a float can hold."""


def _log(value: float) -> float:
    return math.log(max(abs(value), TINY))


@dataclass(slots=True)
class ChangeTracker:
    """Follows one logged setting in one direction and records its changes.

    Parameters
    ----------
    knob, metric
        Name of the setting, and the canonical metric that logs it.
    sign
        1 to follow rises, -1 to follow falls.
    least
        Smallest factor of a change.
    odd
        Whether this tracker of the metric also records values that are NaN or below 0.
    """

    knob: str
    metric: str
    sign: int
    least: float
    odd: bool
    done: deque[KnobChange] = field(default_factory=lambda: deque(maxlen=KEPT))
    open: KnobChange | None = None
    level: float = math.nan
    x: float = math.nan
    value: float = math.nan
    far: float = -math.inf
    last_at_level: int = 0
    first: StepValue | None = None
    planned: bool = True
    still: int = 0
    rest: float = math.nan
    moves: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))

    @property
    def turns(self) -> list[KnobChange]:
        """All recorded changes, and the current one if the setting has not returned."""
        return [*self.done, *([self.open] if self.open is not None else [])]

    def update(self, step: int, value: float) -> None:
        """Take the value of the setting at ``step``."""
        if self.first is None:
            self.first = (step, value)
            self._settle(step, value)
            return
        if value == self.value and self.open is None:
            self._unmoved(step)
            return
        odd = not math.isfinite(value) or value < 0
        if odd or not math.isfinite(self.value) or self.value < 0:
            self._class(step, value)
            return
        x = self.sign * _log(value)
        move, self.x, self.value = x - self.x, x, value
        if self.planned:
            self._plan(step, x, move)
        else:
            self._follow(step, x, value)
        self.moves.append(abs(move))

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Take several rows: the values of the setting at ``steps``, as :meth:`update` would one by one."""
        if self.open is None and self.first is not None and all(value == self.value for value in values):
            self._unmoved(steps[-1], len(steps))
            return
        for row in zip(steps, values, strict=True):
            self.update(*row)

    def _unmoved(self, step: int, rows: int = 1) -> None:
        self.still += rows
        self.moves.extend([0.0] * rows)
        self.last_at_level = step
        if self.planned and self.still >= STALLED:
            self.planned = False

    def _settle(self, step: int, value: float) -> None:
        """Take the current value as the level."""
        self.value, self.x = value, self.sign * _log(value) if math.isfinite(value) else math.nan
        self.level, self.last_at_level, self.far = self.x, step, -math.inf

    def _plan(self, step: int, x: float, move: float) -> None:
        """Follow the initial schedule, which lasts while the value continues from the first row, at any rate."""
        self.still = self.still + 1 if abs(move) <= SAME else 0
        self.planned = move >= -SAME and self.still < STALLED
        self.level, self.last_at_level = x, step

    def _follow(self, step: int, x: float, value: float) -> None:
        beyond = x - self.level
        if self.open is None and beyond <= NEAR:
            self.level, self.last_at_level = min(x, self.level), step
        elif self.open is not None and beyond <= NEAR:
            self._end(replace(self.open, until=step))
            self.level, self.last_at_level = x, step
        elif self.open is not None:
            self._go_on(self.open, step, x, value)
        elif beyond >= math.log(self.least) and beyond >= TIMES_USUAL * self._usual():
            began = self.last_at_level
            before = math.exp(min(self.sign * self.level, LARGEST))
            self.open = KnobChange(
                self.knob, self.metric, began + 1, 0.0 if before < 2 * TINY else before, ((step, value),)
            )
            self.far = x

    def _go_on(self, turn: KnobChange, step: int, x: float, value: float) -> None:
        if x >= self.far + ON:
            kept = turn.path if len(turn.path) < PLACES else turn.path[:-1]
            self.open, self.far = replace(turn, path=(*kept, (step, value))), x
        self.still = self.still + 1 if abs(x - self.rest) <= NEAR else 0
        self.rest = self.rest if self.still else x
        if self.still >= SETTLED:
            self._end(turn)
            self._settle(step, value)

    def _end(self, turn: KnobChange) -> None:
        self.done.append(turn)
        self.open, self.far = None, -math.inf

    def _class(self, step: int, value: float) -> None:
        """Record a jump from a number to NaN, from above 0 to below, or back, of any size."""
        same = _kind_of(value) == _kind_of(self.value)
        if not same and self.odd:
            if self.open is not None:
                self._end(self.open)
            back = self.done[-1] if self.done else None
            if back is not None and back.until is None and _kind_of(value) == _kind_of(back.before):
                self.done[-1] = replace(back, until=step)
            else:
                self.done.append(KnobChange(self.knob, self.metric, step, self.value, ((step, value),)))
            self.planned = False
        elif same and math.isfinite(value) and self.done and _log(value) > _log(float(self.done[-1].path[-1][1])) + ON:
            newest = self.done[-1]
            self.done[-1] = replace(newest, path=(*newest.path[: PLACES - 1], (step, value)))
        self._settle(step, value)

    def _usual(self) -> float:
        moves = sorted(self.moves)
        return moves[len(moves) // 2] if moves else 0.0

    def warming(self, step: int) -> KnobChange | None:
        """Return the warm-up as a change, while it lasts; else None."""
        if not self.planned or self.sign < 0 or self.first is None or not math.isfinite(self.value):
            return None
        began, value = self.first
        if self.value <= value * self.least:
            return None
        return KnobChange(self.knob, self.metric, began, value, ((step, self.value),), warming=True)


def _kind_of(value: float | str) -> str:
    if isinstance(value, str) or math.isnan(value):
        return "nan"
    return str(value) if math.isinf(value) else "below" if value < 0 else "number"


def standing(knob: str, name: str, step: int, value: float) -> KnobChange | None:
    """Return a change for a setting whose first value is known to hurt by its size; None for any other value.

    ``knob``: name of the setting. ``name``: metric or option that shows it. ``step``: the first step.
    """
    large = catalogue.knobs()[knob].large
    if not large or not large["from"] <= value < math.inf:
        return None
    text = f"{number(value, 3)} since the start"
    return KnobChange(
        knob, name, step, value, ((step, value),), ChangeSource.STANDING, text=text, why=str(large["why"])
    )


Rows: TypeAlias = Sequence[tuple[int, Mapping[str, float]]]
"""Rows of a run, in order: the step of each, and canonical metric -> value."""


def column(rows: Rows, metric: str) -> tuple[list[int], list[float]]:
    """Return the steps of the ``rows`` that have a metric, and its values there.

    >>> column([(1, {"a": 0.5}), (2, {}), (3, {"a": 0.6})], "a")
    ([1, 3], [0.5, 0.6])
    """
    found = [(step, row[metric]) for step, row in rows if metric in row]
    return [step for step, _ in found], [value for _, value in found]


class Knobs:
    """Follows all settings that a run logs row by row, and collects their changes."""

    def __init__(self) -> None:
        self._trackers = {
            metric: [ChangeTracker(knob.name, metric, sign, knob.least, sign == knob.signs[0]) for sign in knob.signs]
            for knob in catalogue.knobs().values()
            for metric in knob.metrics
        }
        self._step = 0
        self._standing: dict[str, KnobChange] = {}

    def extend(self, rows: Rows) -> None:
        """Take several rows, in order."""
        self._step = rows[-1][0]
        for metric, dials in self._trackers.items():
            steps, values = column(rows, metric)
            if steps:
                self._stand(metric, dials[0], steps[0], values[0])
                for tracker in dials:
                    tracker.extend(steps, values)

    def _stand(self, metric: str, tracker: ChangeTracker, step: int, value: float) -> None:
        """Record a first value that is known to hurt by its size."""
        if tracker.first is None and (turn := standing(tracker.knob, metric, step, value)) is not None:
            self._standing[metric] = turn

    @property
    def turns(self) -> tuple[KnobChange, ...]:
        """Changes of settings so far, in order of step, including an ongoing warm-up."""
        found = [turn for both in self._trackers.values() for tracker in both for turn in tracker.turns]
        warming = [
            turn for both in self._trackers.values() for tracker in both if (turn := tracker.warming(self._step))
        ]
        return tuple(
            sorted((*found, *warming, *self._standing.values()), key=lambda turn: (turn.step, turn.knob, turn.name))
        )
