"""What leaves each module of a model in one forward pass, and what comes back to it in one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.gradloc.broken import Broken, dtype_name, first
from rlwatch.gradloc.gradients import run_again
from rlwatch.gradloc.passes import LossPass


@dataclass(frozen=True, slots=True)
class _Sign:
    """Where an output is not finite: (B, L) for outputs of such and more dimensions."""

    module: str
    flags: Tensor
    dtype: str

    @classmethod
    def of(cls, module: str, values: Tensor) -> _Sign:
        flags = ~values.detach().isfinite()
        return cls(module, flags.flatten(2).any(-1) if flags.dim() > 2 else flags, dtype_name(values))


def broken_activation(model: nn.Module, one: LossPass) -> Broken | None:
    """The first module, in order of finishing, whose output is not finite. One forward pass, no graph.

    ``index`` is (sequence, position in the context) where the output has these dimensions; ``count`` counts such.
    A head whose weight is read without its module is not seen.
    """
    seen: list[_Sign] = []

    def look(module: str, _: bool, output: Tensor) -> None:
        seen.append(_Sign.of(module, output))

    with listening(model, look), torch.no_grad():
        run_again(one)
    return _earliest(seen)


def broken_output_gradient(model: nn.Module, one: LossPass) -> Broken | None:
    """The first module, in order of the backward pass, the gradient of whose output is not finite.

    One forward and one backward pass, from coefficients whose non-finite entries are zeroed. No gradient of a
    parameter is computed: ``.grad`` and hooks on it are not touched.
    """
    seen: list[_Sign] = []
    sources: list[Tensor] = []

    def look(module: str, source: bool, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append(_Sign.of(module, gradient)))  # type: ignore[no-untyped-call]
            if source:
                sources.append(output)

    with torch.enable_grad():
        with listening(model, look):
            outputs = {name: part for name, part in run_again(one).parts().items() if part.requires_grad}
        clean = [one.coefficient(name).nan_to_num(0.0, 0.0, 0.0).to(part) for name, part in outputs.items()]
        if outputs and sources:
            torch.autograd.grad(list(outputs.values()), sources, clean, allow_unused=True)
    return _earliest(seen)


@contextmanager
def listening(model: nn.Module, heard: Callable[[str, bool, Tensor], None]) -> Iterator[None]:
    """Within it ``heard(module, source, output)`` is called for each output of floats of each module.

    ``source`` marks where the graph begins: a module without parts, none of whose inputs has a gradient.
    """

    def hook(name: str, leaf: bool) -> Callable[..., None]:
        def told(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            source = leaf and not any(x.requires_grad for x in _floats((args, kwargs)))
            for values in _floats(output):
                heard(name, source, values)

        return told

    handles = [
        module.register_forward_hook(hook(name, next(module.children(), None) is None), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floats(value: Any) -> Iterator[Tensor]:
    """Tensors of floats in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _floats(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _floats(part)


def _earliest(seen: list[_Sign]) -> Broken | None:
    if not seen:
        return None
    home = seen[0].flags.device
    counts = torch.stack([sign.flags.sum().to(home, non_blocking=True) for sign in seen]).tolist()
    for sign, count in zip(seen, counts, strict=True):
        if count:
            return Broken(sign.module, count, first(sign.flags), sign.dtype, tuple(sign.flags.shape))
    return None
