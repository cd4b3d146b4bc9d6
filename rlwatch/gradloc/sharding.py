"""Models that FSDP2 (``fully_shard``) keeps in shards, as far as looking at them needs care."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

from torch import Tensor, nn


def sharded_modules(model: nn.Module) -> list[Any]:
    """Those that FSDP2 gathers and shards again by themselves, outermost first; none where it is not in use."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module) -> None:
    """Let every module hold its shards, which is where gradients are; FSDP2 gathers them again when it needs them."""
    for module in sharded_modules(model):
        module.reshard()


def recover(model: nn.Module) -> None:
    """After a forward pass that failed half-way, let FSDP2 begin anew (torch 2.13; older ones cannot)."""
    for module in sharded_modules(model):
        if hasattr(module, "reset_iter_state"):
            with suppress(RuntimeError):  # not a root: the root's reset reaches it
                module.reset_iter_state()


class Gathered:
    """Whole gradients of the modules that FSDP2 has gathered for their forward pass, as long as that runs.

    Gradients (by the ``id`` of their parameter) are gathered module by module where FSDP2 gathers weights, so all
    ranks do it in the same order if their forward passes are the same. Inputs are not cast to the policy's type
    inside: what is seen is float32.
    """

    def __init__(self, model: nn.Module, gradients: Mapping[int, Tensor]) -> None:
        self._model = model
        self._gradients = {key: g for key, g in gradients.items() if hasattr(g, "full_tensor")}
        self._whole: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._policies: list[tuple[Any, Any]] = []

    def like(self, weight: Tensor, key: int, gradient: Tensor) -> Tensor:
        """``gradient`` in the form that ``weight`` has now: whole, or in shards."""
        if hasattr(gradient, "full_tensor") and not hasattr(weight, "full_tensor"):
            if key not in self._whole:
                raise LookupError("a weight was read outside the module that gathers it")
            return self._whole[key]
        return gradient

    def __enter__(self) -> Self:
        units = sharded_modules(self._model)
        with ExitStack() as undo:
            undo.push(self.__exit__)
            for unit, keys in zip(units, _owned(units), strict=True):
                self._keep_input_type(unit)
                mine = [key for key in keys if key in self._gradients]
                self._hooks.append(unit.register_forward_pre_hook(partial(self._gather, mine)))
                self._hooks.append(unit.register_forward_hook(partial(self._drop, mine), always_call=True))
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for state, policy in self._policies:
            state._mp_policy = policy  # noqa: SLF001
        self._whole.clear()

    def _keep_input_type(self, unit: Any) -> None:
        state = unit._get_fsdp_state()  # noqa: SLF001  (FSDP2 has no public way)
        self._policies.append((state, state._mp_policy))  # noqa: SLF001
        state._mp_policy = replace(state._mp_policy, cast_forward_inputs=False, output_dtype=None)  # noqa: SLF001

    def _gather(self, keys: list[int], *_: object) -> None:
        self._whole.update((key, self._gradients[key].full_tensor()) for key in keys)

    def _drop(self, keys: list[int], *_: object) -> None:
        for key in keys:
            self._whole.pop(key, None)


def _owned(units: list[Any]) -> list[list[int]]:
    """For each of ``units``, the parameters that it gathers: its own, without those of the units inside it."""
    owner = {id(p): i for i, unit in enumerate(units) for p in unit.parameters()}  # a later unit lies further inside
    return [[key for key, place in owner.items() if place == i] for i in range(len(units))]
