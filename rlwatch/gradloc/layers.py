"""How much of the step's norm each layer has through each sequence, in one forward and backward.

Where a module uses its own weights W, the part of them in the directional derivative is ``(dout/dW) U``, with the
gradient U in the place of the weights: ``U x`` for a linear layer. Its product with ``dL/dout``, which the backward
brings along, summed over a sequence, is what that sequence contributes through that layer; over all sequences and uses
that is ``<dL/dW, U>``: the layer's share of the squared norm. No pass for each layer or token is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import stateless
from torch.utils._pytree import tree_map_only

from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.errors import NotLocalised
from rlwatch.gradloc.gradients import beside_training, run_again
from rlwatch.gradloc.passes import LossPass, Passes
from rlwatch.gradloc.precision import LOW
from rlwatch.gradloc.world import Alone, World
from rlwatch.tensors.gradnorm import layer_of


@dataclass(frozen=True, slots=True)
class LayersBySequence:
    """Shares of the squared norm, of this rank's sequences.

    Parameters
    ----------
    shares
        Layer -> (N,), float64, CPU: of each of the N sequences of this rank's passes, in order; signed. Summed over
        the sequences of all ranks this is the layer's share of the whole step.
    rest
        Layer -> what is missing of its share in the sum over all ranks: about 0 where each use of its weights was
        seen. Weights that are read past their module (as a fused head does) and an auxiliary loss are in it.
    notes
        What could not be seen: one sentence each.
    """

    shares: Mapping[str, Tensor]
    rest: Mapping[str, float]
    notes: tuple[str, ...] = ()


def layer_by_sequence(
    model: nn.Module, passes: Passes, direction: Direction, *, world: World | None = None
) -> LayersBySequence:
    """Shares of all layers in all sequences. What training holds stays as it is, bit for bit; a collective.

    It takes one forward and backward of each pass, and the memory of one more set of gradients; under gradient
    checkpointing also that of the inputs of all modules with weights.

    Parameters
    ----------
    model
        The module itself, not DDP's wrapping of it; the passes' forwards must run the same.
    passes
        This rank's.
    direction
        Of the same step.
    world
        The ranks; default: this one alone.

    Raises
    ------
    NotLocalised
        Parameters are in shards, the gradient is no direction, or a pass failed: on all ranks alike.
    """
    world = world or Alone()
    if any(hasattr(gradient, "to_local") for gradient in direction.gradients.values()):
        raise NotLocalised("layers of single sequences are not known where parameters are in shards")
    if not direction.finite:
        raise NotLocalised("the gradient is not finite, so it has no direction")
    table = _Table(list(direction.layers), passes.rows)
    with beside_training(model):
        failed = _attempt(model, passes, direction, table)
    if float(world.sum(torch.tensor([float(bool(failed))]))):
        raise NotLocalised(f"layers of single sequences are not known: {failed or 'another rank failed'}")
    shares = table.values() / (direction.norm * direction.length * world.size)
    seen = world.sum(shares.sum(1)).tolist()
    rest = {layer: share - had for (layer, share), had in zip(direction.layers.items(), seen, strict=True)}
    return LayersBySequence(dict(zip(table.layers, shares, strict=True)), rest, tuple(dict.fromkeys(table.notes)))


class _Table:
    """What each layer has through each sequence, unscaled: filled while backwards run."""

    def __init__(self, layers: list[str], rows: int) -> None:
        self.layers = layers
        self.rows = range(rows)
        """The sequences of the pass under way, among those of the step."""
        self.notes: list[str] = []
        self._size = (len(layers), rows)
        self._found: list[tuple[str, range, Tensor]] = []

    def add(self, layer: str, products: Tensor) -> None:
        """``products``: of the elements of a tensor whose first dimension are the sequences."""
        products = products[None] if len(self.rows) == 1 else products
        if len(products) == len(self.rows):
            self._found.append((layer, self.rows, products.flatten(1).sum(1)))
        else:
            self.notes.append(f"{layer}: what a module computes is not arranged by sequence")

    def values(self) -> Tensor:
        """(layers, sequences), float64, CPU."""
        total = torch.zeros(self._size, dtype=torch.float64)
        for layer, rows, sums in self._found:
            total[self.layers.index(layer), rows.start : rows.stop] += sums.double().cpu()
        return total


def _attempt(model: nn.Module, passes: Passes, direction: Direction, table: _Table) -> str:
    """Why it failed; empty if it did not."""
    try:
        with _watched(model, direction, table):
            for one in passes.all:
                table.rows = range(one.first_row, one.first_row + one.shape[0])
                _backward(model, one)
    except Exception as error:  # noqa: BLE001  (any kernel of any model may refuse; other ranks must hear of it)
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
    return ""


def _backward(model: nn.Module, one: LossPass) -> None:
    outputs = run_again(one)
    parts = {name: part for name, part in outputs.parts().items() if part.requires_grad and name in one.coefficients}
    if parts:
        torch.autograd.grad(
            list(parts.values()),
            [p for p in model.parameters() if p.requires_grad],
            [one.coefficient(name).to(part.dtype) for name, part in parts.items()],
            allow_unused=True,
        )


@contextmanager
def _watched(model: nn.Module, direction: Direction, table: _Table) -> Iterator[None]:
    """Each module with weights of its own that have a gradient."""
    names = {p: name for name, p in model.named_parameters() if name in direction.gradients}
    handles = []
    for module in model.modules():
        own = {at: names[p] for at, p in module.named_parameters(recurse=False) if p in names}
        by_layer: dict[str, dict[str, Tensor]] = {}
        for at, name in own.items():
            by_layer.setdefault(layer_of(name), {})[at] = direction.gradients[name]
        if by_layer:
            handles.append(module.register_forward_hook(_Use(by_layer, table), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class _Use:
    """Hooks one module; ``gradients``: layer -> the module's own name of a weight -> its gradient U."""

    gradients: Mapping[str, Mapping[str, Tensor]]
    table: _Table

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Wait for the gradient of ``out``."""
        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(partial(self._arrived, module, args, kwargs))  # type: ignore[no-untyped-call]

    def _arrived(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradient: Tensor) -> None:
        """A module that cannot be differentiated is left out, and noted: its part stays in the rest."""
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            for layer, own in self.gradients.items():
                try:
                    self.table.add(layer, _products(module, args, kwargs, gradient, own))
                except Exception as error:  # noqa: BLE001  (the code of any module runs here)
                    self.table.notes.append(f"{layer}: {type(module).__name__} has no derivative ({error})"[:200])


def _products(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradient: Tensor, own: Mapping[str, Tensor]
) -> Tensor:
    """Products whose sum is <dL/dout, (dout/dW) U>, in float32, sequences first."""
    if type(module).forward is nn.Linear.forward and len(args) == 1 and list(own) == ["weight"]:
        products: Tensor = (_wide(gradient) @ _wide(own["weight"])) * _wide(args[0].detach())
        return products
    if type(module).forward is nn.Embedding.forward and len(args) == 1:
        used: Tensor = _wide(gradient) * functional.embedding(args[0], _wide(own["weight"]))
        if module.padding_idx is not None:  # autograd drops this row's gradient, though a tied head may give it one
            used = used * (args[0] != module.padding_idx)[..., None]
        return used
    return _wide(gradient) * _derivative(module, args, kwargs, own)


def _derivative(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Mapping[str, Tensor]
) -> Tensor:
    """(dout/dW) U of any module, by forward-mode differentiation of its code."""
    inputs, named = tree_map_only(Tensor, lambda x: _wide(x.detach()), (args, dict(kwargs)))

    def out(weights: dict[str, Tensor]) -> Any:
        with stateless._reparametrize_module(module, weights):  # noqa: SLF001  (functional_call would run our hook)
            return module.forward(*inputs, **named)

    weights = {at: _wide(module.get_parameter(at).detach()) for at in own}
    tangent: Tensor = torch.func.jvp(out, (weights,), ({at: _wide(gradient) for at, gradient in own.items()},))[1]
    return tangent


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor
