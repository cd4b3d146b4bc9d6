"""One step's gradient localised, from its loss passes to the report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rlwatch.gradloc.attribution import Attribution, attribute
from rlwatch.gradloc.bisection import follow_larger
from rlwatch.gradloc.culprits import (
    HostPass,
    StepLevels,
    cause_of_step,
    culprit_of,
    culprits_of_trace,
    describe,
    on_host,
    shared_culprits,
    step_levels,
)
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.distributed import Alone, World, gather_plain
from rlwatch.gradloc.nonfinite import shared_trace, trace
from rlwatch.gradloc.passes import Passes
from rlwatch.gradloc.report import Cause, Cost, Culprit, Localisation, Method, NotLocalised, TokenAt, summary_of
from rlwatch.gradloc.verification import screen, union_candidates, verify

STANDS_OUT = 0.1
"""A token is named if its own gradient (or contribution) is at least this part of the worst one's."""
SEARCHED, PROBES = 4, 64
"""Culprits searched for by bisection where attribution is incomplete, and what that may take."""


@dataclass(frozen=True, slots=True)
class LocateOptions:
    """``culprits``: tokens named at most; twice as many by contribution, and by screen, are verified."""

    culprits: int = 8


@dataclass(frozen=True, slots=True)
class Located:
    """The report, and what it is made of on this rank: the numbers of its passes on the CPU, and ``contributions``
    (B, T) of each, where tokens were attributed.
    """

    report: Localisation
    hosts: Sequence[HostPass] = ()
    contributions: tuple[Tensor, ...] = ()


def locate(
    model: nn.Module,
    passes: Passes,
    *,
    world: World | None = None,
    options: LocateOptions | None = None,
    norm: float | None = None,
    threshold: float | None = None,
    usual: Mapping[str, float] | None = None,
) -> Located:
    """Find the tokens that made the gradient ``model`` holds. A collective: all ranks call it, and report the same.

    To be called after the backward and before the optimizer's step; the model, its gradients and the random state are
    afterwards as they were, bit for bit. What cannot be done is said in the report.

    Parameters
    ----------
    model
        The module that was trained, without DDP's wrapping.
    passes
        This rank's loss passes of the step.
    world, options
        The ranks; how closely to look.
    norm
        Of the gradient before it was clipped; default: of the gradient that is held.
    threshold
        What it was compared with.
    usual
        Share of each layer in the squared norm in earlier steps; of several ranks that of rank 0 counts.
    """
    begun, world = time.perf_counter(), world or Alone()
    known = gather_plain(world, dict(usual or {}))[0]
    step = _Step(model, passes, world, options or LocateOptions(), norm, known)
    try:
        located = step.localised()
    except NotLocalised as why:
        located = Located(step.report(why_not=str(why)))
    cost = replace(located.report.cost, seconds=time.perf_counter() - begun)
    return replace(located, report=replace(located.report, threshold=threshold, cost=cost))


@dataclass(slots=True)
class _Step:
    """The step in question, and what was found out of it so far."""

    model: nn.Module
    passes: Passes
    world: World
    options: LocateOptions
    norm: float | None
    usual: Mapping[str, float]
    notes: list[str] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)

    def localised(self) -> Located:
        """Localise by attribution; by tracing where there is no direction."""
        if self.norm is not None and not math.isfinite(self.norm):
            return self.traced()
        direction = Direction.of(self.model, world=self.world, norm=self.norm)
        self.norm = direction.norm
        if not direction.finite:
            return self.traced()
        attribution = self.attributed(direction)
        contributions = () if attribution is None else attribution.contributions
        culprits, hosts = self.culprits(self.candidates(attribution), attribution, direction)
        levels = StepLevels(layers=direction.layers, usual=self.usual, top_share=_top_share(culprits))
        cause = cause_of_step(culprits, levels)
        named = self.standing_out(culprits)
        report = self.report(
            method=Method.BISECTION if attribution is None else attribution.method,
            gap=None if attribution is None else attribution.gap,
            complete=attribution is not None and attribution.complete,
            culprits=named,
            layers=direction.layers,
            cause=cause,
        )
        return Located(replace(report, message=summary_of(report)), hosts, contributions)

    def traced(self) -> Located:
        """Trace the first number that is not finite: there is no direction to attribute along."""
        local = trace(self.model, self.passes, world=self.world)
        hosts = on_host(self.passes, self.world.rank)
        culprits = shared_culprits(culprits_of_trace(hosts, local, self.options.culprits), self.world)
        first = shared_trace(local, self.world)
        self.notes += first.notes
        self.cost = first.cost
        report = self.report(
            method=Method.TRACE,
            cause=Cause.NON_FINITE,
            culprits=culprits[: self.options.culprits],
            message=first.message,
            trace=first,
        )
        return Located(report, hosts)

    def attributed(self, direction: Direction) -> Attribution | None:
        """Attribute ``direction``; None if no method gives finite numbers."""
        try:
            attribution = attribute(self.model, self.passes, direction, world=self.world)
        except NotLocalised as why:
            kept = float(any(one.coefficients for one in self.passes.all))
            if not direction.norm > 0 or not self.world.max(torch.tensor(kept)):
                raise
            self.notes.append(str(why))
            return None
        self.notes += attribution.notes
        self.spend(forwards=attribution.forwards)
        return attribution

    def candidates(self, attribution: Attribution | None) -> list[TokenAt]:
        """Tokens worth an exact backward pass; bisection adds more where attribution is incomplete."""
        # The union of both rankings: a token whose gradient is nearly orthogonal to the step's contributes little, and
        # only the screen has it; twice as many of each as are named, so that ties and misses of either are made good.
        contributions = () if attribution is None else attribution.contributions
        screens = [screen(one) for one in self.passes.all]
        tokens = union_candidates(self.passes, contributions, screens, self.options.culprits, world=self.world)
        if attribution is not None and attribution.complete:
            return tokens
        searched = follow_larger(
            self.model, self.passes, culprits=min(SEARCHED, self.options.culprits), budget=PROBES, world=self.world
        )
        self.spend(forwards=searched.probes, backwards=searched.probes)
        if searched.why_not:
            self.notes.append(f"bisection: {searched.why_not}")
        return list(dict.fromkeys([*(hit.at for hit in searched.hits), *tokens]))

    def culprits(
        self, tokens: Sequence[TokenAt], attribution: Attribution | None, direction: Direction
    ) -> tuple[list[Culprit], list[HostPass]]:
        """Describe all candidates of all ranks, the worst first."""
        own = verify(self.model, self.passes, tokens, world=self.world, notes=self.notes)
        self.spend(backwards=len(own))
        hosts = on_host(self.passes, self.world.rank)
        contributions = () if attribution is None else attribution.contributions
        top = None if attribution is None else self.largest(contributions) / direction.norm
        levels = step_levels(hosts, world=self.world, layers=direction.layers, usual=self.usual, top_share=top)
        local = [
            culprit_of(
                describe(hosts, at),
                levels,
                norm=direction.norm,
                contribution=_value(contributions, at),
                own=own.get(at),
            )
            for at in tokens
            if at.rank == self.world.rank
        ]
        return sorted(shared_culprits(local, self.world), key=lambda culprit: -size_of(culprit)), hosts

    def largest(self, contributions: Sequence[Tensor]) -> float:
        """Largest contribution of all ranks, by size."""
        here = max((float(c.abs().max()) for c in contributions if c.numel()), default=0.0)
        return float(self.world.max(torch.tensor(here, dtype=torch.float64)))

    def standing_out(self, culprits: Sequence[Culprit]) -> list[Culprit]:
        """Culprits that are not small beside the worst."""
        least = STANDS_OUT * (size_of(culprits[0]) if culprits else 0.0)
        return [culprit for culprit in culprits if size_of(culprit) >= least][: self.options.culprits]

    def spend(self, forwards: int = 0, backwards: int = 0) -> None:
        """Count passes."""
        self.cost = Cost(self.cost.forwards + forwards, self.cost.backwards + backwards)

    def report(self, **more: object) -> Localisation:
        """Make a report with what holds for every outcome."""
        count = sum(int(one.tokens.mask.sum()) for one in self.passes.all)
        tokens = int(self.world.sum(torch.tensor(float(count), dtype=torch.float64)))
        norm = math.nan if self.norm is None else self.norm
        return Localisation(norm=norm, tokens=tokens, notes=tuple(self.notes), cost=self.cost, **more)  # type: ignore[arg-type]


def size_of(culprit: Culprit) -> float:
    """Size that culprits are ranked by: the norm of the token's own gradient, or the contribution if larger."""
    # |<g_t, u>| <= ||g_t|| by Cauchy-Schwarz: a contribution is larger only where the token was not verified, or
    # rounding.
    own = 0.0 if culprit.own is None else culprit.own.norm
    contribution = 0.0 if culprit.contribution is None else abs(culprit.contribution)
    return max((value for value in (own, contribution) if not math.isnan(value)), default=math.inf)


def _value(contributions: Sequence[Tensor], at: TokenAt) -> float | None:
    return float(contributions[at.microbatch][at.row, at.position]) if contributions else None


def _top_share(culprits: Sequence[Culprit]) -> float | None:
    return max((abs(c.share) for c in culprits if c.share is not None), default=None)
