"""Forward passes that see weights moved along a direction, while the weights themselves stay as they are.

What a module reads as ``self.weight`` is looked up in its dictionary of parameters. While :func:`seen` is active that
dictionary is another one, which works out each value when it is read: a temporary in float32 that is gone when the
operation is over. So it takes the memory of one weight, works for weights that another module reads (a fused head),
that are tied, adapted or checkpointed, and a process that dies half-way leaves nothing damaged.

To add the step and subtract it again would not do: up to half of float32 weights come back changed, by up to 37 ulp.
Nor would moving bfloat16 weights in place: the step is below half an ulp, and 99.7 % of the elements would not move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.autograd.forward_ad as fwad
from torch import Tensor, nn
from typing_extensions import override

from rlwatch.error_boundary import Reported
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.distributed import Gathered, recover, reshard
from rlwatch.gradloc.rerun import LOW, Precision

Shift = Callable[[Tensor, Tensor], Tensor]
"""(weight, gradient) -> what the forward pass sees in place of the weight. Changes neither."""


def displaced(
    model: nn.Module, direction: Direction, step: float, precision: Precision
) -> AbstractContextManager[None]:
    """Weights are seen at theta + ``step`` * u, with u the unit vector of ``direction``."""
    # theta + h u, with u = gradients / length never formed: one fused multiply-add for each weight as it is read.
    alpha = step / direction.length
    return seen(model, direction, lambda weight, gradient: weight.add(gradient, alpha=alpha), precision)


def tangent(model: nn.Module, direction: Direction, precision: Precision) -> AbstractContextManager[None]:
    """Weights are seen as dual numbers with the gradients (not divided by their norm) as tangents.

    Within ``torch.autograd.forward_ad.dual_level``.
    """

    def dual(weight: Tensor, gradient: Tensor) -> Any:
        return fwad.make_dual(weight, gradient.to(weight.dtype))  # type: ignore[no-untyped-call]

    return seen(model, direction, dual, precision)


@contextmanager
def seen(model: nn.Module, direction: Direction, shift: Shift, precision: Precision) -> Iterator[None]:
    """Forward passes inside see ``shift(weight, gradient)`` for each weight that has a gradient in ``direction``.

    If ``precision`` is wide, weights in bfloat16 or float16 are seen in float32, so that all of the pass is, and
    ``shift`` gets them so. Without gradient graph.
    """
    reshard(model)
    named = dict(model.named_parameters())
    gradients = {id(named[name]): gradient for name, gradient in direction.gradients.items()}
    true = [(module, module._parameters) for module in model.modules() if module._parameters]  # noqa: SLF001
    tied = _tied(parameters for _, parameters in true)
    with Gathered(model, gradients) as gathered:
        try:
            with Reported(lambda _: recover(model)):
                for module, parameters in true:
                    views = Views(parameters, gradients, shift, precision, gathered)
                    if isinstance(module, nn.Embedding) and id(module.weight) in tied:
                        views.without_row = module.padding_idx
                    module.__dict__["_parameters"] = views
                yield
        finally:
            try:
                reshard(model)
            finally:  # whatever happens the model is training's
                for module, parameters in true:
                    module.__dict__["_parameters"] = parameters


class Views(dict[str, Any]):
    """Parameters of a module as its forward pass is to see them; iterating over them gives the true ones."""

    def __init__(
        self,
        true: Mapping[str, Any],
        gradients: Mapping[int, Tensor],
        shift: Shift,
        precision: Precision,
        gathered: Gathered,
    ) -> None:
        super().__init__(true)
        self._gradients = {name: (id(p), gradients[id(p)]) for name, p in true.items() if id(p) in gradients}
        self._shift = shift
        self._precision = precision
        self._gathered = gathered
        self.without_row: int | None = None

    @override
    def __getitem__(self, name: str) -> Any:
        weight = super().__getitem__(name)
        if weight is None:
            return weight
        if name not in self._gradients:
            return self._precision.widen(weight) if weight.dtype in LOW else weight
        gradient = self._gathered.like(weight, *self._gradients[name])
        if self.without_row is not None:
            gradient = _without(gradient, self.without_row)
        return self._shift(self._precision.widen(weight), gradient)


def _without(gradient: Tensor, row: int) -> Tensor:
    """Autograd drops what the padding row of an embedding would get, but not what a head tied to it gets.

    So where the embedding reads it, that row must stand still.
    """
    left = gradient.clone()
    left[row] = 0
    return left


def _tied(dictionaries: Iterator[Mapping[str, Any]]) -> set[int]:
    """Parameters that are registered more than once."""
    once: set[int] = set()
    more: set[int] = set()
    for parameters in dictionaries:
        for p in parameters.values():
            (more if id(p) in once else once).add(id(p))
    return more
