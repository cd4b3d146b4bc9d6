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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from rlwatch import codec
from rlwatch.errors import RunLockedError, StoreError, UnstorableError
from rlwatch.ports import Item
from rlwatch.records import JSON, RunInfo, RunState
from rlwatch.store.fields import dumps
from rlwatch.store.postgres import runrow
from rlwatch.store.postgres.address import PostgresAddress
from rlwatch.store.postgres.carrier import Shipment
from rlwatch.store.postgres.connection import Connection, explained
from rlwatch.store.postgres.news import tell
from rlwatch.store.postgres.ownership import lock_patiently
from rlwatch.store.postgres.rows import CopiedBatch, last_numbers, plain
from rlwatch.store.postgres.series import metric_sets
from rlwatch.store.postgres.server import Server
from rlwatch.store.sqlite.journal import JournalPosition, SQLiteJournal, ending_in, journals_in
from rlwatch.store.sqlite.layout import RunLock, make_private, writing_to
from rlwatch.store.sqlite.rows import packing
from rlwatch.store.sqlite.shared import node_directory, refuse_foreign

# Ship to the server what a process left in its journal on a node, with the position reached in the same transaction.
#
# An interrupted shipment can therefore be continued.

logger = logging.getLogger("rlwatch")
_AT_ONCE = 1000  # items of a journal


def ship(db: Connection, server: Server, run_id: str, directory: Path) -> int:
    """Store what a process's journal in ``directory`` holds and the server lacks, then remove the directory.

    The caller holds the run's lock. Returns the number of items shipped. Raises ``StoreError`` if the journal belongs
    to another run or store.
    """
    note = read_note(directory)
    if note.attempt == 0 and note.run_id == run_id:
        note = begun(db, directory, note)
    if note.run_id != run_id or runrow.load(db, run_id) is None:
        raise StoreError(f"{directory} is of run {note.run_id!r}, which this store does not hold; it is left alone")
    shipped, shipment = 0, server.carrier.shipment(run_id)
    for nonce, journaled in journals_in(directory).items():
        mark = known = runrow.journal_mark(db, run_id, nonce)
        left = (numbered for numbered in journaled if not known.holds(numbered[0]))
        while some := list(islice(left, _AT_ONCE)):
            mark = mark.after(number for number, _ in some)
            _append(db, run_id, [replace(item, attempt=note.attempt) for _, item in some], mark, shipment)
            shipped += len(some)
    _end(db, note, ending_in(directory))
    tell(db, server.address, "pages", run_id)
    remove(directory)
    return shipped


def begun(db: Connection, directory: Path, note: Note, name: str = "") -> Note:
    """Begin on the server the attempt that a trainer began while the server could not be reached.

    ``note``: origin of the journal in ``directory``; returned with the attempt's number. ``name``: of the attempt's
    writer, if that still lives.
    """
    with db.transaction():
        run = runrow.begin(db, note.run, note.run.created_at, name)
    note = replace(note, attempt=run.attempt)
    with writing_to(directory):
        write_note(directory, note)
    return note


def _append(
    db: Connection, run_id: str, items: Sequence[Item], mark: JournalPosition, shipment: Shipment | None
) -> None:
    """Store the items of a spool; items that no store can hold are skipped."""
    sets = {names: (number, packing(names)) for number, names in metric_sets(db, run_id).items()}
    batch = CopiedBatch(runrow.judged(db, run_id)[1], sets)
    for item in items:
        with suppress(UnstorableError):
            batch.add(item)
    if shipment is not None:
        shipment.send(db, batch.bulk)
    with db.transaction():
        batch.copy(db, run_id, last_numbers(db, run_id), shipment)
        runrow.note_rows(db, run_id, batch.last_seq, batch.newest)
        runrow.note_journal(db, run_id, mark)


def _end(db: Connection, note: Note, ending: tuple[RunState, str, float] | None) -> None:
    """Store the end of the run, unless a later attempt has begun."""
    if ending is not None:
        state, reason, at = ending
        db.execute(
            "UPDATE run SET state = %s, state_reason = %s, heartbeat_at = %s "
            "WHERE run_id = %s AND attempt = %s AND state = 'running'",
            (state.value, plain(reason), at, note.run_id, note.attempt),
        )


def sync(directory: Path, server_of: Callable[[str], Server]) -> tuple[int, dict[Path, str]]:
    """Ship all journals in or under ``directory`` whose process is gone.

    ``server_of`` returns the server, given a store's URL, which has no password. Returns the number of items shipped,
    and for each journal directory that was left the reason.
    """
    shipped, left = 0, dict[Path, str]()
    for each in left_behind(directory):
        try:
            note = read_note(each)
            server = server_of(note.store)
            db = server.connect()
            try:
                with explained(server.address):
                    server.make(db)
                    lock_patiently(db, server.address, note.run_id)
                    shipped += ship(db, server, note.run_id, each)
            finally:
                db.close()
        except StoreError as error:
            left[each] = str(error)
    return shipped, left


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

    def close(self, *, end_stored: bool) -> None:
        """Close the journal, and remove its directory if the server has all items and, if the run ended, the end
        (``end_stored``).
        """
        left, ended = len(self.journal.missing()), ending_in(self.directory)
        self.journal.close(remove=not left and (end_stored or ended is None))
        if not left and (end_stored or ended is None):
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
