"""Whole series out of packed rows, by column and without a Python object a value."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlwatch.ports import Series
from rlwatch.store.sqlite.reading import metric_sets, tables

if TYPE_CHECKING:  # imported where it is used: a trainer that logs numbers alone starts without it
    import numpy as np

_WIDTH = 8  # bytes of a float64
_Part = tuple["np.ndarray", "np.ndarray", "np.ndarray", "np.ndarray"]


def load(db: sqlite3.Connection, names: Sequence[str]) -> dict[str, Series]:
    """The series of ``names`` in order of seq; a name never recorded gives an empty one."""
    parts: dict[str, list[_Part]] = {name: [] for name in names}
    tables_held = tables(db)
    for number, held in metric_sets(db).items():
        places = {name: held.index(name) for name in parts if name in held}
        for table in tables_held if places else ():
            for name, part in _of_set(db, table, number, places):
                parts[name].append(part)
    return {name: _joined(name, found) for name, found in parts.items()}


def _of_set(db: sqlite3.Connection, kept_in: str, number: int, places: dict[str, int]) -> list[tuple[str, _Part]]:
    import numpy as np

    low, high = min(places.values()), max(places.values()) + 1
    rows = db.execute(
        f"SELECT seq, step, attempt, substr(v, ?, ?) FROM {kept_in} WHERE mset = ? ORDER BY seq",  # noqa: S608  (our tables)
        (1 + _WIDTH * low, _WIDTH * (high - low), number),
    ).fetchall()
    if not rows:
        return []
    *whole, blobs = zip(*rows, strict=True)
    seqs, steps, attempts = (np.array(column, dtype=np.int64) for column in whole)
    table = np.frombuffer(b"".join(blobs), dtype="<f8").reshape(len(rows), high - low)
    return [(name, (seqs, steps, attempts, table[:, place - low])) for name, place in places.items()]


def _joined(name: str, parts: list[_Part]) -> Series:
    import numpy as np

    if not parts:
        none = np.empty(0, dtype=np.int64)
        return Series(name, none, np.empty(0), none.copy(), none.copy())
    seqs, steps, attempts, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(seqs, kind="stable")
    return Series(name, steps[order], values[order].astype(np.float64), attempts[order], seqs[order])
