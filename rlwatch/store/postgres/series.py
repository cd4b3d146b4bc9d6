"""Read series of a run: older rows from chunks, one per metric; newer ones cut out of the packed rows by the server.

Once there are :data:`ROWS` rows of a metric set (rows with the same metrics), the writer copies their values into one
chunk per metric, and their axes once. A chart thus reads only the metrics it shows. Rows are kept as well, for readers
of whole rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlwatch.ports import Series
from rlwatch.store.fields import loads
from rlwatch.store.postgres.carrier import RowRange, SeriesBackend, SeriesPart
from rlwatch.store.postgres.connection import Connection
from rlwatch.store.postgres.rows import copy_rows
from rlwatch.store.sqlite.blocks import pack_axis, unpack_axis

ROWS = 1024
"""Rows of a chunk."""
MOST_VALUES = 4 << 20
"""Most values in the chunks made at once from a metric set: where there would be more, rows are not copied into
chunks.
"""
_WIDTH = 8  # bytes of a float64
_ASKED = "AND mset = %(mset)s AND seq > %(after)s AND step BETWEEN %(low)s AND %(high)s"


def metric_sets(db: Connection, run_id: str) -> dict[int, tuple[str, ...]]:
    """Return id of each metric set (rows with the same metrics) -> its metric names, in the order of the packed
    values.
    """
    rows = db.execute("SELECT id, names FROM metric_set WHERE run_id = %s", (run_id,))
    return {number: tuple(loads(names)) for number, names in rows}


def read_series(
    db: Connection,
    carrier: SeriesBackend,
    run_id: str,
    names: Sequence[str],
    asked: RowRange,
) -> dict[str, Series]:
    """Return metric name -> its series in order of ``seq``, of the rows in the range ``asked``.

    ``carrier``: engine that holds the rows. A metric that was never recorded has an empty series.
    """
    parts: dict[str, list[SeriesPart]] = {name: [] for name in names}
    sets = metric_sets(db, run_id)
    for name, part in carrier.parts(db, run_id, sets, parts, asked):
        parts[name].append(part)
    for number, held in sets.items():
        places = {name: held.index(name) for name in parts if name in held}
        for name, part in _rows(db, run_id, ("forecast", number), places, asked) if places else ():
            parts[name].append(part)
    return {name: _joined(name, of_name) for name, of_name in parts.items()}


def chunked_parts(
    db: Connection, run_id: str, sets: Mapping[int, tuple[str, ...]], names: Iterable[str], asked: RowRange
) -> Iterator[tuple[str, SeriesPart]]:
    """Iterate over (metric name, rows of the metric in the range ``asked``): from chunks, then from later packed rows.

    ``sets``: id of each metric set of the run -> its names. ``names``: the metrics to read.
    """
    names = list(names)
    for number, held in sets.items():
        places = {name: held.index(name) for name in names if name in held}
        if not places:
            continue
        chunked = _last_chunked(db, run_id, number)
        if chunked > asked.after:
            yield from _chunks(db, run_id, number, places, asked)
        yield from _rows(db, run_id, ("record", number), places, asked._replace(after=max(chunked, asked.after)))


def _chunks(
    db: Connection, run_id: str, number: int, places: Mapping[str, int], asked: RowRange
) -> Iterator[tuple[str, SeriesPart]]:
    import numpy as np

    axes = db.execute(
        """SELECT first_seq, n, seqs, steps, attempts FROM chunk_axis WHERE run_id = %s AND mset = %s
           AND last_seq > %s AND high_step >= %s AND low_step <= %s ORDER BY first_seq""",
        (run_id, number, asked.after, asked.low, asked.high),
        binary=True,
    ).fetchall()
    if not axes:
        return
    unpacked = [[unpack_axis(blob, rows) for blob in blobs] for _, rows, *blobs in axes]
    seqs, steps, attempts = (np.concatenate(column) for column in zip(*unpacked, strict=True))
    values: dict[int, list[bytes]] = {place: [] for place in places.values()}
    rows = db.execute(
        "SELECT place, v FROM chunk WHERE run_id = %s AND mset = %s AND place = ANY(%s) AND first_seq = ANY(%s) "
        "ORDER BY place, first_seq",
        (run_id, number, list(values), [axis[0] for axis in axes]),
        binary=True,
    )
    for place, blob in rows:
        values[place].append(blob)
    for name, place in places.items():
        whole = np.frombuffer(b"".join(values[place]), dtype="<f8")
        yield name, asked.of(SeriesPart(seqs, steps, attempts, whole))


def _rows(
    db: Connection, run_id: str, kept: tuple[str, int], places: Mapping[str, int], asked: RowRange
) -> Iterator[tuple[str, SeriesPart]]:
    """Read metrics that the server cuts out of packed rows and joins: no row becomes an object here."""
    table, number = kept
    low, high = min(places.values()), max(places.values()) + 1
    cut = f"substr(v, {1 + _WIDTH * low}, {_WIDTH * (high - low)})"
    params = {"mset": number, "after": asked.after, "low": asked.low, "high": asked.high}
    seqs, steps, attempts, values = read_columns(db, run_id, table, cut, _ASKED, **params)
    wide = values.reshape(len(seqs), high - low)
    for name, place in places.items():
        yield name, SeriesPart(seqs, steps, attempts, wide[:, place - low])


def read_columns(db: Connection, run_id: str, table: str, values: str, which: str, **asked: object) -> SeriesPart:
    """Return ``seq``, ``step``, ``attempt`` and a value of the rows of ``table``, in order of ``seq``, as arrays.

    ``values``: SQL of the bytes that hold the values. ``which``: further SQL conditions, with parameters ``asked``.
    """
    import numpy as np

    row = db.execute(
        f"""SELECT string_agg(int8send(seq), NULL), string_agg(int8send(step), NULL),
            string_agg(int8send(attempt), NULL), string_agg(v, NULL) FROM
            (SELECT seq, step, attempt, {values} AS v FROM {table}
            WHERE run_id = %(run)s {which} ORDER BY seq) AS rows""",
        {"run": run_id, **asked},
        binary=True,
    ).fetchone()
    seqs, steps, attempts, packed = (part or b"" for part in row or (None,) * 4)
    axes = [np.frombuffer(part, dtype=">i8").astype(np.int64) for part in (seqs, steps, attempts)]
    kind = ">f8" if "send" in values else "<f8"
    return SeriesPart(axes[0], axes[1], axes[2], np.frombuffer(packed, dtype=kind).astype(np.float64))


def _joined(name: str, parts: list[SeriesPart]) -> Series:
    import numpy as np

    parts = [part for part in parts if len(part[0])]
    if not parts:
        none = np.empty(0, dtype=np.int64)
        return Series(name, none, np.empty(0), none.copy(), none.copy())
    seqs, steps, attempts, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (np.diff(seqs) < 0).any():
        order = np.argsort(seqs, kind="stable")
        seqs, steps, attempts, values = seqs[order], steps[order], attempts[order], values[order]
    return Series(name, steps, values.astype(np.float64), attempts, seqs)


def _last_chunked(db: Connection, run_id: str, number: int) -> int:
    row = db.execute(
        "SELECT coalesce(max(last_seq), 0) FROM chunk_axis WHERE run_id = %s AND mset = %s", (run_id, number)
    ).fetchone()
    return 0 if row is None else int(row[0])


class Chunking:
    """Counter of a run's rows that wait to be copied into chunks (blocks of many rows per metric), by metric set.

    A metric set is a set of metric names that rows have in common.
    """

    def __init__(self, db: Connection, run_id: str) -> None:
        self._run_id = run_id
        self._sets = {number: len(names) for number, names in metric_sets(db, run_id).items()}
        self._waiting: Counter[int] = Counter()
        for mset in self._sets:
            row = db.execute(
                "SELECT count(*) FROM record WHERE run_id = %s AND mset = %s AND seq > %s",
                (run_id, mset, _last_chunked(db, run_id, mset)),
            ).fetchone()
            self._waiting[mset] = 0 if row is None else row[0]

    def add(self, widths: Sequence[tuple[int, int]]) -> None:
        """Count newly written records; ``widths``: for each one, the number of its metric set and how many metrics that
        has.
        """
        self._sets.update(widths)
        self._waiting.update(mset for mset, _ in widths)

    def due(self) -> int | None:
        """Return the number of a metric set with enough waiting rows for a chunk; None if no set has."""
        return next((mset for mset, count in self._waiting.items() if count >= ROWS and self._fits(mset)), None)

    def work(self, db: Connection, mset: int) -> None:
        """Copy the oldest waiting rows of the metric set ``mset`` into one chunk per metric, in the caller's
        transaction.
        """
        last = _last_chunked(db, self._run_id, mset)
        which = f"AND mset = %(mset)s AND seq > %(last)s ORDER BY seq LIMIT {ROWS}"
        inner = f"(SELECT * FROM record WHERE run_id = %(run)s {which}) AS oldest"
        seqs, steps, attempts, values = read_columns(
            db, self._run_id, inner, "v", "AND mset = %(mset)s", mset=mset, last=last
        )
        wide = values.reshape(len(seqs), -1).T.astype("<f8", order="C")
        axes = [pack_axis(axis) for axis in (seqs, steps, attempts)]
        where = (self._run_id, mset, int(seqs[0]), int(seqs[-1]), len(seqs), int(steps.min()), int(steps.max()))
        db.execute(
            """INSERT INTO chunk_axis (run_id, mset, first_seq, last_seq, n, low_step, high_step, seqs, steps, attempts)
               VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)""",
            (*where, *axes),
        )
        copied = [(mset, place, where[2], row.tobytes()) for place, row in enumerate(wide)]
        copy_rows(db, self._run_id, "chunk", copied)
        self._waiting[mset] -= len(seqs)

    def forget(self, mset: int) -> None:
        """Reset the count of waiting rows of a metric set to 0, so that it is left until as many have come again."""
        self._waiting[mset] = 0

    def _fits(self, mset: int) -> bool:
        return 0 < self._sets.get(mset, 0) * ROWS <= MOST_VALUES
