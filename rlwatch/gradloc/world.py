"""The ranks whose gradients make up one step, as far as localisation has to know of them."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class World(Protocol):
    """Ranks that all localise the same step together. Gradients are means over ranks: c = a / size * derivative.

    Every method is a collective: all ranks call it, in the same order.
    """

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over the ranks, elementwise, on every rank."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """The largest of ``values`` over the ranks, elementwise, on every rank."""
        ...

    def gather(self, values: Tensor) -> list[Tensor]:
        """``values`` of each rank (equal shapes), by rank, on every rank."""
        ...

    def leave(self) -> None:
        """Take part no longer: whoever waits for this rank gets an exception instead of an answer. No collective."""
        ...


class Alone:
    """The only rank there is."""

    size = 1
    rank = 0

    def sum(self, values: Tensor) -> Tensor:
        """As passed."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """As passed."""
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """As passed."""
        return [values]

    def leave(self) -> None:
        """Nobody waits."""


class Processes:
    """The ranks of ``torch.distributed``, through a process group of their own on the CPU.

    Making one is a collective. What travels is small: scalars, and the numbers of some candidates. If a rank fails or
    is gone, the others get an exception at once or after ``timeout_s`` seconds.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()

    def sum(self, values: Tensor) -> Tensor:
        """Over the ranks, elementwise."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Over the ranks, elementwise."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def gather(self, values: Tensor) -> list[Tensor]:
        """By rank."""
        here = values.detach().cpu().contiguous()
        found = [torch.empty_like(here) for _ in range(self.size)]
        dist.all_gather(found, here, group=self._group)
        return [one.to(values.device) for one in found]

    def leave(self) -> None:
        """Close the group."""
        dist.destroy_process_group(self._group)

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        reduced = values.detach().cpu().clone()
        dist.all_reduce(reduced, op=how, group=self._group)
        return reduced.to(values.device)


def gather_bytes(world: World, data: bytes) -> list[bytes]:
    """``data`` of each rank, by rank, on every rank. A collective."""
    if world.size == 1:
        return [data]
    lengths = [int(n) for n in world.gather(torch.tensor([len(data)]))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    return [one[:length].numpy().tobytes() for one, length in zip(world.gather(padded), lengths, strict=True)]


def gather_plain(world: World, value: Any) -> list[Any]:
    """The ``value`` of each rank, made of what JSON knows, by rank, on every rank; NaN and Inf come through."""
    return [json.loads(text) for text in gather_bytes(world, json.dumps(value).encode())]
