"""What was read of files, remembered for as long as they stay as they were."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Generic, TypeVar

_T = TypeVar("_T")
_SETTLED_NS = 2_000_000_000
"""Younger time stamps are not trusted: the next change might leave the same one."""

Stamp = tuple[tuple[int, int, int] | None, ...]


def stamp_of(*paths: Path) -> Stamp:
    """Time, size and identity of each file; None for one that is not there. Opens nothing."""
    return tuple(_stamp(path) for path in paths)


class Unchanged(Generic[_T]):
    """A value per name, good while the stamp it was kept under is the current one."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Stamp, _T]] = {}

    def recall(self, name: str, stamp: Stamp) -> _T | None:
        """What was kept under exactly this stamp."""
        kept = self._kept.get(name)
        return kept[1] if kept is not None and kept[0] == stamp else None

    def keep(self, name: str, stamp: Stamp, value: _T) -> None:
        """Remember ``value``, read after ``stamp`` was taken, unless the files changed only just now."""
        newest = max((part[0] for part in stamp if part is not None), default=time.time_ns())
        if time.time_ns() - newest > _SETTLED_NS:
            self._kept[name] = (stamp, value)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
