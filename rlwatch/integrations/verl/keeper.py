"""The reference on disk: verl saves the actor (and critic) only, so a reset would be lost with the process.

Each rank writes its own shards beside the actor's, and reads them only into the same sharding.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.weights import fingerprint
from rlwatch.integrations.verl.adapter import FrozenAdapter
from rlwatch.integrations.verl.anchor import Anchor, synchronized

FOLDER = "rlwatch_reference"
"""Inside the actor's directory of a checkpoint, so that verl removes both together."""


class Keeper:
    """Saves and restores one rank's part of the reference."""

    def __init__(self, anchor: Anchor, *, rank: int, world_size: int) -> None:
        self._anchor = anchor
        self._file = f"world_size_{world_size}_rank_{rank}.pt"

    def save(self, directory: str) -> str:
        """Write it, whole or not at all; returns the path. Raises ``RLWatchError`` if there is none."""
        tensors = self._anchor.tensors()
        if not tensors:
            raise RLWatchError("the reference was never reset")
        path = Path(directory) / self._file
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        try:
            torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return str(path)

    def forget(self, directory: str) -> None:
        """Remove it, if it is there; the directory too, once it is empty."""
        path = Path(directory) / self._file
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()

    def find(self, directory: str) -> str | None:
        """The fingerprint of what is there, or None. Raises ``RLWatchError`` for what does not fit this rank."""
        if not (Path(directory) / self._file).exists():
            if any(Path(directory).glob("*.pt")):
                raise RLWatchError(f"{directory} holds a reference of another number of ranks: no {self._file}")
            return None
        return fingerprint(self._fitting(directory).values())

    def restore(self, directory: str) -> dict[str, Any]:
        """Put it back; returns what was restored."""
        saved = self._fitting(directory)
        if self._anchor.lora:
            FrozenAdapter.of(self._anchor.policy).hold(saved)
        else:
            with torch.no_grad():
                for name, tensor in self._anchor.tensors().items():
                    tensor.copy_(saved[name])
        return {"tensors": len(saved), "fingerprint": fingerprint(saved.values())}

    def _fitting(self, directory: str) -> dict[str, Tensor]:
        saved: dict[str, Tensor] = torch.load(Path(directory) / self._file, map_location="cpu", weights_only=True)
        held = self._holders()
        odd = sorted(saved.keys() ^ held.keys()) or [n for n, x in saved.items() if x.shape != held[n].shape]
        if odd:
            raise RLWatchError(f"the reference in {directory} is of another model: {odd[0]!r} does not fit")
        return saved

    def _holders(self) -> dict[str, Tensor]:
        """What the saved tensors go into, or stand for."""
        if self._anchor.lora:
            synchronized()
            return FrozenAdapter.of(self._anchor.policy).trained()
        return self._anchor.tensors()
