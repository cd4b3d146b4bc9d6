"""Gradients of parts of the loss; the gradients that training holds are unchanged.

A part is given by weights for the outputs of a loss pass: the coefficients of some tokens, zero elsewhere. Autograd
does the rest, so any loss can be divided into parts without a derivation. Precision is that of the training's own
backward pass: gradients of bfloat16 parameters are rounded to 8 bits, norms are summed in float32 and float64.
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
"""Name of an output -> weights by which its elements are multiplied, in its shape."""


@contextmanager
def beside_training(model: nn.Module) -> Iterator[None]:
    """Allow gradients to be computed in the ``with`` block.

    Afterwards restore ``.grad``, buffers, random state and modes, bit for bit. Ranks may run different numbers of
    passes inside: DDP neither sends buffers nor expects gradients. Compiled code runs eagerly, because other shapes
    would be compiled again.
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
    """Repeat the forward pass of ``one`` as it was, and return its outputs.

    If ``rows`` is given, only these sequences are repeated.
    """
    one.random.restore()
    return one.forward() if rows is None else one.forward(rows)


class Gradients(Protocol):
    """Interface to norms of gradients of parts of a model's loss."""

    @property
    def layers(self) -> Sequence[str]:
        """Names of the layers, in model order."""
        ...

    @property
    def together(self) -> bool:
        """Return True if all ranks must take part in each computation."""
        ...

    def squares(self, outputs: Outputs, weights: Weights, *, again: bool = False) -> Tensor:
        """Return the squared norm in each layer of the gradient of sum ``weights`` * ``outputs``: this rank's part,
        (L,), on the CPU.

        If only one rank has weights, the parts of all ranks sum up to the squares of the mean of the ranks' gradients,
        as training has it. ``again``: another call for the same outputs follows.
        """
        ...


def gradients_of(model: nn.Module, world: World) -> Gradients:
    """Return :class:`ShardedGradients` if the parameters of ``model`` are DTensors (FSDP2), else :class:`Whole`."""
    reshard(model)
    sharded = any(hasattr(p, "to_local") for p in model.parameters())
    return ShardedGradients(model) if sharded else Whole(model, world)


class _Layers:
    """The parameters that are trained, and the layers that contain them."""

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
    """Gradients of parameters that every rank has whole (one process, or DDP): each rank computes its own and waits for
    none.

    ``torch.autograd.grad`` accumulates nowhere, so that neither ``.grad`` nor DDP's or an optimizer's hooks are
    affected. It takes memory for one more set of gradients.
    """

    together = False

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model)
        self._ranks = world.size

    def squares(self, outputs: Outputs, weights: Weights, *, again: bool = False) -> Tensor:
        """Return squared norms of each layer, as :class:`Gradients` describes.

        Weights that are all zero are not differentiated.
        """
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
    """Gradients of parameters that are sharded over ranks (FSDP2): all ranks run each pass, those without weights with
    zeros.

    Only an ordinary backward pass makes FSDP reduce gradients (to their mean), so ``.grad`` is cleared for it. Use it
    only within :func:`beside_training`, which restores ``.grad``.
    """

    together = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._model = model

    def squares(self, outputs: Outputs, weights: Weights, *, again: bool = False) -> Tensor:
        """Return squared norms of each layer, as :class:`Gradients` describes. A collective."""
        for _, parameter in self.named:
            parameter.grad = None
        parts = {name: part for name, part in outputs.parts().items() if part.requires_grad}
        zeros = {name: torch.zeros_like(part) for name, part in parts.items()}
        given = [weights.get(name, zeros[name]).to(part.dtype) for name, part in parts.items()]
        torch.autograd.backward(list(parts.values()), given, retain_graph=again)
        reshard(self._model)
        return self._squares([None if p.grad is None else Piece.of(name, p, 0).counted for name, p in self.named])
