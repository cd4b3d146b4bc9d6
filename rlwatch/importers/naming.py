"""Metrics that a user assigns to names in a log (``--map reward=my_name``), whose meaning rlwatch does not know."""

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
    """Metrics that the user assigned to names in a log.

    Attributes
    ----------
    metrics
        Name in the log -> canonical metric.
    required
        Names that the log must contain, because the user gave them for this log.
    """

    metrics: Mapping[str, str] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    def renamed(self, row: Mapping[str, T]) -> Mapping[str, T]:
        """Return ``row`` (name -> value) under canonical names; of two names for one metric the first counts."""
        given = [name for name in row if name in self.metrics]
        if not given:
            return row
        named: dict[str, T] = {}
        for name in given:
            named.setdefault(self.metrics[name], row[name])
        return {**{name: value for name, value in row.items() if name not in self.metrics}, **named}

    def missing(self, names: Iterable[str]) -> str:
        """Return an error message if a required name is not among ``names``, those of the log; empty if all are."""
        there = sorted(names)
        lacking = sorted(self.required.difference(there))
        if not lacking:
            return ""
        close = nearest(lacking[0], there, 3, 0.6)
        hint = (
            f"did you mean {' or '.join(map(repr, close))}?" if close else f"it has {', '.join(map(repr, there[:8]))}"
        )
        return f"has no metric {lacking[0]!r}, which --map gives the role {self.metrics[lacking[0]]!r}; {hint}"


NONE = Naming()


def naming_of(pairs: Sequence[str] = (), configured: Mapping[str, Sequence[str]] | None = None) -> Naming:
    """Return the assignment of metrics to names in a log.

    ``pairs``: texts ``ROLE=NAME``. ``configured``: role -> names, from the configuration. Raises ``ConfigError`` for a
    malformed pair or an unknown role.

    >>> naming_of(["reward=my_score"]).metrics
    {'my_score': 'reward/mean'}
    """
    metrics = {name: _metric(role, "[map]") for role, names in (configured or {}).items() for name in names}
    mine: dict[str, str] = {}
    for pair in pairs:
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
