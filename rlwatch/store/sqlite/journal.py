"""Keep a run's journal: files in the run's directory with items that were logged and are not yet in ``run.db``.

The thread that logs appends an item before the call returns. The item is then in the page cache, which outlives the
process (``SIGKILL``; not a power cut), whatever the thread that writes the database does. Files whose items are all in
the database are removed. The next process that opens the run stores what a dead process left here.

File: ``MAGIC``, eight random bytes that name the journal, then frames: ``MARK``, length of the body, body, ``END``. The
first byte of a body gives its kind. It is the names of a metric set (JSON), a record (packed), a part of a record
(whose other values were not plain numbers yet), an event, a batch of tokens or of completions, or how the run ended.
The last kind shows that a process whose writer did not store the end has ended regularly. A frame that was cut short,
by a kill or a full disk, is skipped up to the next mark.

How the run ended, and which rows were lost, is also written into a file of its own, ``run.journal.end``, whose space
was taken when the journal was begun. ``run.journal.reserve`` is removed at the end of a run whose disk is full, so that
what was found can still be stored.

Batches of tokens and completions have files of their own, so that where space is short they can be removed without the
rows.
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
"""Default and smallest allowed size of the part of a run's journal that is not yet in its database, in MiB (2**20
bytes); beyond it nothing but events is appended.
"""
SLOW_S, REST_S, LONGEST_REST_S = 0.25, 60.0, 3600.0
"""Seconds. A write into the page cache that takes ``SLOW_S`` waited for the disk, and training with it. The journal
then pauses for ``REST_S``, twice as long each time that happens again, at most ``LONGEST_REST_S``. A loaded machine
alone does not take so long.
"""
QUICKLY = 0.5
"""Share of the budget from which on no row takes the fast path, which does not check the space left."""
_PLAIN = frozenset({float, int, bool})
_NUMPYS = ("floating", "integer", "bool_")
_NAMES, _RECORD, _PART, _EVENT, _SPIKES, _COMPLETIONS, _ENDED = b"NRPESCF"
_NUMBERED = struct.Struct("<BQ")  # what it is, and its number in the journal
_AROUND = FRAME_HEAD.size + len(END)
"""Bytes of a frame around its body."""
_FORGOTTEN = 4096
"""A number that was drawn and never stored (its thread died) counts as lost once this many later numbers were drawn."""


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """The part of a journal that is in the database: items with numbers up to ``upto``, and those in ``above``.

    ``nonce``: the journal's name, in hexadecimal.
    """

    nonce: str
    upto: int = 0
    above: frozenset[int] = frozenset()

    def holds(self, number: int) -> bool:
        """Return True if the database already holds the journal's item with this ``number``."""
        return number <= self.upto or number in self.above

    def after(self, numbers: Iterable[int]) -> JournalPosition:
        """Return the position after the database also holds the items with these ``numbers``."""
        numbers = list(numbers)
        if not self.above and numbers == list(range(self.upto + 1, self.upto + 1 + len(numbers))):
            return JournalPosition(self.nonce, self.upto + len(numbers))  # in order, as mostly
        upto, above = self.upto, {*self.above, *(number for number in numbers if number > self.upto)}
        while above and (upto + 1 in above or max(above) - upto > _FORGOTTEN):
            upto += 1
            above.discard(upto)
        return JournalPosition(self.nonce, upto, frozenset(above))


def budget_bytes(env: Mapping[str, str] | None = None) -> int:
    """Return the most bytes that a run's journal may take: 256 MiB, or ``RLWATCH_JOURNAL_MB`` MiB from ``env``.

    ``env``: by default the process's environment. Raises ``ConfigError`` if the variable is not a number of at least 1.
    """
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
    """The journal that this process appends to, in the run's ``directory``.

    ``append*`` and ``keep`` may be called from any thread, and from signal handlers; only one thread calls the other
    methods. ``budget_bytes``: the most bytes it may take. ``mark``: what of the journal is in the database. Opening it
    raises ``OSError`` if the directory cannot be written, and ``ConfigError`` for an invalid budget
    (``RLWATCH_JOURNAL_MB``).
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
    """Share of the budget that is used, approximately; from 1 on nothing but events is kept."""
    cramped: bool = field(init=False, default=False)
    """True if the disk had no space for the last item."""
    refusals: int = field(init=False, default=0)
    """Number of items for which the disk had no space."""
    lost: bool = field(init=False, default=False)
    """True if the journal has a note of lost rows that the store does not have."""
    _end: EndReserve = field(init=False)
    _rests_until: float = field(init=False, default=0.0)
    _rest_s: float = field(init=False, default=REST_S)
    _types: frozenset[type] = field(init=False, default=_PLAIN)
    """Types of values that take the fast path: Python's own numbers, and numpy's scalars once numpy is imported."""
    _quick: SegmentFile | None = field(init=False, default=None)
    """The file of the last row, to which the next may be appended without checks; None if the slow path must check
    first.
    """

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
        """Description of the journal's limit, for messages about rows that it did not keep."""
        most = f"{self.budget_bytes / (1 << 20):,.0f} MB"
        return "the disk of its journal is full" if self.cramped else f"its journal may take {most}"

    def keep(self, step: int, metrics: dict[str, Any]) -> KeptRow | None:
        """Append a record of known metric names and plain numbers, in half the time of :meth:`append_record`.

        Returns the packed row, or None if the row was not kept and must take the slow path. ``step`` must fit in 64
        bits.

        The code is written out in one function: the training thread comes here with cold caches, where each further
        call costs a microsecond.
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
        """Append one record: its ``step``, time ``ts`` (Unix seconds) and ``metrics``, all plain numbers.

        ``whole``: True if these are all metrics of the record. Returns the item's number in the journal, or 0 if it
        could not be kept.
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
        """Append a batch or an event; return the item's number in the journal, or 0 if it could not be kept.

        Raises ``ValueError`` or ``StoreError`` if the item cannot be encoded, or what its values raise.
        """
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
        """Record how the run ended, before its writer stores it; also while the journal pauses. ``now``: Unix
        seconds.
        """
        body = dumps([state.value, plain(reason)[:MOST_REASON], now]).encode()
        self._end.put(_framed(_NUMBERED.pack(_ENDED, 0) + body))
        while True:
            here = self._rows.here()
            here.put(_framed(_NUMBERED.pack(_ENDED, 0) + body))
            if not here.removed:
                return

    def note_lost(self, event: Event) -> None:
        """Record in the journal an ``event`` that reports lost rows, because the store cannot take it now."""
        self._end.put(_framed(_NUMBERED.pack(_EVENT, next(self._ids)) + _event(event)))
        self.lost = True

    def make_room(self) -> None:
        """Release the disk space that was reserved for the end of the run."""
        self._end.make_room()

    def on_disk(self) -> bool:
        """Wait until all journal files are on the disk, not only in the system's cache; return False if the disk
        refuses.

        A disk that became read-only refuses.
        """
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
        """Record up to which item the database holds the journal, and remove journal files that are no longer needed.

        ``mark``: position of the items that the database holds.
        """
        self.mark = mark
        self.tend()

    def tend(self) -> None:
        """Remove files whose items are all in the database, and make the next files before they are needed."""
        for stream in self._streams():
            stream.tend(self.mark.upto)
        if self._quick is not self._rows.now:  # rows go to another file
            self._quick = None
        self._reckon()

    def give_up(self, kind: type) -> list[tuple[int, Item]] | None:
        """Remove the oldest file of items of ``kind`` (batches of tokens or of completions), to free space.

        Returns the file's items that are not in the database, with their numbers; None if there is no such file.
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
        """Return the first ``limit`` complete items that are neither in the database nor in ``taken``, with their
        numbers.

        Only the thread that writes the run may call it.
        """
        kept = _in_order((each.lowest, each.path) for stream in self._streams() for each in stream.files())
        new = ((number, item) for number, item, whole in kept if whole and number not in taken)
        return list(islice(((number, item) for number, item in new if not self.mark.holds(number)), limit))

    def close(self, *, remove: bool) -> None:
        """Close the journal; ``remove`` its files if all items and the end of the run are in the database."""
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
        """Pause the journal if the disk made a logging thread wait: once is enough."""
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
    """Disk space for the end of a run, taken at its beginning: a file to overwrite, and a file that can be removed.

    ``directory``: the run's. ``nonce``: eight bytes that name the journal. A disk without space raises nothing.
    """

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
        """Write the next frame into the reserved space; a frame that does not fit is dropped."""
        if self._fd >= 0 and self._at + len(frame) <= END_BYTES:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, frame, self._at)
                self._at += len(frame)

    def make_room(self) -> None:
        """Free the reserved disk space, so that the run's end can be written although the disk is full."""
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def close(self, *, remove: bool) -> None:
        """Remove the reserve and close the file of the end; with ``remove`` delete that as well."""
        self.make_room()
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            if remove:
                self._path.unlink(missing_ok=True)
            if fd >= 0:
                os.close(fd)


def all_in(directory: Path) -> list[Path]:
    """Return the journal files in a run's ``directory``, followed by the file of the run's end if it holds anything."""
    end = directory / END_FILE
    return [*files_in(directory), *([end] if holds_end(directory) else [])]


def holds_end(directory: Path) -> bool:
    """Return True if the journal in a run's ``directory`` records an end of the run, or lost rows, in the reserved
    file.
    """
    path = directory / END_FILE
    with contextlib.suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                return file.read(HEADER_BYTES + len(MARK))[HEADER_BYTES:] == MARK
    return False


def ending_in(directory: Path) -> tuple[RunState, str, float] | None:
    """Return state, reason and Unix time of the run's end as recorded in its journal; None if no end was recorded."""
    endings = (end_in(path) for path in reversed(all_in(directory)))
    return next((ending for ending in endings if ending is not None), None)


def journals_in(directory: Path) -> dict[str, Iterator[tuple[int, Item]]]:
    """Return the journals that dead processes left in ``directory``: name -> items with their numbers, read file by
    file.
    """
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

    Rows must not overtake items that are kept in other files. A journal position counts numbers as lost that many later
    ones have passed.
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
    """Return the journal's name and the items of one file, each as (number, item, True if the item is complete).

    Damaged parts are skipped; a file that is no journal gives an empty name and no items.
    """
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
    """Return state, reason and Unix time of the run's end as recorded in one journal file; None if it records none."""
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
