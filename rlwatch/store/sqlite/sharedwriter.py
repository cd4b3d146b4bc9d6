"""The writer of a run on a network file system: a local writer that publishes snapshots."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial

from rlwatch.records import RunInfo, RunState
from rlwatch.store.sqlite.layout import RunFiles, make_private
from rlwatch.store.sqlite.lock import RunLock
from rlwatch.store.sqlite.publish import adopt, publish
from rlwatch.store.sqlite.writer import FileWriter, open_files

PUBLISH_S = 60.0
"""Seconds between snapshots; readers elsewhere see the run this late."""


class SharedWriter(FileWriter):
    """A ``FileWriter`` that also owns the lock of the shared directory and publishes from ``heartbeat``."""

    def share(self, local: RunFiles, shared: RunFiles, lock: RunLock, now: float) -> None:
        """Begin to publish. Until then nothing of this attempt shows in the shared directory."""
        self._local = local
        self._shared = shared
        self._shared_lock = lock
        self._publish(now)

    def heartbeat(self, now: float) -> None:
        """Say that the writer lives; publish if the last snapshot is old."""
        super().heartbeat(now)
        if self._mine() and now - self._published_at >= PUBLISH_S:
            self._publish(now)

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Record how the run ended and publish the whole of it."""
        super().finish(state, reason, now)
        if self._mine():
            self._publish(now)

    def close(self) -> None:
        """Close the connection, then release both locks; idempotent."""
        super().close()
        self._shared_lock.release()

    def _publish(self, now: float) -> None:
        if self._db is not None:
            publish(self._db, self._local, self._shared)
        self._published_at = now


def open_shared(local: RunFiles, shared: RunFiles, run: RunInfo, now: float) -> SharedWriter:
    """Take the shared lock, then the local one, and go on from whichever copy of the run is further."""
    make_private(shared.directory.parent)
    make_private(shared.directory)
    lock = RunLock(shared.lock, optional=True)
    with ExitStack() as undo:
        undo.callback(lock.release)
        writer = undo.enter_context(
            closing(open_files(local, run, now, made=SharedWriter, before=partial(adopt, shared, local)))
        )
        writer.share(local, shared, lock, now)
        undo.pop_all()
        return writer
