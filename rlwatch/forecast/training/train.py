"""From labelled runs to a model: grow, calibrate and choose thresholds on runs not seen, grow again on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rlwatch.errors import ConfigError
from rlwatch.forecast.evaluation.folds import Split, folds_of
from rlwatch.forecast.evaluation.labels import Label, Labels, Outcome
from rlwatch.forecast.evaluation.run_table import RunTable
from rlwatch.forecast.features import FEATURES
from rlwatch.forecast.forecast import HORIZONS
from rlwatch.forecast.model import Model, Profile, signal_of
from rlwatch.forecast.training import blend, thresholds
from rlwatch.forecast.training.blend import Blend
from rlwatch.forecast.training.calibration import line
from rlwatch.forecast.training.examples import Examples, Floats, examples, joined
from rlwatch.forecast.training.grow import Growth, gains, head_of, intervals
from rlwatch.forecast.training.profiles import EVERYTHING, PROFILES
from rlwatch.forecast.trees import LEAF, Head
from rlwatch.records import JSON

LEAST_RUNS = 40
"""Runs below which there is nothing to learn and to hold out at once."""
LEAST_FAILURES = 10
FOLDS = 5
NOISE_SEED = 1000
NEAR_ROWS, FAR_ROWS = 3, 12
"""One row in so many is learnt from, near an onset and far from one: its neighbours say the same."""
DROPOUTS, DROPPED = 8, 0.35
"""Random sets of signals that copies of runs lack, and the chance of each signal to be in one."""
Tell = Callable[[str], None]
"""Told what is being done, for a progress display."""


class Learnt(Protocol):
    """What was fitted to examples."""

    def logits(self, x: npt.NDArray[np.float32]) -> Floats:
        """Uncalibrated log-odds of each interval between the horizons, (n, 3)."""
        ...


class Learn(Protocol):
    """What fits: :func:`blend.learn`, or one of its halves."""

    def __call__(self, part: Examples, how: Growth, /) -> Learnt:
        """Fit to examples."""
        ...


@dataclass(frozen=True)
class Trained:
    """The model, its examples, and the p50 of each by a model that had not seen its run."""

    model: Model
    examples: Examples
    p50: Floats


@dataclass(frozen=True)
class Prepared:
    """Examples of runs as they are (``fine``), as small batches would have logged them, and as coarse logs."""

    fine: Examples
    noisy: Examples
    coarse: Examples

    @property
    def scored(self) -> Examples:
        """What thresholds are chosen on: the runs as they are first, then those of small batches."""
        return joined([self.fine, self.noisy])


def prepare(table: RunTable, labels: Labels, *, jobs: int = 1, tell: Tell | None = None) -> Prepared:
    """Examples of all runs, of half of them as of small batches, and of two thirds as logs of every 5 or 10 steps."""
    tell = tell or _silent
    tell("features")
    fine = examples(table, labels, jobs=jobs)
    tell("features of small batches")
    half = list(range(0, len(table.runs), 2))
    noisy = examples(table.only(half), labels, noise=NOISE_SEED, jobs=jobs).moved(half)
    tell("features of coarse logs")
    parts = []
    for every, start in ((5, 0), (10, 1)):
        places = list(range(start, len(table.runs), 3))
        parts.append(examples(table.only(places), labels, every=every, jobs=jobs).moved(places))
    return Prepared(fine, noisy, joined(parts))


def train(
    table: RunTable,
    labels: Labels,
    *,
    how: Growth | None = None,
    folds: int = FOLDS,
    jobs: int = 1,
    tell: Tell | None = None,
    meta: dict[str, JSON] | None = None,
) -> Trained:
    """Train a model.

    Raises
    ------
    ConfigError
        If there are fewer than 40 runs, or 10 that failed late enough to be forecast, or 10 that did not.
    """
    how, tell = how or Growth(), tell or _silent
    known = labels.of(table)
    _enough(known)
    parts = prepare(table, labels, jobs=jobs, tell=tell)
    scored = parts.scored
    held = out_of_fold(scored, parts.coarse, folds_of(table, Split.RUN, folds), how, jobs=jobs, tell=tell)
    lines = [line(held["taps"][rows, i], hit) for i, (rows, hit) in enumerate(intervals(scored))]
    harmless = np.flatnonzero(thresholds.healthy(scored, thresholds.sound_until(table, labels)))
    profiles = tuple(_profile(name, scored, held[name], lines, harmless) for name in PROFILES)
    tell("the model itself")
    learnt = blend.learn(mixed(scored, parts.coarse, how.seed), how, kinds=True)
    p50 = chances(held["taps"], lines)[: len(parts.fine), 1]
    return Trained(_model(learnt, lines, profiles, meta or {}), parts.fine, p50)


def out_of_fold(
    fine: Examples,
    coarse: Examples,
    fold: npt.NDArray[np.int64],
    how: Growth,
    *,
    profiles: Sequence[str] = tuple(PROFILES),
    learn: Learn = blend.learn,
    jobs: int = 1,
    tell: Tell | None = None,
) -> dict[str, Floats]:
    """Log-odds of all rows of ``fine``, each by a model that saw no run of its fold, by profile.

    ``fold``: of each run of the table; runs of one fold are held out together. ``learn``: what is fitted;
    ``jobs``: processes.
    """
    from joblib import Parallel, delayed

    held = {name: np.full((len(fine), len(HORIZONS)), math.nan) for name in profiles}
    numbers = np.unique(fold)
    rows = [np.flatnonzero(fold[fine.run] == number) for number in numbers]
    others = (_but(fine, coarse, fold, number, how.seed) for number in numbers)
    work = (
        delayed(_learnt)(part, fine.only(mine), how, profiles, learn) for part, mine in zip(others, rows, strict=True)
    )
    for mine, found in zip(rows, Parallel(n_jobs=jobs, return_as="generator")(work), strict=True):
        (tell or _silent)(f"one of {len(numbers)} folds is done")
        for name in profiles:
            held[name][mine] = found[name]
    return held


def _but(fine: Examples, coarse: Examples, fold: npt.NDArray[np.int64], number: int, seed: int) -> Examples:
    """What is learnt from when one fold is held out."""
    return mixed(fine.only(fold[fine.run] != number), coarse.only(fold[coarse.run] != number), seed)


def _learnt(others: Examples, mine: Examples, how: Growth, profiles: Sequence[str], learn: Learn) -> dict[str, Floats]:
    """Log-odds of the rows ``mine`` by what ``others`` teach, by profile."""
    learnt = learn(others, how)
    return {name: learnt.logits(mine.without(EVERYTHING - PROFILES[name]).x) for name in profiles}


def mixed(fine: Examples, coarse: Examples, seed: int) -> Examples:
    """What a model learns from: rows thinned far from an onset, and copies that lack what poorer logs lack.

    Each run has one such copy: of a log that some trainer writes, or one without a random third of the signals. A
    signal is missing in a whole run far more often than because something broke, so that must teach nothing.
    """
    draw = np.random.default_rng(seed)
    thin = fine.only(
        (fine.ahead <= HORIZONS[-1]) & (fine.step % NEAR_ROWS == 0) | (fine.step % FAR_ROWS == 0)
    ).at_risk()
    known = [EVERYTHING - kept for kept in list(PROFILES.values())[1:]]
    signals = sorted(EVERYTHING)
    lost = [*known, *(frozenset(s for s in signals if draw.random() < DROPPED) for _ in range(DROPOUTS))]
    which = draw.integers(len(lost), size=int(fine.run.max(initial=0)) + 1)
    copies = [thin.only(which[thin.run] == i).without(gone) for i, gone in enumerate(lost)]
    return joined([thin, coarse.at_risk(), *copies])


def chances(logits: Floats, lines: Sequence[tuple[float, float]]) -> Floats:
    """Chances of an onset within each horizon, (n, 3), from the log-odds of the intervals."""
    alive = np.ones(len(logits))
    columns = []
    for i, (slope, offset) in enumerate(lines):
        alive = alive / (1.0 + np.exp(np.clip(slope * logits[:, i] + offset, -30.0, 30.0)))
        columns.append(1.0 - alive)
    return np.stack(columns, axis=1)


def _profile(
    name: str, fine: Examples, logits: Floats, lines: Sequence[tuple[float, float]], rows: npt.NDArray[np.int64]
) -> Profile:
    """Thresholds of one profile; ``rows``: those in which any alarm is false."""
    part = fine.only(rows)
    p50 = thresholds.smoothed(chances(logits, lines)[:, 1], fine.run)[rows]
    static = thresholds.smoothed(fine.static, fine.run)[rows]
    budgets = [f"{budget:g}" for budget in thresholds.BUDGETS]
    both = dict(zip(budgets, thresholds.jointly(part, p50, static), strict=True))
    return Profile(
        name=name,
        signals=PROFILES[name],
        thresholds={budget: max(model, 1e-6) for budget, (model, _) in both.items()},
        static={budget: max(limit, 1e-6) for budget, (_, limit) in both.items()},
    )


def _model(
    learnt: Blend, lines: Sequence[tuple[float, float]], profiles: tuple[Profile, ...], meta: dict[str, JSON]
) -> Model:
    grown = learnt.grown
    first, second, third = (learnt.head(i, *ab) for i, ab in enumerate(lines))
    kinds = {kind: head_of(head) for kind, head in grown.kinds.items()}
    used = sorted({f for head in (first, second, third, *kinds.values()) for f in _asked(head)})
    place = {feature: i for i, feature in enumerate(used)}
    gained: dict[str, float] = {}
    for feature, gain in gains(grown).items():
        gained[signal_of(feature)] = gained.get(signal_of(feature), 0.0) + gain
    return Model(
        features=tuple(FEATURES[feature] for feature in used),
        hazards=(_renumbered(first, place), _renumbered(second, place), _renumbered(third, place)),
        limits={kind: _renumbered(head, place) for kind, head in kinds.items()},
        gains={signal: round(gain, 6) for signal, gain in gained.items() if gain > 0.0 and signal in EVERYTHING},
        profiles=profiles,
        meta=meta,
    )


def _asked(head: Head) -> set[int]:
    """Features that a head reads."""
    return {f for tree in head.trees for f in tree.feature if f != LEAF} | set(head.line.feature)


def _renumbered(head: Head, place: dict[int, int]) -> Head:
    trees = tuple(tree.asking(place) for tree in head.trees)
    line = replace(head.line, feature=tuple(place[f] for f in head.line.feature))
    return replace(head, trees=trees, line=line)


def _enough(known: Sequence[Label]) -> None:
    failed = sum(label.outcome is Outcome.EVENT for label in known)
    sound = sum(label.outcome is Outcome.CLEAN for label in known)
    if len(known) < LEAST_RUNS or min(failed, sound) < LEAST_FAILURES:
        raise ConfigError(
            f"a forecaster needs at least {LEAST_RUNS} runs, {LEAST_FAILURES} of them failed after step 55 and "
            f"{LEAST_FAILURES} sound; these are {len(known)} with {failed} and {sound}: add runs"
        )


def _silent(_: str) -> None:
    """Nobody listens."""
