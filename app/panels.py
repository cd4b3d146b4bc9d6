"""Which metrics a run page shows, where: families in their fixed order, the telling metrics first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlwatch.forecast.record import FORECAST
from rlwatch.metrics import BY_NAME, LAYER_PREFIX, TABLE, Family, family_of, resolve

from . import format as fmt
from .queries import Trace, canonical_names

VITAL = frozenset({"reward/mean", "policy/entropy", "policy/kl_ref", "optim/grad_norm"})
"""Shown even when they do not move: a reward stuck at 0 is news."""

TELLING = (
    *("reward/mean", "reward/std", "reward/zero_std_frac"),
    *("policy/entropy", "policy/entropy_p10", "policy/entropy_p90"),
    *("policy/kl_ref", "policy/kl_ref_k3", "ratio/clipfrac", "ratio/max", "policy/kl_old"),
    *("optim/grad_norm", "layers/rise", "loss/policy", "layers/heterogeneity", "optim/lr"),
    *("mismatch/k3", "mismatch/kl", "mismatch/logp_absdiff", "mismatch/ess"),
    *("len/mean", "len/clipped", "text/repetition"),
    *("time/step", "rlwatch/dropped"),
)
"""What a person looks at first, in each family; the others follow in the table's order."""

MOST = 3
"""Panels a family shows at first; the others are one click away, unless something is wrong with them."""

MOST_MORE = 30
"""Panels one click shows at most."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric: the ``name`` its source uses and, where the table knows it, the canonical one."""

    name: str
    canonical: str = ""

    @property
    def title(self) -> str:
        """What the chart is called."""
        return self.canonical or self.name

    def subtitle(self, source: str) -> str:
        """Unit, and the source's own name where it differs (``proxy`` where it is not the same quantity)."""
        if not self.canonical:
            return ""
        reading = resolve(self.name, source)
        known_as = "" if self.name == self.canonical else self.name
        if known_as and reading is not None and reading.closeness == 2:
            known_as = f"proxy: {known_as}"
        return " · ".join(part for part in (BY_NAME[self.canonical].unit, known_as) if part)


@dataclass(slots=True)
class Section:
    """One family: panels shown, panels behind a click, and metrics that never changed (name, value)."""

    family: Family
    shown: list[Panel] = field(default_factory=list)
    more: list[Panel] = field(default_factory=list)
    unchanging: list[tuple[str, float]] = field(default_factory=list)


def catalogue(names: Sequence[str], source: str) -> list[Panel]:
    """Every metric once: known ones, the telling first, then the others by name.

    Layers have a map of their own, the forecast a panel.
    """
    canonical = canonical_names(names, source)
    order = dict.fromkeys((*TELLING, *(metric.name for metric in TABLE)))
    rank = {name: place for place, name in enumerate(order)}
    known = sorted((c for c in canonical if c in rank and not c.startswith(FORECAST)), key=rank.__getitem__)
    used = {source for name, source in canonical.items() if name in rank}
    return [
        *(Panel(canonical[c], c) for c in known),
        *(Panel(name) for name in sorted(set(names) - used) if not name.startswith(LAYER_PREFIX)),
    ]


def sections(
    panels: Sequence[Panel], traces: Mapping[str, Trace], source: str, suspects: Collection[str] = ()
) -> list[Section]:
    """The panels by family; ``traces`` holds the known metrics' (unknown ones go behind the click unread).

    ``suspects`` are canonical metrics a finding speaks of: shown whatever their rank, like those that were
    ever not finite.
    """
    found = {family: Section(family) for family in Family}
    for panel in panels:
        section = found[family_of(panel.canonical or panel.name, source)]
        if not panel.canonical:
            section.more.append(panel)
            continue
        trace, suspect = traces[panel.name], panel.canonical in suspects
        if trace.level is not None and not suspect and panel.canonical not in VITAL:
            section.unchanging.append((panel.canonical, trace.level))
        elif suspect or len(section.shown) < MOST or not trace.finite:
            section.shown.append(panel)
        else:
            section.more.append(panel)
    return [section for section in found.values() if section.shown or section.more or section.unchanging]


def shelves(all_sections: Sequence[Section], columns: int) -> list[list[tuple[Section, int]]]:
    """Sections side by side, in order, with the columns each takes; no shelf is wider than ``columns``."""
    found: list[list[tuple[Section, int]]] = []
    room = 0
    for section in all_sections:
        width = min(max(len(section.shown), 1), columns)
        if width > room:
            found.append([])
            room = columns
        found[-1].append((section, width))
        room -= width
    return found


def unchanging_words(section: Section) -> str:
    """``never changed: optim/lr 1.00e−6``; empty if all did."""
    if not section.unchanging:
        return ""
    return "never changed: " + " · ".join(f"{name} {fmt.number(value)}" for name, value in section.unchanging)
