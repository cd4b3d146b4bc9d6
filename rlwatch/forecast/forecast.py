"""A forecast (probabilities of failure with their reasons), its stored form, and its wording."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from rlwatch.records import JSON, ClosedStep, ForecastRecord

HORIZONS = (20, 50, 100)
"""Steps ahead for which a probability of failure is given."""
LIMITS = ("nan", "mismatch", "grad", "ent_low", "ent_high", "length", "ref_kl", "reward")
"""Types of failure onset in ``labels-v1``, by the limit that is reached first; ties are broken in this order."""


class ForecastKind(StrEnum):
    """Kinds of forecasts: with a probability, with the time to a limit only, or none."""

    CHANCE = "chance"
    """Probabilities of a failure, for a log of a kind with proven skill."""
    LIMIT = "limit"
    """No probability, but the time to a limit on a straight line if one is in sight."""
    OVER = "over"
    """No forecast, because a failure has happened or a limit is passed."""
    NONE = "none"
    """No forecast, for another reason."""


@dataclass(frozen=True, slots=True)
class ForecastReason:
    """A metric and its share of the evidence for a forecast; the shares of a forecast sum to at most 1."""

    metric: str
    share: float


FORECAST = "forecast/"
"""Prefix of forecast metrics; they were not measured, so no detector and no forecaster may use them."""
NUMBERS = ("p20", "p50", "p100", "risk", "steps_to", "error")
"""Fields of a forecast that are stored as series of the run."""
_STORED = tuple(FORECAST + name for name in NUMBERS)
_numbers = attrgetter(*NUMBERS)
WORDS = ("alarm", "limit", "absent", "limits_only", "lean", "log", "checks", "passed", "over", "caveat")
"""Fields of a forecast that are stored as text or flags, if they are not empty."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The probability, as of ``step``, that the run fails soon; uses only data up to ``step``.

    ``p20``, ``p50``, ``p100``: probability in [0, 1] that a failure (an onset of ``labels-v1``) begins within that many
    steps. They are None without a forecast, with the reason in ``absent``; and if the run logs too little for a
    probability but its limits are watched, with the reason in ``limits_only``. ``risk``: evidence over the threshold
    (>= 1 is an alarm, also in ``alarm``); None with ``absent``. ``limit``: the one of :data:`LIMITS` most likely to be
    reached; ``steps_to``: expected steps until then, None if none is expected. ``why``: the metrics with most evidence,
    strongest first. ``lean``: the run logs so few of the model's inputs that an alarm of the model alone is reported as
    a remark only.

    ``log``: kind of the log (:class:`rlwatch.forecast.gate.LogClass`); "" if unknown. ``error``: median error in steps
    of ``checks`` earlier straight lines to that limit on this run; None before one could be checked. ``passed``: the
    limit that the run is beyond; ``over``: the failure has happened. ``caveat``: owner of the only runs that have
    proven such probabilities; empty if other people's runs have.
    """

    step: int
    p20: float | None = None
    p50: float | None = None
    p100: float | None = None
    risk: float | None = None
    alarm: bool = False
    limit: str = ""
    steps_to: float | None = None
    why: tuple[ForecastReason, ...] = ()
    absent: str = ""
    limits_only: str = ""
    lean: bool = False
    log: str = ""
    error: float | None = None
    checks: int = 0
    passed: str = ""
    over: bool = False
    caveat: str = ""

    @property
    def kind(self) -> ForecastKind:
        """Kind of this forecast, derived from its other fields."""
        if self.over:
            return ForecastKind.OVER
        if self.p50 is not None:
            return ForecastKind.CHANCE
        return ForecastKind.LIMIT if self.limits_only else ForecastKind.NONE

    @property
    def shown(self) -> bool:
        """True if the forecast has a probability to show."""
        return self.kind is ForecastKind.CHANCE

    @property
    def reason(self) -> str:
        """Reason that the forecast has no probability; empty if it has one."""
        return "" if self.shown else self.absent or self.limits_only

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the forecast as metrics ``forecast/...`` of the run; empty without a forecast."""
        return {name: value for name, value in zip(_STORED, _numbers(self), strict=True) if value is not None}


# A forecast as it is stored, and back.

MOST_REASONS = 8
"""Most metrics stored with a forecast as its reasons."""


def record_of(forecast: Forecast, step: ClosedStep) -> ForecastRecord:
    """Return ``forecast``, made at ``step``, as the record that a store keeps."""
    body: dict[str, JSON] = {name: getattr(forecast, name) for name in WORDS}
    body["why"] = [[reason.metric, round(reason.share, 4)] for reason in forecast.why[:MOST_REASONS]]
    kept = {name: value for name, value in body.items() if value}
    return ForecastRecord(step.step, forecast.metrics, kept, step.ts, step.attempt, step.seq)


def forecast_of(record: ForecastRecord) -> Forecast:
    """Return the forecast of a stored record; fields that only a newer version knows are left out.

    >>> given = Forecast(7, p50=0.4, why=(ForecastReason("mismatch/k3", 0.5),))
    >>> forecast_of(record_of(given, ClosedStep(7, {}, {}))) == given
    True
    """
    numbers = {name: record.metrics.get(FORECAST + name) for name in NUMBERS}
    body = record.body
    return Forecast(
        record.step,
        **numbers,
        alarm=bool(body.get("alarm")),
        limit=str(body.get("limit", "")),
        why=tuple(ForecastReason(str(metric), float(share)) for metric, share in body.get("why", ())),
        absent=str(body.get("absent", "")),
        limits_only=str(body.get("limits_only", "")),
        lean=bool(body.get("lean")),
        log=str(body.get("log", "")),
        checks=int(str(body.get("checks", 0))),
        passed=str(body.get("passed", "")),
        over=bool(body.get("over")),
        caveat=str(body.get("caveat", "")),
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
"""Description of reaching each limit of a forecast."""
PASSED = {
    "nan": "values are no longer finite",
    "mismatch": "the train-inference mismatch",
    "grad": "the gradient norm",
    "ent_low": "low entropy",
    "ent_high": "high entropy",
    "length": "cut or repetitive responses",
    "ref_kl": "KL to the reference",
    "reward": "the reward",
}
"""Description of each limit for a run that is beyond it."""
MOST_NAMED = 3
"""Most metrics that are named as reasons in a message."""


def alarm_message(forecast: Forecast) -> str:
    """Return the message of a forecast alarm: probability, limit, and the metrics with the most evidence.

    >>> from rlwatch.forecast import ForecastReason
    >>> alarm_message(Forecast(9, p50=0.72, limit="ref_kl", steps_to=35.2, why=(ForecastReason("mismatch/k3", 0.42),)))
    ... # doctest: +NORMALIZE_WHITESPACE
    'failure likely within 50 steps (p = 0.72): KL to the reference would reach its limit in about 35 steps;
     main drivers: mismatch/k3 (42 %)'
    """
    parts = [part for part in (limit_sentence(forecast), reasons_sentence(forecast), forecast.caveat) if part]
    return chance_sentence(forecast) + (f": {'; '.join(parts)}" if parts else "")


def chance_sentence(forecast: Forecast) -> str:
    """Return the probability of a failure within 50 steps in words."""
    if forecast.p50 is None:
        return "a failure may begin soon"
    if forecast.p50 >= 0.5:
        return f"failure likely within 50 steps (p = {forecast.p50:.2f})"
    return f"failure risk within 50 steps raised (p = {forecast.p50:.2f})"


def limit_sentence(forecast: Forecast) -> str:
    """Return the limit that the run would reach, and the number of steps until then, in words.

    >>> [limit_sentence(Forecast(9, limit="ref_kl", steps_to=steps)) for steps in (1.2, 0.0)]
    ['KL to the reference would reach its limit in about 1 step', 'KL to the reference would reach its limit now']
    """
    sentence = REACHED.get(forecast.limit, "")
    if not sentence or forecast.steps_to is None:
        return sentence
    steps = round(forecast.steps_to)
    return f"{sentence} in about {steps} step{'s' if steps > 1 else ''}" if steps > 0 else f"{sentence} now"


def line_sentence(forecast: Forecast) -> str:
    """Return the time to a limit on a straight line, with the error of earlier lines; empty if none is in sight.

    >>> line_sentence(Forecast(90, limit="ent_low", steps_to=40.0, error=12.0, checks=9))
    'entropy would fall to its limit in about 40 steps on a straight line (9 checked so far: out by 12 steps)'
    """
    if forecast.steps_to is None or not limit_sentence(forecast):
        return ""
    known = forecast.checks and forecast.error is not None
    so_far = f"{forecast.checks} checked so far: out by {forecast.error:.0f} steps" if known else "none checked so far"
    return f"{limit_sentence(forecast)} on a straight line ({so_far})"


def forecast_sentence(forecast: Forecast) -> str:
    """Return a forecast in one sentence: its probability and limit, or the reason that it has no probability.

    >>> forecast_sentence(Forecast(90, limits_only="no forecast: this log has no signal that has ever warned"))
    'no forecast: this log has no signal that has ever warned'
    """
    if forecast.kind is ForecastKind.LIMIT:
        return "; ".join(filter(None, (forecast.limits_only, line_sentence(forecast))))
    if not forecast.shown:
        return forecast.absent
    near = limit_sentence(forecast) if forecast.alarm else ""
    return "; ".join(filter(None, (chance_sentence(forecast), near, forecast.caveat)))


def reasons_sentence(forecast: Forecast) -> str:
    """Return the metrics with the most evidence for a forecast, each with its share, in words; "" if it has none."""
    named = [f"{reason.metric} ({reason.share:.0%})".replace("%", " %") for reason in forecast.why[:MOST_NAMED]]
    return f"main drivers: {', '.join(named)}" if named else ""
