"""A forecast: the chances and what speaks for them, as they are made, stored and put into words."""

from __future__ import annotations

from dataclasses import dataclass

from rlwatch.records import ClosedStep, ForecastRecord

HORIZONS = (20, 50, 100)
"""Steps ahead."""
LIMITS = ("nan", "mismatch", "grad", "ent_low", "ent_high", "length", "ref_kl", "reward")
"""Which limit is reached first: the types of onset of ``labels-v1``, in the order in which ties are broken."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A metric and its share of what speaks for a forecast: shares of a forecast sum to at most 1."""

    metric: str
    share: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """The chance, seen from ``step``, that the run fails soon; uses only data up to ``step``.

    ``p20``, ``p50``, ``p100``: chance in [0, 1] that a failure (an onset of ``labels-v1``) begins within so many
    steps; None where there is no forecast, and then ``absent`` says why, and where the run logs too little for a chance
    but its limits are watched: ``limits_only`` says that. ``risk``: how far beyond the threshold (>= 1 is an alarm,
    which ``alarm`` says too); None where ``absent`` is said. ``limit``: which of :data:`LIMITS` is most likely to
    be reached; ``steps_to``: expected steps until then, None where nothing is expected. ``why``: the metrics that speak
    for it, the strongest first. ``lean``: the run logs so little of what the model goes by that its word alone is a
    remark.
    """

    step: int
    p20: float | None = None
    p50: float | None = None
    p100: float | None = None
    risk: float | None = None
    alarm: bool = False
    limit: str = ""
    steps_to: float | None = None
    why: tuple[Reason, ...] = ()
    absent: str = ""
    limits_only: str = ""
    lean: bool = False

    @property
    def metrics(self) -> dict[str, float]:
        """As metrics of the run (names of :mod:`rlwatch.metrics`); empty where there is no forecast."""
        named = {"p20": self.p20, "p50": self.p50, "p100": self.p100, "risk": self.risk, "steps_to": self.steps_to}
        return {f"forecast/{name}": value for name, value in named.items() if value is not None}


# A forecast as it is stored, and back.

FORECAST = "forecast/"
"""Names of metrics that were forecast, not measured: no detector and no forecaster may learn from them."""
MOST_REASONS = 8
"""Metrics kept with a forecast as its reasons."""


def record_of(forecast: Forecast, step: ClosedStep) -> ForecastRecord:
    """Record of a forecast as a store keeps it."""
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
    """Forecast of a stored record; parts that a newer program added are left out.

    >>> given = Forecast(7, p50=0.4, why=(Reason("mismatch/k3", 0.5),))
    >>> forecast_of(record_of(given, ClosedStep(7, {}, {}))) == given
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


# A forecast in plain words.

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
MOST_NAMED = 3
"""Metrics named as the reason."""


def alarm_message(forecast: Forecast) -> str:
    """Message of an alarm.

    >>> from rlwatch.forecast import Reason
    >>> alarm_message(Forecast(9, p50=0.72, limit="ref_kl", steps_to=35.2, why=(Reason("mismatch/k3", 0.42),)))
    ... # doctest: +NORMALIZE_WHITESPACE
    'a failure is likely within 50 steps (p = 0.72): KL to the reference would reach its limit in about 35 steps;
     most of it is from mismatch/k3 (42 %)'
    """
    parts = [part for part in (limit_sentence(forecast), reasons_sentence(forecast)) if part]
    return chance_sentence(forecast) + (f": {'; '.join(parts)}" if parts else "")


def chance_sentence(forecast: Forecast) -> str:
    """Chance of a failure and its horizon in words; no more than the number says."""
    if forecast.p50 is None:
        return "a failure may begin soon"
    if forecast.p50 >= 0.5:
        return f"a failure is likely within 50 steps (p = {forecast.p50:.2f})"
    return f"the chance of a failure within 50 steps is raised (p = {forecast.p50:.2f})"


def limit_sentence(forecast: Forecast) -> str:
    """Limit that would be reached, and when.

    >>> [limit_sentence(Forecast(9, limit="ref_kl", steps_to=steps)) for steps in (1.2, 0.0)]
    ['KL to the reference would reach its limit in about 1 step', 'KL to the reference would reach its limit now']
    """
    sentence = REACHED.get(forecast.limit, "")
    if not sentence or forecast.steps_to is None:
        return sentence
    steps = round(forecast.steps_to)
    return f"{sentence} in about {steps} step{'s' if steps > 1 else ''}" if steps > 0 else f"{sentence} now"


def reasons_sentence(forecast: Forecast) -> str:
    """The metrics that speak most for it."""
    named = [f"{reason.metric} ({reason.share:.0%})".replace("%", " %") for reason in forecast.why[:MOST_NAMED]]
    return f"most of it is from {', '.join(named)}" if named else ""
