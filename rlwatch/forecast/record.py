"""A forecast as it is stored, and back."""

from __future__ import annotations

from rlwatch.forecast.forecast import Forecast, Reason
from rlwatch.records import ClosedStep, ForecastRecord

FORECAST = "forecast/"
"""Names of metrics that were forecast, not measured: no detector and no forecaster may learn from them."""
MOST_REASONS = 8
"""Metrics kept with a forecast as its reasons."""


def record_of(forecast: Forecast, step: ClosedStep) -> ForecastRecord:
    """What is stored of a forecast."""
    body = {
        "alarm": forecast.alarm,
        "limit": forecast.limit,
        "why": [[reason.metric, round(reason.share, 4)] for reason in forecast.why[:MOST_REASONS]],
        "absent": forecast.absent,
        "limits_only": forecast.limits_only,
        "lean": forecast.lean,
    }
    kept = {name: value for name, value in body.items() if value}
    return ForecastRecord(step.step, forecast.metrics, kept, step.ts, step.attempt, step.seq)


def forecast_of(record: ForecastRecord) -> Forecast:
    """What was said, of what is stored; what a newer program said besides is left out.

    >>> said = Forecast(7, p50=0.4, why=(Reason("mismatch/k3", 0.5),))
    >>> forecast_of(record_of(said, ClosedStep(7, {}, {}))) == said
    True
    """
    numbers = {name: record.metrics.get(FORECAST + name) for name in ("p20", "p50", "p100", "risk", "steps_to")}
    body = record.body
    return Forecast(
        record.step,
        **numbers,
        alarm=bool(body.get("alarm")),
        limit=str(body.get("limit", "")),
        why=tuple(Reason(str(metric), float(share)) for metric, share in body.get("why", ())),
        absent=str(body.get("absent", "")),
        limits_only=str(body.get("limits_only", "")),
        lean=bool(body.get("lean")),
    )
