"""Measure the size of an optimizer step: how far each layer's weights move, relative to their norm, for any optimizer.

Up to ``SAMPLED`` evenly spaced elements of a tensor are kept before the step and compared after it, others at each
step; smaller tensors are measured whole. Squares of a sample are scaled to its tensor, so that the estimate is
unbiased. Weights that are sharded over ranks or held elsewhere are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from rlwatch.metrics import UPDATE_PREFIX
from rlwatch.tensors.gradnorm import layer_of
from rlwatch.tensors.mergeable import Latest, Stats
from rlwatch.tensors.transfer import freed
from rlwatch.tensors.weight_gap import COMPARED, elements_at, places_of

HEADS = ("lm_head", "head", "embed_out", "output_layer")
"""Names of the layer that computes the logits."""
FEWEST_LAYERS = 3
"""The head is compared with the median of the other layers only if there are at least this many."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of one device, dtype and number of sampled elements: the samples (M, K), float32."""

    members: tuple[int, ...]
    before: Tensor


@dataclass(frozen=True, slots=True)
class UpdateSample:
    """Sampled elements of a model's trained weights as they were before an optimizer step.

    ``layers``, ``weights``: layer name and parameter of each sampled tensor. ``turn``: number of the step, which
    selects the elements. ``groups``: the sampled values.
    """

    layers: tuple[str, ...]
    weights: tuple[Tensor, ...]
    turn: int
    groups: tuple[_Group, ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, nn.Parameter]], turn: int = 0) -> Self | None:
        """Sample the weights ``named`` that have a gradient now; None if there are none.

        ``turn``: number of the step; different steps sample different elements.
        """
        kept = [(layer_of(name), weight.detach()) for name, weight in named if _whole(weight)]
        if not kept:
            return None
        layers, weights = zip(*kept, strict=True)
        known: dict[tuple[object, ...], list[int]] = {}
        for i, weight in enumerate(weights):
            places = places_of(weight.numel(), turn)
            known.setdefault((weight.device, weight.dtype, len(range(weight.numel())[places])), []).append(i)
        groups = tuple(_Group(tuple(members), _samples(weights, members, turn)) for members in known.values())
        return cls(layers, weights, turn, groups)

    def stats(self) -> Stats:
        """Return statistics of the step that was taken since the sample, without waiting for the device.

        ``update_layer/<layer>``: norm of the change over the norm of the weights before. ``optim/update_ratio``: the
        same of all layers together. ``optim/update_norm``: norm of the change. ``optim/update_head``: ratio of the
        layer that computes the logits over the median ratio of the other layers.
        """
        names, device = list(dict.fromkeys(self.layers)), self.weights[0].device
        order = [i for group in self.groups for i in group.members]
        index = torch.tensor([names.index(self.layers[i]) for i in order], device="cpu").to(device, non_blocking=True)
        squares = torch.cat([self._squares(group, device) for group in self.groups], 1)
        moved, size = torch.zeros(2, len(names), device=device).index_add(1, index, squares)
        ratio = _ratio(moved, size)
        one = torch.ones((), dtype=torch.bool, device=device)
        stats: Stats = {UPDATE_PREFIX + name: Latest.of(ratio[i], one) for i, name in enumerate(names)}
        stats["optim/update_norm"] = Latest.of(moved.sum().sqrt(), one)
        stats["optim/update_ratio"] = Latest.of(_ratio(moved.sum(), size.sum()), one)
        head = [i for i, name in enumerate(names) if name.rpartition(".")[2] in HEADS]
        if len(head) == 1 and len(names) > FEWEST_LAYERS:
            others = torch.cat([ratio[: head[0]], ratio[head[0] + 1 :]]).median()
            stats["optim/update_head"] = Latest.of(ratio[head[0]] / others, others > 0)
        return stats

    def _squares(self, group: _Group, device: torch.device) -> Tensor:
        """Squared norms of the change and of the weights before, of each tensor of a group: (2, M)."""
        sizes = [self.weights[i].numel() / group.before.shape[1] for i in group.members]
        scale = torch.tensor(sizes, device="cpu").to(device, non_blocking=True)
        after = _samples(self.weights, group.members, self.turn)
        both = torch.stack([(after - group.before).square().sum(-1), group.before.square().sum(-1)])
        return both.to(device) * scale


def _whole(weight: Tensor) -> bool:
    """True of a weight that is trained, and here with all its elements."""
    held = weight.grad is not None and not hasattr(weight, "to_local") and not hasattr(weight, "ds_id")
    return held and weight.numel() > 0 and weight.dtype in COMPARED and not weight.is_meta and not freed(weight)


def _samples(weights: Sequence[Tensor], members: Sequence[int], turn: int) -> Tensor:
    """Sampled elements of the weights ``members``, (M, K) float32, copied."""
    rows = [elements_at(weights[i], places_of(weights[i].numel(), turn)) for i in members]
    return torch.stack(rows).float()


def _ratio(change: Tensor, norm: Tensor) -> Tensor:
    """Root of ``change / norm``; 0 where nothing moved, also from nothing."""
    return torch.where(change > 0, (change / norm).sqrt(), change)
