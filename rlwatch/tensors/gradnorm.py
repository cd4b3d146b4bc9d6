"""Measure gradient norms per layer, before anything clips them, of whole or sharded gradients.

Ranks do not communicate here: each keeps the squares of the elements it holds, and these add up when the ranks'
statistics are merged. An element that is copied on several ranks counts on one of them.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from typing_extensions import override

from rlwatch.metrics import LAYER_PREFIX
from rlwatch.tensors.masked import shared
from rlwatch.tensors.mergeable import Latest, Stat, Stats
from rlwatch.tensors.transfer import meeting_place, moved

_LAYER = re.compile(r"^(.*?(?:^|\.)(?:layers?|h|blocks?)\.\d+)\.")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PEFT = "base_model.model."


@lru_cache(maxsize=8192)
def layer_of(name: str) -> str:
    """Return the name of the layer that a parameter belongs to, without the names that wrappers add.

    >>> layer_of("module.model.layers.3.self_attn.q_proj.weight")
    'model.layers.3'
    >>> layer_of("lm_head.weight")
    'lm_head'
    """
    bare = plain_name(name)
    block = _LAYER.match(bare)
    return block.group(1) if block else bare.rpartition(".")[0] or bare


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of DDP, FSDP, ``torch.compile`` and PEFT.

    >>> plain_name("module._orig_mod.base_model.model.lm_head.weight")
    'lm_head.weight'
    """
    return _WRAPPERS.sub("", name).removeprefix(_PEFT)


MARKS = frozenset(
    ("ds_id", "_hp_mapping", "_fsdp_flattened", "_is_flat_param", "main_grad", "tensor_model_parallel", "allreduce")
)
"""Attributes that DeepSpeed, FSDP and Megatron set on a parameter whose weight or gradient is not all in one place."""


def ordinary(parameter: Tensor) -> bool:
    """Return True for a parameter without the class or the :data:`MARKS` of a framework that shards weights."""
    return type(parameter) is Parameter and MARKS.isdisjoint(vars(parameter))


@shared
def named_weights(model: Module) -> list[tuple[str, Parameter]]:
    """Return ``model.named_parameters()`` as a list, in half of the time."""
    if type(model).named_parameters is not Module.named_parameters or "named_parameters" in vars(model):
        return list(model.named_parameters())
    found: dict[int, tuple[str, Parameter]] = {}
    modules, left = set[Module](), [("", model)]
    while left:
        prefix, module = left.pop()
        if module in modules:
            continue
        modules.add(module)
        for name, parameter in module._parameters.items():  # noqa: SLF001  (its generators nest as deep as the model)
            if parameter is not None:
                found.setdefault(id(parameter), (prefix + name, parameter))
        children = module._modules.items()  # noqa: SLF001
        if children:
            left.extend([(f"{prefix}{name}.", child) for name, child in reversed(children) if child is not None])
    return list(found.values())


@dataclass(frozen=True, slots=True)
class GradNorms:
    """Sums of squares of one step's gradients by layer, as far as this rank holds and counts them.

    ``layers``: names of the L layers, in model order. ``squares`` (L,): sum of squares of the elements that count on
    this rank. ``held``: number of those elements per layer; ``sizes``: number of elements of the layer on all ranks.
    ``broken`` (P,) is 1 for each parameter tensor with a NaN or Inf on this rank (or a norm beyond float32).
    """

    layers: tuple[str, ...]
    squares: Tensor
    held: tuple[int, ...]
    sizes: tuple[int, ...]
    broken: Tensor

    @property
    def whole(self) -> bool:
        """True if this rank has all elements, so that the norms below are those of the whole layers."""
        return self.held == self.sizes

    @property
    def norms(self) -> Tensor:
        """L2 norm of the elements of each layer on this rank, (L,)."""
        return self.squares.sqrt()

    @property
    def total(self) -> Tensor:
        """L2 norm of all elements on this rank, 0-d."""
        return self.squares.sum().sqrt()

    @property
    def nonfinite(self) -> Tensor:
        """Number of parameter tensors with a NaN or Inf on this rank, 0-d."""
        return self.broken.sum()

    def stats(self) -> Stats:
        """Return ``grad_layer/<layer>``, ``optim/grad_norm`` and ``nonfinite/grad``.

        If gradients are sharded, these have a value once the statistics of all ranks are merged.
        """
        held, size = sum(self.held), sum(self.sizes)
        names = [LAYER_PREFIX + layer for layer in self.layers]
        return {
            **Norm.each(names, self.squares.unbind(), self.held, self.sizes),
            "optim/grad_norm": Norm.of(self.squares.sum(), held, size),
            "nonfinite/grad": Marked.of(self.broken, held, size),
        }

    def unscaled_stats(self, total: Tensor) -> Stats:
        """Return statistics of gradients that still carry a loss scale; ``total`` is their norm without the scale, 0-d.

        A loss scaler finds its scale by overflows, after which it skips the step. Then no norm is measured, and
        ``optim/step_skipped`` is 1. Layers are reported only if this rank has all elements.
        """
        finite = total.detach().isfinite()
        scaled = self.total
        norms = self.norms * torch.where(scaled == 0, 1.0, total.detach().to(scaled) / scaled)
        rows = zip(self.layers, norms, strict=True) if self.whole else ()
        return {
            **{LAYER_PREFIX + layer: Latest.of(norm, finite) for layer, norm in rows},
            "optim/grad_norm": Latest.of(total, finite),
            "optim/step_skipped": Latest.of((~finite).float(), torch.ones_like(finite)),
        }


def grad_norms(parameters: Iterable[tuple[str, Parameter]], *, rank: int = 0) -> GradNorms | None:
    """Return current gradient norms of ``parameters`` (name, parameter); None if this rank counts none.

    Squares are accumulated in float32 or wider, whatever the gradients' type. Gradients are read, never changed. Of a
    DTensor this rank's shard counts, on the lowest of the ranks that hold the same shard; a whole gradient counts on
    ``rank`` 0, because data-parallel ranks all have the same. DeepSpeed's partitions count where they are, between the
    backward and the engine's step. Gradients that FSDP1 flattens, or that still wait to be reduced, are not measured.
    """
    return norms_of([Piece.of(name, p, rank) for name, p in parameters if p.grad is not None or partitioned(p)])


def norms_of(pieces: Sequence[Piece]) -> GradNorms | None:
    """Return gradient norms by layer of the ``pieces`` that this rank counts; None if it counts none."""
    counted = [held for piece in pieces if (held := piece.counted) is not None]
    if not counted:
        return None
    squares = _squares(counted)
    places = iter(range(len(counted)))
    order = tuple(-1 if piece.counted is None else next(places) for piece in pieces)
    every = squares if len(counted) == len(pieces) else row_sums(squares, tuple((place,) for place in order))
    layers = _layers(tuple(piece.name for piece in pieces))
    sizes = [(piece.held, piece.size) for piece in pieces]
    return GradNorms(
        tuple(layers),
        row_sums(squares, tuple(tuple(order[i] for i in row) for row in layers.values())),
        tuple(sum(sizes[i][0] for i in row) for row in layers.values()),
        tuple(sum(sizes[i][1] for i in row) for row in layers.values()),
        (~every.isfinite()).float(),
    )


@lru_cache(maxsize=16)
def _layers(names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Return layer -> indices of its parameters among ``names``, in model order."""
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        layers.setdefault(layer_of(name), []).append(i)
    return {layer: tuple(row) for layer, row in layers.items()}


def row_sums(x: Tensor, rows: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return the sum of the elements of ``x`` (..., N) at each of the ``rows`` of indices, (..., rows); -1 is a zero.

    Two operations whatever the number of rows, and the same order each time, which ``index_add`` on a GPU does not
    promise.
    """
    return torch.nn.functional.pad(x, (0, 1))[..., _index(rows, x.device)].sum(-1)


@lru_cache(maxsize=16)
def _index(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return lists of indices as a tensor (rows, longest) on ``device``, filled up with -1."""
    width = max(map(len, rows))
    filled = torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int64, device="cpu")
    return filled.to(device, non_blocking=True)


class Piece(NamedTuple):
    """The gradient of one parameter: the part ``counted`` that this rank counts (None if none), and its ``size`` on all
    ranks.
    """

    name: str
    counted: Tensor | None
    size: int

    @classmethod
    def of(cls, name: str, parameter: Parameter, rank: int) -> Piece:
        """Return the part of the gradient of ``parameter`` that this ``rank`` counts."""
        grad = parameter.grad
        if grad is None:
            return cls(name, _partition(parameter), parameter.numel())
        if type(grad) is Tensor and ordinary(parameter):
            return cls(name, detached(grad) if rank == 0 else None, grad.numel())
        if hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "_is_flat_param"):
            return cls(name, None, max(1, grad.numel()))
        if hasattr(grad, "to_local"):
            return cls(name, shard_of(grad), grad.numel())
        return cls(name, grad.detach() if rank == 0 else None, grad.numel())

    @property
    def held(self) -> int:
        """Number of elements of the parameter's gradient that count on this rank."""
        return 0 if self.counted is None else self.counted.numel()


def shard_of(grad: Any) -> Tensor | None:
    """Return this rank's part of ``grad``, a DTensor, to count in the norm.

    None unless this rank has the first copy of that part, and its values are fully reduced over the ranks.
    """
    place = grad.device_mesh.get_coordinate()
    if place is None or any(placement.is_partial() for placement in grad.placements):
        return None
    if any(placement.is_replicate() and at > 0 for placement, at in zip(grad.placements, place, strict=True)):
        return None
    local: Tensor = grad.detach().to_local()
    return local


def detached(x: Tensor) -> Tensor:
    """Return ``x`` without its history of operations; ``x`` itself if it has none."""
    return x.detach() if x.requires_grad else x


def partitioned(parameter: Parameter) -> bool:
    """Return True if DeepSpeed (ZeRO-1, -2) shards the gradient of ``parameter`` over ranks, and leaves no
    ``.grad``.
    """
    return parameter.grad is None and hasattr(parameter, "_hp_mapping")


def _partition(parameter: Any) -> Tensor | None:
    """Return the part of the gradient of ``parameter`` that DeepSpeed keeps on this rank.

    None if this rank has none of it, or after the engine's step.
    """
    mapping = parameter._hp_mapping  # noqa: SLF001  (DeepSpeed's own API gathers the whole)
    if mapping is None:
        return None
    try:
        part: Tensor = mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # noqa: SLF001
    except ValueError:
        return None
    return part.detach()


def _squares(grads: list[Tensor]) -> Tensor:
    """Return the sum of squares of each of the N ``grads``, (N,) float32, all on one device."""
    wide = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32  # it only widens
    # Norms in one launch and squared again, because torch has no fused sum of squares; each tensor is accumulated in
    # float32 at least. Squares, unlike norms, add up over tensors, layers and ranks.
    return torch.stack(norm_of_each(grads, wide)).square().float()


def norm_of_each(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the L2 norm of each tensor, 0-d, accumulated in ``dtype``, all on one device wherever the tensors are."""
    if not tensors:
        return []
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    if len(devices) == 1:
        return list(torch._foreach_norm(list(tensors), 2, dtype=dtype))  # noqa: SLF001  (as clip_grad_norm_)
    here, norms = meeting_place(tensors), dict[int, Tensor]()
    for device in devices:
        places = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        each = torch._foreach_norm([tensors[i] for i in places], 2, dtype=dtype)  # noqa: SLF001
        norms |= {i: moved(norm, here) for i, norm in zip(places, each, strict=True)}
    return [norms[i] for i in range(len(tensors))]


# Statistics of tensors that lie in shards on several ranks, each element counted on one rank only.
#
# Every rank keeps what it holds; nothing is sent while training waits. Until the shards together are whole there is
# no value: ``count`` is then 0. What is copied on several ranks is the lowest rank's.


@dataclass(frozen=True, slots=True)
class ShardedNorm(Stat):
    """Base of statistics of a tensor in shards: this rank has ``held`` of the ``size`` elements, summarised in
    ``kept``.
    """

    kept: Tensor
    held: int
    size: int

    @classmethod
    def of(cls, kept: Tensor, held: int, size: int) -> Self:
        """Make the statistic of the gradient elements that this rank holds.

        ``kept``: summary of these elements. ``held``: their number. ``size``: number of elements on all ranks.
        """
        return cls(kept.new_full((), float(held >= size)), kept, held, size)

    @classmethod
    def each(
        cls, names: Iterable[str], kept: Iterable[Tensor], held: Iterable[int], sizes: Iterable[int]
    ) -> dict[str, Self]:
        """Make a statistic for each of ``names``, as :meth:`of` does, with one count for all that are whole here."""
        rows = list(zip(names, kept, held, sizes, strict=True))
        counts = {whole: rows[0][1].new_full((), float(whole)) for whole in {mine >= size for *_, mine, size in rows}}
        return {name: cls(counts[mine >= size], one, mine, size) for name, one, mine, size in rows}

    @override
    def merge(self, other: Self) -> Self:
        """Return the ``other`` measurement, which is the later one of this rank."""
        return other

    @override
    def across(self, other: Self) -> Self:
        if self.held >= self.size:
            return self
        held = self.held + other.held
        count = self.count.new_full((), float(held >= self.size))
        return replace(self, count=count, kept=self.together(other.kept), held=held)

    @abstractmethod
    def together(self, kept: Tensor) -> Tensor:
        """Return the summary of the elements of this rank and another, given the other's ``kept``."""


@dataclass(frozen=True, slots=True)
class Norm(ShardedNorm):
    """L2 norm of a tensor in shards; ``kept`` is the sum of squares of this rank's elements, 0-d."""

    elementwise: ClassVar[bool] = True

    @override
    def together(self, kept: Tensor) -> Tensor:
        return self.kept + kept

    @override
    def value(self) -> Tensor:
        return self.kept.sqrt()


@dataclass(frozen=True, slots=True)
class Marked(ShardedNorm):
    """Number of marked tensors among P; ``kept`` (P,) is a mark (0 or 1) for each, which any of its shards can set."""

    @override
    def together(self, kept: Tensor) -> Tensor:
        return self.kept.maximum(kept) if self.kept.shape == kept.shape else self.kept

    @override
    def value(self) -> Tensor:
        return self.kept.sum()
