"""Snapshots on disk: one file each, whole or not at all, with its SHA-256 beside it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from rlwatch.errors import RLWatchError
from rlwatch.integrations.snapshot_state import StateCopy

FORMAT = 1
CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A snapshot on disk, and the digest that its bytes must have."""

    path: Path
    sha256: str
    step: int

    def remove(self) -> None:
        """Remove it and its digest; a file that is gone is no error."""
        self.path.unlink(missing_ok=True)
        _beside(self.path).unlink(missing_ok=True)


def writable(kept: StateCopy) -> bool:
    """Return whether what is written could be read again without running code of the file."""
    written = io.BytesIO()
    torch.save(kept.plain, written)
    written.seek(0)
    try:
        torch.load(written, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def write_snapshot(path: Path, kept: StateCopy, step: int) -> SnapshotFile:
    """Write ``kept`` to ``path``, whole or not at all. Raises ``OSError`` as a full disk does; nothing is left then."""
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
    except RuntimeError as error:  # torch's own writer, of a full disk
        raise OSError(str(error).partition("\n")[0]) from None
    finally:
        part.unlink(missing_ok=True)
        part.with_suffix(".json").unlink(missing_ok=True)
    return made


def read_snapshot(file: SnapshotFile) -> StateCopy:
    """Read it, after comparing its digest. Raises ``RLWatchError`` if it is missing, differs, or is no snapshot."""
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
