"""What a run is held to, once it is known what it logs: which thresholds, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass

from rlwatch.forecast.limits import LIMITS_V1
from rlwatch.forecast.model import Model
from rlwatch.forecast.signals import SIGNALS

FLOOR = "1"
"""Budget whose threshold one of one's own does not go below."""
ENOUGH = 0.2
"""Share of what the model learnt that a run must be able to tell to be given chances."""
LEAN = 0.45
"""Below this share an alarm of the model alone is a remark: on public logs of few averages it is wrong more often than
on the runs its thresholds come from."""
LIMITED = frozenset(limit.signal for limit in LIMITS_V1)
"""Signals that have a limit."""


@dataclass(frozen=True, slots=True)
class Terms:
    """``model``: least p50 that is an alarm; ``static``: least share of the way to a limit that is one.

    ``limits_only``: why no chance is given; ``lean``: the log holds little of what the model goes by; ``absent``: why
    there can be no forecast at all ("" otherwise).
    """

    model: float
    static: float
    limits_only: str = ""
    lean: bool = False
    absent: str = ""


def terms(model: Model, signals: frozenset[str], budget: str, own: float | None = None) -> Terms:
    """For a run that logs ``signals``.

    ``budget``: false alarm episodes in 1000 healthy steps, as the model's file names them; ``own``: as
    :class:`rlwatch.forecast.Forecaster` takes it.
    """
    known = model.known(signals)
    short = "" if known >= ENOUGH else _short(model, signals, known)
    if short and not signals & LIMITED:
        return Terms(1.0, 1.0, absent=f"no forecast {short}")
    profile = model.profile(signals)
    threshold = profile.thresholds[budget]
    if own is not None:
        threshold = max(own, profile.thresholds.get(FLOOR, threshold))
    limits_only = f"no chance is given {short}" if short else ""
    return Terms(threshold, profile.static[budget], limits_only=limits_only, lean=known < LEAN)


def _short(model: Model, signals: frozenset[str], known: float) -> str:
    """What is missing, the most telling first."""
    missing = sorted(set(model.gains) - signals, key=lambda s: -model.gains[s])
    wanted = ", ".join(s.metrics[0] for s in SIGNALS if s.name in missing[:4])
    return f"because this run logs {known:.0%} of what the model goes by; it would need {wanted}"
