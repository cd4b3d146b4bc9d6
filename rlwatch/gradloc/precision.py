"""Forward passes in float32, whatever precision training has chosen for its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Precision:
    """``low``: whether training computes what was looked at in less than float32 (weights, autocast, FSDP's policy)."""

    low: bool = False

    def widen(self, weight: Tensor) -> Tensor:
        """``weight``, detached: in float32 where it is narrower, which is noted."""
        if weight.dtype not in LOW:
            return weight.detach()
        self.low = True
        return weight.detach().float()


@contextmanager
def without_autocast(precision: Precision) -> Iterator[None]:
    """No autocast on this thread, not even where a forward pass switches it on itself.

    Trainers do: accelerate wraps ``model.forward``, TRL calls ``accelerator.autocast()``, loops write
    ``torch.autocast``. All of them end in ``torch.autocast.__enter__``. Other threads go on as they were.
    """
    enter, here = torch.autocast.__enter__, threading.get_ident()

    def enter_disabled(self: torch.autocast) -> Any:
        entered = enter(self)  # type: ignore[no-untyped-call]
        if threading.get_ident() == here and torch.is_autocast_enabled(self.device):
            precision.low = True
            torch.set_autocast_enabled(self.device, False)
        return entered

    with _all_off(precision):
        torch.autocast.__enter__ = enter_disabled  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def _all_off(precision: Precision) -> Iterator[None]:
    """Leave the autocast that the caller is in."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    on = [device for device in devices if torch.is_autocast_enabled(device)]
    precision.low |= bool(on)
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)
