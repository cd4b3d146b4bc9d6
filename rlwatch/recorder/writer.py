"""The writer thread: drains the queue in small intervals and hands batches to the sinks.

* Order of arrival is kept; every record and event gets the next ``seq``.
* A step that awaits the shares of other ranks holds back what was queued after it; the sinks go on ticking.
* A sink that raises is counted and warned of once; the others still get the batch.
* Where a record holds layer norms, what they say of the layers is added to it; it learns anew in each process.
* ``flush`` and ``stop`` wait until a deadline, never longer; the thread is a daemon.

A process killed without warning (SIGKILL) loses at most the last ``interval`` (0.1 s) of records.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from rlwatch.layers import DerivedLayers
from rlwatch.ports import Item, Sink
from rlwatch.recorder.awaited import Awaited
from rlwatch.recorder.counters import Counters
from rlwatch.recorder.intake import Entry, numbers
from rlwatch.recorder.queue import BoundedQueue
from rlwatch.records import CompletionBatch, Event, SpikeBatch, StepRecord

Queued = Entry | SpikeBatch | CompletionBatch | Event | Awaited
BATCH_LIMIT = 1000
_REPORTED = ("dropped", "errors")  # counters that travel as metrics of the run


class Writer:
    """Owns the thread.

    Parameters
    ----------
    queue
        What the training thread offers into.
    sinks
        Where batches go, in this order.
    attempt, last_seq
        Stamped onto records; ``seq`` continues from ``last_seq``.
    interval
        Seconds between two looks at the queue.
    """

    def __init__(
        self,
        queue: BoundedQueue[Queued],
        sinks: Sequence[Sink],
        counters: Counters,
        *,
        attempt: int = 1,
        rank: int = 0,
        last_seq: int = 0,
        interval: float = 0.1,
    ) -> None:
        self._queue = queue
        self._sinks = list(sinks)
        self._counters = counters
        self._attempt = attempt
        self._rank = rank
        self._seq = last_seq
        self._interval = interval
        self._reported: dict[str, int] = {}
        self._layers = DerivedLayers()
        self._held: deque[Queued] = deque()
        self._stopping = False
        self._hurry_at = float("inf")
        self._wake = threading.Event()
        self._rounds = self._cleared = 0
        self._thread = threading.Thread(target=self._loop, name="rlwatch-writer", daemon=True)
        self.cpu_seconds = 0.0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def flush(self, deadline_s: float) -> bool:
        """Wait until what is queued now has been through the sinks; False when the deadline passed."""
        target, end = self._rounds + 2, time.monotonic() + deadline_s
        while self._thread.is_alive() and self._cleared < target:
            self._wake.set()
            if time.monotonic() >= end:
                return False
            time.sleep(0.002)
        return True

    def stop(self, deadline_s: float) -> bool:
        """Drain, close the sinks and end the thread; False when the deadline passed first.

        For half of it other ranks may still be waited for. Safe in a signal handler: it takes no lock that an
        interrupted thread could hold.
        """
        self._hurry_at = time.monotonic() + deadline_s / 2
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            stopping = self._stopping
            self._round()
            if stopping and not self._held and not len(self._queue):
                break
            if self._held or len(self._queue) < BATCH_LIMIT:
                self._wake.wait(self._interval)
                self._wake.clear()
        for sink in self._sinks:
            self._guard(sink.close)

    def _round(self) -> None:
        batch: list[Item] = []
        room = BATCH_LIMIT - len(self._held)
        drained = self._queue.drain(room)
        self._held.extend(drained)
        while self._held and self._due(self._held[0]):
            self._guard(self._take, self._held.popleft(), batch)
        for sink in self._sinks:
            if batch:
                self._guard(sink.write, batch)
            self._guard(sink.tick)
        self._rounds += 1
        if not self._held and len(drained) < room:  # nothing of what was queued before this round is left
            self._cleared = self._rounds
        self.cpu_seconds = time.thread_time()

    def _guard(self, call: object, *args: object) -> None:
        """The writer-thread seam: nothing a sink does may end the thread or reach training."""
        try:
            call(*args)  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001  (any store, any detector)
            self._counters.warn("errors", f"rlwatch could not record: {type(error).__name__}: {error}")

    def _due(self, queued: Queued) -> bool:
        """Whether it can be recorded now."""
        return not isinstance(queued, Awaited) or queued.due(hurry=time.monotonic() >= self._hurry_at)

    def _take(self, queued: Queued, batch: list[Item]) -> None:
        """Turn what was queued into a stamped record at the end of ``batch``."""
        if isinstance(queued, Awaited):
            self._open(queued, batch)
        elif isinstance(queued, SpikeBatch | CompletionBatch):
            batch.append(replace(queued, attempt=self._attempt, rank=self._rank or queued.rank))
        elif isinstance(queued, Event):
            self._seq += 1
            batch.append(replace(queued, attempt=self._attempt, seq=self._seq))
        elif metrics := numbers(queued, self._counters):
            self._report(metrics)
            self._guard(self._layers.add, queued.step, metrics)
            self._seq += 1
            batch.append(StepRecord(queued.step, metrics, queued.ts, self._attempt, self._rank, self._seq))

    def _open(self, step: Awaited, batch: list[Item]) -> None:
        """A step of several ranks: its metrics are the run's, its extreme tokens know their rank."""
        entry, spikes = step.opened()
        self._take(entry, batch)
        batch.extend(replace(spike, attempt=self._attempt) for spike in spikes)

    def _report(self, metrics: dict[str, float]) -> None:
        """Let a counter that moved travel with the next record."""
        for name in _REPORTED:
            count = self._counters[name]
            if count != self._reported.get(name, 0):
                self._reported[name] = count
                metrics[f"rlwatch/{name}"] = float(count)
