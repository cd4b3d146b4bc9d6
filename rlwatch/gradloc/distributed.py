"""Ranks that localise one step together, and access to models that FSDP2 or DeepSpeed shards, or DDP replicates."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rlwatch.tensors.gradnorm import partitioned

_groups = count()
"""Counter of process groups: every rank creates its groups in the same order."""


class World(Protocol):
    """Interface to ranks that all localise the same step together.

    Gradients are means over ranks: c = a / size * derivative. Every method except :meth:`leave` is a collective: all
    ranks call it, in the same order.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """Return the number of this rank, from 0."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum of ``values`` over the ranks, on every rank."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of ``values`` over the ranks, on every rank."""
        ...

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return ``values`` of each rank (of equal shapes), ordered by rank, on every rank."""
        ...

    def leave(self) -> None:
        """Stop taking part: a rank that waits for this one gets an exception instead of an answer. Not a collective."""
        ...


class Alone:
    """The world of a run with a single rank; no method communicates."""

    size = 1
    rank = 0

    def sum(self, values: Tensor) -> Tensor:
        """Return ``values`` unchanged."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """Return ``values`` unchanged."""
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return a list with ``values``."""
        return [values]

    def leave(self) -> None:
        """Do nothing, because no other rank waits."""


class Processes:
    """The ranks of ``torch.distributed``, connected through a separate process group on the CPU.

    Creating one is a collective. ``torch.distributed`` does not know of the group: neither the names of the trainer's
    own groups nor their end depend on it. Little data is sent: scalars, and the numbers of some candidates. If a rank
    fails, leaves or is gone, the others get a ``RuntimeError`` at once, or after ``timeout_s`` seconds if it only does
    not arrive.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()
        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore(f"rlwatch/localising/{next(_groups)}", c10d._get_default_store())  # noqa: SLF001
        self._group: Any = c10d.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=timeout_s))

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum of ``values`` over the ranks. Raises ``RuntimeError`` if a rank is gone."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of ``values`` over the ranks. Raises ``RuntimeError`` if a rank is gone."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return ``values`` of each rank, ordered by rank. Raises ``RuntimeError`` if a rank is gone."""
        here = values.detach().cpu().contiguous()
        received = [torch.empty_like(here) for _ in range(self.size)]
        self._joined().allgather([received], [here]).wait()
        return [one.to(values.device) for one in received]

    def leave(self) -> None:
        """Close the connections to the other ranks, which end with the last reference to the group."""
        self._group = None

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        reduced, options = values.detach().cpu().clone(), dist.AllreduceOptions()
        options.reduceOp = how
        self._joined().allreduce([reduced], options).wait()
        return reduced.to(values.device)

    def _joined(self) -> Any:
        if self._group is None:
            raise RuntimeError("this rank has left the others")
        return self._group


def gather_bytes(world: World, data: bytes) -> list[bytes]:
    """Return ``data`` of each rank, ordered by rank, on every rank. A collective."""
    if world.size == 1:
        return [data]
    lengths = [int(n) for n in world.gather(torch.tensor([len(data)], device="cpu"))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    return [one[:length].numpy().tobytes() for one, length in zip(world.gather(padded), lengths, strict=True)]


def gather_plain(world: World, value: Any) -> list[Any]:
    """Return ``value`` of each rank, ordered by rank, on every rank. A collective.

    ``value`` consists of JSON values; NaN and Inf are preserved.
    """
    return [json.loads(text) for text in gather_bytes(world, json.dumps(value).encode())]


def differing_weights(model: nn.Module, world: World) -> str:
    """Return a description of the rank and parameter whose bits differ from those of most ranks; empty if none.

    A collective. Data-parallel ranks hold the same bits. Sharded parameters are not compared. If there are two ranks,
    it is unknown which one is wrong.
    """
    if world.size == 1 or sharded_modules(model):
        return ""
    named = list(model.named_parameters())
    here = torch.tensor([_checksum(p) for _, p in named], dtype=torch.int64, device="cpu")
    every = torch.stack(world.gather(here))
    usual = every.mode(0).values
    wrong = (every != usual).nonzero().tolist()
    if not wrong:
        return ""
    rank, at = wrong[0]
    which = f"rank {rank}" if world.size > 2 else "one of the two ranks"
    return f"the weights of {which} differ from those of the others in {named[at][0]}"


def _checksum(parameter: Tensor) -> int:
    """Return the sum of the bits, read as integers weighted with their place, in 63 bits.

    A flip of any bit changes the sum.
    """
    values = parameter.detach().contiguous().flatten()
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.view(kinds[values.element_size()]).to(torch.int64)
    places = torch.arange(bits.numel(), device=bits.device) % 65521 + 1
    return int((bits * places).sum())


# Models that FSDP2 (``fully_shard``) shards: precautions for reading them.


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 gathers and shards itself, outermost first; empty if it is not in use."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module) -> None:
    """Make every FSDP2 module hold its shards, where gradients are; FSDP2 gathers them again when it needs them."""
    for module in sharded_modules(model):
        module.reshard()


def recover(model: nn.Module) -> None:
    """Reset FSDP2's state after a forward pass that failed half-way (torch 2.13; older versions cannot)."""
    for module in sharded_modules(model):
        if hasattr(module, "reset_iter_state"):
            with suppress(RuntimeError):  # not a root: the root's reset reaches it
                module.reset_iter_state()


def whole_tensors(sharded: Sequence[Any]) -> list[Tensor]:
    """Return the DTensors ``sharded`` as whole tensors, on every rank, bit for bit, with one collective for all of
    equal layout.

    A collective: the ranks of their mesh call it with the same tensors, in the same order. ``DTensor.full_tensor`` is a
    collective for each tensor, and gloo of torch 2.13 crashes if there are many: its two threads write the name of
    their operation into one string, unlocked, and a name of more than 15 characters (``ALLGATHER_COALESCED``) lies on
    the heap, which is freed twice. It is used only for layouts other than equal parts along one dimension of the mesh.
    """
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(sharded):
        alike.setdefault(_layout_of(tensor) or i, []).append(i)
    found: dict[int, Tensor] = {}
    for layout, members in alike.items():
        if isinstance(layout, int):
            found[layout] = sharded[layout].full_tensor()
        else:
            found.update(zip(members, _gathered([sharded[i] for i in members], *layout[:2]), strict=True))
    return [found[i] for i in range(len(sharded))]


def _layout_of(tensor: Any) -> tuple[Any, int, torch.dtype] | None:
    """Return mesh, sharded mesh dimension and dtype of ``tensor``; None unless it is sharded in exactly one."""
    from torch.distributed.tensor import Replicate, Shard

    cut = [i for i, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    if len(cut) != 1 or type(tensor.placements[cut[0]]) is not Shard:
        return None
    return tensor.device_mesh, cut[0], tensor.dtype


def _gathered(sharded: Sequence[Any], mesh: Any, cut: int) -> list[Tensor]:
    """Gather the parts of all ranks at once, each filled up to the length of the longest."""
    ranks, group = mesh.size(cut), mesh.get_group(cut)
    dims = [int(tensor.placements[cut].dim) for tensor in sharded]
    longest = [-(-tensor.shape[dim] // ranks) for tensor, dim in zip(sharded, dims, strict=True)]
    filled = []
    for tensor, dim, length in zip(sharded, dims, longest, strict=True):
        part = tensor.to_local().detach().movedim(dim, 0)
        blank = part.new_zeros(length - part.shape[0], *part.shape[1:])
        filled.append(torch.cat((part, blank)).flatten())
    here = torch.cat(filled)
    received = [torch.empty_like(here) for _ in range(ranks)]
    dist.all_gather(received, here, group=group)
    sizes = [one.numel() for one in filled]
    whole = []
    for tensor, dim, length, *parts in zip(
        sharded, dims, longest, *(torch.split(one, sizes) for one in received), strict=True
    ):
        rest = [n for i, n in enumerate(tensor.shape) if i != dim]
        together = torch.cat([part.view(length, *rest) for part in parts])
        whole.append(together[: tensor.shape[dim]].movedim(0, dim).contiguous())
    return whole


class Gathered:
    """Whole gradients of the modules that FSDP2 has gathered for their forward pass, for the duration of that pass.

    Gradients (by the ``id`` of their parameter) are gathered module by module where FSDP2 gathers weights, so that all
    ranks do it in the same order if their forward passes are the same. Inputs are not cast to the policy's type inside:
    passes see float32.
    """

    def __init__(self, model: nn.Module, gradients: Mapping[int, Tensor]) -> None:
        self._model = model
        self._gradients = {key: g for key, g in gradients.items() if hasattr(g, "full_tensor")}
        self._whole: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._policies: list[tuple[Any, Any]] = []

    def like(self, weight: Tensor, key: int, gradient: Tensor) -> Tensor:
        """Return ``gradient`` in the form that ``weight`` has now: whole, or sharded.

        ``key`` is the ``id`` of its parameter. Raises ``LookupError`` if a weight was read outside the module that
        gathers it.
        """
        if hasattr(gradient, "full_tensor") and not hasattr(weight, "full_tensor"):
            if key not in self._whole:
                raise LookupError("a weight was read outside the module that gathers it")
            return self._whole[key]
        return gradient

    def __enter__(self) -> Self:
        groups = _units_of(sharded_modules(self._model))
        with ExitStack() as undo:
            undo.push(self.__exit__)
            for units, keys in zip(groups, _owned(groups), strict=True):
                self._keep_input_type(units[0])
                own = [key for key in keys if key in self._gradients]
                # In a group of modules that is gathered together, the last may never be called: its weight is read
                # outside (a fused head), and the outermost module is the one that ends.
                last = units[0] if len(units) == 1 else groups[0][0]
                self._hooks += [unit.register_forward_pre_hook(partial(self._gather, own)) for unit in units]
                self._hooks.append(last.register_forward_hook(partial(self._drop, own), always_call=True))
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
        missing = [key for key in keys if key not in self._whole]
        self._whole.update(zip(missing, whole_tensors([self._gradients[key] for key in missing]), strict=True))

    def _drop(self, keys: list[int], *_: object) -> None:
        for key in keys:
            self._whole.pop(key, None)


def _units_of(units: list[Any]) -> list[list[Any]]:
    """Return modules that FSDP2 gathers together (``fully_shard`` of a list): accelerate's embedding, norm and head."""
    groups: dict[int, list[Any]] = {}
    for unit in units:
        groups.setdefault(id(unit._get_fsdp_state()), []).append(unit)  # noqa: SLF001  (FSDP2 has no public way)
    return list(groups.values())


def _owned(groups: list[list[Any]]) -> list[list[int]]:
    """Return the parameters that each of ``groups`` gathers, without those of units inside it; in model order."""
    place = {id(unit): i for i, units in enumerate(groups) for unit in units}
    owner = {id(p): i for i, units in enumerate(groups) for unit in units for p in unit.parameters()}
    for i, units in enumerate(groups):  # a unit inside another one gathers what it has itself
        for unit in units:
            deeper = [one for one in unit.modules() if place.get(id(one), i) != i]
            owner.update((id(p), place[id(one)]) for one in deeper for p in one.parameters())
    return [[key for key, one in owner.items() if one == i] for i in range(len(groups))]


# Gradients that DeepSpeed partitions over the ranks (ZeRO-1, -2): precautions for reading them.


@contextmanager
def whole_gradients(model: nn.Module) -> Iterator[None]:
    """Put gradients that DeepSpeed has partitioned over the ranks whole into ``.grad`` during the ``with`` block.

    Afterwards ``.grad`` is None again. A collective over DeepSpeed's own group; enter it between the backward pass and
    the engine's step. It takes memory for one set of gradients. Other models are not affected.
    """
    parted: list[Any] = [p for p in model.parameters() if partitioned(p)]
    try:
        for p in parted:
            p.grad = p.get_full_hp_grad().to(p.dtype)
        yield
    finally:
        for p in parted:
            p.grad = None


# Models that DDP replicates on every rank: precautions for running them.


@contextmanager
def unsynchronised() -> Iterator[None]:
    """Run forward passes through DDP's wrappers without synchronisation, on this thread, during the ``with`` block.

    A wrapper sends buffers before a forward pass, agrees on new buckets after the first backward pass, and expects
    gradients of every parameter afterwards. Ranks with other passes, and the next step, would wait forever. A forward
    pass may contain a wrapper that is not inside the given model, so all wrappers are affected.
    """
    forward, here = DistributedDataParallel.forward, threading.get_ident()

    def bare(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        if self.device_ids:
            from torch.distributed.utils import _to_kwargs

            device = torch.device(self.device_type, self.device_ids[0])
            (args,), (kwargs,) = _to_kwargs(args, kwargs, device, False)
        return self.module(*args, **kwargs)

    DistributedDataParallel.forward = bare  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.forward = forward  # type: ignore[method-assign]
