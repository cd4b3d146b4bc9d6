"""Write a run to PostgreSQL: hold its lock, store rows and progress in one transaction, and reconnect after a cut."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import psycopg

from rlwatch.errors import StoreError
from rlwatch.ports import Journal as JournalPort
from rlwatch.ports import Progress, Storable
from rlwatch.records import Finding, RunInfo, RunState
from rlwatch.store.fields import RUN
from rlwatch.store.postgres import runrow, spool
from rlwatch.store.postgres.carrier import Shipment
from rlwatch.store.postgres.connection import Connection, UnreachableError, explained
from rlwatch.store.postgres.news import tell
from rlwatch.store.postgres.ownership import amending, holders_of, lock_of, lock_patiently, locked
from rlwatch.store.postgres.rows import CopiedBatch, Numbers, last_numbers, plain
from rlwatch.store.postgres.series import Chunking, metric_sets
from rlwatch.store.postgres.server import Server
from rlwatch.store.postgres.spool import ship
from rlwatch.store.sqlite.journal import JournalPosition
from rlwatch.store.sqlite.layout import belongs_here, keep_forever, this_process
from rlwatch.store.sqlite.rows import MetricSets, packing

logger = logging.getLogger("rlwatch")


@dataclass(frozen=True, slots=True)
class _Sent:
    """A write whose commit was not confirmed: what becomes valid if it is found to have been stored."""

    items: list[Storable]
    batch: CopiedBatch
    mark: JournalPosition | None


class PostgresWriter:
    """Writer of a run that holds the run's lock with a connection of its own, and takes it again after a cut.

    Parameters
    ----------
    server
        Server to reconnect to.
    db
        The connection that holds the run's lock; None until the server has this attempt.
    run
        The run in its current state.
    name
        Name of this writer in the run's row; empty for one that only completes what a dead process left.
    kept
        The journal of this process on this node's disk, if it has one.
    """

    def __init__(
        self, server: Server, db: Connection | None, run: RunInfo, name: str, kept: spool.Spool | None = None
    ) -> None:
        self.run = run
        self.journal: JournalPort | None = kept.journal if kept is not None else None
        self._server, self._db, self._name, self._spool = server, db, name, kept
        self._backend = 0 if db is None else db.info.backend_pid
        self._pid, self._ended, self._end_stored = os.getpid(), "", False
        self._writes = 0
        self._sent: _Sent | None = None
        self._stored: dict[int, Storable] = {}
        self._place: Callable[[Storable], Storable] | None = None
        self._numbers, self.last_seq, self._sets = Numbers(), 0, MetricSets()
        self._chunking: Chunking | None = None
        self._shipment: Shipment | None = None
        if db is not None:
            self._load(db)
        belongs_here(self)

    def _load(self, db: Connection) -> None:
        self._numbers = last_numbers(db, self.run.run_id)
        self.last_seq = runrow.judged(db, self.run.run_id)[1]
        known = metric_sets(db, self.run.run_id)
        self._sets = {names: (number, packing(names)) for number, names in known.items()}
        self._shipment = self._server.carrier.shipment(self.run.run_id)
        self._chunking = Chunking(db, self.run.run_id) if self._shipment is None else None

    def write(self, items: Sequence[Storable], progress: Progress | None = None) -> None:
        """Store all of ``items`` and the ``progress`` of the analysis, or nothing.

        Raises ``StoreFullError`` on a full disk, ``UnstorableError`` for an item that cannot be stored,
        ``UnreachableError`` if the server cannot be reached (the same call may be made again), else ``StoreError``.
        """
        db = self._connected()
        fresh = [item for item in items if id(item) not in self._stored] if self._stored else list(items)
        batch = CopiedBatch(self.last_seq, self._sets)
        batch.place = self._place
        for item in fresh:
            batch.add(item)
        mark = self._marked(progress)
        try:
            with explained(self._server.address):
                if self._shipment is not None:
                    self._shipment.send(db, batch.bulk)
            self._sent = _Sent(fresh, batch, mark)
            with explained(self._server.address), db.transaction():
                batch.copy(db, self.run.run_id, self._numbers, self._shipment)
                self._note(db, batch, progress, mark)
                if any(isinstance(item, Finding) for item in fresh):
                    tell(db, self._server.address, "alerts", self.run.run_id)
        except StoreError as error:
            if not isinstance(error, UnreachableError):  # else: whether it is in is seen on the next connection
                self._sent = None
            if self._shipment is not None:
                self._shipment.forget()
            raise
        self._is_in(self._sent)
        for item in items if self._stored else ():
            self._stored.pop(id(item), None)
        self._notify_pages(db)
        self._chunk(db)

    def _notify_pages(self, db: Connection) -> None:
        """Notify the pages that show the run. A failure to do so does not affect what was written."""
        with suppress(StoreError), explained(self._server.address):
            tell(db, self._server.address, "pages", self.run.run_id)

    def _chunk(self, db: Connection) -> None:
        """Copy older rows into chunks. A failure now does not concern what was written."""
        chunking = self._chunking
        while chunking is not None and (mset := chunking.due()) is not None:
            try:
                with explained(self._server.address), db.transaction():
                    chunking.work(db, mset)
            except StoreError as error:
                logger.debug("rows of %s stay rows for now: %s", self.run.run_id, error)
                chunking.forget(mset)
                return

    def _marked(self, progress: Progress | None) -> JournalPosition | None:
        if self._spool is None or progress is None or not progress.journaled:
            return None
        return self._spool.journal.mark.after(progress.journaled)

    def _note(
        self, db: Connection, batch: CopiedBatch, progress: Progress | None, mark: JournalPosition | None
    ) -> None:
        """Store how far the run is with the rows of ``batch``, in their transaction. Raises ``StoreError`` if another
        took over.
        """
        judged = None if progress is None else progress.judged
        step, ts, attempt = batch.newest or (None, None, None)
        self._own_row(
            db,
            "last_seq = %s, writes = %s, last_step = coalesce(%s, last_step), judged_seq = coalesce(%s, judged_seq), "
            "last_ts = CASE WHEN %s THEN %s ELSE last_ts END, last_attempt = coalesce(%s, last_attempt)",
            (batch.last_seq, self._writes + 1, step, judged, step is not None, runrow.number(ts), attempt),
        )
        if mark is not None:
            runrow.note_journal(db, self.run.run_id, mark)
        if progress is not None and progress.checkpoint is not None:
            runrow.keep_checkpoint(db, self.run.run_id, progress.checkpoint)

    def _is_in(self, sent: _Sent) -> None:
        self._sent = None
        self._writes += 1
        self._sets.update(sent.batch.new_sets)
        if self._chunking is not None:
            self._chunking.add(sent.batch.widths())
        self._numbers, self.last_seq = sent.batch.numbers, sent.batch.last_seq
        if sent.mark is not None and self._spool is not None:
            self._spool.journal.stored(sent.mark)

    def _own_row(self, db: Connection, settings: str, values: Sequence[object]) -> None:
        """Update the run's row, if this writer still owns it."""
        mine, by = ("writer = %s", self._name) if self._name else ("attempt = %s", self.run.attempt)
        changed = db.execute(
            f"UPDATE run SET {settings} WHERE run_id = %s AND {mine}",
            (*values, self.run.run_id, by),
        )
        if changed.rowcount != 1:
            self._ended = "written by another process by now"
            raise StoreError(f"run {self.run.run_id!r} is {self._ended}: this one was cut off, and may not go on")

    def heartbeat(self, now: float, stage: str = "", since: float | None = None) -> None:
        """Store that the writer's process is alive at ``now`` and in which ``stage`` of the step.

        ``since``: when that stage began. Both are Unix seconds. Does nothing in a forked child. Raises ``StoreError``
        if another writer took over.
        """
        if self._pid == os.getpid():
            db = self._connected()
            moved = replace(self.run, stage=stage, stage_since=since)
            with explained(self._server.address):
                if moved == self.run:
                    return self._own_row(db, "heartbeat_at = %s", (now,))
                self._own_row(db, "heartbeat_at = %s, extra = %s", (now, plain(RUN.rest_text(moved))))
            self.run = moved
        return None

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Store how the run ended: ``state``, ``reason`` in words, and time (Unix seconds). Afterwards only ``close``
        works.
        """
        if self._pid != os.getpid():
            return
        db = self._connected()
        with explained(self._server.address):
            self._own_row(db, "state = %s, state_reason = %s, heartbeat_at = %s", (state.value, plain(reason), now))
        self.run = replace(self.run, state=state, state_reason=reason, heartbeat_at=now)
        self._ended, self._end_stored = "finished", True
        self._notify_pages(db)

    def close(self) -> None:
        """Release the run's lock, and close this node's journal; idempotent. Does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        kept, self._spool = self._spool, None
        if kept is not None:
            kept.close(end_stored=self._end_stored)
        if self._db is not None and not self._db.closed and self._ended != "closed":
            with suppress(psycopg.Error):
                self._db.execute("SELECT pg_advisory_unlock_all()")
                self._server.give_back(self._db)
        self._ended = "closed"

    def disown(self) -> None:
        """Close this forked child's copy of the socket, so that the lock ends with the parent."""
        if self._db is not None and not self._db.closed:
            keep_forever(self._db)
            with suppress(OSError, psycopg.Error):
                os.close(self._db.fileno())
        self._ended = f"written by process {self._pid}, which forked this one"

    def _connected(self) -> Connection:
        """Return the connection that holds the lock; a new one if it was cut.

        Raises ``StoreError`` if there is none.
        """
        if self._ended:
            raise StoreError(f"run {self.run.run_id!r} is {self._ended}; open_run() begins its next attempt")
        if self._db is not None and not self._db.closed:
            return self._db
        with ExitStack() as undo:
            db = self._server.connect()
            undo.callback(db.close)
            with explained(self._server.address):
                self._take_again(db)
            undo.pop_all()
        self._db, self._backend = db, db.info.backend_pid
        return db

    def _take_again(self, db: Connection) -> None:
        """Take the lock again; check that no other writer took over, and whether the last write was committed."""
        lock = lock_of(self._server.address, self.run.run_id, self.run.project)
        if not locked(db, lock):
            if self._backend in {holder.pid for holder in holders_of(db, lock)}:
                # our own cut connection, whose end the server has not noticed
                db.execute("SELECT pg_terminate_backend(%s)", (self._backend,))
            raise UnreachableError(f"run {self.run.run_id!r} is held by another connection, or one that was cut")
        row = db.execute(
            "SELECT writes FROM run WHERE run_id = %s AND writer = %s", (self.run.run_id, self._name)
        ).fetchone()
        if row is None:
            self._ended = "written by another process by now"
            raise StoreError(f"run {self.run.run_id!r} is {self._ended}: this one was cut off, and may not go on")
        if self._sent is not None and row[0] > self._writes:
            self._stored = {id(item): item for item in self._sent.items}
            self._is_in(self._sent)
        self._sent = None
        self._load(db)


def open_run(server: Server, run: RunInfo, now: float) -> PostgresWriter:
    """Create the run, or begin its next attempt, and return its writer.

    Takes the run's lock and ships what an earlier process left on this node. ``now``: Unix seconds. Raises
    ``RunLockedError`` while another process writes the run.
    """
    with ExitStack() as undo:
        db = server.take()
        undo.callback(db.close)
        with explained(server.address):
            server.make(db)
            lock_patiently(db, server.address, run.run_id, run.project)
            ship_left(server, db, run.run_id)
            name = new_name()
            with db.transaction():
                begun = runrow.begin(db, run, now, name)
            tell(db, server.address, "pages", run.run_id)
            kept = spool.begin(server.address, run, begun.attempt)
            writer = PostgresWriter(server, db, begun, name, kept)
        undo.pop_all()
        return writer


def ship_left(server: Server, db: Connection, run_id: str) -> None:
    """Ship to the server what earlier processes left of the run on this node. The caller holds the run's lock."""
    for directory in spool.left_behind(spool.place_of(server.address) / run_id):
        ship(db, server, run_id, directory)


def new_name() -> str:
    """Return a new, unique name for a writer of this process."""
    return f"{this_process()}#{secrets.token_hex(8)}"


def amend_run(server: Server, run_id: str) -> PostgresWriter | None:
    """Return a writer for a run that has none, without a new attempt.

    None if a process writes the run, or if this role may not write it.
    """
    with ExitStack() as undo:
        db = server.take()
        undo.callback(db.close)
        with explained(server.address):
            run = _amendable(server, db, run_id)
            if run is not None:
                locked(db, amending(server.address, run_id))
                writer = PostgresWriter(server, db, run, "")
        undo.pop_all()
    if run is None:
        server.give_back(db)
        return None
    return writer


def _amendable(server: Server, db: Connection, run_id: str) -> RunInfo | None:
    """Return the run, locked; None if another process writes it, or this role may not."""
    if not server.is_made(db):
        return None
    may = db.execute("SELECT has_table_privilege('run', 'UPDATE')").fetchone()
    run = runrow.load(db, run_id) if may is not None and may[0] else None
    return run if run is not None and locked(db, lock_of(server.address, run_id)) else None
