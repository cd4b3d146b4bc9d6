"""Where reading of a log stands, so that a later watch knows the same file again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from rlwatch.importers.bounds import open_regular
from rlwatch.records import JSON

MARK = 256
"""Bytes before the place that are remembered."""
_MOST_SIBLINGS = 50


@dataclass(frozen=True, slots=True)
class Position:
    """``offset`` bytes of ``file`` were read; its first row follows the one numbered ``base``.

    ``mark`` tells the bytes before ``offset``: a file that has others there is another file, or was written anew,
    whatever its name, its inode and its times say.
    """

    file: str
    base: int
    offset: int
    mark: str

    def to_dict(self) -> dict[str, JSON]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Position | None:
        """What :meth:`to_dict` gave; None if ``data`` is nothing of the kind."""
        if not isinstance(data, dict):
            return None
        file, base, offset, mark = (data.get(name) for name in ("file", "base", "offset", "mark"))
        if not (isinstance(file, str) and isinstance(base, int) and isinstance(offset, int) and isinstance(mark, str)):
            return None
        return cls(file, base, offset, mark) if min(base, offset) >= 0 else None


def mark_of(tail: bytes) -> str:
    """The mark of the bytes before a place."""
    return hashlib.sha256(tail[-MARK:]).hexdigest()[:32]


def fits(file: IO[bytes], offset: int, mark: str) -> bool:
    """Whether ``file`` holds, before ``offset``, the bytes of ``mark``. Moves the reading place."""
    start = max(0, offset - MARK)
    file.seek(start)
    tail = file.read(offset - start)
    return len(tail) == offset - start and mark_of(tail) == mark


def is_at(path: Path, offset: int, mark: str) -> bool:
    """The same of the file at ``path``; False if it cannot be read."""
    try:
        with open_regular(path) as file:
            return fits(file, offset, mark)
    except OSError:
        return False


def kept_copy(path: Path, offset: int, mark: str) -> Path | None:
    """The file beside ``path`` that holds what was read of it: a rotated log, or the copy of a truncated one.

    They are called ``train.log.1``, ``train.log-20260101`` or ``train-20260101.log``; packed ones are not looked at.
    """
    if offset == 0:
        return None
    return next((other for other in _siblings(path, offset) if is_at(other, offset, mark)), None)


def _siblings(path: Path, least: int) -> Iterator[Path]:
    found: list[tuple[float, str]] = []
    try:
        with os.scandir(path.parent) as entries:
            for entry in entries:
                if entry.name != path.name and entry.name.startswith(path.stem) and entry.is_file():
                    stat = entry.stat()
                    if stat.st_size >= least:
                        found.append((stat.st_mtime, entry.name))
    except OSError:
        return
    for _, name in sorted(found, reverse=True)[:_MOST_SIBLINGS]:
        yield path.parent / name
