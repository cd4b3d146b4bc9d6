"""Intake of everything that is logged: copy now, keep in the journal, queue; convert later on the writer thread.

The training thread pays for one dict copy. 0-d tensors are copied to the host together, without waiting; the writer
thread reads the numbers. So logging never synchronises a device, and a tensor may be overwritten right after the call.
A value may be anything and raise anything: only that value is lost, never another.

Everything that is logged is first written to the run's journal, a file that outlives the process (see
:mod:`rlwatch.ports`); then it enters a bounded queue, without a lock. When the queue is full, an entry that the journal
has completely is read from there later instead of being dropped.
"""

from __future__ import annotations

import logging
import operator
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlwatch.distributions import Sparing
from rlwatch.error_boundary import by_a_signal, call_or, described, raised_by, sheltered, shown
from rlwatch.ports import Journal, KeptRow, PendingRecord
from rlwatch.recorder.losses import NEARLY, Counters, Shedding
from rlwatch.records import DISTRIBUTIONS, CompletionBatch, Event, SpikeBatch
from rlwatch.redaction import clean_names

if TYPE_CHECKING:
    from rlwatch.link.hub import Inbox
    from rlwatch.link.wire import StepKey
    from rlwatch.tensors.transfer import Transfer


T = TypeVar("T")
_PLAIN, _TEXT = frozenset({float, int, bool}), frozenset({str})
LARGEST = 2**63 - 1
"""Largest step that a store can hold."""
_EXACT = 2.0**53
"""Number up to which every integer is a float, so that no two steps are equal as floats."""


@dataclass(slots=True)
class QueuedCall:
    """One call of ``run.log`` in the queue: its step, its values, and its time (Unix seconds).

    ``deferred``: names of tensors and their transfer from a device, which is read later.
    """

    step: int
    metrics: dict[str, Any]
    ts: float
    deferred: list[tuple[list[str], Transfer]] = field(default_factory=list, init=False)
    plain: bool = field(default=False, init=False)
    """True if all values are Python's own numbers."""
    number: int = field(default=0, init=False)
    """Number under which the journal has the call, or the part of it that was plain numbers at once; 0: not in the
    journal.
    """


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Placeholder for a tensor that could not be copied, with the reason."""

    why: str

    def __float__(self) -> float:
        raise TypeError(self.why)

    def __repr__(self) -> str:
        return f"a tensor that cannot be read ({self.why})"


def admit(metrics: Mapping[str, Any], step: int, ts: float) -> QueuedCall:
    """Copy the values of one call of ``run.log``; tensors are copied without waiting, nothing is converted or checked
    yet.

    ``ts``: Unix seconds.
    """
    entry = QueuedCall(step, clean_names(dict(metrics)), ts)
    entry.plain = _PLAIN.issuperset(map(type, entry.metrics.values()))  # the loop runs in C: this is the hot path
    if not entry.plain:
        _defer(entry, [name for name, value in entry.metrics.items() if _in_memory(value)])
    return entry


def step_index(step: Any) -> int:
    """Return ``step`` as an int >= 0 that a store can hold. Raises ``ValueError``, which repeats the value, otherwise.

    A whole float is accepted: an epoch times rows over batches is one, and so are numpy's values and those from JSON.

    >>> step_index(12), step_index(12.0)
    (12, 12)
    """
    if type(step) is int and 0 <= step <= LARGEST:
        return step
    if isinstance(step, bool):
        raise ValueError(f"step must be an integer >= 0, got {step!r}")

    def refused(_: Exception) -> int:
        raise ValueError(f"step must be an integer >= 0, got {shown(step)}") from None

    index = call_or(lambda: operator.index(_counted(step)), refused)
    if index < 0:
        raise ValueError(f"step must be an integer >= 0, got {shown(index)}")
    if index > LARGEST:
        raise ValueError(f"step must be below 2**63, got {shown(index)}")
    return index


def _counted(step: Any) -> Any:
    """Return ``step``; a whole float becomes an integer.

    A tensor is returned as it is: reading it waits for a device.
    """
    if type(step).__module__ == "numpy" and getattr(step, "ndim", None) == 0 and step.dtype.kind == "f":
        step = step.item()
    return int(step) if isinstance(step, float) and step.is_integer() and abs(step) <= _EXACT else step


def plain_numbers(entry: QueuedCall) -> tuple[dict[str, float], bool]:
    """Return the numbers of a queued call that can be read without foreign code and without waiting for a device.

    The second value is True if these are all of its values.
    """
    metrics = entry.metrics
    if entry.plain and _TEXT.issuperset(map(type, metrics)):
        return metrics, True
    plain: dict[str, float] = {}
    whole = True
    numpy = sys.modules.get("numpy")  # if it is not imported, no value is of one of its types
    scalars = () if numpy is None else (numpy.floating, numpy.integer, numpy.bool_)
    for name, value in metrics.items():
        if type(name) is str and (type(value) in _PLAIN or issubclass(type(value), scalars)):
            plain[name] = float(value)
        elif value is not None:
            whole = False
    late = []
    for names, transfer in entry.deferred:
        if transfer.ready() and _TEXT.issuperset(map(type, names)):
            read = dict(zip(names, map(float, transfer.read()), strict=True))
            plain.update(read)
            metrics.update(read)  # read once
        else:
            whole = False
            late.append((names, transfer))
    entry.deferred = late
    return plain, whole


def a_batch(given: T, kind: type[T]) -> T:
    """Return ``given`` if it is a batch of type ``kind`` with a valid step. Raises ``TypeError`` or ``ValueError``
    otherwise.
    """
    if not isinstance(given, kind):
        raise TypeError(f"it must be a {kind.__name__}, got {shown(given)}")
    step_index(given.step)  # type: ignore[attr-defined]
    return given


def numbers(entry: QueuedCall, counters: Counters) -> dict[str, float]:
    """Return the metrics of a queued call as floats; values that are not one number are left out, counted and warned
    of once.

    ``None`` means not measured and is left out silently. Called on the writer thread; exceptions of the values are
    suppressed.
    """
    out: dict[str, float] = {}
    for name, value in entry.metrics.items():
        if value is None:
            continue
        if type(value) is float and type(name) is str:
            out[name] = value
            continue
        pair = sheltered(partial(_pair, name, value), lambda _: None)
        if pair is None:
            counters.warn("bad_values", f"metric {shown(name)} is not a number: got {_shown(value)}; it was left out")
        else:
            out[pair[0]] = pair[1]
    for names, transfer in entry.deferred:
        error = raised_by(_read_into, out, names, transfer)
        if error is not None:
            why = f"{len(names)} metrics ({shown(names[0])}...) could not be read: {described(error)}"
            counters.warn("bad_values", why, len(names))
    return out


def _read_into(out: dict[str, float], names: Sequence[str], transfer: Any) -> None:
    """Read transferred numbers into ``out``. Raises the device's errors."""
    out.update((str(name), float(number)) for name, number in zip(names, transfer.read(), strict=True))


def _pair(name: Any, value: Any) -> tuple[str, float]:
    return str(name), _number(value)


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("text is not a number")
    if _in_parts(value):  # reading it is a collective, which this rank alone must not begin
        raise TypeError("parts are not a number")
    if _complex(value):  # its imaginary part would be dropped in silence
        raise TypeError("a complex number is not a metric")
    return float(value)


def _in_parts(value: Any) -> bool:
    """Return True for a DTensor, of which other ranks hold other parts."""
    return hasattr(value, "full_tensor")


def _in_memory(value: Any) -> bool:
    """Return True for a tensor that holds one real number; the writer thread checks all other values."""
    torch = sys.modules.get("torch")
    try:  # written out: for each value of a call in the training thread
        if torch is None or not isinstance(value, torch.Tensor) or _in_parts(value) or value.numel() != 1:
            return False
        return not (_complex(value) or value.is_sparse or value.is_meta)
    except Exception as error:
        if by_a_signal(error):
            raise
        return False


def _complex(value: Any) -> bool:
    """Return True for a complex number of numpy or torch."""
    kind = getattr(value, "dtype", None)
    return getattr(kind, "kind", "") == "c" or getattr(kind, "is_complex", False) is True


def _shown(value: Any) -> str:
    parts = sheltered(lambda: _in_parts(value), lambda _: None)
    if parts is None:
        return f"something of type {type(value).__name__}"
    return "a DTensor (pass its full_tensor(), on every rank)" if parts else shown(value)


def _defer(entry: QueuedCall, names: list[str]) -> None:
    """Move the tensors called ``names`` out of the entry's metrics, with one transfer for each device."""
    by_device: dict[object, list[str]] = {}
    for name in names:
        by_device.setdefault(_device(entry.metrics[name]), []).append(name)
    for group in by_device.values():
        _set_out(entry, group)


def _device(tensor: Any) -> object:
    def device() -> object:
        hash(found := tensor.device)
        return found

    return call_or(device, lambda _: None)


def _set_out(entry: QueuedCall, names: list[str]) -> None:
    """Copy tensors one by one if they cannot be copied together, so that only the faulty ones are lost."""
    from rlwatch.tensors.transfer import Transfer, freed

    def begun() -> Transfer:
        if any(freed(entry.metrics[name]) for name in names):
            raise ValueError("its memory was freed")
        return Transfer([entry.metrics[name].reshape(()) for name in names])

    def apart(error: Exception) -> None:
        if len(names) > 1:
            for name in names:
                _set_out(entry, [name])
        else:
            entry.metrics[names[0]] = Unreadable(described(error))

    transfer = call_or(begun, apart)
    if transfer is None:
        return
    entry.deferred.append((names, transfer))
    for name in names:
        del entry.metrics[name]


# A step whose other parts are still on their way from the other ranks.

logger = logging.getLogger("rlwatch")
PATIENCE_S = 30.0
"""Largest number of seconds that a step waits for measurements of other ranks; training does not wait at all."""
RANKS = "rlwatch/ranks"


@dataclass(slots=True)
class Awaited:
    """A step in the writer's queue whose measurements of other ranks are still to come; items behind it wait with it.

    Parameters
    ----------
    parcel
        Rank 0's own measurements.
    inbox
        Measurements that other ranks sent.
    moment
        Key of this step's measurements in the inbox.
    ts
        Time of the step, Unix seconds.
    seen
        Called with the merged metrics of all ranks.
    until
        Monotonic time until which it waits, seconds.
    """

    parcel: PendingRecord
    inbox: Inbox
    moment: StepKey
    ts: float
    seen: Callable[[Mapping[str, float]], object] = dict
    until: float = field(default_factory=lambda: time.monotonic() + PATIENCE_S)

    @property
    def step(self) -> int:
        """Optimizer step whose measurements are awaited."""
        return self.parcel.step

    def due(self, *, hurry: bool = False) -> bool:
        """Return whether the step can be recorded: all measurements are here, or none is waited for any more.

        ``hurry``: do not wait for missing ones.
        """
        missing = self.inbox.awaited(self.moment)
        if not missing and self.parcel.ready():
            return True
        if not hurry and time.monotonic() < self.until:
            return False
        if missing:
            self.inbox.mark_absent(missing)
            named = ", ".join(map(str, sorted(missing)))
            logger.warning(
                "step %d is recorded without the share of rank %s, which did not come; it is not waited for until it "
                "keeps up again",
                self.moment.step,
                named,
            )
        return True

    def opened(self) -> tuple[QueuedCall, Sequence[SpikeBatch]]:
        """Merge the measurements of all ranks; return the step's metrics as a queued row, and the batches of extreme
        tokens of each rank.
        """
        others = self.inbox.take(self.moment)
        metrics, spikes = self.parcel.merged(others)
        self.seen(metrics)
        return QueuedCall(self.parcel.step, clean_names({**metrics, RANKS: 1 + len(others)}), self.ts), spikes


FULL = "rlwatch's queue is full; records are dropped, training is not slowed"
UNKEPT = "what is logged is not kept beside the database: the last tenth of a second would be lost with the process"


class BoundedQueue(Generic[T]):
    """Queue of at most ``maxsize`` items; when full, it refuses the newest item instead of making the caller wait.

    ``deque.append`` and ``popleft`` are atomic, so neither side waits for the other. With several producers the bound
    may be exceeded by their number at most.
    """

    def __init__(self, maxsize: int) -> None:
        if maxsize < 1:
            raise ValueError(f"queue size must be >= 1, got {maxsize}")
        self.maxsize = maxsize
        self._items: deque[T] = deque()

    def offer(self, item: T) -> bool:
        """Append ``item`` and return True; return False, without the item, if the queue is full."""
        if len(self._items) >= self.maxsize:
            return False
        self._items.append(item)
        return True

    def drain(self, limit: int) -> list[T]:
        """Remove and return up to ``limit`` items, oldest first."""
        out: list[T] = []
        try:
            while len(out) < limit:
                out.append(self._items.popleft())
        except IndexError:
            pass
        return out

    def waiting(self) -> list[T]:
        """Return the items that are in the queue now, oldest first."""
        return list(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass(slots=True)
class Numbered:
    """An item in the queue that is also in the journal (file that keeps items until they are stored) under
    ``number``.
    """

    item: SpikeBatch | CompletionBatch | Event
    number: int


Queued = QueuedCall | SpikeBatch | CompletionBatch | Event | Awaited | Numbered
Waiting = Queued | KeptRow
"""Contents of the queue: items, and rows that were taken by the fast path."""


class Intake:
    """Takes everything that is logged: :meth:`put` may be called from any thread, and never raises or waits.

    Parameters
    ----------
    queue
        Queue from which the writer thread reads.
    journal
        File that keeps items until they are stored; None: none.
    counters
        Counts dropped items.
    """

    def __init__(self, queue: BoundedQueue[Waiting], journal: Journal | None, counters: Counters) -> None:
        self.queue = queue
        self.journal = journal
        self.spilling = False
        """True while entries go into the journal alone; the writer thread ends it when it has caught up."""
        self._counters = counters
        self.shedding = Shedding(counters)
        self._sparing = Sparing()

    def quick(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Take a row whose metrics have the names and types of earlier rows, in half the time of :meth:`put`.

        Return False if the row was not taken; then call :meth:`put`. If it raises, the row was not taken either.
        """
        journal = self.journal
        kept = journal.keep(step, metrics) if type(metrics) is dict and journal is not None else None
        if kept is None:
            return False
        queued = False
        try:
            queued = self.spilling or self.queue.offer(kept)
        except (MemoryError, RecursionError):
            pass
        finally:
            if not queued:  # it is read of the journal
                self.spilling = True
        return True

    def put(self, item: Queued) -> None:
        """Take an item, to be stored later.

        If there is no space, it is dropped and counted. If space is short, items of the least important kinds are left
        out and counted.
        """
        journal = self.journal
        if journal is not None and (journal.filled >= NEARLY or journal.cramped) and not self.takes(item):
            return
        number, whole = self._kept(item)
        if number and whole and self.spilling:
            return
        if number and not isinstance(item, QueuedCall | Awaited | Numbered):
            item = Numbered(item, number)
        if self.queue.offer(item):
            return
        if number and whole:
            self.spilling = True
        else:
            self._counters.warn("dropped", FULL)
            if isinstance(item, QueuedCall | Awaited):
                self._counters.lose(item.step)

    def takes(self, item: Queued) -> bool:
        """Return whether there is space for ``item``, or for the part of it that is kept when space is short."""
        taken = self.room_taken
        if taken < NEARLY:
            return True
        if isinstance(item, SpikeBatch | CompletionBatch):
            return self.shedding.takes(item, taken)
        return (
            not isinstance(item, QueuedCall) or self.shedding.cut(item.step, item.metrics, taken) or bool(item.deferred)
        )

    def wants(self, batch: SpikeBatch) -> bool:
        """Return whether the batch is to be logged: False for token histograms of steps that are left out to save
        space.

        Call it only once for a batch.
        """
        return batch.reason != DISTRIBUTIONS or self._sparing.due()

    @property
    def room_taken(self) -> float:
        """Used share, 0 to 1, of the space for items that wait to be stored: of the journal file, or of memory if the
        disk is full.
        """
        if self.journal is None:
            return 0.0
        if self.journal.cramped:
            return max(self.journal.filled, 0.5 + 0.5 * len(self.queue) / self.queue.maxsize)
        return self.journal.filled

    def _kept(self, item: Queued) -> tuple[int, bool]:
        """Write the item into the journal; return its number there (0: none), and whether all of it was kept."""
        if self.journal is None or isinstance(item, Awaited | Numbered):
            return 0, False
        try:  # written out: in every call of the training thread
            if isinstance(item, QueuedCall):
                numbers, whole = plain_numbers(item)
                if not numbers:  # all of it is still on a device, or no number at all
                    return 0, False
                number = item.number = self.journal.append_record(item.step, item.ts, numbers, whole=whole)
            else:
                number, whole = self.journal.append(item), True
        except Exception as error:
            if by_a_signal(error):
                raise
            return 0, False  # an arbitrary object: the writer thread reports what is wrong with it
        if not number:
            self._counters.warn("unkept", UNKEPT)
        return number, whole
