"""Begin a run while the server cannot be reached: in the journal on the node's own disk, and on the server later."""

from __future__ import annotations

import logging
from dataclasses import replace

from rlwatch.ports import Progress, Storable
from rlwatch.records import CompletionBatch, RunInfo, RunState, SpikeBatch
from rlwatch.store.postgres import spool
from rlwatch.store.postgres.connection import Connection, UnreachableError
from rlwatch.store.postgres.ownership import lock_of, locked
from rlwatch.store.postgres.rows import CopiedBatch
from rlwatch.store.postgres.server import Server
from rlwatch.store.postgres.spool import begun
from rlwatch.store.postgres.writer import PostgresWriter, new_name, ship_left
from rlwatch.store.sqlite.journal import JournalPosition

logger = logging.getLogger("rlwatch")


class AwayWriter(PostgresWriter):
    """Writer of an attempt that the server does not have yet, because it could not be reached when the attempt began.

    Until it can be reached the run counts as new. If the server then has the run already, the attempt's number and its
    sequence numbers are shifted there, while the trainer continues with its own. ``kept``: the journal on this node.
    """

    def __init__(self, server: Server, run: RunInfo, kept: spool.Spool) -> None:
        super().__init__(server, None, replace(run, attempt=1, state=RunState.RUNNING), new_name(), kept)
        self._kept, self._born = kept, False
        self._attempt, self._base = 1, 0

    def _take_again(self, db: Connection) -> None:
        if self._born:
            super()._take_again(db)
            return
        self._server.make(db)
        if not locked(db, lock_of(self._server.address, self.run.run_id, self.run.project)):
            raise UnreachableError(f"run {self.run.run_id!r} is written by another process: what is logged waits here")
        ship_left(self._server, db, self.run.run_id)
        note = begun(db, self._kept.directory, spool.note_of(self._server.address, self.run, 0), self._name)
        self._load(db)
        self._attempt, self._base, self._born = note.attempt, self.last_seq, True
        self._place = self._moved if self._attempt != 1 or self._base else None

    def _moved(self, item: Storable) -> Storable:
        """Return the item with the server's numbers."""
        if isinstance(item, SpikeBatch | CompletionBatch):
            return replace(item, attempt=self._attempt)
        return replace(item, attempt=self._attempt, seq=item.seq + self._base if item.seq else 0)

    def _note(
        self, db: Connection, batch: CopiedBatch, progress: Progress | None, mark: JournalPosition | None
    ) -> None:
        kept = None if progress is None else progress.checkpoint
        if progress is not None and self._place is not None:
            judged = None if progress.judged is None else progress.judged + self._base
            kept = None if kept is None else replace(kept, attempt=self._attempt, seq=kept.seq + self._base)
            progress = replace(progress, judged=judged, checkpoint=kept)
        super()._note(db, batch, progress, mark)


def begin_away(server: Server, run: RunInfo, why: UnreachableError) -> AwayWriter:
    """Return a writer that records the run's attempt only in this node's journal, until the server can be reached.

    Raises ``why``, the error of the connection, if this node's disk cannot hold a journal.
    """
    kept = spool.begin(server.address, run, 0)
    if kept is None:
        raise why
    message = "%s: the run begins without it; what is logged is kept in %s and shipped when it is back"
    logger.warning(message, why, kept.directory)
    return AwayWriter(server, run, kept)
