"""The published search for culprits: micro-batches, then ranks by halves, then tokens by halves, depth first.

Source: Tencent-Hunyuan/GradLoc (2026). A probe is a forward and a backward of one micro-batch with the coefficients of
a set of tokens, so any loss is searched as it is. A set whose gradient norm is above its threshold
(:func:`rlwatch.gradloc.thresholds.threshold`) is halved, until single tokens are left. For one culprit that is at most
M + 2 ceil(log2 W) + 2 ceil(log2 L) probes. It differs from the released code in what that does wrong:

- every micro-batch and every rank above the threshold is followed, the largest first, not one of each;
- a norm that is NaN or Inf is above any threshold, and what is masked out cannot spoil a probe, NaN or not;
- no set is split into one without tokens, and where nothing is above its threshold, that is the answer;
- ``.grad`` is not touched, so the step need not be run again to restore it.

Culprits that cancel each other in a set are not found: the norm of the set does not show them. Nor is a single one
whose gradient is below the noise of the step: the threshold of N tokens is sqrt(N) times that of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from rlwatch.gradloc.errors import NotLocalised
from rlwatch.gradloc.gradients import beside_training
from rlwatch.gradloc.passes import Passes
from rlwatch.gradloc.probes import BudgetSpent, Probes, Segment
from rlwatch.gradloc.report import TokenAt
from rlwatch.gradloc.thresholds import threshold
from rlwatch.gradloc.world import Alone, World


@dataclass(frozen=True, slots=True)
class Hit:
    """A token found, and the norm of its own gradient, in the unit of the step's."""

    at: TokenAt
    norm: float


@dataclass(frozen=True, slots=True)
class BisectionResult:
    """What a search found.

    Parameters
    ----------
    hits
        In the order of finding.
    trace
        What was probed, in order: a forward and a backward of one micro-batch each.
    exhausted
        Whether the budget ended the search.
    why_not
        Why there are no more hits than there are: one sentence, empty if the search came to its end and found some.
    """

    hits: Sequence[Hit] = ()
    trace: Sequence[Segment] = ()
    exhausted: bool = False
    why_not: str = ""

    @property
    def probes(self) -> int:
        """Forwards and backwards of one micro-batch that it took."""
        return len(self.trace)


def search(
    model: nn.Module,
    passes: Passes,
    *,
    normaliser: float,
    single_token_threshold: float,
    budget: int = 128,
    world: World | None = None,
) -> BisectionResult:
    """The published search, depth first. What training holds stays as it is, bit for bit.

    Parameters
    ----------
    model
        The module itself, not DDP's wrapping of it; the passes' forwards must run the same.
    passes
        This rank's; a collective, in which all ranks decide alike.
    normaliser
        Z: what the terms of single tokens are divided by in the gradient of the step, the mean over ranks included.
    single_token_threshold
        T: above which norm the un-averaged gradient of one token stands out.
    budget
        Probes at most. The published script has 128.
    world
        The ranks; default: this one alone.

    Raises
    ------
    ValueError
        If ``normaliser`` is not positive.
    """
    threshold(1, normaliser, single_token=single_token_threshold)

    def above(segments: Sequence[Segment]) -> list[Segment]:
        """The largest last."""
        limits = [threshold(s.count, normaliser, single_token=single_token_threshold) for s in segments]
        found = [s for s, limit in zip(segments, limits, strict=True) if not s.norm <= limit]
        return sorted(found, key=lambda segment: segment.size)

    def depth_first(probes: Probes, hits: list[Segment]) -> None:
        stack = above(probes.norms(probes.microbatches()))
        while stack:
            segment = stack.pop()
            found = [segment] if segment.single else above(probes.norms(probes.halves(segment)))
            hits += [each for each in reversed(found) if each.single]
            stack += [each for each in found if not each.single]

    return _run(model, passes, budget, world, depth_first)


def follow_larger(
    model: nn.Module, passes: Passes, *, culprits: int, budget: int = 1024, world: World | None = None
) -> BisectionResult:
    """The search without thresholds: always into the larger half, ``culprits`` times, leaving out what was found.

    It ends at tokens, whether they stand out or not. What was probed before is not probed again unless it held a token
    found since, so further culprits cost somewhat less than the first: M + 2 ceil(log2 W) + 2 ceil(log2 L) probes.
    Parameters as of :func:`search`.
    """
    known: dict[tuple[int, range, range | None], Segment] = {}

    def largest(probes: Probes, among: Sequence[Segment]) -> Segment:
        if len(among) == 1 and not among[0].single:
            return among[0]
        new = [segment for segment in among if _place(segment) not in known]
        known.update((_place(segment), segment) for segment in probes.norms(new))
        return max((known[_place(segment)] for segment in among), key=lambda segment: segment.size)

    def descend(probes: Probes, hits: list[Segment]) -> None:
        while len(hits) < culprits:
            segment = largest(probes, probes.microbatches())
            while not segment.single and segment.norm != 0:
                segment = largest(probes, probes.halves(segment))
            if segment.norm == 0:
                return
            hits.append(segment)
            probes.leave_out(segment)
            for place in [place for place, other in known.items() if other.holds(segment)]:
                del known[place]

    return _run(model, passes, budget, world, descend)


def _place(segment: Segment) -> tuple[int, range, range | None]:
    return segment.microbatch, segment.ranks, segment.tokens


def _run(
    model: nn.Module,
    passes: Passes,
    budget: int,
    world: World | None,
    searching: Callable[[Probes, list[Segment]], None],
) -> BisectionResult:
    """Run a search to its end, or to that of its budget, or to a failure; with what was found until then."""
    hits: list[Segment] = []
    try:
        probes = Probes(model, passes, budget, world or Alone())
    except NotLocalised as why:
        return BisectionResult(why_not=str(why))
    why_not, exhausted = "", False
    with beside_training(model):
        try:
            searching(probes, hits)
            why_not = "" if hits else _nothing(probes)
        except BudgetSpent:
            why_not, exhausted = f"the search was ended by its budget of {budget} probes", True
        except NotLocalised as why:
            why_not = str(why)
    found = [Hit(at, hit.norm) for at, hit in zip(probes.tokens(hits), hits, strict=True)]
    return BisectionResult(found, tuple(probes.trace), exhausted, why_not)


def _nothing(probes: Probes) -> str:
    if len(probes.trace) == len(probes.microbatches()):
        return "no micro-batch of the step is above its threshold"
    return "tokens are above their threshold together only, no single one is"
