"""Interface between a team's store and the engine that holds its bulk data: rows, localised tokens, completions.

Runs, findings, commands and alerts always lie in PostgreSQL. Data that grow with every step lie there too
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
    """Range of rows to read: sequence numbers above ``after``, and steps from ``low`` to ``high``, both included."""

    after: int
    low: int
    high: int

    def of(self, part: SeriesPart) -> SeriesPart:
        """Return the rows of ``part`` within the range; ``part`` itself if all its rows are."""
        mask = (part.seqs > self.after) & (part.steps >= self.low) & (part.steps <= self.high)
        return part if mask.all() else SeriesPart(*(column[mask] for column in part))


class Load(NamedTuple):
    """Rows of one batch of the kinds that grow with every step.

    ``names``: id of a metric set -> its metric names. ``records``, ``spikes``, ``completions``: rows as their tables
    have them; each token batch with its worst rows. ``extra``: ``seq`` -> JSON of the fields of a record that have no
    column.
    """

    names: Mapping[int, tuple[str, ...]]
    records: Sequence[Row]
    spikes: Sequence[tuple[Row, Sequence[Row]]]
    completions: Sequence[Row]
    extra: Mapping[int, str] = MappingProxyType({})


class Shipment(Protocol):
    """Writes of one writer to an engine that commits separately from PostgreSQL.

    Data that were sent count once the PostgreSQL transaction that records them has committed, and never otherwise:
    whatever a failed write left stays invisible.
    """

    def send(self, db: Connection, bulk: Load) -> None:
        """Store records, tokens and completions (``bulk``) of a batch in the engine, before the PostgreSQL transaction.

        Raises ``UnreachableError`` if the engine cannot be reached.
        """
        ...

    def note(self, db: Connection) -> None:
        """Record in PostgreSQL, within the transaction, that what was sent counts."""
        ...

    def forget(self) -> None:
        """Give up the data that were sent but not recorded in PostgreSQL; they stay invisible for good."""
        ...


class SeriesBackend(Protocol):
    """Engine that holds the bulk of runs; each answer fits the PostgreSQL snapshot that the connection ``db`` holds."""

    def rows(
        self, db: Connection, run_id: str, after_seq: int, *, limit: int | None = None, newest: bool = False
    ) -> Iterable[Row]:
        """Return records with sequence numbers above ``after_seq`` in order of ``seq``, or the ``newest`` first.

        Each row is ``seq, attempt, rank, step, ts, mset, packed values, extra``. ``limit``: at most so many; None for
        all. ``extra``: JSON of the fields that have no column, or empty.
        """
        ...

    def rows_before(self, db: Connection, run_id: str, after_seq: int, attempt: int) -> Iterator[Row]:
        """Iterate over the records above ``after_seq`` that attempts before ``attempt`` wrote, as the rows of
        :meth:`rows`.

        They are read in parts, so that a long run needs little memory.
        """
        ...

    def steps(self, db: Connection, run_id: str) -> Iterable[tuple[int, int]]:
        """Return each pair of attempt and step that has records, once, sorted."""
        ...

    def spans(self, db: Connection, run_id: str) -> dict[int, tuple[int, int]]:
        """Return attempt -> its lowest and its highest step."""
        ...

    def parts(
        self, db: Connection, run_id: str, sets: Mapping[int, tuple[str, ...]], names: Iterable[str], asked: RowRange
    ) -> Iterator[tuple[str, SeriesPart]]:
        """Iterate over (metric name, rows of the metric in the range ``asked``), in as many parts as they are stored
        in.

        ``sets``: id of each metric set of the run -> its names. ``names``: the metrics to read.
        """
        ...

    def moments(self, db: Connection, run_id: str) -> SeriesPart:
        """Return the Unix times of the run's records, in the form of a metric whose values are the times."""
        ...

    def last_values(
        self, db: Connection, run_id: str, sets: Mapping[int, tuple[str, ...]]
    ) -> Iterable[tuple[int, int, Mapping[str, float]]]:
        """Return ``seq``, step and values of the rows that hold the newest value of any metric.

        ``sets``: id of each metric set of the run -> its names.
        """
        ...

    def spikes(
        self, db: Connection, run_id: str, *, last: int | None, reason: str | None, step: int | None
    ) -> Iterable[Row]:
        """Return the run's token batches by step, each as ``step, columns, reason, ts, attempt, rank``.

        ``last``: only so many of the newest; ``reason``, ``step``: only of those; None for all.
        """
        ...

    def top_spikes(self, db: Connection, run_id: str, limit: int) -> Iterable[Row]:
        """Return the ``limit`` worst tokens, worst first, each as ``step, attempt, rank, body, reason``."""
        ...

    def completions(self, db: Connection, run_id: str, last: int | None) -> Iterable[Row]:
        """Return the run's batches of completions by step, each as ``step, columns, ts, attempt, rank``.

        ``last``: only so many of the newest; None for all.
        """
        ...

    def shipment(self, run_id: str) -> Shipment | None:
        """Return the object through which a new writer of the run sends rows, tokens and completions to the engine.

        None if PostgreSQL itself holds them.
        """
        ...

    def make(self) -> None:
        """Create missing tables and set how long their rows are kept; may be called any number of times."""
        ...

    def prune(
        self, db: Connection, run_id: str, bulk: Bulk, before: float, *, undated: float, dry_run: bool
    ) -> tuple[int, int]:
        """Remove old batches of a run as ``Pruning.prune`` does, in the transaction of ``db`` if possible.

        Returns the number of batches and their bytes. ``before``: Unix seconds. ``undated``: time that batches without
        one are taken to have. ``dry_run``: only count.
        """
        ...

    def remove(self, run_id: str) -> None:
        """Remove all bulk data of the run, before PostgreSQL removes the run itself."""
        ...

    def usage(self) -> dict[str, dict[str, int]]:
        """Return table -> kind -> bytes, of tables outside PostgreSQL."""
        ...
