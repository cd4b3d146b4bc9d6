"""Contributions through training's own backward, where that is not the derivative of the forward.

A straight-through estimator rounds going forward and passes gradients on as if it had not; other custom functions clip
or scale what flows back. There a difference of forward passes, and a forward derivative, differentiate something else
than training did. The backward itself is linear in what is fed into it, g(v) = sum v dlogp/dtheta as training has it,
so the derivative of <g(v), u> by v, taken at the coefficients, gives every token's contribution: one backward through
a backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlwatch.gradloc.attribution import Derived, usable
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.gradients import beside_training
from rlwatch.gradloc.passes import LossPass, Outputs
from rlwatch.gradloc.rerun import differentiable_kernels

PARTS = ("logp", "entropy")
"""Outputs that belong to tokens."""


def reverse_mode(model: nn.Module, passes: Sequence[LossPass], direction: Direction, *, ranks: int = 1) -> Derived:
    """Along ``direction``, response by response where these run alone; of ``ranks`` whose mean is taken.

    It takes the memory of the graph of one backward of a response (or of a micro-batch that does not divide).

    Raises
    ------
    RuntimeError, NotImplementedError
        By torch, where the backward of an operation has no derivative itself.
    """
    units = [(p, direction.gradients[name]) for name, p in model.named_parameters() if name in direction.gradients]
    scale = 1 / (direction.length * ranks)
    with beside_training(model), differentiable_kernels(model):
        tables = [_of_pass(one, units) for one in passes]
    tokens = tuple(sum(table.values(), torch.zeros((), device="cpu")) * scale for table in tables)
    entropy = sum(float(table["entropy"].sum()) for table in tables if "entropy" in table) * scale
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p, _ in units)
    return Derived(tokens, 0.0, None, low, forwards=6, entropy=entropy)


def _of_pass(one: LossPass, units: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """(B, T) of each part that the loss used, in the unit of squared gradients."""
    used = [name for name in PARTS if name in one.coefficients]
    table = {name: torch.zeros(one.shape, dtype=torch.float64, device="cpu") for name in used}
    alone = one.divides is True and not one.drew
    for rows in [[row] for row in range(one.shape[0])] if alone else [None]:
        one.random.restore()
        forward = one.differentiable or one.forward
        outputs = forward() if rows is None else forward(rows)
        for name, values in _of_rows(one, outputs, rows, units).items():
            where = slice(None) if rows is None else rows
            table[name][where, : values.shape[1]] = values
    return table


def _of_rows(
    one: LossPass, outputs: Outputs, rows: Sequence[int] | None, units: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """(rows, T) of each part: coefficient times the derivative of its gradient along the direction."""
    parts = {n: part for n, part in outputs.parts().items() if n in PARTS and n in one.coefficients}
    fed = {}
    for name, part in parts.items():
        coefficient = usable(one.coefficients[name]) if rows is None else usable(one.coefficients[name])[list(rows)]
        fed[name] = coefficient[:, : part.shape[1]].to(part).requires_grad_()
    gradients = torch.autograd.grad(
        list(parts.values()), [p for p, _ in units], list(fed.values()), create_graph=True, allow_unused=True
    )
    pairs = [(g, unit) for g, (_, unit) in zip(gradients, units, strict=True) if g is not None]
    along = sum(((g.float() * unit.float()).sum() for g, unit in pairs), torch.zeros((), device="cpu"))
    if not along.requires_grad:
        return {name: torch.zeros(weights.shape, dtype=torch.float64, device="cpu") for name, weights in fed.items()}
    slopes = torch.autograd.grad(along, list(fed.values()), allow_unused=True)
    return {
        name: (weights.detach() * (torch.zeros_like(weights) if slope is None else slope)).double().cpu()
        for (name, weights), slope in zip(fed.items(), slopes, strict=True)
    }
