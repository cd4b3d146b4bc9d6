"""Training examples for a forecaster, one for each row of labelled runs: features, steps to the failure, and folds."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.features import FEATURES, FeatureStream, nearest
from rlwatch.forecast.labels import Label, Labels
from rlwatch.forecast.model import signal_of
from rlwatch.forecast.signals import SIGNALS, SPREAD_METRICS, WARM_UNTIL, ChangeScale, Signal
from rlwatch.forecast.tables import HEALTHY, Ints, RunTable

Floats = npt.NDArray[np.float64]
Row = tuple[int, Mapping[str, float]]


@dataclass(frozen=True)
class Examples:
    """Training examples for a forecaster, one for each logged row of many runs.

    ``x``: features (n, features), float32, NaN where not measured; ``run``: index of the run in its table; ``step``: of
    the row; ``ahead``: steps to the onset of the run's failure (inf for a run without one, <= 0 from the onset on);
    ``left``: steps to the end of the run; ``static``: share of the way to the nearest limit; ``kind``: type of the
    onset, or "".
    """

    x: npt.NDArray[np.float32]
    run: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    ahead: Floats
    left: Floats
    static: Floats
    kind: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.step)

    def only(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Examples:
        """Return the examples selected by ``rows``, a mask or indices."""
        columns = ("x", "run", "step", "ahead", "left", "static", "kind")
        return Examples(**{name: getattr(self, name)[rows] for name in columns})

    def at_risk(self) -> Examples:
        """Return the examples before the onset of their run's failure, and all of runs without one."""
        return self.only(self.ahead > 0)

    def moved(self, places: Sequence[int]) -> Examples:
        """Return the examples with run index ``i`` replaced by ``places[i]``, the index of the run in
        a larger table.
        """
        return replace(self, run=np.asarray(places, dtype=np.int64)[self.run])

    def without(self, signals: Iterable[str]) -> Examples:
        """Return a copy of the examples in which the features of ``signals`` are NaN, as if the runs did not log these
        signals.
        """
        lost = set(signals)
        x = self.x.copy()
        x[:, [signal_of(feature) in lost for feature in FEATURES]] = math.nan
        return replace(self, x=x)


def joined(parts: Sequence[Examples]) -> Examples:
    """Concatenate several sets of examples into one."""
    columns = ("x", "run", "step", "ahead", "left", "static", "kind")
    return Examples(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns})


@dataclass(frozen=True, slots=True)
class LogCadence:
    """Cadence of a trainer's log: one row every ``every`` steps, with their mean or (``last``) with the values of the
    last step.
    """

    every: int = 1
    last: bool = False

    def of(self, rows: list[Row]) -> list[Row]:
        """Return ``rows``, which have every step of a run, thinned to the rows that a log of this cadence has."""
        if self.every == 1:
            return rows
        means, whole = coarse(rows, self.every), dict(rows)
        return [(step, whole[step]) for step, _ in means] if self.last else means


EVERY_STEP = LogCadence()


def examples(
    table: RunTable,
    labels: Labels,
    *,
    log: LogCadence = EVERY_STEP,
    noise: int | None = None,
    hard: bool = False,
    jobs: int = 1,
    done: Callable[[], None] | None = None,
) -> Examples:
    """Return the training examples of every run of a table, computed by the code that also runs live.

    Parameters
    ----------
    table, labels
        The runs, and the step at which each of them failed.
    log
        Cadence to thin the rows to first.
    noise
        Seed of noise to add, as if each step had been a small batch; None adds none.
    hard
        With ``noise``: also simulate data that are harder at times.
    jobs
        Number of processes.
    done
        Called after each run, for a progress bar.

    Raises
    ------
    ConfigError
        If a run of the table has no label.
    """
    from joblib import Parallel, delayed

    known = labels.of(table)
    seeds = [None if noise is None else noise + i for i in range(len(table.runs))]
    work = (
        delayed(_of_run)(i, list(table.stream(i)), known[i], log, _made(seed, hard)) for i, seed in enumerate(seeds)
    )
    parts = []
    for part in Parallel(n_jobs=jobs, return_as="generator")(work):
        parts.append(part)
        if done is not None:
            done()
    return joined(parts)


def _made(seed: int | None, hard: bool) -> Callable[[list[Row]], list[Row]]:
    """Return the way rows of a run are changed before they are logged."""
    if seed is None:
        return list
    return partial(_in_small_batches, seed=seed, hard=hard)


def _in_small_batches(rows: list[Row], seed: int, hard: bool) -> list[Row]:
    return noisy(hard_at_times(rows, seed) if hard else rows, seed)


def _of_run(
    place: int, rows: list[Row], label: Label, log: LogCadence, made: Callable[[list[Row]], list[Row]]
) -> Examples:
    rows = log.of(made(rows))
    features = FeatureStream().extend([step for step, _ in rows], [metrics for _, metrics in rows])
    found = []
    for (step, _), each in zip(rows, features, strict=True):
        if each is not None and step >= rows[0][0] + WARM_UNTIL:
            close = nearest(each.reaches)
            found.append((step, each.values.astype(np.float32), close.share if close else 0.0))
    steps = np.array([step for step, _, _ in found], dtype=np.int64)
    onset = math.inf if label.onset is None else float(label.onset)
    return Examples(
        x=np.array([values for _, values, _ in found], dtype=np.float32).reshape(len(found), len(FEATURES)),
        run=np.full(len(found), place, dtype=np.int64),
        step=steps,
        ahead=np.asarray(onset - steps, dtype=float),
        left=rows[-1][0] - steps.astype(float) if rows else np.zeros(0),
        static=np.array([share for _, _, share in found], dtype=float),
        kind=np.full(len(found), label.type, dtype="U8"),
    )


def coarse(rows: Sequence[Row], every: int) -> list[Row]:
    """Return the means of ``rows`` over each ``every`` steps, like a coarser log; NaN if one of the averaged values is
    NaN.
    """
    found: list[Row] = []
    for _, group in groupby(rows, key=lambda row: row[0] // every):
        part = list(group)
        names = dict.fromkeys(name for _, metrics in part for name in metrics)
        means = {name: _mean([metrics[name] for _, metrics in part if name in metrics]) for name in names}
        found.append((part[-1][0], means))
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# The same run as a trainer with a small batch would have logged it.
#
# Many runs put eight responses into a step: their rewards jump, their KL and gradient norms scatter over a factor of
# ten, and nothing is wrong. A model that has only seen quiet logs takes that for trouble.

LEAST, MOST = 4, 32
"""Fewest and most responses in a simulated small batch."""
SCATTER = 1.2
"""Standard deviation of the logarithm of one response's KL, gradient norm and other positive metrics."""
TAIL = 4.0
"""Degrees of freedom of the simulated noise, few enough that some rows lie far off."""
SWAY, APART = 0.5, 60
"""Standard deviation of the logarithm of the noise's size, which varies over the run, and the rows over which it
varies.
"""
FULL = 48
"""Responses in a step of the runs that noise is added to."""
_BY_METRIC: dict[str, Signal] = {name: signal for signal in SIGNALS for name in signal.metrics}


def noisy(rows: Iterable[Row], seed: int) -> list[Row]:
    """Add the noise of a batch of 4 to 32 responses to ``rows``; NaN and infinities are kept.

    Means scatter as those of so few responses do, beyond their present scatter; lengths and entropies, which responses
    share, by a quarter of that. The size of the noise varies over the run, since a task that is learnt, or prompts that
    get harder, change the spread of responses.
    """
    draw = np.random.default_rng(seed)
    count = int(np.exp(draw.uniform(math.log(LEAST), math.log(MOST))))
    size = math.sqrt(max(1.0 / count - 1.0 / FULL, 0.0))
    rows = list(rows)
    sizes = size * np.exp(SWAY * _course(len(rows), draw))
    return [(step, _Batch(metrics, by, draw).noisy(metrics)) for (step, metrics), by in zip(rows, sizes, strict=True)]


def _course(rows: int, draw: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return a smooth random series of spread 1, (rows,): normal draws every :data:`APART` rows, interpolated."""
    knots = draw.standard_normal(rows // APART + 2)
    return np.interp(np.arange(rows) / APART, np.arange(len(knots)), knots)


class _Batch:
    """The noise of one step: rewards of the same responses scatter together."""

    def __init__(self, metrics: Mapping[str, float], size: float, draw: np.random.Generator) -> None:
        spread = next((metrics[name] for name in SPREAD_METRICS if name in metrics), 0.0)
        self._size = size
        self._reward = size * (spread if math.isfinite(spread) else 0.0) * float(draw.standard_normal())
        self._draw = draw

    def noisy(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return all values with the noise of that batch."""
        return {name: self._value(_BY_METRIC.get(name), value) for name, value in metrics.items()}

    def _value(self, signal: Signal | None, value: float) -> float:
        if signal is None or not math.isfinite(value):
            return value
        odd = self._size * float(self._draw.standard_t(TAIL))
        if signal.scale is ChangeScale.SPREAD:
            return value + self._reward
        if signal.scale is ChangeScale.SHARE:
            return min(max(value + odd * math.sqrt(max(value * (1.0 - value), 0.01)), 0.0), 1.0)
        if signal.scale is ChangeScale.NATS:
            return value + odd * signal.floor
        calm = 0.25 if signal.name.startswith(("length", "entropy", "reward_std")) else 1.0
        scattered = (1.0 - value if signal.complement else value) * math.exp(calm * SCATTER * odd)
        return 1.0 - min(scattered, 1.0) if signal.complement else scattered


# The same run on data that are harder at times.
#
# Of few prompts a step some are hard, and the next ones alike: rewards fall, answers grow longer and less certain, more
# of them are cut off, and engine and trainer agree less about them, all in the same rows. In large batches only
# failures do that, so a model that has seen no other takes hard data for one.

MEMORIES, HARDNESS = (1.0, 3.0, 10.0), (0.3, 0.6, 1.2)
"""Rows over which simulated hardness of the data persists, and its effect on the mean reward in spreads of the
rewards; one of each is drawn for a run.
"""
ODDLY_HARD = 4.0
"""Degrees of freedom of the simulated hardness, few enough that some data are far harder than most."""
MOVED, MOST_MOVED = 0.35, 2.0
"""Most that one spread of hardness changes the logarithm of a positive metric, and the largest such change allowed."""
_WITH_HARDNESS: dict[str, float] = {
    **dict.fromkeys(("entropy", "entropy_pos", "entropy_neg", "entropy_p10", "entropy_p90", "length", "cut_off"), 1.0),
    **dict.fromkeys(("mismatch_gap", "mismatch_tail", "kl_old"), 1.0),
    **dict.fromkeys(("mismatch", "mismatch_weights"), 2.0),
    **dict.fromkeys(("kl_ref", "kl_ref_tail", "grad"), 0.5),
    "negative_push": -0.3,
    **dict.fromkeys(("logp", "logp_positive", "logp_min"), -1.0),
}
"""Signal -> largest effect of harder data, relative to the others; the effect itself is drawn for each run."""


def hard_at_times(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return ``rows`` changed as if the data were harder or easier at times; NaN and infinities are kept."""
    draw = np.random.default_rng(seed + 777_777)  # other draws than those of the noise
    keep, size = 1.0 - 1.0 / float(draw.choice(MEMORIES)), float(draw.choice(HARDNESS))
    with_it = {name: most * float(draw.uniform()) for name, most in _WITH_HARDNESS.items()}
    found, hard = list[Row](), 0.0
    for (step, metrics), odd in zip(rows, draw.standard_t(ODDLY_HARD, len(rows)) / math.sqrt(2.0), strict=True):
        hard = keep * hard + math.sqrt(1.0 - keep * keep) * float(odd)
        spread = next((metrics[name] for name in SPREAD_METRICS if name in metrics), 0.0)
        reward = size * hard * (spread if math.isfinite(spread) else 0.0)
        moved = {
            name: _harder(signal, metrics[name], size * hard * with_it.get(signal.name, 0.0), reward)
            for name, signal in _BY_METRIC.items()
            if math.isfinite(metrics.get(name, math.nan))
        }
        found.append((step, {**metrics, **moved}))
    return found


def _harder(signal: Signal, value: float, by: float, reward: float) -> float:
    if signal.scale is ChangeScale.SPREAD:
        return value - reward
    if by == 0.0:
        return value
    if signal.scale is ChangeScale.NATS:
        return value + signal.floor * by
    if signal.scale is ChangeScale.SHARE:
        share = min(max(value, 0.005), 0.995)
        return 1.0 / (1.0 + math.exp(-min(max(math.log(share / (1.0 - share)) + by, -30.0), 30.0)))
    factor = math.exp(min(max(MOVED * by, -MOST_MOVED), MOST_MOVED))
    return 1.0 - min((1.0 - value) * factor, 1.0) if signal.complement else value * factor


# Which runs are judged together: what a fold's tool was fitted to is never in it.


class Split(StrEnum):
    """Ways to divide runs into folds: ``RUN`` run by run, ``RECIPE`` and ``FAMILY`` keeping each of these whole,
    ``NONE``.
    """

    RUN = "run"
    RECIPE = "recipe"
    FAMILY = "family"
    NONE = "none"


def folds_of(table: RunTable, split: Split | str = Split.RUN, count: int = 5) -> Ints:
    """Return the cross-validation fold of each run (0 to ``count`` - 1); all 0 with ``Split.NONE``.

    A run and its faultless twin share a fold. The folds depend only on names, so other tools that train on these runs
    get equal ones. Healthy runs are assigned one by one even if ``split`` keeps recipes whole. Each recipe, or each
    size of group, is spread evenly.
    """
    split = Split(split)
    if split is Split.NONE or count < 2:
        return np.zeros(len(table.runs), dtype=np.int64)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in range(len(table.runs)):
        groups[_group(table, table.place.get(table.pairs[i], i), split)].append(i)
    sizes = np.zeros(count)
    kinds: dict[tuple[str, int], int] = defaultdict(int)
    folds = np.zeros(len(table.runs), dtype=np.int64)
    for (kind, name), runs in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0][0], _draw(item[0][1]))):
        del name
        dealt = np.array([kinds[kind, fold] for fold in range(count)])
        fold = int(np.lexsort((np.arange(count), sizes, dealt))[0])
        folds[runs] = fold
        sizes[fold] += len(runs)
        kinds[kind, fold] += 1
    return folds


def _group(table: RunTable, i: int, split: Split) -> tuple[str, str]:
    """Return (stratum, group) of run ``i``: strata are spread evenly over the folds, groups stay whole."""
    held = {Split.RECIPE: table.recipes, Split.FAMILY: table.families}.get(split)
    if held is None or table.families[i] == HEALTHY or not held[i]:
        return table.recipes[i], table.runs[i]
    return "", held[i]


def _draw(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
