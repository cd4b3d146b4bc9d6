"""Forecasting: how likely a run is to fail within the next steps, learnt from many runs that did and did not."""

from __future__ import annotations

from rlwatch.forecast.forecast import HORIZONS, LIMITS, Forecast, ForecastReason
from rlwatch.forecast.forecaster import Forecaster
from rlwatch.forecast.model import Model, load

__all__ = ["HORIZONS", "LIMITS", "Forecast", "ForecastReason", "Forecaster", "Model", "load"]
