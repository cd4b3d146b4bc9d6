"""A forecast in plain words."""

from __future__ import annotations

from rlwatch.forecast.forecast import Forecast

REACHED = {
    "nan": "the loss or a weight would no longer be finite",
    "mismatch": "the train-inference mismatch would reach its limit",
    "grad": "the gradient norm would reach its limit",
    "ent_low": "entropy would fall to its limit",
    "ent_high": "entropy would rise to its limit",
    "length": "cut or repetitive responses would reach their limit",
    "ref_kl": "KL to the reference would reach its limit",
    "reward": "the reward would fall to its limit",
}
"""What each limit of a forecast means."""
MOST = 3
"""Metrics named as the reason."""


def told(forecast: Forecast) -> str:
    """What an alarm says.

    >>> from rlwatch.forecast import Reason
    >>> told(Forecast(9, p50=0.72, limit="ref_kl", steps_to=35.2, why=(Reason("mismatch/k3", 0.42),)))
    ... # doctest: +NORMALIZE_WHITESPACE
    'a failure is likely within 50 steps (p = 0.72): KL to the reference would reach its limit in about 35 steps;
     most of it is from mismatch/k3 (42 %)'
    """
    parts = [part for part in (limit(forecast), reasons(forecast)) if part]
    return chance(forecast) + (f": {'; '.join(parts)}" if parts else "")


def chance(forecast: Forecast) -> str:
    """How likely, and within which time; no more than the number says."""
    if forecast.p50 is None:
        return "a failure may begin soon"
    if forecast.p50 >= 0.5:
        return f"a failure is likely within 50 steps (p = {forecast.p50:.2f})"
    return f"the chance of a failure within 50 steps is raised (p = {forecast.p50:.2f})"


def limit(forecast: Forecast) -> str:
    """Which limit would be reached, and when.

    >>> [limit(Forecast(9, limit="ref_kl", steps_to=steps)) for steps in (1.2, 0.0)]
    ['KL to the reference would reach its limit in about 1 step', 'KL to the reference would reach its limit now']
    """
    said = REACHED.get(forecast.limit, "")
    if not said or forecast.steps_to is None:
        return said
    steps = round(forecast.steps_to)
    return f"{said} in about {steps} step{'s' if steps > 1 else ''}" if steps > 0 else f"{said} now"


def reasons(forecast: Forecast) -> str:
    """The metrics that speak most for it."""
    named = [f"{reason.metric} ({reason.share:.0%})".replace("%", " %") for reason in forecast.why[:MOST]]
    return f"most of it is from {', '.join(named)}" if named else ""
