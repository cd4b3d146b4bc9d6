"""What speaks against a rising reward, and how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlwatch.detectors.base import finite
from rlwatch.detectors.change import Change
from rlwatch.detectors.reward import RewardWatch
from rlwatch.records import ClosedStep

HELD_OUT_FALL = 0.1
"""Of its best level that a held-out score must have lost."""
STALL = 6
"""Evaluations without a better level."""
STRONG, MODERATE, WEAK = 3, 2, 1
"""Weights: a second measure of the same thing; what no good answer needs; what also comes with learning."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing that does not go with a better policy: what it is, how much it weighs, the metric it was read from."""

    says: str
    weight: int
    metric: str


@dataclass(frozen=True, slots=True)
class Proxy:
    """A metric that speaks against the reward at ``factor`` times its start and at least ``floor``.

    A factor below 1 means a fall, from a start above ``floor``.
    """

    metric: str
    factor: float
    floor: float
    weight: int
    says: str

    def holds(self, change: Change) -> bool:
        """Whether it does now."""
        now, start = change.now, change.start
        if now is None or start is None:
            return False
        fallen = self.factor < 1.0 and start > self.floor and now <= self.factor * start
        risen = self.factor >= 1.0 and now >= max(self.floor, self.factor * start)
        return (fallen or risen) and change.moved


PROXIES = (
    Proxy("text/looping_frac", 3.0, 0.1, MODERATE, "responses loop"),
    Proxy("text/repetition", 2.0, 0.4, MODERATE, "responses repeat themselves"),
    Proxy("text/garbled", 5.0, 0.02, MODERATE, "responses are garbled"),
    Proxy("len/mean", 0.25, 0.0, MODERATE, "responses are less than a quarter as long"),
    Proxy("len/mean", 3.0, 0.0, WEAK, "responses are three times as long"),
    Proxy("len/clipped", 2.0, 0.5, WEAK, "most responses are cut at the limit"),
    Proxy("policy/entropy", 0.05, 0.0, WEAK, "the policy is nearly deterministic"),
    Proxy("reward/zero_std_frac", 2.0, 0.8, WEAK, "nearly all groups agree"),
    Proxy("reward/unique_answers", 0.4, 0.0, WEAK, "groups give few distinct answers"),
    Proxy("policy/kl_ref", 20.0, 1.0, WEAK, "the policy is far from its reference"),
)
NAMES = tuple(dict.fromkeys(proxy.metric for proxy in PROXIES))


class Signs:
    """Follows the proxies and every held-out score of a run."""

    def __init__(self) -> None:
        self._changes = {name: Change() for name in NAMES}
        self._scores: dict[str, HeldOut] = {}

    def update(self, step: ClosedStep, reward: float | None) -> None:
        """Take notice of a row; ``reward``: the level of the training reward."""
        for name, change in self._changes.items():
            value = finite(step, name)
            if value is not None:
                change.update(step.step, value)
        for name in held_out(step):
            value = finite(step, name)
            if value is not None and (name in self._scores or len(self._scores) < 8):
                self._scores.setdefault(name, HeldOut()).update(step.step, value, reward)

    def now(self) -> list[Sign]:
        """What speaks against the reward now, the weightiest first."""
        found = [
            *self._scored(),
            *(Sign(p.says, p.weight, p.metric) for p in PROXIES if p.holds(self._changes[p.metric])),
        ]
        return sorted(found, key=lambda sign: -sign.weight)

    def _scored(self) -> Iterator[Sign]:
        for name, score in self._scores.items():
            if score.fell:
                yield Sign(f"the held-out score {name} fell from {score.best:.3g} to {score.now:.3g}", STRONG, name)
            elif score.stalls:
                yield Sign(f"the held-out score {name} gains nothing ({score.now:.3g})", WEAK, name)


class HeldOut:
    """A score measured now and then, and what the training reward has done since its best."""

    def __init__(self) -> None:
        self._watch = RewardWatch()
        self._reward: float | None = None
        self._reward_then: float | None = None
        self._best: float | None = None
        self._since = 0

    def update(self, step: int, value: float, reward: float | None) -> None:
        """Take an evaluation; ``reward``: the level of the training reward."""
        self._watch.take(step, value)
        self._reward = reward
        self._since += 1
        best = self._watch.best
        if best is not None and (self._best is None or best > self._best):
            self._best, self._reward_then, self._since = best, reward, 0

    @property
    def best(self) -> float:
        """Its best level; 0 if unknown."""
        return self._best or 0.0

    @property
    def now(self) -> float:
        """Its level; 0 if unknown."""
        return self._watch.now or 0.0

    @property
    def _paid(self) -> bool:
        """Whether the training reward has not fallen since the best score."""
        return self._reward is not None and self._reward_then is not None and self._reward >= self._reward_then

    @property
    def fell(self) -> bool:
        """A tenth below its best, beyond its noise, under a training reward that did not fall."""
        return self._paid and self._watch.fallen(HELD_OUT_FALL)

    @property
    def stalls(self) -> bool:
        """No better level for six evaluations, under a training reward that did not fall."""
        return self._paid and self._since >= STALL


def held_out(step: ClosedStep) -> list[str]:
    """Names of the held-out scores in a row: means, not their spreads."""
    return [n for n in step.metrics if n == "val/score" or (n.startswith("val-core/") and not n.endswith("/std"))]
