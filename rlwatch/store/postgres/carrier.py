"""The seam between what a team's store controls and the bulk that it carries: rows, localised tokens, completions.

Runs, findings, commands and alerts always lie in PostgreSQL. What grows with every step lies there too
(:mod:`rlwatch.store.postgres.tables`) or in ClickHouse (:mod:`rlwatch.store.clickhouse`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rlwatch.ports import Bulk
from rlwatch.store.postgres.connection import Connection, Row

if TYPE_CHECKING:
    import numpy as np


class SeriesPart(NamedTuple):
    """Rows of one metric in order of ``seq``, by column (all of equal length N): int64, and float64 ``values``."""

    seqs: np.ndarray
    steps: np.ndarray
    attempts: np.ndarray
    values: np.ndarray


class RowRange(NamedTuple):
    """Rows above ``after``, with steps from ``low`` to ``high``."""

    after: int
    low: int
    high: int

    def of(self, part: SeriesPart) -> SeriesPart:
        """Return the rows of ``part`` within the range; ``part`` itself if all its rows are."""
        mask = (part.seqs > self.after) & (part.steps >= self.low) & (part.steps <= self.high)
        return part if mask.all() else SeriesPart(*(column[mask] for column in part))


class Load(NamedTuple):
    """Rows of a batch of the kinds that grow with every step; ``names``: metric set -> its metrics.

    ``extra``: ``seq`` -> JSON of the fields of a record that have no column.
    """

    names: Mapping[int, tuple[str, ...]]
    records: Sequence[Row]
    spikes: Sequence[tuple[Row, Sequence[Row]]]
    completions: Sequence[Row]
    extra: Mapping[int, str] = MappingProxyType({})


class Shipment(Protocol):
    """Writes of one writer to an engine that commits apart from PostgreSQL.

    What is sent counts once the transaction that notes it has committed, and never otherwise: whatever is there of a
    write that failed stays out of sight.
    """

    def send(self, db: Connection, bulk: Load) -> None:
        """Store the bulk of a batch, before the transaction. Raises ``UnreachableError`` while that is away."""
        ...

    def note(self, db: Connection) -> None:
        """Note in the transaction that what was sent counts."""
        ...

    def forget(self) -> None:
        """Leave what was sent and not noted out of sight for good."""
        ...


class SeriesBackend(Protocol):
    """Reader of the bulk of runs, each answer of the snapshot that ``db`` holds."""

    def rows(
        self, db: Connection, run_id: str, after_seq: int, *, limit: int | None = None, newest: bool = False
    ) -> Iterable[Row]:
        """``seq, attempt, rank, step, ts, mset, packed values, extra`` in order of ``seq``, or the ``newest`` first.

        ``extra``: JSON of the fields that have no column, or empty.
        """
        ...

    def rows_before(self, db: Connection, run_id: str, after_seq: int, attempt: int) -> Iterator[Row]:
        """The same of attempts before ``attempt``, read bit by bit."""
        ...

    def steps(self, db: Connection, run_id: str) -> Iterable[tuple[int, int]]:
        """Attempt and step, each once, in this order."""
        ...

    def spans(self, db: Connection, run_id: str) -> dict[int, tuple[int, int]]:
        """Attempt -> its lowest and its highest step."""
        ...

    def parts(
        self, db: Connection, run_id: str, sets: Mapping[int, tuple[str, ...]], names: Iterable[str], asked: RowRange
    ) -> Iterator[tuple[str, SeriesPart]]:
        """Rows of each of ``names``, in as many parts as they lie in; ``sets``: the run's metric sets."""
        ...

    def moments(self, db: Connection, run_id: str) -> SeriesPart:
        """Moments of the records, as values."""
        ...

    def last_values(
        self, db: Connection, run_id: str, sets: Mapping[int, tuple[str, ...]]
    ) -> Iterable[tuple[int, int, Mapping[str, float]]]:
        """``seq``, step and values of the rows that hold the newest value of a metric."""
        ...

    def spikes(
        self, db: Connection, run_id: str, *, last: int | None, reason: str | None, step: int | None
    ) -> Iterable[Row]:
        """``step, columns, reason, ts, attempt, rank`` of spike batches by step."""
        ...

    def top_spikes(self, db: Connection, run_id: str, limit: int) -> Iterable[Row]:
        """``step, attempt, rank, body, reason`` of the worst rows, the worst first."""
        ...

    def completions(self, db: Connection, run_id: str, last: int | None) -> Iterable[Row]:
        """``step, columns, ts, attempt, rank`` of batches of completions by step."""
        ...

    def shipment(self, run_id: str) -> Shipment | None:
        """Writes of a writer that begins; None where rows are copied in with the transaction itself."""
        ...

    def make(self) -> None:
        """See that tables are there, and keep what they are to keep, however often."""
        ...

    def prune(
        self, db: Connection, run_id: str, bulk: Bulk, before: float, *, undated: float, dry_run: bool
    ) -> tuple[int, int]:
        """Remove batches as ``Pruning.prune`` does, in the transaction of ``db`` where that can be."""
        ...

    def remove(self, run_id: str) -> None:
        """Remove all there is of the run, before PostgreSQL does."""
        ...

    def usage(self) -> dict[str, dict[str, int]]:
        """Table -> kind -> bytes, apart from PostgreSQL's own."""
        ...
