"""Footprints of settings that were not logged: values that only one setting can move, and that moved.

Advantages are centred and have the same scale for any policy. A reward of right or wrong has the spread that follows
from its mean. The loss of an update on its own samples consists of the KL and entropy terms; without the KL term, only
an entropy term keeps it at a fixed multiple of the entropy, row after row. Each such value is compared with the run's
first rows. A median of five rows outside their range is a footprint. It shows which setting changed, not who changed
it.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from rlwatch import catalogue
from rlwatch.diagnosis.mismatch_causes import GAP_METRICS, GapTracker
from rlwatch.diagnosis.signs import Sign
from rlwatch.diagnosis.turns import ChangeSource, KnobChange, Knobs, Rows, column
from rlwatch.wording import number

# Movements of the reward and of metrics of the policy's updates, and two guesses that follow from their order.
#
# If the reward falls while no metric shows a change of the policy, the policy did not lower it: environment, tools,
# verifier and data are the first suspects. If gradient, clipping and KL rose before anything broke, the updates were
# too large, whichever setting made them so.

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
NEWER = ROWS // 2
"""Number of the level's newest rows that are still part of it after as many further rows."""
MOVED_TIMES = 6.0
"""Number of usual deviations that a movement must exceed."""
MOST_MOVEMENTS = 6
"""Number of movements of one metric that are kept: the newest ones."""


@dataclass(slots=True)
class MovementTracker:
    """Follows one metric row by row and records its movements; its level is updated except during a movement."""

    gauge: MovementGauge
    level: deque[float] = field(default_factory=lambda: deque(maxlen=ROWS))
    last: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NEWEST))
    away: int = 0
    began: KnobChange | None = None
    turns: deque[KnobChange] = field(default_factory=lambda: deque(maxlen=MOST_MOVEMENTS))

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
        limit = max(MOVED_TIMES * usual, self.gauge.least * (abs(middle) if self.gauge.times else 1.0))
        off = [(at, one - middle) for at, one in self.last]
        side = math.copysign(1.0, off[-1][1])
        if side * off[-1][1] > limit and sum(side * by > limit for _, by in off) >= NEWEST - 1:
            off = [place for place in off if side * place[1] > limit]
            self._note(middle, off)
        elif self.away and abs(off[-1][1]) <= limit:
            self.away = 0

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Take several rows: the values at ``steps``, as :meth:`update` would one by one.

        A usual value changes nothing but the level, and most values lie between the extremes of half of the level.
        """
        level, last, low, high, sure = self.level, self.last, math.inf, -math.inf, 0
        for step, value in zip(steps, values, strict=True):
            if sure == 0 and self.began is not None and not self.away and len(level) == ROWS:
                kept = list(islice(level, ROWS - NEWER, None))
                low, high, sure = min(kept), max(kept), NEWER
            if sure and low <= value <= high:
                level.append(last[0][1])
                last.append((step, value))
                sure -= 1
            else:
                self.update(step, value)
                sure = 0 if self.away or len(level) < ROWS else max(sure - 1, 0)

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

    def extend(self, rows: Rows) -> None:
        """Take several rows, in order."""
        for metric, tracker in self._trackers.items():
            tracker.extend(*column(rows, metric))

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
    why = "these grow with an update's size, whatever sets it (rate, updates a batch, clip range, old weights)"
    return KnobChange(UPDATES, UPDATES, first, 0.0, ((first, 1.0),), ChangeSource.INFERRED, text=text, why=why)


def _environment(fall: KnobChange, watched: Sequence[str]) -> KnobChange:
    why = f"nothing that was measured of the policy moved before or with it ({', '.join(watched)})"
    return KnobChange(
        ENVIRONMENT, ENVIRONMENT, fall.step, 0.0, ((fall.step, 1.0),), ChangeSource.INFERRED, text=_ends(fall), why=why
    )


@dataclass(frozen=True, slots=True)
class SteadyMetric:
    """A value that is constant as long as its setting is, so that a change of the value shows a change of the setting.

    Parameters
    ----------
    name, knob
        Name of the value, and of its setting in ``knobs.toml``.
    floor
        Smallest distance from its level that counts, in the unit of the value.
    sides
        Directions that count: 1 for up, -1 for down.
    text
        Message template with the old and the new level.
    first, rows
        Number of first rows that are skipped, and of the rows after them that define the level.
    newest
        Number of newest rows whose median must have left the level.
    alike
        Largest ratio between two of the newest rows; if finite, all of them must have left the level.
    """

    name: str
    knob: str
    floor: float
    sides: tuple[int, ...]
    text: str
    first: int = 5
    rows: int = 35
    newest: int = 5
    alike: float = math.inf


MARKS: tuple[SteadyMetric, ...] = (
    SteadyMetric("lowest advantage", "advantages", 0.6, (-1,), "the lowest advantage went from {0} to {1}"),
    SteadyMetric("highest advantage", "advantages", 0.6, (1,), "the highest advantage went from {0} to {1}"),
    SteadyMetric(
        "spread", "advantages", 0.25, (1,), "the spread of advantages in groups that differ went from {0} to {1}"
    ),
    SteadyMetric("one-sided", "advantages", 0.5, (1,), "advantages of one sign vanished"),
    SteadyMetric("centre", "advantages", 0.15, (-1, 1), "the mean advantage went from {0} to {1}"),
    SteadyMetric("binary", "reward_function", 0.2, (-1, 1), "rewards that were right or wrong took other values"),
    SteadyMetric("lowest reward", "reward_function", 0.1, (-1,), "the lowest reward went from {0} to {1}"),
    SteadyMetric("highest reward", "reward_function", 0.1, (1,), "the highest reward went from {0} to {1}"),
    SteadyMetric(
        "gap", "reward_function", 0.25, (-1, 1), "the reward less the validation score went from {0} to {1}", 0, 3, 2
    ),
    SteadyMetric(
        "gap of data", "data", 0.25, (-1, 1), "the reward less the validation score went from {0} to {1}", 0, 3, 2
    ),
    SteadyMetric(
        "entropy term",
        "entropy_bonus",
        0.02,
        (1,),
        "the loss without its KL term went from {0} to {1} times the entropy, with its sign turned",
        alike=2.2,
    ),
    SteadyMetric("ratio", "update_size", 0.5, (1,), "the farthest log ratio went from {0} to {1}"),
    SteadyMetric("engine", "rollout_engine", 1.0, (1,), "the log of engine-trainer distance went from {0} to {1}"),
)
NO_ENTROPY = 0.05
"""Entropy in nats per token below which an entropy term is too small to be seen."""
BOUND = (-0.02, 1.02)
"""Bounds on the mean reward within which rewards may be 0 or 1."""
EXTREME = 0.02
"""Distance of the mean reward from 0 or 1 below which the spread of rewards is too small to be conclusive."""


def measured(row: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of each value of :data:`MARKS` that can be computed from a row.

    ``row``: canonical metric -> value.
    """
    get = row.get
    low, high = get("adv/min"), get("adv/max")
    if low is not None and high is not None:
        yield "lowest advantage", low
        yield "highest advantage", high
        size = max(-low, high)
        if size > 0.1:
            yield "one-sided", float(low > -0.02 * size or high < 0.02 * size)
    spread, silent = get("adv/std"), get("reward/zero_std_frac")
    if spread is not None and 0 <= (silent or 0.0) < 1:
        yield "spread", spread / math.sqrt(1 - (silent or 0.0))
    centre = get("adv/mean")
    if centre is not None:
        yield "centre", centre
    yield from _rewards(row)
    loss = row["loss/raw"] if "loss/raw" in row else get("loss/policy")
    drift = row["policy/kl_ref_k3"] if "policy/kl_ref_k3" in row else get("policy/kl_ref")
    entropy = get("policy/entropy")
    if loss is not None and entropy is not None and entropy > NO_ENTROPY:
        yield "entropy term", ((get("policy/kl_coef") or 0.0) * (drift or 0.0) - loss) / entropy
    least, most = get("ratio/min"), get("ratio/max")
    if least is not None and most is not None and least > 0 and most > 0:
        yield "ratio", max(math.log(most), -math.log(least))
    distance = get("mismatch/logp_absdiff")
    if distance is not None and distance > 0:
        yield "engine", math.log(distance)


def _rewards(row: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    get = row.get
    mean, spread, least, most = get("reward/mean"), get("reward/std"), get("reward/min"), get("reward/max")
    if least is not None:
        yield "lowest reward", least
    if most is not None:
        yield "highest reward", most
    score = row.get("val/score")
    if mean is not None and score is not None:
        yield "gap", mean - score
        yield "gap of data", mean - score
    if mean is None or spread is None or not math.isfinite(mean):
        return
    if not BOUND[0] <= mean <= BOUND[1]:
        yield "binary", -1.0
    elif EXTREME < mean < 1 - EXTREME:
        yield "binary", spread * spread / (mean * (1 - mean))


TIMES = 8.0
"""Number of usual deviations from the level that make a footprint, if they exceed the floor of the value."""
LARGEST = sys.float_info.max
BACK = 20
"""Number of consecutive rows at the level that end a footprint."""
KEPT = 4
"""Number of footprints of one value that are kept: the newest ones."""
BINARY = 0.06
"""Distance from 1 within which the level shows that rewards are 0 or 1: only then is this value meaningful."""


@dataclass(slots=True)
class Trace:
    """Follows one value row by row and records its footprints: changes that show that its setting changed."""

    mark: SteadyMetric
    seen: int = 0
    base: list[float] = field(default_factory=list)
    level: float = math.nan
    limit: float = math.inf
    reach: tuple[float, float] = (0.0, 0.0)
    last: deque[tuple[int, float]] = field(default_factory=deque)
    away: int = 0
    quiet: int = 0
    leaving: tuple[int, int] | None = None
    on_level: int = 0
    turns: deque[KnobChange] = field(default_factory=lambda: deque(maxlen=KEPT))

    def update(self, step: int, value: float) -> None:
        """Take the value of the metric at ``step``."""
        self.seen += 1
        if self.seen <= self.mark.first or not math.isfinite(value):
            return
        if len(self.base) < self.mark.rows:
            self.base.append(value)
            if len(self.base) == self.mark.rows:
                self._begin()
            return
        newest = self.mark.newest
        self._leave(step, value - self.level)
        self.last.append((step, value))
        self.away += abs(value - self.level) > self.limit
        if len(self.last) > newest:
            self.away -= abs(self.last.popleft()[1] - self.level) > self.limit
        if len(self.last) < newest:
            return
        if self.away < newest - newest // 2 and not (self.turns and self.turns[-1].until is None):
            self.quiet += 1  # the median of these rows is at the level, so no footprint lasts
            return
        self._judge(step, sorted(v for _, v in self.last)[newest // 2])

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Take several rows: the values at ``steps``, as :meth:`update` would one by one."""
        level, half, newest = self.level, min(self.limit / 2.0, LARGEST), self.mark.newest
        begun = len(self.last) == newest and not self.away and not (self.turns and self.turns[-1].until is None)
        # Values within half of the limit change nothing but counts; those that are not finite are not within it.
        if not begun or not all(abs(value - level) <= half for value in values):
            for row in zip(steps, values, strict=True):
                self.update(*row)
            return
        rows = len(steps)
        self.seen += rows
        self.quiet += rows
        self.on_level += rows
        if self.on_level > 1:
            self.leaving = None
        self.last.extend(zip(steps[-newest:], values[-newest:], strict=True))
        while len(self.last) > newest:
            self.last.popleft()

    def _begin(self) -> None:
        self.level = _median(self.base)
        usual = 1.4826 * _median([abs(value - self.level) for value in self.base])
        self.limit = max(TIMES * usual, self.mark.floor)
        self.reach = (min(self.base), max(self.base))
        if self.mark.name == "binary" and abs(self.level - 1) > BINARY:
            self.limit = math.inf

    def _judge(self, step: int, middle: float) -> None:
        off = middle - self.level
        left = abs(off) > self.limit and not self.reach[0] <= middle <= self.reach[1]
        counts = left and (1 if off > 0 else -1) in self.mark.sides and self._alike()
        newest = self.turns[-1] if self.turns else None
        lasting = newest is not None and newest.until is None
        self.quiet = 0 if counts else self.quiet + 1
        if counts and not lasting:
            text = self.mark.text.format(number(self.level, 3), number(middle, 3))
            first = step if self.leaving is None else self.leaving[0]
            path = ((first, abs(off) / self.limit),)
            self.turns.append(
                KnobChange(
                    self.mark.knob, self.mark.name, first, self.level, path, source=ChangeSource.INFERRED, text=text
                )
            )
        elif newest is not None and lasting and self.quiet >= BACK:
            self.turns[-1] = replace(newest, until=step)

    def _alike(self) -> bool:
        """Return whether the newest rows show a single value."""
        if self.mark.alike == math.inf:
            return True
        sizes = sorted(value for _, value in self.last)
        return sizes[0] > 0 and sizes[-1] <= self.mark.alike * sizes[0]

    def _leave(self, step: int, off: float) -> None:
        """Store since when the value has been off its level, and in which direction; one row at the
        level is forgiven.
        """
        side = (off > 0) - (off < 0) if abs(off) > self.limit / 2 else 0
        self.on_level = 0 if side else self.on_level + 1
        if side and (self.leaving is None or self.leaving[1] != side):
            self.leaving = (step, side)
        elif self.on_level > 1:
            self.leaving = None


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


class Footprints:
    """Follows all values of :data:`MARKS` of a run row by row, and collects changes of settings that
    were not logged.
    """

    def __init__(self) -> None:
        self._traces = {mark.name: Trace(mark) for mark in MARKS}

    def extend(self, rows: Rows) -> None:
        """Take several rows, in order."""
        found: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in self._traces}
        for step, metrics in rows:
            for name, value in measured(metrics):
                steps, values = found[name]
                steps.append(step)
                values.append(value)
        for name, (steps, values) in found.items():
            if steps:
                self._traces[name].extend(steps, values)

    @property
    def turns(self) -> tuple[KnobChange, ...]:
        """Changes of settings inferred so far, in order of step.

        A gap between reward and validation score counts only for rewards of 0 and 1, as only those compare with scores.
        """
        scaled = math.isfinite(self._traces["binary"].limit)
        kept = [trace for name, trace in self._traces.items() if scaled or not name.startswith("gap")]
        found = [turn for trace in kept for turn in trace.turns]
        return tuple(sorted(found, key=lambda turn: (turn.step, turn.knob, turn.name)))


AT_ONCE = 64
"""Number of rows that a :class:`KnobTracker` reads together."""


class KnobTracker:
    """Follows the rows of a run and collects everything they show about its settings.

    These are logged changes, changes inferred from other metrics, movements of metrics, and the cause of a mismatch
    between trainer and rollout engine. ``first_step``: step of the first row, or None. Rows are read many at a time:
    hardly any of them is followed by a question.
    """

    def __init__(self) -> None:
        self._knobs = Knobs()
        self._footprints = Footprints()
        self._movements = Movements()
        self._gap = GapTracker()
        self._unread: list[tuple[int, Mapping[str, float]]] = []
        self.first_step: int | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the row of ``step`` (canonical metric -> value), which is not changed later; the metrics in
        :data:`TRACKED` are used.
        """
        self.first_step = step if self.first_step is None else self.first_step
        self._unread.append((step, metrics))
        if len(self._unread) >= AT_ONCE:
            self._read()

    def _read(self) -> None:
        rows, self._unread = self._unread, []
        if not rows:
            return
        self._knobs.extend(rows)
        self._movements.extend(rows)
        self._footprints.extend(rows)
        for row in rows:
            self._gap.update(*row)

    def follow_gap(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a row after the last finding, in which only the gap between trainer and rollout engine still matters."""
        self._read()
        self._gap.update(step, metrics)

    @property
    def turns(self) -> tuple[KnobChange, ...]:
        """Changed settings, movements of metrics and causes of a mismatch so far, in order of step."""
        self._read()
        found = (*self._knobs.turns, *self._footprints.turns, *self._movements.turns, *self._gap.turns)
        return tuple(sorted(found, key=lambda turn: (turn.step, turn.knob)))


TRACKED = frozenset(
    {
        "adv/min", "adv/max", "adv/std", "adv/mean", "reward/zero_std_frac", "reward/mean", "reward/std", "reward/min",
        "reward/max", "val/score", "loss/raw", "loss/policy", "policy/kl_ref", "policy/kl_ref_k3", "ratio/min",
        "ratio/max", "policy/entropy",
        *MEASURED,
        *GAP_METRICS,
        *(metric for knob in catalogue.knobs().values() for metric in knob.metrics),
    }
)  # fmt: skip
"""Canonical metrics that a :class:`KnobTracker` reads."""
