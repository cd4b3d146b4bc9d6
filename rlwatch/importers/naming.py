"""Roles that a user gives names of a log (``--map reward=my_name``), where no rule can know what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rlwatch.errors import ConfigError
from rlwatch.metrics import BY_NAME, ROLE_NAMES, metric_called
from rlwatch.wording import nearest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Naming:
    """Name in the log -> canonical metric. ``asked``: names that the log must have, since they were given for it."""

    metrics: Mapping[str, str] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()

    def renamed(self, row: Mapping[str, T]) -> Mapping[str, T]:
        """A row under the names that its metrics are given; of two for one metric the first counts."""
        given = [name for name in row if name in self.metrics]
        if not given:
            return row
        named: dict[str, T] = {}
        for name in given:
            named.setdefault(self.metrics[name], row[name])
        return {**{name: value for name, value in row.items() if name not in self.metrics}, **named}

    def missing(self, names: Iterable[str]) -> str:
        """The problem with a log that has ``names``, where one that was asked for is not among them; else empty."""
        there = sorted(names)
        lacking = sorted(self.asked.difference(there))
        if not lacking:
            return ""
        close = nearest(lacking[0], there, 3, 0.6)
        hint = (
            f"did you mean {' or '.join(map(repr, close))}?" if close else f"it has {', '.join(map(repr, there[:8]))}"
        )
        return f"has no metric {lacking[0]!r}, which --map gives the role {self.metrics[lacking[0]]!r}; {hint}"


NONE = Naming()


def naming_of(asked: Sequence[str] = (), configured: Mapping[str, Sequence[str]] | None = None) -> Naming:
    """The naming of ``ROLE=NAME`` pairs, and of what a configuration gives each role besides.

    Raises ``ConfigError`` for a pair that is none, or a role that is none.

    >>> naming_of(["reward=my_score"]).metrics
    {'my_score': 'reward/mean'}
    """
    metrics = {name: _metric(role, "[map]") for role, names in (configured or {}).items() for name in names}
    mine: dict[str, str] = {}
    for pair in asked:
        role, equals, name = pair.partition("=")
        if not equals or not role.strip() or not name.strip():
            raise ConfigError(f"--map {pair}: give a role and a name of the log, as in --map {ROLE_NAMES[0]}=my_name")
        mine[name.strip()] = _metric(role.strip(), f"--map {pair}")
    return Naming({**metrics, **mine}, frozenset(mine))


def _metric(role: str, where: str) -> str:
    metric = metric_called(role)
    if not metric:
        near = nearest(role, [*ROLE_NAMES, *BY_NAME], 2, 0.6)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        problem = f"{where}: {role!r} is no role of a metric; give one of {', '.join(ROLE_NAMES)}, or a canonical name"
        raise ConfigError(f"{problem} (rlwatch names lists them){hint}")
    return metric
