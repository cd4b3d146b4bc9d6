"""Contributions by finite differences: forward passes with the weights moved a little along the gradient.

The step is chosen by what the log-probs are to move, not by the length of the weights: along the unit gradient
sum a dlogp = h G, so with h = kappa S / G, S = sum |a|, the mean |dlogp| weighted with |a| is at least kappa.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from torch import Tensor, nn

from rlwatch.gradloc.derived import Derived, Parts, aux_contribution, contributions, parts_of
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.displacement import displaced
from rlwatch.gradloc.kernels import routed
from rlwatch.gradloc.passes import LossPass
from rlwatch.gradloc.routing import FirstChoice
from rlwatch.gradloc.unharmed import looking

KAPPA = 3e-3
"""nats: among those tried, the step at which rounding (float32) and curvature both stay below 3e-4 of the norm."""
MANY, LEAST_KAPPA = 1000, 5e-4
"""Tokens from which on the step shrinks, and how far: the gradients of many tokens cancel, so that S / G grows with
the root of their number, and with it how far single log-probs move."""
KAPPA_RICHARDSON = 2e-2
"""nats, the larger of the two steps: extrapolation removes the curvature, so rounding decides."""
KAPPA_CURVED = 1e-3
"""nats, the larger of the two steps where curvature is beyond what extrapolation removes (attended zero vectors)."""


def kappa_of(tokens: int) -> float:
    """The step for so many tokens of the step, nats."""
    return max(LEAST_KAPPA, KAPPA * math.sqrt(MANY / max(MANY, tokens)))


def finite_difference(
    model: nn.Module, passes: Sequence[LossPass], direction: Direction, step: float, *, ranks: int = 1
) -> Derived:
    """Central difference with ``step``, a length in the space of the parameters; of ``ranks`` whose mean is taken.

    Of a mixture of experts a third pass, with the weights where they are, decides which expert a token goes to.
    """
    choices = [FirstChoice() if routed(model) else nullcontext() for _ in passes]
    with looking(model) as precision:

        def at(step: float) -> list[Parts]:
            with displaced(model, direction, step, precision):
                return [_run(one, choice) for one, choice in zip(passes, choices, strict=True)]

        if routed(model):
            at(0.0)
        ahead, behind = at(step), at(-step)
    slopes = [_slope(a, b, 2 * step) for a, b in zip(ahead, behind, strict=True)]
    moved = [float((a["logp"] - b["logp"]).abs().max()) / 2 for a, b in zip(ahead, behind, strict=True) if "logp" in a]
    return Derived(
        tuple(contributions(one, slope) / ranks for one, slope in zip(passes, slopes, strict=True)),
        sum(aux_contribution(one, slope) for one, slope in zip(passes, slopes, strict=True)) / ranks,
        max(moved, default=0.0),
        precision.low,
        forwards=3 if routed(model) else 2,
    )


def richardson(
    model: nn.Module, passes: Sequence[LossPass], direction: Direction, step: float, *, ranks: int = 1
) -> Derived:
    """Two central differences, with ``step`` and half of it, extrapolated to 0: the error is of fourth order."""
    coarse = finite_difference(model, passes, direction, step, ranks=ranks)
    fine = finite_difference(model, passes, direction, step / 2, ranks=ranks)
    tokens = tuple((4 * f - c) / 3 for f, c in zip(fine.tokens, coarse.tokens, strict=True))
    return replace(coarse, tokens=tokens, aux=(4 * fine.aux - coarse.aux) / 3, forwards=coarse.forwards + fine.forwards)


def _run(one: LossPass, choice: AbstractContextManager[object]) -> Parts:
    one.random.restore()
    with choice:
        return parts_of(one, one.forward().parts())


def _slope(ahead: Parts, behind: Parts, distance: float) -> dict[str, Tensor]:
    return {name: (part - behind[name]) / distance for name, part in ahead.items()}
