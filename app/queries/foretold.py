"""What was forecast of a run: the newest forecast whole, all of them as lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlwatch.forecast import Forecast
from rlwatch.forecast.record import forecast_of
from rlwatch.records import RunInfo

from .curves import Trace, traces, whole
from .door import store

RISK = "forecast/risk"
NAMES = ("forecast/p20", "forecast/p50", "forecast/p100", RISK)


@dataclass(frozen=True, slots=True)
class Foretold:
    """``newest`` may be without a number, and then says why; ``highest`` p50 and its step over all that count.

    ``traces``: by name, over the window; the risk alone where no chance was given, empty where nothing was forecast.
    """

    newest: Forecast
    highest: tuple[float, int] | None
    traces: Mapping[str, Trace]


def foretold(run: RunInfo, window: tuple[int, int]) -> Foretold | None:
    """What was forecast of ``run``; None if nobody ever tried."""
    newest = newest_forecast(run.run_id)
    if newest is None:
        return None
    kept = whole(run, NAMES)
    series = kept["forecast/p50"]
    if not len(series.steps):
        return Foretold(newest, None, traces(run, window, (RISK,)) if len(kept[RISK].steps) else {})
    at = int(np.argmax(series.values))
    return Foretold(newest, (float(series.values[at]), int(series.steps[at])), traces(run, window, NAMES))


def newest_forecast(run_id: str) -> Forecast | None:
    """The newest, or why there is none; None if nobody ever tried."""
    kept = store().forecasts(run_id, last=1)
    return forecast_of(kept[-1]) if kept else None
