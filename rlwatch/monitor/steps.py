"""Merging the records of a step into the closed step detectors see."""

from __future__ import annotations

import math

from rlwatch.forecast.forecast import FORECAST
from rlwatch.metrics import canonicalise
from rlwatch.records import ClosedStep, StepRecord


class OpenStep:
    """The step that still gathers records; a later value of the same name wins."""

    def __init__(self, record: StepRecord) -> None:
        self.step = record.step
        self.first_seq = record.seq
        self._metrics = dict(record.metrics)
        self._last = record

    def merge(self, record: StepRecord) -> None:
        """Add another record of this step."""
        self._metrics.update(record.metrics)
        self._last = record

    def closed(self, source: str) -> ClosedStep:
        """The step as detectors see it."""
        return _view(self._last, self._metrics, source)


def arrived(record: StepRecord, source: str) -> ClosedStep:
    """One record by itself, canonically named."""
    return _view(record, record.metrics, source)


def has_nonfinite(record: StepRecord) -> bool:
    """Whether any value of the record is NaN or infinite."""
    return not all(map(math.isfinite, record.metrics.values()))


def is_forecast(record: StepRecord) -> bool:
    """Whether it holds nothing but a forecast, as a log may that another tracker kept of a watched run."""
    return bool(record.metrics) and all(name.startswith(FORECAST) for name in record.metrics)


def _view(record: StepRecord, metrics: object, source: str) -> ClosedStep:
    values, origin = canonicalise(metrics, source)  # type: ignore[arg-type]
    for name in [name for name in values if name.startswith(FORECAST)]:
        del values[name], origin[name]
    return ClosedStep(record.step, values, origin, record.ts, record.attempt, record.seq)
