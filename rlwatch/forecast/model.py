"""A hazard model: chances of a failure within the next steps, from the features of a run.

Time to the onset is cut at the horizons: one head says how likely the onset lies within 20 steps, the next how likely
within 50 if not within 20, the last within 100 if not within 50 (a discrete-time hazard model: runs that ended without
a failure count for as long as they were seen). So p20 <= p50 <= p100 by construction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlwatch.forecast.forecast import HORIZONS, Reason
from rlwatch.forecast.trees import Head, probability
from rlwatch.records import JSON


@dataclass(frozen=True, slots=True)
class Chances:
    """Chance of an onset within each of the horizons."""

    p20: float
    p50: float
    p100: float

    @property
    def steps_to(self) -> float | None:
        """Expected steps to an onset within the last horizon; None where that is improbable (p100 < 0.5)."""
        if self.p100 < 0.5:
            return None
        mass = (self.p20, self.p50 - self.p20, self.p100 - self.p50)
        middles = (HORIZONS[0] / 2, sum(HORIZONS[:2]) / 2, sum(HORIZONS[1:]) / 2)
        return sum(part * at for part, at in zip(mass, middles, strict=True)) / self.p100


@dataclass(frozen=True, slots=True)
class Profile:
    """Thresholds for the runs that log at least these signals.

    ``thresholds``: budget (false alarm episodes in 1000 healthy steps) -> least p50 that is an alarm; ``static``: the
    same of the share of the way to a limit.
    """

    name: str
    signals: frozenset[str]
    thresholds: Mapping[str, float]
    static: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Model:
    """``hazards``: one head a horizon; ``limits``: one head a type of onset; ``features``: names the heads index.

    ``gains``: share of each signal in what the hazards learnt; ``meta``: versions, data and seeds it was made with.
    """

    features: tuple[str, ...]
    hazards: tuple[Head, Head, Head]
    limits: Mapping[str, Head]
    gains: Mapping[str, float]
    profiles: tuple[Profile, ...]
    meta: Mapping[str, JSON] = field(default_factory=dict)

    def chances(self, x: Sequence[float]) -> Chances:
        """Of an onset within the horizons. ``x``: values in the order of :attr:`features`, NaN where not measured."""
        alive, ps = 1.0, []
        for head in self.hazards:
            alive *= 1.0 - probability(head.logit(x))
            ps.append(1.0 - alive)
        return Chances(*ps)

    def limit(self, x: Sequence[float]) -> str:
        """The type of onset that is most likely; empty where the model tells none apart."""
        return max(self.limits, key=lambda kind: self.limits[kind].logit(x), default="")

    def why(self, x: Sequence[float]) -> dict[str, float]:
        """What each signal adds to the log-odds of an onset within 50 steps."""
        added: dict[str, float] = {}
        for head in self.hazards[:2]:
            for feature, change in head.shares(x).items():
                signal = signal_of(self.features[feature])
                added[signal] = added.get(signal, 0.0) + change
        return added

    def known(self, signals: frozenset[str]) -> float:
        """Share of what was learnt that a run with these signals can tell, in [0, 1]."""
        total = sum(self.gains.values())
        return sum(gain for signal, gain in self.gains.items() if signal in signals) / total if total else 0.0

    def profile(self, signals: frozenset[str]) -> Profile:
        """The richest profile whose signals the run has nearly all of; the poorest where it has few."""
        fitting = [p for p in self.profiles if len(p.signals & signals) >= 0.8 * len(p.signals)]
        return max(fitting, key=lambda p: len(p.signals), default=min(self.profiles, key=lambda p: len(p.signals)))


def signal_of(feature: str) -> str:
    """``entropy:low`` and ``limit:ent_low:entropy:share`` speak of ``entropy``; ``broken`` of itself."""
    parts = feature.split(":")
    return parts[2] if parts[0] == "limit" else parts[0]


def reasons(added: Mapping[str, float], names: Mapping[str, str], most: int = 3) -> tuple[Reason, ...]:
    """The strongest signals that speak for a failure, with their share of all that speaks for it.

    ``names``: the metric that each signal of the run is read from; what it does not log is no reason.
    """
    speaking = {signal: value for signal, value in added.items() if value > 0.0 and math.isfinite(value)}
    total = sum(speaking.values())
    ranked = sorted(speaking.items(), key=lambda item: -item[1])[:most]
    told = [(names[signal], value / total) for signal, value in ranked if signal in names and value >= 0.05 * total]
    return tuple(Reason(metric, share) for metric, share in told)
