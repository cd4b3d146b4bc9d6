"""Culprits: their numbers copied from the device, their class and why, and those of all ranks together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlwatch.gradloc.distributed import World, gather_plain
from rlwatch.gradloc.passes import LossPass, Passes
from rlwatch.gradloc.report import Cause, Culprit, OwnGradient, TokenAt, Trace
from rlwatch.stats import mad, median
from rlwatch.tensors.masked import widen

TOKEN_LOG_RATIO = math.log(3.0)
"""nats: dual-clip PPO caps ratios at 3; beyond that the ratio itself carries the gradient."""
SEQUENCE_LOG_RATIO = 0.2
"""nats per token: the whole response moved as far as PPO lets a single token move (1 +- 0.2)."""
REFERENCE_GAP = 3.0
"""nats: the gradient of k3 weighs such a token with exp(ref - logp) - 1, 19 or more: at a KL coefficient of 0.05 as
much as an advantage of 1."""
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
    """Level of most values of a step: median, and a robust standard deviation."""

    middle: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Level | None:
        """Level of the finite ones among ``values``; None if there are fewer than 4."""
        finite = [value for value in values if math.isfinite(value)]
        return cls(median(finite), mad(finite)) if len(finite) >= 4 else None

    def z(self, value: float, *, least: float = 0.0) -> float:
        """Standard deviations (each ``least`` at least) above the median; 0 where there is no deviation at all."""
        spread = max(self.spread, least)
        return (value - self.middle) / spread if spread > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepLevels:
    """Usual advantages, rewards and layers of the step a culprit is in.

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
        """Levels from one advantage and one reward for each response."""
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
    """The class of the whole step: a layer's where no token explains it, else that with the largest shares."""
    if any(culprit.cause is Cause.NON_FINITE for culprit in culprits):
        return Cause.NON_FINITE
    if _layer(step):
        return Cause.LAYER
    weights: defaultdict[Cause, float] = defaultdict(float)
    for place, culprit in enumerate(culprits):
        weights[culprit.cause] += abs(culprit.share) if culprit.share is not None else 1.0 / (1 + place)
    return max(weights, key=weights.__getitem__, default=Cause.UNEXPLAINED)


def _non_finite(numbers: Mapping[str, float]) -> tuple[Cause, str] | None:
    bad = [name for name, value in numbers.items() if not math.isfinite(value)]
    return (Cause.NON_FINITE, f"not finite: {', '.join(bad)}") if bad else None


def _ratio(numbers: Mapping[str, float], response: ResponseLevels) -> tuple[Cause, str] | None:
    """Token or whole response: whichever is further beyond its limit."""
    excesses = []
    for other, name, mean in (
        ("old_logp", "the old policy", response.log_ratio),
        ("rollout_logp", "the rollout engine", response.rollout_log_ratio),
    ):
        if other in numbers and "logp" in numbers:
            apart = numbers["logp"] - numbers[other]
            text = f"{_times(apart)} under the policy as under {name}"
            excesses.append((abs(apart) / TOKEN_LOG_RATIO, Cause.TOKEN_RATIO, f"the token is {text}"))
        if mean is not None:
            text = f"its response is, per token, {_times(mean)} under the policy as under {name}"
            excesses.append((abs(mean) / SEQUENCE_LOG_RATIO, Cause.SEQUENCE_RATIO, text))
    beyond = [item for item in excesses if item[0] > 1]
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
    """A layer's class, where it stands out and no token does."""
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


# The numbers of one loss pass, copied from the device once: what culprits and their responses are described with.

NUMBERS = (
    "logp", "old_logp", "rollout_logp", "ref_logp", "entropy", "ratio", "advantage", "reward", "coefficient",
    "entropy_coefficient",
)  # fmt: skip
"""Quantities that may be known of a token, in this order."""


@dataclass(frozen=True, slots=True)
class HostPass:
    """One micro-batch of this rank: ``columns`` (B, T) of those of :data:`NUMBERS` that are known, float64.

    ``mask`` (B, T) is bool; ``ids`` (B, T) int64, None where not known.
    """

    rank: int
    microbatch: int
    first_row: int
    mask: np.ndarray
    columns: Mapping[str, np.ndarray]
    ids: np.ndarray | None = None

    def token_id(self, at: TokenAt) -> int | None:
        """Id of the token there."""
        return None if self.ids is None else int(self.ids[at.row, at.position])

    def numbers(self, at: TokenAt) -> dict[str, float]:
        """Known quantities of the token there; NaN is a value, what was not measured is absent."""
        return {name: float(column[at.row, at.position]) for name, column in self.columns.items()}

    def response(self, at: TokenAt) -> ResponseLevels:
        """Mean log-ratios of the response the token is in, the token itself left out."""
        others = self.mask[at.row].copy()
        others[at.position] = False
        return ResponseLevels(self._apart(at.row, others, "old_logp"), self._apart(at.row, others, "rollout_logp"))

    def _apart(self, row: int, where: np.ndarray, other: str) -> float | None:
        if other not in self.columns or not where.any():
            return None
        mean = float((self.columns["logp"][row] - self.columns[other][row])[where].mean())
        return mean if math.isfinite(mean) else None

    def per_response(self, name: str) -> list[float]:
        """``name`` of the first token of each response that has tokens; empty where not known."""
        if name not in self.columns:
            return []
        return [
            float(values[mask][0]) for values, mask in zip(self.columns[name], self.mask, strict=True) if mask.any()
        ]


def on_host(passes: Passes, rank: int = 0) -> list[HostPass]:
    """Copy each pass of ``rank``; waits for the device once for each."""
    return [_copied(one, rank, k) for k, one in enumerate(passes.all)]


def step_levels(
    hosts: Sequence[HostPass],
    *,
    world: World | None = None,
    layers: Mapping[str, float] | None = None,
    usual: Mapping[str, float] | None = None,
    top_share: float | None = None,
) -> StepLevels:
    """Usual advantages and rewards of the step, from the responses of all ranks of ``world``. A collective."""
    here = [[value for host in hosts for value in host.per_response(name)] for name in ("advantage", "reward")]
    every = [here] if world is None else gather_plain(world, here)
    advantages, rewards = ([value for rank in every for value in rank[i]] for i in (0, 1))
    return StepLevels.of(advantages, rewards, layers=layers, usual=usual, top_share=top_share)


def _copied(one: LossPass, rank: int, microbatch: int) -> HostPass:
    """Everything in one tensor, so that it is one copy; token ids are exact below 2**24."""
    tokens, known = one.tokens, _known(one)
    ids = {} if tokens.ids is None else {"ids": tokens.ids.to(torch.float32)}
    parts = {"mask": tokens.mask.to(torch.float32), **ids, **known}
    host = torch.stack([widen(part).expand(one.shape).double() for part in parts.values()]).cpu().numpy()
    columns = dict(zip(parts, host, strict=True))
    mask = columns.pop("mask") != 0
    whole = columns.pop("ids").astype(np.int64) if ids else None
    return HostPass(rank, microbatch, one.first_row, mask, columns, whole)


def _known(one: LossPass) -> dict[str, Tensor]:
    tokens = one.tokens
    logp, old = widen(tokens.logp), tokens.old_logp
    quantities = {
        "logp": logp,
        "old_logp": old,
        "rollout_logp": tokens.rollout_logp,
        "ref_logp": tokens.ref_logp,
        "entropy": tokens.entropy,
        "ratio": None if old is None else (logp - widen(old)).exp(),
        "advantage": tokens.token_advantages,
        "reward": None if one.rewards is None else one.rewards[:, None],
        "coefficient": one.coefficients.get("logp"),
        "entropy_coefficient": one.coefficients.get("entropy"),
    }
    return {name: values for name, values in quantities.items() if values is not None}


# Culprits described: their numbers, their class, and why.


@dataclass(frozen=True, slots=True)
class Described:
    """Known quantities of one token, and of the response it is in."""

    at: TokenAt
    sequence: int
    token_id: int | None
    numbers: dict[str, float]
    response: ResponseLevels


def describe(hosts: Sequence[HostPass], at: TokenAt) -> Described:
    """The token at ``at``, of the rank that ``hosts`` are of."""
    host = hosts[at.microbatch]
    return Described(at, host.first_row + at.row, host.token_id(at), host.numbers(at), host.response(at))


def culprit_of(
    token: Described,
    levels: StepLevels,
    *,
    norm: float | None = None,
    contribution: float | None = None,
    own: OwnGradient | None = None,
) -> Culprit:
    """The token with its class; its share is ``contribution / norm`` where both are known."""
    cause, why = cause_of(token.numbers, token.response, levels)
    share = contribution / norm if contribution is not None and norm else None
    culprit = Culprit(token.at, token.sequence, token.token_id, cause, why, numbers=token.numbers)
    return replace(culprit, contribution=contribution, share=share, own=own)


def culprits_of_trace(hosts: Sequence[HostPass], trace: Trace, most: int = 8) -> list[Culprit]:
    """The tokens of this rank that a trace names, ``most`` at most; what it found is why."""
    places = trace.tokens or ([trace.at] if trace.at is not None else [])
    here = [at for at in places if any(host.rank == at.rank for host in hosts)]
    described = [describe(hosts, at) for at in here[:most]]
    return [
        Culprit(token.at, token.sequence, token.token_id, Cause.NON_FINITE, trace.message, numbers=token.numbers)
        for token in described
    ]


# Culprits of every rank on every rank: what travels is text.


def shared_culprits(local: Sequence[Culprit], world: World) -> list[Culprit]:
    """Culprits of all ranks, by rank, in the order they had there. A collective; NaN and Inf come through."""
    if world.size == 1:
        return list(local)
    return [_culprit_from(body) for rank in gather_plain(world, [asdict(each) for each in local]) for body in rank]


def _culprit_from(body: Mapping[str, Any]) -> Culprit:
    own = body["own"]
    changed = {
        "at": TokenAt(**body["at"]),
        "cause": Cause(body["cause"]),
        "own": None if own is None else OwnGradient(**own),
    }
    return Culprit(**{**body, **changed})
