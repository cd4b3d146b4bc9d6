"""The writer thread: drains the queue at short intervals and passes batches to the sinks, the store first.

* Order of arrival is kept; every row and event gets the next ``seq``, its position in the run's stream.
* A step that awaits the measurements of other ranks holds back items queued after it; the sinks still tick.
* A sink that raises is counted and warned of once; the other sinks still get the batch. Nothing ends the thread.
* Stored rows are passed to the judge, which has a thread of its own: storing never waits for it. Its findings come
  back here to be stored, because one thread writes.
* If a row has layer norms, statistics of the layers are added to it; they are learnt anew in each process.
* ``flush`` and ``stop`` wait until a deadline, never longer; the thread is a daemon.

A process killed without warning (SIGKILL) loses nothing of plain numbers, events, spikes and completions: they are in
the run's journal before the call returns. Values that are still on a device then, and steps of several ranks, are
stored within ``interval`` (0.1 s) of being known.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rlwatch.clock import Clock
from rlwatch.error_boundary import described, raised_by, sheltered
from rlwatch.errors import StoreError, UnstorableError
from rlwatch.ports import Checkpoint, Item, KeptRow, Progress, RunWriter, Sink, Storable
from rlwatch.recorder.intake import Awaited, BoundedQueue, Intake, Numbered, Queued, QueuedCall, Waiting, numbers
from rlwatch.recorder.losses import EVICTED_FROM, Counters
from rlwatch.records import SHED, CompletionBatch, Event, Finding, ForecastRecord, SpikeBatch, StepRecord

if TYPE_CHECKING:
    from rlwatch.layers import DerivedLayers


BATCH_LIMIT = 1000
READ_AHEAD = 10 * BATCH_LIMIT
"""Number of items that are read from the journal at once: as many as may wait in the queue."""
FOUND_STORED_S = 2.0
"""Largest number of seconds that the judge waits for its findings to be stored before it continues."""
LEAVE_FAILING = 0.6
"""Share of a deadline after which judging is left to the next process if the store accepts nothing.

The rest of the time is for saving what can be saved, and for reporting what cannot.
"""
MOST_NOTED = 8
"""Largest number of events about dropped data that are noted in the space reserved for the end."""
FORECASTS_WAITING = 16
"""Number of batches of forecasts that may wait to be stored while the judge continues."""
CALM_ROUNDS = 100
"""Number of rounds after which no thread is about to queue entries that were read from the journal already."""
_REPORTED = (
    "dropped",
    "errors",
    "bad_records",
    "bad_values",
    "bad_calls",
    "skipped",
    "unkept",
    "shed",
)  # counters that travel as metrics of the run


class Judge(Protocol):
    """Interface of the part that judges stored rows on a thread of its own."""

    @property
    def done(self) -> bool:
        """True once all rows that were passed to it are judged."""
        ...

    def take(self, batch: Sequence[Item]) -> None:
        """Take rows and events that were stored. Never waits."""
        ...

    def ask(self) -> None:
        """Judge the rows that wait without waiting for others, because the result is waited for."""
        ...

    def hurry(self) -> None:
        """Judge without the rests that limit the use of the processor, because the run is ending. Takes no lock and
        never raises.
        """
        ...

    def end(self) -> None:
        """Judge the remaining rows, the last step included, then stop. Returns at once."""
        ...

    def abandon(self) -> None:
        """Stop as soon as possible, and leave the remaining rows to the next process that opens the run."""
        ...

    @property
    def ended(self) -> bool:
        """True once the judge has stopped."""
        ...


def _done(call: Callable[..., object], *args: object) -> bool:
    call(*args)
    return True


class RecordStamps:
    """Completes logged items to records: position ``seq``, attempt, rank, counters, other metrics, layer statistics.

    Parameters
    ----------
    attempt, rank, last_seq
        Process of the run and rank that records carry; positions ``seq`` continue from ``last_seq``.
    counters
        Counters of losses, which are added to rows when they change.
    other_metrics
        Returns other metrics known by now; a row's own metrics take precedence.
    guard
        Calls a function and catches its exception.
    """

    def __init__(
        self,
        attempt: int,
        rank: int,
        last_seq: int,
        *,
        counters: Counters,
        other_metrics: Callable[[], Mapping[str, float]] | None,
        guard: Callable[..., bool],
    ) -> None:
        self.attempt = attempt
        self.rank = rank
        self.seq = last_seq
        self._counters = counters
        self._other_metrics = other_metrics
        self._guard = guard
        self._reported: dict[str, int] = {}
        self._layers: DerivedLayers | None = None

    def stamp(self, item: Item, batch: list[Item]) -> None:
        """Complete ``item`` to a record and add it to ``batch``."""
        if isinstance(item, SpikeBatch | CompletionBatch):
            batch.append(replace(item, attempt=self.attempt, rank=self.rank or item.rank))
            return
        if not isinstance(item, StepRecord):
            self.seq += 1
            batch.append(replace(item, attempt=self.attempt, seq=self.seq))
            return
        metrics = dict(item.metrics)
        self._report(metrics)
        if self._other_metrics is not None:
            metrics = {**self._other_metrics(), **metrics}
        self._guard(self._derive, item.step, metrics)
        self.seq += 1
        batch.append(StepRecord(item.step, metrics, item.ts, self.attempt, self.rank, self.seq))

    def _derive(self, step: int, metrics: dict[str, float]) -> None:
        if self._layers is None:
            from rlwatch.layers import DerivedLayers  # every metric's name: loaded here, not where a run begins

            self._layers = DerivedLayers()
        self._layers.add(step, metrics)

    def _report(self, metrics: dict[str, float]) -> None:
        """Add counters that changed since the last record."""
        counts = self._counters.snapshot()
        for name in _REPORTED if counts else ():
            count = counts.get(name, 0)
            if count != self._reported.get(name, 0):
                self._reported[name] = count
                metrics[f"rlwatch/{name}"] = float(count)


def has_layers(names: tuple[str, ...]) -> bool:
    """Return True if any of the metric names is the gradient norm of a layer."""
    from rlwatch.layers import layer_norms

    return bool(layer_norms(dict.fromkeys(names, 1.0)))


class SpilledItems:
    """Items that are only in the journal file, because the queue was full; they are read back in order, each once.

    ``reread`` has the numbers of those that were read back, ``ahead`` those that were read and not yet taken. ``calm``
    counts rounds since the queue last overflowed; ``refusals`` is the journal's count of refused items when it last
    dropped some.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.reread: set[int] = set()
        self.ahead: deque[tuple[int, Item]] = deque()
        self.calm = 0
        self.refusals = 0
        self._given_up: list[int] = []

    def next(self, batch: Sequence[int], waiting: Sequence[int], most: int) -> list[tuple[int, Item]]:
        """Return up to ``most`` further items of the journal, each with its number.

        ``batch``, ``waiting``: numbers of items that are in the present batch, or wait to be stored; they are left out.
        Each read of a file starts at its first row, so the call reads many rounds ahead.
        """
        journal = self._intake.journal
        if not self.ahead and journal is not None:
            self.ahead.extend(journal.missing(self.reread.union(batch, waiting), READ_AHEAD))
        return [self.ahead.popleft() for _ in range(min(most, len(self.ahead)))]

    def forget_when_calm(self) -> None:
        """Forget which items were read back, once no thread can be about to queue one of them."""
        if self.reread and self.calm < CALM_ROUNDS:
            self.calm += 1
        else:
            self.reread.clear()

    def given_up(self, numbers: Iterable[int]) -> None:
        """Note the numbers of items that were removed from the journal file to free space."""
        self._given_up = sorted({*self._given_up, *numbers})

    def with_given_up(self, numbers: list[int]) -> list[int]:
        """Return the numbers of items that the journal file need not keep once a batch is stored.

        These are the ``numbers`` of the batch and, before them, those of earlier items that were removed to free space.
        """
        if not numbers or not self._given_up:
            return numbers
        passed = bisect_left(self._given_up, max(numbers))
        due, self._given_up = self._given_up[:passed], self._given_up[passed:]
        return [*due, *numbers]


class FoundItems:
    """Findings and forecasts of the judge, and the position up to which it has judged, on their way to the store."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence[Storable] | tuple[int, Checkpoint | None]] = deque()
        self._numbers = itertools.count(1)
        self.stored = 0
        """Number of the last batch that was given to the store."""

    def put(self, found: Sequence[Storable]) -> int:
        """Queue ``found``, a batch of findings or forecasts, for the store; return the batch's number, 1 for the
        first.
        """
        number = next(self._numbers)
        self._waiting.append(found)
        return number

    def put_progress(self, seq: int, checkpoint: Checkpoint | None) -> None:
        """Queue the position ``seq`` up to which the run is judged, behind all findings so far, and perhaps a
        checkpoint.
        """
        self._waiting.append((seq, checkpoint))

    def hand_over(self, store: StoreSink | None, guard: Callable[..., bool]) -> None:
        """Pass all queued batches and positions to ``store``, in order; ``guard`` calls a function and catches its
        exception.
        """
        while self._waiting:
            found = self._waiting.popleft()
            if isinstance(found, tuple):
                if store is not None:
                    store.judged(*found)
                continue
            if store is not None:
                guard(store.found, found)
            self.stored += 1


@dataclass(frozen=True, slots=True)
class StopDeadlines:
    """Times (seconds of ``time.monotonic``) at which a stopping writer ends its waits.

    ``hurry_at``: for other ranks. ``leave_at``: for the judge while the store refuses; ``enough_at``: otherwise.
    """

    hurry_at: float = float("inf")
    leave_at: float = float("inf")
    enough_at: float = float("inf")

    @classmethod
    def within(cls, deadline_s: float) -> StopDeadlines:
        """Return the deadlines for a stop that may take ``deadline_s`` seconds from now."""
        now = time.monotonic()
        return cls(now + deadline_s / 2, now + LEAVE_FAILING * deadline_s, now + 0.9 * deadline_s)


class Writer:
    """The writer thread of a run: it numbers records, has them stored, and passes them to the judge.

    Parameters
    ----------
    queue
        Queue of the training thread, or the run's intake, which has one.
    sinks
        Receivers of batches, in this order.
    counters
        Counts errors and lost records.
    judge
        Receives batches after the sinks; None: no judge.
    attempt, rank, last_seq
        Process of the run and rank that records carry; positions ``seq`` continue from ``last_seq``.
    interval
        Seconds between two reads of the queue.
    other_metrics
        Returns other metrics known by now; they are added to the next row, under names that the row does not have
        itself.
    """

    def __init__(
        self,
        queue: BoundedQueue[Waiting] | Intake,
        sinks: Sequence[Sink],
        counters: Counters,
        *,
        judge: Judge | None = None,
        attempt: int = 1,
        rank: int = 0,
        last_seq: int = 0,
        interval: float = 0.1,
        other_metrics: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self._intake = queue if isinstance(queue, Intake) else Intake(queue, None, counters)
        self._queue = self._intake.queue
        self._sinks = list(sinks)
        self._store = next((sink for sink in self._sinks if isinstance(sink, StoreSink)), None)
        self.judge = judge
        self._counters = counters
        self._interval = interval
        self._stamps = RecordStamps(
            attempt, rank, last_seq, counters=counters, other_metrics=other_metrics, guard=self._guard
        )
        self._held: deque[Waiting] = deque()
        self._spilled = SpilledItems(self._intake)
        self._found = FoundItems()
        self._stopping = self._ended = self._gave_up = False
        self._ending: Callable[[], object] | None = None
        self._deadlines = StopDeadlines()
        self._wake = threading.Event()
        self._rounds = self._cleared = 0
        self._thread = threading.Thread(target=self._loop, name="rlwatch-writer", daemon=True)
        self.cpu_seconds = 0.0

    def start(self) -> None:
        """Start the writer thread."""
        self._thread.start()

    def keep(self, found: Sequence[Storable]) -> None:
        """Have ``found``, findings and forecasts of the judge, stored; wait until they are, unless the store cannot be
        written now.

        Forecasts alone are not waited for: a few batches of them may wait while judging continues.
        """
        number, end = self._found.put(found), time.monotonic() + FOUND_STORED_S
        if all(isinstance(item, ForecastRecord) for item in found):
            number -= FORECASTS_WAITING
        while self._found.stored < number and self._thread.is_alive() and time.monotonic() < end:
            self._wake.set()
            if self._store is not None and self._store.failing:
                return
            time.sleep(0.002)

    def judged(self, seq: int, checkpoint: Checkpoint | None = None) -> None:
        """Store the position ``seq`` up to which the run is judged, after all findings so far: never before they are
        stored.

        ``checkpoint``: state of the judge at this position; None: none.
        """
        self._found.put_progress(seq, checkpoint)

    def flush(self, deadline_s: float) -> bool:
        """Wait until what is queued now is stored and judged; return False if ``deadline_s`` seconds
        were not enough.
        """
        end = time.monotonic() + deadline_s
        return self._cleared_by(end) and self._judged_by(end) and self._cleared_by(end)

    def stop(self, deadline_s: float, ending: Callable[[], object] | None = None) -> bool:
        """Store and judge everything, close the sinks, call ``ending`` and end the thread; False if the deadline
        passed first.

        For half of ``deadline_s`` seconds other ranks may still be waited for; a tenth of it is kept from the judge,
        for storing its findings. Safe in a signal handler: it takes no lock that an interrupted thread could hold.
        """
        self._deadlines = StopDeadlines.within(deadline_s)
        self._ending = ending or self._ending
        self._stopping = True
        if self.judge is not None:
            self.judge.hurry()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return self._ended

    @property
    def ended(self) -> bool:
        """True once the thread has done all it could and ended."""
        return self._ended

    @property
    def judged_all(self) -> bool:
        """True if the judge, if there is one, came to the end of what was recorded."""
        return self.judge is None or not self._gave_up

    def _cleared_by(self, end: float) -> bool:
        target = self._rounds + 2
        while self._thread.is_alive() and self._cleared < target:
            self._wake.set()
            if time.monotonic() >= end:
                return False
            time.sleep(0.002)
        return True

    def _judged_by(self, end: float) -> bool:
        while self.judge is not None and not self.judge.done and self._thread.is_alive():
            if time.monotonic() >= end:
                return False
            self.judge.ask()
            time.sleep(0.002)
        return True

    def _loop(self) -> None:
        while not sheltered(self._turn, self._not_recorded):  # the thread error boundary: see the module's third point
            pass
        for sink in self._sinks:
            self._guard(sink.close)
        if self._ending is not None:
            self._guard(self._ending)
        self._ended = True

    def _turn(self) -> bool:
        """Do one round and the wait after it; return whether it was the last."""
        stopping = self._stopping
        self._round()
        idle = not self._held and not len(self._queue) and not self._intake.spilling
        if stopping and idle and self._judge_ended():
            self._found.hand_over(self._store, self._guard)
            return True
        if self._held or len(self._queue) < BATCH_LIMIT:
            self._wake.wait(0.01 if stopping and idle else self._interval)
            self._wake.clear()
        return False

    def _judge_ended(self) -> bool:
        if self.judge is None:
            return True
        self._guard(self.judge.end)
        failing = self._store is not None and self._store.failing
        if time.monotonic() >= (self._deadlines.leave_at if failing else self._deadlines.enough_at):
            self._gave_up = not self.judge.ended
            self._guard(self.judge.abandon)
            return True
        return self.judge.ended

    def _round(self) -> None:
        batch: list[Item] = []
        numbers: list[int] = []
        self._make_room()
        room = BATCH_LIMIT if self._store is None else min(BATCH_LIMIT, self._store.room)
        room = max(0, room - len(self._held))
        drained = self._queue.drain(room)
        self._held.extend(drained)
        while self._held and self._due(self._held[0]):
            if isinstance(self._held[0], tuple):
                self._guard_kept(batch, numbers)
            else:
                self._guard_item(self._held.popleft(), batch, numbers)
        if self._intake.spilling:
            self._spilled.calm = 0
            if len(batch) < room and not self._held and not len(self._queue):
                self._catch_up(batch, numbers, room - len(batch))
        else:
            self._spilled.forget_when_calm()
        self._hand_over(batch, numbers)
        self._found.hand_over(self._store, self._guard)
        self._rounds += 1
        if not self._held and len(drained) < room and not self._intake.spilling:
            self._cleared = self._rounds  # nothing of what was queued before this round is left
        self.cpu_seconds = time.thread_time()

    def _make_room(self) -> None:
        """Tend the journal; while it is too full, drop tokens that it has, then completions."""
        journal, shedding = self._intake.journal, self._intake.shedding
        if journal is None:
            return
        journal.tend()
        for kind in (SpikeBatch, CompletionBatch):
            # On a full disk a file goes for each time that something found no room, and not before the next.
            while journal.filled >= EVICTED_FROM or journal.refusals > self._spilled.refusals:
                held = journal.give_up(kind)
                if held is None:
                    break
                self._shed(held)
                self._spilled.refusals = journal.refusals
        why = f"the store took nothing{self._trouble()}, and {journal.limit}"
        for event in shedding.tell(time.monotonic(), why, last=self._stopping):
            self._intake.put(replace(event, ts=time.time()))

    def unkept(self) -> list[int]:
        """Return the steps of the rows that wait to be stored and are in no journal file: they are lost if the process
        ends now.
        """
        waiting = [
            queued for queued in (*self._held, *self._queue.waiting()) if isinstance(queued, QueuedCall | Awaited)
        ]
        steps = [queued.step for queued in waiting if isinstance(queued, Awaited) or not queued.number]
        return steps + ([] if self._store is None else [row.step for row in self._store.unkept()])

    def give_up_unkept(self) -> None:
        """Count the rows that are lost if the process ends now, and note them in the journal file."""
        steps = self.unkept()
        for step in steps:
            self._counters.lose(step)
        if steps:
            self._counters.warn("dropped", "the process had no time to store its last rows", len(steps))
        if self._store is not None:
            waiting = (*self._held, *self._queue.waiting())
            self._store.note_lost(steps, [queued for queued in waiting if isinstance(queued, Event)])

    @property
    def trouble(self) -> str:
        """Reason why the store last refused a batch; empty if it never did."""
        return "" if self._store is None else self._store.trouble

    def _trouble(self) -> str:
        return f" ({self._store.trouble})" if self._store is not None and self._store.trouble else ""

    def _shed(self, held: Sequence[tuple[int, Item]]) -> None:
        """Count entries that the journal dropped as lost, unless they also wait in memory."""
        queued = {q.number for q in (*self._held, *self._queue.waiting()) if isinstance(q, QueuedCall | Numbered)}
        queued.update(number for number, _ in self._spilled.ahead)
        waiting = queued.union(() if self._store is None else self._store.waiting)
        lost = [(number, item) for number, item in held if number not in waiting]
        for _, item in lost:
            if isinstance(item, SpikeBatch | CompletionBatch):
                self._intake.shedding.give_up(item)
        self._spilled.given_up(number for number, _ in lost)

    def _hand_over(self, batch: list[Item], numbers: list[int]) -> None:
        """Pass a batch to the sinks, then to the judge; ``numbers``: those of its entries in the journal."""
        numbers = self._spilled.with_given_up(numbers)
        for sink in self._sinks:
            if sink is self._store and (batch or numbers):
                self._guard(self._store.write, batch, numbers)
            elif batch:
                self._guard(sink.write, batch)
            self._guard(sink.tick)
        lost = set(map(id, self._store.lost())) if self._store is not None else set()
        if batch and self.judge is not None:
            self._guard(self.judge.take, [item for item in batch if id(item) not in lost] if lost else batch)

    def _catch_up(self, batch: list[Item], numbers: list[int], most: int) -> None:
        """Read from the journal up to ``most`` entries that did not fit into the queue, in the order in which they
        were logged.
        """
        waiting = () if self._store is None else self._store.waiting
        left = self._spilled.next(numbers, waiting, most)
        if not left:
            self._intake.spilling = False
            left = self._spilled.next(
                numbers, waiting, most
            )  # what was logged until it was seen that there is room again
            self._intake.spilling = len(left) == most
        for number, item in left:
            self._spilled.reread.add(number)
            self._guard_take(self._stamps.stamp, item, batch, number, numbers)

    def _guard(self, call: Callable[..., object], *args: object) -> bool:
        """Call a sink, so that no exception ends the thread or reaches training; return whether it succeeded."""
        return sheltered(partial(_done, call, *args), self._not_done)

    def _not_done(self, error: BaseException) -> bool:
        self._counters.warn("errors", f"rlwatch could not record: {described(error)}")
        return False

    def _not_recorded(self, error: BaseException) -> bool:
        self._not_done(error)
        time.sleep(0.01)
        return False

    def _due(self, queued: Waiting) -> bool:
        """Return True for an item that can be recorded now."""
        return not isinstance(queued, Awaited) or queued.due(hurry=time.monotonic() >= self._deadlines.hurry_at)

    def _guard_item(self, queued: Waiting, batch: list[Item], numbers: list[int]) -> None:
        """Turn a queued item into numbered records at the end of ``batch``; one that cannot be read is
        a counted loss.
        """
        number = queued.number if isinstance(queued, QueuedCall | Numbered) else 0
        if number and number in self._spilled.reread:
            return
        if not self._guard_take(self._take, queued, batch, number, numbers):
            self._counters.add("dropped")
            if isinstance(queued, QueuedCall | Awaited):
                self._counters.lose(queued.step)

    def _guard_kept(self, batch: list[Item], numbers: list[int]) -> None:
        """Take consecutive rows of the fast path: all of them, or none, which are then read from the journal."""
        kept: list[KeptRow] = []
        while self._held and isinstance(first := self._held[0], tuple):
            kept.append(first)
            self._held.popleft()
        before, noted, seq = len(batch), len(numbers), self._stamps.seq
        if not self._guard(self._take_kept, kept, batch, numbers):
            del batch[before:], numbers[noted:]
            self._stamps.seq, self._intake.spilling = seq, True

    def _take_kept(self, kept: Sequence[KeptRow], batch: list[Item], numbers: list[int]) -> None:
        """Add rows to the batch; counters and other known metrics go with the first of them."""
        stamps, reread = self._stamps, self._spilled.reread
        attempt, rank, plain = stamps.attempt, stamps.rank, None
        for frame, shape in kept:
            number, step, ts, metrics = shape.opened(frame)
            if number in reread:
                continue
            numbers.append(number)
            if shape is plain:
                stamps.seq += 1
                batch.append(StepRecord(step, metrics, ts, attempt, rank, stamps.seq))
            else:
                stamps.stamp(StepRecord(step, metrics.plain(), ts), batch)
                plain = None if has_layers(shape.names) else shape

    def _guard_take(
        self,
        take: Callable[[Any, list[Item]], object],
        what: object,
        batch: list[Item],
        number: int,
        numbers: list[int],
    ) -> bool:
        """Put an item at the end of ``batch`` and note its number, or do neither, also where memory runs out.

        A row whose number is missing would come once more, from the journal.
        """
        before, noted = len(batch), len(numbers)
        taken = self._guard(numbers.append, number) if number else True
        if taken and self._guard(take, what, batch):
            return True
        del batch[before:], numbers[noted:]
        return False

    def _take(self, queued: Queued, batch: list[Item]) -> None:
        if isinstance(queued, Awaited):
            entry, spikes = queued.opened()  # the metrics are the run's, the extreme tokens know their rank
            self._take(entry, batch)
            wanted = (spike for spike in spikes if self._intake.wants(spike) and self._intake.takes(spike))
            batch.extend(replace(spike, attempt=self._stamps.attempt) for spike in wanted)
        elif isinstance(queued, QueuedCall):
            if metrics := numbers(queued, self._counters):
                self._stamps.stamp(StepRecord(queued.step, metrics, queued.ts), batch)
        else:
            self._stamps.stamp(queued.item if isinstance(queued, Numbered) else queued, batch)


# The sink that writes a run's batches to its store, and waits out a full disk.

HEARTBEAT_S = 5.0
LASTS_S = 1.0
"""A stage that has lasted for so many seconds is written at once, so that it is known if the process is killed."""
FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 5.0
"""Seconds between two attempts to write to a store that refuses: first and longest pause.

Each pause is twice the last, less up to three tenths, so that trainers that were refused together do not all come back
together.
"""
_LATER = (StoreError, OSError, MemoryError)
"""Errors that may be temporary: the same call is made again."""


class StoreSink:
    """Sink that writes a run's batches to its store, and keeps up to ``max_backlog`` items while the store refuses.

    It tries again, in order, ever less often. A batch is written completely or not at all. When the backlog is full the
    newest items are dropped and counted as ``dropped``; so is an item that no store can hold.

    Parameters
    ----------
    writer
        Writer of the run in the store.
    counters, clock
        Counts dropped items; the clock.
    max_backlog
        Largest number of items that wait.
    stage
        Returns the stage of the process and its beginning (Unix seconds). It is stored with the heartbeat, at once if
        the stage has lasted for a second.
    """

    def __init__(
        self,
        writer: RunWriter,
        counters: Counters,
        clock: Clock,
        max_backlog: int = 10_000,
        stage: Callable[[], tuple[str, float | None]] = lambda: ("", None),
    ) -> None:
        self._stage = stage
        self._last_stage: tuple[str, float | None] = ("", None)
        self._writer = writer
        self._counters = counters
        self._clock = clock
        self._max_backlog = max_backlog
        self._backlog: list[Storable] = []
        self._journaled: list[int] = []
        self._judged: int | None = None
        self._checkpoint: Checkpoint | None = None
        self._heartbeat_due = self._retry_due = 0.0
        self._pause_s = FIRST_RETRY_S
        self.trouble = ""
        """Reason of the store's last refusal; empty if it never refused."""
        self._lost: list[Storable] = []

    @property
    def failing(self) -> bool:
        """True while items wait because the store refused them."""
        return bool(self._backlog)

    @property
    def room(self) -> int:
        """Number of items that can be taken now without dropping any."""
        return max(0, self._max_backlog - len(self._backlog))

    @property
    def waiting(self) -> Sequence[int]:
        """Numbers, in the journal file, of the items that were taken and are not stored yet."""
        return self._journaled

    def judged(self, seq: int, checkpoint: Checkpoint | None = None) -> None:
        """Store, with the next write, the position ``seq`` up to which the run is judged; all findings so far were
        passed before.

        ``checkpoint``: state of the judge at this position; None: none.
        """
        self._judged, self._checkpoint = seq, checkpoint or self._checkpoint

    def write(self, batch: Sequence[Storable], numbers: Sequence[int] = ()) -> None:
        """Store the batch, after any items still waiting.

        ``numbers``: those under which the journal file has items of the batch. They are noted once the batch is kept
        here: items that got lost before that are still in the file.
        """
        room = self.room
        backlog, journaled = [*self._backlog, *batch[:room]], [*self._journaled, *numbers]
        self._backlog, self._journaled = backlog, journaled  # both or, where memory runs out, none
        if len(batch) > room:
            self._counters.warn("dropped", "the store cannot be written; records are dropped", len(batch) - room)
            self._count_lost(batch[room:])
        self._drain_if_due()

    def lost(self) -> list[Storable]:
        """Return the items that were dropped since the last call, because they cannot be stored."""
        lost, self._lost = self._lost, []
        return lost

    def found(self, found: Sequence[Storable]) -> None:
        """Store ``found``, findings and forecasts, which are few and never dropped, after any items still waiting."""
        self._backlog.extend(found)
        self._drain_if_due()

    def tick(self) -> None:
        """Retry waiting items, store the position of the judge, and store a heartbeat when it is due."""
        if self._backlog or self._journaled or self._judged is not None:
            self._drain_if_due()
        now, (stage, since) = self._clock.monotonic(), self._stage()
        lasts = (stage, since) != self._last_stage and since is not None and time.time() - since >= LASTS_S
        if now >= self._heartbeat_due or lasts:
            self._heartbeat_due, self._last_stage = now + HEARTBEAT_S, (stage, since)
            self._writer.heartbeat(self._clock.now(), stage, since)

    def close(self) -> None:
        """Try once more to store waiting items; those that cannot be written, and are not in the journal file, are
        counted as lost.
        """
        if self._backlog or self._journaled or self._judged is not None:
            self._drain()
        if not self._backlog:
            return
        journal = self._writer.journal
        kept_by_disk = journal is None or journal.on_disk()
        lost, kept = len(self._backlog), self._kept() if kept_by_disk else 0
        if kept:  # findings of these rows are made again by the next process that brings the rows into the store
            lost = sum(not isinstance(item, Finding | ForecastRecord) for item in self._backlog) - kept
        rows = self.unkept() if kept_by_disk else [item for item in self._backlog if isinstance(item, StepRecord)]
        self._count_lost(rows)
        if lost > 0:
            why = "" if kept_by_disk else ", and its disk refuses what the kernel had not written yet"
            self._counters.warn("dropped", f"the store could not be written at the end{why}", lost)
        self._store_lost(rows, judged=not kept)

    def unkept(self) -> list[StepRecord]:
        """Return the rows that wait to be stored and are in no journal file."""
        rows, journal = [item for item in self._backlog if isinstance(item, StepRecord)], self._writer.journal
        if not rows or not self._journaled or journal is None:
            return rows
        waiting = set(self._journaled)
        held = Counter(item.step for number, item in journal.missing() if number in waiting)
        lost = []
        for row in rows:
            held[row.step] -= 1
            if held[row.step] < 0:
                lost.append(row)
        return lost

    def _store_lost(self, rows: Sequence[StepRecord], *, judged: bool) -> None:
        """Store findings, and an event that lists lost rows, in the space reserved for them."""
        journal = self._writer.journal
        if journal is not None:
            journal.make_room()
        items = [item for item in self._backlog if isinstance(item, Finding | Event)]
        event = None
        if rows:
            attempt, last = self._writer.run.attempt, max(item.seq for item in (*rows, *items))
            event = replace(self._lost_event([row.step for row in rows]), attempt=attempt, seq=last + 1)
            items.append(event)
        progress = Progress((), self._judged, None) if judged and self._judged is not None else None
        if not items and progress is None:
            return
        refused = raised_by(self._writer.write, *((items,) if progress is None else (items, progress)))
        if refused is not None and event is not None and journal is not None:
            journal.note_lost(event)

    def _lost_event(self, steps: Sequence[int]) -> Event:
        why = f"the store took nothing to the end ({self.trouble})"
        first, last = min(steps), max(steps)
        body = {"what": "metric rows", "n": len(steps), "first_step": first, "last_step": last, "why": why}
        return Event(SHED, last, body, self._clock.now())

    def note_lost(self, steps: Sequence[int], events: Sequence[Event] = ()) -> None:
        """Note in the journal file that rows of ``steps`` are lost, because the process has no time to try the store
        again.

        ``events``: events not stored yet; those that report dropped data are noted as well.
        """
        journal = self._writer.journal
        if journal is None or not self.failing:
            return
        waiting = [item for item in self._backlog if isinstance(item, Event)]
        for event in [event for event in (*waiting, *events) if event.kind == SHED][:MOST_NOTED]:
            journal.note_lost(event)
        if steps:
            journal.note_lost(self._lost_event(steps))

    def _count_lost(self, items: Sequence[Storable]) -> None:
        for item in items:
            if isinstance(item, StepRecord):
                self._counters.lose(item.step)

    def _kept(self) -> int:
        """Return the number of items that wait here and are still in the journal, which may be gone with the run's
        directory.
        """
        journal = self._writer.journal
        if not self._backlog or not self._journaled or journal is None:
            return 0
        waiting = set(self._journaled)
        return sum(number in waiting for number, _ in journal.missing())

    def _drain_if_due(self) -> None:
        """Write waiting items, unless the store refused just now."""
        if self._clock.monotonic() >= self._retry_due:
            self._drain()

    def _drain(self) -> None:
        while True:
            waiting, progress, none_left = self._backlog, self._progress(), list[Storable]()
            error = raised_by(self._writer.write, *((waiting,) if progress is None else (waiting, progress)))
            if error is None:
                self._backlog = none_left  # made before: what is stored must not wait any more
                self._pause_s = FIRST_RETRY_S
                return self._settled(progress)
            at = None
            if isinstance(error, UnstorableError):
                at = next((k for k, item in enumerate(waiting) if item is error.item), None)
            elif isinstance(error, _LATER):
                return self._later(error)
            if at is None:  # a store's own trouble with an item: the others must be stored
                return self._sift()
            self._lose(waiting[at], f"what no store can hold is dropped: {error}")
            self._backlog = [*waiting[:at], *waiting[at + 1 :]]

    def _sift(self) -> None:
        """Write items one by one, to lose only those that cannot be stored."""
        waiting, self._backlog = self._backlog, []
        for at, item in enumerate(waiting):
            error = raised_by(self._writer.write, [item])
            if isinstance(error, UnstorableError):
                self._lose(item, f"what no store can hold is dropped: {error}")
            elif isinstance(error, _LATER):
                self._backlog = list(waiting[at:])
                return self._later(error)
            elif error is not None:
                self._lose(item, f"what the store fails at is dropped: {described(error)}")
        progress = self._progress()
        if progress is not None:
            try:
                self._writer.write([], progress)
            except _LATER as error:
                return self._later(error)
            self._settled(progress)
        return None

    def _lose(self, item: Storable, why: str) -> None:
        self._lost.append(item)
        self._count_lost([item])
        self._counters.warn("dropped", why)

    def _later(self, error: BaseException) -> None:
        self._retry_due = self._clock.monotonic() + self._pause_s * random.uniform(0.7, 1.0)
        self.trouble = str(error)
        self._pause_s = min(2.0 * self._pause_s, LONGEST_RETRY_S)
        self._counters.warn("errors", f"the store cannot be written, trying again: {error}")

    def _progress(self) -> Progress | None:
        if not self._journaled and self._judged is None and self._checkpoint is None:
            return None
        return Progress(tuple(self._journaled), self._judged, self._checkpoint)

    def _settled(self, progress: Progress | None) -> None:
        if progress is None:
            return
        self._journaled = self._journaled[len(progress.journaled) :]
        if self._judged == progress.judged:
            self._judged = None
        if self._checkpoint is progress.checkpoint:
            self._checkpoint = None
