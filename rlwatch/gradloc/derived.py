"""Derivatives of what a loss takes of the policy, weighted with the coefficients of the loss: contributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.gradloc.passes import LossPass

Parts = Mapping[str, Tensor]
"""Parts of a forward pass's outputs by name, or their derivatives: float64, on the CPU."""


@dataclass(frozen=True, slots=True)
class Derived:
    """Contributions of this rank's tokens to the norm.

    Parameters
    ----------
    tokens
        (B, T) for each loss pass, float64, on the CPU; 0 where the loss has no coefficient.
    aux
        That of the auxiliary loss.
    moved
        The largest difference of a log-prob that was seen, nats; None where none was taken.
    low
        Whether training computes in less than float32.
    forwards
        What it took, in forward passes of the whole step.
    """

    tokens: tuple[Tensor, ...]
    aux: float
    moved: float | None
    low: bool
    forwards: int

    @property
    def total(self) -> float:
        """Sum of all."""
        return float(sum(part.sum() for part in self.tokens)) + self.aux


def parts_of(one: LossPass, forward: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those parts of ``forward`` that the loss used."""
    return {name: part.detach().double().cpu() for name, part in forward.items() if name in one.coefficients}


def usable(coefficient: Tensor) -> Tensor:
    """float64, on the CPU; 0 in place of NaN and Inf.

    With finite gradients these stand where nothing flows back: a padded position's NaN ends at the mask.
    """
    known = coefficient.detach().double().cpu()
    return torch.where(known.isfinite(), known, 0.0)


def contributions(one: LossPass, derivative: Parts) -> Tensor:
    """(B, T) a * dlogp + e * dH; 0 where the coefficients are, whatever the derivative there."""
    total = torch.zeros(one.shape, dtype=torch.float64)
    for name in ("logp", "entropy"):
        if name in derivative:
            weight = usable(one.coefficients[name])
            total += torch.where(weight == 0, 0.0, weight * derivative[name])
    return total


def aux_contribution(one: LossPass, derivative: Parts) -> float:
    """Coefficient times derivative; 0 without an auxiliary loss."""
    return float(usable(one.coefficients["aux"]) * derivative["aux"]) if "aux" in derivative else 0.0


def summed_coefficients(passes: Sequence[LossPass]) -> float:
    """S = sum |a| + sum |e| + |x|: what sets the scale of a step of finite differences."""
    return float(sum(usable(c).abs().sum() for one in passes for c in one.coefficients.values()))
