"""The sink that writes a run's batches to its store, and waits out a full disk."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.clock import Clock
from rlwatch.errors import StoreError, UnstorableError
from rlwatch.ports import Item, RunWriter
from rlwatch.recorder.counters import Counters

HEARTBEAT_S = 5.0


class StoreSink:
    """Writes batches; keeps what could not be written (up to ``max_backlog`` items) and tries again.

    A batch is written whole or not at all. When the backlog is full the newest items are dropped and
    counted as ``dropped``; so is an item that no store can hold, whatever came with it.
    """

    def __init__(self, writer: RunWriter, counters: Counters, clock: Clock, max_backlog: int = 10_000) -> None:
        self._writer = writer
        self._counters = counters
        self._clock = clock
        self._max_backlog = max_backlog
        self._backlog: list[Item] = []
        self._heartbeat_due = 0.0

    def write(self, batch: Sequence[Item]) -> None:
        """Store the batch, after anything still waiting."""
        room = self._max_backlog - len(self._backlog)
        self._backlog.extend(batch[:room])
        if len(batch) > room:
            self._counters.warn("dropped", "the store cannot be written; records are dropped", len(batch) - room)
        self._drain()

    def tick(self) -> None:
        """Try the backlog again and say that the writer lives, every few seconds."""
        now = self._clock.monotonic()
        if now < self._heartbeat_due:
            return
        self._heartbeat_due = now + HEARTBEAT_S
        if self._backlog:
            self._drain()
        self._writer.heartbeat(self._clock.now())

    def close(self) -> None:
        """One last try; what still cannot be written is dropped and counted."""
        if self._backlog:
            self._drain()
        if self._backlog:
            self._counters.warn("dropped", "the store could not be written at the end", len(self._backlog))

    def _drain(self) -> None:
        waiting, self._backlog = self._backlog, []  # whatever else is raised must not come back
        try:
            self._writer.write(waiting)
        except UnstorableError:
            self._sift(waiting)
        except StoreError as error:
            self._keep(waiting, error)

    def _sift(self, waiting: Sequence[Item]) -> None:
        """One by one, to lose only what cannot be stored."""
        for at, item in enumerate(waiting):
            try:
                self._writer.write([item])
            except UnstorableError as error:
                self._counters.warn("dropped", f"what no store can hold is dropped: {error}")
            except StoreError as error:
                return self._keep(waiting[at:], error)
        return None

    def _keep(self, waiting: Sequence[Item], error: StoreError) -> None:
        self._backlog = list(waiting)
        self._counters.warn("errors", f"the store cannot be written, trying again: {error}")
