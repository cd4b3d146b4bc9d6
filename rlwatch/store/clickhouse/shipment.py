"""Send the bulk of a writer's batches to ClickHouse under an epoch, a number of the writer that PostgreSQL records."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from rlwatch.store.clickhouse.engine import ClickHouseClient
from rlwatch.store.clickhouse.wire import floats, string, strings, varint
from rlwatch.store.postgres.carrier import Load
from rlwatch.store.postgres.connection import Connection

MOST_BYTES = 16 << 20
"""Most bytes of one insert; a larger batch is sent in several."""
_ROW = struct.Struct("<qQqqqdi")
_BATCH = struct.Struct("<Qqqqqd")
_ROWS = "run_id, seq, epoch, attempt, rank, step, ts, mset, names, v"
_SPIKES = "run_id, epoch, number, step, attempt, rank, ts, reason, n, v, scores, bodies"
_EXTRA = "run_id, seq, epoch, body"
_SEQ = struct.Struct("<qQ")
_COMPLETIONS = "run_id, epoch, number, step, attempt, rank, ts, n, v"


class ClickHouseShipment:
    """Writes of one writer of a run to ClickHouse; implements ``Shipment``.

    ``name``: prefix of the store's tables. ``now`` returns the time in Unix seconds, from which epochs that were never
    given before are made.
    """

    def __init__(self, engine: ClickHouseClient, name: str, run_id: str, now: Callable[[], float]) -> None:
        self._engine, self._name, self._run_id, self._now = engine, name, run_id, now
        self._epoch = 0
        self._first, self._last, self._spikes, self._completions, self._extra = 1, 0, 0, 0, 0
        self._names: dict[int, bytes] = {}

    def send(self, db: Connection, bulk: Load) -> None:
        """Store rows, tokens and completions of a batch in ClickHouse; they count once the transaction of :meth:`note`
        commits.
        """
        if not (bulk.records or bulk.spikes or bulk.completions):
            return
        if not self._epoch:
            self._begin(db)
        run = string(self._run_id)
        blocks = (
            ("row", _ROWS, self._rows(bulk)),
            ("extra", _EXTRA, self._extras(bulk)),
            ("spike", _SPIKES, self._spiked(bulk)),
            ("completion", _COMPLETIONS, self._completed(bulk)),
        )
        for table, columns, rows in blocks:
            for block in _blocks(run + row for row in rows):
                self._engine.insert(f"{self._name}_{table}", columns, block)
        if bulk.records:
            seqs = [int(row[0]) for row in bulk.records]
            self._first, self._last = (self._first if self._last else seqs[0]), seqs[-1]
        self._extra += len(bulk.extra)
        self._spikes += len(bulk.spikes)
        self._completions += len(bulk.completions)

    def note(self, db: Connection) -> None:
        """Record in PostgreSQL how far the epoch counts, in the caller's transaction."""
        if self._epoch:
            db.execute(
                "UPDATE series_epoch SET first_seq = %s, last_seq = %s, spikes = %s, completions = %s, extra = %s "
                "WHERE run_id = %s AND epoch = %s",
                (self._first, self._last, self._spikes, self._completions, self._extra, self._run_id, self._epoch),
            )

    def forget(self) -> None:
        """Continue under a new epoch, so that what was sent and not recorded stays invisible."""
        self._epoch = 0

    def _begin(self, db: Connection) -> None:
        """Take an epoch above all others of the run; an empty one is replaced, so that failed attempts leave
        nothing.
        """
        row = db.execute(
            "SELECT coalesce(max(epoch), 0), coalesce(max(epoch) FILTER "
            "(WHERE last_seq < first_seq AND spikes = 0 AND completions = 0), 0) FROM series_epoch WHERE run_id = %s",
            (self._run_id,),
        ).fetchone()
        highest, empty = row or (0, 0)
        epoch = max(highest + 1, int(self._now() * 1e6))
        if empty:
            db.execute(
                "UPDATE series_epoch SET epoch = %s WHERE run_id = %s AND epoch = %s", (epoch, self._run_id, empty)
            )
        else:
            db.execute("INSERT INTO series_epoch VALUES (%s, %s, 1, 0, 0, 0)", (self._run_id, epoch))
        self._epoch = epoch
        self._first, self._last, self._spikes, self._completions, self._extra = 1, 0, 0, 0, 0

    def _rows(self, bulk: Load) -> Iterator[bytes]:
        for seq, attempt, rank, step, ts, mset, packed in bulk.records:
            names = self._names.get(mset)
            if names is None:
                names = self._names[mset] = strings(bulk.names[mset])
            yield _ROW.pack(seq, self._epoch, attempt, rank, step, ts, mset) + names + floats(packed)

    def _extras(self, bulk: Load) -> Iterator[bytes]:
        for seq, body in bulk.extra.items():
            yield _SEQ.pack(seq, self._epoch) + string(body)

    def _spiked(self, bulk: Load) -> Iterator[bytes]:
        for number, (row, tops) in enumerate(bulk.spikes, start=self._spikes + 1):
            step, attempt, rank, ts, reason, count, blob = row
            head = _BATCH.pack(self._epoch, number, step, attempt, rank, ts)
            scores = struct.pack(f"<{len(tops)}d", *(top[0] for top in tops))
            bodies = b"".join(string(top[-1]) for top in tops)
            yield b"".join(
                (
                    head,
                    string(reason),
                    struct.pack("<q", count),
                    string(blob),
                    floats(scores),
                    varint(len(tops)),
                    bodies,
                )
            )

    def _completed(self, bulk: Load) -> Iterator[bytes]:
        for number, row in enumerate(bulk.completions, start=self._completions + 1):
            step, attempt, rank, ts, count, blob = row
            head = _BATCH.pack(self._epoch, number, step, attempt, rank, ts)
            yield head + struct.pack("<q", count) + string(blob)


def _blocks(rows: Iterator[bytes]) -> Iterator[bytes]:
    """Join rows into blocks of up to :data:`MOST_BYTES`, or of one row."""
    block, size = list[bytes](), 0
    for row in rows:
        if block and size + len(row) > MOST_BYTES:
            yield b"".join(block)
            block, size = [], 0
        block.append(row)
        size += len(row)
    if block:
        yield b"".join(block)
