"""The row of the metric table that describes one metric, and short constructors for rows and aliases."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    """Families of failures and of the metrics that show them, in the order of every page and document."""

    REWARD = "Reward"
    EXPLORATION = "Exploration"
    TRUST_REGION = "Trust region"
    OPTIMISATION = "Optimisation"
    CRITIC = "Critic"
    MISMATCH = "Engine mismatch"
    ROLLOUTS = "Rollouts"
    ENGINE = "Engine"
    SYSTEM = "System"


class Relation(StrEnum):
    """Relation of the quantity that a trainer logs under a name to the metric in the table."""

    SAME = "same"
    PROXY = "proxy"
    OTHER = "other"
    """The same name for another quantity: in this source the metric is not read from it."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A trainer's name for a metric of the table.

    ``source`` is a prefix of the run's source, such as ``verl`` (``""``: any trainer). ``relation``: whether it is the
    same quantity. ``estimator``, ``aggregator``: how the trainer computes it, if that differs from the table.
    """

    name: str
    source: str = ""
    relation: Relation = Relation.SAME
    estimator: str = ""
    aggregator: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the table, by its canonical name. ``low``/``high`` bound its range (inclusive; None: unbounded).

    Parameters
    ----------
    estimator, aggregator
        How the quantity is estimated, and how it is aggregated over tokens, responses or engines.
    aliases
        Names that trainers log it under.
    everyday
        Names in custom tables and training loops, the plainest first.
    panel
        Position among the charts of its family, 1 first; the first few are shown, the others one click away. None:
        after these, in the order of the table.
    vital
        True if it is shown even when it never changes: a reward stuck at 0 is news.
    """

    name: str
    family: Family
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    estimator: str = ""
    aggregator: str = "token mean"
    aliases: tuple[Alias, ...] = ()
    everyday: tuple[str, ...] = ()
    panel: int | None = None
    vital: bool = False

    @property
    def span(self) -> str:
        """Range of the metric in words; empty if unbounded.

        >>> fraction("x", Family.REWARD, "share").span
        '0 to 1'
        """
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        if self.low is not None:
            return f">= {self.low:g}"
        return "" if self.high is None else f"<= {self.high:g}"

    @property
    def called(self) -> str:
        """Trainers' names of the metric in words, proxies with a tilde: ``any: entropy; verl: actor/entropy``."""
        by_source: dict[str, list[str]] = {}
        for alias in self.aliases:
            if alias.relation is not Relation.OTHER:
                mark = "~" if alias.relation is Relation.PROXY else ""
                by_source.setdefault(alias.source, []).append(mark + alias.name)
        return "; ".join(f"{source or 'any'}: {', '.join(found)}" for source, found in sorted(by_source.items()))


def same(name: str, source: str = "", estimator: str = "", aggregator: str = "") -> Alias:
    """Return an alias of a metric: the trainer ``source`` (empty: any) logs this very quantity under ``name``.

    ``estimator``, ``aggregator``: how that trainer estimates and averages it, if it differs.
    """
    return Alias(name, source, Relation.SAME, estimator, aggregator)


def proxy(name: str, source: str = "", estimator: str = "", aggregator: str = "") -> Alias:
    """Return an alias of a metric: the trainer ``source`` (empty: any) logs an approximation of the metric under
    ``name``.

    ``estimator``, ``aggregator``: how that trainer estimates and averages it, if it differs.
    """
    return Alias(name, source, Relation.PROXY, estimator, aggregator)


def other(name: str, source: str) -> Alias:
    """Return an alias: ``source`` uses ``name`` for another quantity than all other trainers do."""
    return Alias(name, source, Relation.OTHER)


def fraction(
    name: str,
    family: Family,
    meaning: str,
    *,
    aggregator: str = "token fraction",
    aliases: tuple[Alias, ...] = (),
    everyday: tuple[str, ...] = (),
    panel: int | None = None,
) -> Metric:
    """Return a row of the metric table for a metric within [0, 1]; the arguments are attributes of :class:`Metric`."""
    return Metric(name, family, "fraction", meaning, 0.0, 1.0, "", aggregator, aliases, everyday, panel)


def nats(
    name: str,
    family: Family,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    estimator: str = "",
    aggregator: str = "token mean",
    aliases: tuple[Alias, ...] = (),
    everyday: tuple[str, ...] = (),
    panel: int | None = None,
    vital: bool = False,
) -> Metric:
    """Return a row of the metric table for a metric in nats per token; the arguments are attributes of
    :class:`Metric`.
    """
    return Metric(
        name, family, "nats/token", meaning, low, high, estimator, aggregator, aliases, everyday, panel, vital
    )
