"""Gradient norms per layer, before anything clips them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import Parameter

from rlwatch.metrics import LAYER_PREFIX
from rlwatch.tensors.mergeable import Latest, Stats

_LAYER = re.compile(r"^(.*?(?:^|\.)(?:layers?|h|blocks?)\.\d+)\.")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PEFT = "base_model.model."


@lru_cache(maxsize=8192)
def layer_of(name: str) -> str:
    """The layer a parameter belongs to, without the names wrappers add.

    >>> layer_of("module.model.layers.3.self_attn.q_proj.weight")
    'model.layers.3'
    >>> layer_of("lm_head.weight")
    'lm_head'
    """
    bare = _WRAPPERS.sub("", name).removeprefix(_PEFT)
    found = _LAYER.match(bare)
    return found.group(1) if found else bare.rpartition(".")[0] or bare


@dataclass(frozen=True, slots=True)
class GradNorms:
    """L2 norms of one step's gradients: ``layers`` name the entries of ``norms`` (L,), both in model order.

    ``total`` is the norm of all together, ``nonfinite`` the number of parameter tensors with a NaN or Inf
    (or a norm beyond float32); both 0-d.
    """

    layers: tuple[str, ...]
    norms: Tensor
    total: Tensor
    nonfinite: Tensor

    def stats(self) -> Stats:
        """``grad_layer/<layer>``, ``optim/grad_norm``, ``nonfinite/grad``."""
        one = torch.ones_like(self.total, dtype=torch.bool)
        layers = {
            LAYER_PREFIX + layer: Latest.of(norm, one) for layer, norm in zip(self.layers, self.norms, strict=True)
        }
        whole = {"optim/grad_norm": self.total, "nonfinite/grad": self.nonfinite}
        return {**layers, **{name: Latest.of(value, one) for name, value in whole.items()}}

    def unscaled_stats(self, total: Tensor) -> Stats:
        """The same of gradients that still carry a loss scale; ``total`` is their norm without it, 0-d.

        An overflow is how a scaler finds its scale (the step is skipped): then nothing was measured, and
        ``optim/step_skipped`` is 1.
        """
        finite = total.detach().isfinite()
        factor = total.detach().to(self.total) / self.total
        norms = zip(self.layers, self.norms * factor, strict=True)
        return {
            **{LAYER_PREFIX + layer: Latest.of(norm, finite) for layer, norm in norms},
            "optim/grad_norm": Latest.of(total, finite),
            "optim/step_skipped": Latest.of((~finite).float(), torch.ones_like(finite)),
        }


def grad_norms(parameters: Iterable[tuple[str, Parameter]]) -> GradNorms | None:
    """Norms of the gradients that ``parameters`` (name, parameter) hold now; None if none of them has one.

    Accumulated in float32 whatever the gradients' type. Gradients are read, never changed. Sharded gradients
    (DTensor) are left out: a norm of a shard is not the norm of the layer.
    """
    named = [(n, p.grad) for n, p in parameters if p.grad is not None and not hasattr(p.grad, "full_tensor")]
    if not named:
        return None
    first = named[0][1].device
    pieces = [norm.to(first, non_blocking=True) for norm in _norms([grad.detach() for _, grad in named])]
    squares = torch.stack(pieces).square()
    layers = tuple(dict.fromkeys(layer_of(name) for name, _ in named))
    rows: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    for (name, _), square in zip(named, squares.unbind(), strict=True):
        rows[layer_of(name)].append(square)
    per_layer = torch.stack([torch.stack(row).sum() for row in rows.values()])
    return GradNorms(layers, per_layer.sqrt(), per_layer.sum().sqrt(), (~squares.isfinite()).sum().float())


def _norms(grads: list[Tensor]) -> list[Tensor]:
    norms: list[Tensor] = list(torch._foreach_norm(grads, 2, dtype=torch.float32))  # noqa: SLF001  (as clip_grad_norm_ does)
    return norms
