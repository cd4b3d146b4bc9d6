"""What a trainer has of its responses, as tensors: numbers, answers, prompts."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

BITS = 52
"""Of a code: it stays exact in a float64, and among 100,000 different things two agree with probability 1e-6."""


def numbers(x: Any) -> Tensor:
    """A tensor (detached), array or list of numbers or truth values, as a tensor of its own type."""
    return x.detach() if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")


def some_numbers(x: Any) -> tuple[Tensor, Tensor | None]:
    """Numbers of which a list may lack some: NaN where None stands, and which are there (None: all), both (B,)."""
    if isinstance(x, Tensor) or not any(value is None for value in x):
        return numbers(x), None
    there = torch.tensor([value is not None for value in x], device="cpu")
    return torch.tensor([float("nan") if value is None else float(value) for value in x], device="cpu"), there


def codes(x: Any) -> Tensor:
    """Codes (B,) int64, equal for what is equal, in every process: integers stand for themselves, None for -1.

    Anything else is hashed by its text, into 52 bits.
    """
    if isinstance(x, Tensor):
        return x.detach().long()
    things = list(x)
    if things and all(isinstance(thing, Integral) for thing in things):
        return torch.tensor([int(thing) for thing in things], device="cpu")
    hashed = [-1 if thing is None else _hash(str(thing)) for thing in things]
    return torch.tensor(hashed, dtype=torch.int64, device="cpu")


def _hash(text: str) -> int:
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - BITS)


def device_of(things: Iterable[Any]) -> torch.device:
    """Where the first tensor among ``things`` is that is not on the CPU; the CPU if there is none.

    What comes from elsewhere to the CPU must be waited for.
    """
    devices = [thing.device for thing in things if isinstance(thing, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
