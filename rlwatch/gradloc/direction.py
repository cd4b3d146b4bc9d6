"""The gradient of a step as a direction, and forward passes that see weights moved along it.

A direction has the norm of the gradient, each layer's share of it, and its tensors. The weights themselves are not
changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn
from torch.nn import Parameter
from typing_extensions import override

from rlwatch.error_boundary import Reported
from rlwatch.gradloc.distributed import Alone, Gathered, World, recover, reshard
from rlwatch.gradloc.report import NotLocalised
from rlwatch.gradloc.rerun import LOW, Precision
from rlwatch.tensors.gradnorm import Piece, layer_of, plain_name


@dataclass(frozen=True, slots=True)
class Direction:
    """The gradients that a model held at one moment.

    Parameters
    ----------
    gradients
        Gradients by the name of the parameter, as they lie in ``.grad``: not copied, never changed. A parameter with
        several names occurs once; parameters without a gradient are absent.
    norm
        ``G``, the L2 norm of the whole gradient of all ranks before it was clipped, in the unit of the coefficients of
        the loss passes. 0, NaN and Inf are possible.
    length
        L2 norm of the whole gradient as it is held now: the unit vector is ``gradients / length``.
    layers
        Share of each layer in the squared norm, in model order; sums up to 1. Empty if that norm is 0 or not finite.
    """

    gradients: Mapping[str, Tensor]
    norm: float
    length: float
    layers: Mapping[str, float]

    @classmethod
    def of(
        cls, model: nn.Module, *, world: World | None = None, rank: int | None = None, norm: float | None = None
    ) -> Direction:
        """Take the gradients that ``model`` holds now. A collective: all ranks of ``world`` call it.

        Squares are summed in float32 within a tensor and in float64 between tensors. A whole gradient counts on
        ``rank`` 0 only (default: the rank in ``world``), because data-parallel ranks all hold the same. Of a DTensor
        the local shard counts. Pass ``norm`` if it is no longer that of the gradients held, because they were clipped
        since, or divided by a loss scale that the coefficients carry.

        Raises
        ------
        NotLocalised
            If there are no gradients, if not all ranks have them, or if they cannot be read.
        """
        world = world or Alone()
        reshard(model)
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        squares = _squares(parameters, world, world.rank if rank is None else rank)
        length = math.sqrt(sum(squares.values()))
        held = {name: p.grad.detach() for name, p in parameters if p.grad is not None}
        return cls(held, length if norm is None else norm, length, _shares(squares))

    @property
    def finite(self) -> bool:
        """Return True if the gradient has no NaN or Inf, and no norm beyond float32. A gradient of zeros is finite."""
        return math.isfinite(self.length) and math.isfinite(self.norm)


def _squares(parameters: list[tuple[str, Parameter]], world: World, rank: int) -> dict[str, float]:
    """Return the sum of squares of each gradient that exists, over all ranks, by the name of its parameter."""
    counted = [_counted(name, p, rank) for name, p in parameters]
    held = torch.tensor([0 if piece is None else piece.numel() for piece in counted], device="cpu")
    there = torch.tensor([p.grad is not None for _, p in parameters], device="cpu")
    squares, elements, ranks = world.sum(torch.stack([_sums(counted), held.double(), there.double()])).tolist()
    _check(parameters, elements, ranks, world.size)
    return {name: square for (name, _), square, n in zip(parameters, squares, ranks, strict=True) if n}


def _counted(name: str, parameter: Parameter, rank: int) -> Tensor | None:
    """Return the part of its gradient that counts on this rank, if any."""
    if parameter.grad is None or parameter.grad.layout != torch.strided:
        return None
    return Piece.of(name, parameter, rank).counted


def _sums(counted: list[Tensor | None]) -> Tensor:
    """Return (P,) sums of squares, float64 on the CPU; 0 for parameters without a gradient."""
    # float32 within a tensor, as clip_grad_norm_ has it, so that the norm agrees with the trainer's; float64 between
    # tensors, because a squared norm beyond 3e38 (a norm beyond 1.8e19) is still to be localised.
    tensors = [piece for piece in counted if piece is not None]
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    norms = iter(torch._foreach_norm(tensors, 2, dtype=wide) if tensors else [])  # noqa: SLF001
    zero = torch.zeros((), device=tensors[0].device if tensors else None)
    every = [zero if piece is None else next(norms).to(zero.device) for piece in counted]
    return torch.stack(every).cpu().double().square() if every else torch.zeros(0, device="cpu").double()


def _check(parameters: list[tuple[str, Parameter]], elements: list[float], ranks: list[float], size: int) -> None:
    """Raise ``NotLocalised`` if a gradient is not whole. All ranks see the same numbers, and so all raise or none."""
    if not any(ranks):
        raise NotLocalised("no parameter of the model holds a gradient")
    for (name, p), held, n in zip(parameters, elements, ranks, strict=True):
        if n not in (0, size):
            raise NotLocalised(f"the gradient of {name} exists on {int(n)} of {size} ranks")
        if n and held != p.numel():
            raise NotLocalised(f"the gradient of {name} is sparse, flattened, or not yet reduced over the ranks")


def _shares(squares: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(squares.values()) if all(math.isfinite(s) for s in squares.values()) else math.nan
    if not (math.isfinite(total) and total > 0):
        return {}
    shares: dict[str, float] = {}
    for name, square in squares.items():
        shares[layer_of(name)] = shares.get(layer_of(name), 0.0) + square / total
    return shares


ONE_EXPERT = 0.5
"""Share of a layer's squared norm above which an expert is named."""
_EXPERT = re.compile(r"(?:.*\.)?experts?\.(?:local_experts\.)?(\d+)\.")
_STACKED = re.compile(r"(?:.*\.)?experts?\.")


def expert_to_blame(gradients: Mapping[str, Tensor], layer: str) -> tuple[int, float] | None:
    """Return the number of the expert that holds most of the squared norm of ``layer``, and its share.

    The result is None if no expert does. Experts are separate modules (``experts.5.down_proj.weight``), or consecutive
    in a tensor (E, ...). Shards of a DTensor are left out. It takes one pass over the layer's gradients, as for its
    norm, and waits once for the device.
    """
    whole: list[Tensor] = []
    of_expert: dict[int, Tensor] = {}
    for name, gradient in gradients.items():
        if layer_of(name) != layer or hasattr(gradient, "to_local"):
            continue
        squares = gradient.detach().float().square()
        whole.append(squares.sum())
        alone, stacked = _EXPERT.match(plain_name(name)), _STACKED.match(plain_name(name))
        if alone is not None:
            parts = {int(alone[1]): whole[-1]}
        elif stacked is not None and gradient.dim() == 3:
            parts = dict(enumerate(squares.flatten(1).sum(1)))
        else:
            continue
        for number, square in parts.items():
            of_expert[number] = of_expert[number] + square if number in of_expert else square
    if len(of_expert) < 2:
        return None
    total, *every = torch.stack([torch.stack(whole).sum(), *of_expert.values()]).tolist()
    number, most = max(zip(of_expert, every, strict=True), key=lambda one: one[1])
    return (number, most / total) if total > 0 and most >= ONE_EXPERT * total else None


# Forward passes that see weights moved along a direction, while the weights themselves are not changed.
#
# A module looks up ``self.weight`` in its dictionary of parameters. Inside ``seen`` that dictionary is replaced by one
# that computes each value when it is read: a temporary in float32 that is freed when the operation is over. So it takes
# the memory of one weight. It works for weights that another module reads (a fused head), and for tied, adapted or
# checkpointed ones. A process that dies half-way leaves nothing damaged.
#
# Adding the step and subtracting it again would change up to half of the float32 weights, by up to 37 ulp. Moving
# bfloat16 weights in place would not work either: the step is below half an ulp, and 99.7 % of the elements would not
# move.


Shift = Callable[[Tensor, Tensor], Tensor]
"""Function (weight, gradient) -> value that the forward pass sees in place of the weight. It changes neither
argument.
"""


def displaced(
    model: nn.Module, direction: Direction, step: float, precision: Precision
) -> AbstractContextManager[None]:
    """Let forward passes in the ``with`` block see weights at theta + ``step`` * u, with u the unit vector of
    ``direction``.

    ``step`` is a length in the space of the parameters; ``precision`` is that of the pass.
    """
    # theta + h u, with u = gradients / length never formed: one fused multiply-add for each weight as it is read.
    alpha = step / direction.length
    return seen(model, direction, lambda weight, gradient: weight.add(gradient, alpha=alpha), precision)


def tangent(model: nn.Module, direction: Direction, precision: Precision) -> AbstractContextManager[None]:
    """Let forward passes in the ``with`` block see weights as dual numbers, with the gradients as tangents.

    The tangents are not divided by the gradient's norm. Use it within ``torch.autograd.forward_ad.dual_level``.
    """

    def dual(weight: Tensor, gradient: Tensor) -> Any:
        return fwad.make_dual(weight, gradient.to(weight.dtype))  # type: ignore[no-untyped-call]

    return seen(model, direction, dual, precision)


@contextmanager
def seen(model: nn.Module, direction: Direction, shift: Shift, precision: Precision) -> Iterator[None]:
    """Let forward passes in the ``with`` block see ``shift(weight, gradient)`` for each weight with a gradient in
    ``direction``.

    If ``precision`` is wide, weights in bfloat16 or float16 are seen in float32, and ``shift`` gets them in float32, so
    that the whole pass is in float32. There is no gradient graph.
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
    """Parameters of a module as its forward pass is to see them, shifted when they are read.

    Iteration yields the true parameters. ``true`` are the module's parameters by name, ``gradients`` the gradients by
    the ``id`` of the parameter.
    """

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
    """Return ``gradient`` with a zero ``row``.

    Autograd drops the gradient of an embedding's padding row, but not that from a tied head. So the row must not move
    if the embedding reads it.
    """
    left = gradient.clone()
    left[row] = 0
    return left


def _tied(dictionaries: Iterator[Mapping[str, Any]]) -> set[int]:
    """Return the parameters that are registered more than once."""
    once: set[int] = set()
    more: set[int] = set()
    for parameters in dictionaries:
        for p in parameters.values():
            (more if id(p) in once else once).add(id(p))
    return more
