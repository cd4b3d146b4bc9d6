"""Training of a forecasting model from labelled runs: fit, calibrate, choose thresholds on unseen runs, fit again on
all.

The model is the mean of the log-odds of trees and of a linear model. Trees find interactions of signals, the linear
model what holds everywhere; on recipes neither has seen, their errors differ. Needs the extra ``forecast``
(scikit-learn, joblib).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlwatch.errors import ConfigError
from rlwatch.forecast import thresholds
from rlwatch.forecast.examples import Examples, Floats, LogCadence, Split, examples, folds_of, joined
from rlwatch.forecast.features import FEATURES
from rlwatch.forecast.forecast import HORIZONS
from rlwatch.forecast.labels import Label, Labels, RunOutcome
from rlwatch.forecast.model import FAR, LEAF, Head, LinearScore, Model, Profile, Tree, signal_of
from rlwatch.forecast.signals import SIGNALS
from rlwatch.forecast.tables import RunTable
from rlwatch.records import JSON

# What runs log: the sets of signals that a model must get by with, each with thresholds of its own.

EVERYTHING = frozenset(signal.name for signal in SIGNALS)
ENGINE = frozenset(name for name in EVERYTHING if name.startswith("mismatch"))
"""Signals that need the log-probs of the rollout engine."""
PLAIN = frozenset({"reward", "entropy", "grad", "kl_ref", "clip_high", "length", "cut_off"})
"""Signals that nearly every trainer's own log has."""
TRL_LOG = PLAIN | {"reward_std", "zero_std", "clip_low"}
"""Signals that TRL logs without rlwatch's taps (hooks in the trainer)."""
VERL_LOG = PLAIN | {"kl_old", "mismatch", "mismatch_gap", "mismatch_prob", "mismatch_weights"}
"""Signals that verl logs with its rollout correction on."""
PROFILES: dict[str, frozenset[str]] = {
    "taps": EVERYTHING,
    "taps without engine": EVERYTHING - ENGINE,
    "TRL's log": TRL_LOG,
    "verl's log": VERL_LOG,
    "plain log": PLAIN,
}
"""Most signals that runs of each named kind log; the richest kind first."""


# Growing heads with scikit-learn, and reading them out of it.

BEYOND = 1e300
"""Number larger than any feature that JSON can still represent."""
LEAST_EVENTS = 8
"""Fewest runs with an onset of one type for which that type gets a head of its own."""


WORSE_WHEN_HIGH = frozenset(
    {
        *("mismatch", "mismatch_gap", "mismatch_tail", "mismatch_prob", "mismatch_weights", "mismatch_sequences"),
        *(
            "mismatch_cut",
            "kl_ref",
            "kl_ref_tail",
            "kl_old",
            "ratio_spread",
            "ratio_max",
            "cut_off",
            "repetition",
            "grad",
        ),
    }
)
"""Signals whose increase is never good."""
RISING = frozenset(
    feature
    for feature in FEATURES
    if (feature.startswith("limit:") and feature.endswith(":share"))
    or (
        feature.split(":")[0] in WORSE_WHEN_HIGH
        and feature.split(":")[-1] in {"low", "high", "z", "slope25", "slope60"}
    )
)
"""Features that a cautious model may only take as a sign of a failure: progress to a limit, and rises
of those signals.
"""


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """Settings of the boosted trees. ``rising``: features whose increase may only raise the probability (monotone
    constraints).
    """

    trees: int = 120
    leaves: int = 10
    rate: float = 0.07
    l2: float = 5.0
    least: int = 40
    share: float = 0.2
    seed: int = 0
    rising: frozenset[str] = frozenset()

    def classifier(self) -> Any:
        """Return an untrained scikit-learn classifier with these settings."""
        from sklearn.ensemble import HistGradientBoostingClassifier

        return HistGradientBoostingClassifier(
            max_iter=self.trees,
            max_leaf_nodes=self.leaves,
            learning_rate=self.rate,
            l2_regularization=self.l2,
            min_samples_leaf=self.least,
            max_features=self.share,
            early_stopping=False,
            random_state=self.seed,
            monotonic_cst=[int(feature in self.rising) for feature in FEATURES] if self.rising else None,
        )


@dataclass(frozen=True)
class GrownTrees:
    """Trained tree classifiers: ``hazards`` for the three intervals between the horizons; ``kinds``: for each type of
    onset.
    """

    hazards: tuple[Any, Any, Any]
    kinds: dict[str, Any]

    def logits(self, x: npt.NDArray[np.float32]) -> Floats:
        """Return the uncalibrated log-odds of an onset in each interval for the features ``x``, (n, 3)."""
        return np.stack([head.decision_function(x) for head in self.hazards], axis=1)


def intervals(part: Examples) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """Return for each interval between horizons the rows to train on, and for each of them True if the onset fell into
    it.

    The rows are those still without an onset at its start and watched to its end.
    """
    found = []
    for low, high in zip((0, *HORIZONS), HORIZONS, strict=False):
        hit = (part.ahead > low) & (part.ahead <= high)
        watched = hit | ((part.ahead > high) & (part.left >= high))
        rows = np.flatnonzero(watched & (part.ahead > low))
        found.append((rows, hit[rows]))
    return found


def grow(part: Examples, how: TreeSettings, *, kinds: bool = False) -> GrownTrees:
    """Train tree classifiers on examples; with ``kinds``, also one for each type of onset.

    Raises ``ConfigError`` if an interval has no failure, or nothing else.
    """
    found = intervals(part)
    for (_, hit), low, high in zip(found, (0, *HORIZONS), HORIZONS, strict=False):
        if not 0 < hit.sum() < len(hit):
            raise ConfigError(
                f"of {len(hit)} rows watched for a failure {low} to {high} steps ahead, {hit.sum()} saw one: there is "
                "nothing to separate; add runs that are longer, and both failing and sound ones"
            )
    first, second, third = (_fitted(how, part.x[rows], hit) for rows, hit in found)
    return GrownTrees((first, second, third), _kinds(part, how) if kinds else {})


def _fitted(how: TreeSettings, x: npt.NDArray[np.float32], hit: npt.NDArray[np.bool_]) -> Any:
    """A classifier. Columns without any value are constant to it: scikit-learn cannot bin them."""
    empty = np.isnan(x).all(axis=0)
    return how.classifier().fit(np.where(empty, np.float32(0.0), x), hit)


def _kinds(part: Examples, how: TreeSettings) -> dict[str, Any]:
    """One against the others, on the last 100 steps before an onset."""
    rows = np.flatnonzero((part.ahead > 0) & (part.ahead <= HORIZONS[-1]))
    small = TreeSettings(trees=30, leaves=6, rate=0.15, l2=how.l2, least=20, share=how.share, seed=how.seed)
    found = {}
    for kind in np.unique(part.kind[rows]):
        hit = part.kind[rows] == kind
        if len(np.unique(part.run[rows][hit])) >= LEAST_EVENTS and not hit.all():
            found[str(kind)] = _fitted(small, part.x[rows], hit)
    return found


def head_of(classifier: Any, slope: float = 1.0, offset: float = 0.0) -> Head:
    """Return the trees of a scikit-learn classifier as plain numbers, with equal log-odds up to rounding to 32 bits."""
    trees = tuple(_tree(stage[0].nodes) for stage in classifier._predictors)  # noqa: SLF001  (no public way out)
    return Head(float(classifier._baseline_prediction.ravel()[0]), trees, slope, offset)  # noqa: SLF001


def _tree(nodes: Any) -> Tree:
    leaf = nodes["is_leaf"].astype(bool)
    tested = np.clip(nodes["num_threshold"], -BEYOND, BEYOND)  # infinite where only missing values go the other way
    return Tree(
        feature=tuple(np.where(leaf, LEAF, nodes["feature_idx"]).tolist()),
        threshold=tuple(np.where(leaf, 0.0, tested).tolist()),
        missing_left=tuple(nodes["missing_go_to_left"].astype(int).tolist()),
        left=tuple(np.where(leaf, 0, nodes["left"]).astype(int).tolist()),
        right=tuple(np.where(leaf, 0, nodes["right"]).astype(int).tolist()),
        value=tuple(nodes["value"].tolist()),
    )


def gains(grown: GrownTrees) -> dict[str, float]:
    """Return the share of each feature in the total gain of the trees' splits."""
    total = np.zeros(len(FEATURES))
    for classifier in grown.hazards:
        for stage in classifier._predictors:  # noqa: SLF001
            nodes = stage[0].nodes
            tested = ~nodes["is_leaf"].astype(bool)
            np.add.at(total, nodes["feature_idx"][tested], np.maximum(nodes["gain"][tested], 0.0))
    return dict(zip(FEATURES, (total / max(total.sum(), 1e-12)).tolist(), strict=True))


# The same hazards by logistic regression, which can only weigh and add: half of the model, and its cross-check.

PENALTY = 0.01
"""Inverse strength of the quadratic penalty (``C`` of scikit-learn)."""
ROUNDS = 300
SLIGHT = 0.003
"""Log-odds per spread below which a feature is left out of the linear model."""


@dataclass(frozen=True)
class Lines:
    """Linear models for the three intervals between the horizons, of features over their ``spread``."""

    spread: Floats
    hazards: tuple[Any, Any, Any]

    def line(self, interval: int, share: float) -> tuple[float, LinearScore]:
        """Return the offset and the weights of the linear model for one interval, both multiplied by ``share``."""
        head = self.hazards[interval]
        places = np.flatnonzero(head.coef_[0])
        weights = share * head.coef_[0][places]
        line = LinearScore(tuple(places.tolist()), tuple(self.spread[places].tolist()), tuple(weights.tolist()))
        return share * float(head.intercept_[0]), line

    def logits(self, x: npt.NDArray[np.float32]) -> Floats:
        """Return the uncalibrated log-odds of an onset in each interval for the features ``x``, (n, 3)."""
        seen = scaled(x, self.spread)
        return np.stack([head.decision_function(seen) for head in self.hazards], axis=1)


def scaled(x: npt.NDArray[np.float32], spread: Floats) -> Floats:
    """Return features over their spreads, clipped at :data:`FAR`; values that were not measured are 0."""
    return np.clip(np.nan_to_num(x / spread), -FAR, FAR)


def fit_lines(part: Examples, _: TreeSettings | None = None, /) -> Lines:
    """Fit linear models to examples. Columns without values, or with a single one, get the weight 0."""
    from sklearn.linear_model import LogisticRegression

    filled = np.nan_to_num(part.x.astype(np.float64))
    root = np.sqrt((filled**2).mean(axis=0))
    spread = np.where(root > 0.0, root, 1.0)
    seen = scaled(part.x, spread)
    first, second, third = (
        LogisticRegression(C=PENALTY, max_iter=ROUNDS).fit(seen[rows], hit) for rows, hit in intervals(part)
    )
    for head in (first, second, third):
        head.coef_ = np.where(np.abs(head.coef_) < SLIGHT, 0.0, head.coef_)
    return Lines(spread, (first, second, third))


# The model: trees and a line, the mean of their log-odds.
#
# Trees find what goes together, a line what holds everywhere: on recipes neither has seen, each errs where the other
# does not.

LINE_SHARE = 0.5
"""Share of the linear model in the log-odds."""


@dataclass(frozen=True)
class Blend:
    """A trained mean of trees (``grown``) and linear models (``lines``)."""

    grown: GrownTrees
    lines: Lines

    def logits(self, x: npt.NDArray[np.float32]) -> Floats:
        """Return the uncalibrated log-odds of an onset in each interval for the features ``x``, (n, 3)."""
        return (1.0 - LINE_SHARE) * self.grown.logits(x) + LINE_SHARE * self.lines.logits(x)

    def head(self, interval: int, slope: float, offset: float) -> Head:
        """Return trees and linear model of one interval as plain numbers, with ``slope`` and ``offset`` as the
        calibration.
        """
        trees = head_of(self.grown.hazards[interval])
        base, line = self.lines.line(interval, LINE_SHARE)
        part = 1.0 - LINE_SHARE
        return Head(part * trees.base + base, tuple(tree.times(part) for tree in trees.trees), slope, offset, line)


def learn_blend(part: Examples, how: TreeSettings, /, *, kinds: bool = False) -> Blend:
    """Fit trees and linear models to examples. Raises ``ConfigError`` if an interval has no failure,
    or nothing else.
    """
    return Blend(grow(part, how, kinds=kinds), fit_lines(part))


# Making log-odds honest: a straight line in log-odds, fitted on runs the trees have not seen (Platt, 1999).


def platt_line(
    logits: Floats, hit: npt.NDArray[np.bool_], weight: Floats | None = None, *, rounds: int = 50
) -> tuple[float, float]:
    """Return the slope and offset that maximise the likelihood of ``hit``, by Newton's method; (1, 0) if all rows
    agree.

    ``logits``, ``hit``, ``weight``: (n,). ``rounds``: most iterations.
    """
    y = hit.astype(float)
    if not 0.0 < y.mean() < 1.0:
        return 1.0, 0.0
    w = np.ones_like(y) if weight is None else weight / weight.mean()
    design, beta = np.stack([logits, np.ones_like(logits)], axis=1), np.array([1.0, 0.0])
    for _ in range(rounds):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ beta, -30.0, 30.0)))
        gradient = design.T @ (w * (y - p)) - 1e-3 * (beta - np.array([1.0, 0.0]))
        curve = (design * (w * p * (1.0 - p))[:, None]).T @ design + 1e-3 * np.eye(2)
        step = np.linalg.solve(curve, gradient)
        beta = beta + np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-8:
            break
    return (float(beta[0]), float(beta[1])) if beta[0] > 0.0 else (1.0, 0.0)


LEAST_RUNS = 40
"""Fewest runs that allow training and holding some out."""
LEAST_FAILURES = 10
FOLDS = 5
NOISE_SEED = 1000
NEAR_ROWS, FAR_ROWS = 3, 12
"""Thinning of the rows used for training, one in that many, near an onset and far from one: neighbouring rows are
alike.
"""
DROPOUTS, DROPPED = 8, 0.35
"""Number of random sets of signals that copies of runs lack, and the probability of each signal to be in one."""
SPARSE_LOGS = tuple(LogCadence(every, last) for every in (5, 10, 20) for last in (False, True))
"""Cadences that the model of sparse logs is trained on, each with all runs, and half of them again with small batches
and data that are harder at times, as users with such logs often have.
"""
NEAR_SHARE, FAR_SHARE = 0.7, 0.25
"""Shares of the rows of sparse logs that are used for training, near an onset and far from one."""
Progress = Callable[[str], None]
"""Called with a description of the present stage of work, for a progress display."""


class Learnt(Protocol):
    """Any predictor that was fitted to examples."""

    def logits(self, x: npt.NDArray[np.float32]) -> Floats:
        """Return the uncalibrated log-odds of an onset in each interval between the horizons, (n, 3)."""
        ...


class Learn(Protocol):
    """A function that fits a predictor to examples: :func:`learn_blend`, or one of its two parts."""

    def __call__(self, part: Examples, how: TreeSettings, /) -> Learnt:
        """Fit to examples."""
        ...


@dataclass(frozen=True)
class Trained:
    """A trained model, its examples, and the p50 of each example from a model that had not seen its run."""

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
        """Examples on which thresholds are chosen: the runs as they are first, then those of small batches."""
        return joined([self.fine, self.noisy])


def prepare(table: RunTable, labels: Labels, *, jobs: int = 1, progress: Progress | None = None) -> Prepared:
    """Compute examples of all runs, of half of them as small batches, and of two thirds as logs of every 5 or 10 steps.

    ``jobs``: number of processes; ``progress``: called with each stage.
    """
    progress = progress or _silent
    progress("features")
    fine = examples(table, labels, jobs=jobs)
    progress("features of small batches")
    half = list(range(0, len(table.runs), 2))
    noisy = examples(table.only(half), labels, noise=NOISE_SEED, jobs=jobs).moved(half)
    progress("features of coarse logs")
    parts = []
    for every, start in ((5, 0), (10, 1)):
        places = list(range(start, len(table.runs), 3))
        parts.append(examples(table.only(places), labels, log=LogCadence(every), jobs=jobs).moved(places))
    return Prepared(fine, noisy, joined(parts))


def train(
    table: RunTable,
    labels: Labels,
    *,
    how: TreeSettings | None = None,
    folds: int = FOLDS,
    jobs: int = 1,
    progress: Progress | None = None,
    meta: dict[str, JSON] | None = None,
) -> Trained:
    """Train a forecasting model on labelled runs.

    Parameters
    ----------
    table, labels
        The runs, and their labels.
    how
        Settings of the trees.
    folds
        Number of folds for choosing thresholds on unseen runs.
    jobs
        Number of processes.
    progress
        Called with each stage of the work.
    meta
        Data to store with the model.

    Raises
    ------
    ConfigError
        If there are fewer than 40 runs, or 10 that failed late enough to be forecast, or 10 that did not.
    """
    how, progress = how or TreeSettings(), progress or _silent
    known = labels.of(table)
    _enough(known)
    parts = prepare(table, labels, jobs=jobs, progress=progress)
    scored = parts.scored
    held = out_of_fold(scored, parts.coarse, folds_of(table, Split.RUN, folds), how, jobs=jobs, progress=progress)
    lines, profiles = _held_to(scored, held, thresholds.sound_until(table, labels))
    progress("the model itself")
    learnt = learn_blend(mixed(scored, parts.coarse, how.seed), how, kinds=True)
    p50 = chances(held["taps"], lines)[: len(parts.fine), 1]
    sparse = train_sparse(table, labels, how=how, folds=folds, jobs=jobs, progress=progress)
    return Trained(_model(learnt, lines, profiles, meta or {}, sparse.model if sparse else None), parts.fine, p50)


def train_sparse(
    table: RunTable,
    labels: Labels,
    *,
    how: TreeSettings | None = None,
    folds: int = FOLDS,
    jobs: int = 1,
    progress: Progress | None = None,
    meta: dict[str, JSON] | None = None,
) -> Trained | None:
    """Train the model of logs with a row every 5 to 20 steps; None if they show too few failures to learn from.

    Its thresholds, and the p50 of each example, come from models that have not seen the run's recipe, or, if few
    recipes fail, have not seen the run. The examples are those of :data:`SPARSE_LOGS`, log by log, each followed by
    those with small batches and hard data.
    """
    how, progress = how or TreeSettings(), progress or _silent
    half, parts = list(range(0, len(table.runs), 2)), []
    for log in SPARSE_LOGS:
        progress(f"features of logs with a row every {log.every} steps")
        parts.append(examples(table, labels, log=log, jobs=jobs))
        parts.append(examples(table.only(half), labels, log=log, noise=NOISE_SEED, hard=True, jobs=jobs).moved(half))
    logs = joined(parts)
    nothing = logs.only(np.zeros(0, dtype=np.int64))
    failing = {recipe for recipe, label in zip(table.recipes, labels.of(table), strict=True) if label.onset is not None}
    fold = folds_of(table, Split.RECIPE if len(failing) >= 2 * folds else Split.RUN, folds)
    try:
        held = out_of_fold(logs, nothing, fold, how, mix=mixed_sparse, jobs=jobs, progress=progress)
        learnt = learn_blend(mixed_sparse(logs, nothing, how.seed), how, kinds=True)
    except ConfigError as error:
        progress(f"no model of sparse logs: {error}")
        return None
    lines, profiles = _held_to(logs, held, thresholds.sound_until(table, labels))
    return Trained(_model(learnt, lines, profiles, meta or {}), logs, chances(held["taps"], lines)[:, 1])


def out_of_fold(
    fine: Examples,
    coarse: Examples,
    fold: npt.NDArray[np.int64],
    how: TreeSettings,
    *,
    profiles: Sequence[str] = tuple(PROFILES),
    learn: Learn = learn_blend,
    mix: Mix | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> dict[str, Floats]:
    """Return, by profile, the log-odds of all rows of ``fine``, each from a predictor that saw no run of its fold.

    ``fold``: of each run of the table; runs of one fold are held out together. ``coarse``: further examples to train
    on; ``learn``: fits a predictor to the examples that ``mix`` selects (:func:`mixed`); ``jobs``: processes.
    """
    from joblib import Parallel, delayed

    held = {name: np.full((len(fine), len(HORIZONS)), math.nan) for name in profiles}
    numbers = np.unique(fold)
    rows = [np.flatnonzero(fold[fine.run] == number) for number in numbers]
    taken = mix or mixed
    others = (
        taken(fine.only(fold[fine.run] != number), coarse.only(fold[coarse.run] != number), how.seed)
        for number in numbers
    )
    work = (
        delayed(_learnt)(part, fine.only(mine), how, profiles, learn) for part, mine in zip(others, rows, strict=True)
    )
    for mine, found in zip(rows, Parallel(n_jobs=jobs, return_as="generator")(work), strict=True):
        (progress or _silent)(f"one of {len(numbers)} folds is done")
        for name in profiles:
            held[name][mine] = found[name]
    return held


def _learnt(
    others: Examples, mine: Examples, how: TreeSettings, profiles: Sequence[str], learn: Learn
) -> dict[str, Floats]:
    """Log-odds of the rows ``mine`` by what ``others`` teach, by profile."""
    learnt = learn(others, how)
    return {name: learnt.logits(mine.without(EVERYTHING - PROFILES[name]).x) for name in profiles}


Mix = Callable[[Examples, Examples, int], Examples]
"""Selects training examples from those at every step and coarse ones; the last argument is a seed."""


def mixed(fine: Examples, coarse: Examples, seed: int) -> Examples:
    """Return the examples to train on: rows thinned far from an onset, and copies without the signals that poorer logs
    lack.
    """
    thin = fine.only(
        (fine.ahead <= HORIZONS[-1]) & (fine.step % NEAR_ROWS == 0) | (fine.step % FAR_ROWS == 0)
    ).at_risk()
    draw = np.random.default_rng(seed)
    return joined([thin, coarse.at_risk(), *_poorer(thin, draw)])


def mixed_sparse(logs: Examples, _: Examples, seed: int) -> Examples:
    """Return the examples of sparse logs to train on, thinned less because each row is more informative."""
    draw, risky = np.random.default_rng(seed), logs.at_risk()
    share = np.where(risky.ahead <= HORIZONS[-1], NEAR_SHARE, FAR_SHARE)
    thin = risky.only(draw.random(len(risky)) < share)
    return joined([thin, *_poorer(thin, draw)])


def _poorer(part: Examples, draw: np.random.Generator) -> list[Examples]:
    """Copies, one a run: of a log that some trainer writes, or one without a random third of the signals.

    A signal is missing in a whole run far more often than because something broke, so that must teach nothing.
    """
    known = [EVERYTHING - kept for kept in list(PROFILES.values())[1:]]
    signals = sorted(EVERYTHING)
    lost = [*known, *(frozenset(s for s in signals if draw.random() < DROPPED) for _ in range(DROPOUTS))]
    which = draw.integers(len(lost), size=int(part.run.max(initial=0)) + 1)
    return [part.only(which[part.run] == i).without(gone) for i, gone in enumerate(lost)]


def chances(logits: Floats, lines: Sequence[tuple[float, float]]) -> Floats:
    """Return the probability of an onset within each horizon, (n, 3), from the log-odds of the intervals.

    ``lines``: slope and offset of the calibration of each interval.
    """
    alive = np.ones(len(logits))
    columns = []
    for i, (slope, offset) in enumerate(lines):
        alive = alive / (1.0 + np.exp(np.clip(slope * logits[:, i] + offset, -30.0, 30.0)))
        columns.append(1.0 - alive)
    return np.stack(columns, axis=1)


def _held_to(
    part: Examples, held: Mapping[str, Floats], sound: Floats
) -> tuple[list[tuple[float, float]], tuple[Profile, ...]]:
    """Calibration of each interval, and thresholds of each profile, from log-odds of runs that were held out.

    ``held``: of each profile, of the rows of ``part``; ``sound``: as :func:`rlwatch.forecast.thresholds.healthy` takes
    it.
    """
    lines = [platt_line(held["taps"][rows, i], hit) for i, (rows, hit) in enumerate(intervals(part))]
    harmless = np.flatnonzero(thresholds.healthy(part, sound))
    return lines, tuple(_profile(name, part, held[name], lines, harmless) for name in PROFILES)


def _profile(
    name: str, fine: Examples, logits: Floats, lines: Sequence[tuple[float, float]], rows: npt.NDArray[np.int64]
) -> Profile:
    """Thresholds of one profile; ``rows``: those in which any alarm is false."""
    part = fine.only(rows)
    p50 = thresholds.smoothed(fine, chances(logits, lines)[:, 1])[rows]
    static = thresholds.smoothed(fine, fine.static)[rows]
    budgets = [f"{budget:g}" for budget in thresholds.BUDGETS]
    both = dict(zip(budgets, thresholds.jointly(part, p50, static), strict=True))
    return Profile(
        name=name,
        signals=PROFILES[name],
        thresholds={budget: max(model, 1e-6) for budget, (model, _) in both.items()},
        static={budget: max(limit, 1e-6) for budget, (_, limit) in both.items()},
    )


def _model(
    learnt: Blend,
    lines: Sequence[tuple[float, float]],
    profiles: tuple[Profile, ...],
    meta: dict[str, JSON],
    sparse: Model | None = None,
) -> Model:
    grown = learnt.grown
    first, second, third = (learnt.head(i, *ab) for i, ab in enumerate(lines))
    kinds = {kind: head_of(head) for kind, head in grown.kinds.items()}
    used = sorted({f for head in (first, second, third, *kinds.values()) for f in _features_of(head)})
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
        sparse=sparse,
    )


def _features_of(head: Head) -> set[int]:
    """Features that a head reads."""
    return {f for tree in head.trees for f in tree.feature if f != LEAF} | set(head.line.feature)


def _renumbered(head: Head, place: dict[int, int]) -> Head:
    trees = tuple(tree.asking(place) for tree in head.trees)
    line = replace(head.line, feature=tuple(place[f] for f in head.line.feature))
    return replace(head, trees=trees, line=line)


def _enough(known: Sequence[Label]) -> None:
    failed = sum(label.outcome is RunOutcome.EVENT for label in known)
    sound = sum(label.outcome is RunOutcome.CLEAN for label in known)
    if len(known) < LEAST_RUNS or min(failed, sound) < LEAST_FAILURES:
        raise ConfigError(
            f"a forecaster needs at least {LEAST_RUNS} runs, {LEAST_FAILURES} of them failed after step 55 and "
            f"{LEAST_FAILURES} sound; these are {len(known)} with {failed} and {sound}: add runs"
        )


def _silent(_: str) -> None:
    """Ignore progress."""
