"""Cache what was read from files until they change: in memory, and for finished runs also in a file of the store.

A process that lists a thousand runs thus opens few of their files. Only runs at rest are cached in the file: no process
writes them and no journal waits to be stored. Every change of such a run makes or removes a file of its directory, or
changes time or size of one of them. Four time stamps thus decide whether a line of ``.runs.jsonl`` is still valid. The
file is only a cache: torn and old lines, and those of other versions, are skipped, and it may be removed at any time.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import Any, Generic, NamedTuple, TypeVar

from rlwatch import codec
from rlwatch.errors import StoreError
from rlwatch.records import JSON, Curation, RunInfo
from rlwatch.store.fields import dumps, plain
from rlwatch.store.sqlite.layout import files_in
from rlwatch.version import __version__

_log = logging.getLogger("rlwatch")
_T = TypeVar("_T")
_SETTLED_NS = 2_000_000_000
"""Nanoseconds. Younger time stamps are not trusted: the next change might leave the same one."""

Stamp = tuple[tuple[int, int, int] | None, ...]


def stamp_of(*paths: Path) -> Stamp:
    """Return modification time (ns), size (bytes) and inode of each file; None for a missing one. Opens no file."""
    return tuple(_stamp(path) for path in paths)


def settled(stamp: Stamp) -> bool:
    """Return True if the files of this ``stamp``, taken just now, last changed long enough ago for the stamp to be
    reliable.
    """
    now = time.time_ns()
    return now - max((part[0] for part in stamp if part is not None), default=now) > _SETTLED_NS


class Unchanged(Generic[_T]):
    """A cache in memory: one value per name, valid as long as the files it was read from have the same stamp."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Stamp, _T]] = {}

    def recall(self, name: str, stamp: Stamp) -> _T | None:
        """Return the value cached under ``name`` for exactly this ``stamp`` of its files; None if there is none."""
        kept = self._kept.get(name)
        return kept[1] if kept is not None and kept[0] == stamp else None

    def keep(self, name: str, stamp: Stamp, value: _T) -> None:
        """Cache ``value``, which was read after ``stamp`` was taken, unless its files changed only just now."""
        if settled(stamp):
            self._kept[name] = (stamp, value)


def copied(value: Any) -> Any:
    """Return a copy of a JSON value that the caller may change; ``deepcopy`` would take ten times as long for a
    thousand runs.
    """
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value


def _stamp(path: Path | str) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)  # noqa: PTH116 - a thousand times a list
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


# Runs at rest, in a file of the store.

NAME = ".runs.jsonl"
_FILES = ("run.db", "run.db-wal", "control.db")
_MOST_BYTES_A_RUN, _MOST_BYTES = 1 << 16, 1 << 24
"""Limits of one line and of the file, in bytes; larger ones are not cached, as settings may have megabytes."""


class _Rest(NamedTuple):
    """A cached run at rest: stamps of its directory and of ``_FILES``, and the run as it is listed."""

    stamp: Stamp
    run: RunInfo


class RunsAtRest:
    """Cache of the facts about runs of the store in ``root``, valid while their files do not change."""

    def __init__(self, root: Path) -> None:
        self._root, self._path = root, root / NAME
        self._kept: dict[str, _Rest] = {}
        self._new: list[str] = []
        self._lines = -1  # of the file; not read yet
        self._refused = False

    def recall(self, entry: os.DirEntry[str]) -> RunInfo | None:
        """Return the cached run of the directory ``entry``; None if it is not cached or has changed since."""
        rest = self._rest(entry)
        if rest is None:
            return None
        run = rest.run
        return replace(run, config=copied(run.config)) if run.config else run

    def knows(self, entry: os.DirEntry[str]) -> bool:
        """Return True if the run of this directory is cached and unchanged, so that :meth:`recall` would return it."""
        return self._rest(entry) is not None

    def _rest(self, entry: os.DirEntry[str]) -> _Rest | None:
        if self._lines < 0:
            self._lines = 0
            self._read()
        rest = self._kept.get(entry.name)
        return rest if rest is not None and _holds(rest.stamp, entry) else None

    def look(self, entry: os.DirEntry[str]) -> Stamp | None:
        """Return the stamp of a run's directory ``entry``, to pass to :meth:`keep`; taken before the run is read.

        The stamp shows later whether files changed. None if the run is not at rest, or changed only just now: then it
        cannot be cached.
        """
        stamp = (_stamp(entry.path), *(_stamp(f"{entry.path}/{name}") for name in _FILES))
        return stamp if settled(stamp) and not files_in(Path(entry.path)) else None

    def keep(self, stamp: Stamp, run: RunInfo) -> None:
        """Cache ``run``, which was read after ``stamp`` was taken."""
        self._kept[run.run_id] = _Rest(stamp, replace(run, config=copied(run.config)))
        with suppress(StoreError):  # settings without an end
            self._new.append(dumps([__version__, stamp, _row(run)]))

    def save(self, there: Collection[str]) -> None:
        """Append newly cached runs to the store's file; rewrite the file if most of its lines are outdated.

        ``there``: ids of the runs that exist now. A file that cannot be written is left alone.
        """
        new, self._new = [line for line in self._new if len(line) <= _MOST_BYTES_A_RUN], []
        if not new or self._refused:
            return
        self._lines += len(new)
        try:
            if self._lines > 2 * len(there) + 64:
                self._rewrite(there)
            else:
                _append(self._path, new)
        except OSError as error:  # a place where we may only read, a full disk: it is faster with it, that is all
            self._refused = True
            _log.debug("%s is not kept: %s", self._path, error)

    def _rewrite(self, there: Collection[str]) -> None:
        rests = [self._kept[name] for name in there if name in self._kept]
        lines = [dumps([__version__, stamp, _row(run)]) for stamp, run in rests]
        born = self._path.with_name(f"{NAME}.{os.getpid()}.{threading.get_ident()}")
        try:
            _append(born, [line for line in lines if len(line) <= _MOST_BYTES_A_RUN])
            born.replace(self._path)
        finally:
            born.unlink(missing_ok=True)
        self._lines = len(lines)

    def _read(self) -> None:
        try:
            stat = self._path.lstat()
            if stat.st_uid != os.getuid() or stat.st_size > _MOST_BYTES or not S_ISREG(stat.st_mode):
                return
            lines = self._path.read_bytes().split(b"\n")
        except OSError:
            return
        for version, stamp, row in _parsed(lines):
            self._lines += 1
            if version == __version__:
                with suppress(KeyError, TypeError, ValueError, AttributeError):
                    run = _run(row)
                    self._kept[run.run_id] = _Rest(tuple(part and tuple(part) for part in stamp), run)


def _holds(stamp: Stamp, entry: os.DirEntry[str]) -> bool:
    """Return True if the directory is unchanged (no name came or went), and so are the files that it had."""
    try:
        directory = entry.stat()
    except OSError:
        return False
    known = stamp[0]
    if known is None or (directory.st_mtime_ns, directory.st_size, directory.st_ino) != known:
        return False
    files = zip(_FILES, stamp[1:], strict=True)
    return all(part is None or _stamp(f"{entry.path}/{name}") == part for name, part in files)


def _append(path: Path, lines: list[str]) -> None:
    """Append lines in one write; a line that was cut short before stays separate."""
    flags = (
        os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    )  # a named pipe: no wait
    file = os.open(path, flags, 0o600)
    try:
        os.write(file, "\n".join(["", *lines, ""]).encode())
    finally:
        os.close(file)


def _parsed(lines: list[bytes]) -> Iterator[Any]:
    whole = [line for line in lines if line]
    try:
        found = json.loads(b"[" + b",".join(whole) + b"]")
    except ValueError:  # some line is torn
        found = []
        for line in whole:
            with suppress(ValueError):
                found.append(json.loads(line))
    return (line for line in found if isinstance(line, list) and len(line) == 3)


def _row(run: RunInfo) -> dict[str, JSON]:
    row = {name: plain(value) if isinstance(value, str) else value for name, value in codec.encoded(run).items()}
    return {**row, "curation": codec.encoded(run.curation) if run.curation != Curation() else None}


def _run(row: dict[str, Any]) -> RunInfo:
    return codec.decoded(RunInfo, {**row, "curation": row["curation"] or {}})
