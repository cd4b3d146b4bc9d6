"""Read gradients of Megatron's models: sharded over ranks, in plain ``.grad`` or in the flat buffers of its DDP.

Each element of a gradient counts once among all ranks. A weight that tensor parallelism shards has a piece on each of
its ranks. Other weights are whole on all of them, and the first rank counts them. Experts have groups of ranks of their
own. The first of the data-parallel copies counts; with the distributed optimizer each rank holds, once gradients are
reduced, only its part of each bucket.

No collective is called: ranks, groups and attributes of parameters come from Megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rlwatch.tensors.gradnorm import GradNorms, Piece, grad_norms, named_weights, norms_of, ordinary, shard_of
from rlwatch.tensors.masked import shared, sharing

EXPERT = "allreduce"
"""Attribute that Megatron sets on a parameter: False for an expert if other ranks hold other experts."""


def groups() -> Any:
    """Return Megatron's module of rank groups (``parallel_state``); None if it is not loaded or not initialised yet."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def chunks_of(model: Any) -> Sequence[Any]:
    """Return the chunks of a model as a list: Megatron, and verl's engine, hold a list of modules."""
    return list(model) if isinstance(model, list | tuple) else [model]


def cut(model: Any) -> bool:
    """Return True if, by Megatron's attributes, different ranks hold different weights of ``model``."""
    if not any(_marked(p) for chunk in chunks_of(model) for p in chunk.parameters()):
        return False
    state = groups()
    if state is None:
        return _ranks() > 1
    pipeline, tensor = state.get_pipeline_model_parallel_world_size(), state.get_tensor_model_parallel_world_size()
    return bool(pipeline > 1 or tensor > 1 or _over_experts(state) > 1)


@shared
def divided(model: Any) -> bool:
    """Return True if ``.grad`` of the parameters of ``model`` on this rank holds only a part of the gradient, or
    nothing.
    """
    chunks = chunks_of(model)
    if any(map(_buffered, chunks)):
        return True
    odd = [p for chunk in chunks for _, p in named_weights(chunk) if not ordinary(p)]
    return bool(odd) and (any(hasattr(p, "main_grad") for p in odd) or cut(model))


def hindrance(model: Any) -> str | None:
    """Return the reason why gradient norms of ``model`` cannot be measured by layer; None if they can. Calls no
    collective.
    """
    if not divided(model):
        return None
    chunks, state = chunks_of(model), groups()
    if state is None:
        return "Megatron's groups (megatron.core.parallel_state), which define how ranks share the model, are missing"
    if state.get_pipeline_model_parallel_world_size() > 1:
        return "stages of a pipeline each count layers from 0, and hold different ones"
    if _unmarked_experts(state) and any(
        ".experts." in name for chunk in chunks for name, _ in chunk.named_parameters()
    ):
        return "experts are cut over other ranks than the rest, and without expert parallelism Megatron marks none"
    if any(map(_outside, chunks)):
        return (
            "gradients lie in buffers that the model does not know: those of Megatron's own FSDP, or of a DDP around it"
        )
    if any(_instances(chunk) > 1 for chunk in chunks):
        return "several instances of the distributed optimizer each have a part of the gradient"
    if any(p.dtype is torch.float16 for chunk in chunks for p in chunk.parameters()):
        return "gradients of float16 carry a loss scale"
    return None


def model_norms(model: Any, *, rank: int = 0) -> GradNorms | None:
    """Return norms of the gradients of ``model`` that this ``rank`` counts; None if there are none.

    None also if :func:`hindrance` returns a reason. For Megatron's models call it after the gradients are reduced
    (``finalize_model_grads``) and before the optimizer's step.
    """
    chunks, state = chunks_of(model), groups()
    with sharing():
        if not divided(model):
            return grad_norms([named for chunk in chunks for named in named_weights(chunk)], rank=rank)
        if state is None or hindrance(model) is not None:
            return None
        return norms_of([piece for chunk in chunks for piece in _pieces(chunk, state)])


def first_of_copies() -> bool:
    """Return True on the first of the ranks that process the same whole responses, and if there is no Megatron.

    Tensor-parallel ranks process the same responses, pipeline stages before the last have none, and context-parallel
    ranks have parts of each.
    """
    state = groups()
    if state is None:
        return True
    last = state.get_pipeline_model_parallel_world_size() - 1
    ranks = (state.get_tensor_model_parallel_rank(), state.get_context_parallel_rank())
    return ranks == (0, 0) and bool(state.get_pipeline_model_parallel_rank() == last)


# Which part of a gradient counts on this rank.


@dataclass(frozen=True, slots=True)
class _Lines:
    """Sizes of the groups of ranks that share a dense parameter, or an expert, and the index of this rank in each."""

    tensor: int
    tensor_rank: int
    data_rank: int
    experts: int = 1
    experts_rank: int = 0

    @classmethod
    def of(cls, state: Any, parameter: Parameter) -> _Lines:
        if not _expert(parameter):
            tensor, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
            return cls(tensor, rank, state.get_data_parallel_rank(with_context_parallel=True))
        return cls(
            state.get_expert_tensor_parallel_world_size(),
            state.get_expert_tensor_parallel_rank(),
            state.get_expert_data_parallel_rank(),
            state.get_expert_model_parallel_world_size(),
            state.get_expert_model_parallel_rank(),
        )


def _pieces(chunk: Any, state: Any) -> Iterator[Piece]:
    """Yield for each gradient the part that this rank counts, and the number of elements on all ranks."""
    places = _places(chunk)
    for name, parameter in chunk.named_parameters():
        if getattr(parameter, "shared", False) or not (parameter in places or parameter.grad is not None):
            continue
        lines = _Lines.of(state, parameter)
        parted = bool(getattr(parameter, "tensor_model_parallel", False)) and lines.tensor > 1
        size = parameter.numel() * (lines.tensor if parted else 1)
        counted = _reduced(chunk, parameter, places, lines) if parted or lines.tensor_rank == 0 else None
        here = counted if counted is not None and counted.numel() else None
        for other in range(lines.experts):  # by the same name every rank has an expert of its own
            numbered = name if lines.experts == 1 else f"{name}[{other}]"
            yield Piece(numbered, here if other == lines.experts_rank else None, size)


def _reduced(chunk: Any, parameter: Parameter, places: Mapping[Parameter, Any], lines: _Lines) -> Tensor | None:
    """Return the part of a gradient that this rank counts among data-parallel ranks; None if it counts nothing."""
    grad = parameter.grad
    if parameter not in places:
        if grad is None or hasattr(grad, "to_local"):
            return None if grad is None else shard_of(grad)
        return grad.detach() if lines.data_rank == 0 else None
    buffer, start, end, bucket_id = places[parameter]
    rank = torch.distributed.get_rank(buffer.data_parallel_group)
    if not chunk.ddp_config.use_distributed_optimizer:
        return buffer.grad_data[start:end].detach() if rank == 0 else None
    bucket = buffer.buckets[bucket_id]
    length = bucket.grad_data.numel() // buffer.data_parallel_world_size
    begin = bucket.offset + rank * length
    part: Tensor = buffer.grad_data[max(start, begin) : max(start, begin, min(end, begin + length))].detach()
    return part


def _places(chunk: Any) -> dict[Parameter, Any]:
    """Return parameter -> buffer, first and last element in it, and bucket, for parameters of Megatron's DDP."""
    buffers = [*chunk.buffers, *chunk.expert_parallel_buffers] if _buffered(chunk) else []
    return {p: (buffer, *place) for buffer in buffers for p, place in buffer.param_index_map.items()}


def _buffered(chunk: Any) -> bool:
    """True if Megatron's DDP holds ``chunk``: its ``buffers`` are a list, where a module's are a method."""
    return isinstance(getattr(chunk, "buffers", None), list)


def _outside(chunk: Any) -> bool:
    """Return True if gradients lie in buffers of Megatron's that the module ``chunk`` does not give access to."""
    return not _buffered(chunk) and any(hasattr(p, "main_grad") for p in chunk.parameters())


def _instances(chunk: Any) -> int:
    return int(getattr(getattr(chunk, "ddp_config", None), "num_distributed_optimizer_instances", 1))


def _marked(parameter: Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False)) or _expert(parameter)


def _expert(parameter: Parameter) -> bool:
    return getattr(parameter, EXPERT, True) is False


def _unmarked_experts(state: Any) -> bool:
    alone = state.get_expert_model_parallel_world_size() == 1
    return bool(alone and state.get_expert_tensor_parallel_world_size() != state.get_tensor_model_parallel_world_size())


def _over_experts(state: Any) -> int:
    return int(state.get_expert_model_parallel_world_size() * state.get_expert_tensor_parallel_world_size())


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
