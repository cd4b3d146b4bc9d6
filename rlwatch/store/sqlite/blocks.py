"""Turn older rows with the same metrics into blocks, columns with precomputed extremes, so that series are read
quickly.

A run is written by the row and read by the column. So once there are some hundred rows with the same metrics (a metric
set), the writer moves them into a block. A block has their axes (seq, step, attempt, rank, time) once, a chunk of
values for each metric, and levels of cells. A cell summarises a fixed number of consecutive rows: the smallest and the
largest finite value and where they are, the sum, and how many values are not finite. Blocks of a set grow: small ones
are merged into one of thousands of rows. A row is either in the table of rows or in one block; both change in one
transaction, so that a reader's snapshot has every row once.

Forecasts have few numbers and are also read by row: their rows stay, and their blocks are copies.
"""

from __future__ import annotations

import sqlite3
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from rlwatch.store.fields import loads

if TYPE_CHECKING:
    import numpy as np

SMALL, LARGE = 512, 16384
"""Rows of a new block, and about those of a block that grows no more; fewer where a set has many metrics."""
KEPT = 64
"""Number of the newest rows of a metric set that stay rows: they are read most often, and by row."""
ENOUGH_VALUES, MOST_VALUES = 5 << 18, 4 << 20
"""Values in a block that grows no more, and most values in any block: where a small block would hold more, rows stay
rows.
"""
WIDTHS = (64, 256, 1024, 4096)
"""Rows summarised by one cell, by level; the last cell of a block may have fewer."""
ABSENT = 0xFFFF
"""Position in a cell of a value that the cell does not have, such as its first NaN where there is none."""
_PLACES = 1 << 20
_ODD = ("nan", "up", "down")
_ALL = slice(None)

Counts = Counter[tuple[str, int]]
"""Number of rows by (table, id of the metric set)."""


_NUMBERS = ("low", "high", "total")
_PLACED = ("low_at", "high_at", "nan_at", "up_at", "down_at", "numbers", "nans", "ups", "downs")
_FIELDS = dict.fromkeys(_NUMBERS, "<f8") | dict.fromkeys(_PLACED, "<u2")
Cells = dict[str, "np.ndarray"]
"""Cells by field, each an array (metrics, cells). ``low``, ``high``: extremes of the finite values (inf and -inf if
there are none); ``total``: their sum. ``low_at``, ``high_at``: positions within the cell of the first smallest and the
last largest finite value; ``nan_at``, ``up_at``, ``down_at``: of the first NaN, +Inf and -Inf. ``numbers``, ``nans``,
``ups``, ``downs``: number of values that are finite, NaN, +Inf and -Inf.
"""


# The format: axes, chunks, cells.


def pack_axis(values: np.ndarray) -> bytes:
    """Return the whole numbers ``values`` (rows,) as bytes: only first and stride if they are evenly spaced, as steps
    mostly are.
    """
    import numpy as np

    strides = np.diff(values)
    if (strides == strides[0]).all():
        return struct.pack("<qq", values[0], strides[0])
    return values.astype("<i8").tobytes()


def unpack_axis(blob: bytes, rows: int) -> np.ndarray:
    """Return the numbers (``rows``,) that :func:`pack_axis` packed."""
    import numpy as np

    if len(blob) == 16:
        first, stride = struct.unpack("<qq", blob)
        return np.int64(first) + np.int64(stride) * np.arange(rows, dtype=np.int64)
    return np.frombuffer(blob, dtype="<i8")


def finest(values: np.ndarray) -> Cells:
    """Return summaries (count, sum, minimum, maximum, non-finite values) of every ``WIDTHS[0]`` consecutive rows.

    ``values`` (metrics, rows): the number of rows is a multiple of ``WIDTHS[0]``.
    """
    import numpy as np

    stretches = values.reshape(len(values), -1, WIDTHS[0])
    cells = _empty(stretches.shape[:2])
    finite = np.isfinite(stretches)
    below = above = summed = stretches
    if not finite.all():
        below, above = np.where(finite, stretches, np.inf), np.where(finite, stretches, -np.inf)
        summed = np.where(finite, stretches, 0.0)
        for name, hit in zip(_ODD, (np.isnan(stretches), stretches == np.inf, stretches == -np.inf), strict=True):
            cells[f"{name}s"] = hit.sum(axis=2)
            cells[f"{name}_at"] = np.where(hit.any(axis=2), hit.argmax(axis=2), ABSENT)
    cells["numbers"] = finite.sum(axis=2)
    with np.errstate(all="ignore"):
        cells["total"] = summed.sum(axis=2)
    places = {"low": below.argmin(axis=2), "high": WIDTHS[0] - 1 - above[:, :, ::-1].argmax(axis=2)}
    for name, shown in (("low", below), ("high", above)):
        cells[name] = _taken(shown, places[name])
        cells[f"{name}_at"] = np.where(cells["numbers"] > 0, places[name], ABSENT)
    return cells


def coarser(cells: Cells, width: int, times: int) -> Cells:
    """Return summaries that each cover ``times`` as many rows as the given ``cells``, which cover ``width`` rows
    each.
    """
    import numpy as np

    shape = cells["low"].shape
    more = _empty((shape[0], -shape[1] % times))
    groups = {name: np.concatenate((cells[name], more[name]), axis=1).reshape(shape[0], -1, times) for name in _FIELDS}
    made: Cells = {}
    firsts = {"low": groups["low"].argmin(axis=2), "high": times - 1 - groups["high"][:, :, ::-1].argmax(axis=2)}
    firsts |= {name: (groups[f"{name}_at"] != ABSENT).argmax(axis=2) for name in _ODD}
    for name, child in firsts.items():
        at = _taken(groups[f"{name}_at"], child).astype(np.int64)
        made[f"{name}_at"] = np.where(at == ABSENT, ABSENT, at + child * width)
    for name in ("low", "high"):
        made[name] = _taken(groups[name], firsts[name])
    for name in ("total", "numbers", *(f"{name}s" for name in _ODD)):
        with np.errstate(all="ignore"):
            made[name] = groups[name].sum(axis=2)
    return made


def _taken(groups: np.ndarray, child: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.take_along_axis(groups, child[:, :, None], axis=2)[:, :, 0]


def _empty(shape: tuple[int, ...]) -> Cells:
    """Return cells without values."""
    import numpy as np

    none = {"low": np.inf, "high": -np.inf} | dict.fromkeys((name for name in _FIELDS if name.endswith("_at")), ABSENT)
    return {name: np.full(shape, none.get(name, 0), dtype=kind) for name, kind in _FIELDS.items()}


def pack_cells(cells: Cells) -> bytes:
    """Return the summaries ``cells`` as bytes: one field after the other, and within it metric by metric."""
    return b"".join(cells[name].astype(kind).tobytes() for name, kind in _FIELDS.items())


def unpack_cells(blob: bytes, count: int, places: Sequence[int] | slice) -> Cells:
    """Return the cells of the metrics at the positions ``places``, from a blob with ``count`` cells per metric."""
    import numpy as np

    metrics = len(blob) // (count * sum(np.dtype(kind).itemsize for kind in _FIELDS.values()))
    found, at = {}, 0
    for name, kind in _FIELDS.items():
        column = np.frombuffer(blob, dtype=kind, count=metrics * count, offset=at)
        found[name] = column.reshape(metrics, count)[places]
        at += column.nbytes
    return found


# Reading a block.


@dataclass(frozen=True, slots=True)
class Block:
    """A block of ``rows`` rows in order of ``seq``, with its bounds, as read from the database.

    ``number``: its id. ``first_seq``, ``last_seq``: bounds of the sequence numbers; ``low_``, ``high_``: bounds of
    steps and attempts. ``packed_``: axes as :func:`pack_axis` packed them.
    """

    number: int
    rows: int
    first_seq: int
    last_seq: int
    low_step: int
    high_step: int
    low_attempt: int
    high_attempt: int
    packed_seqs: bytes
    packed_steps: bytes
    packed_attempts: bytes

    @property
    def seqs(self) -> np.ndarray:
        """Sequence number of each row of the block, (rows,), ascending."""
        return unpack_axis(self.packed_seqs, self.rows)

    @property
    def steps(self) -> np.ndarray:
        """Training steps of the rows (rows,)."""
        return unpack_axis(self.packed_steps, self.rows)

    @property
    def attempts(self) -> np.ndarray:
        """Number of the attempt that wrote each row of the block, (rows,)."""
        return unpack_axis(self.packed_attempts, self.rows)

    def spacing(self) -> tuple[int, int, int, int] | None:
        """Return (first seq, stride, first step, stride) if both axes are evenly spaced and of one attempt; else
        None.
        """
        if len(self.packed_seqs) != 16 or len(self.packed_steps) != 16 or self.low_attempt != self.high_attempt:
            return None
        return (*struct.unpack("<qq", self.packed_seqs), *struct.unpack("<qq", self.packed_steps))

    def ranks(self, db: sqlite3.Connection) -> np.ndarray:
        """Return the ranks that logged the rows (rows,), read from ``db``."""
        [blob] = db.execute("SELECT ranks FROM block WHERE id = ?", (self.number,)).fetchone()
        return unpack_axis(blob, self.rows)

    def moments(self, db: sqlite3.Connection) -> np.ndarray:
        """Return the Unix seconds of the rows (rows,), read from ``db``; NaN for rows without a time."""
        import numpy as np

        [blob] = db.execute("SELECT ts FROM block WHERE id = ?", (self.number,)).fetchone()
        return np.frombuffer(blob, dtype="<f8")

    def values(self, db: sqlite3.Connection, places: Sequence[int], rows: slice | np.ndarray = _ALL) -> np.ndarray:
        """Return the values (places, rows) of the metrics at positions ``places`` of their set, for ``rows`` of the
        block.
        """
        import numpy as np

        count = len(range(self.rows)[rows]) if isinstance(rows, slice) else len(rows)
        base, found = self.number * _PLACES, np.empty((len(places), count))
        for at, place in enumerate(places):
            [blob] = db.execute("SELECT v FROM chunk WHERE id = ?", (base + place,)).fetchone()
            found[at] = np.frombuffer(blob, dtype="<f8")[rows]
        return found

    def cells(self, db: sqlite3.Connection, width: int, places: Sequence[int] | slice = _ALL) -> Cells:
        """Return the cells of ``width`` rows of the metrics at positions ``places`` of their set."""
        [blob] = db.execute("SELECT v FROM level WHERE id = ?", (self.number * 4 + WIDTHS.index(width),)).fetchone()
        return unpack_cells(blob, -(-self.rows // width), places)


def holds_blocks(db: sqlite3.Connection) -> bool:
    """Return True if the file has a table of blocks; one from before blocks existed has none until its writer upgrades
    it.
    """
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'block'").fetchone() is not None


_BLOCKS = """SELECT id, n, first_seq, last_seq, low_step, high_step, low_attempt, high_attempt, seqs, steps, attempts
             FROM block WHERE kept_in = ?1 AND mset = ?2 AND last_seq > ?3 AND (?4 IS NULL OR high_step >= ?4)
             AND (?5 IS NULL OR low_step <= ?5) ORDER BY last_seq"""


def blocks_of(
    db: sqlite3.Connection, kept_in: str, mset: int, after_seq: int = 0, steps: tuple[int, int] | None = None
) -> list[Block]:
    """Return the blocks of a metric set in order of ``seq``, without those that lie outside what is asked for.

    ``kept_in``: table of the rows, ``record`` or ``forecast``. ``mset``: id of the metric set. ``after_seq``: leave out
    blocks whose rows are all at or below this number. ``steps``: leave out blocks outside of these two steps.
    """
    return [Block(*row) for row in db.execute(_BLOCKS, (kept_in, mset, after_seq, *(steps or (None, None))))]


def blocked_sets(db: sqlite3.Connection, kept_in: str) -> list[int]:
    """Return the ids of the metric sets of a table (``record`` or ``forecast``) that have blocks."""
    if not holds_blocks(db):
        return []
    return [mset for (mset,) in db.execute("SELECT DISTINCT mset FROM block WHERE kept_in = ?", (kept_in,))]


def last_blocked(db: sqlite3.Connection, kept_in: str, mset: int) -> int:
    """Return the highest ``seq`` of the metric set that is in a block; 0 if none is."""
    row = db.execute("SELECT max(last_seq) FROM block WHERE kept_in = ? AND mset = ?", (kept_in, mset)).fetchone()
    return row[0] or 0


# Making blocks: the writer's part.


class Blocks:
    """Turns rows that a writer wrote into blocks, a part at a time, so that no write is delayed much."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._widths: dict[int, int] = {}
        self._rows: Counts = Counter()
        self._here = holds_blocks(db)
        if not self._here:
            return
        for kept_in in ("record", "forecast"):
            for mset, rows in db.execute(f"SELECT mset, count(*) FROM {kept_in} GROUP BY mset").fetchall():  # noqa: S608
                self._rows[kept_in, mset] = rows
        for kept_in, mset, rows in db.execute("SELECT kept_in, mset, sum(n) FROM block GROUP BY kept_in, mset"):
            if kept_in == "forecast":
                self._rows[kept_in, mset] -= rows

    def add(self, written: Counts) -> None:
        """Count rows that were written, by table and metric set."""
        if self._here:
            self._rows.update(written)

    def due(self) -> bool:
        """Return True if enough rows of some metric set have gathered to make a block."""
        return any(rows >= SMALL + KEPT for rows in self._rows.values())

    def work(self, db: sqlite3.Connection) -> None:
        """Make one block for every metric set with enough rows; the caller holds the transaction."""
        for (kept_in, mset), rows in self._rows.items():
            if rows >= SMALL + KEPT:
                self._rows[kept_in, mset] -= self._moved(db, kept_in, mset, rows)

    def forget_late(self, db: sqlite3.Connection, lowest: Mapping[int, int]) -> None:
        """Remove blocks of forecasts into which late forecasts belong; their rows are still there.

        ``lowest``: metric set -> lowest ``seq`` of the forecasts that were just written.
        """
        for mset, seq in lowest.items() if self._here else ():
            for block in blocks_of(db, "forecast", mset, seq - 1):
                _remove(db, block)
                self._rows["forecast", mset] += block.rows

    def later(self) -> None:
        """Postpone blocks until as many rows have come once more, because the disk had no space."""
        for key, rows in self._rows.items():
            self._rows[key] = min(rows, KEPT)

    def _moved(self, db: sqlite3.Connection, kept_in: str, mset: int, rows: int) -> int:
        """Make one block of waiting rows; return by how much the count of waiting rows decreases."""
        import numpy as np

        of = _Set(kept_in, mset, self._width(db, mset))
        if not of.large:
            return rows  # far too wide: its rows stay rows
        wanted = min(of.large, (rows - KEPT) // WIDTHS[0] * WIDTHS[0])
        more = ", rank" if kept_in == "record" else ", 0"
        found = db.execute(
            f"SELECT seq, step, attempt{more}, ts, v FROM {kept_in} WHERE mset = ? AND seq > ? ORDER BY seq LIMIT ?",  # noqa: S608
            (mset, last_blocked(db, kept_in, mset), wanted),
        ).fetchall()
        if len(found) < wanted:  # a forecast that was there already was counted twice
            return rows - len(found)
        *columns, moments, packed = zip(*found, strict=True)
        seqs, steps, attempts, ranks = (np.array(column, dtype=np.int64) for column in columns)
        axes = _Axes(seqs, steps, attempts, ranks=ranks, moments=np.array(moments, dtype="<f8"))
        table = b"".join(packed)
        if of.width:
            values = np.ascontiguousarray(np.frombuffer(table, dtype="<f8").reshape(wanted, of.width).T)
            _insert(db, of, axes, list(values), finest(values))
        else:
            _insert(db, of, axes, [], None)
        if kept_in == "record":
            db.execute("DELETE FROM record WHERE mset = ? AND seq <= ?", (mset, int(seqs[-1])))
        _grow(db, of)
        return wanted

    def _width(self, db: sqlite3.Connection, mset: int) -> int:
        if mset not in self._widths:
            [names] = db.execute("SELECT names FROM metric_set WHERE id = ?", (mset,)).fetchone()
            self._widths[mset] = len(loads(names))
        return self._widths[mset]


@dataclass(frozen=True, slots=True)
class _Axes:
    seqs: np.ndarray
    steps: np.ndarray
    attempts: np.ndarray
    _: KW_ONLY
    ranks: np.ndarray
    moments: np.ndarray


@dataclass(frozen=True, slots=True)
class _Set:
    """The rows of one database table that have the same set of ``width`` metrics."""

    kept_in: str
    mset: int
    width: int

    @property
    def large(self) -> int:
        """Rows of a large block; 0 if the set has too many metrics for any block."""
        if SMALL * self.width > MOST_VALUES:
            return 0
        return min(LARGE, max(1, ENOUGH_VALUES // max(1, self.width) // SMALL) * SMALL)


def _grow(db: sqlite3.Connection, of: _Set) -> None:
    """Merge the small blocks at the end into one, once they have as many rows as a large block."""
    import numpy as np

    tail: list[Block] = []
    for block in reversed(blocks_of(db, of.kept_in, of.mset)):
        if block.rows > of.large // 2:
            break
        tail.insert(0, block)
    if len(tail) < 2 or sum(block.rows for block in tail) < of.large:
        return
    axes = _Axes(
        *(np.concatenate([getattr(block, name) for block in tail]) for name in ("seqs", "steps", "attempts")),
        ranks=np.concatenate([block.ranks(db) for block in tail]),
        moments=np.concatenate([block.moments(db) for block in tail]),
    )
    every, cells = range(of.width), None
    if of.width:
        parts = [block.cells(db, WIDTHS[0]) for block in tail]
        cells = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    values = [np.concatenate(parts) for parts in zip(*(block.values(db, every) for block in tail), strict=True)]
    for block in tail:
        _remove(db, block)
    _insert(db, of, axes, values, cells)


def _insert(db: sqlite3.Connection, of: _Set, axes: _Axes, values: Sequence[np.ndarray], cells: Cells | None) -> None:
    """Insert a block of ``values``, a column per metric; ``cells``: the finest ones, None if there is no metric."""
    whole = (axes.seqs, axes.steps, axes.attempts, axes.ranks)
    bounds = (axes.seqs[0], axes.seqs[-1], axes.steps.min(), axes.steps.max(), axes.attempts.min(), axes.attempts.max())
    inserted = db.execute(
        "INSERT INTO block VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (of.kept_in, of.mset, len(axes.seqs), *map(int, bounds), *map(pack_axis, whole), axes.moments.tobytes()),
    )
    number = inserted.lastrowid or 0
    rows = [(number * _PLACES + place, column.tobytes()) for place, column in enumerate(values)]
    db.executemany("INSERT INTO chunk VALUES (?, ?)", rows)
    if cells is None:
        return
    for place, width in enumerate(WIDTHS):
        if place:
            cells = coarser(cells, WIDTHS[place - 1], width // WIDTHS[place - 1])
        db.execute("INSERT INTO level VALUES (?, ?)", (number * 4 + place, pack_cells(cells)))


def _remove(db: sqlite3.Connection, block: Block) -> None:
    first, level = block.number * _PLACES, block.number * 4
    db.execute("DELETE FROM chunk WHERE id >= ? AND id < ?", (first, first + _PLACES))
    db.execute("DELETE FROM level WHERE id >= ? AND id < ?", (level, level + 4))
    db.execute("DELETE FROM block WHERE id = ?", (block.number,))


def forget_incomplete(db: sqlite3.Connection, widths: Mapping[int, int]) -> None:
    """Remove blocks of a damaged file that lack a part. ``widths``: metric set -> number of its metrics."""
    for number, mset in db.execute("SELECT id, mset FROM block").fetchall():
        first, level = number * _PLACES, number * 4
        counted = db.execute(
            "SELECT (SELECT count(*) FROM chunk WHERE id >= ?1 AND id < ?2), "
            "(SELECT count(*) FROM level WHERE id >= ?3 AND id < ?3 + 4)",
            (first, first + _PLACES, level),
        ).fetchone()
        width = widths.get(mset)
        if width is None or counted != (width, len(WIDTHS) if width else 0):
            db.execute("DELETE FROM block WHERE id = ?", (number,))
            db.execute("DELETE FROM chunk WHERE id >= ? AND id < ?", (first, first + _PLACES))
            db.execute("DELETE FROM level WHERE id >= ? AND id < ?", (level, level + 4))
