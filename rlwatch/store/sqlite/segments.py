"""Files of a journal: appended to by threads that log, one after the other, removed once all they hold is stored."""

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
"""A file is followed by another beyond this size; so much room is set aside for it on the disk beforehand."""

# The C library's own calls, made without giving up the interpreter lock: os.write would hand it to a thread that
# computes, and logging would wait for it (5 ms or more) each time. A write into the page cache takes a microsecond.
_libc = ctypes.PyDLL(None, use_errno=True)
_write = _libc.write
_write.argtypes, _write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t
bare_write = ctypes.PyDLL(None)["write"]
"""The same of a descriptor, ``bytes`` and their number, without conversions of ours and without ``errno``, which cost a
sixth of a call where caches are cold. What it returns is the number where all was written, and there alone."""
_fallocate = getattr(_libc, "fallocate", None)
_KEEP_SIZE = 1


MARK, END = b"\xf5RLW", b"wlr\xfa"
FRAME_HEAD = struct.Struct("<4sI")
_EMPTY = struct.Struct("")
_ROW_HEAD = struct.Struct("<4sIBQqdI")


@dataclass(frozen=True, slots=True)
class RowShape:
    """Names of the metrics of a row, their number in one file, and how a frame of them is packed."""

    number: int
    names: tuple[str, ...]
    frame: struct.Struct

    @property
    def body_bytes(self) -> int:
        """Length of the body of a frame."""
        return self.frame.size - FRAME_HEAD.size - len(END)

    def opened(self, frame: bytes) -> tuple[int, int, float, PackedMetrics]:
        """Number, step, time (Unix seconds) and metrics of a frame of this shape."""
        _, _, _, number, step, ts, _ = _ROW_HEAD.unpack_from(frame)
        return number, step, ts, PackedMetrics(self.names, frame[_ROW_HEAD.size : -len(END)])


def shape_of(number: int, names: tuple[str, ...]) -> RowShape:
    """Shape of rows of these names."""
    return RowShape(number, names, struct.Struct(f"{_ROW_HEAD.format}{len(names)}d4s"))


class SegmentFile:
    """One file. It is closed when no thread uses it any more: one may be about to write into it."""

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
        """Append ``data``; whether all of it was written."""
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
        """True if another process truncated or removed the file: what is written there now could not be read."""
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
    """Files of one sort of items, one after the other; a file is followed by another beyond ``segment_bytes``.

    The first is made when it is needed. :meth:`here` is called by threads that log, the rest by the one that writes.
    """

    made: Callable[[], SegmentFile]
    segment_bytes: int
    now: SegmentFile | None = None
    next: SegmentFile | None = None
    old: list[SegmentFile] = field(default_factory=list)
    old_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes in all of its files."""
        return self.old_bytes + (self.now.bytes if self.now is not None else 0)

    def files(self) -> list[SegmentFile]:
        """Return the files that hold something, oldest first."""
        return [*self.old, *([self.now] if self.now is not None else [])]

    def here(self) -> SegmentFile:
        """The file to append to. Raises ``OSError`` where none can be made."""
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
        """Remove one of the files."""
        segment.removed = True
        self.old = [each for each in self.old if each is not segment]
        self.old_bytes = sum(each.bytes for each in self.old)
        if segment is self.now:
            self.now = None
        with contextlib.suppress(OSError):
            segment.path.unlink(missing_ok=True)

    def tend(self, upto: int) -> None:
        """Remove files whose numbers are all stored (``upto``); make the next before a thread that logs needs it.

        If it is the current file, rows go to the next one first; it is removed once no thread can be about to write
        into it.
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
