"""The published search for culprits (outlying tokens) by halves: micro-batches, then ranks, then tokens, depth first.

Source: Tencent-Hunyuan/GradLoc (2026). A probe is a forward and a backward pass of one micro-batch with the
coefficients of a set of tokens, so any loss can be searched. Only the sequences of those tokens run, if they can run
alone. A set whose gradient norm is above its threshold (:func:`noise_threshold`) is halved, until single tokens are
left. One culprit takes at most M + 2 ceil(log2 W) + 2 ceil(log2 L) probes, for M micro-batches of L tokens on W ranks.
It corrects these errors of the released code:

- every micro-batch and every rank above the threshold is followed, the largest first, not one of each;
- a norm that is NaN or Inf is above any threshold, and masked positions cannot affect a probe, also if they are NaN;
- no set is split into one without tokens, and if no set is above its threshold, that is the answer;
- ``.grad`` is not touched, so the step need not be run again to restore it.

Culprits that cancel each other in a set are not found, because the norm of the set does not show them. A single one
whose gradient is below the noise of the step is not found either: the threshold of N tokens is sqrt(N) times that of
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rlwatch.gradloc.distributed import Alone, World
from rlwatch.gradloc.passes import LossPass, RecordedPasses, beside_training, gradients_of, run_again
from rlwatch.gradloc.report import NotLocalised, TokenAt
from rlwatch.gradloc.rerun import tried


@dataclass(frozen=True, slots=True)
class Hit:
    """A token that the search found, and the norm of its own gradient, in the unit of the step's norm."""

    at: TokenAt
    norm: float


@dataclass(frozen=True, slots=True)
class BisectionResult:
    """Result of a search for outlying tokens by halves.

    Parameters
    ----------
    hits
        Tokens in the order of finding.
    trace
        Sets that were probed, in order; each probe is a forward and a backward pass of one micro-batch.
    exhausted
        True if the budget ended the search.
    why_not
        Reason why no more tokens were found: one sentence, empty if the search was completed and found some.
    """

    hits: Sequence[Hit] = ()
    trace: Sequence[TokenSet] = ()
    exhausted: bool = False
    why_not: str = ""

    @property
    def probes(self) -> int:
        """Return the number of probes made: forward and backward passes of one micro-batch."""
        return len(self.trace)


def search(
    model: nn.Module,
    passes: RecordedPasses,
    *,
    normaliser: float,
    single_token_threshold: float,
    budget: int = 128,
    world: World | None = None,
) -> BisectionResult:
    """Run the published search for outlying tokens, depth first. The training state is unchanged, bit for bit.

    Parameters
    ----------
    model
        The module itself, not DDP's wrapper; the passes' forwards must run the same module.
    passes
        This rank's loss passes. A collective, in which all ranks decide alike.
    normaliser
        Z, by which the terms of single tokens are divided in the gradient of the step, including the mean over ranks.
    single_token_threshold
        T: a token whose un-averaged gradient has a larger norm is an outlier.
    budget
        Largest number of probes. The published script has 128.
    world
        The ranks; by default this one alone.

    Raises
    ------
    ValueError
        If ``normaliser`` is not positive.
    """
    noise_threshold(1, normaliser, single_token=single_token_threshold)

    def above(segments: Sequence[TokenSet]) -> list[TokenSet]:
        """Return the segments above their threshold, the largest last."""
        limits = [noise_threshold(s.count, normaliser, single_token=single_token_threshold) for s in segments]
        # Not `s.norm > limit`: NaN, which the released code never follows, is above any threshold.
        exceeding = [s for s, limit in zip(segments, limits, strict=True) if not s.norm <= limit]
        return sorted(exceeding, key=lambda segment: segment.size)

    def depth_first(probes: Probes, hits: list[TokenSet]) -> None:
        stack = above(probes.norms(probes.microbatches()))
        while stack:
            segment = stack.pop()
            within = [segment] if segment.single else above(probes.norms(probes.halves(segment)))
            hits += [each for each in reversed(within) if each.single]
            stack += [each for each in within if not each.single]

    return _run(model, passes, budget, world, depth_first)


def follow_larger(
    model: nn.Module, passes: RecordedPasses, *, culprits: int, budget: int = 1024, world: World | None = None
) -> BisectionResult:
    """Search for outlying tokens without thresholds: follow the half with the larger gradient norm, ``culprits`` times.

    Tokens found before are left out. The search ends at tokens, whether they are outliers or not. A set is not probed
    again unless it held a token found since, so further tokens cost somewhat less than the first: M + 2 ceil(log2 W) +
    2 ceil(log2 L) probes, for M micro-batches of L tokens on W ranks. The other parameters are those of :func:`search`.
    """
    known: dict[tuple[int, range, range | None], TokenSet] = {}

    def largest(probes: Probes, among: Sequence[TokenSet]) -> TokenSet:
        if len(among) == 1 and not among[0].single:
            return among[0]
        new = [segment for segment in among if _place(segment) not in known]
        known.update((_place(segment), segment) for segment in probes.norms(new))
        return max((known[_place(segment)] for segment in among), key=lambda segment: segment.size)

    def descend(probes: Probes, hits: list[TokenSet]) -> None:
        while len(hits) < culprits:
            segment = largest(probes, probes.microbatches())
            # The halves' gradients add up to the whole's, so the larger has at least half its norm (triangle
            # inequality): a descent cannot lose all of it, but two culprits in one half may cancel and be passed over.
            while not segment.single and segment.norm != 0:
                segment = largest(probes, probes.halves(segment))
            if segment.norm == 0:
                return
            hits.append(segment)
            probes.leave_out(segment)
            for place in [place for place, other in known.items() if other.holds(segment)]:
                del known[place]

    return _run(model, passes, budget, world, descend)


def _place(segment: TokenSet) -> tuple[int, range, range | None]:
    return segment.microbatch, segment.ranks, segment.tokens


def _run(
    model: nn.Module,
    passes: RecordedPasses,
    budget: int,
    world: World | None,
    searching: Callable[[Probes, list[TokenSet]], None],
) -> BisectionResult:
    """Run a search to its end, the end of its budget, or a failure; return the tokens found until then."""
    hits: list[TokenSet] = []
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
    located = [Hit(at, hit.norm) for at, hit in zip(probes.tokens(hits), hits, strict=True)]
    return BisectionResult(located, tuple(probes.trace), exhausted, why_not)


def _nothing(probes: Probes) -> str:
    if len(probes.trace) == len(probes.microbatches()):
        return "no micro-batch of the step is above its threshold"
    return "tokens are above their threshold together only, no single one is"


# Noise thresholds above which sets of tokens are outliers: those of GradLoc, with the loss normaliser explicit.
#
# If the gradients of single tokens were independent noise, the gradient of (1/Z) sum over L tokens would have a norm
# of ``T sqrt(L) / Z``, where T is the one constant to choose: the threshold for the un-averaged gradient of one
# token. Everything published is this with some Z. Source: Tencent-Hunyuan/GradLoc, figure 2 of its README and its
# released code, which differ. N response tokens in the step over W ranks with M micro-batches each.


def noise_threshold(n_tokens: float, normaliser: float, *, single_token: float) -> float:
    """Return the threshold ``T sqrt(L) / Z`` for the gradient norm of a set of L = ``n_tokens`` tokens.

    ``single_token`` is T, in the unit of the un-averaged gradient of a token. ``normaliser`` is Z, by which the
    per-token terms of the loss are divided in the probed gradient, including the mean over ranks: for a token mean, the
    number of response tokens in the whole step.

    Raises
    ------
    ValueError
        If ``normaliser`` is not positive.

    >>> noise_threshold(65536, 65536, single_token=640)
    2.5
    """
    if not normaliser > 0:
        raise ValueError(f"a loss is divided by a positive number, got normaliser={normaliser}")
    # The variances of n independent gradients add up, hence the root. Of published forms: the figure's probes are means
    # of what they probe (Z = L: T / sqrt(L), larger with depth), the released code's are what FSDP averages over W
    # ranks (Z = L W / l for l active ranks). A lone culprit must exceed T sqrt(N / 2) to be followed from the root of a
    # search.
    return single_token * math.sqrt(n_tokens) / normaliser


def single_token_level(norm: float, n_tokens: float, normaliser: float) -> float:
    """Return the T at which ``norm`` is just the threshold of ``n_tokens`` tokens: the inverse of
    :func:`noise_threshold`.

    From a run's own usual gradient norm it computes the corresponding T.

    Raises
    ------
    ValueError
        If ``n_tokens`` or ``normaliser`` is not positive.
    """
    if not n_tokens > 0:
        raise ValueError(f"the noise of no tokens says nothing, got n_tokens={n_tokens}")
    return norm / noise_threshold(n_tokens, normaliser, single_token=1.0)


# Gradient norms of sets of tokens, each by one forward and backward pass, for a search by halves.


@dataclass(frozen=True, slots=True)
class TokenSet:
    """A set of tokens of one micro-batch on some ranks; on a single rank perhaps only a range of its tokens.

    Parameters
    ----------
    microbatch
        Index of the micro-batch in the step.
    ranks
        Ranks whose tokens are in the set.
    tokens
        Range of the rank's response tokens, counted through the micro-batch row by row; None: all.
    count
        Number of tokens.
    norm
        Norm of the gradient of their part of the loss, in the unit of the step's norm. NaN and Inf are possible; NaN
        also if the set was not probed.
    """

    microbatch: int
    ranks: range
    tokens: range | None
    count: int
    norm: float = math.nan

    @property
    def single(self) -> bool:
        """Return True if the set is one token of one rank."""
        return self.count == 1 and len(self.ranks) == 1

    @property
    def size(self) -> float:
        """Return the norm of the set's gradient for comparisons, in which NaN is larger than anything."""
        return math.inf if math.isnan(self.norm) else self.norm

    @property
    def first(self) -> int:
        """Return the index of the set's first token, counted through the micro-batch."""
        return self.tokens[0] if self.tokens else 0

    def holds(self, token: TokenSet) -> bool:
        """Return True if ``token``, a set of a single token, is in this set."""
        if self.microbatch != token.microbatch or token.ranks[0] not in self.ranks:
            return False
        return self.tokens is None or token.first in self.tokens


class BudgetSpent(Exception):  # noqa: N818  (an end, not a fault)
    """Signal that fewer probes are left in the budget than were requested."""


class Probes:
    """Computation of gradient norms of sets of tokens in one step, which counts its probes (forward and backward passes
    of a micro-batch).

    A collective: all ranks probe the same sets in the same order. If every rank has whole parameters, squared norms are
    summed over the ranks of a set: gradients need not be sent, and ranks cannot cancel each other. Sharded gradients
    are averaged over ranks by FSDP.

    Parameters
    ----------
    model
        The module itself, not DDP's wrapper.
    passes
        This rank's recorded micro-batches of the step.
    budget
        Largest number of probes.
    world
        The ranks.

    Raises
    ------
    NotLocalised
        If the step has no response tokens.
    """

    def __init__(self, model: nn.Module, passes: RecordedPasses, budget: int, world: World) -> None:
        self._gradients = gradients_of(model, world)
        self._passes = passes.all
        self._budget = budget
        self._world = world
        self._places = [one.tokens.mask.bool().nonzero() for one in passes.all]
        self._counts = self._count()
        self._left_out: dict[tuple[int, int], list[int]] = {}
        self.trace: list[TokenSet] = []
        """Sets probed so far, in order."""

    def microbatches(self) -> list[TokenSet]:
        """Return one set of tokens for each micro-batch that has response tokens, over all ranks."""
        ranks = range(self._world.size)
        every = [TokenSet(m, ranks, None, self._size(m, ranks)) for m in range(len(self._counts[0]))]
        return [segment for segment in every if segment.count]

    def halves(self, segment: TokenSet) -> list[TokenSet]:
        """Return both halves of ``segment`` that have tokens: of its ranks, or of its tokens if it has one rank."""
        m, ranks = segment.microbatch, segment.ranks
        if len(ranks) > 1:
            parts = [TokenSet(m, half, None, self._size(m, half)) for half in _halves(ranks)]
        else:
            tokens = segment.tokens or range(segment.count)
            parts = [TokenSet(m, ranks, half, len(half)) for half in _halves(tokens)]
        return [part for part in parts if part.count]

    def norms(self, segments: Sequence[TokenSet]) -> list[TokenSet]:
        """Compute the gradient norm of each set in ``segments``, and return the sets with their norms.

        Raises
        ------
        BudgetSpent
            If there are not as many probes left; no probe was made.
        NotLocalised
            If a probe failed, on any rank.
        """
        if len(self.trace) + len(segments) > self._budget:
            raise BudgetSpent
        return [self._probe(segment) for segment in segments]

    def leave_out(self, segment: TokenSet) -> None:
        """Exclude the single token ``segment`` from further probes."""
        self._left_out.setdefault((segment.ranks[0], segment.microbatch), []).append(segment.first)

    def tokens(self, segments: Sequence[TokenSet]) -> list[TokenAt]:
        """Return rank, micro-batch, sequence and position of each token in ``segments``, sets of a single token. A
        collective.
        """
        where = torch.full((len(segments), 2), -1, dtype=torch.int64, device="cpu")
        for i, segment in enumerate(segments):
            if self._world.rank in segment.ranks:
                where[i] = self._places[segment.microbatch][segment.first].cpu()
        places = self._world.max(where).tolist()
        return [TokenAt(s.ranks[0], s.microbatch, *at) for s, at in zip(segments, places, strict=True)]

    def _count(self) -> list[list[int]]:
        """Count the response tokens of each rank in each micro-batch."""
        here = [len(places) for places in self._places]
        most = int(self._world.max(torch.tensor([len(here)], device="cpu")))
        gathered = self._world.gather(torch.tensor([*here, *[0] * (most - len(here))], dtype=torch.int64, device="cpu"))
        counts: list[list[int]] = [one.tolist() for one in gathered]
        if not any(any(one) for one in counts):
            raise NotLocalised("the step has no response tokens to search")
        return counts

    def _size(self, microbatch: int, ranks: range) -> int:
        return sum(self._counts[rank][microbatch] for rank in ranks)

    def _probe(self, segment: TokenSet) -> TokenSet:
        squares, failed = self._world.sum(self._attempt(segment)).tolist()
        if failed:
            raise NotLocalised(f"a probe of {segment.count} tokens failed on {int(failed)} of {self._world.size} ranks")
        probed = replace(segment, norm=math.sqrt(squares))
        self.trace.append(probed)
        return probed

    def _attempt(self, segment: TokenSet) -> Tensor:
        """Return (2,): squared norm of this rank's part, and 1 if that failed (out of memory, most likely)."""
        part, _ = tried(
            lambda: torch.stack([self._squares(segment), torch.zeros((), dtype=torch.float64, device="cpu")])
        )
        return torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu") if part is None else part

    def _squares(self, segment: TokenSet) -> Tensor:
        """Return this rank's part of the squared norm.

        With sharded parameters ranks outside of the segment run along.
        """
        active = self._world.rank in segment.ranks and segment.microbatch < len(self._passes)
        if not active and not self._gradients.together:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        one = self._passes[segment.microbatch if active else 0]
        weights = self._weights(one, segment) if active else {}
        if self._gradients.together or one.divides is not True or one.drew:
            return self._gradients.squares(run_again(one), weights).sum()
        rows = torch.stack([weight != 0 for weight in weights.values()]).any(0).any(1).nonzero()[:, 0].tolist()
        if not rows:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        weights = {name: weight[rows] for name, weight in weights.items()}
        return self._gradients.squares(run_again(one, rows), weights).sum()

    def _weights(self, one: LossPass, segment: TokenSet) -> dict[str, Tensor]:
        """Return the coefficients of the segment's tokens: all others are zero, whatever they were."""
        m, places = segment.microbatch, self._places[segment.microbatch]
        inside = places if segment.tokens is None else places[segment.tokens.start : segment.tokens.stop]
        chosen = torch.zeros(one.shape, dtype=torch.bool, device=places.device)
        chosen[tuple(inside.T)] = True
        chosen[tuple(places[self._left_out.get((self._world.rank, m), [])].T)] = False
        coefficients = {name: one.coefficient(name) for name in ("logp", "entropy")}
        return {name: torch.where(chosen, a, torch.zeros_like(a)) for name, a in coefficients.items()}


def _halves(whole: range) -> list[range]:
    middle = len(whole) // 2
    return [whole[:middle], whole[middle:]]
