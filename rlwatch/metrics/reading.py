"""Map trainers' and everyday metric names to canonical metrics, with the closeness of each match."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from rlwatch.metrics.rows import Alias, Family, Metric, Relation
from rlwatch.metrics.table import OF_A_DATASET, OPEN, TABLE
from rlwatch.metrics.words import role_of, words_of


def _everyday_index() -> dict[frozenset[str], tuple[str, int]]:
    return {words_of(name): (metric.name, i) for metric in TABLE for i, name in enumerate(metric.everyday)}


_BY_WORDS = _everyday_index()


def everyday(name: str) -> tuple[str, int] | None:
    """Return the canonical metric that an everyday ``name`` most likely means, and its distance (0: closest); None if
    unknown.

    >>> everyday("MeanReward"), everyday("resp_len"), everyday("clipped")
    (('reward/mean', 0), ('len/mean', 1), None)
    """
    return _BY_WORDS.get(words_of(name)) or role_of(name)


# Reading a trainer's metric names: which canonical metric, and how closely.

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in TABLE}
LONGEST_NAME = 500
"""Most characters of a metric name; longer names are unknown."""
LAYER_PREFIX = "grad_layer/"
"""Prefix of gradient norms by layer: ``grad_layer/<layer>``."""
UPDATE_PREFIX = "update_layer/"
"""Prefix of relative changes of a layer's weights in one optimizer step: ``update_layer/<layer>``."""
WEIGHTS_PREFIX = "mismatch/weights_differ/"
"""Prefix of shares of a layer's elements that differ in the rollout engine: ``mismatch/weights_differ/<layer>``."""


def metric_of(name: str) -> Metric | None:
    """Return the table's row of a canonical metric name; None for any other name.

    Names may be members of open families, whose members a run names itself, such as its tasks.

    >>> metric_of("reward/by_task/gsm8k").name
    'reward/by_task/gsm8k'
    """
    row = BY_NAME.get(name)
    if row is not None:
        return row
    family = next((row for row in OPEN if name.startswith(row.name) and name != row.name), None)
    return None if family is None else replace(family, name=name)


def unit_of(name: str) -> str:
    """Return the unit of a canonical metric name, also of a member of an open family; empty if it has none or is
    unknown.

    >>> unit_of("reward/part/exact"), unit_of("len/by_task/gsm8k")
    ('', 'tokens')
    """
    row = metric_of(name)
    return "" if row is None else row.unit


def meaning_of(name: str) -> str:
    """Return the meaning of a canonical metric name, also of a member of an open family; empty if the name is
    unknown.
    """
    row = metric_of(name)
    return "" if row is None else row.meaning


@dataclass(frozen=True, slots=True)
class Reading:
    """The metric that a name in a log is mapped to, and how closely it fits.

    ``alias``: the trainer's name that matched; None for a canonical name or a guess. ``guess`` is 0 for a trainer's
    name, otherwise the distance of a match by words, from 1.
    """

    metric: Metric
    alias: Alias | None
    guess: int = 0

    @property
    def closeness(self) -> int:
        """Rank of the match, best first: 0 canonical, 1 same quantity, 2 approximation, from 3 guessed by words."""
        if self.guess:
            return 2 + self.guess
        if self.alias is None:
            return 0
        return 1 if self.alias.relation is Relation.SAME else 2


def _index() -> dict[str, list[tuple[Metric, Alias]]]:
    index: dict[str, list[tuple[Metric, Alias]]] = {}
    for metric in TABLE:
        for alias in metric.aliases:
            index.setdefault(alias.name, []).append((metric, alias))
    for family in OPEN:
        for alias in family.aliases:
            if "*" not in alias.name:
                member = replace(family, name=family.name + alias.name.rpartition("/")[2])
                index.setdefault(alias.name, []).append((member, alias))
    return index


_ALIASES = _index()
_NO_MEMBER = frozenset(
    {"mean", "std", "min", "max", "total", "total_reward", "chosen", "rejected", "margins", "accuracies"}
)
"""Parts of names for a statistic or a kind of pairs, which are no members of a family."""


def _patterns() -> list[tuple[re.Pattern[str], Metric, Alias]]:
    starred = [(family, alias) for family in OPEN for alias in family.aliases if "*" in alias.name]
    return [(re.compile(re.escape(alias.name).replace(r"\*", "([^/]+)")), family, alias) for family, alias in starred]


_PATTERNS = _patterns()


_PARTS = frozenset({"format", "accuracy", "answer", "correct", "correctness", "length", "reasoning", "style"})
"""Words that name a part of a reward in any custom loop."""


def _member(name: str, source: str) -> Reading | None:
    """Return the reading of a trainer's name for a member of an open family; None if there is none.

    If the trainer is unknown, a pattern of plain words (``*_reward``) matches only the words of ``_PARTS``:
    ``attack_reward`` and ``defend_reward`` belong to two policies, ``best_reward`` to another step.
    """
    for pattern, family, alias in _PATTERNS:
        found = pattern.fullmatch(name) if _matches(alias, source) else None
        if found is None or found[1] in _NO_MEMBER:
            continue
        if source or "/" in alias.name or found[1] in _PARTS:
            return Reading(replace(family, name=family.name + found[1]), alias)
    return None


_NO_LETTER = re.compile(r"[^a-z0-9]+")


def _flat(name: str) -> str:
    """Return a name as tables and databases without slashes write it: ``critic_score_mean``."""
    return _NO_LETTER.sub("_", name.lower())


def _flat_index() -> dict[str, list[tuple[Metric, Alias]]]:
    index: dict[str, list[tuple[Metric, Alias]]] = {}
    for name, found in _ALIASES.items():
        if "/" in name:
            index.setdefault(_flat(name), []).extend(found)
    return index


_FLAT = _flat_index()
_FLAT_CANONICAL = {_flat(metric.name): metric for metric in TABLE}
PROXY = 2
"""Closeness of a proxy; anything above is a guess."""
_TRACKER_PREFIXES = ("train/", "tap/")


def _matches(alias: Alias, source: str) -> bool:
    return not source or not alias.source or source.startswith(alias.source)


@lru_cache(maxsize=4096)
def resolve(name: str, source: str = "") -> Reading | None:
    """Return the metric that ``name`` means in a run of ``source`` (``"trl/grpo"``, ``"verl"``...); None if unknown.

    Dots count as slashes; names in which slashes became underscores are recognised, and the ``train/`` prefix of
    trackers is ignored. An alias of the given source wins over an alias of any trainer, also if it means something else
    there. A name that the trainer does not log is read by its words, since users log further metrics. If the trainer is
    unknown, plain words win over a name that only a single trainer uses.

    >>> resolve("actor/grad_norm", "verl").metric.name
    'optim/grad_norm'
    >>> resolve("kl", "trl/rloo").closeness
    2
    >>> resolve("critic_score_mean").metric.name
    'reward/mean'
    >>> resolve("rewards/format/mean").metric.name
    'reward/part/format'
    """
    if len(name) > LONGEST_NAME:
        return None
    slashed = name.replace(".", "/")
    if slashed in BY_NAME:
        return Reading(BY_NAME[slashed], None)
    found = _closest(_ALIASES.get(name) or _ALIASES.get(slashed) or (), source)
    plain = not source and found is not None and found[1].source and "/" not in slashed and everyday(name)
    if found is not None and not plain:
        metric, alias = found
        return None if alias.relation is Relation.OTHER else Reading(metric, alias)
    for prefix in _TRACKER_PREFIXES:
        if name.startswith(prefix):
            return resolve(name.removeprefix(prefix), source)
    ways = (_member(slashed, source), _guessed(name, source))
    return _written_flat(name, source) or next(filter(None, ways if source else ways[::-1]), None)


def _closest(candidates: Iterable[tuple[Metric, Alias]], source: str) -> tuple[Metric, Alias] | None:
    """Return the alias of this source, else of any trainer; if the source is unknown, the most general one."""
    matching = [(metric, alias) for metric, alias in candidates if _matches(alias, source)]
    if not matching:
        return None
    return max(matching, key=lambda pair: len(pair[1].source) if source else -len(pair[1].source))


def _written_flat(name: str, source: str) -> Reading | None:
    """Return the reading of a trainer's name with ``_`` for ``/``; None if it is ambiguous or unknown."""
    flat = _flat(name)
    candidates = [pair for pair in _FLAT.get(flat, ()) if _matches(pair[1], source)]
    if len({metric.name for metric, _ in candidates}) == 1:
        found = _closest(candidates, source)
        return None if found is None or found[1].relation is Relation.OTHER else Reading(*found)
    canonical = None if source else _FLAT_CANONICAL.get(flat)
    return None if canonical is None else Reading(canonical, Alias(name))


OF_NO_POLICY = (*OF_A_DATASET, "trl/reward", "trl/prm", "trl/cpo", "trl/orpo", "trl/bco")
"""Trainers of supervised or preference learning: their reward and entropy are not those of a policy."""


def _guessed(name: str, source: str) -> Reading | None:
    """Return the reading of a name by its words; None if another trainer uses the name for something else."""
    meant = None if metric_of(name) or source.startswith(OF_NO_POLICY) else everyday(name)
    if meant is None or (source and any(metric.name != meant[0] for metric, _ in _ALIASES.get(name, ()))):
        return None
    return Reading(BY_NAME[meant[0]], None, 1 + meant[1])


def family_of(name: str, source: str = "") -> Family:
    """Return the family of a metric name in a run of ``source``; unknown ones are guessed by prefix, else
    ``System``.
    """
    reading = resolve(name, source)
    if reading is not None:
        return reading.metric.family
    row = metric_of(name)
    if row is not None:
        return row.family
    for prefix, family in _FAMILY_PREFIXES:
        if name.startswith(prefix):
            return family
    return Family.SYSTEM


_FAMILY_PREFIXES: tuple[tuple[str, Family], ...] = (
    ("reward", Family.REWARD),
    ("critic/v", Family.CRITIC),
    ("critic/", Family.REWARD),
    ("val", Family.REWARD),
    ("eval", Family.REWARD),
    ("adv", Family.REWARD),
    ("policy/", Family.TRUST_REGION),
    ("ratio/", Family.TRUST_REGION),
    ("clip", Family.TRUST_REGION),
    ("actor/", Family.OPTIMISATION),
    ("optim/", Family.OPTIMISATION),
    ("loss", Family.OPTIMISATION),
    ("nonfinite/", Family.OPTIMISATION),
    ("mismatch/", Family.MISMATCH),
    ("rollout_corr/", Family.MISMATCH),
    ("sampling/", Family.MISMATCH),
    ("training/rollout", Family.MISMATCH),
    ("completion", Family.ROLLOUTS),
    ("response", Family.ROLLOUTS),
    ("prompt", Family.ROLLOUTS),
    ("engine/", Family.ENGINE),
    ("len/", Family.ROLLOUTS),
    ("text/", Family.ROLLOUTS),
    ("tool", Family.ROLLOUTS),
    ("num_turns", Family.ROLLOUTS),
)
