"""Compare the rollout engine's weights with the trainer's: some elements of each tensor, right after a weight sync.

Up to :data:`SAMPLED` evenly spaced elements of a tensor are compared, others at each sync, after a cast to the engine's
dtype; "equal" means that all of those were. A tensor smaller than that is compared whole. A weight into which an
adapter was merged is compared to within rounding, because the order of a sum decides the last bit. A quantised tensor,
or one that the engine cuts or packs differently, is not compared, and counts as not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from rlwatch.metrics import UPDATE_PREFIX, WEIGHTS_PREFIX
from rlwatch.tensors.gradnorm import Norm, ShardedNorm, layer_of, ordinary, plain_name, row_sums, shard_of
from rlwatch.tensors.mergeable import Max, Mean, ShareStat, Stats
from rlwatch.tensors.transfer import freed, meeting_place

DIFFER = "mismatch/weights_differ"
SAMPLED = 512
"""Elements of a tensor that are compared at one sync."""
ODD = 2_654_435_761
"""Factor that, multiplied by the number of the sync, gives the first compared element, so that in time all are
compared.
"""
COMPARED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ULPS = 4.0
"""A merged weight counts as equal within so many machine epsilons of the coarser type."""
FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
"""Module of the trainer -> the fused module of vLLM and SGLang that holds its rows, and the modules in it, in order."""
PADDED = ("embed_tokens", "lm_head")
"""Modules whose rows vLLM pads."""
BASE, ADAPTER = ".base_layer.", ".lora_"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank change of one weight: ``scale * B @ A``, of shapes (out, r) and (r, in), or its transpose."""

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool = False

    def at(self, places: Tensor, columns: int) -> Tensor:
        """Return the change (K,), float32, that the adapter makes to some elements of its weight.

        ``places`` (K,): indices into the flattened weight. ``columns``: number of columns of the weight.
        """
        row, column = places // columns, places % columns
        out, into = (column, row) if self.transposed else (row, column)
        return self.scale * (self.b.detach()[out].float() * self.a.detach()[:, into].float().T).sum(-1)


@dataclass(frozen=True, slots=True)
class TrainerWeight:
    """A weight of the trainer as the rollout engine should hold it.

    ``local``: rows of the weight on this rank, from row ``start`` on. ``shape``: of the whole weight. ``adapter``:
    change that the engine has merged into it.
    """

    name: str
    local: Tensor
    shape: torch.Size
    start: int = 0
    adapter: Adapter | None = None


def trainer_weights(model: nn.Module, *, merged: bool = True) -> list[TrainerWeight]:
    """Return the weights of ``model`` by their names without wrappers, as far as this rank holds them.

    ``merged``: the engine gets adapters merged into the weights they change. A weight that is cut by rows over ranks
    (FSDP2) is represented by this rank's rows. Weights that are cut otherwise, or changed by an adapter other than
    plain LoRA, have no elements.
    """
    adapters = dict(_adapters(model)) if merged else {}
    found = []
    for raw, parameter in model.named_parameters():
        name = plain_name(raw)
        if merged and (ADAPTER in f".{name}" or "original_module" in name):
            continue
        local, start = _local(parameter)
        known = adapters.get(raw)
        if known is not None and known.adapter is None and not known.plain:
            local = local.new_empty(0)
        name = name.replace(BASE, ".").replace("modules_to_save.default.", "") if merged else name
        found.append(TrainerWeight(name, local, parameter.shape, start, None if known is None else known.adapter))
    return found


@dataclass(frozen=True, slots=True)
class _Adapted:
    adapter: Adapter | None
    plain: bool
    """Without an adapter that is to be added: it is merged already, or switched off."""


def _adapters(model: nn.Module) -> Iterable[tuple[str, _Adapted]]:
    """Iterate over (name of a weight that adapters change, the adapter that is active on it)."""
    for name, module in model.named_modules():
        lora_a, scaling = getattr(module, "lora_A", None), getattr(module, "scaling", None)
        if not isinstance(lora_a, nn.ModuleDict) or not isinstance(scaling, Mapping):
            continue
        part: Any = module
        off = part.merged or part.disable_adapters
        active = [one for one in part.active_adapters if one in lora_a]
        adapter = None
        if not off and len(active) == 1 and not getattr(part, "use_dora", {}).get(active[0], False):
            one, transposed = active[0], bool(getattr(part, "fan_in_fan_out", False))
            adapter = Adapter(lora_a[one].weight, part.lora_B[one].weight, float(scaling[one]), transposed)  # type: ignore[arg-type]
        yield f"{name}.base_layer.weight", _Adapted(adapter, off or not active)


def _local(parameter: Tensor) -> tuple[Tensor, int]:
    """Return the rows of ``parameter`` on this rank, and the index of the first.

    The rows are empty for a parameter that is sharded by anything but its rows.
    """
    if not hasattr(parameter, "to_local"):
        return parameter.detach(), 0
    local = parameter.to_local().detach()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    cut = [(i, one) for i, one in enumerate(placements) if not one.is_replicate()]
    if not cut:
        return local, 0
    if len(cut) > 1 or not cut[0][1].is_shard(0):
        return local.new_empty(0), 0
    each = -(-parameter.shape[0] // mesh.size(cut[0][0]))
    return local, each * mesh.get_local_rank(cut[0][0])


def counterpart(weight: TrainerWeight, engine: Mapping[str, Tensor], rows: Mapping[str, int]) -> Tensor | None:
    """Return the part of the engine's weights that should equal ``weight.local``; None if there is none of its shape
    and type.

    ``engine``: name -> tensor. ``rows``: name of each trainer weight -> its number of rows, for an engine that fuses
    several weights into one.
    """
    held = engine.get(weight.name)
    if held is None:
        held = _fused(weight.name, engine, rows)
    elif held.shape != weight.shape:
        padded = any(f".{name}." in f".{weight.name}" for name in PADDED) and held.dim() == len(weight.shape) > 0
        if not padded or held.shape[1:] != weight.shape[1:] or held.shape[0] < weight.shape[0]:
            return None
        held = held[: weight.shape[0]]
    if held is None or held.shape != weight.shape or held.dtype not in COMPARED or held.is_meta or freed(held):
        return None
    if weight.local.shape != weight.shape:
        held = held[weight.start : weight.start + weight.local.shape[0]] if weight.local.dim() else held
    return held.detach() if held.shape == weight.local.shape and held.numel() else None


def _fused(name: str, engine: Mapping[str, Tensor], rows: Mapping[str, int]) -> Tensor | None:
    """Return the rows of the weight ``name`` inside the engine's fused weight; None if there is none that fits."""
    before, _, last = name.rpartition(".")
    parent, _, module = before.rpartition(".")
    if module not in FUSED:
        return None
    whole, parts = FUSED[module]
    prefix = f"{parent}." if parent else ""
    held = engine.get(f"{prefix}{whole}.{last}")
    counts = [rows.get(f"{prefix}{part}.{last}", 0) for part in parts]
    if held is None or held.dim() == 0 or 0 in counts or held.shape[0] != sum(counts):
        return None
    first = sum(counts[: parts.index(module)])
    return held[first : first + counts[parts.index(module)]]


@lru_cache(maxsize=4096)
def places_of(elements: int, turn: int) -> slice:
    """Return which elements of a flattened tensor with ``elements`` elements to sample, as a slice of at most
    ``SAMPLED``.

    ``turn``: number of the sync or step; different ones sample different elements.
    """
    stride = max(1, elements // SAMPLED)
    stride -= stride > 1 and stride % 2 == 0  # an odd one meets all columns of a matrix
    count = min(SAMPLED, elements)
    first = turn * ODD % (elements - stride * (count - 1))
    return slice(first, first + stride * count, stride)


@dataclass(frozen=True, slots=True)
class _Row:
    """Elements of one weight that are compared: as the trainer has them, without and with its adapter."""

    layer: str
    own: Tensor
    held: Tensor
    change: Tensor | None


def weight_stats(weights: Sequence[TrainerWeight], engine: Mapping[str, Tensor], turn: int = 0) -> Stats:
    """Return statistics of the differences between the trainer's ``weights`` and those of ``engine`` (name -> tensor).

    ``turn``: number of the sync. Empty if no weight can be compared. Nothing waits for the device.
    """
    with torch.no_grad():
        rows_of = {weight.name: weight.shape[0] for weight in weights if len(weight.shape)}
        rows, compared = [], 0
        for weight in weights:
            held = counterpart(weight, engine, rows_of) if _readable(weight.local) else None
            if held is not None:
                compared += weight.local.numel()
                rows.append(_row(weight, held, turn))
        if not rows:
            return {}
        whole = max(1, sum(weight.local.numel() or weight.shape.numel() for weight in weights))
        return _stats(rows, compared, whole)


def _readable(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.dtype in COMPARED and not tensor.is_meta and not freed(tensor)


def _row(weight: TrainerWeight, held: Tensor, turn: int) -> _Row:
    chosen = places_of(weight.local.numel(), turn)
    change = None
    if weight.adapter is not None:
        columns = weight.local.shape[-1]
        places = torch.arange(chosen.start, chosen.stop, chosen.step, device=weight.local.device)
        change = weight.adapter.at(places + weight.start * columns, columns)
    return _Row(layer_of(weight.name), elements_at(weight.local, chosen), elements_at(held, chosen), change)


def sampled(chosen: slice) -> int:
    """Return the number of elements that :func:`places_of` chose."""
    return (int(chosen.stop) - int(chosen.start)) // int(chosen.step)


def elements_at(tensor: Tensor, chosen: slice) -> Tensor:
    """Return the elements ``chosen`` of the flattened ``tensor``, without a copy of the others."""
    if tensor.is_contiguous():
        return tensor.as_strided((sampled(chosen),), (chosen.step,), tensor.storage_offset() + chosen.start)
    places = torch.arange(chosen.start, chosen.stop, chosen.step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]


def sample_at(tensor: Tensor, turn: int) -> Tensor:
    """Return the elements of ``tensor`` that :func:`places_of` chooses at the ``turn``; a view if it is contiguous."""
    if not tensor.is_contiguous():
        return elements_at(tensor, places_of(tensor.numel(), turn))
    size, stride, first = _view_of(tensor.numel(), turn)
    return tensor.as_strided(size, stride, tensor.storage_offset() + first)


@lru_cache(maxsize=4096)
def _view_of(elements: int, turn: int) -> tuple[tuple[int], tuple[int], int]:
    """Return :func:`places_of` as size, stride and first element of a view."""
    chosen = places_of(elements, turn)
    return (sampled(chosen),), (chosen.step,), chosen.start


@dataclass(frozen=True, slots=True)
class _Compared:
    """Result of the comparison of M weights: tensors (M,) with one element for each weight.

    ``differ``: number of elements that differ. ``squares``: squared distance. ``norm``: squared norm. ``lost``: 1 if
    the weight's adapter is missing in the engine, 0 if not, -1 if it changes too little to be judged; None without
    adapters.
    """

    differ: Tensor
    squares: Tensor
    norm: Tensor
    lost: Tensor | None


def _stats(rows: Sequence[_Row], compared: int, whole: int) -> Stats:
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        key = (len(row.own), row.own.dtype, row.held.dtype, row.own.device, row.held.device, row.change is None)
        groups.setdefault(key, []).append(i)
    device = meeting_place([row.own for row in rows])
    order, parts = [], []
    for members in groups.values():
        order += members
        parts.append(_compare([rows[i] for i in members], device))
    differ, squares, norm = (torch.cat([getattr(one, name) for one in parts]) for name in ("differ", "squares", "norm"))
    tensors = torch.full((), float(len(rows)), device=device)
    distance = torch.where(norm > 0, squares / norm, (squares > 0).float()).sqrt()
    stats: Stats = {
        DIFFER: Mean(tensors, (differ > 0).float().sum()),
        "mismatch/weights_compared": ShareStat(
            tensors, torch.full_like(tensors, compared), torch.full_like(tensors, whole)
        ),
        "mismatch/weights_distance": Max(tensors, distance.max()),
    }
    layers: dict[str, list[int]] = {}
    for place, i in enumerate(order):
        layers.setdefault(rows[i].layer, []).append(place)
    each = differ.unbind()
    for layer, places in layers.items():
        elements = sum(len(rows[order[place]].own) for place in places)
        total = torch.stack([each[place] for place in places]).sum()
        stats[WEIGHTS_PREFIX + layer] = Mean(torch.full_like(tensors, elements), total)
    lost = [one.lost for one in parts if one.lost is not None]
    if lost:
        missing = torch.cat(lost)
        known = (missing >= 0).float()  # an adapter that changes nothing yet cannot be missed
        stats["mismatch/adapter_missing"] = Mean(known.sum(), missing.clamp(min=0.0).sum())
    return stats


def _compare(rows: Sequence[_Row], device: torch.device) -> _Compared:
    held = torch.stack([row.held for row in rows]).to(device)
    own = torch.stack([row.own for row in rows]).to(device)
    cast = own.to(held.dtype)
    other = (cast != held) & ~(cast.isnan() & held.isnan())
    changes = [row.change for row in rows if row.change is not None]
    wide, theirs, lost = cast.float(), held.float(), None
    if changes:
        change = torch.stack(changes).to(device)
        target = own.float() + change
        near = ULPS * max(torch.finfo(own.dtype).eps, torch.finfo(held.dtype).eps) * (own.float().abs() + change.abs())
        off = ~((target - theirs).abs() <= near)
        matters = (change.abs() > near).any(-1)
        base = (wide - theirs).abs() <= near  # not to the bit: unmerging rounds, too
        lost = torch.where(matters, (base.all(-1) & off.any(-1)).float(), -1.0)
        other, wide = off, target
    gap = torch.where(other, wide - theirs, 0.0)
    return _Compared(other.float().sum(-1), gap.square().sum(-1), wide.square().sum(-1), lost)


# Measure the size of an optimizer step: how far each layer's weights move, relative to their norm, for any optimizer.
#
# Up to ``SAMPLED`` evenly spaced elements of a tensor are kept before the step and compared after it, others at each
# step; smaller tensors are measured whole. Squares of a sample are scaled to its tensor, so that the estimate is
# unbiased. Of a sharded weight each rank samples its shard. The squares add up when the ranks' statistics are merged,
# so ranks communicate nothing here. Weights that FSDP1 flattens or ZeRO-3 partitions are left out.

HEADS = ("lm_head", "head", "embed_out", "output_layer")
"""Names of the layer that computes the logits."""
FEWEST_LAYERS = 3
"""The head is compared with the median of the other layers only if there are at least this many."""


@dataclass(frozen=True, slots=True)
class RelativeChange(ShardedNorm):
    """Norm of the change of weights over their norm before it, both of weights in shards.

    ``kept`` (2,): sums of squares of the change and of the weights on this rank.
    """

    elementwise: ClassVar[bool] = True

    @override
    def together(self, kept: Tensor) -> Tensor:
        return self.kept + kept

    @override
    def value(self) -> Tensor:
        return _ratio(*self.kept.unbind(-1))


@dataclass(frozen=True, slots=True)
class HeadChange(ShardedNorm):
    """Relative change of the layer that computes the logits over the median relative change of the other layers.

    ``kept`` (2, L): sums of squares of the change and of the weights on this rank, of the head and of the L - 1 others
    after it. Not measured if the median is 0.
    """

    @override
    def together(self, kept: Tensor) -> Tensor:
        return self.kept + kept if self.kept.shape == kept.shape else self.kept

    @override
    def settle(self) -> Self:
        return replace(self, count=torch.where(self._others() > 0, self.count, 0.0))

    @override
    def value(self) -> Tensor:
        return _ratio(self.kept[0, 0], self.kept[1, 0]) / self._others()

    def _others(self) -> Tensor:
        return _ratio(self.kept[0, 1:], self.kept[1, 1:]).median()


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of one device, dtype and number of sampled elements: their samples (K,), which are views of contiguous
    weights, and a copy of all, (M, K) float32.
    """

    members: tuple[int, ...]
    rows: tuple[Tensor, ...]
    before: Tensor


@dataclass(frozen=True, slots=True)
class UpdateSample:
    """Sampled elements of a model's trained weights as they were before an optimizer step.

    ``layers``, ``weights``: layer name, and the part that this rank counts, of each sampled weight. ``held``,
    ``sizes``: number of trained elements of each layer on this rank, and on all ranks. ``turn``: number of the step,
    which selects the elements. ``groups``: the sampled values.
    """

    layers: tuple[str, ...]
    weights: tuple[Tensor, ...]
    held: Mapping[str, int]
    sizes: Mapping[str, int]
    turn: int
    groups: tuple[_Group, ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, nn.Parameter]], turn: int = 0, *, rank: int = 0) -> Self | None:
        """Sample the weights ``named`` that have a gradient now; None if this rank counts none.

        ``turn``: number of the step; different steps sample different elements. Of a DTensor each rank counts its
        shard, and the lowest of the ranks that hold the same shard. A whole weight counts on ``rank`` 0.
        """
        layers, weights = list[str](), list[Tensor]()
        held, sizes = dict[str, int](), dict[str, int]()
        known: dict[tuple[object, ...], list[int]] = {}
        for name, weight in named:
            if not _measurable(weight):
                continue
            layer, part, size = layer_of(name), _counted(weight, rank), weight.numel()
            here = 0 if part is None else part.numel()
            sizes[layer] = sizes.get(layer, 0) + size
            held[layer] = held.get(layer, 0) + here
            if part is not None and here:
                known.setdefault((part.device, part.dtype, min(SAMPLED, here)), []).append(len(weights))
                layers.append(layer)
                weights.append(part)
        if not weights:
            return None
        groups = []
        for members in known.values():
            rows = tuple([sample_at(weights[i], turn) for i in members])
            groups.append(_Group(tuple(members), rows, torch.stack(rows).float()))
        return cls(tuple(layers), tuple(weights), held, sizes, turn, tuple(groups))

    def stats(self) -> Stats:
        """Return statistics of the step that was taken since the sample, without waiting for the device.

        ``update_layer/<layer>``: norm of the change over the norm of the weights before. ``optim/update_ratio``: the
        same of all layers together. ``optim/update_norm``: norm of the change. ``optim/update_head``: ratio of the
        layer that computes the logits over the median ratio of the other layers. If weights are sharded, these have a
        value once the statistics of all ranks are merged.
        """
        names, device = list(self.sizes), self.weights[0].device
        places: dict[str, list[int]] = {name: [] for name in names}
        for place, i in enumerate(i for group in self.groups for i in group.members):
            places[self.layers[i]].append(place)
        squares = torch.cat([self._squares(group, device) for group in self.groups], 1)
        layers = row_sums(squares, tuple(map(tuple, places.values())))
        held, size = sum(self.held.values()), sum(self.sizes.values())
        updated = [UPDATE_PREFIX + name for name in names]
        stats: Stats = {**RelativeChange.each(updated, layers.unbind(1), self.held.values(), self.sizes.values())}
        stats["optim/update_norm"] = Norm.of(layers[0].sum(), held, size)
        stats["optim/update_ratio"] = RelativeChange.of(layers.sum(1), held, size)
        head = [i for i, name in enumerate(names) if name.rpartition(".")[2] in HEADS]
        if len(head) == 1 and len(names) > FEWEST_LAYERS:
            first = torch.cat([layers[:, head[0] : head[0] + 1], layers[:, : head[0]], layers[:, head[0] + 1 :]], 1)
            stats["optim/update_head"] = HeadChange.of(first, held, size)
        return stats

    def _squares(self, group: _Group, device: torch.device) -> Tensor:
        """Squared norms of the change and of the weights before, of each tensor of a group: (2, M)."""
        count = group.before.shape[1]
        scale = _scales(tuple(self.weights[i].numel() / count for i in group.members), device)
        weights = ((self.weights[i], row) for i, row in zip(group.members, group.rows, strict=True))
        # The samples of contiguous weights are views, which show the weights as the step left them.
        rows = [row if weight.is_contiguous() else sample_at(weight, self.turn) for weight, row in weights]
        change = torch.stack(rows).float() - group.before
        return torch.stack([change, group.before]).square().sum(-1).to(device) * scale


@lru_cache(maxsize=64)
def _scales(scales: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(scales, device="cpu").to(device, non_blocking=True)


def _measurable(weight: Tensor) -> bool:
    """Return True if ``weight`` is trained, and its elements or a shard of them can be read here."""
    if weight.grad is None:
        return False
    held = ordinary(weight) or not any(hasattr(weight, x) for x in ("ds_id", "_fsdp_flattened", "_is_flat_param"))
    return held and weight.numel() > 0 and weight.dtype in COMPARED and not weight.is_meta


def _counted(weight: Tensor, rank: int) -> Tensor | None:
    """Return the elements of ``weight`` that count on this ``rank``; None if another rank counts them."""
    whole = ordinary(weight) or not hasattr(weight, "to_local")
    part = (weight.detach() if rank == 0 else None) if whole else shard_of(weight)
    return None if part is None or freed(part) else part


def _ratio(change: Tensor, norm: Tensor) -> Tensor:
    """Root of ``change / norm``; 0 where nothing moved, also from nothing."""
    return torch.where(change > 0, (change / norm).sqrt(), change)
