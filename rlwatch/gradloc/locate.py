"""Localisation of one step's gradient, from its loss passes to the report.

Cheap evidence comes before expensive evidence. Scales of the loss compared with the run's own history need no pass at
all, contributions need two forward passes. Only the outliers are then verified by backward passes of single responses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from rlwatch.gradloc.attribution import ALIKE, REAL, TOLERANCE, TOLERANCE_LOW, Attribution, attribute, reverse_mode
from rlwatch.gradloc.bisection import follow_larger
from rlwatch.gradloc.culprits import (
    HostPass,
    StepLevels,
    culprit_of,
    culprits_of_trace,
    describe,
    on_host,
    shared_culprits,
    size_of,
    step_levels,
)
from rlwatch.gradloc.cures import InterventionCatalog
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.distributed import Alone, World, differing_weights, gather_plain, sharded_modules
from rlwatch.gradloc.explaining import Explaining, Explanation, StepScales
from rlwatch.gradloc.nonfinite import shared_trace, trace
from rlwatch.gradloc.passes import RecordedPasses
from rlwatch.gradloc.report import (
    BlameLevel,
    Cost,
    Culprit,
    ExcessFactor,
    Localisation,
    Method,
    NotLocalised,
    Origin,
    OwnGradient,
    TokenAt,
    message_of,
    remedy_of,
)
from rlwatch.gradloc.rerun import tried
from rlwatch.gradloc.trigger import ScaleHistory, Scales
from rlwatch.gradloc.verdict import BEYOND, TokenLimits, blame, rows_of, sizes_of, standing_out
from rlwatch.gradloc.verification import screen, top_tokens, union_candidates, verify_worthwhile
from rlwatch.stats import median

CANDIDATES = 8
"""Half the number of tokens by contribution, and by screen, that are verified, also if they are no outliers."""
VERIFIED = 64
"""Largest number of outliers that are verified: the largest ones."""
BYTES, ROW_BYTES = 262_144, 512
"""Number of bytes that the recorded culprits of a step may take, and number of bytes of one of them."""
SEARCHED, PROBES = 4, 64
"""Number of culprits searched by bisection if attribution is incomplete, and the budget of the search in probes."""
ADVICE = (
    "run the step again from the last checkpoint, with CUDA_LAUNCH_BLOCKING=1 against races and deterministic kernels; "
    "if it goes well, look for ECC errors (nvidia-smi -q -d ECC) and change the device of that rank"
)
"""Advice if nothing in the step explains the number that was not finite."""
PULLED = 2.0
"""Factor by which a token's own gradient must exceed the limit to be an outlier, whatever its coefficient."""


@dataclass(frozen=True, slots=True)
class LocateOptions:
    """Options of a localisation.

    ``culprits`` is the largest number of tokens to name; None: all outliers within a budget in bytes.
    """

    culprits: int | None = None

    @property
    def most(self) -> int:
        """Return the largest number of outlying tokens that a report names."""
        return BYTES // ROW_BYTES if self.culprits is None else self.culprits

    @property
    def candidates(self) -> int:
        """Return how many tokens each of two rankings (contribution, estimated own gradient) proposes for an exact
        check, halved: each proposes twice as many.
        """
        return CANDIDATES if self.culprits is None else self.culprits


@dataclass(frozen=True, slots=True)
class Located:
    """Report on the localised gradient of a step, with the data of this rank from which it was made.

    ``hosts`` are the numbers of its micro-batches on the CPU, ``contributions`` (B, T) those of each micro-batch, if
    tokens were attributed.
    """

    report: Localisation
    hosts: Sequence[HostPass] = ()
    contributions: tuple[Tensor, ...] = ()


def locate(
    model: nn.Module,
    passes: RecordedPasses,
    *,
    world: World | None = None,
    options: LocateOptions | None = None,
    norm: float | None = None,
    threshold: float | None = None,
    usual: Mapping[str, float] | None = None,
    scales: Scales | None = None,
    history: ScaleHistory | None = None,
) -> Located:
    """Attribute the gradient that ``model`` holds, and return the report. A collective: all ranks call it.

    Call it after the backward pass and before the optimizer's step. All ranks return the same report. The model, its
    gradients and the random state are unchanged afterwards, bit for bit. The report lists the checks that were not
    possible.

    Parameters
    ----------
    model
        The module that was trained, without DDP's wrapper.
    passes
        This rank's loss passes of the step.
    world, options
        The ranks (default: this one alone), and the options.
    norm
        Norm of the gradient before it was clipped; by default of the gradient that is held.
    threshold
        Threshold with which the norm was compared.
    usual
        Share of each layer in the squared norm in earlier steps; with several ranks that of rank 0 counts.
    scales, history
        Scales of the loss in this step, and in earlier steps that were no spikes, alike on all ranks. Without them,
        changes that all tokens share are not detected.
    """
    begun, world = time.perf_counter(), world or Alone()
    known = gather_plain(world, dict(usual or {}))[0]
    step = _Step(model, passes, world, options or LocateOptions(), norm, known, StepScales.of(scales, history))
    try:
        located = step.localised()
    except NotLocalised as why:
        located = Located(step.report(why_not=str(why)))
    cost = replace(located.report.cost, seconds=time.perf_counter() - begun)
    return replace(located, report=replace(located.report, threshold=threshold, cost=cost))


@dataclass(slots=True)
class _Step:
    """The step to localise, and the results found so far."""

    model: nn.Module
    passes: RecordedPasses
    world: World
    options: LocateOptions
    norm: float | None
    usual: Mapping[str, float]
    grown: StepScales
    notes: list[str] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)

    def localised(self) -> Located:
        """Localise by what is known, then by attribution; by tracing where there is no direction."""
        if self.norm is not None and not math.isfinite(self.norm):
            return self.traced()
        direction = Direction.of(self.model, world=self.world, norm=self.norm)
        self.norm = direction.norm
        if not direction.finite:
            return self.traced()
        hosts = on_host(self.passes, self.world.rank, forms=True)
        limits = TokenLimits.of(hosts, self.grown.usual, self.world)
        grown = self.grown.with_forms(hosts, self.world)
        pharmacy = InterventionCatalog(self.model, self.passes, hosts, direction, self.world)
        explaining = Explaining(grown, limits, pharmacy, self.world)
        explanation = explaining.batch_wide() if direction.norm > 0 else None
        if explanation is not None:
            return Located(self.report_of(explanation, pharmacy), hosts)
        attribution = self.attributed(direction, pharmacy)
        contributions = () if attribution is None else attribution.contributions
        top = None if attribution is None else self.largest(contributions) / direction.norm
        levels = step_levels(hosts, world=self.world, layers=direction.layers, usual=self.usual, top_share=top)
        levels = grown.levels(levels)
        found = _Found(hosts, [sizes_of(host) for host in hosts], contributions, limits)
        found.standing = standing_out(hosts, found.sizes, contributions, direction.norm, limits)
        count = self.total(found.standing)
        if attribution is not None:
            explanation = explaining.without_tokens(attribution, levels, count)
        if explanation is None:
            self.verify(attribution, found, count)
            explanation = self.blamed(found, levels, explaining)
        report = self.report_of(explanation, pharmacy, attribution)
        whole = replace(report, culprits=found.culprits, count=found.count, explained=found.explained)
        return Located(whole, hosts, contributions)

    def blamed(self, found: _Found, levels: StepLevels, explaining: Explaining) -> Explanation:
        """Blame the outliers, at the level that explains the most with the least."""
        rows = rows_of(found.hosts, found.sizes, found.standing, found.shares(explaining.norm), self.world)
        blamed = blame(rows, found.limits, ranks=self.world.size)
        if blamed.whole:
            found.stand({(row.rank, row.microbatch, row.row) for row in blamed.rows})
        found.count = self.total(found.standing)
        local = [self.described(found, at, levels) for at in found.worst(self.options.most)]
        # ``size_of`` is the token's own norm where it is known: a token that was not verified is ranked by what its
        # coefficient lets expect.
        every = sorted(shared_culprits(local, self.world), key=lambda one: -found.rank_of(one))
        found.culprits = every[: self.options.most]
        found.explained = self.explained(found)
        explanation = explaining.of_culprits(blamed, found.culprits, levels, found.standing, count=found.count)
        if explanation.verdict is BlameLevel.BATCH:  # all alike: no token is named
            found.culprits, found.count, found.explained = [], 0, None
        return explanation

    def described(self, found: _Found, at: TokenAt, levels: StepLevels) -> Culprit:
        """Return one token of this rank as a culprit."""
        own = found.own.get(at)
        contribution = _value(found.contributions, at)
        pull = found.pull(at)
        return culprit_of(
            describe(found.hosts, at), levels, norm=self.norm, contribution=contribution, own=own, pull=pull
        )

    def explained(self, found: _Found) -> float | None:
        """Return the share of the excess of all outliers that the culprits hold. A collective."""
        named = {culprit.at for culprit in found.culprits}
        here = [found.excess(lambda at: at in named), found.excess(lambda _: True)]
        part, whole = self.world.sum(torch.tensor(here, dtype=torch.float64, device="cpu")).tolist()
        return part / whole if whole > 0 else None

    def total(self, standing: Sequence[np.ndarray]) -> int:
        """Return the number of outlying tokens of all ranks. A collective."""
        return int(
            self.world.sum(torch.tensor(float(sum(s.sum() for s in standing)), dtype=torch.float64, device="cpu"))
        )

    def traced(self) -> Located:
        """Trace the first number that is not finite: there is no direction to attribute along."""
        local = trace(self.model, self.passes, world=self.world)
        hosts = on_host(self.passes, self.world.rank)
        culprits = shared_culprits(culprits_of_trace(hosts, local, self.options.most), self.world)
        first = shared_trace(local, self.world)
        self.notes += first.notes
        self.cost = first.cost
        chance = first.origin is Origin.CHANCE
        because, remedy = self.by_chance() if chance else ("", "")
        report = self.report(
            method=Method.TRACE,
            cause=ExcessFactor.NOT_RECURRED if chance else ExcessFactor.NON_FINITE,
            culprits=culprits[: self.options.most],
            count=len(culprits),
            verdict=BlameLevel.NOT_RECURRED if chance else BlameLevel.NON_FINITE,
            statement=first.message,
            because=because,
            remedy=remedy,
            trace=first,
        )
        return Located(replace(report, message=message_of(report)), hosts)

    def by_chance(self) -> tuple[str, str]:
        """Return cause and cure of a number that did not recur, by whether ranks' weights differ. A collective."""
        odd = differing_weights(self.model, self.world)
        cause = f"{odd}; a bit was flipped there" if odd else "hardware, a kernel that is not deterministic, or a race"
        return cause, ADVICE

    def attributed(self, direction: Direction, pharmacy: InterventionCatalog) -> Attribution | None:
        """Attribute ``direction``; None if no method gives finite numbers."""
        try:
            attribution = attribute(self.model, self.passes, direction, world=self.world)
        except NotLocalised as why:
            kept = float(any(one.coefficients for one in self.passes.all))
            if not direction.norm > 0 or not self.world.max(torch.tensor(kept, device="cpu")):
                raise
            self.notes.append(str(why))
            return None
        self.notes += attribution.notes
        if not attribution.complete:
            attribution = self.by_backward(attribution, direction, pharmacy)
        self.spend(forwards=attribution.forwards)
        return attribution

    def by_backward(self, attribution: Attribution, direction: Direction, pharmacy: InterventionCatalog) -> Attribution:
        """Return ``attribution``, or the one by reverse mode if the backward shows more through the tokens."""
        through = None if sharded_modules(self.model) else pharmacy.through()
        if through is None:
            return attribution
        gap = (through.along + attribution.aux) / direction.norm - 1
        if abs(gap - attribution.gap) <= max(REAL, ALIKE * abs(gap)):
            return attribution
        ranks = self.world.size
        derived, why = tried(lambda: reverse_mode(self.model, self.passes.all, direction, ranks=ranks))
        here = [math.nan, 0.0, 0.0] if derived is None else [derived.total, derived.entropy, float(derived.low)]
        total, entropy, low = self.world.sum(torch.tensor(here, dtype=torch.float64, device="cpu")).tolist()
        now = (total + attribution.aux) / direction.norm - 1
        if derived is None or not math.isfinite(now) or abs(now) >= abs(attribution.gap):
            self.notes.append(f"{Method.REVERSE.value}: {why or f'gap {now:.1e}'}")
            return attribution
        complete = abs(now) <= (TOLERANCE_LOW if low else TOLERANCE)
        note = f"{attribution.method.value}: gap {attribution.gap:.1e}, the backward is no derivative of the forward"
        return replace(
            attribution,
            contributions=derived.tokens,
            gap=now,
            method=Method.REVERSE,
            complete=complete,
            settled=not complete and abs(now - gap) <= max(REAL, ALIKE * abs(gap)),
            forwards=attribution.forwards + derived.forwards,
            entropy=entropy,
            notes=(*attribution.notes, note),
        )

    def candidates(self, attribution: Attribution | None, found: _Found, count: int) -> list[TokenAt]:
        """Return tokens worth an exact backward pass; bisection adds more if attribution is not reliable."""
        # The union of both rankings: a token whose gradient is nearly orthogonal to the step's contributes little, and
        # only the screen finds it. Twice as many of each as are named make up for ties and misses of either.
        contributions, most = found.contributions, self.options.candidates
        screens = [screen(one) for one in self.passes.all]
        tokens = union_candidates(self.passes, contributions, screens, most, world=self.world)
        if count > 2 * most:
            large = [
                torch.as_tensor(np.where(s, z, 0.0), device="cpu")
                for s, z in zip(found.standing, found.sizes, strict=True)
            ]
            more = top_tokens(self.passes, large, min(count, VERIFIED), world=self.world)
            tokens = list(dict.fromkeys([*tokens, *more]))
        if attribution is not None and (attribution.complete or attribution.settled):
            return tokens
        searched = follow_larger(self.model, self.passes, culprits=min(SEARCHED, most), budget=PROBES, world=self.world)
        self.spend(forwards=searched.probes, backwards=searched.probes)
        if searched.why_not:
            self.notes.append(f"bisection: {searched.why_not}")
        found.searched = {hit.at for hit in searched.hits}
        return list(dict.fromkeys([*(hit.at for hit in searched.hits), *tokens]))

    def verify(self, attribution: Attribution | None, found: _Found, count: int) -> None:
        """Take the own gradients of candidates; some stand out by these alone. A collective."""
        tokens = self.candidates(attribution, found, count)
        found.own = verify_worthwhile(
            self.model, self.passes, tokens, found.contributions, world=self.world, notes=self.notes
        )
        self.spend(backwards=len(found.own))
        pairs = [
            own.norm / size
            for at, own in found.own.items()
            if at.rank == self.world.rank and (size := found.size(at)) > 0 and math.isfinite(own.norm)
        ]
        every = [pair for rank in gather_plain(self.world, pairs) for pair in rank]
        found.unit = median(every) if every else 0.0
        found.stand_by_own(self.world.rank)

    def largest(self, contributions: Sequence[Tensor]) -> float:
        """Return the largest absolute contribution of all ranks."""
        here = max((float(c.abs().max()) for c in contributions if c.numel()), default=0.0)
        return float(self.world.max(torch.tensor(here, dtype=torch.float64, device="cpu")))

    def spend(self, forwards: int = 0, backwards: int = 0) -> None:
        """Count passes."""
        self.cost = Cost(self.cost.forwards + forwards, self.cost.backwards + backwards)

    def report_of(
        self, explanation: Explanation, pharmacy: InterventionCatalog, attribution: Attribution | None = None
    ) -> Localisation:
        """Return the report with a verdict."""
        self.spend(backwards=pharmacy.backwards)
        self.notes += pharmacy.notes
        method = (
            Method.BISECTION
            if explanation.verdict is not BlameLevel.BATCH or explanation.cause is ExcessFactor.UNEXPLAINED
            else None
        )
        report = self.report(
            method=method if attribution is None else attribution.method,
            gap=None if attribution is None else attribution.gap,
            complete=attribution is not None and attribution.complete,
            layers=pharmacy.direction.layers,
            cause=explanation.cause,
            verdict=explanation.verdict,
            statement=explanation.statement,
            because=explanation.because,
            remedy=remedy_of(explanation.cures),
            cures=tuple(explanation.cures),
            units=tuple(explanation.units),
            grew=self.grown.all_times,
        )
        return replace(report, message=message_of(report))

    def report(self, **more: object) -> Localisation:
        """Make a report with what holds for every outcome."""
        count = sum(int(one.tokens.mask.sum()) for one in self.passes.all)
        tokens = int(self.world.sum(torch.tensor(float(count), dtype=torch.float64, device="cpu")))
        norm = math.nan if self.norm is None else self.norm
        return Localisation(norm=norm, tokens=tokens, notes=tuple(self.notes), cost=self.cost, **more)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Found:
    """Tokens of this rank: their sizes, which are outliers, and the own gradients of all ranks' verified tokens.

    ``unit`` is the median factor between own gradients and sizes.
    """

    hosts: Sequence[HostPass]
    sizes: Sequence[np.ndarray]
    contributions: Sequence[Tensor]
    limits: TokenLimits
    standing: list[np.ndarray] = field(default_factory=list)
    own: Mapping[TokenAt, OwnGradient] = field(default_factory=dict)
    searched: set[TokenAt] = field(default_factory=set)
    unit: float = 0.0
    culprits: Sequence[Culprit] = ()
    count: int = 0
    explained: float | None = None

    def shares(self, norm: float) -> list[np.ndarray]:
        """Return (B, T) of each pass: each token's share of the norm; zeros if nothing was attributed."""
        if not self.contributions or not norm > 0:
            return [np.zeros(host.mask.shape) for host in self.hosts]
        return [contribution.numpy() / norm for contribution in self.contributions]

    def size(self, at: TokenAt) -> float:
        """Return the size of a token of this rank by its coefficient."""
        return float(self.sizes[at.microbatch][at.row, at.position])

    def whole(self, at: TokenAt) -> float:
        """Return the size by the token's own gradient if that is known, in the unit of sizes."""
        own = self.own.get(at)
        return self.size(at) if own is None or not self.unit or not math.isfinite(own.norm) else own.norm / self.unit

    def pull(self, at: TokenAt) -> float | None:
        """Return the factor between the gradient of the token's log-prob and the median of others."""
        own, size = self.own.get(at), self.size(at)
        return own.norm / (size * self.unit) if own is not None and self.unit and size > 0 else None

    def stand_by_own(self, rank: int) -> None:
        """Mark tokens as outliers whose own gradient is long whatever their coefficient, and those that the search
        found.
        """
        for at, own in self.own.items():
            long = self.unit > 0 and own.norm / self.unit > PULLED * self.limits.screen
            if at.rank == rank and (long or at in self.searched):
                self.standing[at.microbatch][at.row, at.position] = True

    def stand(self, guilty: set[tuple[int, int, int]]) -> None:
        """Mark the largest token of each guilty response that has no outlier as one."""
        for k, host in enumerate(self.hosts):
            for row in range(len(host.mask)):
                if (host.rank, host.microbatch, row) in guilty and not self.standing[k][row].any():
                    self.standing[k][row, int(self.sizes[k][row].argmax())] = True

    def places(self) -> list[TokenAt]:
        """Return the outlying tokens."""
        return [
            TokenAt(host.rank, host.microbatch, *place)
            for host, standing in zip(self.hosts, self.standing, strict=True)
            for place in np.argwhere(standing).tolist()
        ]

    def worst(self, most: int) -> list[TokenAt]:
        """Return the ``most`` largest outliers."""
        return sorted(self.places(), key=lambda at: -self.whole(at))[:most]

    def rank_of(self, culprit: Culprit) -> float:
        """Return the size by which culprits of all ranks are ordered, in the unit of the norm."""
        size = size_of(culprit)
        if culprit.own is not None or not self.unit:
            return size
        pushed = abs(culprit.numbers.get("coefficient", 0.0)) * -math.expm1(min(culprit.numbers.get("logp", 0.0), 0.0))
        return max(size, pushed * self.unit)

    def excess(self, counts: Callable[[TokenAt], bool]) -> float:
        """Return the summed excess over the largest usual size, of the outliers for which ``counts`` is True."""
        usual = self.limits.screen / BEYOND
        return math.fsum(max(self.whole(at) - usual, 0.0) for at in self.places() if counts(at))


def _value(contributions: Sequence[Tensor], at: TokenAt) -> float | None:
    return float(contributions[at.microbatch][at.row, at.position]) if contributions else None
