"""Forward passes in float32, whatever precision training has chosen for its own; or in that one, noting it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

LOW = (torch.bfloat16, torch.float16)
NARROW = (torch.Tensor.bfloat16, torch.Tensor.half)


@dataclass(slots=True)
class Precision:
    """What forward passes compute in.

    ``wide``: in float32 where training takes less; else as training does. ``low``: whether training takes less, for
    weights, by autocast or by FSDP's policy, as far as was seen.
    """

    wide: bool = True
    low: bool = False

    def widen(self, value: Tensor) -> Tensor:
        """``value``, detached: if ``wide``, in float32 where it is narrower, which is noted."""
        if value.dtype not in LOW:
            return value.detach()
        self.low = True
        return value.detach().float() if self.wide else value.detach()


@contextmanager
def without_autocast(precision: Precision) -> Iterator[None]:
    """No autocast on this thread if ``precision`` is wide, not even where a forward pass switches it on itself.

    Trainers do: accelerate wraps ``model.forward``, TRL calls ``accelerator.autocast()``, loops write
    ``torch.autocast``. All of them end in ``torch.autocast.__enter__``. Other threads go on as they were.
    """
    enter, here = torch.autocast.__enter__, threading.get_ident()

    def enter_disabled(self: torch.autocast) -> Any:
        entered = enter(self)  # type: ignore[no-untyped-call]
        if threading.get_ident() == here and torch.is_autocast_enabled(self.device):
            precision.low = True
            torch.set_autocast_enabled(self.device, not precision.wide)
        return entered

    with _all_off(precision):
        torch.autocast.__enter__ = enter_disabled  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = enter  # type: ignore[method-assign]


class WithoutNarrowing(TorchFunctionMode):
    """Casts to bfloat16 or float16 that a forward pass makes by itself are casts to float32 inside.

    What is rounded to 8 bits on its way loses the small differences that are looked for.
    """

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self._precision = precision

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NARROW:
            func = torch.Tensor.float
        elif func is torch.Tensor.to and any(
            isinstance(a, torch.dtype) and a in LOW for a in (*args, *kwargs.values())
        ):
            args = tuple(self._wide(value) for value in args)
            kwargs = {name: self._wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.dtype) and value in LOW:
            self._precision.low = True
            return torch.float32
        return value


@contextmanager
def _all_off(precision: Precision) -> Iterator[None]:
    """Leave the autocast that the caller is in."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    on = [device for device in devices if torch.is_autocast_enabled(device)]
    precision.low |= bool(on)
    for device in on:
        torch.set_autocast_enabled(device, not precision.wide)
    try:
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)
