"""A run's journal: files in its directory that hold what was logged and is not yet in ``run.db``.

The thread that logs appends to it before the call returns, so that a row is in the page cache, which outlives the
process (``SIGKILL``; not a power cut), whatever the thread that writes the database is doing. What was committed is
forgotten file by file. The next process that opens the run brings into the database what a dead process left here.

File: ``MAGIC``, eight random bytes that name the journal, then frames: ``MARK``, length of the body, body, ``END``.
The first byte of a body gives its kind: the names of a metric set (JSON), a record (packed), a part of one (the rest
of which was not a plain number yet), an event, a spike or a completion batch, or how the run was ended: a process that
is gone before its writer stored the end has not died. A frame that was cut short, by a kill or a full disk, is passed
over up to the next mark.

How the run was ended, and which rows were lost, is written into a file of its own as well, ``run.journal.end``, whose
room was taken when the journal was begun; ``run.journal.reserve`` is removed at the end of a run whose disk is full, so
that what was found can still be stored.

Spike batches and completions have files of their own, so that where room is short they can be removed without the rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice, starmap
from operator import call, itemgetter
from pathlib import Path
from typing import Any

from rlwatch import codec
from rlwatch.errors import ConfigError, StoreError
from rlwatch.ports import Item, KeptRow
from rlwatch.records import CompletionBatch, Event, RunState, SpikeBatch, StepRecord
from rlwatch.store.fields import EVENT, dumps, loads, plain
from rlwatch.store.sqlite.layout import files_in
from rlwatch.store.sqlite.rows import pack_batch, unpack_batch
from rlwatch.store.sqlite.segments import (
    END,
    FRAME_HEAD,
    HEADER_BYTES,
    MAGIC,
    MARK,
    SEGMENT_BYTES,
    SegmentFile,
    Stream,
    bare_write,
    shape_of,
)

BUDGET_VARIABLE = "RLWATCH_JOURNAL_MB"
BUDGET_MB, LEAST_MB = 256.0, 1.0
"""Journal of one run that is not in its database yet, in 2**20 bytes; beyond it nothing but events is appended."""
SLOW_S, REST_S, LONGEST_REST_S = 0.25, 60.0, 3600.0
"""A write into the page cache that takes so long (seconds) waited for the disk, and training with it: the journal is
left alone for a minute, twice as long each time that happens again. A loaded machine alone does not take so long."""
QUICKLY = 0.5
"""Share of the budget from which on no row goes the quick way, which asks for no room."""
_PLAIN = frozenset({float, int, bool})
_NUMPYS = ("floating", "integer", "bool_")
_NAMES, _RECORD, _PART, _EVENT, _SPIKES, _COMPLETIONS, _ENDED = b"NRPESCF"
_NUMBERED = struct.Struct("<BQ")  # what it is, and its number in the journal
_AROUND = FRAME_HEAD.size + len(END)
"""Bytes of a frame around its body."""
_FORGOTTEN = 4096
"""Numbers that were drawn and never stored (their thread died) are waited for until so many later ones were."""


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """The part of a journal that is in the database: all up to ``upto``, and the numbers ``above`` it."""

    nonce: str
    upto: int = 0
    above: frozenset[int] = frozenset()

    def holds(self, number: int) -> bool:
        """Return True if the item of this number is stored."""
        return number <= self.upto or number in self.above

    def after(self, numbers: Iterable[int]) -> JournalPosition:
        """The mark once these are stored, too."""
        numbers = list(numbers)
        if not self.above and numbers == list(range(self.upto + 1, self.upto + 1 + len(numbers))):
            return JournalPosition(self.nonce, self.upto + len(numbers))  # in order, as mostly
        upto, above = self.upto, {*self.above, *(number for number in numbers if number > self.upto)}
        while above and (upto + 1 in above or max(above) - upto > _FORGOTTEN):
            upto += 1
            above.discard(upto)
        return JournalPosition(self.nonce, upto, frozenset(above))


def budget_bytes(env: Mapping[str, str] | None = None) -> int:
    """Return the most bytes a journal may take: 256 MB, or ``RLWATCH_JOURNAL_MB``. Raises ``ConfigError``."""
    value = (os.environ if env is None else env).get(BUDGET_VARIABLE, "").strip()
    try:
        megabytes = float(value or BUDGET_MB)
    except ValueError:
        megabytes = 0.0
    if not LEAST_MB <= megabytes < float("inf"):
        raise ConfigError(f"{BUDGET_VARIABLE} is a number of megabytes, {LEAST_MB:g} or more; got {value!r}")
    return int(megabytes * (1 << 20))


@dataclass(slots=True)
class SQLiteJournal:
    """The journal that this process appends to. ``append*`` may be called from any thread, and from signal handlers.

    Only one thread calls the other methods. Opening it raises ``OSError`` if the directory cannot be written, and
    ``ConfigError`` for an invalid budget (``RLWATCH_JOURNAL_MB``).
    """

    directory: Path
    budget_bytes: int = field(default_factory=budget_bytes)
    mark: JournalPosition = field(init=False)
    _ids: Iterator[int] = field(init=False)
    _files: Iterator[int] = field(init=False)
    _nonce: bytes = field(init=False)
    _segment_bytes: int = field(init=False)
    _rows: Stream = field(init=False)
    _bulk: dict[type, Stream] = field(init=False)
    filled: float = field(init=False, default=0.0)
    """Share of the budget that is taken, as last reckoned and added to since; from 1 on nothing but events is kept."""
    cramped: bool = field(init=False, default=False)
    """True if its disk had no room for the last item."""
    refusals: int = field(init=False, default=0)
    """Number of items that its disk had no room for."""
    lost: bool = field(init=False, default=False)
    """True if rows were noted as lost that the store does not know of."""
    _end: EndReserve = field(init=False)
    _rests_until: float = field(init=False, default=0.0)
    _rest_s: float = field(init=False, default=REST_S)
    _types: frozenset[type] = field(init=False, default=_PLAIN)
    """Types of values that take the fast path: Python's own numbers, and numpy's scalars once numpy is imported."""
    _quick: SegmentFile | None = field(init=False, default=None)
    """The file of the last row, where the next may follow without a question; else it goes the long way, which asks."""

    def __post_init__(self) -> None:
        self._nonce = os.urandom(8)
        self.mark = JournalPosition(self._nonce.hex())
        self._ids, self._files = itertools.count(1), itertools.count(1)
        self._segment_bytes = min(SEGMENT_BYTES, self.budget_bytes // 16)
        self._rows = Stream(self._made, self._segment_bytes)
        self._bulk = {kind: Stream(self._made, self._segment_bytes) for kind in (SpikeBatch, CompletionBatch)}
        self._rows.here()
        self._end = EndReserve(self.directory, self._nonce)

    @property
    def limit(self) -> str:
        """Words for what it may take."""
        most = f"{self.budget_bytes / (1 << 20):,.0f} MB"
        return "the disk of its journal is full" if self.cramped else f"its journal may take {most}"

    def keep(self, step: int, metrics: dict[str, Any]) -> KeptRow | None:
        """Append a record of known names and plain numbers, in half the time of :meth:`append_record`.

        Returns None if the row was not kept, and must take the slow path. ``step``: within what a store can hold.

        Written out, for the thread that trains comes here with cold caches: each function more costs it a microsecond.
        """
        here = self._quick
        if here is None or here.bytes > self._segment_bytes:
            return None
        row = metrics.copy()  # another thread may change it while it is packed
        names, values, shape = tuple(row), row.values(), here.shape
        if names != shape.names:
            shape = here.shapes.get(names, shape)
            here.shape = shape
        if names != shape.names or not self._types.issuperset(map(type, values)):
            return None
        number, packing = next(self._ids), shape.frame
        length = packing.size
        frame = packing.pack(MARK, length - _AROUND, _RECORD, number, step, time.time(), shape.number, *values, END)
        here.lowest = here.lowest or number
        if number > here.highest:  # noqa: PLR1730  (max() is a call, after which another thread may go on)
            here.highest = number
        clock = (time.monotonic,)
        before, written, after = starmap(call, (clock, (bare_write, here.fd, frame, length), clock))
        if written != length or here.removed:  # the long way finds out why, or writes it again, elsewhere
            return None
        here.bytes += length
        self.filled += length / self.budget_bytes
        if after - before > SLOW_S:
            here.longest_s = after - before
            self._look_at(here)
        return frame, shape

    def append_record(self, step: int, ts: float, metrics: Mapping[str, float], *, whole: bool = True) -> int:
        """Keep one ``run.log``: plain numbers by name. The number it has here, or 0 if it could not be kept.

        ``whole``: whether these are all of its metrics.
        """
        if self._rests_until and time.monotonic() < self._rests_until:
            return 0
        if self.filled >= 1.0:
            return 0
        if self._types is _PLAIN and "numpy" in sys.modules:
            self._types = _PLAIN | _scalars(sys.modules["numpy"])
        names, kind, number = tuple(metrics), _RECORD if whole else _PART, next(self._ids)
        while True:
            here = self._rows.here()
            shape = here.shapes.get(names)
            if shape is None:
                shape = shape_of(next(here.numbers), names)
                head = bytes((_NAMES,)) + shape.number.to_bytes(4, "little")
                if not here.put(_framed(head + json.dumps(names).encode())):
                    return self._refused()
                here.shapes[names] = here.shape = shape
            packing, values = shape.frame, metrics.values()
            frame = packing.pack(MARK, packing.size - _AROUND, kind, number, step, ts, shape.number, *values, END)
            kept = self._put(here, number, frame)
            if not here.removed:  # by the time it was written: another thread had gone on to the next file
                self._quick = here if kept and self.filled < QUICKLY else None
                self._look_at(here)
                return kept

    def append(self, item: SpikeBatch | CompletionBatch | Event) -> int:
        """Keep anything else that is logged. Raises what cannot be encoded: ``ValueError``, ``StoreError``..."""
        if isinstance(item, Event):
            kind, body = _EVENT, _event(item)
        else:
            rows = pack_batch(item, level=0)[1]
            reason = item.reason if isinstance(item, SpikeBatch) else ""
            kind = _SPIKES if isinstance(item, SpikeBatch) else _COMPLETIONS
            head = dumps([item.step, plain(reason), item.ts, item.rank]).encode()
            body = len(head).to_bytes(4, "little") + head + rows
        if self._rests_until and time.monotonic() < self._rests_until:
            return 0
        stream = self._bulk.get(type(item), self._rows)
        if stream is not self._rows and self.filled >= 1.0:
            return 0
        number = next(self._ids)
        while True:
            try:
                here = stream.here()
            except OSError:
                return self._refused()
            kept = self._put(here, number, _framed(_NUMBERED.pack(kind, number) + body))
            if not here.removed:
                self._look_at(here)
                return kept

    def note_end(self, state: RunState, reason: str, now: float) -> None:
        """Keep how the run was ended, before its writer stores it; also while the journal rests."""
        body = dumps([state.value, plain(reason)[:MOST_REASON], now]).encode()
        self._end.put(_framed(_NUMBERED.pack(_ENDED, 0) + body))
        while True:
            here = self._rows.here()
            here.put(_framed(_NUMBERED.pack(_ENDED, 0) + body))
            if not here.removed:
                return

    def note_lost(self, event: Event) -> None:
        """Keep that rows were lost, where the store cannot take it."""
        self._end.put(_framed(_NUMBERED.pack(_EVENT, next(self._ids)) + _event(event)))
        self.lost = True

    def make_room(self) -> None:
        """Give up what was reserved for the end."""
        self._end.make_room()

    def on_disk(self) -> bool:
        """Wait until the disk has all files. False where it refuses, as one does that has become read-only."""
        try:
            for each in [each for stream in self._streams() for each in stream.files()]:
                file = os.open(each.path, os.O_RDONLY)
                try:
                    os.fdatasync(file)
                finally:
                    os.close(file)
        except OSError:
            return False
        return True

    def stored(self, mark: JournalPosition) -> None:
        """Take notice of what the database holds by now."""
        self.mark = mark
        self.tend()

    def tend(self) -> None:
        """Remove files of which the database holds all, and make the next ones before they are needed."""
        for stream in self._streams():
            stream.tend(self.mark.upto)
        if self._quick is not self._rows.now:  # rows go to another file
            self._quick = None
        self._reckon()

    def give_up(self, kind: type) -> list[tuple[int, Item]] | None:
        """Remove the oldest file of items of ``kind`` (spike batches or completions); what it held and was not stored,
        by number. None: there is no such file.
        """
        stream = self._bulk[kind]
        oldest = next(iter(stream.files()), None)
        if oldest is None:
            return None
        oldest.removed = True  # from here on, a thread about to write into it turns to the next
        held = entries(oldest.path)[1]
        stream.remove(oldest)
        self._reckon()
        return [(number, item) for number, item, _ in held if not self.mark.holds(number)]

    def missing(self, taken: Container[int] = (), limit: int | None = None) -> list[tuple[int, Item]]:
        """Items in the files, whole, not stored and not ``taken``; for the thread that writes the run."""
        kept = _in_order((each.lowest, each.path) for stream in self._streams() for each in stream.files())
        new = ((number, item) for number, item, whole in kept if whole and number not in taken)
        return list(islice(((number, item) for number, item in new if not self.mark.holds(number)), limit))

    def close(self, *, remove: bool) -> None:
        """Leave it. ``remove``: all of it is stored, the end too."""
        self._end.close(remove=remove)
        for stream in self._streams() if remove else ():
            for segment in [*stream.files(), *([stream.next] if stream.next else [])]:
                with contextlib.suppress(OSError):
                    segment.path.unlink(missing_ok=True)

    def _reckon(self) -> None:
        """Recompute the filled share exactly: threads that add at once overwrite each other's sum."""
        self.filled = sum(stream.bytes for stream in self._streams()) / self.budget_bytes
        if self.filled >= QUICKLY:
            self._quick = None

    def _streams(self) -> list[Stream]:
        return [self._rows, *self._bulk.values()]

    def _look_at(self, here: SegmentFile) -> None:
        """Rest if the disk made a logging thread wait: once is enough."""
        if here.longest_s > SLOW_S:
            here.longest_s, self._quick = 0.0, None
            self._rests_until = time.monotonic() + self._rest_s
            self._rest_s = min(2.0 * self._rest_s, LONGEST_REST_S)

    def _made(self) -> SegmentFile:
        return SegmentFile(self.directory / f"run.journal-{next(self._files)}", self._nonce, self._segment_bytes)

    def _put(self, here: SegmentFile, number: int, frame: bytes) -> int:
        here.lowest = here.lowest or number
        if number > here.highest:  # noqa: PLR1730  (max() is a call, after which another thread may go on)
            here.highest = number
        if not here.put(frame):
            return self._refused()
        self.filled += len(frame) / self.budget_bytes
        if self.filled >= QUICKLY:
            self._quick = None
        self.cramped = False
        return number

    def _refused(self) -> int:
        self.cramped, self.refusals, self._quick = True, self.refusals + 1, None
        return 0


END_FILE, RESERVE_FILE = "run.journal.end", "run.journal.reserve"
END_BYTES, RESERVE_BYTES, MOST_REASON = 1 << 14, 1 << 18, 2000


class EndReserve:
    """Room for the end of a run, taken at its beginning: a file that is written over, and one that is removed."""

    def __init__(self, directory: Path, nonce: bytes) -> None:
        self._path, self._reserve = directory / END_FILE, directory / RESERVE_FILE
        self._at, self._fd = HEADER_BYTES, -1
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_TRUNC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):  # no room now: the end is noted where there is any then
            self._fd = os.open(self._path, flags, 0o600)
            os.write(self._fd, (MAGIC + nonce).ljust(END_BYTES, b"\0"))
            reserve = os.open(self._reserve, flags, 0o600)
            try:
                os.posix_fallocate(reserve, 0, RESERVE_BYTES)
            finally:
                os.close(reserve)

    def put(self, frame: bytes) -> None:
        """Write the next frame over the room for it."""
        if self._fd >= 0 and self._at + len(frame) <= END_BYTES:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, frame, self._at)
                self._at += len(frame)

    def make_room(self) -> None:
        """Remove what was reserved on the disk."""
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def close(self, *, remove: bool) -> None:
        """Leave it."""
        self.make_room()
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            if remove:
                self._path.unlink(missing_ok=True)
            if fd >= 0:
                os.close(fd)


def all_in(directory: Path) -> list[Path]:
    """The journal files, with that of the end where anything was noted in it."""
    end = directory / END_FILE
    return [*files_in(directory), *([end] if holds_end(directory) else [])]


def holds_end(directory: Path) -> bool:
    """Return True if an end was noted."""
    path = directory / END_FILE
    with contextlib.suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                return file.read(HEADER_BYTES + len(MARK))[HEADER_BYTES:] == MARK
    return False


def ending_in(directory: Path) -> tuple[RunState, str, float] | None:
    """State, reason and time of the run's end, if its process came to note it."""
    endings = (end_in(path) for path in reversed(all_in(directory)))
    return next((ending for ending in endings if ending is not None), None)


def journals_in(directory: Path) -> dict[str, Iterator[tuple[int, Item]]]:
    """Return the journals that dead processes left in ``directory``, by name: items by number, read file by file."""
    by_name: dict[str, list[tuple[int, Path]]] = {}
    for path in all_in(directory):
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if data[: len(MAGIC)] == MAGIC and len(data) >= HEADER_BYTES:
                numbered = (body for body in _bodies(data, HEADER_BYTES) if body[:1] not in (b"N", b"F"))
                first = next((int.from_bytes(body[1:9], "little") for body in numbered), 0)
                by_name.setdefault(data[len(MAGIC) : HEADER_BYTES].hex(), []).append((first, path))
    return {name: ((number, item) for number, item, _ in _in_order(files)) for name, files in by_name.items()}


def _in_order(files: Iterable[tuple[int, Path]]) -> Iterator[tuple[int, Item, bool]]:
    """Iterate over items of files (each with its lowest number) in order of number.

    Rows must not overtake items that are kept in other files, because a journal position counts numbers that many later
    ones have passed as lost.
    """
    waiting = deque(sorted(files, key=itemgetter(0)))
    opened: list[tuple[int, int, Item, bool, Iterator[tuple[int, Item, bool]]]] = []
    order = itertools.count()

    def push(rest: Iterator[tuple[int, Item, bool]]) -> None:
        for number, item, whole in rest:
            heappush(opened, (number, next(order), item, whole, rest))
            return

    while waiting or opened:
        while waiting and (not opened or waiting[0][0] <= opened[0][0]):
            push(iter(sorted(entries(waiting.popleft()[1])[1], key=itemgetter(0))))
        if opened:
            number, _, item, whole, rest = heappop(opened)
            yield number, item, whole
            push(rest)


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
    """Return state, reason and time (Unix seconds) of the end recorded in the journal; None if it has none."""
    with contextlib.suppress(OSError, ValueError, TypeError, StoreError):
        data = path.read_bytes()
        ends = [body for body in _bodies(data, HEADER_BYTES) if body[:1] == bytes((_ENDED,))]
        if data[: len(MAGIC)] == MAGIC and ends:
            state, reason, now = loads(ends[-1][_NUMBERED.size :].decode())
            return RunState(state), str(reason), float(now)
    return None


def _scalars(numpy: Any) -> frozenset[type]:
    """Return the types of numpy's real scalars."""
    kinds = tuple(getattr(numpy, kind) for kind in _NUMPYS if hasattr(numpy, kind))  # it may be half imported
    every = getattr(numpy, "sctypeDict", {}).values()
    return frozenset(each for each in every if issubclass(each, kinds) and each.__name__ != "timedelta64")


def _event(event: Event) -> bytes:
    """Encode kind, step, body and time of an event, followed by its other fields, if any."""
    rest = EVENT.rest(event)
    return dumps([plain(event.kind), event.step, event.body, event.ts, *([rest] if rest else [])]).encode()


def _framed(body: bytes) -> bytes:
    return FRAME_HEAD.pack(MARK, len(body)) + body + END


def _bodies(data: bytes, at: int) -> Iterator[bytes]:
    while (at := data.find(MARK, at)) >= 0 and at + FRAME_HEAD.size <= len(data):
        end = at + FRAME_HEAD.size + FRAME_HEAD.unpack_from(data, at)[1]
        if data[end : end + len(END)] == END:
            yield data[at + FRAME_HEAD.size : end]
            at = end + len(END)
        else:
            at += 1


def _item(body: bytes, sets: Mapping[int, tuple[str, ...]]) -> tuple[int, Item]:
    kind, number = _NUMBERED.unpack_from(body)
    if kind in (_RECORD, _PART):
        _, _, step, ts, known = struct.unpack_from("<BQqdI", body)
        names = sets[known]
        values = struct.unpack_from(f"<{len(names)}d", body, struct.calcsize("<BQqdI"))
        return number, StepRecord(step=step, metrics=dict(zip(names, values, strict=True)), ts=ts)
    rest = body[_NUMBERED.size :]
    if kind == _EVENT:
        of, at, content, ts, *more = loads(rest.decode())
        return number, codec.enriched(Event(kind=of, step=at, body=content, ts=ts), more[0] if more else {})
    head = 4 + int.from_bytes(rest[:4], "little")
    step, reason, ts, rank, *_ = loads(rest[4:head].decode())
    columns, more = unpack_batch(rest[head:])
    if kind == _SPIKES:
        spikes = SpikeBatch(step=step, columns=columns, reason=reason, ts=ts, rank=rank)
        return number, codec.enriched(spikes, more)
    return number, codec.enriched(CompletionBatch(step=step, columns=columns, ts=ts, rank=rank), more)
