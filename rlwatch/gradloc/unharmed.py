"""Running forward passes of a model in training without a trace: afterwards everything is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from rlwatch.gradloc.kernels import float32_kernels
from rlwatch.gradloc.passes import RandomState
from rlwatch.gradloc.precision import Precision, WithoutNarrowing, without_autocast
from rlwatch.gradloc.replicated import unsynchronised
from rlwatch.gradloc.sharding import sharded_modules


@contextmanager
def looking(model: nn.Module, *, wide: bool = True) -> Iterator[Precision]:
    """Forward passes inside run without gradient graph and leave no trace, also if they fail.

    If ``wide`` they run in float32, else in the precision that training runs in. Random state, modes, autocast,
    configuration and hooks are as before afterwards. Buffers are never written: modules see copies of them. Parameters
    are those of training unless :mod:`displacement` shows others. What a module keeps in plain attributes, and a
    thread that a forward pass starts, are beyond this.
    """
    random = RandomState.now()
    modes = [(module, module.training) for module in model.modules()]
    precision = Precision(wide)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(without_autocast(precision))
            stack.enter_context(float32_kernels(model))
            if wide and not sharded_modules(model):  # FSDP2 casts what it gathers, and must go on so
                stack.enter_context(WithoutNarrowing(precision))
            stack.enter_context(_copied_buffers(model, precision))
            stack.enter_context(unsynchronised())
            yield precision
    finally:
        for module, mode in modes:
            module.training = mode
        random.restore()


class Copies(dict[str, Any]):
    """Buffers of a module: each is copied when it is first read, in the precision asked for, and the copy is kept."""

    def __init__(self, true: dict[str, Any], precision: Precision) -> None:
        super().__init__(true)
        self._precision = precision
        self._untouched = set(true)

    @override
    def __getitem__(self, name: str) -> Any:
        buffer = super().__getitem__(name)
        if name in self._untouched and isinstance(buffer, Tensor):
            self._untouched.discard(name)
            buffer = self._precision.widen(buffer.clone())
            super().__setitem__(name, buffer)
        return buffer

    @override
    def __setitem__(self, name: str, buffer: Any) -> None:
        self._untouched.discard(name)
        super().__setitem__(name, buffer)


@contextmanager
def _copied_buffers(model: nn.Module, precision: Precision) -> Iterator[None]:
    true = [(module, module._buffers) for module in model.modules()]  # noqa: SLF001
    try:
        for module, buffers in true:
            module.__dict__["_buffers"] = Copies(buffers, precision)
        yield
    finally:
        for module, buffers in true:
            module.__dict__["_buffers"] = buffers
