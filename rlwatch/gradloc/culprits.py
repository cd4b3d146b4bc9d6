"""Culprits (outlying tokens in a step's gradient): their numbers copied from the device, their cause, and exchange over
ranks.
"""

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
from rlwatch.gradloc.loss_form import COLUMNS, LossForm, columns_of, forms_of
from rlwatch.gradloc.passes import LossPass, RecordedPasses
from rlwatch.gradloc.report import Culprit, ExcessFactor, NonfiniteTrace, OwnGradient, TokenAt
from rlwatch.gradloc.trigger import Usual
from rlwatch.stats import mad, median
from rlwatch.tensors.masked import widen

TOKEN_LOG_RATIO = math.log(3.0)
"""Log-ratio of a token, nats: dual-clip PPO caps ratios at 3; beyond that the ratio itself carries the gradient."""
SEQUENCE_LOG_RATIO = 0.2
"""Mean log-ratio of a response, nats per token: the whole response moved as far as PPO lets a single token move (1 +-
0.2).
"""
REFERENCE_GAP = 3.0
"""Gap between the reference's and the policy's log-prob, nats.

The gradient of k3 weights such a token with exp(ref - logp) - 1, 19 or more. At a KL coefficient of 0.05 that is as
much as an advantage of 1.
"""
LEAST_EXCESS = math.log(2.5)
"""Smallest excess of a factor over its usual size, nats, that explains a large coefficient."""
OUTLIER_Z = 6.0
"""Distance of an outlier in robust standard deviations; one normal value in 5e8 is as far."""
FLAT = 0.25
"""Smallest standard deviation, as a share of the median, because with two kinds of rewards the measured one is
often 0.
"""
SMALL_TOKEN_SHARE = 0.1
"""Share of the gradient norm below which no single token explains the gradient."""
LARGE_LAYER_SHARE = 0.5
"""Share of the squared norm above which a layer may be the cause."""
LAYER_TIMES = 3.0
"""Multiple of its usual share above which a layer may be the cause. (Measured: 11 % -> 95 %, top token 3 %.)"""


@dataclass(frozen=True, slots=True)
class RobustLevel:
    """Level of most values in a step: median, and a robust standard deviation."""

    middle: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> RobustLevel | None:
        """Return the level of the finite values in ``values``; None if there are fewer than 4."""
        finite = [value for value in values if math.isfinite(value)]
        return cls(median(finite), mad(finite)) if len(finite) >= 4 else None

    def z(self, value: float, *, least: float = 0.0) -> float:
        """Return how many standard deviations ``value`` is above the median; 0 if there is no deviation at all.

        ``least`` is the smallest standard deviation that is used.
        """
        spread = max(self.spread, least)
        return (value - self.middle) / spread if spread > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepLevels:
    """Usual advantages, rewards and layer shares of a step, with which an outlying token is compared.

    Parameters
    ----------
    advantages
        Level of the absolute advantages of the step's responses, without zeros.
    rewards
        Level of the rewards of the step's responses.
    layers, usual
        Share of each layer in the squared norm: now, and its running mean over earlier steps (empty: not known).
    top_share
        Largest |contribution| of a token divided by the norm; None if not known.
    scales
        Usual sizes of the scales of the loss in this run (:mod:`rlwatch.gradloc.trigger`); empty: not known.
    policy_weight, kl_weight
        Usual weights of the policy and the KL term in the loss; None: not known.
    """

    advantages: RobustLevel | None = None
    rewards: RobustLevel | None = None
    layers: Mapping[str, float] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)
    top_share: float | None = None
    scales: Mapping[str, Usual] = field(default_factory=dict)
    policy_weight: Usual | None = None
    kl_weight: Usual | None = None

    @property
    def advantage(self) -> tuple[float, str] | None:
        """Return the usual absolute advantage, and ``"run"`` or ``"step"`` for where it was learnt.

        The result is None if the usual advantage is not known.
        """
        if "advantage" in self.scales and self.scales["advantage"].middle > 0:
            return self.scales["advantage"].middle, "run"
        return None if self.advantages is None or not self.advantages.middle else (self.advantages.middle, "step")

    @property
    def coefficient(self) -> float | None:
        """Return the usual absolute coefficient |dL/dlogp| in this run; None if not known."""
        usual = self.scales.get("coefficient")
        return usual.middle if usual is not None and usual.middle > 0 else None

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
        """Compute the levels from one advantage and one reward for each response.

        The other arguments are fields of the class.
        """
        sizes = RobustLevel.of([abs(value) for value in advantages if value])
        return cls(sizes, RobustLevel.of(rewards), layers or {}, usual or {}, top_share)


@dataclass(frozen=True, slots=True)
class ResponseLevels:
    """Levels of the response that contains an outlying token: median log-ratio of its other tokens, nats; None if not
    known.

    The median is used, because a few outlying tokens do not shift it unless the whole response has drifted.
    ``log_ratio`` is against the old policy, ``rollout_log_ratio`` against the rollout engine.
    """

    log_ratio: float | None = None
    rollout_log_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class LossShare:
    """Coefficient dL/dlogp of one token as the loss computes it: the formula of the loss (``form``) and its inputs for
    the token (``row``, (COLUMNS,)).
    """

    form: LossForm
    row: np.ndarray

    def of(self, name: str) -> float:
        """Return the token's value of one input of the loss, the column ``name`` of ``COLUMNS``; NaN if not known."""
        return float(self.row[COLUMNS.index(name)])

    @property
    def parts(self) -> tuple[float, float]:
        """Return two parts that sum up to the token's coefficient dL/dlogp: that of the policy term and that of the KL
        term.
        """
        policy, kl = self.form.parts(self.row[None])
        return float(policy[0]), float(kl[0])

    @property
    def log_weight(self) -> float:
        """Return the logarithm of ratio and importance weight in the policy term, nats; -Inf if the term is clipped."""
        plain = self.form.policy * abs(self.of("advantage")) / float(self.form.shape.lengths(self.row[None])[0])
        policy = abs(self.parts[0])
        return math.log(policy / plain) if policy > 0 and plain > 0 else -math.inf


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a token's coefficient dL/dlogp, such as its advantage, and ``excess``: how far it is above its
    usual size, in nats.

    If ``excess`` is below 0, the factor made the coefficient smaller. ``why`` describes the factor in words.
    """

    excess: float
    cause: ExcessFactor
    why: str


def cause_of(
    numbers: Mapping[str, float],
    response: ResponseLevels,
    step: StepLevels,
    *,
    share: LossShare | None = None,
    pull: float | None = None,
) -> tuple[ExcessFactor, str]:
    """Return the factor that best explains the excess of a token, and the reason in one sentence.

    ``numbers`` are the known quantities of the token, as in :class:`rlwatch.gradloc.report.Culprit`; ``response`` and
    ``step`` are what they are compared with. ``share`` is its coefficient as the loss computes it, if the form of the
    loss is known. ``pull`` is the factor between the gradient of its log-prob and that of other tokens, if it was
    measured. A factor that made the coefficient smaller is never named, nor is a KL term if the loss has none.
    """
    bad = [name for name, value in numbers.items() if not math.isfinite(value)]
    if bad:
        return ExcessFactor.NON_FINITE, f"not finite: {', '.join(bad)}"
    factors = factors_of(numbers, response, step, share=share, pull=pull)
    worst = max(factors, key=lambda factor: factor.excess, default=None)
    if worst is not None and worst.excess >= LEAST_EXCESS:
        return worst.cause, worst.why
    return (
        _reward(numbers, step)
        or _layer(step)
        or (ExcessFactor.UNEXPLAINED, "ratios, advantage, reward and layers are all within their usual range")
    )


def factors_of(
    numbers: Mapping[str, float],
    response: ResponseLevels,
    step: StepLevels,
    *,
    share: LossShare | None = None,
    pull: float | None = None,
) -> list[Factor]:
    """Return the factors of a token's coefficient dL/dlogp (advantage, ratio...), each with its excess over the usual
    size, in nats.

    The arguments are those of :func:`cause_of`.
    """
    found = [*([] if pull is None or not pull > 0 else [_pull(pull)]), *_entropy(numbers, step)]
    if share is not None and abs(share.parts[1]) > abs(share.parts[0]):
        return [*found, *_kl(share, step)]
    found += _advantage(numbers, step)
    if share is not None:
        return [*found, *_weights(share, numbers, response), *_normaliser(share, step)]
    limit = math.inf
    if step.coefficient is not None and numbers.get("coefficient"):
        limit = math.log(abs(numbers["coefficient"]) / step.coefficient) + LEAST_EXCESS
    found += _ratio(numbers, response)
    return [replace(factor, excess=min(factor.excess, limit)) for factor in found]


def _pull(pull: float) -> Factor:
    why = f"its log-prob reacts {pull:.3g} times as strongly to the weights as that of other tokens"
    return Factor(math.log(pull), ExcessFactor.LOGP_GRADIENT, why)


def _entropy(numbers: Mapping[str, float], step: StepLevels) -> list[Factor]:
    """Return the entropy term's factor, if that term weights this token more than the policy term does, and than
    others.
    """
    weight, compared = abs(numbers.get("entropy_coefficient", 0.0)), abs(numbers.get("coefficient", 0.0))
    if not weight > compared:
        return []
    summed, tokens = step.scales.get("entropy coefficient"), step.scales.get("tokens")
    usual = 0.0 if summed is None or tokens is None or not tokens.middle > 0 else summed.middle / tokens.middle
    if usual > 0:
        why = f"the entropy term weighs it {weight / usual:.3g} times as much as a token usually"
        return [Factor(math.log(weight / usual), ExcessFactor.ENTROPY_TERM, why)]
    compared = max(compared, step.coefficient or 0.0)
    why = "the entropy term weighs it more than all else does"
    return [Factor(math.log(weight / compared) if compared > 0 else math.inf, ExcessFactor.ENTROPY_TERM, why)]


def _advantage(numbers: Mapping[str, float], step: StepLevels) -> list[Factor]:
    advantage, usual = numbers.get("advantage"), step.advantage
    if not advantage or usual is None:
        return []
    why = f"its advantage is {advantage:.3g}, where the {usual[1]}'s are about {usual[0]:.3g} in size"
    return (
        [Factor(math.log(abs(advantage) / usual[0]), ExcessFactor.REWARD_OUTLIER, why)] if _far(advantage, step) else []
    )


def _far(advantage: float, step: StepLevels) -> bool:
    """Return True if the advantage is beyond those of healthy steps, or of this step if those are not known."""
    largest = step.scales.get("largest advantage")
    if largest is not None and largest.middle > 0:
        return abs(advantage) > largest.upper(1.2)
    if step.advantages is None:
        return False
    return step.advantages.z(abs(advantage), least=FLAT * step.advantages.middle) > OUTLIER_Z


def _weights(share: LossShare, numbers: Mapping[str, float], response: ResponseLevels) -> list[Factor]:
    """Return the factors of ratio and importance weight, as far as the loss lets them count."""
    total, shape = share.log_weight, share.form.shape
    ratio = share.of(shape.ratio) if shape.ratio else 0.0
    weight = share.of(shape.weight) if shape.weight else 0.0
    if total <= 0 or not math.isfinite(total):
        return []
    # A cap makes the product smaller than its factors: each keeps its part of what was left.
    up = max(ratio, 0.0) + max(weight, 0.0)
    if up <= 0:
        why = f"the loss weighs it {_factor(total)} as much as others of its advantage"
        return [Factor(total, ExcessFactor.UNEXPLAINED, why)]
    found = []
    if ratio > 0:
        cause, why = _ratio_words(numbers, response, "old_logp")
        if shape.ratio != "ratio":
            cause, why = (
                ExcessFactor.SEQUENCE_RATIO,
                f"the ratio of its response to the old policy is {_number_of(ratio)}",
            )
        found.append(Factor(min(ratio, total * ratio / up), cause, why))
    if weight > 0:
        who = "its response's importance weight" if shape.weight != "weight" else "its importance weight"
        part = min(weight, total * weight / up)
        found.append(
            Factor(part, ExcessFactor.IMPORTANCE_WEIGHT, f"{who} against the rollout engine is {_number_of(part)}")
        )
    return found


def _ratio_words(numbers: Mapping[str, float], response: ResponseLevels, other: str) -> tuple[ExcessFactor, str]:
    """Describe the ratio of the token or of its whole response: the one that is further beyond its limit."""
    name, mean = {
        "old_logp": ("the old policy", response.log_ratio),
        "rollout_logp": ("the rollout engine", response.rollout_log_ratio),
    }[other]
    apart = numbers["logp"] - numbers[other] if other in numbers and "logp" in numbers else 0.0
    if mean is not None and abs(mean) / SEQUENCE_LOG_RATIO > max(1.0, abs(apart) / TOKEN_LOG_RATIO):
        return (
            ExcessFactor.SEQUENCE_RATIO,
            f"its response is, per token, {_times(mean)} under the policy as under {name}",
        )
    return ExcessFactor.TOKEN_RATIO, f"the token is {_times(apart)} under the policy as under {name}"


def _ratio(numbers: Mapping[str, float], response: ResponseLevels) -> list[Factor]:
    """Return ratios that make a coefficient larger, for a token whose loss has an unknown form."""
    found = []
    for other, mean in (("old_logp", response.log_ratio), ("rollout_logp", response.rollout_log_ratio)):
        known = other in numbers and "logp" in numbers
        apart = numbers["logp"] - numbers[other] if known else 0.0
        beyond = max(apart / TOKEN_LOG_RATIO, (mean or 0.0) / SEQUENCE_LOG_RATIO)
        if beyond > 1:
            cause, why = _ratio_words(numbers, response, other)
            found.append(Factor(max(apart, mean or 0.0, LEAST_EXCESS), cause, why))
    return found


def _normaliser(share: LossShare, step: StepLevels) -> list[Factor]:
    usual = step.policy_weight
    if usual is None or not usual.middle > 0 or not share.form.policy > 0:
        return []
    times = usual.times(share.form.policy)
    why = f"the loss weighs every advantage {times:.3g} times as much as usual"
    return [Factor(math.log(times), ExcessFactor.NORMALISER, why)]


def _kl(share: LossShare, step: StepLevels) -> list[Factor]:
    """Return the KL term's factor, if it makes the most of this coefficient."""
    policy, kl = share.parts
    times = usual.times(share.form.kl) if (usual := step.kl_weight) is not None and usual.middle > 0 else 1.0
    compared = step.coefficient or abs(policy)
    excess = math.log(abs(kl) / compared) if compared > 0 else math.inf
    if math.log(times) > excess / 2:
        return [Factor(math.log(times), ExcessFactor.KL_TERM, f"the KL term weighs {times:.3g} times as much as usual")]
    gap = share.of("gap")
    who = f"the token is {_times(gap)} under the reference as under the policy" if abs(gap) > 1 else "it"
    much = "more than all else does" if not compared > 0 else f"{abs(kl) / compared:.3g} times as much as usual"
    return [Factor(excess, ExcessFactor.KL_TERM, f"{who}, and the KL term of the loss pulls it back {much}")]


def cause_of_step(culprits: Sequence[Culprit], step: StepLevels) -> ExcessFactor:
    """Return the cause of the whole step: a layer if no token explains it, else the cause with the largest shares.

    ``culprits`` are the outlying tokens of the step.
    """
    if any(culprit.cause is ExcessFactor.NON_FINITE for culprit in culprits):
        return ExcessFactor.NON_FINITE
    if _layer(step):
        return ExcessFactor.LAYER
    weights: defaultdict[ExcessFactor, float] = defaultdict(float)
    for place, culprit in enumerate(culprits):
        weights[culprit.cause] += abs(culprit.share) if culprit.share is not None else 1.0 / (1 + place)
    return max(weights, key=weights.__getitem__, default=ExcessFactor.UNEXPLAINED)


def _reward(numbers: Mapping[str, float], step: StepLevels) -> tuple[ExcessFactor, str] | None:
    reward = numbers.get("reward")
    if reward is not None and step.rewards is not None and abs(step.rewards.z(reward)) > OUTLIER_Z:
        return (
            ExcessFactor.REWARD_OUTLIER,
            f"its reward is {reward:.3g}, where the step's are about {step.rewards.middle:.3g}",
        )
    return None


def _layer(step: StepLevels) -> tuple[ExcessFactor, str] | None:
    why = layer_to_blame(step)
    return (ExcessFactor.LAYER, why) if why else None


def layer_to_blame(step: StepLevels, *, small: float = SMALL_TOKEN_SHARE, of_tokens: bool = True) -> str:
    """Return a description of a layer whose share is an outlier, if no token holds more than ``small``.

    The result is empty if there is no such layer. With ``of_tokens`` False the tokens' shares do not matter.
    """
    if not step.layers or (of_tokens and (step.top_share is None or not step.top_share < small)):
        return ""
    name = max(step.layers, key=step.layers.__getitem__)
    share, usual = step.layers[name], step.usual.get(name)
    if usual is None or not (share > LARGE_LAYER_SHARE and share > LAYER_TIMES * usual):
        return ""
    most = f", and no token more than {step.top_share:.1%}" if of_tokens and step.top_share is not None else ""
    return f"{name} makes {share:.0%} of the squared norm, usually {usual:.0%}{most}"


def _times(log_ratio: float) -> str:
    return f"{_factor(log_ratio)} as likely"


def _factor(logarithm: float) -> str:
    return f"{_number_of(logarithm)} times"


def _number_of(logarithm: float) -> str:
    """Format ``e^x`` as a factor, or as a power of e if that is unreadable."""
    return f"e^{logarithm:.3g}" if abs(logarithm) > 7 else f"{math.exp(logarithm):.3g}"


# The numbers of one loss pass, copied from the device once, from which culprits and their responses are described.

NUMBERS = (
    "logp", "old_logp", "rollout_logp", "ref_logp", "entropy", "ratio", "advantage", "reward", "coefficient",
    "entropy_coefficient",
)  # fmt: skip
"""Quantities that may be known of a token, in this order."""


@dataclass(frozen=True, slots=True)
class HostPass:
    """The numbers of one micro-batch of this rank, copied to the CPU.

    ``columns`` (B, T), float64, has those of :data:`NUMBERS` that are known. ``mask`` (B, T) is bool; ``ids`` (B, T)
    are int64, None if not known. ``loss`` (COLUMNS, B, T) are the inputs of the loss for each token and ``form`` its
    formula, if it is known. ``groups`` and ``tasks`` are the prompt and the task of each sequence, ``identity`` other
    facts that the trainer gave. ``eos`` are ids that end a response.
    """

    rank: int
    microbatch: int
    first_row: int
    mask: np.ndarray
    columns: Mapping[str, np.ndarray]
    ids: np.ndarray | None = None
    loss: np.ndarray | None = None
    form: LossForm | None = None
    groups: Sequence[str] | None = None
    tasks: Sequence[str] | None = None
    identity: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    eos: tuple[int, ...] = ()

    def ended(self, at: TokenAt) -> int | None:
        """Return the position of the end token that precedes the token at ``at`` in its answer; None if none does.

        All tokens between the two must be in the mask. In a dialogue the text of the environment follows the end of a
        turn, and that text is not in the mask.
        """
        if self.ids is None or not self.eos:
            return None
        ends = np.flatnonzero(np.isin(self.ids[at.row, : at.position], self.eos) & self.mask[at.row, : at.position])
        within = [end for end in ends.tolist() if self.mask[at.row, end : at.position].all()]
        return within[0] if within else None

    def share(self, at: TokenAt) -> LossShare | None:
        """Return the coefficient dL/dlogp of the token at ``at`` with the formula and the inputs by which the loss
        computes it.

        None if the formula of the loss is not known.
        """
        if self.form is None or self.loss is None:
            return None
        return LossShare(self.form, self.loss[:, at.row, at.position])

    def token_id(self, at: TokenAt) -> int | None:
        """Return the id of the token at ``at``; None if ids are not known."""
        return None if self.ids is None else int(self.ids[at.row, at.position])

    def numbers(self, at: TokenAt) -> dict[str, float]:
        """Return the known quantities of the token at ``at``; NaN is a value, quantities that were not measured are
        absent.
        """
        return {name: float(column[at.row, at.position]) for name, column in self.columns.items()}

    def response(self, at: TokenAt) -> ResponseLevels:
        """Return the median log-ratios, against the old policy and the rollout engine, of the response that contains
        the token at ``at``.

        The token itself does not count.
        """
        others = self.mask[at.row].copy()
        others[at.position] = False
        return ResponseLevels(self._apart(at.row, others, "old_logp"), self._apart(at.row, others, "rollout_logp"))

    def _apart(self, row: int, where: np.ndarray, other: str) -> float | None:
        if other not in self.columns or not where.any():
            return None
        middle = float(np.median((self.columns["logp"][row] - self.columns[other][row])[where]))
        return middle if math.isfinite(middle) else None

    def per_response(self, name: str) -> list[float]:
        """Return the quantity ``name`` at the first token of each response that has tokens; empty if not known."""
        if name not in self.columns:
            return []
        return [
            float(values[mask][0]) for values, mask in zip(self.columns[name], self.mask, strict=True) if mask.any()
        ]


def on_host(passes: RecordedPasses, rank: int = 0, *, forms: bool = False) -> list[HostPass]:
    """Copy the numbers of each recorded micro-batch of ``rank`` to the CPU, and return the copies.

    Waits for the device once for each micro-batch, or twice with ``forms``, which also finds the formula of the loss.
    """
    hosts = [_copied(one, rank, k) for k, one in enumerate(passes.all)]
    if not forms:
        return hosts
    losses = [columns_of(one).double().cpu().numpy() for one in passes.all]
    tables = [loss[:, host.mask].T for loss, host in zip(losses, hosts, strict=True)]
    found = forms_of([table[np.isfinite(table[:, 0])] for table in tables])
    return [replace(host, loss=loss, form=form) for host, loss, form in zip(hosts, losses, found, strict=True)]


def step_levels(
    hosts: Sequence[HostPass],
    *,
    world: World | None = None,
    layers: Mapping[str, float] | None = None,
    usual: Mapping[str, float] | None = None,
    top_share: float | None = None,
) -> StepLevels:
    """Return the usual advantages and rewards of the step, from the responses of all ranks of ``world``. A collective.

    ``hosts`` are the micro-batches of this rank, on the CPU; the other arguments are fields of :class:`StepLevels`.
    """
    here = [[value for host in hosts for value in host.per_response(name)] for name in ("advantage", "reward")]
    every = [here] if world is None else gather_plain(world, here)
    advantages, rewards = ([value for rank in every for value in rank[i]] for i in (0, 1))
    return StepLevels.of(advantages, rewards, layers=layers, usual=usual, top_share=top_share)


def _copied(one: LossPass, rank: int, microbatch: int) -> HostPass:
    """Copy everything to the host in one tensor; token ids are exact below 2**24."""
    tokens, known = one.tokens, _known(one)
    ids = {} if tokens.ids is None else {"ids": tokens.ids.to(torch.float32)}
    parts = {"mask": tokens.mask.to(torch.float32), **ids, **known}
    host = torch.stack([widen(part).expand(one.shape).double() for part in parts.values()]).cpu().numpy()
    columns = dict(zip(parts, host, strict=True))
    mask = columns.pop("mask") != 0
    whole = columns.pop("ids").astype(np.int64) if ids else None
    return HostPass(
        rank,
        microbatch,
        one.first_row,
        mask,
        columns,
        whole,
        groups=one.groups,
        tasks=one.tasks,
        identity=one.identity,
        eos=tokens.eos,
    )


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


# Description of culprits: their numbers, their cause, and the reason in words.


@dataclass(frozen=True, slots=True)
class Described:
    """Known quantities of one token, and levels of the response that contains it.

    ``ended`` is the position of an end token that precedes it in its answer, or None.
    """

    at: TokenAt
    sequence: int
    token_id: int | None
    numbers: dict[str, float]
    response: ResponseLevels
    share: LossShare | None = None
    ended: int | None = None

    def said(self, why: str) -> str:
        """Return the text ``why``, preceded by a remark if the token follows the end of the answer."""
        if self.ended is None:
            return why
        return f"it stands behind the end token at position {self.ended}: the mask counts what is no answer; {why}"


def describe(hosts: Sequence[HostPass], at: TokenAt) -> Described:
    """Return the known quantities of the token at ``at``; ``hosts`` are the micro-batches of the token's rank, on the
    CPU.
    """
    host = hosts[at.microbatch]
    return Described(
        at,
        host.first_row + at.row,
        host.token_id(at),
        host.numbers(at),
        host.response(at),
        host.share(at),
        host.ended(at),
    )


def culprit_of(
    token: Described,
    levels: StepLevels,
    *,
    norm: float | None = None,
    contribution: float | None = None,
    own: OwnGradient | None = None,
    pull: float | None = None,
) -> Culprit:
    """Return a token as a culprit (an outlying token in the gradient), with its cause.

    Its share is ``contribution / norm`` if both are known. ``levels`` are the usual values in the step, ``own`` is the
    token's own gradient, ``pull`` as for :func:`cause_of`.
    """
    cause, why = cause_of(token.numbers, token.response, levels, share=token.share, pull=pull)
    share = contribution / norm if contribution is not None and norm else None
    culprit = Culprit(token.at, token.sequence, token.token_id, cause, token.said(why), numbers=token.numbers)
    return replace(culprit, contribution=contribution, share=share, own=own)


def culprits_of_trace(hosts: Sequence[HostPass], trace: NonfiniteTrace, most: int = 8) -> list[Culprit]:
    """Return the tokens of this rank at which ``trace`` found a number that is not finite, as culprits, at most
    ``most``.

    ``hosts`` are the micro-batches of this rank, on the CPU.
    """
    places = trace.tokens or ([trace.at] if trace.at is not None else [])
    here = [at for at in places if any(host.rank == at.rank for host in hosts)]
    described = [describe(hosts, at) for at in here[:most]]
    return [
        Culprit(
            token.at,
            token.sequence,
            token.token_id,
            ExcessFactor.NON_FINITE,
            token.said(trace.message),
            numbers=token.numbers,
        )
        for token in described
    ]


# Exchange of culprits, so that every rank has those of all ranks; they are sent as text.


def size_of(culprit: Culprit) -> float:
    """Return the size by which culprits are ranked: the norm of the token's own gradient, or the contribution if it is
    larger.
    """
    # |<g_t, u>| <= ||g_t|| by Cauchy-Schwarz: a contribution is larger only where the token was not verified, or
    # rounding.
    own = 0.0 if culprit.own is None else culprit.own.norm
    contribution = 0.0 if culprit.contribution is None else abs(culprit.contribution)
    return max((value for value in (own, contribution) if not math.isnan(value)), default=math.inf)


def shared_culprits(local: Sequence[Culprit], world: World) -> list[Culprit]:
    """Return the culprits (outlying tokens) of all ranks: those of rank 0 in their order, then those of rank 1, and so
    on.

    ``local`` are this rank's. A collective: all ranks call it. NaN and Inf are preserved.
    """
    if world.size == 1:
        return list(local)
    return [_culprit_from(body) for rank in gather_plain(world, [asdict(each) for each in local]) for body in rank]


def _culprit_from(body: Mapping[str, Any]) -> Culprit:
    own = body["own"]
    changed = {
        "at": TokenAt(**body["at"]),
        "cause": ExcessFactor(body["cause"]),
        "own": None if own is None else OwnGradient(**own),
    }
    return Culprit(**{**body, **changed})
