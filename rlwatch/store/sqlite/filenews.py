"""Notice what other processes write into the files of runs, by the files' time stamps; unchanged files are not
opened.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from rlwatch.errors import StoreError
from rlwatch.store.sqlite import layout
from rlwatch.store.sqlite.nodefiles import DIRECTORY
from rlwatch.store.sqlite.run_index import Stamp, stamp_of

OFTEN_S, SELDOM_S, LIVELY_S = 0.5, 5.0, 60.0
"""Seconds between two checks of a run whose files changed within the last ``LIVELY_S`` seconds, and of any other
run.
"""

_ROWS, _WORDS = ("run.db", "run.db-wal"), ("control.db", DIRECTORY)
_GROWN = " UNION ALL ".join(
    f"SELECT max(rowid) FROM {table}"  # noqa: S608  (names of ours)
    for table in ("record", "event", "finding", "spike_batch", "completion_batch", "forecast")
)


class FileNews:
    """Notifications of changes to runs in a directory, for pages that show them; implements
    :class:`rlwatch.ports.News`.

    ``root``: the store's directory. ``run_id``: the run to watch; None for all runs. ``snapshot`` opens a run's tables
    for reading. A heartbeat, which a live writer stores every few seconds, does not count as a change.
    """

    deaf = False

    def __init__(
        self, root: Path, run_id: str | None, snapshot: Callable[[str], AbstractContextManager[sqlite3.Connection]]
    ) -> None:
        self._root, self._run_id, self._snapshot = root, run_id, snapshot
        self._closing = threading.Event()
        self._stamps: dict[str, tuple[Stamp, Stamp]] = {}
        self._versions: dict[str, object] = {}
        self._lively: dict[str, float] = {}
        self._all_due = 0.0
        self._listed: Stamp = ()
        self._changed()

    def arrived(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` seconds for the next change; return True if there was one."""
        return bool(self.heard(timeout_s))

    def heard(self, timeout_s: float = 0.0) -> frozenset[str]:
        """Wait up to ``timeout_s`` seconds for the next change; return the ids of the runs that changed.

        The id ``""`` means changes that concern the whole store, such as silences. Empty if nothing changed.
        """
        until = time.monotonic() + timeout_s
        while True:
            changed, left = self._changed(), until - time.monotonic()
            if changed or left <= 0 or self._closing.wait(min(OFTEN_S, left)):
                return changed

    def close(self) -> None:
        """Release all callers that wait for a change; idempotent."""
        self._closing.set()

    def _changed(self) -> frozenset[str]:
        now = time.monotonic()
        found = {run_id for run_id in self._names(now) if self._has_changed(run_id)}
        self._lively |= dict.fromkeys(found, now)
        self._lively = {run_id: at for run_id, at in self._lively.items() if now - at < LIVELY_S}
        return frozenset(found)

    def _names(self, now: float) -> Iterable[str]:
        """Return the names to check now: the store as a whole, and runs; all runs now and then, and after a new one."""
        if self._run_id is not None:
            return ("", self._run_id)
        stamp = stamp_of(self._root)
        if now < self._all_due and stamp == self._listed:
            return ("", *self._lively)
        self._all_due, self._listed = now + SELDOM_S, stamp
        try:
            return ("", *(entry.name for entry in layout.directories_in(self._root)))
        except StoreError:
            return ()

    def _has_changed(self, run_id: str) -> bool:
        place = self._root / run_id
        names = _ROWS if run_id else ("alerts.db",)
        stamps = stamp_of(*(place / name for name in names)), stamp_of(*(place / name for name in _WORDS))
        known = self._stamps.get(run_id)
        if stamps == known:
            return False
        self._stamps[run_id] = stamps
        if known is None or not run_id or known[1] != stamps[1]:
            return True
        before, self._versions[run_id] = self._versions.get(run_id), self._version(run_id)
        return before is None or before != self._versions[run_id]

    def _version(self, run_id: str) -> object:
        """Return a value that changes when a run grows or ends; None if it cannot be read."""
        try:
            with self._snapshot(run_id) as db:
                run = db.execute("SELECT attempt, state, state_reason FROM run").fetchone()
                return run, db.execute(_GROWN).fetchall()
        except (StoreError, sqlite3.Error):
            return None
