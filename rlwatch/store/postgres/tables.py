"""Hold the bulk of runs in PostgreSQL's own tables, next to the control tables; used unless the URL names another
server.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping

from rlwatch.errors import StoreCorruptError
from rlwatch.ports import Bulk
from rlwatch.records import APART
from rlwatch.store.postgres.carrier import RowRange, SeriesPart
from rlwatch.store.postgres.connection import Connection, Row
from rlwatch.store.postgres.series import chunked_parts, read_columns
from rlwatch.store.sqlite.rows import packing

RECORDS = "SELECT seq, attempt, rank, step, ts, mset, v, extra FROM record "
_AT_ONCE = 500  # rows of a branch


class Tables:
    """Engine that holds the records, tokens and completions of runs in PostgreSQL itself; implements
    ``SeriesBackend``.
    """

    def rows(
        self, db: Connection, run_id: str, after_seq: int, *, limit: int | None = None, newest: bool = False
    ) -> Iterable[Row]:
        """Return records with sequence numbers above ``after_seq`` in order of ``seq``, or the ``newest`` first.

        Each row is ``seq, attempt, rank, step, ts, mset, packed values, extra``. ``limit``: at most so many; None for
        all.
        """
        order = "DESC" if newest else "ASC"
        return db.execute(
            f"{RECORDS} WHERE run_id = %s AND seq > %s ORDER BY seq {order} LIMIT %s",
            (run_id, after_seq, limit),
            binary=True,
        ).fetchall()

    def rows_before(self, db: Connection, run_id: str, after_seq: int, attempt: int) -> Iterator[Row]:
        """Iterate over records above ``after_seq`` of attempts before ``attempt``, through a cursor of the server."""
        with db.cursor("branch", binary=True) as cursor:
            cursor.itersize = _AT_ONCE
            cursor.execute(
                RECORDS + "WHERE run_id = %s AND seq > %s AND attempt < %s ORDER BY seq", (run_id, after_seq, attempt)
            )
            yield from cursor

    def steps(self, db: Connection, run_id: str) -> Iterable[tuple[int, int]]:
        """Return each pair of attempt and step that has records, once, sorted."""
        rows = db.execute(
            "SELECT attempt, step FROM record WHERE run_id = %s GROUP BY 1, 2 ORDER BY 1, 2", (run_id,), binary=True
        )
        return ((attempt, step) for attempt, step in rows)

    def spans(self, db: Connection, run_id: str) -> dict[int, tuple[int, int]]:
        """Return attempt -> its lowest and its highest step."""
        rows = db.execute(
            "SELECT attempt, min(step), max(step) FROM record WHERE run_id = %s GROUP BY attempt ORDER BY attempt",
            (run_id,),
        )
        return {attempt: (low, high) for attempt, low, high in rows}

    def parts(
        self, db: Connection, run_id: str, sets: Mapping[int, tuple[str, ...]], names: Iterable[str], asked: RowRange
    ) -> Iterator[tuple[str, SeriesPart]]:
        """Iterate over (metric name, rows of the metric in the range ``asked``): older rows from chunks, newer from
        rows.

        ``sets``: id of each metric set of the run -> its names. ``names``: the metrics to read.
        """
        yield from chunked_parts(db, run_id, sets, names, asked)

    def moments(self, db: Connection, run_id: str) -> SeriesPart:
        """Return the Unix times of the run's records, in the form of a metric whose values are the times."""
        return read_columns(db, run_id, "record", "float8send(ts)", "")

    def last_values(
        self, db: Connection, run_id: str, sets: Mapping[int, tuple[str, ...]]
    ) -> Iterable[tuple[int, int, Mapping[str, float]]]:
        """Return ``seq``, step and values of the last row of each metric set."""
        return newest_rows(db, run_id, "record", sets)

    def spikes(
        self, db: Connection, run_id: str, *, last: int | None, reason: str | None, step: int | None
    ) -> Iterable[Row]:
        """Return the run's token batches by step, each as ``step, columns, reason, ts, attempt, rank``.

        ``last``: only so many of the newest; ``reason``, ``step``: only of those; None for all.
        """
        return db.execute(
            """SELECT step, v, reason, ts, attempt, rank FROM (SELECT * FROM spike_batch WHERE run_id = %(run)s
               AND (reason = %(reason)s OR (%(reason)s::text IS NULL AND reason <> ALL(%(apart)s)))
               AND (%(step)s::bigint IS NULL OR step = %(step)s) ORDER BY id DESC LIMIT %(last)s) AS newest
               ORDER BY step, id""",
            {"run": run_id, "reason": reason, "step": step, "last": last, "apart": list(APART)},
            binary=True,
        ).fetchall()

    def top_spikes(self, db: Connection, run_id: str, limit: int) -> Iterable[Row]:
        """Return the ``limit`` worst tokens, worst first, each as ``step, attempt, rank, body, reason``."""
        return db.execute(
            """SELECT top.step, top.attempt, top.rank, body, reason FROM spike_top AS top
               JOIN spike_batch AS whole ON whole.run_id = top.run_id AND whole.id = top.batch
               WHERE top.run_id = %s ORDER BY score DESC, top.id LIMIT %s""",
            (run_id, limit),
        ).fetchall()

    def completions(self, db: Connection, run_id: str, last: int | None) -> Iterable[Row]:
        """Return the run's batches of completions by step, each as ``step, columns, ts, attempt, rank``.

        ``last``: only so many of the newest; None for all.
        """
        return db.execute(
            """SELECT step, v, ts, attempt, rank FROM (SELECT * FROM completion_batch WHERE run_id = %s
               ORDER BY id DESC LIMIT %s) AS newest ORDER BY step, id""",
            (run_id, last),
            binary=True,
        ).fetchall()

    def shipment(self, run_id: str) -> None:  # noqa: ARG002
        """Return None: the bulk is written in the same transaction as everything else."""
        return

    def make(self) -> None:
        """Do nothing: the migrations create the tables."""

    def prune(
        self, db: Connection, run_id: str, bulk: Bulk, before: float, *, undated: float, dry_run: bool
    ) -> tuple[int, int]:
        """Remove a run's batches older than ``before`` (Unix seconds); return their number and bytes.

        ``undated``: time that batches without one are taken to have. ``dry_run``: only count.
        """
        table = {Bulk.TOKENS: "spike_batch", Bulk.COMPLETIONS: "completion_batch"}[bulk]
        old = "run_id = %s AND coalesce(nullif(ts, 0), %s) < %s"
        which = (run_id, undated, before)
        found = db.execute(f"SELECT count(*), coalesce(sum(length(v)), 0) FROM {table} WHERE {old}", which).fetchone()
        if found is not None and found[0] and not dry_run:
            if bulk is Bulk.TOKENS:
                ids = f"SELECT id FROM spike_batch WHERE {old}"
                db.execute(f"DELETE FROM spike_top WHERE run_id = %s AND batch IN ({ids})", (run_id, *which))
            db.execute(f"DELETE FROM {table} WHERE {old}", which)
        return (0, 0) if found is None else (int(found[0]), int(found[1]))

    def remove(self, run_id: str) -> None:
        """Do nothing: PostgreSQL removes the run's data together with its row in the table of runs."""

    def usage(self) -> dict[str, dict[str, int]]:
        """Return nothing: PostgreSQL's own usage counts these tables."""
        return {}


def newest_rows(
    db: Connection, run_id: str, table: str, sets: Mapping[int, tuple[str, ...]]
) -> Iterator[tuple[int, int, Mapping[str, float]]]:
    """Iterate over ``seq``, step and values of the last row of each metric set in ``table`` (``record`` or
    ``forecast``).
    """
    for number, names in sets.items():
        rows = db.execute(
            f"SELECT seq, step, v FROM {table} WHERE run_id = %s AND mset = %s ORDER BY seq DESC LIMIT 1",
            (run_id, number),
            binary=True,
        )
        for seq, step, blob in rows:
            yield seq, step, values_of(names, blob)


def values_of(names: tuple[str, ...], blob: bytes) -> dict[str, float]:
    """Return metric name -> value from ``blob``, the packed values of the metrics ``names``.

    Raises ``StoreCorruptError`` if the number of values is not that of the names.
    """
    try:
        return dict(zip(names, packing(names).unpack(blob), strict=True))
    except struct.error as error:
        raise StoreCorruptError(f"packed values: {error}") from error
