"""The sink that writes a run's batches to its store, and waits out a full disk."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.clock import Clock
from rlwatch.errors import StoreError, UnstorableError
from rlwatch.ports import Checkpoint, Progress, RunWriter, Storable
from rlwatch.recorder.counters import Counters
from rlwatch.seam import described

HEARTBEAT_S = 5.0
RETRY_S = 1.0
"""Seconds between two tries to write to a store that could not be written."""
_LATER = (StoreError, OSError, MemoryError)
"""What may be over in a while: the same call is made again."""


class StoreSink:
    """Writes batches; keeps what could not be written (up to ``max_backlog`` items) and tries again, in order.

    A batch is written whole or not at all. When the backlog is full the newest items are dropped and
    counted as ``dropped``; so is an item that no store can hold, whatever came with it.
    """

    def __init__(self, writer: RunWriter, counters: Counters, clock: Clock, max_backlog: int = 10_000) -> None:
        self._writer = writer
        self._counters = counters
        self._clock = clock
        self._max_backlog = max_backlog
        self._backlog: list[Storable] = []
        self._journaled: list[int] = []
        self._judged: int | None = None
        self._checkpoint: Checkpoint | None = None
        self._heartbeat_due = self._retry_due = 0.0
        self._lost: list[Storable] = []

    @property
    def failing(self) -> bool:
        """Whether something waits because it could not be written."""
        return bool(self._backlog)

    @property
    def full(self) -> bool:
        """Whether no more should come before it can be written: elsewhere it may be kept better."""
        return len(self._backlog) >= self._max_backlog

    @property
    def waiting(self) -> Sequence[int]:
        """Numbers in the journal of what was taken and is not stored yet."""
        return self._journaled

    def judged(self, seq: int, checkpoint: Checkpoint | None = None) -> None:
        """Note with the next write how far the run is judged; what was found so far was given before."""
        self._judged, self._checkpoint = seq, checkpoint or self._checkpoint

    def write(self, batch: Sequence[Storable], numbers: Sequence[int] = ()) -> None:
        """Store the batch, after anything still waiting; ``numbers``: under which the journal has what it holds.

        They are noted once the batch is kept here: what got lost before that is still in the journal.
        """
        room = max(0, self._max_backlog - len(self._backlog))
        self._backlog.extend(batch[:room])
        self._journaled.extend(numbers)
        if len(batch) > room:
            self._counters.warn("dropped", "the store cannot be written; records are dropped", len(batch) - room)
        self._drain()

    def lost(self) -> list[Storable]:
        """What was dropped since the last call, because it cannot be stored."""
        lost, self._lost = self._lost, []
        return lost

    def found(self, found: Sequence[Storable]) -> None:
        """Store what was found, which is little and never dropped, after anything still waiting."""
        self._backlog.extend(found)
        self._drain()

    def tick(self) -> None:
        """Try the backlog again; note how far the run is judged; say now and then that the writer lives."""
        now = self._clock.monotonic()
        if now >= self._retry_due and (self._backlog or self._journaled or self._judged is not None):
            self._drain()
        if now >= self._heartbeat_due:
            self._heartbeat_due = now + HEARTBEAT_S
            if self._backlog:
                self._drain()
            self._writer.heartbeat(self._clock.now())

    def close(self) -> None:
        """One last try; what still cannot be written is dropped and counted."""
        if self._backlog or self._journaled or self._judged is not None:
            self._drain()
        if self._backlog:
            self._counters.warn("dropped", "the store could not be written at the end", len(self._backlog))

    def _drain(self) -> None:
        while True:
            waiting, progress = self._backlog, self._progress()
            try:
                if progress is None:
                    self._writer.write(waiting)
                else:
                    self._writer.write(waiting, progress)
            except UnstorableError as error:
                at = next((k for k, item in enumerate(waiting) if item is error.item), None)
                if at is None:
                    return self._sift()
                self._lose(waiting[at], f"what no store can hold is dropped: {error}")
                self._backlog = [*waiting[:at], *waiting[at + 1 :]]
                continue
            except _LATER as error:
                return self._later(error)
            except Exception:  # noqa: BLE001  (a store's own trouble with an item: the others must be stored)
                return self._sift()
            self._backlog = []
            return self._settled(progress)

    def _sift(self) -> None:
        """One by one, to lose only what cannot be stored."""
        waiting, self._backlog = self._backlog, []
        for at, item in enumerate(waiting):
            try:
                self._writer.write([item])
            except UnstorableError as error:
                self._lose(item, f"what no store can hold is dropped: {error}")
            except _LATER as error:
                self._backlog = list(waiting[at:])
                return self._later(error)
            except Exception as error:  # noqa: BLE001  (see above)
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
        self._counters.warn("dropped", why)

    def _later(self, error: BaseException) -> None:
        self._retry_due = self._clock.monotonic() + RETRY_S
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
