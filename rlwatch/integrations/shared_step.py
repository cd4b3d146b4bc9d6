"""One step of several ranks: each measures its share of the batch, and rank 0 puts the shares together."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlwatch.integrations.spike_rows import Decode, most_extreme, spike_batch, texts_of
from rlwatch.records import JSON, SpikeBatch
from rlwatch.tensors.mergeable import Stats, merge_ranks
from rlwatch.tensors.spikes import SpikeTable
from rlwatch.tensors.transfer import Transfer, pack, unpack

if TYPE_CHECKING:
    from rlwatch.run import Run

_HEAD = struct.Struct("!I")
_TYPES = {torch.float32: "f4", torch.float16: "f4", torch.bfloat16: "f4", torch.bool: "b1"}
MOST_SPIKES = 64
"""Rows of extreme tokens that are recorded of a step, over all ranks."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank measured, on the CPU."""

    stats: Stats
    columns: tuple[str, ...] = ()
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedStep:
    """One rank's share of a step, on its way: a :class:`~rlwatch.ports.Parcel` for :meth:`rlwatch.run.Run.send`.

    ``numbers`` are those of rank 0: a trainer computes what it logs over all ranks.
    """

    step: int
    layout: JSON
    types: tuple[str, ...]
    columns: tuple[str, ...]
    numbers: Mapping[str, float]
    transfer: Transfer
    texts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, step: int, stats: Stats, spikes: SpikeTable | None, numbers: Mapping[str, float]) -> SharedStep:
        """Everything starts its way to the CPU in one copy."""
        layout, tensors = pack(stats)
        if spikes is not None:
            tensors.append(spikes.rows)
        types = tuple(_TYPES.get(tensor.dtype, "f8") for tensor in tensors)
        return cls(step, layout, types, () if spikes is None else spikes.names, numbers, Transfer(tensors))

    def ready(self) -> bool:
        """Whether it can be read without waiting for the device."""
        return self.transfer.ready()

    def deliver(self, run: Run, decode: Decode | None = None) -> dict[str, float]:
        """Send it on its way. Returns what is known of the steps that are whole by now, on rank 0; it fills later."""
        if decode is not None and self.columns:  # here: a tokenizer is not to be used by two threads at once
            self.texts.extend(texts_of(self.transfer.read()[-1], self.columns, decode))
        run.send(self)
        return {} if run.ranks is None else run.ranks.latest

    def encode(self) -> bytes:
        """As bytes for rank 0."""
        arrays = [a.astype(kind) for a, kind in zip(self.transfer.read(), self.types, strict=True)]
        shapes = [list(array.shape) for array in arrays]
        head = {"layout": self.layout, "types": self.types, "shapes": shapes, "columns": self.columns}
        text = json.dumps({**head, "texts": self.texts}).encode()
        return b"".join([_HEAD.pack(len(text)), text, *map(_bytes_of, arrays)])

    def merged(self, others: Mapping[int, bytes]) -> tuple[Mapping[str, float], Sequence[SpikeBatch]]:
        """The whole step: metrics, and the extreme tokens of each rank that has any."""
        shares = {0: self._own(), **{rank: decoded(others[rank]) for rank in sorted(others)}}
        stats: Stats = {}
        for share in shares.values():
            stats = merge_ranks(stats, share.stats)
        return {**read(stats), **self.numbers}, _spikes(self.step, shares)

    def _own(self) -> Share:
        return _share(self.layout, self.transfer.read(), self.columns, tuple(self.texts))


def decoded(data: bytes) -> Share:
    """What :meth:`SharedStep.encode` wrote."""
    (length,) = _HEAD.unpack_from(data)
    at = _HEAD.size + length
    head: dict[str, Any] = json.loads(data[_HEAD.size : at])
    arrays = []
    for kind, shape in zip(head["types"], head["shapes"], strict=True):
        array, at = _array_at(data, at, kind, shape)
        arrays.append(array)
    return _share(head["layout"], arrays, tuple(head["columns"]), tuple(head["texts"]))


def read(stats: Stats) -> dict[str, float]:
    """The numbers to report: of what was measured at all."""
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: float(stat.value()) for name, stat in settled.items() if float(stat.count) > 0}


def _share(layout: JSON, arrays: Sequence[np.ndarray], columns: tuple[str, ...], texts: tuple[str, ...]) -> Share:
    if not columns:
        return Share(unpack(layout, arrays))
    return Share(unpack(layout, arrays[:-1]), columns, arrays[-1], texts)


def _spikes(step: int, shares: Mapping[int, Share]) -> list[SpikeBatch]:
    """The most extreme tokens of all ranks, in one batch for each rank."""
    having = {rank: share for rank, share in shares.items() if share.columns}
    if not having:
        return []
    tables = most_extreme([share.rows for share in having.values()], MOST_SPIKES)
    batches = [
        spike_batch(step, rows, share.columns, share.texts, rank=rank)
        for (rank, share), rows in zip(having.items(), tables, strict=True)
    ]
    return [batch for batch in batches if batch is not None]


def _bytes_of(array: np.ndarray) -> bytes:
    return np.packbits(array).tobytes() if array.dtype == bool else array.tobytes()


def _array_at(data: bytes, at: int, kind: str, shape: Sequence[int]) -> tuple[np.ndarray, int]:
    """The array that begins at ``at``, as float64, and where it ends."""
    count = int(np.prod(shape))
    if kind == "b1":
        packed = np.frombuffer(data, np.uint8, -(-count // 8), at)
        return np.unpackbits(packed, count=count).astype(np.float64).reshape(shape), at + len(packed)
    found = np.frombuffer(data, np.dtype(kind), count, at)
    return found.astype(np.float64).reshape(shape), at + found.nbytes
