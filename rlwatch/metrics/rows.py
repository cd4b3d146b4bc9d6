"""A row of the metric table, and short words to write one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    """Failure families, in the order every page and document keeps."""

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
    """Relation of a trainer's number to the canonical one."""

    SAME = "same"
    PROXY = "proxy"
    OTHER = "other"
    """The same name for another quantity: in this source the metric is not read from it."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A trainer's name for a metric. ``source`` is a prefix of the run's source (``""``: any trainer)."""

    name: str
    source: str = ""
    relation: Relation = Relation.SAME
    estimator: str = ""
    aggregator: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One canonical metric. ``low``/``high`` bound its range (inclusive; None: unbounded).

    Parameters
    ----------
    aliases
        Names that trainers log it under.
    everyday
        Names in custom tables and loops, the plainest first.
    panel
        Place among the charts of its family, 1 first; the first few are shown, the others one click away. None: after
        these, in the order of the table.
    vital
        Shown even when it never changes: a reward stuck at 0 is news.
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
        """The range in words; empty if unbounded.

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
        """Trainers' names, proxies with a tilde: ``any: entropy; verl: actor/entropy``."""
        by_source: dict[str, list[str]] = {}
        for alias in self.aliases:
            if alias.relation is not Relation.OTHER:
                mark = "~" if alias.relation is Relation.PROXY else ""
                by_source.setdefault(alias.source, []).append(mark + alias.name)
        return "; ".join(f"{source or 'any'}: {', '.join(found)}" for source, found in sorted(by_source.items()))


def same(name: str, source: str = "", estimator: str = "", aggregator: str = "") -> Alias:
    """Return an alias for the same quantity."""
    return Alias(name, source, Relation.SAME, estimator, aggregator)


def proxy(name: str, source: str = "", estimator: str = "", aggregator: str = "") -> Alias:
    """Return an alias for a related quantity, an approximation of the metric."""
    return Alias(name, source, Relation.PROXY, estimator, aggregator)


def other(name: str, source: str) -> Alias:
    """Return an alias that ``source`` uses for another quantity than all other trainers."""
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
    """A metric within [0, 1]."""
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
    """A metric in nats per token."""
    return Metric(
        name, family, "nats/token", meaning, low, high, estimator, aggregator, aliases, everyday, panel, vital
    )
