"""Encode a batch of items as rows for a binary copy; the run's one writer numbers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlwatch.ports import Storable
from rlwatch.store.fields import dumps
from rlwatch.store.postgres.carrier import Load, Shipment
from rlwatch.store.postgres.connection import Connection, Row
from rlwatch.store.postgres.copying import copy_rows
from rlwatch.store.sqlite.rows import Batch

_NUMBERED = ("finding", "spike_batch", "spike_top", "completion_batch")


@dataclass(frozen=True, slots=True)
class Numbers:
    """The id last given in each database table whose rows have no sequence number of their own."""

    finding: int = 0
    spike_batch: int = 0
    spike_top: int = 0
    completion_batch: int = 0


def last_numbers(db: Connection, run_id: str) -> Numbers:
    """Return the highest id that the run's rows have in each table without sequence numbers; 0 for a table without
    rows.
    """
    parts = ", ".join(f"(SELECT coalesce(max(id), 0) FROM {table} WHERE run_id = %(run)s)" for table in _NUMBERED)
    row = db.execute(f"SELECT {parts}", {"run": run_id}).fetchone()
    return Numbers(*(row or ()))


class CopiedBatch(Batch):
    """Rows that are ready to be copied into PostgreSQL. ``numbers`` are valid once the transaction has committed."""

    numbers = Numbers()
    place: Callable[[Storable], Storable] | None = None
    """Function that shifts an item to other numbers before it is encoded; None to leave items as they are."""

    def _add(self, item: Storable) -> None:
        super()._add(item if self.place is None else self.place(item))

    def copy(self, db: Connection, run_id: str, numbers: Numbers, shipment: Shipment | None = None) -> None:
        """Copy the rows of the batch into PostgreSQL; the caller holds the transaction.

        ``numbers``: the last ones given so far. ``shipment``: if given, it has sent the bulk (records, tokens,
        completions) to another server, and only records here that they count.
        """
        sets = [(number, dumps(list(names))) for names, (number, _) in self.new_sets.items()]
        findings = list(enumerate(self._findings, start=numbers.finding + 1))
        copy_rows(db, run_id, "metric_set", sets)
        copy_rows(db, run_id, "event", self._with_extra("event", self._events))
        copy_rows(db, run_id, "finding", [(number, *row) for number, row in findings])
        copy_rows(db, run_id, "forecast", self._with_extra("forecast", self._new_forecasts(db, run_id)))
        self.numbers = replace(numbers, finding=numbers.finding + len(findings))
        if shipment is None:
            self._copy_bulk(db, run_id)
        else:
            shipment.note(db)

    def _copy_bulk(self, db: Connection, run_id: str) -> None:
        numbers = self.numbers
        spikes = list(enumerate(self._spikes, start=numbers.spike_batch + 1))
        tops = [(batch, *top) for batch, (_, of_it) in spikes for top in of_it]
        completions = list(enumerate(self._completions, start=numbers.completion_batch + 1))
        copy_rows(db, run_id, "record", self._with_extra("record", self._records))
        copy_rows(db, run_id, "spike_batch", [(number, *row) for number, (row, _) in spikes])
        copy_rows(db, run_id, "spike_top", [(n, *top) for n, top in enumerate(tops, start=numbers.spike_top + 1)])
        copy_rows(db, run_id, "completion_batch", [(number, *row) for number, row in completions])
        self.numbers = replace(
            numbers,
            spike_batch=numbers.spike_batch + len(spikes),
            spike_top=numbers.spike_top + len(tops),
            completion_batch=numbers.completion_batch + len(completions),
        )

    def _with_extra(self, table: str, rows: Sequence[Row]) -> list[Row]:
        """Return rows, which begin with their ``seq``, with their fields that have no column."""
        extra = {seq: body for of, seq, body in self.extra if of == table}
        return [(*row, extra.get(row[0], "")) for row in rows]

    @property
    def bulk(self) -> Load:
        """The batch's rows of the kinds that grow with every step, for a shipment to another server."""
        names = {number: of for of, (number, _) in (self._sets | self.new_sets).items()}
        extra = {seq: body for table, seq, body in self.extra if table == "record"}
        return Load(names, self._records, self._spikes, self._completions, extra)

    def widths(self) -> list[tuple[int, int]]:
        """Return for each record the id of its metric set and its number of metrics."""
        known = {number: len(names) for names, (number, _) in (self._sets | self.new_sets).items()}
        return [(mset, known[mset]) for *_, mset, _ in self._records if isinstance(mset, int)]

    @property
    def newest(self) -> Row | None:
        """Step, Unix time and attempt of the newest record of the batch; None if the batch has no records."""
        if not self._records:
            return None
        _, attempt, _, step, ts, *_ = self._records[-1]
        return step, ts, attempt

    def _new_forecasts(self, db: Connection, run_id: str) -> list[Row]:
        """Return forecasts that are not stored yet: a resumed run repeats some, and the first of a ``seq`` stays."""
        first: dict[object, Row] = {}
        for row in self._forecasts:
            first.setdefault(row[0], row)
        if not first:
            return []
        known = "SELECT seq FROM forecast WHERE run_id = %s AND seq = ANY(%s)"
        held = {seq for (seq,) in db.execute(known, (run_id, list(first)))}
        return [row for seq, row in first.items() if seq not in held]
