"""Verdict, cause and cure of a step's spike, in words and numbers, from its outliers and from the scales that grew."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlwatch.gradloc.attribution import Attribution
from rlwatch.gradloc.culprits import HostPass, StepLevels, cause_of_step, layer_to_blame, size_of
from rlwatch.gradloc.cures import (
    GAP_CAP,
    RATIO_CAP,
    RESPONSE_CAP,
    WEIGHT_CAP,
    InterventionCatalog,
    Proposal,
    clipped_advantages,
    clipped_gaps,
    clipped_ratios,
    masked,
    parts_of,
    scaled,
    truncated_weights,
)
from rlwatch.gradloc.direction import expert_to_blame
from rlwatch.gradloc.distributed import World, gather_plain
from rlwatch.gradloc.loss_form import LossForm, weight_of
from rlwatch.gradloc.report import BlameLevel, Culprit, Cure, ExcessFactor, Unit
from rlwatch.gradloc.trigger import ScaleHistory, Scales, Usual, usual_of
from rlwatch.gradloc.verdict import DOMINANT, HALF, Blame, Standing, TokenLimits, coefficients
from rlwatch.stats import median
from rlwatch.wording import number, percent

ALIKE = 3.0
"""Multiple of their usual size above which coefficients that all grew concern the whole batch."""
GREW = 0.55
"""Share of the responses with a signal that must have grown for the whole batch to be the cause."""
USUAL_NORM = 3.0
"""Multiple of its usual size up to which a norm needs no explanation."""
ALONE = 0.9
"""Share of the squared norm above which a layer is the cause, also if the tokens do not explain the norm."""
LITTLE, REST = 0.1, 0.05
"""Limits for small outliers, which are left out of the tokens to blame.

They are smaller than the first share of the worst token, and together hold at most the second share of all outliers.
"""
MAJOR = 0.5
"""Share of the coefficients, or of the norm, above which a term of the loss is their main part."""


@dataclass(frozen=True, slots=True)
class StepScales:
    """Scales of a spiking step (sizes of its coefficients, advantages and ratios) with their usual sizes, and the
    formula of its loss.

    ``form`` is that formula. ``kl_share`` is the KL term's part in all coefficients. ``weighed`` is the median
    logarithm of ratio and importance weight as the loss uses them.
    """

    scales: Scales = field(default_factory=dict)
    usual: Mapping[str, Usual] = field(default_factory=dict)
    samples: Sequence[np.ndarray] = ()
    form: LossForm | None = None
    policy_weight: Usual | None = None
    kl_weight: Usual | None = None
    kl_share: float = 0.0
    weighed: float = 0.0

    @classmethod
    def of(cls, scales: Scales | None, history: ScaleHistory | None) -> StepScales:
        """Return the scales of a step (sizes of its coefficients, advantages and ratios) with the usual sizes from
        ``history``; empty if either is None.
        """
        if scales is None or history is None:
            return cls()
        return cls(scales, history.usual(), history.samples)

    def with_forms(self, hosts: Sequence[HostPass], world: World) -> StepScales:
        """Return the scales with the formula of the loss, as the first rank found it that could. A collective.

        ``hosts`` are the micro-batches of this rank, on the CPU.
        """
        form = next((host.form for host in hosts if host.form is not None), None)
        weights = ([], []) if form is None else weight_of(form, self.samples)
        parts = [parts_of(host) for host in hosts]
        sums = [float(sum(np.abs(part[i]).sum() for part in parts)) for i in (0, 1)]
        body = {
            "form": None if form is None else form.as_plain(),
            "weights": weights,
            "sums": sums,
            "logs": _logs(hosts),
        }
        every = gather_plain(world, body)
        first = next((one for one in every if one["form"] is not None), None)
        if first is None:
            return self
        policy, kl = (sum(one["sums"][i] for one in every) for i in (0, 1))
        policies, kls = first["weights"]
        logs = [one["logs"] for one in every if one["logs"] is not None]
        return replace(
            self,
            form=LossForm.from_plain(first["form"]),
            policy_weight=usual_of(policies) if policies else None,
            kl_weight=usual_of(kls) if kls else None,
            kl_share=kl / (policy + kl) if policy + kl > 0 else 0.0,
            weighed=median(logs) if logs else 0.0,
        )

    def levels(self, step: StepLevels) -> StepLevels:
        """Return ``step``, the levels with which its tokens are compared, with the usual scales and weights of the run
        added.
        """
        return replace(step, scales=self.usual, policy_weight=self.policy_weight, kl_weight=self.kl_weight)

    def times(self, name: str) -> float | None:
        """Return the factor between the scale ``name`` (such as the median advantage) and its usual size in the run;
        None if not known.
        """
        if name not in self.scales or name not in self.usual:
            return None
        return self.usual[name].times(self.scales[name])

    @property
    def all_times(self) -> dict[str, float]:
        """Return name -> factor between the value in this step and its usual size, for each scale of the step and each
        weight of the loss, if known.
        """
        known = {name: times for name in self.scales if (times := self.times(name)) is not None}
        if self.form is not None and self.policy_weight is not None and self.policy_weight.middle > 0:
            known["policy weight"] = self.policy_weight.times(self.form.policy)
        if self.form is not None and self.kl_weight is not None and (self.form.kl or self.kl_weight.middle):
            known["KL weight"] = self.kl_weight.times(self.form.kl)
        return known


def _logs(hosts: Sequence[HostPass]) -> float | None:
    """Return the median log-weight of this rank's tokens, as the form of the loss has it."""
    found = []
    for host in hosts:
        if host.form is not None and host.loss is not None:
            on = host.mask & np.isfinite(host.loss[0]) & (host.loss[0] != 0)
            found.append(host.form.shape.log_weight(np.moveaxis(host.loss, 0, -1)[on]))
    every = np.concatenate(found) if found else np.zeros(0)
    return float(np.median(every)) if len(every) else None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a spike: level and cause to blame, a statement and its reason in words, and cures that would have
    helped.
    """

    verdict: BlameLevel
    cause: ExcessFactor
    statement: str
    because: str = ""
    cures: Sequence[Cure] = ()
    units: Sequence[Unit] = ()


@dataclass(frozen=True, slots=True)
class Explaining:
    """Explainer of the gradient spike of one step. Its methods are collectives: all ranks call them with the same
    numbers.

    ``grown`` are the step's scales (sizes of its coefficients, advantages...) with their usual sizes, ``limits`` the
    sizes of outlying tokens, and ``pharmacy`` computes the effect of changes of the loss.
    """

    grown: StepScales
    limits: TokenLimits
    pharmacy: InterventionCatalog
    world: World

    @property
    def norm(self) -> float:
        """Return the gradient norm of the step."""
        return self.pharmacy.direction.norm

    def batch_wide(self) -> Explanation | None:
        """Return the explanation that the whole batch is to blame, found without a forward pass; else None.

        It applies if all coefficients grew alike and by as much as the norm did.
        """
        alike, usual = self.grown.times("coefficient"), self.grown.usual.get("norm")
        if alike is None or usual is None:
            return None
        if self.grown.kl_share >= MAJOR and self.grown.all_times.get("KL weight", 1.0) >= ALIKE:
            return self.batch((), alike)
        if not ALIKE <= alike < math.inf:
            return None
        # A factor that all tokens share may be larger than that: advantages may happen to be smaller than ever.
        alike = max([alike, *(math.exp(factor[0]) for factor in self._shared())])
        top = self.grown.scales["largest coefficient"] / alike <= self.limits.coefficient
        explained = self.norm / alike <= max(usual.upper(1.0), USUAL_NORM * usual.middle)
        return self.batch((), alike) if top and explained and self._small_ones_too(alike) else None

    def _small_ones_too(self, alike: float) -> bool:
        """Return True if most responses with a signal grew, small ones too; a mean over micro-batches would hide few.

        A response grew if its median coefficient exceeds the usual one by half of the factor, in its logarithm. Of 16
        responses with advantages drawn from a normal distribution, 6 that are 20 times as large pass in 1 step of 100,
        and 16 that are 4 times as large in 98. A collective.
        """
        usual = self.grown.usual["coefficient"].middle
        here = [0, 0]
        for host in self.pharmacy.hosts:
            push = coefficients(host)
            sizes = [] if push is None else [np.abs(row[row != 0]) for row in push]
            middles = [float(np.median(size)) for size in sizes if len(size)]
            here[0] += sum(middle >= math.sqrt(alike) * usual for middle in middles)
            here[1] += len(middles)
        every = gather_plain(self.world, here)
        return bool(sum(rank[0] for rank in every) >= GREW * sum(rank[1] for rank in every))

    def batch(self, units: Sequence[Unit], alike: float | None) -> Explanation:
        """Return the explanation that all responses are to blame alike, by the factor that they share.

        ``units`` are the parts of the gradient; ``alike`` is the factor by which all coefficients grew, None if not
        known.
        """
        excess, cause, because, proposal = max(self._shared(), key=lambda factor: factor[0], default=_NOTHING_SHARED)
        least = math.log(ALIKE) if alike is None else 0.5 * math.log(max(alike, ALIKE))
        if excess < least:
            cause, proposal, because = ExcessFactor.UNEXPLAINED, None, ""
            if alike is not None:
                because = f"all coefficients of the loss are {number(alike)} times their usual size"
        statement = "batch-wide, no culprit"
        return Explanation(BlameLevel.BATCH, cause, statement, because, self._batch_cures(proposal, excess), units)

    def _shared(self) -> list[tuple[float, ExcessFactor, str, Proposal | None]]:
        """Return factors that all tokens share: excess over the usual (nats), cause, words, cure."""
        grown = self.grown
        found: list[tuple[float, ExcessFactor, str, Proposal | None]] = []
        times = grown.all_times
        if grown.kl_share >= MAJOR:
            weight = times.get("KL weight", 1.0)
            if weight >= ALIKE:
                cure = Proposal("rescale KL", 1 / weight, "with the KL weight as usual", scaled(1.0, 1 / weight))
                text = f"the KL weight is {number(weight)} times its usual size"
                return [(math.log(weight), ExcessFactor.KL_TERM, text, cure)]
            share = percent(grown.kl_share)
            text = f"the KL term makes {share} of all coefficients: the policy is far from the reference"
            return [(math.log(times.get("coefficient", ALIKE)), ExcessFactor.KL_TERM, text, _CLIP_KL)]
        if 0 < (size := times.get("advantage", 0.0)) < math.inf:
            text = f"advantages are {number(size)} times their usual scale"
            cure = Proposal("rescale advantages", 1 / size, "with advantages at their usual scale", scaled(1 / size))
            found.append((math.log(size), ExcessFactor.ADVANTAGE_SCALE, text, cure))
        if 0 < (weight := times.get("policy weight", 0.0)) < math.inf:
            text = f"the loss weighs every advantage {number(weight)} times as much as usual"
            cure = Proposal("rescale loss", 1 / weight, "normalised as usual", scaled(1 / weight, 1 / weight))
            found.append((math.log(weight), ExcessFactor.NORMALISER, text, cure))
        if grown.form is not None and grown.weighed > 0:
            shape = grown.form.shape
            weighs = "importance weights" if shape.weight and not shape.ratio else "ratios to the old policy"
            text = f"the {weighs} are {number(math.exp(grown.weighed))} in the middle, where they should be 1"
            name = shape.weight if shape.weight and not shape.ratio else shape.ratio
            cause = ExcessFactor.IMPORTANCE_WEIGHT if name == shape.weight else ExcessFactor.TOKEN_RATIO
            found.append((grown.weighed, cause, text, _clip_ratios(name)))
        return found

    def _batch_cures(self, proposal: Proposal | None, excess: float) -> list[Cure]:
        if proposal is None:
            return []
        whole = proposal.kind in {"rescale advantages", "rescale loss"} and self._only_policy
        if whole:  # the gradient is proportional to it: nothing has to be run
            return [Cure(proposal.kind, proposal.value, proposal.action, self.norm, self.norm * math.exp(-excess))]
        return self.cured([proposal])

    @property
    def _only_policy(self) -> bool:
        """Return True if the loss has no other term than the policy's."""
        others = (self.grown.scales.get(name, 0.0) for name in ("entropy coefficient", "auxiliary coefficient"))
        return self.grown.form is not None and self.grown.form.kl == 0 and not any(others)

    def cured(self, proposals: Sequence[Proposal]) -> list[Cure]:
        """Return the gradient norm with each change of the loss in ``proposals`` whose effect could be computed."""
        return [cure for proposal in proposals if (cure := self.pharmacy.cure(proposal)) is not None]

    def without_tokens(self, attribution: Attribution, levels: StepLevels, count: int) -> Explanation | None:
        """Return the explanation if tokens are not to blame but another term of the loss, or a layer.

        ``attribution``: contributions of the tokens. ``levels``: usual values of the run, with the shares of layers.
        The result is None if tokens may be to blame. ``count`` is the number of outlying tokens.
        """
        aux, entropy = attribution.aux / self.norm, attribution.entropy / self.norm
        outside = max(0.0, -attribution.gap) if attribution.settled else 0.0
        layer = layer_to_blame(levels, of_tokens=False)
        if outside + aux >= MAJOR and outside > aux and layer and max(levels.layers.values()) >= ALONE:
            return self.layer(layer, levels)  # what is between the tokens and its gradient, not another term
        if outside + aux >= MAJOR:
            statement = (
                f"not from tokens: {percent(outside + aux)} of the gradient norm does not come through their log-probs"
            )
            what = (
                "the auxiliary loss" if aux > outside else "a term of the loss that the policy's log-probs are not in"
            )
            cure = Proposal("without the term", None, "without that term", only=True)
            because = f"{what} makes it" + (f", and {layer}" if layer else "")
            return Explanation(BlameLevel.OUTSIDE, ExcessFactor.OTHER_TERM, statement, because, self.cured([cure]))
        alone = levels.top_share is not None and levels.top_share >= HALF * entropy
        if entropy >= MAJOR and not alone:  # if one token causes it, that token is reported instead
            times = self.grown.times("entropy coefficient")
            known = times is not None and math.isfinite(times)
            text = f"the entropy term makes {percent(entropy)} of the gradient norm"
            because = text + (f", with {number(times)} times its usual weight" if known else "")
            factor = 1 / times if times is not None and known and times > 0 else 0.0
            action = "with the entropy weight as usual" if factor else "without the entropy term"
            cure = Proposal("rescale entropy", factor, action, scaled(1.0), entropy=factor)
            return Explanation(
                BlameLevel.BATCH, ExcessFactor.ENTROPY_TERM, "batch-wide, no culprit", because, self.cured([cure])
            )
        layer = "" if count else layer_to_blame(levels, small=DOMINANT)
        return self.layer(layer, levels) if layer else None

    def layer(self, why: str, levels: StepLevels) -> Explanation:
        """Return the explanation that one layer is to blame; ``why`` describes it.

        ``levels``: usual values of the run, with the shares of layers.
        """
        name = max(levels.layers, key=levels.layers.__getitem__)
        share, usual = levels.layers[name], levels.usual.get(name, 0.0)
        rest = self.norm**2 * (1 - share)
        limit = math.sqrt(rest * usual / (1 - usual)) if usual < 1 else 0.0
        action = f"with {name} clipped to its usual share"
        cure = Cure("clip layer", limit, action, self.norm, math.sqrt(rest + limit**2))
        statement = f"{name} holds {percent(share)} of the squared gradient norm{self._expert_of(name)}; "
        statement += "no single token stands out"
        return Explanation(BlameLevel.LAYER, ExcessFactor.LAYER, statement, why, [cure])

    def _expert_of(self, layer: str) -> str:
        """Name the expert that holds most of the ``layer``; empty if no expert does. A collective."""
        found = expert_to_blame(self.pharmacy.direction.gradients, layer)
        first = gather_plain(self.world, [] if found is None else list(found))[0]
        return f", {percent(first[1])} of that its expert {first[0]}" if first else ""

    def of_culprits(
        self, blamed: Blame, culprits: Sequence[Culprit], levels: StepLevels, standing: Standing, *, count: int
    ) -> Explanation:
        """Return the explanation by the outlying tokens.

        ``blamed`` is the level to blame, ``culprits`` are the worst outliers, ``standing`` (B, T) marks all outliers of
        each pass, and ``count`` is their number.
        """
        if not culprits:
            layer = layer_to_blame(levels, small=DOMINANT)
            return self.layer(layer, levels) if layer else self._nothing()
        if blamed.verdict is BlameLevel.BATCH and blamed.whole:
            return self.batch(blamed.units, self.grown.times("coefficient"))
        verdict = BlameLevel.TOKEN if blamed.verdict is BlameLevel.BATCH else blamed.verdict
        statement, units = blamed.statement, blamed.units
        if verdict in {BlameLevel.TOKEN, BlameLevel.STRETCH}:
            statement, units = _describe_tokens(blamed, culprits, count, self.world.size)
        cause = cause_of_step(culprits, replace(levels, layers={}))
        because = next((culprit.why for culprit in culprits if culprit.cause is cause), "")
        whole = verdict not in {BlameLevel.TOKEN, BlameLevel.STRETCH}
        if whole:
            guilty = {(row.rank, row.microbatch, row.row) for row in blamed.rows}
            standing = [_rows_of(host, guilty) for host in self.pharmacy.hosts]
        proposals = self._proposals(cause, levels, standing, whole=whole)
        return Explanation(verdict, cause, statement, because, self.cured(proposals), units)

    def _nothing(self) -> Explanation:
        """Return the verdict if there are no outliers, and not all tokens grew alike: report what did grow."""
        grew = {name: times for name, times in self.grown.all_times.items() if times >= 2 and name in _SAID}
        growth = [_SAID[name].format(number(grew[name])) for name in _SAID if name in grew]
        if not self.grown.usual:
            because = "what is usual in this run is not known yet"
        else:
            because = ", ".join(growth[:2]) or "nothing that was measured grew"
        return Explanation(
            BlameLevel.BATCH, ExcessFactor.UNEXPLAINED, "no culprit: no token, response or layer stands out", because
        )

    def _proposals(self, cause: ExcessFactor, levels: StepLevels, places: Standing, *, whole: bool) -> list[Proposal]:
        """Return cures that fit the cause, and leaving the culprits out."""
        found = []
        shape = None if self.grown.form is None else self.grown.form.shape
        if cause is ExcessFactor.REWARD_OUTLIER and (cap := _largest_advantage(levels)) is not None:
            action = f"with advantages clipped at {number(cap)}"
            found.append(Proposal("clip advantages", cap, action, clipped_advantages(cap)))
        elif cause is ExcessFactor.TOKEN_RATIO and shape is not None and shape.ratio == "ratio":
            found.append(_clip_ratios("ratio"))
        elif cause is ExcessFactor.SEQUENCE_RATIO and shape is not None:
            name = "product ratio" if shape.ratio == "product ratio" else "response ratio"
            cap = RATIO_CAP if name == "product ratio" else RESPONSE_CAP
            action = f"with responses masked whose ratio is above {cap:g}"
            found.append(Proposal("clip response ratios", cap, action, clipped_ratios(cap, name)))
        elif cause is ExcessFactor.IMPORTANCE_WEIGHT and shape is not None and shape.weight:
            action = f"with importance weights truncated at {WEIGHT_CAP:g}"
            found.append(Proposal("truncate weights", WEIGHT_CAP, action, truncated_weights(WEIGHT_CAP, shape.weight)))
        elif cause is ExcessFactor.KL_TERM:
            found.append(_CLIP_KL)
        kind, what = ("mask responses", "with its responses masked") if whole else ("mask", "with these tokens masked")
        without = masked(places, self.pharmacy.hosts)
        return [*found, Proposal(kind, None, what, without, entropy=without)]


_CLIP_KL = Proposal(
    "clip KL", GAP_CAP, f"with the KL term's log-ratios clipped at {GAP_CAP:g} nats", clipped_gaps(GAP_CAP)
)
_NOTHING_SHARED: tuple[float, ExcessFactor, str, Proposal | None] = (0.0, ExcessFactor.UNEXPLAINED, "", None)
_SAID = {
    "coefficient": "coefficients of the loss are {} times their usual size",
    "entropy coefficient": "the entropy term weighs {} times as much as usual",
    "auxiliary coefficient": "the auxiliary loss weighs {} times as much as usual",
    "KL weight": "the KL term weighs {} times as much as usual",
    "ratio": "log-ratios to the old policy are {} times their usual size",
    "reach": "log-probs react {} times as strongly to the weights as usual, or agree more",
}


def _clip_ratios(name: str) -> Proposal:
    return Proposal("clip ratios", RATIO_CAP, f"with ratios clipped at {RATIO_CAP:g}", clipped_ratios(RATIO_CAP, name))


def _largest_advantage(levels: StepLevels) -> float | None:
    """Return the largest advantage of a usual step; three times the middle one if no step is known."""
    largest = levels.scales.get("largest advantage")
    if largest is not None and largest.middle > 0:
        return largest.middle
    return None if levels.advantage is None else 3 * levels.advantage[0]


def _rows_of(host: HostPass, guilty: set[tuple[int, int, int]]) -> np.ndarray:
    """Return (B, T) tokens of the responses among ``guilty``."""
    rows = [(host.rank, host.microbatch, row) in guilty for row in range(len(host.mask))]
    return np.asarray(host.mask & np.array(rows, dtype=bool)[:, None])


def _leading(culprits: Sequence[Culprit]) -> list[Culprit]:
    """Return the tokens to blame: ``culprits`` without the smallest ones if these hold next to nothing."""
    sizes = [size_of(culprit) for culprit in culprits]
    least = LITTLE * max(sizes, default=0.0)
    little = math.fsum(size for size in sizes if size < least)
    if not little <= REST * math.fsum(sizes):
        return list(culprits)
    return [culprit for culprit, size in zip(culprits, sizes, strict=True) if size >= least]


def _describe_tokens(blamed: Blame, culprits: Sequence[Culprit], count: int, ranks: int) -> tuple[str, Sequence[Unit]]:
    """Describe the tokens that are to blame by themselves, and return what they hold."""
    worst = culprits[0]
    rank = f" of rank {worst.at.rank}" if ranks > 1 else ""
    place = f"position {worst.at.position} of sequence {worst.sequence}{rank}"
    leading = culprits if blamed.statement else _leading(culprits)
    little = len(culprits) - len(leading)
    count -= little
    shares, small = _shares(leading), _shares([one for one in culprits if one not in leading])
    named = blamed.statement or (f"one token, {place}," if count <= 1 else f"{count} tokens")
    if not shares:
        verb = "have the largest gradients" if count > 1 else "has the largest gradient"
        where = f", the worst at {place}" if count > 1 and not blamed.statement else ""
        return f"{named.rstrip(',')} {verb}{where}", ()
    up, down = sum(s for s in shares if s > 0), sum(s for s in shares if s < 0)
    plural = count > 1
    text = f"{named} {'make' if plural else 'makes'} {percent(up + down)} of the gradient norm"
    if -down > 0.1 * max(up, 1e-12) and plural:
        text += f" ({percent(up)} along it, {percent(-down)} against)"
    if plural and not blamed.statement:
        text += f", the worst {percent(worst.share)} at {place}"
    if little:
        text += f" ({little} more {'stand' if little > 1 else 'stands'} out, with {percent(sum(small))} of it)"
    unit = Unit(BlameLevel.TOKEN, "these tokens", up + down, up, down, len(shares))
    above, below = sum(row.up for row in blamed.every) - up, sum(row.down for row in blamed.every) - down
    left = sum(row.tokens for row in blamed.every) - len(shares)
    others = Unit(BlameLevel.TOKEN, "all others", above + below, above, below, left)
    return text, (unit, others)


def _shares(culprits: Sequence[Culprit]) -> list[float]:
    """Return the shares that are known."""
    return [one.share for one in culprits if one.share is not None and math.isfinite(one.share)]
