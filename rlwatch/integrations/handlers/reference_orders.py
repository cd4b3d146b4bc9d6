"""Writing a reference down and taking it up again, as work that every rank does or none."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.reference import Anchored
from rlwatch.integrations.handlers.reference_files import DIRECTORY, WEIGHTS, Facts, verify, write
from rlwatch.integrations.handlers.shards import copy_into, whole
from rlwatch.integrations.handlers.unwrapping import unwrapped
from rlwatch.integrations.handlers.weights import REF, adapter_of, add_reference_adapter, named_tensors
from rlwatch.records import JSON, Command

Find = Callable[[], Anchored]


class WriteDown:
    """Gathers the reference, shard by shard, and writes it where this process ``writes``."""

    kind: str = "keep-reference"

    def __init__(self, find: Find, writes: Callable[[], bool]) -> None:
        self._find = find
        self._writes = writes
        self.written: Facts | None = None

    def command(self, parent: Path, facts: Facts) -> Command:
        """The order to write into ``parent``."""
        return _order(self.kind, parent, facts)

    def check(self, command: Command) -> None:  # noqa: ARG002  (the signature of the port)
        """Raise ``RLWatchError`` if there is no reference here."""
        if not _tensors(self._find()):
            raise RLWatchError("there is no reference to keep")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Write; a full disk is a refusal."""
        gathered: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, tensor in _tensors(self._find()).items():
                full = whole(tensor.detach())
                if self._writes():
                    gathered[name] = full.to("cpu", copy=True).contiguous()
        self.written = replace(_facts(command), tensors=len(gathered))
        if self._writes():
            try:
                self.written = write(Path(command.args["path"]), self.written, gathered)
            except OSError as error:
                raise RLWatchError(f"{type(error).__name__}: {error}") from error
        return {}


class TakeUp:
    """Reads a written reference into the one the trainer built."""

    kind: str = "restore-reference"

    def __init__(self, find: Find, writes: Callable[[], bool]) -> None:
        self._find = find
        self._verifies = writes
        self.facts: Facts | None = None

    def command(self, checkpoint: Path, facts: Facts) -> Command:
        """The order to take up what ``checkpoint`` holds."""
        return _order(self.kind, checkpoint, facts)

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if the file is not there, damaged, or of another model."""
        anchored, checkpoint, facts = self._find(), Path(command.args["path"]), _facts(command)
        if self._verifies():
            verify(checkpoint, facts)
        with _opened(checkpoint) as file:
            kept = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no mapping)
        here = {name: tuple(tensor.shape) for name, tensor in _tensors(anchored).items()}
        if anchored.adapted and not here:
            adapter_of(unwrapped(anchored.policy))
        elif kept != here:
            odd = sorted(name for name in kept.keys() | here.keys() if kept.get(name) != here.get(name))
            raise RLWatchError(f"the kept reference is of another model: {odd[0]!r} differs")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Copy every tensor into its place, in the dtype, on the device and in the sharding it has there."""
        anchored, self.facts = self._find(), _facts(command)
        if anchored.adapted and not _tensors(anchored):
            policy: Any = unwrapped(anchored.policy)
            add_reference_adapter(policy, adapter_of(policy))
        with _opened(Path(command.args["path"])) as file, torch.no_grad():
            for name, tensor in _tensors(anchored).items():
                copy_into(tensor, file.get_tensor(name))
        facts = self.facts
        return {
            "reset_step": facts.step,
            "fingerprint": facts.fingerprint,
            "tensors": facts.tensors,
            "id": facts.command,
        }


def _order(kind: str, path: Path, facts: Facts) -> Command:
    args = {"path": str(path), "facts": asdict(facts)}
    return Command(uuid.uuid4().hex[:16], "", kind, args, requested_by="rlwatch")


def _facts(command: Command) -> Facts:
    return Facts(**command.args["facts"])


def _tensors(anchored: Anchored) -> dict[str, Tensor]:
    """The reference's tensors by name; of an adapted policy those of the adapter ``ref``, which may be none."""
    if anchored.reference is not None:
        return dict(named_tensors(anchored.reference))
    return {name: tensor for name, tensor in named_tensors(anchored.policy) if f".{REF}." in f"{name}."}


def _opened(checkpoint: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(checkpoint / DIRECTORY / WEIGHTS, framework="pt")
    except (OSError, SafetensorError) as error:
        raise RLWatchError(f"{checkpoint / DIRECTORY / WEIGHTS} cannot be read ({error})") from None
