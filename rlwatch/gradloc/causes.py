"""Why a culprit is one: the three published classes, and what else makes a token's gradient large. Plain numbers.

Token ratio, sequence ratio and layer are GradLoc's anomaly classes (Tencent Hunyuan 2026), each with a cure of its
own: clip tokens, clip responses, clip layers. Non-finite numbers and outlying rewards are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlwatch.gradloc.report import Cause, Culprit
from rlwatch.stats.robust import mad, median

TOKEN_LOG_RATIO = math.log(3.0)
"""nats: dual-clip PPO caps ratios at 3; beyond that the ratio itself carries the gradient."""
SEQUENCE_LOG_RATIO = 0.2
"""nats per token: the whole response moved as far as PPO lets a single token move (1 +- 0.2)."""
REFERENCE_GAP = 3.0
"""nats: k3 weighs such a token with exp(ref - logp) - 1, 20 or more: at a KL coefficient of 0.05 an advantage of 1."""
OUTLIER_Z = 6.0
"""Robust standard deviations: one normal value in 5e8 is as far."""
FLAT = 0.25
"""Least standard deviation, as a share of the median: with two kinds of rewards the measured one is often 0."""
SMALL_TOKEN_SHARE = 0.1
"""No single token explains a gradient of which it makes less than this."""
LARGE_LAYER_SHARE = 0.5
"""A layer that makes more than half of the squared norm..."""
LAYER_TIMES = 3.0
"""...and this many times its usual share is to blame itself. (Measured: 11 % -> 95 %, with a top token of 3 %.)"""


@dataclass(frozen=True, slots=True)
class Level:
    """Where most values of a step are: median, and a robust standard deviation."""

    middle: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Level | None:
        """Of the finite ones among ``values``; None if there are fewer than 4."""
        finite = [value for value in values if math.isfinite(value)]
        return cls(median(finite), mad(finite)) if len(finite) >= 4 else None

    def z(self, value: float, *, least: float = 0.0) -> float:
        """How many standard deviations (``least`` at least) above the median; 0 where there is no deviation at all."""
        spread = max(self.spread, least)
        return (value - self.middle) / spread if spread > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepLevels:
    """What is usual in the step a culprit is in.

    Parameters
    ----------
    advantages
        Level of the sizes of its responses' advantages, zeros left out.
    rewards
        Level of its responses' rewards.
    layers, usual
        Share of each layer in the squared norm: now, and its running mean over earlier steps (empty: not known).
    top_share
        Largest |contribution| of a token / norm; None if not known.
    """

    advantages: Level | None = None
    rewards: Level | None = None
    layers: Mapping[str, float] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)
    top_share: float | None = None

    @classmethod
    def of(
        cls,
        advantages: Sequence[float] = (),
        rewards: Sequence[float] = (),
        *,
        layers: Mapping[str, float] | None = None,
        usual: Mapping[str, float] | None = None,
        top_share: float | None = None,
    ) -> StepLevels:
        """From one advantage and one reward for each response."""
        sizes = Level.of([abs(value) for value in advantages if value])
        return cls(sizes, Level.of(rewards), layers or {}, usual or {}, top_share)


@dataclass(frozen=True, slots=True)
class ResponseLevels:
    """The response a culprit is in: mean log-ratio per token (nats), the culprit itself left out; None: not known."""

    log_ratio: float | None = None
    rollout_log_ratio: float | None = None


def cause_of(numbers: Mapping[str, float], response: ResponseLevels, step: StepLevels) -> tuple[Cause, str]:
    """The class of a token, and why in one sentence. ``numbers`` as in :class:`rlwatch.gradloc.report.Culprit`."""
    return (
        _non_finite(numbers)
        or _ratio(numbers, response)
        or _reference(numbers)
        or _reward(numbers, step)
        or _layer(step)
        or (Cause.UNEXPLAINED, "ratios, advantage, reward and layers are all within their usual range")
    )


def cause_of_step(culprits: Sequence[Culprit], step: StepLevels) -> Cause:
    """The class of the whole step: a layer's where no token explains it, else that of most of the blame."""
    if any(culprit.cause is Cause.NON_FINITE for culprit in culprits):
        return Cause.NON_FINITE
    if _layer(step):
        return Cause.LAYER
    blame: dict[Cause, float] = {}
    for place, culprit in enumerate(culprits):
        weight = abs(culprit.share) if culprit.share is not None else 1.0 / (1 + place)
        blame[culprit.cause] = blame.get(culprit.cause, 0.0) + weight
    return max(blame, key=blame.__getitem__, default=Cause.UNEXPLAINED)


def _non_finite(numbers: Mapping[str, float]) -> tuple[Cause, str] | None:
    bad = [name for name, value in numbers.items() if not math.isfinite(value)]
    return (Cause.NON_FINITE, f"not finite: {', '.join(bad)}") if bad else None


def _ratio(numbers: Mapping[str, float], response: ResponseLevels) -> tuple[Cause, str] | None:
    """Token or whole response: whichever is further beyond its limit."""
    found = []
    for other, name, mean in (
        ("old_logp", "the old policy", response.log_ratio),
        ("rollout_logp", "the rollout engine", response.rollout_log_ratio),
    ):
        if other in numbers and "logp" in numbers:
            apart = numbers["logp"] - numbers[other]
            text = f"{_times(apart)} under the policy as under {name}"
            found.append((abs(apart) / TOKEN_LOG_RATIO, Cause.TOKEN_RATIO, f"the token is {text}"))
        if mean is not None:
            text = f"its response is, per token, {_times(mean)} under the policy as under {name}"
            found.append((abs(mean) / SEQUENCE_LOG_RATIO, Cause.SEQUENCE_RATIO, text))
    beyond = [item for item in found if item[0] > 1]
    return max(beyond)[1:] if beyond else None


def _reference(numbers: Mapping[str, float]) -> tuple[Cause, str] | None:
    if "ref_logp" not in numbers or "logp" not in numbers:
        return None
    gap = numbers["ref_logp"] - numbers["logp"]
    text = (
        f"the token is {_times(gap)} under the reference as under the policy, which a KL penalty weighs by that factor"
    )
    return (Cause.TOKEN_RATIO, text) if gap > REFERENCE_GAP else None


def _reward(numbers: Mapping[str, float], step: StepLevels) -> tuple[Cause, str] | None:
    advantage, reward = numbers.get("advantage"), numbers.get("reward")
    if advantage is not None and step.advantages is not None:
        usual = step.advantages.middle
        if step.advantages.z(abs(advantage), least=FLAT * usual) > OUTLIER_Z:
            return (
                Cause.REWARD_OUTLIER,
                f"its advantage is {advantage:.3g}, where the step's are about {usual:.3g} in size",
            )
    if reward is not None and step.rewards is not None and abs(step.rewards.z(reward)) > OUTLIER_Z:
        return Cause.REWARD_OUTLIER, f"its reward is {reward:.3g}, where the step's are about {step.rewards.middle:.3g}"
    return None


def _layer(step: StepLevels) -> tuple[Cause, str] | None:
    """No token stands out, and one layer does."""
    if step.top_share is None or not step.top_share < SMALL_TOKEN_SHARE or not step.layers:
        return None
    name = max(step.layers, key=step.layers.__getitem__)
    share, usual = step.layers[name], step.usual.get(name)
    if usual is None or not (share > LARGE_LAYER_SHARE and share > LAYER_TIMES * usual):
        return None
    most = f"no token more than {step.top_share:.1%}"
    return Cause.LAYER, f"{name} makes {share:.0%} of the squared norm, usually {usual:.0%}, and {most}"


def _times(log_ratio: float) -> str:
    """``e^x`` in words: a factor, or a power of e where that is unreadable."""
    if abs(log_ratio) > 7:
        return f"e^{log_ratio:.3g} times as likely"
    return f"{math.exp(log_ratio):.3g} times as likely"
