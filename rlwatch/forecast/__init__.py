"""Forecasting: the probability that a run fails within the next steps, learnt from runs that did and did not fail."""

from __future__ import annotations

from rlwatch.forecast.forecast import HORIZONS, LIMITS, Forecast, ForecastReason
from rlwatch.forecast.forecaster import Forecaster
from rlwatch.forecast.model import Model, load

__all__ = ["HORIZONS", "LIMITS", "Forecast", "ForecastReason", "Forecaster", "Model", "load"]
