"""Parts of a run that are compared, along an axis: its metrics that tell of learning, and their rows by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rlwatch.compare.alignment import TOKENS, Axis, ComparedRun, Ruler, attempt_starts, rows_that_count, ruler
from rlwatch.compare.parting import MetricSeries
from rlwatch.metrics import BESIDE_LEARNING, LAYER_PREFIX, Family, family_of, metric_of, unjudged


def judged_metrics(subject: ComparedRun) -> list[str]:
    """Metrics of a run that tell of its learning: neither clocks, counters and machines nor single layers."""
    return sorted(name for name in subject.names if _tells(name))


def _tells(metric: str) -> bool:
    if metric_of(metric) is not None:
        return metric != TOKENS and family_of(metric) not in (Family.SYSTEM, Family.ENGINE)
    return not metric.startswith(LAYER_PREFIX) and unjudged(metric) not in BESIDE_LEARNING


@dataclass(frozen=True, slots=True)
class Side:
    """A run laid along an axis; ``ruler`` is None where it does not tell what the axis needs."""

    subject: ComparedRun
    starts: Mapping[int, int]
    ruler: Ruler | None

    @classmethod
    def of(cls, subject: ComparedRun, axis: Axis) -> Self:
        """Read how far the run came, and its ruler."""
        rows = subject.moments()
        starts = attempt_starts([rows])
        last = int(rows.steps.max()) if len(rows.steps) else 0
        return cls(subject, starts, ruler(subject, axis, last, starts) if len(rows.steps) else None)

    def rows(self, metrics: Sequence[str]) -> dict[str, MetricSeries]:
        """Rows that count by place; of a metric that the run does not have there are none."""
        if self.ruler is None:
            return {}
        return {
            name: self.ruler.laid(rows_that_count(series, self.starts))
            for name, series in self.subject.series(metrics).items()
        }
