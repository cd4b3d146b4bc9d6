"""Append to the files of a run's journal, one after the other, and remove each once the database holds all of its
items.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

from rlwatch.records import PackedMetrics

MAGIC = b"rlwatch1"
HEADER_BYTES = len(MAGIC) + 8
SEGMENT_BYTES = 1 << 20
"""Size beyond which a journal file is followed by another; this much disk space is reserved for each file
beforehand.
"""

# The C library's own calls, made without giving up the interpreter lock: os.write would hand it to a thread that
# computes, and logging would wait for it (5 ms or more) each time. A write into the page cache takes a microsecond.
_libc = ctypes.PyDLL(None, use_errno=True)
_write = _libc.write
_write.argtypes, _write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t
bare_write = ctypes.PyDLL(None)["write"]
"""The C library's ``write`` of a file descriptor, ``bytes`` and their number, without argument conversions and without
``errno``, which cost a sixth of a call where caches are cold. Its return value is valid only if it equals the number of
bytes: then all was written.
"""
_fallocate = getattr(_libc, "fallocate", None)
_KEEP_SIZE = 1


MARK, END = b"\xf5RLW", b"wlr\xfa"
FRAME_HEAD = struct.Struct("<4sI")
_EMPTY = struct.Struct("")
_ROW_HEAD = struct.Struct("<4sIBQqdI")


@dataclass(frozen=True, slots=True)
class RowShape:
    """Names of the metrics of a row, the number of this list of names in its file, and the packing of a frame of such
    rows.
    """

    number: int
    names: tuple[str, ...]
    frame: struct.Struct

    @property
    def body_bytes(self) -> int:
        """Length in bytes of the body of a frame."""
        return self.frame.size - FRAME_HEAD.size - len(END)

    def opened(self, frame: bytes) -> tuple[int, int, float, PackedMetrics]:
        """Return the number in the journal, the step, the Unix time and the metrics of a row, given its ``frame``."""
        _, _, _, number, step, ts, _ = _ROW_HEAD.unpack_from(frame)
        return number, step, ts, PackedMetrics(self.names, frame[_ROW_HEAD.size : -len(END)])


def shape_of(number: int, names: tuple[str, ...]) -> RowShape:
    """Return the packing of rows with these metric ``names``; ``number``: the number of this list of names in its
    file.
    """
    return RowShape(number, names, struct.Struct(f"{_ROW_HEAD.format}{len(names)}d4s"))


class SegmentFile:
    """One journal file that is open for appending.

    It is closed only when no thread refers to it any more, because one may be about to write into it. ``nonce``: eight
    bytes that name the journal. ``reserve``: bytes of disk space to reserve. Raises ``OSError`` if the file cannot be
    created.
    """

    def __init__(self, path: Path, nonce: bytes, reserve: int) -> None:
        self.path = path
        self.bytes = 0
        self.lowest = self.highest = 0
        self.removed = False
        self.longest_s = 0.0
        self.shapes: dict[tuple[str, ...], RowShape] = {}
        self.shape = RowShape(0, (), _EMPTY)
        """Shape of the last row."""
        self.numbers = itertools.count()
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_TRUNC | os.O_NOFOLLOW
        self.fd = os.open(path, flags, 0o600)
        if _fallocate is not None:
            _fallocate(self.fd, _KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(reserve))  # a reserve: it may fail
        if not self.put(MAGIC + nonce):  # without it, no reader could decode what follows
            path.unlink(missing_ok=True)
            raise OSError(ctypes.get_errno() or errno.ENOSPC, "no room for a journal", str(path))

    def put(self, data: bytes) -> bool:
        """Append ``data``; return True if all of it was written, False if the disk took less."""
        write = partial(_write, self.fd, data, len(data))
        # One after the other in C: between two lines of Python the interpreter lock may go to another thread for long.
        timed: tuple[Callable[[], Any], ...] = (time.monotonic, write, time.monotonic)
        before, written, after = map(call, timed)
        if written < 0 and ctypes.get_errno() == errno.EINTR:
            written = write()
        self.longest_s = max(self.longest_s, after - before)
        self.bytes += max(0, written)
        return bool(written == len(data))

    def spoiled(self) -> bool:
        """Return True if another process truncated or removed the file, so that what is written there now could not be
        read.
        """
        written = self.bytes  # before the look: threads that log append meanwhile
        try:
            stat = os.fstat(self.fd)
        except OSError:
            return False  # out of our sight, perhaps for a while
        return stat.st_nlink == 0 or stat.st_size < written

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)


@dataclass(slots=True)
class Stream:
    """Consecutive journal files for one sort of items; beyond ``segment_bytes`` a file is followed by another.

    ``made`` creates a file, the first one when it is needed. Threads that log call only :meth:`here`; the other methods
    are called by the thread that writes the database. ``now``: the file in use. ``next``: its successor, prepared in
    advance. ``old``: files before it, oldest first, with ``old_bytes`` in all.
    """

    made: Callable[[], SegmentFile]
    segment_bytes: int
    now: SegmentFile | None = None
    next: SegmentFile | None = None
    old: list[SegmentFile] = field(default_factory=list)
    old_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes in all files of the stream."""
        return self.old_bytes + (self.now.bytes if self.now is not None else 0)

    def files(self) -> list[SegmentFile]:
        """Return the journal files of the stream in use so far, oldest first."""
        return [*self.old, *([self.now] if self.now is not None else [])]

    def here(self) -> SegmentFile:
        """Return the file to append to, which may be a new one. Raises ``OSError`` if none can be made."""
        here, following = self.now, self.next
        if here is None or here.removed:
            self.now = here = self.made()
        elif here.bytes > self.segment_bytes and following is not None:
            self.next = None
            self._follow(here, following)
            here = following
        return here

    def _follow(self, here: SegmentFile, following: SegmentFile) -> None:
        self.old.append(here)
        self.old_bytes = sum(segment.bytes for segment in self.old)
        self.now = following

    def remove(self, segment: SegmentFile) -> None:
        """Remove one of the stream's files from the disk; threads that hold it find its ``removed`` set."""
        segment.removed = True
        self.old = [each for each in self.old if each is not segment]
        self.old_bytes = sum(each.bytes for each in self.old)
        if segment is self.now:
            self.now = None
        with contextlib.suppress(OSError):
            segment.path.unlink(missing_ok=True)

    def tend(self, upto: int) -> None:
        """Remove files whose items are all in the database, and make the next file before a logging thread needs it.

        ``upto``: the database holds all items up to this number. If the current file can be removed, rows go to the
        next file first; the old one is removed once no thread can be about to write into it.
        """
        for segment in [segment for segment in self.old if segment.highest <= upto]:
            self.remove(segment)
        here = self.now
        if here is not None and here.spoiled():
            with contextlib.suppress(OSError):
                self._follow(here, self.next or self.made())  # what can be read of it is kept until it is stored
                self.next = None
            return
        if here is None or here.bytes <= self.segment_bytes // 2:
            return
        with contextlib.suppress(OSError):  # the one in use goes on
            self.next = self.next or self.made()
            if here.bytes > self.segment_bytes and here.highest <= upto:
                self._follow(here, self.next)
                self.next = None
