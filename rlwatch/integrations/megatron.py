"""Weights and optimizers of Megatron models; :mod:`rlwatch.tensors.megatron` reads their gradients.

A model is one chunk or a list of chunks. The policy is wrapped in Megatron's DDP, whose buffers hold the parameters of
many layers one after the other. A reference is not wrapped. If verl has offloaded the weights, the buffers are empty
and the weights are in ``cpu_data``.

Every rank copies its own shards and sends nothing, because policy and reference are sharded alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.errors import RLWatchError
from rlwatch.integrations.weights import TensorPair, named_tensors, shard_pairs
from rlwatch.tensors.megatron import chunks_of


def pairs(policy: Any, reference: Any) -> list[TensorPair]:
    """Return pairs of this rank's tensors of ``policy`` and ``reference``, two Megatron models (a chunk or a list of
    chunks).

    Raises ``RLWatchError`` if the models are sharded differently.
    """
    return shard_pairs(dict(_weights(policy)), dict(_weights(reference)))


def steps(optimizer: Any) -> bool:
    """Return True if ``optimizer`` is one of Megatron's optimizers."""
    return any(kind.__module__.startswith("megatron.core.optimizer") for kind in type(optimizer).__mro__)


def clearable(optimizer: Any) -> list[Any]:
    """Return the torch optimizers inside ``optimizer``, one of Megatron's optimizers.

    Raises ``RLWatchError`` if an inner optimizer is not a ``torch.optim.Optimizer``, so that its state cannot be
    cleared.
    """
    inner = [getattr(one, "optimizer", None) for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    for one in inner:
        if not isinstance(one, torch.optim.Optimizer):
            raise RLWatchError(
                f"the state of {type(one).__module__}.{type(one).__name__} in Megatron's optimizer cannot be cleared; "
                "send optimizer=keep to reset the reference alone"
            )
    return inner


def clear_state(optimizer: Any) -> int:
    """Set all moments and step counts of ``optimizer``, one of Megatron's, to 0. Return how many parameters had any.

    The entries are not removed, because Megatron's checkpoints read the moments of each parameter. Raises
    ``RLWatchError`` as :func:`clearable` does.
    """
    count = 0
    for one in clearable(optimizer):
        for state in one.state.values():
            count += any(isinstance(value, Tensor) for value in state.values())
            for name, value in state.items():
                if name == "step" and not isinstance(value, Tensor):
                    state[name] = 0
                elif isinstance(value, Tensor) and name in CLEARED:
                    value.zero_()
        for group in one.param_groups:
            if "step" in group:  # fused ones count there
                group["step"] = group["step"] * 0
    return count


CLEARED = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Entries of an optimizer's state that a reset sets to 0. Other entries may be copies of weights (``master_param``)."""


def _weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved buffers by name, with the number of the chunk if there are several."""
    chunks = chunks_of(module)
    for at, chunk in enumerate(chunks):
        aside = dict(_offloaded(chunk))
        for name, tensor in named_tensors(_inside(chunk)):
            yield (f"{at}.{name}" if len(chunks) > 1 else name), aside.get(id(tensor), tensor.detach())


def _inside(chunk: Any) -> nn.Module:
    """Return the model inside Megatron's wrappers (DDP, Float16Module)."""
    while isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module
    inner: nn.Module = chunk
    return inner


def _offloaded(chunk: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield the id of each parameter of an emptied buffer, and its weights in verl's CPU copy."""
    held = getattr(chunk, "buffers", None)
    for buffer in [*held, *chunk.expert_parallel_buffers] if isinstance(held, list) else []:
        data = buffer.param_data
        if data is None or data.untyped_storage().size() > 0:
            continue
        if getattr(data, "cpu_data", None) is None:
            raise RLWatchError("the policy's weights are offloaded, and where to cannot be told")
        for parameter, (start, end, _bucket) in buffer.param_index_map.items():
            yield id(parameter), data.cpu_data[start:end].view(parameter.shape)
