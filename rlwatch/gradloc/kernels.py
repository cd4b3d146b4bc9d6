"""Kernels that a float32 forward pass, or its forward derivative, can run through."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ATTENTION, EXPERTS = "_attn_implementation", "_experts_implementation"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def routed(model: nn.Module) -> bool:
    """Whether tokens are routed to experts, as the model's configuration tells."""
    counts = [getattr(config, name, None) for config in _configs(model) for name in EXPERT_COUNTS]
    return any(isinstance(count, int) and count > 1 for count in counts)


@contextmanager
def float32_kernels(model: nn.Module) -> Iterator[None]:
    """Without compiled code (it reads weights past :mod:`displacement`), flash attention and grouped experts.

    The last two take no float32. Configurations of transformers' models are changed for the while.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for config in _configs(model):
            if "flash" in str(getattr(config, ATTENTION, None)):
                stack.enter_context(_set(config, ATTENTION, "sdpa"))
            if getattr(config, EXPERTS, None) is not None:
                stack.enter_context(_set(config, EXPERTS, "eager"))
        yield


@contextmanager
def differentiable_kernels(model: nn.Module) -> Iterator[None]:
    """Attention that has a forward derivative: plain matrix products, or written out in Python."""
    with ExitStack() as stack:
        for config in _configs(model):
            if getattr(config, ATTENTION, None) not in (None, "sdpa", "eager"):
                stack.enter_context(_set(config, ATTENTION, "eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@contextmanager
def _set(config: Any, name: str, value: str) -> Iterator[None]:
    """On this configuration alone: transformers' own setter reaches into others, and cannot put back what it found."""
    name = f"{name}_internal" if f"{name}_internal" in vars(config) else name
    before = getattr(config, name)
    object.__setattr__(config, name, value)
    try:
        yield
    finally:
        object.__setattr__(config, name, before)


def _configs(model: nn.Module) -> list[Any]:
    """Each configuration once that a module of ``model`` reads."""
    found = {id(c): c for m in model.modules() if (c := m.__dict__.get("config")) is not None}
    return list(found.values())
