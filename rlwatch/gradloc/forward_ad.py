"""Contributions by forward-mode differentiation: one pass with dual numbers, exact up to rounding.

It needs a forward derivative of every operation. Fused attention, grouped experts and custom functions have none: the
first two are replaced for the while, the third by :attr:`LossPass.differentiable`.

It runs in the precision of training: there it explains the gradient as training computed it, with most of its rounding,
where differences have to be taken in float32 and show that rounding as a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn

from rlwatch.gradloc.derived import Derived, Parts, aux_contribution, contributions, parts_of
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.displacement import tangent
from rlwatch.gradloc.kernels import differentiable_kernels
from rlwatch.gradloc.passes import LossPass
from rlwatch.gradloc.unharmed import looking


def forward_mode(model: nn.Module, passes: Sequence[LossPass], direction: Direction, *, ranks: int = 1) -> Derived:
    """Along ``direction``; of ``ranks`` whose mean is taken.

    Raises
    ------
    RuntimeError, NotImplementedError
        By torch, where an operation has no forward derivative.
    """
    scale = 1 / (direction.length * ranks)
    with looking(model, wide=False) as precision, differentiable_kernels(model), tangent(model, direction, precision):
        slopes = [_slopes(one) for one in passes]
    return Derived(
        tuple(contributions(one, slope) * scale for one, slope in zip(passes, slopes, strict=True)),
        sum(aux_contribution(one, slope) for one, slope in zip(passes, slopes, strict=True)) * scale,
        None,
        precision.low,
        forwards=2,
    )


def _slopes(one: LossPass) -> Parts:
    """Derivatives of the parts that the loss used."""
    one.random.restore()
    with fwad.dual_level():
        parts = (one.differentiable or one.forward)().parts()
        return parts_of(one, {name: _slope(part) for name, part in parts.items()})


def _slope(part: Tensor) -> Tensor:
    """Of one part; zeros where it does not depend on the weights that have a gradient."""
    found = fwad.unpack_dual(part).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(part) if found is None else found
