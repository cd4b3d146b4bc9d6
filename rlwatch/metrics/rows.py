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
    """It only has the name: in this source the metric is not to be read from it."""


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
        Names of it in tables and loops of one's own, the least far-fetched first.
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
        """Its range in words; empty where it has none.

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
        """Names that trainers have for it, proxies with a tilde before them: ``any: entropy; verl: actor/entropy``."""
        by_source: dict[str, list[str]] = {}
        for alias in self.aliases:
            if alias.relation is not Relation.OTHER:
                mark = "~" if alias.relation is Relation.PROXY else ""
                by_source.setdefault(alias.source, []).append(mark + alias.name)
        return "; ".join(f"{source or 'any'}: {', '.join(found)}" for source, found in sorted(by_source.items()))


def same(name: str, source: str = "", estimator: str = "", aggregator: str = "") -> Alias:
    """An alias that is the same quantity."""
    return Alias(name, source, Relation.SAME, estimator, aggregator)


def proxy(name: str, source: str = "", estimator: str = "", aggregator: str = "") -> Alias:
    """An alias that is a related one."""
    return Alias(name, source, Relation.PROXY, estimator, aggregator)


def other(name: str, source: str) -> Alias:
    """A name that other sources use for the quantity, and ``source`` for something else."""
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
