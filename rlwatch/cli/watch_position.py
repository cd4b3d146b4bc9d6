"""Where watches stand, kept beside the runs, so that a watch that was killed goes on where it was.

Only to know a log's file again: which records a run has already, its store knows. So it does no harm that a
position is written now and then, as long as that of a new file is written before the file's first record.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from urllib.parse import unquote

from rlwatch.errors import RunNotFoundError
from rlwatch.importers import Position
from rlwatch.ports import Store

_SCHEME = "sqlite://"
_PLACE = ".watch"


class Positions:
    """The positions of the logs that ``store`` holds as runs; nothing is kept for a store in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._directory = Path(unquote(store.url[len(_SCHEME) :])) / _PLACE if store.url.startswith(_SCHEME) else None

    def load(self, run_id: str) -> tuple[Position | None, int]:
        """Where reading of the run's log stood, and the ``seq`` of its last record; None and 0 if it is new."""
        try:
            last = self._store.records(run_id, last=1)
        except RunNotFoundError:
            return None, 0
        data: object = None
        if self._directory is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                data = json.loads((self._directory / f"{run_id}.json").read_text("utf-8"))
        return Position.from_dict(data), last[-1].seq if last else 0

    def save(self, run_id: str, position: Position) -> None:
        """Keep it, in place of the last one. A full disk is not said: the store will say it."""
        if self._directory is None:
            return
        file = self._directory / f"{run_id}.json"
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._directory, suffix=".new", delete=False) as new:
                new.write(json.dumps(position.to_dict()))
            Path(new.name).replace(file)  # a name nobody could lay a link under
