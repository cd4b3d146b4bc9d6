"""Map all metric names of a run together: of several names for one metric the closest counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import NamedTuple

from rlwatch.metrics.reading import BY_NAME, OF_NO_POLICY, PROXY, metric_of, resolve
from rlwatch.metrics.rows import Family
from rlwatch.metrics.unjudged import unjudged
from rlwatch.metrics.words import HELD_OUT, NO_REWARDS, ONLY_REWARD, only_reward, stems

REWARD = "reward/mean"
_ONLY = PROXY + 1 + ONLY_REWARD
MOST_PLANS = 256
_OF_A_POLICY = frozenset({Family.REWARD, Family.EXPLORATION, Family.TRUST_REGION, Family.CRITIC, Family.MISMATCH})
_OF_NO_POLICY = frozenset({"policy/kl_coef", "policy/vocab_size", "val/score"})
"""Metrics of these families that other trainings have, too."""


class RoleReading(NamedTuple):
    """Canonical metric that a name is read as, and how closely it fits (see :class:`~rlwatch.metrics.Reading`)."""

    metric: str
    closeness: int


class _Plan(NamedTuple):
    """Source names of a row's metrics: certain ones, and guesses, which the values may contradict."""

    certain: dict[str, str]
    """Canonical metric -> its name in the row."""
    guesses: tuple[tuple[str, tuple[str, ...]], ...]
    values: Callable[[Mapping[str, float]], tuple[float, ...]]
    """Returns the values of the certain metrics in a row, in their order."""


class RowReader:
    """Renames the rows of one run to canonical metric names, given all names that the run has logged so far.

    If the run has a closer name for a metric, a guess does not replace it in rows that lack the closer name: an
    accuracy that is measured before the training is not its reward. ``source``: the trainer, empty if unknown.
    ``names``: names known beforehand.

    >>> reader = RowReader()
    >>> reader.canonicalise({"accuracy": 0.3})[1], reader.canonicalise({"mean_reward": 0.5})[1]
    ({'reward/mean': 'accuracy'}, {'reward/mean': 'mean_reward'})
    >>> reader.canonicalise({"accuracy": 0.3})[1]
    {}
    """

    def __init__(self, source: str = "", names: Iterable[str] = ()) -> None:
        self._source = source
        self._seen: set[str] = set()
        self._own: dict[str, RoleReading] = {}
        """Reading of each name by itself."""
        self._rewards: list[str] = []
        """Names that contain "reward"."""
        self._lone: str | None = None
        self._accuracies: set[str] = set()
        """Names that count as a reward only because they are an accuracy."""
        self._loss = self._policy = False
        """True once a loss, and a metric that only a policy has, was logged."""
        self._closest: dict[str, int] = {}
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._newest: tuple[list[str], _Plan] | None = None
        """Names of the newest row, with its plan."""
        self._learn(names)

    def read(self, name: str) -> RoleReading | None:
        """Return the metric that a logged name means, even if another name is closer; None if unknown.

        In a run with a loss and without any metric of a policy, an accuracy is that of labels or preference pairs.
        """
        if name in self._accuracies and self._loss and not self._policy:
            return None
        return RoleReading(REWARD, _ONLY) if name == self._lone else self._own.get(name)

    def gives_way(self, name: str) -> bool:
        """Return True if the name is only a guess at a metric for which the run has a closer name."""
        read = self.read(name)
        return read is not None and read.closeness > max(PROXY, self._closest[read.metric])

    def canonicalise(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
        """Return the values of a row by canonical metric name, and the source name of each canonical name."""
        newest, given = self._newest, list(metrics)
        if newest is None or newest[0] != given:
            newest = self._newest = given, self._plan(tuple(given))
        plan = newest[1]
        origin = plan.certain.copy()
        values = dict(zip(plan.certain, plan.values(metrics), strict=True))
        for metric, candidates in plan.guesses:
            for name in candidates:
                if _in_range(metric, metrics[name]):
                    values[metric], origin[metric] = metrics[name], name
                    break
        return values, origin

    def _plan(self, names: tuple[str, ...]) -> _Plan:
        """Return the plan for a row with these names, which may be new."""
        plan = self._plans.get(names)
        if plan is None:
            if not self._seen.issuperset(names):
                self._learn(names)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[names] = self._planned(names)
        return plan

    def _learn(self, names: Iterable[str]) -> None:
        self._plans.clear()
        fresh = [name for name in names if name not in self._seen]
        self._seen.update(fresh)
        rewards = [name for name in fresh if "reward" in stems(name)]
        self._rewards += rewards
        for name in fresh:
            own = _read(name, self._source)
            self._loss = self._loss or "loss" in stems(name)
            if own is not None:
                if own.metric == REWARD and own.closeness > PROXY and "accuracy" in stems(name):
                    self._accuracies.add(name)
                elif not self._policy:
                    self._policy = _of_a_policy(own.metric)
                self._own[name] = own
                self._closest[own.metric] = min(own.closeness, self._closest.get(own.metric, own.closeness))
        if self._closest.get(REWARD, _ONLY) < _ONLY:
            self._lone = None
        elif rewards and not self._source.startswith(OF_NO_POLICY):
            lone = only_reward(self._rewards)
            read = None if lone is None else self._own.get(lone)
            self._lone = lone if read is None or read.metric.startswith("reward/part/") else None
            if self._lone is not None:
                self._closest[REWARD] = _ONLY

    def _planned(self, names: tuple[str, ...]) -> _Plan:
        found: dict[str, list[tuple[int, str]]] = {}
        for name in names:
            read = self.read(name)
            if read is not None and not self.gives_way(name):
                found.setdefault(read.metric, []).append((read.closeness, name))
        certain, guesses = [], []
        for metric, candidates in found.items():
            candidates.sort(key=lambda pair: pair[0])
            if candidates[0][0] <= PROXY:
                certain.append((metric, candidates[0][1]))
            else:
                guesses.append((metric, tuple(name for _, name in candidates)))
        return _Plan(dict(certain), tuple(guesses), _getter([name for _, name in certain]))


def _getter(names: Sequence[str]) -> Callable[[Mapping[str, float]], tuple[float, ...]]:
    """Return a function that returns the values of the metrics ``names`` of a row."""
    return itemgetter(*names) if len(names) > 1 else partial(_values, tuple(names))


def _values(names: Sequence[str], row: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(row[name] for name in names)


@lru_cache(maxsize=4096)
def _read(name: str, source: str) -> RoleReading | None:
    """Return the reading of a name, also of a member of an open family; None if unknown."""
    reading = resolve(name, source)
    if reading is not None:
        return RoleReading(reading.metric.name, reading.closeness)
    return None if metric_of(name) is None else RoleReading(name, 0)


def _of_a_policy(name: str) -> bool:
    """True for a metric that only a run that trains a policy has."""
    metric = metric_of(name)
    of_it = metric is not None and (metric.family in _OF_A_POLICY or name.startswith("len/"))
    return of_it and name not in _OF_NO_POLICY


def _in_range(name: str, value: float) -> bool:
    """True if the metric can have the value; values that are not finite are always possible."""
    metric = BY_NAME.get(name)
    if metric is None:
        return True
    low, high = -math.inf if metric.low is None else metric.low, math.inf if metric.high is None else metric.high
    return not math.isfinite(value) or low <= value <= high


@lru_cache(maxsize=MOST_PLANS)
def _reader(names: tuple[str, ...], source: str) -> RowReader:
    return RowReader(source, names)


def canonicalise(metrics: Mapping[str, float], source: str = "") -> tuple[dict[str, float], dict[str, str]]:
    """Rename the metrics of a single row to canonical names.

    If several names mean one metric, the closest wins (canonical, same, proxy, guess), then the first. A guess whose
    value lies outside the metric's range (a percentage for a fraction) is dropped. Unknown names are left out; members
    of open families (layers, tasks) pass through.

    Parameters
    ----------
    metrics
        Value of each source name.
    source
        The trainer; empty if unknown.

    Returns
    -------
    values
        Value of each canonical name.
    origin
        Source name of each canonical name.
    """
    return _reader(tuple(metrics), source).canonicalise(metrics)


def shadowed(names: Iterable[str], source: str = "") -> set[str]:
    """Return those of a run's ``names`` that are guesses at a metric for which the run has a closer name.

    >>> shadowed(["accuracy", "mean_reward"])
    {'accuracy'}
    """
    names = tuple(sorted(names))
    reader = _reader(names, source)
    return {name for name in names if reader.gives_way(name)}


def read_as(name: str, source: str = "") -> str:
    """Return the canonical metric that a run of ``source`` logs as ``name``; empty if unknown.

    >>> read_as("rewards/exact/mean", "trl"), read_as("len/by_task/gsm8k"), read_as("my_own")
    ('reward/part/exact', 'len/by_task/gsm8k', '')
    """
    read = _read(name, source)
    return "" if read is None else read.metric


def known(names: Iterable[str], source: str = "") -> set[str]:
    """Return the canonical metrics that a run's ``names`` cover, including members of open families.

    >>> sorted(known(["wordle_reward", "kl", "grad_layer/0"]))
    ['grad_layer/0', 'policy/kl_ref', 'reward/mean']
    """
    names = tuple(sorted(names))
    reader = _reader(names, source)
    return {read.metric for name in names if (read := reader.read(name)) is not None}


def unread(names: Iterable[str], source: str = "") -> list[str]:
    """Return the metric ``names`` of a run that rlwatch gives no meaning, sorted.

    They are neither in the metric table nor in an open family. ``source``: the trainer that logged them; empty if
    unknown.
    """
    names = tuple(sorted(set(names)))
    reader = _reader(names, source)
    return [name for name in names if reader.read(name) is None]


# The reading of each name, with its reason.

_WHY = {0: "its canonical name", 1: "a trainer's name for it", PROXY: "a trainer's name for an approximation of it"}
_OF_LABELS = "accuracy on labels or preference pairs"
_BY_WORDS, _ALONE = "guessed from its name", "the only reward of the run"


class Taken(NamedTuple):
    """The use of one metric name of a run's log: the canonical metric that it is read as, or why it is not used.

    Attributes
    ----------
    name
        Name in the log.
    metric
        Canonical metric that it is read as; empty if the name is not used.
    why
        Reason for reading it so, or for not using it.
    guess
        True if the name was read by its words, not as a trainer's name.
    """

    name: str
    metric: str
    why: str
    guess: bool = False


def taken(names: Iterable[str], source: str = "") -> list[Taken]:
    """Return how each of a run's metric names is used, used ones first.

    >>> for each in taken(["acc", "mean_reward", "kl_coef"]): print(*each[:3], sep=" | ")
    mean_reward | reward/mean | guessed from its name
    acc |  | superseded by mean_reward, a closer match for reward/mean
    kl_coef |  | setting
    """
    names = tuple(sorted(names))
    reader = _reader(names, source)
    _, origin = reader.canonicalise(dict.fromkeys(names, math.nan))
    readings = [_taken(name, source, reader.read(name), origin) for name in names]
    return sorted(readings, key=lambda each: (not each.metric, each.name))


def _taken(name: str, source: str, read: RoleReading | None, origin: Mapping[str, str]) -> Taken:
    if read is None:
        labels = _read(name, source) is not None
        reason = _OF_LABELS if labels else unjudged(name, whole=REWARD in origin)
        return Taken(name, "", reason or "unknown, not used")
    chosen = origin.get(read.metric, name)
    if chosen != name:
        return Taken(name, "", f"superseded by {chosen}, a closer match for {read.metric}")
    why = _WHY.get(read.closeness) or (_ALONE if read.closeness == _ONLY else _BY_WORDS)
    return Taken(name, read.metric, why, read.closeness > PROXY)


_REWARD_WORDS = frozenset(
    {"reward", "return", "score", "accuracy", "success", "solve", "win", "pass", "correct", "r", "match"}
)


def like_rewards(names: Iterable[str]) -> list[str]:
    """Return those of a run's metric ``names`` that may be its reward, the likeliest first.

    An accuracy of single tokens is left out: it belongs to a supervised loss.

    >>> like_rewards(["loss", "defend_reward", "attack_reward", "reward_std", "eval_reward", "mean_token_accuracy"])
    ['attack_reward', 'defend_reward']
    """
    excluded = NO_REWARDS | {HELD_OUT, "token"}
    candidates = [name for name in names if stems(name) & _REWARD_WORDS and not stems(name) & excluded]
    return sorted(candidates, key=lambda name: ("reward" not in stems(name), name))


# Roles, as people call them.

ROLE_NAMES = ("reward", "entropy", "kl", "length", "gradient", "loss")


def metric_called(role: str) -> str:
    """Return the canonical metric that a plain word (``kl``) or a canonical name means; empty if there is none.

    >>> metric_called("kl"), metric_called("gradient"), metric_called("policy/entropy"), metric_called("apples")
    ('policy/kl_ref', 'optim/grad_norm', 'policy/entropy', '')
    """
    return read_as(role)
