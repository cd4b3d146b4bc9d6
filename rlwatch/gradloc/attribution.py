"""What each token of a step contributes to its gradient norm, in one directional derivative for all of them.

With the coefficients ``a = dL/dlogp`` that the backward left and the unit gradient ``u``, a token contributes
``c = a <dlogp/dtheta, u>`` (and ``e <dH/dtheta, u>`` with an entropy bonus), and all contributions, with that of an
auxiliary loss, sum up to the norm G. How far they miss it is the gap: the check of every result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from rlwatch.gradloc.derived import Derived, summed_coefficients
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.errors import NotLocalised
from rlwatch.gradloc.finite_difference import (
    KAPPA_CURVED,
    KAPPA_RICHARDSON,
    finite_difference,
    kappa_of,
    richardson,
)
from rlwatch.gradloc.forward_ad import forward_mode
from rlwatch.gradloc.passes import LossPass, Passes
from rlwatch.gradloc.refusal import tried
from rlwatch.gradloc.report import Method
from rlwatch.gradloc.sharding import sharded_modules
from rlwatch.gradloc.world import Alone, World

TOLERANCE, TOLERANCE_LOW = 1e-3, 1e-2
"""Largest |gap| of a complete result: where training computes in float32, and in less."""
METHODS = (Method.FD, Method.RICHARDSON, Method.JVP)
"""The order of trying, cheapest first."""
CURVED = 5e-3
"""A |gap| of a finite difference beyond this is curvature, not rounding: then the smaller step is tried first."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """Contributions of all tokens of this rank, and how well those of all ranks explain the gradient.

    Parameters
    ----------
    contributions
        (B, T) for each loss pass, signed, float64, on the CPU, in the unit of the norm; 0 where the loss has no
        coefficient. Already divided by the number of ranks, so that those of all ranks sum up to the norm.
    aux
        What the auxiliary losses of all ranks contribute.
    gap
        (sum of all contributions - norm) / norm over all ranks, signed.
    method
        The one whose result this is: of those tried, the first that was complete, or the one with the smallest gap.
    complete
        Whether ``gap`` is within tolerance.
    forwards
        What all that was tried took, in forward passes of the whole step without gradient graph.
    notes
        What was tried before, and what came of it.
    moved
        The largest difference of a log-prob that was seen on any rank, nats; None by forward-mode differentiation.
    """

    contributions: tuple[Tensor, ...]
    aux: float
    gap: float
    method: Method
    complete: bool
    forwards: int
    notes: tuple[str, ...] = ()
    moved: float | None = None


def attribute(
    model: nn.Module,
    passes: Passes,
    direction: Direction,
    *,
    world: World | None = None,
    methods: Sequence[Method] = METHODS,
) -> Attribution:
    """Attribute ``direction`` to the tokens of ``passes``. A collective: all ranks of ``world`` call it.

    ``methods`` are tried in their order until one is complete. The model, its gradients and the random state are as
    before afterwards, bit for bit.

    Raises
    ------
    NotLocalised
        There is nothing to attribute, or no method gives finite numbers; on all ranks alike.
    """
    world = world or Alone()
    trial = _Trial(model, passes.all, direction, world, _scale(model, passes.all, direction, world))
    best: Attribution | None = None
    for method in methods:
        found = trial.run(method)
        if found is not None and (best is None or abs(found.gap) < abs(best.gap)):
            best = found
        if best is not None and best.complete:
            break
    if best is None:
        raise NotLocalised("the contributions of the tokens could not be computed: " + "; ".join(trial.notes))
    return trial.told(best)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Of all ranks: S = sum |a|, in the unit of the norm, and how many tokens there are."""

    coefficients: float
    tokens: int


def _scale(model: nn.Module, passes: Sequence[LossPass], direction: Direction, world: World) -> _Scale:
    """Says why if there is nothing to attribute."""
    read = any(one.coefficients for one in passes)
    tokens = sum(int(one.tokens.mask.sum()) for one in passes)
    here = [summed_coefficients(passes) / world.size, float(len(passes)), float(read), float(tokens)]
    there = world.gather(torch.tensor(here, dtype=torch.float64))
    total = math.fsum(float(rank[0]) for rank in there)
    numbers = {int(rank[1]) for rank in there}
    if not direction.finite:
        raise NotLocalised("the gradient is not finite, so it has no direction")
    if numbers == {0}:
        raise NotLocalised("no loss pass of this step was kept")
    if not any(rank[2] for rank in there):
        raise NotLocalised("no backward of the loss was seen after its log-probs were observed")
    if total == 0:
        raise NotLocalised("the loss depends on no token: all its coefficients are zero")
    if direction.norm == 0:
        raise NotLocalised("the gradient is zero")
    if len(numbers) > 1 and sharded_modules(model):
        raise NotLocalised("the model is sharded and its ranks made different numbers of forward passes")
    return _Scale(total, int(sum(float(rank[3]) for rank in there)))


class _Trial:
    """Tries methods one after the other and remembers what came of them."""

    def __init__(
        self, model: nn.Module, passes: Sequence[LossPass], direction: Direction, world: World, scale: _Scale
    ) -> None:
        self.notes: list[str] = []
        self._forwards = 0
        self._gap = 0.0
        self._model, self._passes, self._direction, self._world = model, passes, direction, world
        self._scale = scale
        self._step = scale.coefficients / direction.norm
        """For a change of the log-probs by 1 nat, on a weighted mean, and far beyond where they are linear."""

    def run(self, method: Method) -> Attribution | None:
        """The best of its steps, tried until one is complete; None if it failed on some rank or is not finite."""
        best: Attribution | None = None
        for way in self._ways(method):
            found = self._one(method, way)
            if found is None:
                break
            best = found if best is None or abs(found.gap) < abs(best.gap) else best
            if best.complete:
                break
        return best

    def _ways(self, method: Method) -> Sequence[Callable[[], Derived]]:
        """Of Richardson the step that the gap before speaks for comes first: rounding asks for a larger one, curvature
        for a smaller one, and a gap just beyond the tolerance may be either.
        """
        if method is Method.FD:
            return [self._fd]
        if method is Method.JVP:
            return [self._jvp]
        kappas = [KAPPA_RICHARDSON, KAPPA_CURVED]
        return [partial(self._richardson, kappa) for kappa in sorted(kappas, reverse=abs(self._gap) <= CURVED)]

    def _one(self, method: Method, way: Callable[[], Derived]) -> Attribution | None:
        found, why = tried(way)
        gap, aux, moved, low, failed = self._agree(found)
        self._forwards += 2 if found is None else found.forwards
        if found is None or failed or not math.isfinite(gap):
            why = why or ("it failed on another rank" if failed else "the numbers are not finite")
            self.notes.append(f"{method.value}: {why}")
            return None
        self._gap = gap if method is Method.FD else self._gap
        self.notes.append(f"{method.value}: gap {gap:.1e}")
        complete = abs(gap) <= (TOLERANCE_LOW if low else TOLERANCE)
        return Attribution(
            found.tokens, aux, gap, method, complete, found.forwards, moved=None if found.moved is None else moved
        )

    def told(self, best: Attribution) -> Attribution:
        """With what it took, and the notes on the other methods."""
        others = tuple(note for note in self.notes if not note.startswith(f"{best.method.value}:"))
        return replace(best, forwards=self._forwards, notes=others)

    def _agree(self, found: Derived | None) -> tuple[float, float, float, bool, bool]:
        """Of all ranks: gap, aux, moved, low, failed."""
        here = [0.0, 0.0, 0.0, 0.0, 1.0]
        if found is not None:
            here = [found.total, found.aux, found.moved or 0.0, float(found.low), 0.0]
        ranks = torch.stack(self._world.gather(torch.tensor(here, dtype=torch.float64)))
        total, aux = ranks[:, :2].sum(0).tolist()
        moved, low, failed = ranks[:, 2:].amax(0).tolist()
        return total / self._direction.norm - 1, aux, moved, bool(low), bool(failed)

    def _fd(self) -> Derived:
        step = kappa_of(self._scale.tokens) * self._step
        return finite_difference(self._model, self._passes, self._direction, step, ranks=self._world.size)

    def _richardson(self, kappa: float) -> Derived:
        return richardson(self._model, self._passes, self._direction, kappa * self._step, ranks=self._world.size)

    def _jvp(self) -> Derived:
        return forward_mode(self._model, self._passes, self._direction, ranks=self._world.size)
