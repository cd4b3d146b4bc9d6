"""Keep a trainer's journal on its own disk (its spool): the durable record of what the server does not have yet.

``<local directory>/<run id>/<process>/`` holds the journal files (:mod:`rlwatch.store.sqlite.journal`), ``run.lock``
(held while that process lives) and ``spool.json`` (run and store, without a password). What a process left there is
shipped by its next attempt on this node, or by ``rlwatch sync``.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlwatch import codec
from rlwatch.errors import RunLockedError, StoreError
from rlwatch.records import JSON, RunInfo
from rlwatch.store.fields import dumps
from rlwatch.store.postgres.address import PostgresAddress
from rlwatch.store.sqlite.journal import SQLiteJournal, ending_in
from rlwatch.store.sqlite.layout import make_private, writing_to
from rlwatch.store.sqlite.ownership import RunLock
from rlwatch.store.sqlite.shared import node_directory, refuse_foreign

logger = logging.getLogger("rlwatch")
NOTE = "spool.json"
_MADE = ("run_id", "attempt", "state", "state_reason", "heartbeat_at", "last_step", "last_ts", "curation")
"""Fields of a run that the server sets."""


@dataclass(frozen=True, slots=True)
class Note:
    """Origin of a journal directory: the run, and the store that its items belong to.

    ``store``: the store's URL, without a password. ``attempt``: 0 until the server has it. ``begun``: fields of the run
    as its trainer began it, to be sent to the server.
    """

    store: str
    run_id: str
    attempt: int
    begun: Mapping[str, JSON]

    @property
    def run(self) -> RunInfo:
        """The run's description as the trainer passed it when the journal began."""
        return codec.decoded(RunInfo, {**self.begun, "run_id": self.run_id})


@dataclass(slots=True)
class Spool:
    """The journal of one process for the server, its directory, and the lock that shows that the process lives."""

    directory: Path
    journal: SQLiteJournal
    lock: RunLock

    def close(self, *, told: bool) -> None:
        """Close the journal, and remove its directory if the server has all items and, if the run ended, the end
        (``told``).
        """
        left, ended = len(self.journal.missing()), ending_in(self.directory)
        self.journal.close(remove=not left and (told or ended is None))
        if not left and (told or ended is None):
            shutil.rmtree(self.directory, ignore_errors=True)
            with suppress(OSError):
                self.directory.parent.rmdir()
        else:
            logger.warning("%d items of this run are not on the server yet: rlwatch sync %s", left, self.directory)
        self.lock.release()


def place_of(address: PostgresAddress) -> Path:
    """Return the directory in which trainers of this node keep journals for the store."""
    return node_directory(address.url)


def note_of(address: PostgresAddress, run: RunInfo, attempt: int) -> Note:
    """Return the description to keep with a journal of ``run``; ``attempt`` is 0 if the server does not have it yet."""
    begun = {name: value for name, value in codec.encoded(run).items() if name not in _MADE}
    return Note(address.url, run.run_id, attempt, begun)


def begin(address: PostgresAddress, run: RunInfo, attempt: int) -> Spool | None:
    """Create the journal of this process for an attempt of ``run``; None, with a warning, if the disk refuses it."""
    directory = place_of(address) / run.run_id / f"{os.getpid()}-{secrets.token_hex(4)}"
    try:
        for parent in reversed(directory.parents[:3]):
            make_private(parent)
        refuse_foreign(place_of(address))
        make_private(directory)
        lock = RunLock(directory / "run.lock")
        with writing_to(directory):
            write_note(directory, note_of(address, run, attempt))
            return Spool(directory, SQLiteJournal(directory), lock)
    except StoreError as error:
        logger.warning(
            "no journal on this node (%s): while the server is away, a kill of the trainer loses rows", error
        )
        return None


def left_behind(directory: Path) -> list[Path]:
    """Return the journal directories in or under ``directory`` whose process has ended."""
    notes = [directory / NOTE] if (directory / NOTE).exists() else sorted(directory.glob(f"**/{NOTE}"))
    return [note.parent for note in notes if _is_left(note.parent)]


def read_note(directory: Path) -> Note:
    """Read the description of a journal directory. Raises ``StoreError`` if there is none or it is damaged."""
    try:
        return Note(**json.loads((directory / NOTE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{directory} is no spool of a run ({error}): its {NOTE} is missing or damaged") from None


def remove(directory: Path) -> None:
    """Remove a journal directory, once the server has all of it."""
    shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        directory.parent.rmdir()


def _is_left(directory: Path) -> bool:
    try:
        RunLock(directory / "run.lock").release()
    except RunLockedError:
        return False
    except StoreError as error:
        logger.warning("%s", error)
        return False
    return True


def write_note(directory: Path, note: Note) -> None:
    """Write the description of a journal directory, whole by way of a rename. Raises ``OSError``."""
    arriving = directory / f".{NOTE}"
    arriving.write_text(dumps(asdict(note)) + "\n")
    arriving.replace(directory / NOTE)
