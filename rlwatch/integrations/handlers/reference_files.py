"""A reference on disk, inside a checkpoint: ``rlwatch_reference/reference.safetensors`` and ``reference.json``.

Written whole or not at all. Checkpoints that hold the same reference share one file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from rlwatch.errors import RLWatchError

DIRECTORY = "rlwatch_reference"
WEIGHTS, FACTS = "reference.safetensors", "reference.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a kept reference: the reset that made it, and what its file must be."""

    step: int
    command: str = ""
    fingerprint: str = ""
    by: str = ""
    why: str = ""
    tensors: int = 0
    sha256: str = ""
    format: int = FORMAT


def write(parent: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> Facts:
    """Write ``tensors`` (on the CPU, whole) into a directory of ``parent``; returns the facts as written.

    Raises ``OSError`` (a full disk), and leaves nothing half-written behind.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def fill(directory: Path) -> Facts:
        try:
            save_file(dict(tensors), directory / WEIGHTS)
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(str(error)) from error
        return replace(facts, tensors=len(tensors), sha256=_sha256(directory / WEIGHTS))

    return _placed(parent, fill)


def share(parent: Path, facts: Facts, source: Path) -> None:
    """Let ``parent`` hold what lies in ``source``: the same file, or a copy where there are no links.

    Raises ``OSError`` if it cannot.
    """

    def fill(directory: Path) -> Facts:
        try:
            os.link(source / DIRECTORY / WEIGHTS, directory / WEIGHTS)
        except OSError:
            shutil.copyfile(source / DIRECTORY / WEIGHTS, directory / WEIGHTS)
        return facts

    _placed(parent, fill)


def remove(parent: Path) -> None:
    """Let ``parent`` hold none. The file itself stays where others share it."""
    shutil.rmtree(parent / DIRECTORY, ignore_errors=True)


def read_facts(checkpoint: Path) -> Facts | None:
    """What ``checkpoint`` says of its reference; None if it holds none. Raises ``RLWatchError`` if unreadable."""
    path = checkpoint / DIRECTORY / FACTS
    if not (checkpoint / DIRECTORY).is_dir():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {name: found[name] for name in Facts.__dataclass_fields__ if name in found}
        facts = Facts(**known)
        readable = isinstance(facts.step, int) and isinstance(facts.sha256, str)
    except (OSError, ValueError, TypeError) as error:
        raise RLWatchError(f"{path} cannot be read ({error})") from None
    if not readable or facts.format != FORMAT:
        raise RLWatchError(f"{path} is of a format ({facts.format!r}) this version of rlwatch cannot read")
    return facts


def verify(checkpoint: Path, facts: Facts) -> None:
    """Read the whole file. Raises ``RLWatchError`` if it is not the one that was written."""
    path = checkpoint / DIRECTORY / WEIGHTS
    try:
        found = _sha256(path)
    except OSError as error:
        raise RLWatchError(f"{path} cannot be read ({error})") from None
    if found != facts.sha256:
        raise RLWatchError(f"{path} is damaged: it is not the file that was written")


def kept_nearby(checkpoint: Path) -> dict[str, Facts]:
    """The references that checkpoints beside ``checkpoint`` hold, by the name of theirs; unreadable ones left out."""
    found = {}
    for path in sorted(checkpoint.resolve().parent.glob(f"*/{DIRECTORY}")):
        try:
            facts = read_facts(path.parent)
        except RLWatchError:
            continue
        if facts is not None and path.parent != checkpoint.resolve():
            found[path.parent.name] = facts
    return found


def _placed(parent: Path, fill: Callable[[Path], Facts]) -> Facts:
    """Fill a directory beside the final one, then put it in its place."""
    final, draft = parent / DIRECTORY, parent / f".{DIRECTORY}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        facts = fill(draft)
        (draft / FACTS).write_text(json.dumps(asdict(facts), indent=1), encoding="utf-8")
        remove(parent)
        draft.rename(final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # there is none once it is in its place
    return facts


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
