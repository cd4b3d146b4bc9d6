"""The place of each metric of a run: by failure family, the telling ones first, the others behind a click."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlwatch.forecast.forecast import FORECAST
from rlwatch.metrics import LAYER_PREFIX, TABLE, Family, family_of, meaning_of, metric_of, resolve, unit_of

from . import format as fmt
from .queries import Extent, canonical_names

MOST = 3
"""Panels a family shows at first, a row of them; the others are one click away, unless something is wrong with them:
then more rows, each filled up.
"""


@dataclass(frozen=True, slots=True)
class MetricChart:
    """One metric: the ``name`` its source uses and, where the table knows it, the canonical one."""

    name: str
    canonical: str = ""

    @property
    def title(self) -> str:
        """Title of the chart."""
        return self.canonical or self.name

    @property
    def about(self) -> str:
        """Meaning of the metric, as far as it is known."""
        return meaning_of(self.canonical)

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """Values that the metric cannot be below or above."""
        metric = metric_of(self.canonical or self.name)
        return (None, None) if metric is None else (metric.low, metric.high)

    @property
    def vital(self) -> bool:
        """True of the metrics that are drawn also where they never change."""
        metric = metric_of(self.canonical)
        return metric is not None and metric.vital

    def subtitle(self, source: str) -> str:
        """Unit, and the source's own name where it differs (``proxy`` where it is not the same quantity)."""
        if not self.canonical:
            return ""
        reading = resolve(self.name, source)
        known_as = "" if self.name == self.canonical else self.name
        if known_as and reading is not None and reading.closeness == 2:
            known_as = f"proxy: {known_as}"
        return " · ".join(part for part in (unit_of(self.canonical), known_as) if part)


@dataclass(slots=True)
class MetricSection:
    """One family: panels shown, panels behind a click, and metrics that never changed (name, value)."""

    family: Family
    shown: list[MetricChart] = field(default_factory=list)
    more: list[MetricChart] = field(default_factory=list)
    unchanging: list[tuple[str, float]] = field(default_factory=list)


def all_panels(names: Sequence[str], source: str) -> list[MetricChart]:
    """Every metric once: known ones, the telling first, then the others by name.

    Layers have a map of their own, the forecast a panel.
    """
    canonical = canonical_names(names, source)
    rank = {metric.name: (metric.panel or math.inf, place) for place, metric in enumerate(TABLE)}
    known = sorted((c for c in canonical if c in rank and not c.startswith(FORECAST)), key=rank.__getitem__)
    used = {source for name, source in canonical.items() if name in rank}
    return [
        *(MetricChart(canonical[c], c) for c in known),
        *(MetricChart(name) for name in sorted(set(names) - used) if not name.startswith(LAYER_PREFIX)),
    ]


def sections(
    panels: Sequence[MetricChart],
    extents: Mapping[str, Extent],
    source: str,
    suspects: Collection[str] = (),
) -> list[MetricSection]:
    """The panels by family, by what their metrics were over the whole run (unknown ones go behind the click).

    ``suspects`` are metrics a finding speaks of: shown whatever their rank, like those that were ever not finite.
    """
    found = {family: MetricSection(family) for family in Family}
    for panel in panels:
        section = found[family_of(panel.canonical or panel.name, source)]
        if not panel.canonical:
            shown = not extents[panel.name].finite or panel.name in suspects
            (section.shown if shown else section.more).append(panel)
            continue
        extent, suspect = extents[panel.name], panel.canonical in suspects
        if extent.level is not None and not suspect and not panel.vital:
            section.unchanging.append((panel.canonical, extent.level))
        elif suspect or len(section.shown) < MOST or not extent.finite:
            section.shown.append(panel)
        else:
            section.more.append(panel)
    for section in found.values():
        lacking = -len(section.shown) % MOST if len(section.shown) > MOST else 0
        known = [panel for panel in section.more if panel.canonical][:lacking]
        section.shown += known
        section.more = [panel for panel in section.more if panel not in known]
    return [section for section in found.values() if section.shown or section.more or section.unchanging]


def unchanging_words(section: MetricSection) -> str:
    """``never changed: optim/lr 1e-06``; empty if all did."""
    if not section.unchanging:
        return ""
    return "never changed: " + " · ".join(f"{name} {fmt.number(value)}" for name, value in section.unchanging)


def found_by(names: Sequence[str], panels: Sequence[MetricChart], wanted: str) -> list[MetricChart]:
    """Every metric whose names or meaning hold all words of ``wanted``, layers and forecasts among them."""
    words = wanted.lower().split()
    listed = {panel.name for panel in panels}
    every = [*panels, *(MetricChart(name) for name in sorted(names) if name not in listed)]
    return [p for p in every if all(word in f"{p.name} {p.canonical} {p.about}".lower() for word in words)]
