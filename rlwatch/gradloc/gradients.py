"""Gradients of parts of the loss; the gradients that training holds stay as they are.

The part is given by weights for the outputs of a loss pass: the coefficients of some tokens, zero elsewhere. All
further down is autograd's, so any loss can be taken apart without being derived again. Precision is that of the
training's own backward: of bfloat16 parameters each element is rounded to 8 bits, norms are summed in float32 and
float64.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from rlwatch.gradloc.distributed import World, reshard, unsynchronised
from rlwatch.gradloc.passes import LossPass, Outputs, RandomState
from rlwatch.tensors.gradnorm import Piece, layer_of, norm_of_each

Weights = Mapping[str, Tensor]
"""For some of the outputs' parts by name: what their elements are multiplied with, in their shape."""


@contextmanager
def beside_training(model: nn.Module) -> Iterator[None]:
    """Gradients may be taken inside; afterwards ``.grad``, buffers, random state, modes are as before, bit for bit.

    Ranks may run different numbers of passes inside: DDP neither sends buffers nor expects gradients. What was
    compiled runs as it is written, because other shapes would be compiled anew.
    """
    reshard(model)
    random = RandomState.now()
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_kept_buffers(model))
            stack.enter_context(unsynchronised())
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        reshard(model)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        random.restore()


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Keep buffers: afterwards they are the same tensors with the same content."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                setattr(module, name, buffer)
                if not torch.equal(buffer, content):
                    buffer.copy_(content)


def run_again(one: LossPass, rows: Sequence[int] | None = None) -> Outputs:
    """Run the forward of ``one`` again as it was; of some sequences only if ``rows`` is given."""
    one.random.restore()
    return one.forward() if rows is None else one.forward(rows)


class Gradients(Protocol):
    """Gradients of parts of this model's loss."""

    @property
    def layers(self) -> Sequence[str]:
        """Names of the layers, in model order."""
        ...

    @property
    def together(self) -> bool:
        """True where all ranks must take part in each."""
        ...

    def squares(self, outputs: Outputs, weights: Weights, *, again: bool = False) -> Tensor:
        """Squared norm in each layer of the gradient of sum ``weights`` * ``outputs``: this rank's part, (L,), CPU.

        Parts of all ranks, summed up, are the squares of the mean of the ranks' gradients (as training has it), if
        only one rank has weights. ``again``: another call for the same outputs follows.
        """
        ...


def gradients_of(model: nn.Module, world: World) -> Gradients:
    """:class:`ShardedGradients` where parameters are DTensors (FSDP2), else :class:`Whole`."""
    reshard(model)
    sharded = any(hasattr(p, "to_local") for p in model.parameters())
    return ShardedGradients(model) if sharded else Whole(model, world)


class _Layers:
    """The parameters that train, and the layers they are in."""

    def __init__(self, model: nn.Module) -> None:
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.layers = list(dict.fromkeys(layer_of(name) for name, _ in self.named))
        place = {layer: i for i, layer in enumerate(self.layers)}
        self._place = [place[layer_of(name)] for name, _ in self.named]

    def _squares(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return (L,), float64, CPU, from a gradient (or None) for each of the parameters.

        Waits for the device, once.
        """
        total = torch.zeros(len(self.layers), dtype=torch.float64, device="cpu")
        there = [(at, g) for at, g in zip(self._place, gradients, strict=True) if g is not None and g.numel()]
        if there:
            places, present = zip(*there, strict=True)
            squares = torch.stack(norm_of_each(present)).double().square().cpu()
            total.index_add_(0, torch.tensor(places, device="cpu"), squares)
        return total


class Whole(_Layers):
    """Gradients of whole parameters, on every rank (one process, or DDP): each takes its own, nothing waits for others.

    ``torch.autograd.grad`` accumulates nowhere, so neither ``.grad`` nor DDP's or an optimizer's hooks notice. It takes
    memory for one more set of gradients.
    """

    together = False

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model)
        self._ranks = world.size

    def squares(self, outputs: Outputs, weights: Weights, *, again: bool = False) -> Tensor:
        """Squared norms, see :class:`Gradients`. Weights that are all zero are not differentiated."""
        parts = {n: p for n, p in outputs.parts().items() if p.requires_grad and n in weights and weights[n].any()}
        if not parts:
            return self._squares([None] * len(self.named))
        gradients = torch.autograd.grad(
            list(parts.values()),
            [p for _, p in self.named],
            [weights[name].to(part.dtype) for name, part in parts.items()],
            retain_graph=again,
            allow_unused=True,
        )
        return self._squares(gradients) / self._ranks**2


class ShardedGradients(_Layers):
    """Gradients of parameters in shards over the ranks (FSDP2): all run each pass, those without weights with zeros.

    Only an ordinary backward makes FSDP reduce gradients (to their mean), so ``.grad`` is emptied for it: to be used
    within :func:`beside_training` only, which puts back what was there.
    """

    together = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._model = model

    def squares(self, outputs: Outputs, weights: Weights, *, again: bool = False) -> Tensor:
        """Squared norms, see :class:`Gradients`. A collective."""
        for _, parameter in self.named:
            parameter.grad = None
        parts = {name: part for name, part in outputs.parts().items() if part.requires_grad}
        zeros = {name: torch.zeros_like(part) for name, part in parts.items()}
        given = [weights.get(name, zeros[name]).to(part.dtype) for name, part in parts.items()]
        torch.autograd.backward(list(parts.values()), given, retain_graph=again)
        reshard(self._model)
        return self._squares([None if p.grad is None else Piece.of(name, p, 0).counted for name, p in self.named])
