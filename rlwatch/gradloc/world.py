"""The ranks whose gradients make up one step, as far as localisation has to know of them."""

from __future__ import annotations

import json
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_groups = count()
"""Every rank makes its groups in the same order."""


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

    Making one is a collective. ``torch.distributed`` does not know of the group: neither the names of the trainer's own
    groups nor their end depend on it. What travels is small: scalars, and the numbers of some candidates. If a rank
    fails, leaves or is gone, the others get a ``RuntimeError`` at once, or after ``timeout_s`` seconds if it only does
    not come.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()
        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore(f"rlwatch/localising/{next(_groups)}", c10d._get_default_store())  # noqa: SLF001
        self._group: Any = c10d.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=timeout_s))

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
        self._joined().allgather([found], [here]).wait()
        return [one.to(values.device) for one in found]

    def leave(self) -> None:
        """Close the connections, which end with the last reference to the group."""
        self._group = None

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        reduced, options = values.detach().cpu().clone(), dist.AllreduceOptions()
        options.reduceOp = how
        self._joined().allreduce([reduced], options).wait()
        return reduced.to(values.device)

    def _joined(self) -> Any:
        if self._group is None:
            raise RuntimeError("this rank has left the others")
        return self._group


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
