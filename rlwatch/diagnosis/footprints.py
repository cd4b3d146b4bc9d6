"""Footprints of settings that were not logged: values that only one setting can move, and that moved.

Advantages are centred and have the same scale for any policy. A reward of right or wrong has the spread that follows
from its mean. The loss of an update on its own samples consists of the KL and entropy terms; without the KL term, only
an entropy term keeps it at a fixed multiple of the entropy, row after row. Each such value is compared with the run's
first rows. A median of five rows outside their range is a footprint. It shows which setting changed, not who changed
it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rlwatch import catalogue
from rlwatch.diagnosis.mismatch_causes import GAP_METRICS, GapTracker
from rlwatch.diagnosis.movements import MEASURED, Movements
from rlwatch.diagnosis.turns import ChangeSource, KnobChange, Knobs
from rlwatch.wording import number


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

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the row of ``step`` (canonical metric -> value)."""
        for name, value in measured(metrics):
            self._traces[name].update(step, value)

    @property
    def turns(self) -> tuple[KnobChange, ...]:
        """Changes of settings inferred so far, in order of step.

        A gap between reward and validation score counts only for rewards of 0 and 1, as only those compare with scores.
        """
        scaled = math.isfinite(self._traces["binary"].limit)
        kept = [trace for name, trace in self._traces.items() if scaled or not name.startswith("gap")]
        found = [turn for trace in kept for turn in trace.turns]
        return tuple(sorted(found, key=lambda turn: (turn.step, turn.knob, turn.name)))


class KnobTracker:
    """Follows the rows of a run and collects everything they show about its settings.

    These are logged changes, changes inferred from other metrics, movements of metrics, and the cause of a mismatch
    between trainer and rollout engine. ``first_step``: step of the first row, or None.
    """

    def __init__(self) -> None:
        self._knobs = Knobs()
        self._footprints = Footprints()
        self._movements = Movements()
        self._gap = GapTracker()
        self.first_step: int | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the row of ``step`` (canonical metric -> value); the metrics in :data:`TRACKED` are used."""
        self.first_step = step if self.first_step is None else self.first_step
        self._knobs.update(step, metrics)
        self._movements.update(step, metrics)
        self._footprints.update(step, metrics)
        self._gap.update(step, metrics)

    def follow_gap(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a row after the last finding, in which only the gap between trainer and rollout engine still matters."""
        self._gap.update(step, metrics)

    @property
    def turns(self) -> tuple[KnobChange, ...]:
        """Changed settings, movements of metrics and causes of a mismatch so far, in order of step."""
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
