"""What a forecaster says of one step."""

from __future__ import annotations

from dataclasses import dataclass

HORIZONS = (20, 50, 100)
"""Steps ahead."""
LIMITS = ("nan", "mismatch", "grad", "ent_low", "ent_high", "length", "ref_kl", "reward")
"""Which limit is reached first: the types of onset of ``labels-v1``, in the order in which ties are broken."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A metric and its share of what was said: shares of a forecast sum to at most 1."""

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
