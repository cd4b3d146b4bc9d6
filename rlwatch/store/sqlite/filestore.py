"""The default store: a root directory with one directory per run, on a local file system."""

from __future__ import annotations

import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import quote

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import RunNotFoundError, StoreError
from rlwatch.ports import RunWriter
from rlwatch.records import RunInfo
from rlwatch.store.sqlite import connect, layout
from rlwatch.store.sqlite.controltables import ControlTables
from rlwatch.store.sqlite.layout import RunFiles
from rlwatch.store.sqlite.runtables import RunTables
from rlwatch.store.sqlite.writer import open_files


class FileStore(RunTables, ControlTables):
    """Runs under ``root``.

    Parameters
    ----------
    root
        The directory; created (0700) with the first run.
    control_timeout_s
        How long commands, alerts and outbox wait for another process before ``StoreBusyError``, in seconds.
        A trainer passes 0: it asks again at its next poll.
    clock
        Where creation times come from.
    """

    def __init__(self, root: Path, *, control_timeout_s: float = 2.0, clock: Clock | None = None) -> None:
        self.root = root.absolute()
        self.url = f"sqlite://{quote(str(self.root))}"
        self._control_timeout_s = control_timeout_s
        self._clock = clock or SystemClock()

    def open_run(self, run: RunInfo) -> RunWriter:
        """Create the run, or begin its next attempt."""
        files = layout.files_of(self.root, run.run_id)
        layout.make_private(self.root)
        return open_files(files, run, self._clock.now())

    def close(self) -> None:
        """Nothing is held between calls."""

    def _run_ids(self) -> list[str]:
        return layout.run_ids(self.root)

    def _reading(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        return connect.reading(self._existing(run_id))

    def _controlled(self) -> list[str]:
        return [run_id for run_id in self._run_ids() if (self.root / run_id / "control.db").exists()]

    def _control(self, run_id: str) -> AbstractContextManager[sqlite3.Connection | None]:
        return connect.control(self._existing(run_id), self._control_timeout_s)

    def _made_control(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        return connect.made_control(self._existing(run_id), self._control_timeout_s)

    def _existing(self, run_id: str) -> RunFiles:
        try:
            files = layout.files_of(self.root, run_id)
        except StoreError as error:
            raise RunNotFoundError(f"no such run in {self.url}: {error}") from error
        if not files.run.exists():
            raise RunNotFoundError(f"no run {run_id!r} in {self.url}; `rlwatch runs` lists what there is")
        return files
