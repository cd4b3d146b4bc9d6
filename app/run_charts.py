"""The order of a run's metrics: by failure family, the most informative first, the others behind a click."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlwatch.forecast.forecast import FORECAST
from rlwatch.metrics import LAYER_PREFIX, TABLE, Family, family_of, meaning_of, metric_of, resolve, unit_of

from . import format as fmt
from .queries import Extent, canonical_names

MOST = 3
"""Charts of a family shown at first, one row; the others are folded, unless a finding concerns them: then whole rows
are added.
"""


@dataclass(frozen=True, slots=True)
class MetricChart:
    """One metric: its ``name`` in the source and, if it is a known metric, the canonical one."""

    name: str
    canonical: str = ""

    @property
    def title(self) -> str:
        """Return the title of the chart."""
        return self.canonical or self.name

    @property
    def about(self) -> str:
        """Return the meaning of the metric, if it is known."""
        return meaning_of(self.canonical)

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """Return the lower and upper limit of the metric."""
        metric = metric_of(self.canonical or self.name)
        return (None, None) if metric is None else (metric.low, metric.high)

    @property
    def vital(self) -> bool:
        """Return True for a metric that is drawn even if it never changes."""
        metric = metric_of(self.canonical)
        return metric is not None and metric.vital

    def subtitle(self, source: str) -> str:
        """Return the unit, and the source's name if it differs (with ``proxy`` if the quantity is only related)."""
        if not self.canonical:
            return ""
        reading = resolve(self.name, source)
        known_as = "" if self.name == self.canonical else self.name
        if known_as and reading is not None and reading.closeness == 2:
            known_as = f"proxy: {known_as}"
        return " · ".join(part for part in (unit_of(self.canonical), known_as) if part)


@dataclass(slots=True)
class MetricSection:
    """One family: charts shown, folded charts, and metrics that never changed (name, value)."""

    family: Family
    shown: list[MetricChart] = field(default_factory=list)
    more: list[MetricChart] = field(default_factory=list)
    unchanging: list[tuple[str, float]] = field(default_factory=list)


def all_panels(names: Sequence[str], source: str) -> list[MetricChart]:
    """Return every metric once: known ones, the most informative first, then the others by name.

    Layers and forecasts are left out; they have charts of their own.
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
    """Return the charts by family, given the extents of the metrics over the whole run; unknown metrics are folded.

    ``suspects`` are metrics of findings; they are shown at any rank, like metrics with values that were not finite.
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
    """Return ``never changed: optim/lr 1e-06``, or an empty string if all metrics changed."""
    if not section.unchanging:
        return ""
    return "never changed: " + " · ".join(f"{name} {fmt.number(value)}" for name, value in section.unchanging)


def found_by(names: Sequence[str], panels: Sequence[MetricChart], wanted: str) -> list[MetricChart]:
    """Return the metrics whose names or meaning contain all words of ``wanted``, including layers and forecasts."""
    words = wanted.lower().split()
    listed = {panel.name for panel in panels}
    every = [*panels, *(MetricChart(name) for name in sorted(names) if name not in listed)]
    return [p for p in every if all(word in f"{p.name} {p.canonical} {p.about}".lower() for word in words)]
