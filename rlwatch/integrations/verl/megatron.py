"""Megatron's models as verl trains them: weights cut over tensor-parallel ranks, gradients and weights in flat buffers.

A model is a list of chunks. That of the policy is wrapped in Megatron's DDP, whose buffers hold the parameters of many
layers one after the other, and their gradients likewise; ``.grad`` is empty. With the distributed optimizer a rank has,
once gradients are reduced, only its part of each bucket. A reference is not wrapped. Offloaded, buffers of weights are
empty and what they held lies in ``cpu_data``.

Every rank reads and copies what it holds and sends nothing: policy and reference are cut alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.errors import RLWatchError
from rlwatch.integrations.weights import Pair, named_tensors
from rlwatch.tensors.gradnorm import GradNorms, Piece, norms_of

STRATEGY = "megatron"


def hindrance(engine: Any) -> str | None:
    """Explain that the gradients of ``engine`` are not read by layer; None if they are. No collective."""
    state = _groups()
    if state is None or not state.is_initialized():
        return "Megatron's groups are not there"
    if state.get_pipeline_model_parallel_world_size() > 1:
        return "stages of a pipeline each count layers from 0, and hold different ones"
    if state.get_expert_model_parallel_world_size() > 1 or any(_experts(chunk) for chunk in chunks_of(engine.module)):
        return "experts lie in buffers of their own, over other groups of ranks"
    if any(not hasattr(chunk, "buffers") or not isinstance(chunk.buffers, list) for chunk in chunks_of(engine.module)):
        return "the model is not held by Megatron's DDP"
    if getattr(engine, "param_dtype", None) is torch.float16:
        return "gradients of float16 carry a loss scale"
    return None


def chunks_of(module: Any) -> Sequence[Any]:
    """The chunks of a model: verl's engine holds a list of them."""
    return list(module) if isinstance(module, list | tuple) else [module]


def gradients_of(engine: Any) -> GradNorms | None:
    """Norms of the gradients that the policy of ``engine`` holds now, before its optimizer's step."""
    if hindrance(engine) is not None:
        return None
    return norms_of([piece for chunk in chunks_of(engine.module) for piece in _pieces(chunk)])


def pairs(policy: Any, reference: Any) -> list[Pair]:
    """Weights of this rank, of policy and reference. Raises ``RLWatchError`` if they are cut differently."""
    of_policy, of_reference = dict(_weights(policy)), dict(_weights(reference))
    if of_policy.keys() != of_reference.keys():
        odd = sorted(of_policy.keys() ^ of_reference.keys())
        raise RLWatchError(f"policy and reference are different models: {odd[0]!r} is in one only")
    for name, tensor in of_policy.items():
        if tensor.shape != of_reference[name].shape:
            raise RLWatchError(f"{name!r} is sharded differently in the policy and in the reference")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RLWatchError(f"the policy's {name!r} is not finite: roll back to a checkpoint instead")
    return [Pair(name, tensor, of_reference[name]) for name, tensor in of_policy.items()]


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


def _groups() -> Any:
    """Megatron's groups of ranks; None where it is not loaded."""
    return sys.modules.get("megatron.core.parallel_state")


def _experts(chunk: Any) -> bool:
    return bool(getattr(chunk, "expert_parallel_buffers", None))


def _pieces(chunk: Any) -> Iterator[Piece]:
    """Each gradient: what of it counts on this rank, out of the elements that all ranks hold."""
    state = _groups()
    ranks, first = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank() == 0
    places = {p: (buffer, *place) for buffer in chunk.buffers for p, place in buffer.param_index_map.items()}
    for name, parameter in chunk.named_parameters():
        if parameter not in places:
            continue
        cut = bool(getattr(parameter, "tensor_model_parallel", False)) and ranks > 1
        size = parameter.numel() * (ranks if cut else 1)
        counted = _reduced(chunk, *places[parameter]) if cut or first else None
        yield Piece(name, counted if counted is not None and counted.numel() else None, size)


def _reduced(chunk: Any, buffer: Any, start: int, end: int, bucket_id: int) -> Tensor | None:
    """The part of a gradient that is reduced here and counts here."""
    rank = torch.distributed.get_rank(buffer.data_parallel_group)
    if not chunk.ddp_config.use_distributed_optimizer:
        return buffer.grad_data[start:end].detach() if rank == 0 else None
    bucket = buffer.buckets[bucket_id]
    length = bucket.grad_data.numel() // buffer.data_parallel_world_size
    begin = bucket.offset + rank * length
    part: Tensor = buffer.grad_data[max(start, begin) : max(start, begin, min(end, begin + length))].detach()
    return part


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
