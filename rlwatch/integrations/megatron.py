"""Weights and optimizers of models that Megatron holds; their gradients are :mod:`rlwatch.tensors.megatron`'s.

A model is a list of chunks, or one. That of the policy is wrapped in Megatron's DDP, whose buffers hold the parameters
of many layers one after the other. A reference is not wrapped. Offloaded (by verl), buffers of weights are empty and
what they held lies in ``cpu_data``.

Every rank copies what it holds and sends nothing: policy and reference are cut alike.
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
    """Weights of this rank, of policy and reference. Raises ``RLWatchError`` if they are cut differently."""
    return shard_pairs(dict(_weights(policy)), dict(_weights(reference)))


def steps(optimizer: Any) -> bool:
    """True if ``optimizer`` is Megatron's."""
    return any(kind.__module__.startswith("megatron.core.optimizer") for kind in type(optimizer).__mro__)


def clearable(optimizer: Any) -> list[Any]:
    """The torch optimizers in Megatron's. Raises ``RLWatchError`` where there is another."""
    inner = [getattr(one, "optimizer", None) for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    for one in inner:
        if not isinstance(one, torch.optim.Optimizer):
            raise RLWatchError(
                f"the state of {type(one).__module__}.{type(one).__name__} in Megatron's optimizer cannot be cleared; "
                "send optimizer=keep to reset the reference alone"
            )
    return inner


def clear_state(optimizer: Any) -> int:
    """Set all moments and step counts to 0; returns how many parameters had any.

    They stay where they are: Megatron's checkpoints ask for the moments of each parameter.
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
"""State that begins at 0. Another optimizer keeps copies of weights there, too (``master_param``)."""


def _weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers, by name, wherever they lie; several chunks by their number, too."""
    chunks = chunks_of(module)
    for at, chunk in enumerate(chunks):
        aside = dict(_offloaded(chunk))
        for name, tensor in named_tensors(_inside(chunk)):
            yield (f"{at}.{name}" if len(chunks) > 1 else name), aside.get(id(tensor), tensor.detach())


def _inside(chunk: Any) -> nn.Module:
    """The model in Megatron's wrappers (DDP, Float16Module), each of which calls it ``module``."""
    while isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module
    inner: nn.Module = chunk
    return inner


def _offloaded(chunk: Any) -> Iterator[tuple[int, Tensor]]:
    """By the parameter's identity: its weights in the copy that verl made of an emptied buffer."""
    held = getattr(chunk, "buffers", None)
    for buffer in [*held, *chunk.expert_parallel_buffers] if isinstance(held, list) else []:
        data = buffer.param_data
        if data is None or data.untyped_storage().size() > 0:
            continue
        if getattr(data, "cpu_data", None) is None:
            raise RLWatchError("the policy's weights are offloaded, and where to cannot be told")
        for parameter, (start, end, _bucket) in buffer.param_index_map.items():
            yield id(parameter), data.cpu_data[start:end].view(parameter.shape)
