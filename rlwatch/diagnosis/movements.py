"""Movements of the reward and of metrics of the policy's updates, and two guesses that follow from their order.

If the reward falls while no metric shows a change of the policy, the policy did not lower it: environment, tools,
verifier and data are the first suspects. If gradient, clipping and KL rose before anything broke, the updates were too
large, whichever setting made them so.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlwatch import catalogue
from rlwatch.diagnosis.signs import Sign
from rlwatch.diagnosis.turns import ChangeSource, KnobChange
from rlwatch.wording import number

POLICY, REWARD = "policy", "reward"
"""Subjects of a movement."""
UPDATES, ENVIRONMENT = "update_size", "environment"
"""Entries of ``knobs.toml`` whose changes are inferred in this module."""


@dataclass(frozen=True, slots=True)
class MovementGauge:
    """A metric whose movements away from its level are recorded.

    Parameters
    ----------
    metric, title
        Canonical name, and name for people.
    of
        Subject of a movement: ``"policy"`` or ``"reward"``.
    least
        Smallest movement that counts, in the unit of the metric; with ``times``, as a multiple of the level.
    times
        Whether ``least`` is relative to the level.
    update
        Aspect of an update's size that the metric shows (gradient, ratio or distance), if any.
    much
        Level that is large by itself.
    """

    metric: str
    title: str
    of: str
    least: float
    times: bool = False
    update: str = ""
    much: float = math.inf


GAUGES: tuple[MovementGauge, ...] = (
    MovementGauge("reward/mean", "reward", REWARD, 0.05),
    MovementGauge("policy/entropy", "entropy", POLICY, 0.15, times=True),
    MovementGauge("policy/kl_ref", "KL to the reference", POLICY, 1.0, times=True, update="distance"),
    MovementGauge("policy/kl_ref_k3", "KL to the reference", POLICY, 1.0, times=True, update="distance"),
    MovementGauge("policy/kl_old", "KL to the old policy", POLICY, 2.0, times=True, update="ratio", much=0.05),
    MovementGauge("optim/grad_norm", "gradient norm", POLICY, 1.0, times=True, update="gradient"),
    MovementGauge("ratio/clipfrac", "clip fraction", POLICY, 0.05, update="ratio", much=0.1),
    MovementGauge("len/mean", "response length", POLICY, 0.25, times=True),
    MovementGauge("len/clipped", "share of cut responses", POLICY, 0.2),
)
MEASURED = frozenset(gauge.metric for gauge in GAUGES)
"""Metrics whose movements are recorded."""

ROWS, FEWEST = 24, 6
"""Number of rows of the level from which a movement is measured, and the smallest number."""
NEWEST = 3
"""Number of newest rows, of which the last and one more must have left the level."""
TIMES = 6.0
"""Number of usual deviations that a movement must exceed."""
KEPT = 6
"""Number of movements of one metric that are kept: the newest ones."""


@dataclass(slots=True)
class MovementTracker:
    """Follows one metric row by row and records its movements; its level is updated except during a movement."""

    gauge: MovementGauge
    level: deque[float] = field(default_factory=lambda: deque(maxlen=ROWS))
    last: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NEWEST))
    away: int = 0
    began: KnobChange | None = None
    turns: deque[KnobChange] = field(default_factory=lambda: deque(maxlen=KEPT))

    def update(self, step: int, value: float) -> None:
        """Take the value at ``step``; values that are not finite are ignored."""
        if not math.isfinite(value):
            return
        if len(self.last) == NEWEST and not self.away:
            self.level.append(self.last[0][1])
        self.last.append((step, value))
        if len(self.level) < FEWEST or len(self.last) < NEWEST:
            return
        if self.began is not None and min(self.level) <= value <= max(self.level):
            self.away = 0  # a usual value, as in most rows: no further work
            return
        ordered = sorted(self.level)
        middle = ordered[len(ordered) // 2]
        if self.began is None:
            self.began = KnobChange(
                self.gauge.of, self.gauge.metric, step, middle, ((step, middle),), ChangeSource.MOVED, text=BEGAN
            )
        usual = 1.4826 * sorted(abs(one - middle) for one in ordered)[len(ordered) // 2]
        limit = max(TIMES * usual, self.gauge.least * (abs(middle) if self.gauge.times else 1.0))
        off = [(at, one - middle) for at, one in self.last]
        side = math.copysign(1.0, off[-1][1])
        if side * off[-1][1] > limit and sum(side * by > limit for _, by in off) >= NEWEST - 1:
            off = [place for place in off if side * place[1] > limit]
            self._note(middle, off)
        elif self.away and abs(off[-1][1]) <= limit:
            self.away = 0

    def _note(self, middle: float, off: Sequence[tuple[int, float]]) -> None:
        """Begin or extend a movement; a long one becomes the level."""
        if not self.away:
            now = max((by for _, by in off), key=abs) + middle
            first = off[0][0]
            self.turns.append(
                KnobChange(self.gauge.of, self.gauge.metric, first, middle, ((first, now),), ChangeSource.MOVED)
            )
        self.away += 1
        if self.away > ROWS:
            self.away = 0
            self.level.clear()


BEGAN = "from the first rows"
"""Text of an entry that is the level of the first rows, not a movement."""


def _level(turn: KnobChange) -> float:
    return float(turn.path[0][1])


class Movements:
    """Follows all metrics of :data:`GAUGES` row by row, and collects their movements."""

    def __init__(self) -> None:
        self._trackers = {gauge.metric: MovementTracker(gauge) for gauge in GAUGES}

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the row of ``step`` (canonical metric -> value)."""
        for metric, tracker in self._trackers.items():
            value = metrics.get(metric)
            if value is not None:
                tracker.update(step, value)

    @property
    def turns(self) -> tuple[KnobChange, ...]:
        """Movements so far, in order of step, and levels of the first rows that are large by themselves."""
        found = [turn for tracker in self._trackers.values() for turn in tracker.turns]
        found += [one.began for one in self._trackers.values() if one.began and _level(one.began) >= one.gauge.much]
        return tuple(sorted(found, key=lambda turn: (turn.step, turn.name)))


# The guesses.

TITLES = {gauge.metric: gauge.title for gauge in GAUGES}
REWARD = "reward"
SIDES: Mapping[str, str] = {
    **{gauge.metric: gauge.update for gauge in GAUGES if gauge.update},
    **{name: kind.side for name, kind in catalogue.kinds().items() if kind.side not in ("", REWARD)},
}
"""Gauge or kind of finding -> the aspect of an update's size that it shows: gradient, ratios or distance."""
ENOUGH = 2
"""Smallest number of measured metrics of the policy that show it unchanged, and of aspects of its updates that must
grow.
"""
BEFORE = 60
"""Number of steps before the failure within which a movement is related to it."""
REWARD_KINDS = frozenset(name for name, kind in catalogue.kinds().items() if kind.side == REWARD)
"""Kinds of findings that report a broken reward."""


def guesses(
    moves: Iterable[KnobChange], signs: Sequence[Sign], since: int, slack: int, measured: Collection[str] | None
) -> list[KnobChange]:
    """Return an inferred change of the size of updates, or of the environment, as the reason for a failure; else
    nothing.

    Parameters
    ----------
    moves
        Changes during the run; only movements are used.
    signs
        Findings of the run, one for each beginning.
    since
        Step at which the failure began.
    slack
        Error of this step, in steps.
    measured
        Canonical names of the logged metrics; None: unknown.
    """
    noted = [turn for turn in moves if turn.source is ChangeSource.MOVED]
    levels = [turn for turn in noted if turn.text == BEGAN and turn.step <= since]
    near = [turn for turn in noted if turn.text != BEGAN and since - BEFORE <= turn.step <= since + slack]
    policy = [turn for turn in near if turn.knob == POLICY]
    grown = _grown(policy, [sign for sign in signs if sign.bad and since - BEFORE <= sign.onset_step <= since + slack])
    if "gradient" in grown and "ratio" not in grown and levels:
        grown["ratio"] = (grown["gradient"][0], f"{TITLES[levels[0].name]} {number(_level(levels[0]), 3)} {BEGAN}")
    if len(grown) >= ENOUGH and grown.keys() - {"distance"} and min(step for step, _ in grown.values()) <= since:
        return [_updates(sorted(grown.values()))]
    watched = () if measured is None else sorted({TITLES[name] for name in MEASURED & set(measured)} - {"reward"})
    first = [sign for sign in signs if sign.bad and sign.onset_step <= since + slack]
    broke = [sign for sign in first if sign.kind in REWARD_KINDS]
    fell = [turn for turn in near if turn.knob == REWARD and not _grew(turn)]
    if policy or len(watched) < ENOUGH or len(broke) < len(first) or not broke or not fell:
        return []
    return [_environment(fell[-1], watched)]


def _grown(moves: Sequence[KnobChange], signs: Sequence[Sign]) -> dict[str, tuple[int, str]]:
    """Return aspect of an update's size -> the step at which it grew, and a text, with numbers where there are any."""
    shown = [(turn.step, SIDES[turn.name], _ends(turn)) for turn in moves if turn.name in SIDES and _grew(turn)]
    found = [(s.onset_step, SIDES[s.kind], f"{s.entry.happened} at {s.onset_step}") for s in signs if s.kind in SIDES]
    grown: dict[str, tuple[int, str]] = {}
    for step, side, words in (*sorted(shown), *sorted(found)):
        known = grown.get(side)
        grown[side] = (step, words) if known is None else (min(step, known[0]), known[1])
    return grown


def _grew(turn: KnobChange) -> bool:
    return _level(turn) > float(turn.before)


def _ends(turn: KnobChange) -> str:
    return f"{TITLES[turn.name]} {number(float(turn.before), 3)} to {number(_level(turn), 3)}"


def _updates(grown: Sequence[tuple[int, str]]) -> KnobChange:
    first, text = grown[0][0], ", ".join(words for _, words in grown)
    why = "these grow with an update's size, whichever knob sets it (rate, updates a batch, clip range, old weights)"
    return KnobChange(UPDATES, UPDATES, first, 0.0, ((first, 1.0),), ChangeSource.INFERRED, text=text, why=why)


def _environment(fall: KnobChange, watched: Sequence[str]) -> KnobChange:
    why = f"nothing that was measured of the policy moved before or with it ({', '.join(watched)})"
    return KnobChange(
        ENVIRONMENT, ENVIRONMENT, fall.step, 0.0, ((fall.step, 1.0),), ChangeSource.INFERRED, text=_ends(fall), why=why
    )
