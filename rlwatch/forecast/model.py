"""The forecasting model: probabilities of a failure within the next steps, from the features of a run.

It is a discrete-time hazard model: one head predicts an onset within 20 steps, the next an onset within 50 if not
within 20, the last one within 100 if not within 50. Runs that ended without a failure count for as long as they were
observed. Therefore p20 <= p50 <= p100 by construction.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from itertools import islice, pairwise
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlwatch.errors import ConfigError
from rlwatch.forecast.features import FEATURES
from rlwatch.forecast.forecast import HORIZONS, LIMITS, ForecastReason
from rlwatch.forecast.signals import BY_SIGNAL
from rlwatch.records import JSON


@dataclass(frozen=True, slots=True)
class Chances:
    """Probability of a failure onset within 20, 50 and 100 steps."""

    p20: float
    p50: float
    p100: float

    @property
    def steps_to(self) -> float | None:
        """Expected steps to an onset within the last horizon; None if that is improbable (p100 < 0.5)."""
        if self.p100 < 0.5:
            return None
        mass = (self.p20, self.p50 - self.p20, self.p100 - self.p50)
        middles = (HORIZONS[0] / 2, sum(HORIZONS[:2]) / 2, sum(HORIZONS[1:]) / 2)
        return sum(part * at for part, at in zip(mass, middles, strict=True)) / self.p100


@dataclass(frozen=True, slots=True)
class Profile:
    """Alarm thresholds for the runs that log at least these signals.

    ``thresholds``: budget (false alarm episodes in 1000 healthy steps) -> least p50 that is an alarm; ``static``:
    budget -> least share of the way to a limit that is one.
    """

    name: str
    signals: frozenset[str]
    thresholds: Mapping[str, float]
    static: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A forecasting model without its heads, from which the thresholds of a run follow.

    ``features``: names; ``gains``: share of each signal in the gain of the hazards; ``sparse``: the outline of the
    model of logs with rows several steps apart, None if there is none.
    """

    features: tuple[str, ...]
    gains: Mapping[str, float]
    profiles: tuple[Profile, ...]
    sparse: Outline | None = None

    def known(self, signals: frozenset[str]) -> float:
        """Return the share of the model's gain, in [0, 1], that comes from ``signals``, those that a run logs."""
        total = sum(self.gains.values())
        return sum(gain for signal, gain in self.gains.items() if signal in signals) / total if total else 0.0

    def profile(self, signals: frozenset[str]) -> Profile:
        """Return the richest threshold profile whose signals a run has nearly all of, else the poorest profile."""
        fitting = [p for p in self.profiles if len(p.signals & signals) >= 0.8 * len(p.signals)]
        return max(fitting, key=lambda p: len(p.signals), default=min(self.profiles, key=lambda p: len(p.signals)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Outline):
    """A forecasting model. ``hazards``: one head for each horizon; ``limits``: one for each type of onset.

    ``meta``: versions, data and seeds used in training; ``sparse``: the model of logs with rows several steps apart,
    None if there is none.
    """

    hazards: tuple[Head, Head, Head]
    limits: Mapping[str, Head]
    meta: Mapping[str, JSON] = field(default_factory=dict)
    sparse: Model | None = None
    _hazards: HorizonModels = field(init=False, repr=False, compare=False)
    _limits: HorizonModels = field(init=False, repr=False, compare=False)
    _signals: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _signal_of: Ints = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Precompute columns for the evaluation at every step."""
        object.__setattr__(self, "_hazards", HorizonModels(self.hazards))
        object.__setattr__(self, "_limits", HorizonModels(tuple(self.limits.values())))
        signals = tuple(dict.fromkeys(map(signal_of, self.features)))
        of = np.array([signals.index(signal_of(feature)) for feature in self.features], dtype=np.int64)
        object.__setattr__(self, "_signals", signals)
        object.__setattr__(self, "_signal_of", of)

    def chances(self, x: Sequence[float] | Floats) -> Chances:
        """Return the probabilities of an onset from one vector of features, in the order of :attr:`features` (NaN: not
        measured).
        """
        return self.chances_of(_row(x))[0]

    def chances_of(self, rows: Floats) -> list[Chances]:
        """Return the probabilities of an onset for each row of ``rows`` (rows, features)."""
        return [_chances(logits) for logits in self._hazards.logits(rows).tolist()]

    def limit(self, x: Sequence[float] | Floats) -> str:
        """Return the most likely type of onset for a vector of features; empty if the model cannot distinguish them."""
        kinds = tuple(self.limits)
        return kinds[int(self._limits.logits(_row(x))[0].argmax())] if kinds else ""

    def why(self, x: Sequence[float] | Floats) -> dict[str, float]:
        """Return the log-odds that each signal adds to an onset within 50 steps, for a vector of features."""
        shares = list(islice(self._hazards.shares(_row(x)), 2))
        signals = self._signal_of[np.concatenate([feature for feature, _ in shares])]
        added = np.bincount(signals, np.concatenate([change for _, change in shares])).tolist()
        return {self._signals[signal]: added[signal] for signal in dict.fromkeys(signals.tolist())}


def _row(x: Sequence[float] | Floats) -> Floats:
    """One row as many: (1, features)."""
    return np.asarray(x, dtype=np.float64)[None]


def _chances(logits: Sequence[float]) -> Chances:
    """From the log-odds of the hazards, the nearest horizon first."""
    alive, ps = 1.0, []
    for logit in logits:
        alive *= 1.0 - probability(logit)
        ps.append(1.0 - alive)
    return Chances(*ps)


def signal_of(feature: str) -> str:
    """Return the signal of a feature: ``entropy`` of ``entropy:low`` and ``limit:ent_low:entropy:share``."""
    parts = feature.split(":")
    return parts[2] if parts[0] == "limit" else parts[0]


def reasons(added: Mapping[str, float], names: Mapping[str, str], most: int = 3) -> tuple[ForecastReason, ...]:
    """Return the signals with the strongest evidence for a failure, with their share of it.

    Parameters
    ----------
    added
        Log-odds that each signal adds.
    names
        Metric from which each signal of the run is read; signals that it does not log are left out.
    most
        Most signals to return.
    """
    speaking = {signal: value for signal, value in added.items() if value > 0.0 and math.isfinite(value)}
    total = sum(speaking.values())
    ranked = sorted(speaking.items(), key=lambda item: -item[1])[:most]
    strongest = [
        (names[signal], value / total) for signal, value in ranked if signal in names and value >= 0.05 * total
    ]
    return tuple(ForecastReason(metric, share) for metric, share in strongest)


# Sums of decision trees and of weighted features, read without the library that fitted them.

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LEAF = -1
"""Feature index that marks a leaf of a tree."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A decision tree: its nodes in columns of equal length, the root first and every child behind its parent.

    ``feature``: index of the tested feature, or :data:`LEAF`; ``threshold``: a value at or below it goes ``left``;
    ``missing_left``: 1 if NaN goes left; ``value``: log-odds that are added at a leaf, or would be if the tree ended at
    that node.
    """

    feature: Sequence[int]
    threshold: Sequence[float]
    missing_left: Sequence[int]
    left: Sequence[int]
    right: Sequence[int]
    value: Sequence[float]

    def paths(self) -> list[list[int]]:
        """Return the nodes from the root to each leaf, the leftmost leaf first."""
        found, waiting = [], [[0]]
        while waiting:
            path = waiting.pop()
            node = path[-1]
            if self.feature[node] == LEAF:
                found.append(path)
            else:
                waiting += [[*path, self.right[node]], [*path, self.left[node]]]
        return found

    def asking(self, place: Mapping[int, int]) -> Tree:
        """Return a copy of the tree that tests feature ``place[i]`` for each feature ``i``."""
        feature = tuple(LEAF if tested == LEAF else place[tested] for tested in self.feature)
        return Tree(feature, self.threshold, self.missing_left, self.left, self.right, self.value)

    def times(self, factor: float) -> Tree:
        """Return a copy of the tree with all its values multiplied by ``factor``."""
        values = tuple(factor * value for value in self.value)
        return Tree(self.feature, self.threshold, self.missing_left, self.left, self.right, values)


FAR = 5.0
"""Spreads at which a feature of a weighted sum is clipped, so that no single feature dominates the sum."""


@dataclass(frozen=True, slots=True)
class LinearScore:
    """A weighted sum of features, in columns of equal length: ``weight`` times ``feature`` (an index) over its
    ``spread``.

    A feature counts for at most :data:`FAR` spreads; one that was not measured adds nothing.
    """

    feature: tuple[int, ...] = ()
    spread: tuple[float, ...] = ()
    weight: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """A binary predictor: log-odds are ``slope`` times (``base`` plus trees plus linear score) plus ``offset``.

    Slope and offset are the calibration.
    """

    base: float
    trees: tuple[Tree, ...]
    slope: float = 1.0
    offset: float = 0.0
    line: LinearScore = LinearScore()

    def logit(self, x: Sequence[float]) -> float:
        """Return the calibrated log-odds for a vector of features."""
        return float(HorizonModels((self,)).logits(_row(x))[0, 0])

    def shares(self, x: Sequence[float]) -> dict[int, float]:
        """Return the log-odds that each feature, by index, adds for a vector of features; see
        :meth:`HorizonModels.shares`.
        """
        feature, change = next(HorizonModels((self,)).shares(_row(x)))
        return dict(zip(feature.tolist(), change.tolist(), strict=True))


class HorizonModels:
    """Several heads evaluated at once on many rows: every node of every tree is tested, and no tree is walked.

    Each node that sends a row to the right rules out the leaves to its left; of the leaves that remain, one bit each,
    the leftmost is the one a walk would reach (Lucchese et al., QuickScorer, 2015).
    """

    def __init__(self, heads: Sequence[Head]) -> None:
        self._heads = tuple(heads)
        self._prepared = False

    def _prepare(self) -> None:
        """Lay the trees out in arrays, on first use: most runs get no probabilities and never need them."""
        if self._prepared:
            return
        heads = self._heads
        trees = [tree for head in heads for tree in head.trees]
        self._ends = np.cumsum([0, *(len(head.trees) for head in heads)]).tolist()
        paths = [tree.paths() for tree in trees]
        depth = max((len(tree.feature) - len(leaves) for tree, leaves in zip(trees, paths, strict=True)), default=0)
        widest = max(map(len, paths), default=1)
        # Asked of x twice over, with NaN as -inf in the first half (it goes left) and as +inf in the second.
        self._feature = np.zeros((depth, len(trees)), dtype=np.int64)
        self._half = np.ones_like(self._feature)
        self._threshold = np.full(self._feature.shape, math.inf)
        self._left_of = np.zeros(self._feature.shape, dtype=np.uint64)
        self._value = np.zeros((len(trees), widest))
        self._first = np.arange(len(trees)) * widest
        self._where = (-1, self._feature)
        """Number of features in the last call, and the positions of the nodes' features in the doubled row."""
        for i, (tree, leaves) in enumerate(zip(trees, paths, strict=True)):
            self._value[i, : len(leaves)] = [tree.value[path[-1]] for path in leaves]
            asking = [node for node, feature in enumerate(tree.feature) if feature != LEAF]
            for row, node in enumerate(asking):
                self._feature[row, i], self._threshold[row, i] = tree.feature[node], tree.threshold[node]
                self._half[row, i] = 0 if tree.missing_left[node] else 1
                self._left_of[row, i] = sum(1 << at for at, path in enumerate(leaves) if tree.left[node] in path)
        # What was tested on the way to each leaf, and how much it changed the value: filled up with nothing at all.
        longest = max((len(path) - 1 for leaves in paths for path in leaves), default=0)
        self._nothing = 1 + max((feature for head in heads for feature in _features_of(head)), default=-1)
        self._on_way = np.full((len(trees), widest, longest), self._nothing, dtype=np.int64)
        self._change = np.zeros(self._on_way.shape)
        slopes = [head.slope for head in heads for _ in head.trees]
        for i, (tree, leaves) in enumerate(zip(trees, paths, strict=True)):
            for leaf, path in enumerate(leaves):
                for at, (node, after) in enumerate(pairwise(path)):
                    self._on_way[i, leaf, at] = tree.feature[node]
                    self._change[i, leaf, at] = slopes[i] * (tree.value[after] - tree.value[node])
        lines = [head.line for head in heads]
        self._in_lines = np.zeros((len(lines), self._nothing + 1), dtype=bool)
        for i, line in enumerate(lines):
            self._in_lines[i, [*line.feature, self._nothing]] = True
        self._line_ends = np.cumsum([0, *(len(line.feature) for line in lines)]).tolist()
        self._line_feature = np.array([f for line in lines for f in line.feature], dtype=np.int64)
        self._spread = np.array([spread for line in lines for spread in line.spread])
        self._weight = np.array([weight for line in lines for weight in line.weight])
        self._prepared = True

    def logits(self, x: Floats) -> Floats:
        """Return the calibrated log-odds of each head at each row of ``x`` (rows, features), as (rows, heads)."""
        self._prepare()
        found = np.empty((len(x), len(self._heads)))
        for first in range(0, len(x), AT_ONCE):
            found[first : first + AT_ONCE] = self._block(x[first : first + AT_ONCE])
        return found

    def shares(self, row: Floats) -> Iterator[tuple[Ints, Floats]]:
        """Yield for each head the indices of features and the log-odds that each added, at one ``row`` (1, features).

        Along each path, the change of value is attributed to the tested feature. The values sum exactly to the logit
        less the values at the roots (Saabas, 2014).
        """
        self._prepare()
        leaves, terms = self._leaves(row)[0], self._terms(row)[0]
        for i, head in enumerate(self._heads):
            line, trees = slice(*self._line_ends[i : i + 2]), np.arange(*self._ends[i : i + 2])
            tested, in_line = self._on_way[trees, leaves[trees]].ravel(), self._in_lines[i]
            change = np.concatenate((head.slope * terms[line], self._change[trees, leaves[trees]].ravel()))
            places = np.concatenate((self._line_feature[line], tested))
            added = np.asarray(np.bincount(places, change, self._nothing + 1), dtype=np.float64)
            others = dict.fromkeys(tested[~in_line[tested]].tolist())
            there = np.array([*dict.fromkeys(head.line.feature), *others], dtype=np.int64)
            yield there, added[there]

    def _block(self, x: Floats) -> Floats:
        values = self._value.take(self._leaves(x) + self._first)
        terms = self._terms(x)
        if len(x) == 1:
            return self._of_one(values[0].tolist(), terms)
        logits = []
        for i, head in enumerate(self._heads):
            parts = np.empty((len(x), 1 + self._ends[i + 1] - self._ends[i]))
            parts[:, 0] = head.base
            parts[:, 1:] = values[:, self._ends[i] : self._ends[i + 1]]
            total = np.add.accumulate(parts, axis=1)[:, -1]  # one after the other: the same at any number of rows
            if head.line.feature:
                total = total + terms[:, self._line_ends[i] : self._line_ends[i + 1]].sum(axis=1)
            logits.append(head.slope * total + head.offset)
        return np.stack(logits, axis=1) if logits else np.empty((len(x), 0))

    def _of_one(self, values: list[float], terms: Floats) -> Floats:
        """The same sums of one row, in the same order."""
        found = np.empty((1, len(self._heads)))
        for i, head in enumerate(self._heads):
            total = reduce(add, values[self._ends[i] : self._ends[i + 1]], head.base)
            if head.line.feature:
                total += float(np.add.reduce(terms[:, self._line_ends[i] : self._line_ends[i + 1]], axis=1)[0])
            found[0, i] = head.slope * total + head.offset
        return found

    def _leaves(self, x: Floats) -> Ints:
        """Place of the leaf of each tree, from the left: (rows, trees)."""
        if not self._feature.size:
            return np.zeros((len(x), self._feature.shape[1]), dtype=np.int64)
        missing = np.isnan(x)
        halves = np.concatenate((np.where(missing, -math.inf, x), np.where(missing, math.inf, x)), axis=1)
        wide, where = self._where
        if wide != x.shape[1]:
            where = self._feature + self._half * x.shape[1]
            self._where = x.shape[1], where
        right = halves.take(where, axis=1) > self._threshold
        out = np.bitwise_or.reduce(right * self._left_of, axis=1)
        lowest = ~out & (out + np.uint64(1))
        return np.asarray(np.frexp(lowest.astype(np.float64))[1] - 1, dtype=np.int64)

    def _terms(self, x: Floats) -> Floats:
        """Log-odds that each entry of the lines adds, line after line: (rows, entries)."""
        moved = np.minimum(np.maximum(x.take(self._line_feature, axis=1) / self._spread, -FAR), FAR)
        moved[np.isnan(moved)] = 0.0
        return np.asarray(self._weight * moved)


AT_ONCE = 32
"""Rows that are evaluated at once, chosen so that their data fit in a processor's cache."""


def _features_of(head: Head) -> Iterator[int]:
    """Features that a head asks for."""
    yield from head.line.feature
    for tree in head.trees:
        yield from (feature for feature in tree.feature if feature != LEAF)


def probability(logit: float) -> float:
    """Return the logistic function of ``logit``, which may be infinite."""
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0.0 else 1.0 - 1.0 / (1.0 + math.exp(min(logit, 700.0)))


# The model as a file: JSON that is checked through and through, so that no file can make a wrong number or a loop.
#
# Format ``rlwatch-hazard/2``: ``features``; ``hazards``, a list of three heads; ``limits``, a head a type of onset;
# ``gains``; ``profiles``; ``meta``; ``sparse``, if any, all of the same of the model of sparse logs. A head has
# ``base``, ``slope``, ``offset``, ``trees`` and ``line``; a tree the columns ``feature`` (-1: a leaf), ``threshold``,
# ``missing_left``, ``left``, ``right``, ``value``; a line the columns ``feature``, ``spread``, ``weight``.

FORMAT = "rlwatch-hazard/2"
_TREE_COLUMNS = ("feature", "threshold", "missing_left", "left", "right", "value")
_LINE_COLUMNS = ("feature", "spread", "weight")
LEAST_SPREAD = 1e-12
_WHOLE = ("feature", "missing_left", "left", "right")
HAZARDS = 3
MOST_NODES = 127
"""Most nodes of a tree: it then has 64 leaves, each of which is one bit of a number."""


class _WrongError(ValueError):
    """Contents that are wrong, and where."""


SHIPPED = "the shipped forecasting model"
FOLDER = Path(__file__).with_name("shipped")
"""The shipped model, its outline, and what it is worth on each kind of log."""


@cache
def _shipped_bytes() -> bytes:
    return (FOLDER / "hazard.json").read_bytes()


def _shipped_hash() -> str:
    return (FOLDER / "hazard.sha256").read_text().split()[0]


def shipped_model() -> Model:
    """Return the model that comes with rlwatch. Raises ``ConfigError`` if its file was changed."""
    return parse_model(_shipped_bytes(), sha256=_shipped_hash(), name=SHIPPED)


def shipped_outline() -> Outline:
    """Return the outline of the model that comes with rlwatch, from a file that is a fiftieth as long.

    Most runs get no probabilities, so they need no more. The bytes of the model are read and checked here, so that
    :func:`shipped_model` opens no large file in the middle of a run. Raises ``ConfigError`` if either file was changed.
    """
    pinned = _pinned(_shipped_bytes(), _shipped_hash(), SHIPPED)
    try:
        raw = _mapping(json.loads((FOLDER / "outline.json").read_bytes()), "the file")
        if raw.get("sha256") != pinned:
            raise _WrongError("it belongs to another model")
        sparse = Outline(**_read_outline(raw["sparse"])) if "sparse" in raw else None
        return Outline(**_read_outline(raw), sparse=sparse)
    except (_WrongError, ValueError) as error:
        raise ConfigError(f"the outline of {SHIPPED} is not valid: {error}; restore it") from None


def load(path: str | os.PathLike[str], *, sha256: str | None = None) -> Model:
    """Read a model that ``rlwatch forecast train`` wrote.

    Parameters
    ----------
    path
        The JSON file. A file of the same name that ends in ``.sha256`` pins its contents.
    sha256
        Hash that the contents must have, in place of the one in the ``.sha256`` file.

    Raises
    ------
    ConfigError
        If there is no such file, its hash is another one, or its contents are not valid.
    """
    file = Path(path)
    pin = file.with_suffix(".sha256")
    try:
        data = file.read_bytes()
        pinned = sha256 or (pin.read_text().split() or [""])[0] if sha256 or pin.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the forecasting model {file} cannot be read: {error}; give the path of a model file"
        ) from None
    return parse_model(data, sha256=pinned, name=f"the forecasting model {file}")


def parse_model(data: bytes, *, sha256: str | None = None, name: str = "the forecasting model") -> Model:
    """Read a model from the bytes of its file, and check them against ``sha256`` if given.

    ``name`` is used in messages. Raises ``ConfigError`` if the hash differs or the contents are not valid.
    """
    if sha256 is not None:
        _pinned(data, sha256, name)
    try:
        return _read_model(json.loads(data))
    except (_WrongError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not a valid {FORMAT} file: {error}; restore it or train it anew") from None


def _pinned(data: bytes, sha256: str, name: str) -> str:
    """Return the hash of ``data``. Raises ``ConfigError`` if it is not ``sha256``."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"{name} has the hash {found}, and {sha256} was expected: the file was changed; restore it or train it anew"
        )
    return found


def write_model(model: Model, path: str | os.PathLike[str]) -> str:
    """Write a model to ``path``, and its hash to a file ending in ``.sha256``; return the hash.

    Both files appear whole or not at all.
    """
    file = Path(path)
    data = json.dumps(_plain(model), separators=(",", ":"), allow_nan=False).encode() + b"\n"
    digest = hashlib.sha256(data).hexdigest()
    parse_model(data, name=f"the model to be written to {file}")
    for target, content in ((file, data), (file.with_suffix(".sha256"), f"{digest}\n".encode())):
        temporary = target.with_name(target.name + ".part")
        temporary.write_bytes(content)
        temporary.replace(target)
    return digest


def outline_file(model: Model, sha256: str) -> str:
    """Return the text of ``shipped/outline.json`` for a model whose file has the hash ``sha256``."""
    sparse = {} if model.sparse is None else {"sparse": _plain_outline(model.sparse)}
    return json.dumps({"sha256": sha256, **_plain_outline(model), **sparse}, separators=(",", ":")) + "\n"


def _read_outline(raw: JSON) -> dict[str, Any]:
    """Read what a model and its outline have in common; return it by the names of the fields."""
    top = _mapping(raw, "the file")
    features = tuple(_texts(top.get("features"), "features"))
    if unknown := sorted(set(features) - set(FEATURES)):
        raise _WrongError(f"this version computes no feature {unknown[0]!r}")
    profiles = tuple(_read_profile(p, f"profiles[{i}]") for i, p in enumerate(_list(top.get("profiles"), "profiles")))
    if not profiles:
        raise _WrongError("it has no profiles, so no thresholds")
    gains = _mapping(top.get("gains"), "gains").items()
    return {
        "features": features,
        "gains": {name: _number(value, f"gains.{name}", low=0.0) for name, value in gains},
        "profiles": profiles,
    }


def _read_model(raw: JSON) -> Model:
    top = _mapping(raw, "the file")
    if top.get("format") != FORMAT:
        raise _WrongError(f"its format is {top.get('format')!r}")
    outline = _read_outline(top)
    features, profiles = outline["features"], outline["profiles"]
    hazards = [
        _read_head(head, len(features), f"hazards[{i}]") for i, head in enumerate(_list(top.get("hazards"), "hazards"))
    ]
    if len(hazards) != HAZARDS:
        raise _WrongError(f"it has {len(hazards)} hazards instead of {HAZARDS}")
    limits = _mapping(top.get("limits"), "limits")
    if unknown := sorted(set(limits) - set(LIMITS)):
        raise _WrongError(f"there is no limit {unknown[0]!r}")
    sparse = None if top.get("sparse") is None else _read_sparse(top["sparse"])
    if len({frozenset(profile.thresholds) for profile in (*profiles, *(sparse.profiles if sparse else ()))}) > 1:
        raise _WrongError("its profiles have thresholds for different budgets")
    return Model(
        **outline,
        hazards=(hazards[0], hazards[1], hazards[2]),
        limits={kind: _read_head(head, len(features), f"limits.{kind}") for kind, head in limits.items()},
        meta=_mapping(top.get("meta", {}), "meta"),
        sparse=sparse,
    )


def _read_sparse(raw: JSON) -> Model:
    try:
        found = _read_model(raw)
    except _WrongError as error:
        raise _WrongError(f"of its model of sparse logs: {error}") from None
    if found.sparse is not None:
        raise _WrongError("its model of sparse logs has one of its own")
    return found


def _read_head(raw: JSON, features: int, where: str) -> Head:
    head = _mapping(raw, where)
    trees = _list(head.get("trees"), f"{where}.trees")
    base, slope, offset = (_number(head.get(key), f"{where}.{key}") for key in ("base", "slope", "offset"))
    grown = tuple(_read_tree(t, features, f"{where}.trees[{i}]") for i, t in enumerate(trees))
    return Head(base, grown, slope, offset, _read_line(head.get("line"), features, f"{where}.line"))


def _read_line(raw: JSON, features: int, where: str) -> LinearScore:
    table = _mapping(raw, where)
    columns = {name: _list(table.get(name), f"{where}.{name}") for name in _LINE_COLUMNS}
    if len({len(column) for column in columns.values()}) != 1:
        raise _WrongError(f"the columns of {where} have {sorted({len(c) for c in columns.values()})} entries")
    for feature in columns["feature"]:
        if not 0 <= _number(feature, f"{where}.feature", whole=True) < features:
            raise _WrongError(f"{where} asks for feature {feature}, and there are {features}")
    for spread in columns["spread"]:
        _number(spread, f"{where}.spread", low=LEAST_SPREAD)
    for weight in columns["weight"]:
        _number(weight, f"{where}.weight")
    return LinearScore(**{name: tuple(column) for name, column in columns.items()})


def _read_tree(raw: JSON, features: int, where: str) -> Tree:
    table = _mapping(raw, where)
    columns = {name: _list(table.get(name), f"{where}.{name}") for name in _TREE_COLUMNS}
    count = len(columns["feature"])
    if not 0 < count <= MOST_NODES or any(len(column) != count for column in columns.values()):
        raise _WrongError(f"the columns of {where} have {sorted({len(c) for c in columns.values()})} entries")
    for name, column in columns.items():
        kinds = {int} if name in _WHOLE else {int, float}
        # There are a hundred thousand numbers, so they are checked one by one only for the error message.
        if not set(map(type, column)) <= kinds or not all(map(math.isfinite, column)):
            for value in column:
                _number(value, f"{where}.{name}", whole=name in _WHOLE)
    _joined(columns, features, where)
    return Tree(**{name: tuple(column) for name, column in columns.items()})


def _joined(columns: Mapping[str, Sequence[int]], features: int, where: str) -> None:
    """Every node but the root is the child of exactly one node before it: a tree, and every walk ends."""
    children: list[int] = []
    for node, feature in enumerate(columns["feature"]):
        if feature == LEAF:
            continue
        if not 0 <= feature < features:
            raise _WrongError(f"node {node} of {where} asks for feature {feature}, and there are {features}")
        pair = (columns["left"][node], columns["right"][node])
        if not all(node < child < len(columns["feature"]) for child in pair):
            raise _WrongError(f"node {node} of {where} has the children {pair}")
        if columns["missing_left"][node] not in (0, 1):
            raise _WrongError(f"missing_left of node {node} of {where} is {columns['missing_left'][node]}")
        children += pair
    if sorted(children) != list(range(1, len(columns["feature"]))):
        raise _WrongError(f"{where} is no tree: a node has two parents or none")


def _read_profile(raw: JSON, where: str) -> Profile:
    table = _mapping(raw, where)
    signals = frozenset(_texts(table.get("signals"), f"{where}.signals"))
    if unknown := sorted(signals - set(BY_SIGNAL)):
        raise _WrongError(f"{where}: this version knows no signal {unknown[0]!r}")
    parts = {
        key: {
            budget: _number(v, f"{where}.{key}", low=1e-6)
            for budget, v in _mapping(table.get(key), f"{where}.{key}").items()
        }
        for key in ("thresholds", "static")
    }
    if not parts["thresholds"] or set(parts["thresholds"]) != set(parts["static"]):
        raise _WrongError(f"{where} must have a threshold of both kinds for the same budgets")
    (name,) = _texts([table.get("name")], f"{where}.name")
    return Profile(name, signals, parts["thresholds"], parts["static"])


def _mapping(value: JSON, where: str) -> Mapping[str, JSON]:
    if not isinstance(value, dict):
        raise _WrongError(f"{where} is {type(value).__name__} instead of an object")
    return value


def _list(value: JSON, where: str) -> Sequence[JSON]:
    if not isinstance(value, list):
        raise _WrongError(f"{where} is {type(value).__name__} instead of a list")
    return value


def _texts(value: JSON, where: str) -> list[str]:
    items = _list(value, where)
    if not all(isinstance(item, str) for item in items) or len(set(items)) != len(items):
        raise _WrongError(f"{where} must be different texts")
    return list(items)


def _number(value: JSON, where: str, *, whole: bool = False, low: float = -math.inf) -> float:
    good = isinstance(value, int) if whole else isinstance(value, int | float)
    if not good or isinstance(value, bool) or not math.isfinite(value) or value < low:
        raise _WrongError(f"{where} holds {value!r}")
    return float(value)


def _plain(model: Model) -> dict[str, JSON]:
    sparse = {} if model.sparse is None else {"sparse": _plain(model.sparse)}
    outline = _plain_outline(model)
    return {
        "format": FORMAT,
        "features": outline["features"],
        "hazards": [_plain_head(head) for head in model.hazards],
        "limits": {kind: _plain_head(head) for kind, head in model.limits.items()},
        "gains": outline["gains"],
        "profiles": outline["profiles"],
        "meta": dict(model.meta),
        **sparse,
    }


def _plain_outline(model: Outline) -> dict[str, JSON]:
    return {
        "features": list(model.features),
        "gains": dict(model.gains),
        "profiles": [
            {"name": p.name, "signals": sorted(p.signals), "thresholds": dict(p.thresholds), "static": dict(p.static)}
            for p in model.profiles
        ],
    }


def _plain_head(head: Head) -> dict[str, JSON]:
    trees = [{name: list(getattr(tree, name)) for name in _TREE_COLUMNS} for tree in head.trees]
    line = {name: list(getattr(head.line, name)) for name in _LINE_COLUMNS}
    return {"base": head.base, "slope": head.slope, "offset": head.offset, "trees": trees, "line": line}
