"""Gradient norms of sets of tokens, one forward and backward each, as a search by halves asks for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rlwatch.gradloc.errors import NotLocalised
from rlwatch.gradloc.gradients import gradients_of, run_again
from rlwatch.gradloc.passes import LossPass, Passes
from rlwatch.gradloc.refusal import tried
from rlwatch.gradloc.report import TokenAt
from rlwatch.gradloc.world import World


@dataclass(frozen=True, slots=True)
class Segment:
    """A set of tokens of one micro-batch, on some ranks; on a single one perhaps a stretch of its tokens.

    Parameters
    ----------
    microbatch
        Which of the step.
    ranks
        Those whose tokens are in it.
    tokens
        Which of the rank's response tokens, counted through the micro-batch row by row; None: all.
    count
        How many tokens there are.
    norm
        Of the gradient of their part of the loss, in the unit of the step's norm. NaN and Inf are possible; NaN too
        where it was not probed.
    """

    microbatch: int
    ranks: range
    tokens: range | None
    count: int
    norm: float = math.nan

    @property
    def single(self) -> bool:
        """Whether it is one token of one rank."""
        return self.count == 1 and len(self.ranks) == 1

    @property
    def size(self) -> float:
        """The norm, to compare by: NaN is larger than anything."""
        return math.inf if math.isnan(self.norm) else self.norm

    @property
    def first(self) -> int:
        """Its first token, counted through the micro-batch."""
        return self.tokens[0] if self.tokens else 0

    def holds(self, token: Segment) -> bool:
        """Whether ``token``, a single one, is in it."""
        if self.microbatch != token.microbatch or token.ranks[0] not in self.ranks:
            return False
        return self.tokens is None or token.first in self.tokens


class BudgetSpent(Exception):  # noqa: N818  (an end, not a fault)
    """There are fewer probes left than asked for."""


class Probes:
    """Probes of one step, counted. A collective: all ranks ask for the same segments in the same order.

    Where every rank has whole parameters, squared norms are added up over the ranks of a segment: gradients need not
    be sent, and ranks cannot cancel each other. Sharded gradients are what FSDP makes of them, their mean.

    Parameters
    ----------
    model
        The module itself, not DDP's wrapping of it.
    passes
        This rank's.
    budget
        Probes at most.
    world
        The ranks.

    Raises
    ------
    NotLocalised
        There is nothing to search.
    """

    def __init__(self, model: nn.Module, passes: Passes, budget: int, world: World) -> None:
        self._gradients = gradients_of(model, world)
        self._passes = passes.all
        self._budget = budget
        self._world = world
        self._places = [one.tokens.mask.bool().nonzero() for one in passes.all]
        self._counts = self._count()
        self._left_out: dict[tuple[int, int], list[int]] = {}
        self.trace: list[Segment] = []
        """What was probed, in order."""

    def microbatches(self) -> list[Segment]:
        """Each micro-batch that has response tokens, of all ranks."""
        ranks = range(self._world.size)
        every = [Segment(m, ranks, None, self._size(m, ranks)) for m in range(len(self._counts[0]))]
        return [segment for segment in every if segment.count]

    def halves(self, segment: Segment) -> list[Segment]:
        """Both halves: of its ranks, or of its tokens where there is one rank; only those that have tokens."""
        m, ranks = segment.microbatch, segment.ranks
        if len(ranks) > 1:
            parts = [Segment(m, half, None, self._size(m, half)) for half in _halves(ranks)]
        else:
            tokens = segment.tokens or range(segment.count)
            parts = [Segment(m, ranks, half, len(half)) for half in _halves(tokens)]
        return [part for part in parts if part.count]

    def norms(self, segments: Sequence[Segment]) -> list[Segment]:
        """The same, with their norms.

        Raises
        ------
        BudgetSpent
            There are not as many probes left: none was made.
        NotLocalised
            A probe failed, on whichever rank.
        """
        if len(self.trace) + len(segments) > self._budget:
            raise BudgetSpent
        return [self._probe(segment) for segment in segments]

    def leave_out(self, segment: Segment) -> None:
        """A single token that further probes shall not contain."""
        self._left_out.setdefault((segment.ranks[0], segment.microbatch), []).append(segment.first)

    def tokens(self, segments: Sequence[Segment]) -> list[TokenAt]:
        """Where single tokens are."""
        where = torch.full((len(segments), 2), -1, dtype=torch.int64)
        for i, segment in enumerate(segments):
            if self._world.rank in segment.ranks:
                where[i] = self._places[segment.microbatch][segment.first].cpu()
        found = self._world.max(where).tolist()
        return [TokenAt(s.ranks[0], s.microbatch, *at) for s, at in zip(segments, found, strict=True)]

    def _count(self) -> list[list[int]]:
        """Response tokens of each rank in each micro-batch."""
        ours = [len(places) for places in self._places]
        most = int(self._world.max(torch.tensor([len(ours)])))
        counts = self._world.gather(torch.tensor([*ours, *[0] * (most - len(ours))], dtype=torch.int64))
        found: list[list[int]] = [one.tolist() for one in counts]
        if not any(any(one) for one in found):
            raise NotLocalised("the step has no response tokens to search")
        return found

    def _size(self, microbatch: int, ranks: range) -> int:
        return sum(self._counts[rank][microbatch] for rank in ranks)

    def _probe(self, segment: Segment) -> Segment:
        squares, failed = self._world.sum(self._attempt(segment)).tolist()
        if failed:
            raise NotLocalised(f"a probe of {segment.count} tokens failed on {int(failed)} of {self._world.size} ranks")
        probed = replace(segment, norm=math.sqrt(squares))
        self.trace.append(probed)
        return probed

    def _attempt(self, segment: Segment) -> Tensor:
        """(2,): squared norm of this rank's part, and 1 if it could not be had (out of memory, most likely)."""
        part, _ = tried(lambda: torch.stack([self._squares(segment), torch.zeros((), dtype=torch.float64)]))
        return torch.tensor([0.0, 1.0], dtype=torch.float64) if part is None else part

    def _squares(self, segment: Segment) -> Tensor:
        """The part of this rank in the squared norm. With sharded parameters ranks outside of the segment run along."""
        ours = self._world.rank in segment.ranks and segment.microbatch < len(self._passes)
        if not ours and not self._gradients.together:
            return torch.zeros((), dtype=torch.float64)
        one = self._passes[segment.microbatch if ours else 0]
        weights = self._weights(one, segment) if ours else {}
        return self._gradients.squares(run_again(one), weights).sum()

    def _weights(self, one: LossPass, segment: Segment) -> dict[str, Tensor]:
        """The coefficients of the segment's tokens: all others are zero, whatever they were."""
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
