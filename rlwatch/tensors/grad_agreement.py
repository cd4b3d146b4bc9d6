"""Measure the agreement of the gradients of a step's micro-batches: signal, or noise that cancels in their sum.

Gradients accumulate, so that the gradient of a micro-batch is the difference of ``.grad`` before and after its backward
pass. Up to ``SAMPLED`` elements of up to ``TENSORS`` tensors are followed. With g_i of n micro-batches the agreement is
the mean product of two different ones over their mean square. It is 1 if all are equal, 0 if they have nothing in
common, -1/(n - 1) if they cancel. An unstable gradient norm together with a low effective sample size precedes collapse
(VCPO, arXiv 2602.17616).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from rlwatch.tensors.gradnorm import detached, ordinary
from rlwatch.tensors.mergeable import Stat, Stats
from rlwatch.tensors.transfer import freed
from rlwatch.tensors.weight_gap import COMPARED, places_of, sample_at, sampled

NAME = "optim/grad_agreement"
TENSORS = 32
"""Most tensors that are followed, evenly spaced over the model."""
PASSES = 16
"""Most micro-batches of a step that are followed."""


@dataclass(frozen=True, slots=True)
class Agreement(Stat):
    """Mean product of the gradients of two micro-batches over their mean square, in [-1, 1]; pairs of one rank only.

    ``across_pairs``: sum over ranks of |sum g|^2 - sum |g|^2; ``own``: sum over ranks of (n - 1) sum |g|^2. ``count``:
    number of micro-batches less that of ranks. Not measured if no gradient changed.
    """

    across_pairs: Tensor
    own: Tensor

    elementwise: ClassVar[bool] = True

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.across_pairs + other.across_pairs, self.own + other.own)

    @override
    def settle(self) -> Self:
        return replace(self, count=torch.where(self.own > 0, self.count, 0.0))

    @override
    def value(self) -> Tensor:
        return self.across_pairs / self.own


class GradientTrail:
    """Reader of one model's accumulated gradients after each backward pass of a step, to compare the micro-batches."""

    def __init__(self) -> None:
        self._parameters: tuple[nn.Parameter, ...] | None = None
        self._looks: list[Tensor] = []

    def forget(self) -> None:
        """Drop the gradients that were read, to begin the next step."""
        self._parameters, self._looks = None, []

    def look(self, parameters: Iterable[nn.Parameter], turn: int = 0) -> None:
        """Read the gradients of ``parameters`` before or after a backward pass, without waiting for the device.

        ``turn``: number of the step; different steps sample different elements.
        """
        if len(self._looks) > PASSES:
            return
        if self._parameters is None:
            self._parameters = _followed(list(parameters))
        if self._parameters:
            self._looks.append(_sample(self._parameters, turn))

    def stats(self) -> Stats:
        """Return ``optim/grad_agreement`` of the micro-batches of this step; empty if fewer than two gradients were
        read.

        Not measured either if the first read found gradients of an earlier step, which the loop clears later.
        """
        if len(self._looks) < 3:
            return {}
        looks = torch.stack(self._looks)
        squares = (looks[1:] - looks[:-1]).square().sum(-1)
        more, total = (squares > 0).sum(dtype=squares.dtype) - 1, squares.sum()
        clean = (looks[0] == 0).all() & (more > 0)
        parts = torch.stack([more, looks[-1].square().sum() - total, more * total])
        return {NAME: Agreement(*torch.where(clean, parts, 0.0).unbind())}


def _followed(parameters: Sequence[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """Return up to ``TENSORS`` of the trained parameters that this rank holds whole, evenly spaced, all on one
    device.
    """
    whole = [one for one in parameters if one.requires_grad and _whole(one)]
    whole = [one for one in whole if one.device == whole[0].device]
    stride = max(1, -(-len(whole) // TENSORS))
    return tuple(whole[::stride])


def _whole(weight: nn.Parameter) -> bool:
    elsewhere = ("to_local", "ds_id", "_hp_mapping", "main_grad")
    held = ordinary(weight) or not any(hasattr(weight, name) for name in elsewhere)
    return held and weight.numel() > 0 and weight.dtype in COMPARED and not weight.is_meta and not freed(weight)


def _sample(parameters: Sequence[nn.Parameter], turn: int) -> Tensor:
    """Return a copy of sampled elements of the parameters' gradients, (K,) float32; 0 for a parameter without a
    gradient.

    ``turn``: number of the step, which selects the elements.
    """
    grads = [parameter.grad for parameter in parameters]
    if all(grad is None for grad in grads):  # before the first backward pass
        return torch.zeros(sum(_sampled(one, turn) for one in parameters), device=parameters[0].device)
    rows = [
        parameter.new_zeros(_sampled(parameter, turn)) if grad is None else sample_at(detached(grad), turn)
        for parameter, grad in zip(parameters, grads, strict=True)
    ]
    return torch.cat(rows).float()


def _sampled(parameter: nn.Parameter, turn: int) -> int:
    return sampled(places_of(parameter.numel(), turn))
