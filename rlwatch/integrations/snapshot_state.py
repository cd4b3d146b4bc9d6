"""Copying and restoring the state of training: weights, optimizer, scheduler, loss scale and random generators.

A copy holds this rank's state: for a sharded tensor (FSDP2) its shard. Everything is checked before the first tensor is
written, and the old state is written back if a write fails, so that no model is restored partially.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlwatch.error_boundary import ErrorBoundary, Reported
from rlwatch.errors import RLWatchError
from rlwatch.gradloc.passes import RandomState
from rlwatch.integrations import megatron
from rlwatch.integrations.weights import inner_optimizer, inner_scheduler, local, named_tensors
from rlwatch.tensors.megatron import divided

INSTEAD = "use the trainer's own checkpoints instead"
PLAIN = (bool, int, float, str, type(None))
"""Types of values in an optimizer's state, other than tensors, that can be copied and written to a file."""
PER_PARAMETER = "optimizer/{optimizer}/{group}/{parameter}/"


@dataclass(frozen=True, slots=True)
class Holdings:
    """The trainer's current objects whose state a snapshot copies: model, optimizers, schedulers and loss scaler."""

    model: nn.Module
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    scaler: Any = None

    def obstacle(self) -> str | None:
        """Return the reason why the state of these objects cannot be copied and restored in place.

        The result is None if that is possible.
        """
        if divided(self.model) or any(megatron.steps(one) for one in self.optimizers):
            return f"Megatron cuts the model and its optimizer over ranks; {INSTEAD}"
        for name, parameter in self.model.named_parameters():
            if hasattr(parameter, "ds_id") or parameter.is_meta:
                return f"{name!r} is held elsewhere (offloaded, or partitioned by DeepSpeed ZeRO); {INSTEAD}"
        for one in map(inner_optimizer, self.optimizers):
            if not isinstance(one, Optimizer):
                kind = f"{type(one).__module__}.{type(one).__name__}"
                return f"the optimizer is a {kind}, whose state rlwatch cannot copy; {INSTEAD}"
        for one in map(inner_scheduler, self.schedulers):
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                return f"the scheduler is a {type(one).__name__} without state_dict and load_state_dict; {INSTEAD}"
        return None

    def inner_optimizers(self) -> list[Optimizer]:
        """Return the torch optimizers inside the wrappers of accelerate and others.

        Raises ``RLWatchError`` with the reason if the state cannot be copied and restored in place.
        """
        reason = self.obstacle()
        if reason is not None:
            raise RLWatchError(reason)
        return [inner_optimizer(one) for one in self.optimizers]


@dataclass(slots=True)
class StateCopy:
    """A copy of the training state at one moment.

    Attributes
    ----------
    tensors
        Name -> tensor in this process's memory: ``model/NAME``, ``optimizer/I/GROUP/PARAMETER/KEY``.
    plain
        Everything else, in plain values: parameter groups, schedulers, loss scale, random generators.
    places
        Name of a tensor -> device of the original tensor.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in the copied tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def finite(self) -> bool:
        """Return True if every copied weight is finite."""
        weights = (tensor for name, tensor in self.tensors.items() if name.startswith("model/"))
        return all(bool(tensor.isfinite().all()) for tensor in weights if tensor.is_floating_point())


def tensors_of(held: Holdings) -> dict[str, Tensor]:
    """Return name -> tensor of this rank, for all tensors of ``held`` that a snapshot copies: trained parameters, saved
    buffers, optimizer state.

    The tensors share memory with training. Raises ``RLWatchError`` if the state cannot be copied.
    """
    optimizers = held.inner_optimizers()
    found = {f"model/{name}": local(tensor).detach() for name, tensor in named_tensors(held.model) if _trained(tensor)}
    for prefix, _parameter, state in _states(optimizers):
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[prefix + key] = local(value).detach()
            elif not isinstance(value, PLAIN):
                raise RLWatchError(f"the optimizer keeps a {type(value).__name__} as {key!r}; {INSTEAD}")
    return found


def _trained(tensor: Tensor) -> bool:
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def _states(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Tensor, Mapping[str, Any]]]:
    for at, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                prefix = PER_PARAMETER.format(optimizer=at, group=number, parameter=place)
                yield prefix, parameter, optimizer.state.get(parameter, {})


def plain_of(held: Holdings) -> dict[str, Any]:
    """Return the part of the training state that is not in tensors, as a deep copy in plain values.

    ``held``: the trainer's objects. It holds the settings of parameter groups, numbers in the optimizer's state,
    schedulers, loss scale and random generators. Raises ``RLWatchError`` if the state cannot be copied.
    """
    optimizers = held.inner_optimizers()
    groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in optimizers]
    numbers = {
        prefix + key: value
        for prefix, _, state in _states(optimizers)
        for key, value in state.items()
        if not isinstance(value, Tensor)
    }
    found = {
        "groups": groups,
        "sizes": [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers],
        "numbers": numbers,
        "stateful": [prefix for prefix, _, state in _states(optimizers) if state],
        "schedulers": [inner_scheduler(one).state_dict() for one in held.schedulers],
        "scaler": held.scaler.state_dict() if _scales(held.scaler) else None,
        "random": _random_now(),
    }
    return copy.deepcopy(found)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _scales(scaler: Any) -> bool:
    return scaler is not None and bool(scaler.is_enabled())


# Putting a copy back.


def check_fits(held: Holdings, kept: StateCopy) -> None:
    """Raise ``RLWatchError`` with the reason if the copy ``kept`` cannot be restored into the objects ``held``.

    Changes nothing.
    """
    optimizers = held.inner_optimizers()
    now = {name: tensor for name, tensor in tensors_of(held).items() if name.startswith("model/")}
    then = {name: tensor for name, tensor in kept.tensors.items() if name.startswith("model/")}
    odd = sorted(now.keys() ^ then.keys())
    if odd:
        where = "the model now" if odd[0] in now else "the snapshot"
        raise RLWatchError(f"the snapshot does not fit: {odd[0].removeprefix('model/')!r} is in {where} only")
    for name, tensor in now.items():
        _same_kind(name, tensor, then[name])
    sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
    if sizes != kept.plain["sizes"]:
        raise RLWatchError(
            f"the snapshot does not fit: the optimizer's groups hold {sizes} parameters, {kept.plain['sizes']} then"
        )
    for prefix, _parameter, state in _states(optimizers):
        for key, value in state.items():
            if isinstance(value, Tensor) and prefix + key in kept.tensors:
                _same_kind(prefix + key, local(value), kept.tensors[prefix + key])
    if len(held.schedulers) != len(kept.plain["schedulers"]):
        raise RLWatchError("the snapshot does not fit: it holds another number of schedulers")
    if _scales(held.scaler) != (kept.plain["scaler"] is not None):
        raise RLWatchError("the snapshot does not fit: the loss scale of float16 is in one only")


def _same_kind(name: str, now: Tensor, then: Tensor) -> None:
    if now.shape != then.shape or now.dtype != then.dtype:
        what = f"{tuple(now.shape)} {now.dtype} now, {tuple(then.shape)} {then.dtype} then"
        raise RLWatchError(f"the snapshot does not fit: {name.removeprefix('model/')!r} is {what}")


def put_back(held: Holdings, kept: StateCopy, before: StateCopy, *, generators: bool) -> None:
    """Restore the state ``kept`` into the objects ``held``, bit for bit.

    If that fails, restore ``before`` and raise the error. ``generators``: restore the random generators, too. Call
    :func:`check_fits` before.
    """
    with Reported(lambda _error: _write(held, before, generators=generators)):
        _write(held, kept, generators=generators)


def _write(held: Holdings, kept: StateCopy, *, generators: bool) -> None:
    optimizers = held.inner_optimizers()
    with torch.no_grad():
        for name, tensor in named_tensors(held.model):
            if f"model/{name}" in kept.tensors:
                local(tensor).copy_(kept.tensors[f"model/{name}"])
        entries, stateful = _entries(kept), set(kept.plain["stateful"])
        for prefix, parameter, _state in list(_states(optimizers)):
            optimizer = optimizers[int(prefix.split("/")[1])]
            if prefix in stateful:
                _write_state(optimizer, parameter, kept, entries.get(prefix, {}))
            else:
                optimizer.state.pop(parameter, None)
        for optimizer, groups in zip(optimizers, kept.plain["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                _write_settings(group, settings)
    for scheduler, state in zip(held.schedulers, kept.plain["schedulers"], strict=True):
        inner_scheduler(scheduler).load_state_dict(copy.deepcopy(state))
    if kept.plain["scaler"] is not None:
        held.scaler.load_state_dict(dict(kept.plain["scaler"]))
    if generators:
        _random_restored(kept.plain["random"])


def _entries(kept: StateCopy) -> dict[str, dict[str, str]]:
    """Return the optimizer's entries of a copy: prefix of a parameter -> key -> name."""
    found: dict[str, dict[str, str]] = {}
    for name in (*kept.tensors, *kept.plain["numbers"]):
        if name.startswith("optimizer/"):
            prefix, _, key = name.rpartition("/")
            found.setdefault(f"{prefix}/", {})[key] = name
    return found


def _write_state(optimizer: Optimizer, parameter: Tensor, kept: StateCopy, wanted: Mapping[str, str]) -> None:
    """Write the state of one parameter into the existing tensors, because a captured step reads those objects."""
    state = optimizer.state[parameter]
    for key in [key for key in state if key not in wanted]:
        del state[key]
    for key, name in wanted.items():
        if name in kept.plain["numbers"]:
            state[key] = kept.plain["numbers"][name]
        elif isinstance(state.get(key), Tensor):
            local(state[key]).copy_(kept.tensors[name])
        else:
            state[key] = _like(parameter, kept.tensors[name], kept.places[name])


def _like(parameter: Tensor, kept: Tensor, place: str) -> Tensor:
    """Return a new tensor of an optimizer's state; a shard like the parameter's, if that is sharded."""
    made = kept.to(place, copy=True)
    if local(parameter) is parameter or made.shape != local(parameter).shape:
        return made
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return DTensor.from_local(made, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _write_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for name in [name for name in group if name not in settings and name != "params"]:
        del group[name]
    for name, value in settings.items():
        if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
            group[name].copy_(value)
        else:
            group[name] = copy.deepcopy(value)


# The random generators of this process.


def _random_now() -> dict[str, Any]:
    """Return the states of the random generators, without drawing a number or waiting for a device."""
    torchs = RandomState.now()
    name, keys, *rest = np.random.get_state()
    return {
        "cpu": torchs.cpu,
        "devices": list(torchs.devices),
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def _random_restored(states: Mapping[str, Any]) -> None:
    RandomState(states["cpu"], states["devices"]).restore()
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))


# Copying while training continues.


@dataclass(slots=True)
class Fence:
    """Events that mark the end of copies which a device is still making."""

    events: list[Any] = field(default_factory=list)

    def hold_back(self) -> None:
        """Make the device's later work wait for the copies, without blocking this thread."""
        for device, event in self.events:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Block this thread until the copies are complete."""
        for _device, event in self.events:
            event.synchronize()
        self.events = []


class SideCopier:
    """Copier of tensors into host memory: on CUDA into pinned memory, on a stream of its own.

    Training continues meanwhile. Only the next optimizer step waits, on the device, until its old values are copied.
    Buffers that :meth:`give_back` returns are reused. ``error_boundary`` is the error boundary around the hook on the
    optimizer.
    """

    def __init__(self, error_boundary: ErrorBoundary | None = None) -> None:
        self._error_boundary = error_boundary or ErrorBoundary()
        self._spare: list[dict[str, Tensor]] = []
        self._streams: dict[torch.device, Any] = {}
        self._hooked: list[Optimizer] = []
        self._open = Fence()

    def copy(self, held: Holdings) -> tuple[StateCopy, Fence]:
        """Return a copy of the current state of ``held``, and the fence to wait for before its tensors are read.

        Raises ``RLWatchError`` if the state cannot be copied.
        """
        live, fence = tensors_of(held), Fence()
        buffers = self._spare.pop() if self._spare else {}
        kept = StateCopy({}, plain_of(held), {name: str(tensor.device) for name, tensor in live.items()})
        with torch.no_grad():
            for device, names in _by_device(live).items():
                if device.type == "cuda":
                    fence.events.append((device, self._beside(device, names, live, buffers, kept)))
                else:
                    for name in names:
                        kept.tensors[name] = _buffer(buffers, name, live[name], pinned=False).copy_(live[name])
        if fence.events:
            self._open = fence
            self._watch(held.inner_optimizers())
        return kept, fence

    def give_back(self, kept: StateCopy) -> None:
        """Reuse the buffers of ``kept`` for a later copy. Its tensors must not be read any more."""
        if not self._spare:
            self._spare.append(kept.tensors)

    @property
    def spare_bytes(self) -> int:
        """Return the number of bytes in buffers that wait for reuse."""
        return sum(tensor.nbytes for buffers in self._spare for tensor in buffers.values())

    def _beside(
        self,
        device: torch.device,
        names: Sequence[str],
        live: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        kept: StateCopy,
    ) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side = self._streams[device]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for name in names:
                kept.tensors[name] = _buffer(buffers, name, live[name], pinned=True)
                kept.tensors[name].copy_(live[name], non_blocking=True)
                live[name].record_stream(side)
            return side.record_event()

    def _watch(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            if optimizer not in self._hooked:
                optimizer.register_step_pre_hook(
                    self._error_boundary.hook("snapshot", lambda *_: self._open.hold_back())
                )
                self._hooked.append(optimizer)


def _by_device(tensors: Mapping[str, Tensor]) -> dict[torch.device, list[str]]:
    found: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tensor.device, []).append(name)
    return found


def _buffer(buffers: Mapping[str, Tensor], name: str, like: Tensor, *, pinned: bool) -> Tensor:
    known = buffers.get(name)
    if known is not None and known.shape == like.shape and known.dtype == like.dtype:
        return known
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)


# Snapshots on disk: one file each, written atomically, with its SHA-256 in a second file.


FORMAT = 1
CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A snapshot on disk: its path, the SHA-256 digest that its bytes must have, and the step after which it was
    taken.
    """

    path: Path
    sha256: str
    step: int

    def remove(self) -> None:
        """Delete the snapshot file and the file with its digest. It is no error if they are gone."""
        self.path.unlink(missing_ok=True)
        _beside(self.path).unlink(missing_ok=True)


def writable(kept: StateCopy) -> bool:
    """Return True if the plain values of ``kept`` could be read from a file without executing code in that file."""
    written = io.BytesIO()
    torch.save(kept.plain, written)
    written.seek(0)
    try:
        torch.load(written, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def write_snapshot(path: Path, kept: StateCopy, step: int) -> SnapshotFile:
    """Write ``kept``, the state after ``step``, to ``path`` atomically, with its SHA-256 in a second file.

    Raises ``OSError``, for instance for a full disk, and then leaves no file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            body = {"format": FORMAT, "step": step, "tensors": kept.tensors, "plain": kept.plain, "places": kept.places}
            torch.save(body, file)
            file.flush()
            os.fsync(file.fileno())
        made = SnapshotFile(path, _sha256(part), step)
        digest = part.with_suffix(".json")
        digest.write_text(json.dumps({"format": FORMAT, "step": step, "sha256": made.sha256}), encoding="utf-8")
        digest.replace(_beside(path))
        part.replace(path)
    except RuntimeError as error:  # raised by torch's writer on a full disk
        raise OSError(str(error).partition("\n")[0]) from None
    finally:
        part.unlink(missing_ok=True)
        part.with_suffix(".json").unlink(missing_ok=True)
    return made


def read_snapshot(file: SnapshotFile) -> StateCopy:
    """Read a snapshot from disk after comparing its digest.

    Raises ``RLWatchError`` if the file is missing, cannot be read, or differs from what was written.
    """
    try:
        found = _sha256(file.path)
        if found != file.sha256:
            raise RLWatchError(
                f"the snapshot of step {file.step} is damaged: {file.path} has SHA-256 {found[:12]}..., "
                f"{file.sha256[:12]}... when it was written"
            )
        body = cast("dict[str, Any]", torch.load(file.path, map_location="cpu", weights_only=True))
    except OSError as error:
        raise RLWatchError(f"the snapshot of step {file.step} cannot be read: {error}") from None
    return StateCopy(body["tensors"], body["plain"], body["places"])


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
