"""Ship to the server what a process left in its journal on a node, with the position reached in the same transaction.

An interrupted shipment can therefore be continued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rlwatch.errors import StoreError, UnstorableError
from rlwatch.ports import Item
from rlwatch.records import RunState
from rlwatch.store.postgres import runrow, spool
from rlwatch.store.postgres.carrier import Shipment
from rlwatch.store.postgres.connection import Connection
from rlwatch.store.postgres.copying import plain
from rlwatch.store.postgres.failures import explained
from rlwatch.store.postgres.news import tell
from rlwatch.store.postgres.ownership import lock_patiently
from rlwatch.store.postgres.rows import CopiedBatch, last_numbers
from rlwatch.store.postgres.series import metric_sets
from rlwatch.store.postgres.server import Server
from rlwatch.store.sqlite.journal import JournalPosition, ending_in, journals_in
from rlwatch.store.sqlite.layout import writing_to
from rlwatch.store.sqlite.rows import packing

logger = logging.getLogger("rlwatch")
_AT_ONCE = 1000  # items of a journal


def ship(db: Connection, server: Server, run_id: str, directory: Path) -> int:
    """Store what a process's journal in ``directory`` holds and the server lacks, then remove the directory.

    The caller holds the run's lock. Returns the number of items shipped. Raises ``StoreError`` if the journal belongs
    to another run or store.
    """
    note = spool.read_note(directory)
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
    spool.remove(directory)
    return shipped


def begun(db: Connection, directory: Path, note: spool.Note, name: str = "") -> spool.Note:
    """Begin on the server the attempt that a trainer began while the server could not be reached.

    ``note``: origin of the journal in ``directory``; returned with the attempt's number. ``name``: of the attempt's
    writer, if that still lives.
    """
    with db.transaction():
        run = runrow.begin(db, note.run, note.run.created_at, name)
    note = replace(note, attempt=run.attempt)
    with writing_to(directory):
        spool.write_note(directory, note)
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


def _end(db: Connection, note: spool.Note, ending: tuple[RunState, str, float] | None) -> None:
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
    for each in spool.left_behind(directory):
        try:
            note = spool.read_note(each)
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
