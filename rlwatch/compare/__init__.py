"""Compare runs: the metric that diverged first, with its evidence, and the settings in which runs differ.

One run, usually the one that crashed, is compared with each of the others. Metrics have their canonical names, so that
runs of different trainers can be compared; steps that a later attempt repeated are left out. Seeds of one configuration
form a group, and two groups are compared by a permutation test (:mod:`~rlwatch.compare.noise`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlwatch.compare.alignment import (
    READ_AT_ONCE,
    Axis,
    ComparedRun,
    Ruler,
    Side,
    attempt_starts,
    counts,
    held,
    judged_metrics,
    rows_that_count,
    ruler,
    subject_of_records,
    subject_of_run,
)
from rlwatch.compare.configs import ABSENT, Absent, ConfigOption, config_diff, settings
from rlwatch.compare.groups import (
    GroupComparison,
    SeedGroup,
    compare_groups,
    group_of,
    runs_of_group,
)
from rlwatch.compare.noise import Answer, Band, SeedComparison, compare_seeds
from rlwatch.compare.parting import FEWEST, Divergence, MetricSeries, by_place, divergence_of, paired
from rlwatch.wording import plural

__all__ = [
    "ABSENT",
    "Absent",
    "Answer",
    "Axis",
    "Band",
    "ComparedRun",
    "Comparison",
    "ConfigOption",
    "Divergence",
    "GroupComparison",
    "MetricSeries",
    "Ruler",
    "SeedComparison",
    "SeedGroup",
    "Side",
    "attempt_starts",
    "compare",
    "compare_groups",
    "compare_seeds",
    "config_diff",
    "counts",
    "divergence_of",
    "group_of",
    "held",
    "judged_metrics",
    "paired",
    "rows_that_count",
    "ruler",
    "runs_of_group",
    "settings",
    "subject_of_records",
    "subject_of_run",
]

ROWS_TO_DATE = 24
"""With fewer rows, the absence of a divergence proves nothing, as only large differences show."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing two runs.

    Attributes
    ----------
    left, right
        Names of the runs.
    axis
        Axis along which rows are matched.
    partings
        Divergences in order of place, then metrics that differ from the first rows on.
    compared, short
        Metrics that both runs have, with enough rows and with too few.
    only_left, only_right
        Metrics that the other run lacks.
    differs_from
        First place at which a compared metric is not exactly equal; None if all are.
    end
        Last place that both runs have.
    rows
        Most rows that a metric has in both runs.
    problem
        Reason why nothing was compared; empty if something was.
    """

    left: str
    right: str
    axis: Axis = Axis.STEP
    partings: tuple[Divergence, ...] = ()
    compared: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    only_left: tuple[str, ...] = ()
    only_right: tuple[str, ...] = ()
    differs_from: float | None = None
    end: float | None = None
    rows: int = 0
    problem: str = ""

    @property
    def first(self) -> Divergence | None:
        """First divergence of the two runs that lasts; None if there is none."""
        return next((one for one in self.partings if not one.apart_from_start and one.until is None), None)

    @property
    def answer(self) -> str:
        """Result in a sentence: the metric that diverged first, or that none did."""
        if self.problem:
            return f"{self.problem}."
        if not self.compared:
            return f"Nothing to compare: no metric has {FEWEST} rows in both."
        until = "" if self.end is None else f" up to {self.axis.place(self.end)}, where the shorter one ends"
        count = plural(len(self.compared), "metric")
        if self.differs_from is None:
            return f"All rows of {count} are the same{until}."
        if self.first is None:
            return f"None of {count} diverged{until}: {self._why_none()}."
        first = self.first
        at = self.axis.place(first.at)
        words = first.text(self.axis.place).replace(
            f"{first.metric} diverged at {at}", f"{first.metric} diverged first, at {at}"
        )
        return f"{words}. {self.first_of}".rstrip()

    def _why_none(self) -> str:
        if self.rows < ROWS_TO_DATE:
            return f"{plural(self.rows, 'row')} are too few to tell a divergence from noise"
        return "what separates them is within noise, or was there from the start"

    @property
    def first_of(self) -> str:
        """The metrics that diverged next, in a sentence; empty if there are none."""
        later = [one for one in self.partings if not one.apart_from_start and one.until is None][1:4]
        if not later:
            return ""
        return "Then " + ", ".join(self._when(one) for one in later) + "."

    def _when(self, one: Divergence) -> str:
        return f"{one.metric} at {self.axis.place(one.at)}" if one.dated else f"{one.metric}, not dated"


def compare(left: ComparedRun, right: ComparedRun, axis: Axis = Axis.STEP) -> Comparison:
    """Compare the metrics of two runs row by row along ``axis``, and return the divergences."""
    mine, yours = judged_metrics(left), judged_metrics(right)
    both = [name for name in mine if name in set(yours)]
    empty = Comparison(
        left.name,
        right.name,
        axis,
        only_left=tuple(name for name in mine if name not in set(both)),
        only_right=tuple(name for name in yours if name not in set(both)),
    )
    sides = [Side.of(subject, axis) for subject in (left, right)]
    lacking = [side.subject.name for side in sides if side.ruler is None]
    if lacking:
        return replace(empty, problem=f"{' and '.join(lacking)} did not record {axis.value}")
    partings, compared, short, differs, ends, most = [], [], [], [], [], 0
    for names in (both[i : i + READ_AT_ONCE] for i in range(0, len(both), READ_AT_ONCE)):
        one, other = (side.rows(names) for side in sides)
        for name in names:
            x, a, b = paired(one[name], other[name])
            if len(x) < FEWEST:
                short.append(name)
                continue
            compared.append(name)
            most = max(most, len(x))
            ends.append(float(x[-1]))
            unequal = np.flatnonzero((a != b) & ~(np.isnan(a) & np.isnan(b)))
            if len(unequal):
                differs.append(float(x[unequal[0]]))
            found = divergence_of(name, one[name], other[name])
            partings += [] if found is None else [found]
    return replace(
        empty,
        partings=tuple(by_place(partings)),
        compared=tuple(compared),
        short=tuple(short),
        differs_from=min(differs, default=None),
        end=max(ends, default=None),
        rows=most,
    )
