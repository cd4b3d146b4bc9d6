"""The parts of a run that are compared: its metrics of learning, and their rows along an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rlwatch.compare.alignment import TOKENS, Axis, ComparedRun, Ruler, attempt_starts, rows_that_count, ruler
from rlwatch.compare.parting import MetricSeries
from rlwatch.metrics import LAYER_PREFIX, NOT_LEARNING, Family, family_of, metric_of, unjudged


def judged_metrics(subject: ComparedRun) -> list[str]:
    """Return the metrics of learning of a run, without clocks, counters, machines and single layers."""
    return sorted(name for name in subject.names if _of_learning(name))


def _of_learning(metric: str) -> bool:
    if metric_of(metric) is not None:
        return metric != TOKENS and family_of(metric) not in (Family.SYSTEM, Family.ENGINE)
    return not metric.startswith(LAYER_PREFIX) and unjudged(metric) not in NOT_LEARNING


@dataclass(frozen=True, slots=True)
class Side:
    """A run along an axis; ``ruler`` is None if the run lacks the values that the axis needs."""

    subject: ComparedRun
    starts: Mapping[int, int]
    ruler: Ruler | None

    @classmethod
    def of(cls, subject: ComparedRun, axis: Axis) -> Self:
        """Read the length of the run, and make its ruler."""
        rows = subject.moments()
        starts = attempt_starts([rows])
        last = int(rows.steps.max()) if len(rows.steps) else 0
        return cls(subject, starts, ruler(subject, axis, last, starts) if len(rows.steps) else None)

    def rows(self, metrics: Sequence[str]) -> dict[str, MetricSeries]:
        """Return the current rows of each metric by place, without metrics that the run lacks."""
        if self.ruler is None:
            return {}
        return {
            name: self.ruler.laid(rows_that_count(series, self.starts))
            for name, series in self.subject.series(metrics).items()
        }
