"""Changes of a run's knobs, found in its rows as they come: jumps, and departures from a schedule.

Warm-ups are no change, and neither is a schedule that only ever falls or was on its way from the first row: what counts
is a value that leaves the way it was on, in a direction that is known to hurt. Memory is bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rlwatch import catalogue
from rlwatch.wording import number


class ChangeSource(StrEnum):
    """Ways by which a change is known: ``logged`` by the trainer, in its ``config``, by a ``command``, or ``inferred``
    from numbers that only this knob can move at once. What ``moved`` by itself is no knob, and a ``standing`` value was
    not turned: it is large from the start. ``measured`` is the cause of a mismatch that its shape shows.
    """

    LOGGED = "logged"
    CONFIG = "config"
    COMMAND = "command"
    INFERRED = "inferred"
    MOVED = "moved"
    STANDING = "standing"
    MEASURED = "measured"


Place = tuple[int, float]
"""A step, and the value there."""


@dataclass(frozen=True, slots=True)
class KnobChange:
    """A knob that was turned.

    Parameters
    ----------
    knob
        Name in ``knobs.toml``.
    name
        The metric, option or command by which it is known.
    step
        The first step at which it was off its way.
    before
        The value it left; NaN is one. Text where an option is no number, and where ``says`` tells.
    path
        Steps and values from there on, wherever it had gone on by an eighth or more: the first and the farthest among
        them.
    until
        The step at which it was back; None: it was not.
    warming
        Whether it was on its first rise, which is no departure: a suspect only for want of others.
    says
        Words for what changed, where no factor tells.
    why
        Words for what speaks for it, where that is not the change itself.
    """

    knob: str
    name: str
    step: int
    before: float | str
    path: tuple[tuple[int, float | str], ...]
    told: ChangeSource = ChangeSource.LOGGED
    until: int | None = None
    warming: bool = False
    says: str = ""
    why: str = ""

    def at(self, step: int) -> float | str:
        """The value at ``step``: the newest of the path that is not later; the first if all are."""
        return next((value for at, value in reversed(self.path) if at <= step), self.path[0][1])

    def factor(self, step: int) -> float | None:
        """Times ``before`` that the value was at ``step``; None where that says nothing (0, NaN, a sign, a text)."""
        before, after = self.before, self.at(step)
        if isinstance(before, str) or isinstance(after, str) or not (math.isfinite(before) and math.isfinite(after)):
            return None
        if 0 in (before, after) or (before > 0) != (after > 0):
            return None
        ratio = after / before
        return ratio if 0 < ratio < math.inf else None

    def words(self, step: int) -> str:
        """The change as far as ``step``.

        >>> KnobChange("learning_rate", "optim/lr", 170, 4e-4, ((170, 5e-4), (198, 4.8e-3))).words(200)
        'x 12 since step 170 (0.0004 to 0.0048)'
        """
        if self.says:
            return self.says if self.told is ChangeSource.STANDING else f"{self.says} from step {self.step}"
        factor, before, after = self.factor(step), self.before, self.at(step)
        ends = f"{_cell(before)} to {_cell(after)}"
        if self.warming:
            return f"still in its warm-up at step {step} ({ends} since step {self.step})"
        how = "" if factor is None else f"x {number(factor, 2)} " if factor >= 1 else f"/ {number(1 / factor, 2)} "
        ending = "" if self.until is None else f", until step {self.until}"
        return f"{how}since step {self.step} ({ends}{ending})" if how else f"{ends} since step {self.step}{ending}"


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else number(value, 3)


# One metric in one direction: the level it is to stay on this side of, and how it leaves it.

NEAR = math.log(1.02)
"""Relative difference up to which a value is still on its level."""
SAME = 1e-6
"""Relative difference up to which two values are one: a long warm-up rises by little in each row."""
ON = math.log(1.125)
"""The path of a turn notes a value once it has gone on so far."""
PLACES = 64
"""Places of a path; the farthest replaces the last once they are used up."""
STALLED = 3
"""Rows without a rise that end a warm-up."""
SETTLED = 60
"""Rows without movement after which a value that was turned is the level that further turns are measured from."""
USUAL = 48
"""Rows over which movements from row to row are usual ones."""
TIMES_USUAL = 6.0
"""A turn goes farther than so many usual movements: a number that is measured, not set, moves all the time."""
KEPT = 8
"""Turns kept of one metric and direction: the newest."""
TINY = 1e-12
"""Smaller sizes are 0, which is a value: from 0 to anything is a jump."""


LARGEST = 709.0
"""The largest logarithm of a size that a float holds."""


def _log(value: float) -> float:
    return math.log(max(abs(value), TINY))


@dataclass(slots=True)
class Dial:
    """Follows one metric in one direction: ``sign`` 1 for rises, -1 for falls.

    ``odd``: whether this one of a metric's dials tells of values that are no number, or below 0.
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
    first: Place | None = None
    planned: bool = True
    still: int = 0
    rest: float = math.nan
    moves: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))

    @property
    def turns(self) -> list[KnobChange]:
        """All that are remembered, and the one that lasts."""
        return [*self.done, *([self.open] if self.open is not None else [])]

    def update(self, step: int, value: float) -> None:
        """Take the value of a row."""
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

    def _unmoved(self, step: int) -> None:
        self.still += 1
        self.moves.append(0.0)
        self.last_at_level = step
        if self.planned and self.still >= STALLED:
            self.planned = False

    def _settle(self, step: int, value: float) -> None:
        """Take where it is as the level."""
        self.value, self.x = value, self.sign * _log(value) if math.isfinite(value) else math.nan
        self.level, self.last_at_level, self.far = self.x, step, -math.inf

    def _plan(self, step: int, x: float, move: float) -> None:
        """The first way of all: on it while it goes on from the first row, however slowly."""
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
        """From a number to NaN, from above 0 to below, and back: a jump however small."""
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
        """The first rise, while it lasts."""
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
    """A value that is known to hurt by itself; None where it is not."""
    large = catalogue.knobs()[knob].large
    if not large or not large["from"] <= value < math.inf:
        return None
    says = f"{number(value, 3)} since the start"
    return KnobChange(
        knob, name, step, value, ((step, value),), ChangeSource.STANDING, says=says, why=str(large["why"])
    )


class Knobs:
    """The knobs that a run logs, row by row."""

    def __init__(self) -> None:
        self._dials = {
            metric: [Dial(knob.name, metric, sign, knob.least, sign == knob.signs[0]) for sign in knob.signs]
            for knob in catalogue.knobs().values()
            for metric in knob.metrics
        }
        self._step = 0
        self._standing: dict[str, KnobChange] = {}

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a row of canonical names."""
        self._step = step
        for metric, dials in self._dials.items():
            value = metrics.get(metric)
            if value is not None:
                self._stand(metric, dials[0], step, value)
                for dial in dials:
                    dial.update(step, value)

    def _stand(self, metric: str, dial: Dial, step: int, value: float) -> None:
        """Note a first value that is large by itself."""
        if dial.first is None and (turn := standing(dial.knob, metric, step, value)) is not None:
            self._standing[metric] = turn

    @property
    def turns(self) -> tuple[KnobChange, ...]:
        """Turns so far, in order of step; a warm-up that lasts among them."""
        found = [turn for dials in self._dials.values() for dial in dials for turn in dial.turns]
        warming = [turn for dials in self._dials.values() for dial in dials if (turn := dial.warming(self._step))]
        return tuple(
            sorted((*found, *warming, *self._standing.values()), key=lambda turn: (turn.step, turn.knob, turn.name))
        )
