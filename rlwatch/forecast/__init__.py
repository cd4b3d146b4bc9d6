"""Forecasts of training failures: the probability that a run fails within the next steps.

The model behind it is learnt from runs that failed and runs that did not.
"""

from __future__ import annotations

from rlwatch.forecast.forecast import HORIZONS, LIMITS, Forecast, ForecastReason
from rlwatch.forecast.forecaster import Forecaster
from rlwatch.forecast.model import Model, load

__all__ = ["HORIZONS", "LIMITS", "Forecast", "ForecastReason", "Forecaster", "Model", "load"]
