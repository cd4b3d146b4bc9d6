"""Read metrics by column: series from blocks and from rows that are in no block yet, whole, new, or thinned for a
chart.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rlwatch.ports import Series
from rlwatch.store.fields import loads
from rlwatch.store.sqlite.blocks import ABSENT, WIDTHS, Block, Cells, blocks_of, holds_blocks, last_blocked
from rlwatch.store.thinning import bounds_of

if TYPE_CHECKING:
    import numpy as np

_WIDTH = 8  # bytes of a float64
Range = tuple[int, int]


def metric_sets(db: sqlite3.Connection) -> dict[int, tuple[str, ...]]:
    """Return id of each metric set (rows with the same metrics) -> its metric names, in the order of the packed
    values.
    """
    return {number: tuple(loads(names)) for number, names in db.execute("SELECT id, names FROM metric_set")}


def metric_tables(db: sqlite3.Connection) -> tuple[str, ...]:
    """Return the tables that hold metrics, ``record`` and ``forecast``; an old file has no ``forecast``."""
    rows = db.execute("SELECT name FROM sqlite_master WHERE name IN ('record', 'forecast') ORDER BY name DESC")
    return tuple(name for (name,) in rows)


@dataclass(frozen=True, slots=True)
class SeriesQuery:
    """Part of a series to read.

    ``after_seq``: only rows with higher sequence numbers. ``steps``: only rows between these two steps, both included.
    ``points``: thin for a chart of this width; None for all rows.
    """

    after_seq: int = 0
    steps: Range | None = None
    points: int | None = None


def read_series(db: sqlite3.Connection, names: Sequence[str], query: SeriesQuery) -> dict[str, Series]:
    """Return metric name -> its series in order of ``seq``; a metric that was never recorded has an empty one."""
    parts: dict[str, list[tuple[int, _Part]]] = {name: [] for name in names}
    sets, tables, blocked = metric_sets(db), metric_tables(db), holds_blocks(db)
    bounds = bounds_of(read_spans(db)) if query.points is not None else {}
    for number, held in sets.items():
        place_of = {name: place for place, name in enumerate(held)}
        places = {name: place_of[name] for name in parts if name in place_of}
        for table in tables if places else ():
            source = _Source(db, table, number, tuple(places.values()), query, blocked=blocked)
            part = source.thinned(bounds) if query.points is not None else source.whole()
            if part is not None:
                for row, name in enumerate(places):
                    parts[name].append((row, part))
    joined = _Joined()
    return {name: joined.series(name, of_name) for name, of_name in parts.items()}


def read_spans(db: sqlite3.Connection) -> dict[int, Range]:
    """Return attempt -> its lowest and its highest step; attempts without records are left out."""
    spans: dict[int, Range] = {}

    def widen(attempt: int, low: int, high: int) -> None:
        before = spans.get(attempt, (low, high))
        spans[attempt] = (min(low, before[0]), max(high, before[1]))

    for row in db.execute("SELECT attempt, min(step), max(step) FROM record GROUP BY attempt"):
        widen(*row)
    if not holds_blocks(db):
        return dict(sorted(spans.items()))
    of_one = "SELECT low_attempt, min(low_step), max(high_step) FROM block WHERE kept_in = 'record' "
    for row in db.execute(of_one + "AND low_attempt = high_attempt GROUP BY low_attempt"):
        widen(*row)
    for block in record_blocks(db):
        if block.low_attempt != block.high_attempt:
            attempts, steps = block.attempts, block.steps
            for attempt in set(attempts.tolist()):
                own = steps[attempts == attempt]
                widen(attempt, int(own.min()), int(own.max()))
    return dict(sorted(spans.items()))


def record_blocks(db: sqlite3.Connection) -> list[Block]:
    """Return all blocks of records (not of forecasts)."""
    if not holds_blocks(db):
        return []
    sets = db.execute("SELECT DISTINCT mset FROM block WHERE kept_in = 'record'").fetchall()
    return [block for (mset,) in sets for block in blocks_of(db, "record", mset)]


def read_steps(db: sqlite3.Connection) -> dict[int, list[int]]:
    """Return attempt -> the steps that it has records of, ascending and without duplicates."""
    import numpy as np

    rows = db.execute("SELECT attempt, step FROM record").fetchall()
    parts = [np.array(rows, dtype=np.int64).reshape(-1, 2).T]
    parts += [np.stack((block.attempts, block.steps)) for block in record_blocks(db)]
    attempts, steps = np.concatenate(parts, axis=1)
    of_attempts = {attempt: np.sort(steps[attempts == attempt]) for attempt in sorted(set(attempts.tolist()))}
    return {attempt: own[np.diff(own, prepend=own[0] - 1) > 0].tolist() for attempt, own in of_attempts.items()}


def read_moments(db: sqlite3.Connection) -> Series:
    """Return the Unix seconds of every record as a series, in order of ``seq``; NaN where a record has none."""
    import numpy as np

    blocks = record_blocks(db)
    rows = db.execute("SELECT seq, step, attempt, ts FROM record ORDER BY seq").fetchall()
    *whole, moments = zip(*rows, strict=True) if rows else ((), (), (), ())
    columns = [
        np.concatenate([*(getattr(block, name) for block in blocks), np.array(column, dtype=np.int64)])
        for name, column in zip(("seqs", "steps", "attempts"), whole, strict=True)
    ]
    values = np.concatenate([*(block.moments(db) for block in blocks), np.array(moments, dtype=np.float64)])
    order = np.argsort(columns[0], kind="stable")
    seqs, steps, attempts = (column[order] for column in columns)
    return Series("ts", steps, values[order], attempts, seqs)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one metric set: (rows,) axes that all metrics share, or (metrics, rows); ``values`` (metrics, rows).

    ``kept`` (metrics, rows) marks which rows a metric has, if the metrics differ.
    """

    seqs: np.ndarray
    steps: np.ndarray
    attempts: np.ndarray
    values: np.ndarray
    kept: np.ndarray | None = None

    def columns(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return seqs, steps, attempts and values of the metric at position ``row``."""
        axes = [axis if axis.ndim == 1 else axis[row] for axis in (self.seqs, self.steps, self.attempts)]
        if self.kept is None:
            return axes[0], axes[1], axes[2], self.values[row]
        mask = self.kept[row]
        return axes[0][mask], axes[1][mask], axes[2][mask], self.values[row][mask]


class _Joined:
    """Join parts into series; metrics with the same rows share their axes, which are read-only therefore."""

    def __init__(self) -> None:
        self._axes: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}

    def series(self, name: str, parts: Sequence[tuple[int, _Part]]) -> Series:
        """Return the series of one metric, given its position in each part."""
        import numpy as np

        if not parts:
            none = np.empty(0, dtype=np.int64)
            return Series(name, none, np.empty(0), none.copy(), none.copy())
        columns = [part.columns(row) for row, part in parts]
        if len(parts) == 1:
            seqs, steps, attempts, values = columns[0]
        else:
            values = np.concatenate([column[3] for column in columns])
            order, seqs, steps, attempts = self._order([part for _, part in parts], columns)
            values = values[order]
        for axis in (seqs, steps, attempts):
            axis.flags.writeable = False
        return Series(name, steps, values, attempts, seqs)

    def _order(
        self, parts: Sequence[_Part], columns: Sequence[tuple[np.ndarray, ...]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        import numpy as np

        shared = all(part.seqs.ndim == 1 and part.kept is None for part in parts)
        key = tuple(id(part) for part in parts)
        if shared and key in self._axes:
            return self._axes[key]
        seqs, steps, attempts = (np.concatenate([column[k] for column in columns]) for k in range(3))
        order = np.argsort(seqs, kind="stable")
        found = (order, seqs[order], steps[order], attempts[order])
        if shared:
            self._axes[key] = found
        return found


class _Source:
    """One metric set in one table: its blocks, and the rows that are in none yet."""

    def __init__(
        self,
        db: sqlite3.Connection,
        table: str,
        number: int,
        places: tuple[int, ...],
        query: SeriesQuery,
        *,
        blocked: bool,
    ) -> None:
        self.db, self.places, self.query = db, places, query
        self._table, self._number = table, number
        self.blocks = blocks_of(db, table, number, query.after_seq, query.steps) if blocked else []
        self._blocked_seq = last_blocked(db, table, number) if blocked else 0

    def whole(self) -> _Part | None:
        """Return every row that is asked for; None if there is none."""
        import numpy as np

        parts = [part for part in (*map(self.of_block, self.blocks), self.rows()) if len(part.seqs)]
        if len(parts) < 2:
            return parts[0] if parts else None
        seqs, steps, attempts = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("seqs", "steps", "attempts")
        )
        values = np.empty((len(self.places), len(seqs)))
        at = 0
        while parts:  # one after the other let go: they are as large as what is made of them
            part = parts.pop(0)
            values[:, at : at + len(part.seqs)] = part.values
            at += len(part.seqs)
        return _Part(seqs, steps, attempts, values)

    def thinned(self, bounds: Mapping[int, int]) -> _Part | None:
        """Return the extremes of every stretch, so that no more than a few rows per point are left."""
        width = self._width()
        return _Thinning(self, bounds, width).part() if width else self.whole()

    def of_block(self, block: Block) -> _Part:
        """Return the rows of a block that are asked for."""
        axes = (block.seqs, block.steps, block.attempts)
        wanted = self.inside(*axes[:2])
        if wanted.all():
            return _Part(*axes, block.values(self.db, self.places))
        rows = wanted.nonzero()[0]
        chosen: slice | np.ndarray = rows
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
            chosen = slice(int(rows[0]), int(rows[-1]) + 1)
        seqs, steps, attempts = (axis[chosen] for axis in axes)
        return _Part(seqs, steps, attempts, block.values(self.db, self.places, chosen))

    def rows(self) -> _Part:
        """Return the rows that are in no block."""
        import numpy as np

        low, high = min(self.places), max(self.places) + 1
        first, last = self.query.steps or (None, None)
        found = self.db.execute(
            f"SELECT seq, step, attempt, substr(v, ?1, ?2) FROM {self._table} WHERE mset = ?3 AND seq > ?4 "  # noqa: S608
            "AND (?5 IS NULL OR step >= ?5) AND (?6 IS NULL OR step <= ?6) ORDER BY seq",
            (
                1 + _WIDTH * low,
                _WIDTH * (high - low),
                self._number,
                max(self.query.after_seq, self._blocked_seq),
                first,
                last,
            ),
        ).fetchall()
        *columns, blobs = zip(*found, strict=True) if found else ((), (), (), ())
        seqs, steps, attempts = (np.array(column, dtype=np.int64) for column in columns)
        table = np.frombuffer(b"".join(blobs), dtype="<f8").reshape(len(found), high - low)
        chosen = table[:, _chosen(tuple(place - low for place in self.places))]
        return _Part(seqs, steps, attempts, np.array(chosen.T, order="C"))

    def inside(self, seqs: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return a mask (rows,) of the rows that are asked for."""
        mask: np.ndarray = seqs > self.query.after_seq
        if self.query.steps is not None:
            mask &= (steps >= self.query.steps[0]) & (steps <= self.query.steps[1])
        return mask

    def _width(self) -> int:
        """Return the rows of the widest cells of which there are enough; 0 if all rows are to be read."""
        rows = sum(block.rows * _share(block, self.query.steps) for block in self.blocks)
        enough = 2 * rows / max(1, self.query.points or 1)
        return max((width for width in WIDTHS if width <= enough), default=0)


class _Thinning:
    """Thin rows of a metric set to the extremes of its cells, or row by row where a cell is only partly asked for."""

    def __init__(self, source: _Source, bounds: Mapping[int, int], width: int) -> None:
        self._source, self._bounds, self._width = source, bounds, width

    def part(self) -> _Part | None:
        """Return the rows that are left, which differ between metrics."""
        import numpy as np

        parts = [part for _, of_kind in groupby(self._source.blocks, self._kind) for part in self._parts(list(of_kind))]
        parts.append(_spread(self._source.rows(), len(self._source.places)))
        kept = None
        if any(part.kept is not None for part in parts):
            kept = np.concatenate(
                [np.ones(part.values.shape, dtype=bool) if part.kept is None else part.kept for part in parts], axis=1
            )
        seqs, steps, attempts, values = (
            np.concatenate([getattr(part, name) for part in parts], axis=1)
            for name in ("seqs", "steps", "attempts", "values")
        )
        return _Part(seqs, steps, attempts, values, kept) if values.shape[1] else None

    def _kind(self, block: Block) -> int:
        """Return the width of the cells that summarise the block; 0 if its rows must be read."""
        query = self._source.query
        if block.first_seq <= query.after_seq or not _within(block, query.steps) or not self._alike(block):
            return 0
        return min(self._width, max(width for width in WIDTHS if width <= block.rows))

    def _parts(self, blocks: Sequence[Block]) -> list[_Part]:
        width = self._kind(blocks[0])
        if not width:
            return [self._of_stretches(block) for block in blocks]
        return [
            part
            for even, some in groupby(blocks, lambda block: block.spacing() is not None)
            for part in ([self._of_cells(list(some), width)] if even else [self._of_cells([b], width) for b in some])
        ]

    def _of_cells(self, blocks: Sequence[Block], width: int) -> _Part:
        """Return the extremes of all cells of ``blocks``: several if they are evenly spaced, else one."""
        import numpy as np

        places = self._source.places
        read = [block.cells(self._source.db, width, _chosen(places)) for block in blocks]
        cells = (
            {name: np.concatenate([part[name] for part in read], axis=1) for name in read[0]}
            if len(read) > 1
            else read[0]
        )
        rows, values, kept = _extremes(cells)
        counts = [part["low"].shape[1] for part in read]
        spacing = [block.spacing() for block in blocks]
        if spacing[0] is None:
            at = np.arange(counts[0]) * width
            row = rows + np.repeat(at, rows.shape[1] // counts[0])
            return _Part(blocks[0].seqs[row], blocks[0].steps[row], blocks[0].attempts[row], values, kept)
        of_cell = np.repeat(np.arange(len(blocks)), counts)
        first_row = np.concatenate([np.arange(count) * width for count in counts])
        first_seq, seq_stride, first_step, step_stride = np.array(spacing, dtype=np.int64)[of_cell].T
        attempts = np.array([block.low_attempt for block in blocks], dtype=np.int64)[of_cell]
        slots = rows.shape[1] // len(of_cell)
        bases = [
            np.repeat(first_seq + seq_stride * first_row, slots),
            np.repeat(first_step + step_stride * first_row, slots),
        ]
        seqs = bases[0] + np.repeat(seq_stride, slots) * rows
        steps = bases[1] + np.repeat(step_stride, slots) * rows
        return _Part(seqs, steps, np.broadcast_to(np.repeat(attempts, slots), rows.shape), values, kept)

    def _of_stretches(self, block: Block) -> _Part:
        """Return the extremes of the finest cells that lie wholly in the range, and all other rows of it."""
        import numpy as np

        axes, width, db, places = (
            (block.seqs, block.steps, block.attempts),
            WIDTHS[0],
            self._source.db,
            self._source.places,
        )
        inside, counted = self._source.inside(*axes[:2]), self._counted(*axes[1:])
        of_cell = counted.reshape(-1, width)
        whole = inside.reshape(-1, width).all(axis=1) & (of_cell.all(axis=1) | ~of_cell.any(axis=1))
        cells = {name: column[:, whole] for name, column in block.cells(db, width, _chosen(places)).items()}
        rows, values, kept = _extremes(cells)
        rows = rows + np.repeat(np.flatnonzero(whole) * width, rows.shape[1] // max(1, int(whole.sum())))
        single = np.flatnonzero(inside & ~np.repeat(whole, width))
        if len(single):
            more = (len(places), len(single))
            rows = np.concatenate((rows, np.broadcast_to(single, more)), axis=1)
            values = np.concatenate((values, block.values(db, places, single)), axis=1)
            kept = None if kept is None else np.concatenate((kept, np.ones(more, dtype=bool)), axis=1)
            order = np.argsort(rows, axis=1, kind="stable")
            rows, values = np.take_along_axis(rows, order, axis=1), np.take_along_axis(values, order, axis=1)
            kept = None if kept is None else np.take_along_axis(kept, order, axis=1)
        return _Part(axes[0][rows], axes[1][rows], axes[2][rows], values, kept)

    def _alike(self, block: Block) -> bool:
        """Return True if all rows of the block count, or none does, so that its cells mix no replaced rows with
        others.
        """
        if block.low_attempt != block.high_attempt:
            return not any(a in self._bounds for a in range(block.low_attempt, block.high_attempt + 1))
        bound = self._bounds.get(block.low_attempt)
        return bound is None or block.high_step < bound or block.low_step >= bound

    def _counted(self, steps: np.ndarray, attempts: np.ndarray) -> np.ndarray:
        import numpy as np

        mask = np.ones(len(steps), dtype=bool)
        for attempt, bound in self._bounds.items():
            mask &= (attempts != attempt) | (steps < bound)
        return mask


def _extremes(cells: Cells) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return positions within their cells (metrics, 2 or 5 per cell) in order, the values there, and which of them
    exist.
    """
    import numpy as np

    shape = cells["low"].shape
    low_at, high_at = cells["low_at"].astype(np.int64), cells["high_at"].astype(np.int64)
    if not any(cells[name].any() for name in ("nans", "ups", "downs")):
        rows, values = np.empty((*shape, 2), dtype=np.int64), np.empty((*shape, 2))
        turned = high_at < low_at
        rows[:, :, 0], rows[:, :, 1] = np.minimum(low_at, high_at), np.maximum(low_at, high_at)
        values[:, :, 0] = np.where(turned, cells["high"], cells["low"])
        values[:, :, 1] = np.where(turned, cells["low"], cells["high"])
        return rows.reshape(len(low_at), -1), values.reshape(len(low_at), -1), None
    odd = [cells[name].astype(np.int64) for name in ("nan_at", "up_at", "down_at")]
    alone = np.where(high_at == low_at, ABSENT, high_at)  # the only number of its cell
    rows = np.stack((low_at, alone, *odd), axis=2)
    constants = [np.full(shape, value) for value in (np.nan, np.inf, -np.inf)]
    values = np.stack((cells["low"], cells["high"], *constants), axis=2)
    order = np.argsort(rows, axis=2, kind="stable")
    rows, values = np.take_along_axis(rows, order, axis=2), np.take_along_axis(values, order, axis=2)
    kept = rows != ABSENT
    rows = np.where(kept, rows, 0)
    return rows.reshape(len(low_at), -1), values.reshape(len(low_at), -1), kept.reshape(len(low_at), -1)


def _spread(part: _Part, metrics: int) -> _Part:
    """Return the part with separate axes for each metric."""
    import numpy as np

    shape = (metrics, len(part.seqs))
    seqs, steps, attempts = (np.broadcast_to(axis, shape) for axis in (part.seqs, part.steps, part.attempts))
    return _Part(seqs, steps, attempts, part.values)


def _chosen(places: tuple[int, ...]) -> list[int] | slice:
    """Return ``places`` as a slice if they are adjacent: then nothing is copied."""
    if places == tuple(range(places[0], places[-1] + 1)):
        return slice(places[0], places[-1] + 1)
    return list(places)


def _within(block: Block, steps: Range | None) -> bool:
    return steps is None or (block.low_step >= steps[0] and block.high_step <= steps[1])


def _share(block: Block, steps: Range | None) -> float:
    """Return the share of the block's rows in the range, assuming that they are evenly spaced."""
    if steps is None:
        return 1.0
    inside = min(block.high_step, steps[1]) - max(block.low_step, steps[0]) + 1
    return min(1.0, inside / (block.high_step - block.low_step + 1))
