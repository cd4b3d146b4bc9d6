"""A run's journal: what was logged and is not yet in ``run.db``, in files beside it.

The thread that logs appends to it before the call returns, so that a row is in the page cache, which outlives the
process (``SIGKILL``; not a power cut), whatever the thread that writes the database is doing. What was committed is
forgotten file by file. Whoever opens the run next brings into the database what a dead process left here.

File: ``MAGIC``, eight random bytes that name the journal, then frames: ``MARK``, length of the body, body, ``END``.
The first byte of a body says what it is: the names of a metric set (JSON), a record (packed), a part of one (the rest
of which was not a plain number yet), an event, a spike or a completion batch, or how the run was ended: whose process
is gone before its writer came to the end has not died. A frame that was cut short, by a kill or a full disk, is passed
over up to the next mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import re
import struct
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import call
from pathlib import Path
from typing import Any

from rlwatch.errors import StoreError
from rlwatch.ports import Item
from rlwatch.records import CompletionBatch, Event, RunState, SpikeBatch, StepRecord
from rlwatch.store.sqlite.rows import dumps, loads, pack_columns, plain, unpack_columns

MAGIC, MARK, END = b"rlwatch1", b"\xf5RLW", b"wlr\xfa"
HEADER_BYTES = len(MAGIC) + 8
SEGMENT_BYTES = 1 << 20
"""A file is followed by another beyond this size; so much room is set aside for it on the disk beforehand."""
MOST_BYTES = 256 << 20
"""Journal of one run that is not in its database yet; beyond it nothing is appended."""
SLOW_S, REST_S, LONGEST_REST_S = 0.25, 60.0, 3600.0
"""A write into the page cache that takes so long (seconds) waited for the disk, and training with it: the journal is
left alone for a minute, twice as long each time that happens again. A loaded machine alone does not take so long."""
_FILE = re.compile(r"run\.journal-(\d+)")
_HEAD = struct.Struct("<4sI")
_NAMES, _RECORD, _PART, _EVENT, _SPIKES, _COMPLETIONS, _ENDED = b"NRPESCF"
_NUMBERED = struct.Struct("<BQ")  # what it is, and its number in the journal
_FORGOTTEN = 4096
"""Numbers that were drawn and never stored (their thread died) are waited for until so many later ones were."""

# The C library's own calls, made without giving up the interpreter lock: os.write would hand it to a thread that
# computes, and logging would wait for it (5 ms or more) each time. A write into the page cache takes a microsecond.
_libc = ctypes.PyDLL(None, use_errno=True)
_write = _libc.write
_write.argtypes, _write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t
_fallocate = getattr(_libc, "fallocate", None)
_KEEP_SIZE = 1


class _Segment:
    """One file. It is closed when nobody uses it any more: a thread may be about to write into it."""

    def __init__(self, path: Path, nonce: bytes) -> None:
        self.path = path
        self.bytes = 0
        self.highest = 0
        self.removed = False
        self.longest_s = 0.0
        self.sets: dict[tuple[str, ...], tuple[int, struct.Struct]] = {}
        self.numbers = itertools.count()
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_TRUNC | os.O_NOFOLLOW
        self.fd = os.open(path, flags, 0o600)
        if _fallocate is not None:
            _fallocate(self.fd, _KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(SEGMENT_BYTES))  # a reserve: it may fail
        self.put(MAGIC + nonce)

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

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Mark:
    """The part of a journal that is in the database: all up to ``upto``, and the numbers ``above`` it."""

    nonce: str
    upto: int = 0
    above: frozenset[int] = frozenset()

    def holds(self, number: int) -> bool:
        """True if the item of this number is stored."""
        return number <= self.upto or number in self.above

    def after(self, numbers: Iterable[int]) -> Mark:
        """The mark once these are stored, too."""
        upto, above = self.upto, {*self.above, *(number for number in numbers if number > self.upto)}
        while above and (upto + 1 in above or max(above) - upto > _FORGOTTEN):
            upto += 1
            above.discard(upto)
        return Mark(self.nonce, upto, frozenset(above))


@dataclass(slots=True)
class Journal:
    """The journal that this process appends to. ``append*`` may be called from any thread, and from signal handlers.

    Only one thread calls the others. Opening it raises ``OSError`` where the directory cannot be written.
    """

    directory: Path
    mark: Mark = field(init=False)
    _ids: Iterator[int] = field(init=False)
    _files: Iterator[int] = field(init=False)
    _nonce: bytes = field(init=False)
    _now: _Segment = field(init=False)
    _next: _Segment | None = field(init=False, default=None)
    _old: list[_Segment] = field(init=False, default_factory=list)
    _rests_until: float = field(init=False, default=0.0)
    _rest_s: float = field(init=False, default=REST_S)

    def __post_init__(self) -> None:
        self._nonce = os.urandom(8)
        self.mark = Mark(self._nonce.hex())
        self._ids, self._files = itertools.count(1), itertools.count(1)
        self._now = self._made()

    def append_record(self, step: int, ts: float, metrics: Mapping[str, float], *, whole: bool = True) -> int:
        """Keep one ``run.log``: plain numbers by name. The number it has here, or 0 if it could not be kept.

        ``whole``: whether these are all of its metrics.
        """
        if self._rests_until and time.monotonic() < self._rests_until:
            return 0
        names, kind, number = tuple(metrics), _RECORD if whole else _PART, next(self._ids)
        while True:
            here = self._here()
            known = here.sets.get(names)
            if known is None:
                text = json.dumps(names).encode()
                known = (next(here.numbers), struct.Struct(f"<4sIBQqdI{len(names)}d4s"))
                if not here.put(_framed(bytes((_NAMES,)) + known[0].to_bytes(4, "little") + text)):
                    return 0
                here.sets[names] = known
            length = known[1].size - _HEAD.size - len(END)
            frame = known[1].pack(MARK, length, kind, number, step, ts, known[0], *metrics.values(), END)
            kept = self._put(here, number, frame)
            if not here.removed:  # by the time it was written: another thread had gone on to the next file
                self._look_at(here)
                return kept

    def append(self, item: SpikeBatch | CompletionBatch | Event) -> int:
        """Keep anything else that is logged. Raises what cannot be encoded: ``ValueError``, ``StoreError``..."""
        if isinstance(item, Event):
            kind, body = _EVENT, dumps([plain(item.kind), item.step, item.body, item.ts]).encode()
        else:
            rows = pack_columns(item.columns, level=0)[1]
            reason = item.reason if isinstance(item, SpikeBatch) else ""
            kind = _SPIKES if isinstance(item, SpikeBatch) else _COMPLETIONS
            head = dumps([item.step, plain(reason), item.ts, item.rank]).encode()
            body = len(head).to_bytes(4, "little") + head + rows
        if self._rests_until and time.monotonic() < self._rests_until:
            return 0
        number = next(self._ids)
        while True:
            here = self._here()
            kept = self._put(here, number, _framed(_NUMBERED.pack(kind, number) + body))
            if not here.removed:
                self._look_at(here)
                return kept

    def note_end(self, state: RunState, reason: str, now: float) -> None:
        """Keep how the run was ended, before its writer comes to say so; also while the journal rests."""
        body = dumps([state.value, plain(reason), now]).encode()
        while True:
            here = self._here()
            here.put(_framed(_NUMBERED.pack(_ENDED, 0) + body))
            if not here.removed:
                return

    def stored(self, mark: Mark) -> None:
        """Take notice of what the database holds by now; remove files of which it holds all, make the next one."""
        self.mark = mark
        for segment in [segment for segment in self._old if segment.highest <= mark.upto]:
            segment.removed = True
            self._old.remove(segment)
            with contextlib.suppress(OSError):
                segment.path.unlink(missing_ok=True)
        if self._next is None and self._now.bytes > SEGMENT_BYTES // 2:
            with contextlib.suppress(OSError):  # the one in use goes on
                self._next = self._made()

    def missing(self, taken: Container[int] = (), limit: int | None = None) -> list[tuple[int, Item]]:
        """Items in the files, whole, not stored and not ``taken``; for the thread that writes the run."""
        paths = [segment.path for segment in [*self._old, self._now]]
        kept = (entry for path in paths for entry in entries(path)[1])
        new = ((number, item) for number, item, whole in kept if whole and number not in taken)
        return list(islice(((number, item) for number, item in new if not self.mark.holds(number)), limit))

    def close(self, *, remove: bool) -> None:
        """Leave it. ``remove``: all of it is stored."""
        for segment in [*self._old, self._now, *([self._next] if self._next else [])]:
            if remove:
                with contextlib.suppress(OSError):
                    segment.path.unlink(missing_ok=True)

    def _look_at(self, here: _Segment) -> None:
        """Rest if the disk made a thread wait that logged: once is enough."""
        if here.longest_s > SLOW_S:
            here.longest_s = 0.0
            self._rests_until = time.monotonic() + self._rest_s
            self._rest_s = min(2.0 * self._rest_s, LONGEST_REST_S)

    def _made(self) -> _Segment:
        return _Segment(self.directory / f"run.journal-{next(self._files)}", self._nonce)

    def _here(self) -> _Segment:
        here, following = self._now, self._next
        if here.bytes > SEGMENT_BYTES and following is not None:
            self._next = None
            self._old.append(here)
            self._now = here = following
        return here

    def _put(self, here: _Segment, number: int, frame: bytes) -> int:
        if here.bytes + len(self._old) * SEGMENT_BYTES > MOST_BYTES:
            return 0
        here.highest = max(here.highest, number)
        return number if here.put(frame) else 0


def files_in(directory: Path) -> list[Path]:
    """The journal files of the run in ``directory``, in the order they were written."""
    try:
        with os.scandir(directory) as listing:
            names = [e.name for e in listing if _FILE.fullmatch(e.name) and e.is_file(follow_symlinks=False)]
    except OSError:
        return []
    return [directory / name for name in sorted(names, key=lambda name: int(name.rpartition("-")[2]))]


def entries(path: Path) -> tuple[str, list[tuple[int, Item, bool]]]:
    """The journal's name, and its items: number, item, and whether it is whole. Damage is passed over."""
    try:
        data = path.read_bytes()
    except OSError:
        return "", []
    if data[: len(MAGIC)] != MAGIC or len(data) < HEADER_BYTES:
        return "", []
    sets: dict[int, tuple[str, ...]] = {}
    items = []
    for body in _bodies(data, HEADER_BYTES):
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError, struct.error, StoreError):
            if body[0] == _NAMES:
                sets[int.from_bytes(body[1:5], "little")] = tuple(json.loads(body[5:]))
            elif body[0] != _ENDED:
                items.append((*_item(body, sets), body[0] != _PART))
    return data[len(MAGIC) : HEADER_BYTES].hex(), items


def end_in(path: Path) -> tuple[RunState, str, float] | None:
    """State, reason and time (Unix seconds) of the end that the journal tells of; None where it tells of none."""
    with contextlib.suppress(OSError, ValueError, TypeError, StoreError):
        data = path.read_bytes()
        told = [body for body in _bodies(data, HEADER_BYTES) if body[:1] == bytes((_ENDED,))]
        if data[: len(MAGIC)] == MAGIC and told:
            state, reason, now = loads(told[-1][_NUMBERED.size :].decode())
            return RunState(state), str(reason), float(now)
    return None


def _framed(body: bytes) -> bytes:
    return _HEAD.pack(MARK, len(body)) + body + END


def _bodies(data: bytes, at: int) -> Iterator[bytes]:
    while (at := data.find(MARK, at)) >= 0 and at + _HEAD.size <= len(data):
        end = at + _HEAD.size + _HEAD.unpack_from(data, at)[1]
        if data[end : end + len(END)] == END:
            yield data[at + _HEAD.size : end]
            at = end + len(END)
        else:
            at += 1


def _item(body: bytes, sets: Mapping[int, tuple[str, ...]]) -> tuple[int, Item]:
    kind, number = _NUMBERED.unpack_from(body)
    if kind in (_RECORD, _PART):
        _, _, step, ts, known = struct.unpack_from("<BQqdI", body)
        names = sets[known]
        values = struct.unpack_from(f"<{len(names)}d", body, struct.calcsize("<BQqdI"))
        return number, StepRecord(step, dict(zip(names, values, strict=True)), ts)
    rest = body[_NUMBERED.size :]
    if kind == _EVENT:
        of, at, fields, ts = loads(rest.decode())
        return number, Event(of, at, fields, ts)
    head = 4 + int.from_bytes(rest[:4], "little")
    step, reason, ts, rank = loads(rest[4:head].decode())
    columns = unpack_columns(rest[head:])
    if kind == _SPIKES:
        return number, SpikeBatch(step, columns, reason, ts, rank=rank)
    return number, CompletionBatch(step, columns, ts, rank=rank)
