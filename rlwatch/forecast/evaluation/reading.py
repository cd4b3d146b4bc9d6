"""Run tables from files: checked, run after run, names made canonical."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlwatch.errors import ImportFormatError
from rlwatch.forecast.evaluation import files
from rlwatch.forecast.evaluation.run_table import TRUTH, Column, Ints, RunTable
from rlwatch.metrics import metric_of, resolve

_TEXTS = ("run", "recipe", "family")
_RUN_NAMES = ("run", "run_id")
_RECORD = b"rlwatch.run"
"""Where a Parquet file of one run keeps its row of the ``runs`` table."""


def read_runs(path: Path, runs: Path | None = None) -> RunTable:
    """Rows of runs from Parquet or CSV, wide (a column a metric) or long (``run, step, metric, value``).

    Parameters
    ----------
    path
        A file, or a folder of Parquet files: one for each run, or shards with many, each with ``NAME-runs`` beside it.
    runs
        The ``runs`` table (``run, recipe, family, pair, fault_step, at_once``); without it ``NAME-runs`` beside
        ``path`` is read where there is one, or those in the folder.

    Names of trainers are read as canonical ones (:mod:`rlwatch.metrics`); unknown and textual columns are left out.

    Raises
    ------
    ImportFormatError
        If a column is missing, a step is repeated or goes back, or a run of ``runs`` comes twice.
    """
    table = files.read(path)
    table = _named(table, path)
    if {"metric", "value"} <= set(table.column_names):
        table = _wide(table, path)
    order, names = _runs_of(table)
    steps = _steps(table, path)[order]
    starts = _starts(table, order)
    _require_ascending(path, names, starts, steps)
    columns, notes = _columns(table, order, starts)
    known = _records(path, runs)
    told = [_told(table, order[starts[:-1]], what, names, known) for what in ("recipe", "family")]
    pairs = tuple(str(known.get(name, {}).get("pair") or "") for name in names)
    faults = tuple(_whole(known.get(name, {}).get("fault_step")) for name in names)
    at_once = tuple(bool(known.get(name, {}).get("at_once")) for name in names)
    return RunTable(names, told[0], told[1], pairs, starts, steps, columns, notes, faults, at_once)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _named(table: Any, path: Path) -> Any:
    """With the column of runs called ``run``; a table without one is one run, named by its file."""
    found = next((name for name in _RUN_NAMES if name in table.column_names), None)
    if "step" not in table.column_names:
        raise ImportFormatError(str(path), f"has no column 'step'; its columns are {_some(table.column_names)}")
    if found is None:
        name = path.name.split(".")[0]
        return table.append_column("run", files.arrow().array([name] * len(table), files.arrow().string()))
    table = table.rename_columns(["run" if name == found else name for name in table.column_names])
    unnamed = sum(not name for name in table.column("run").to_pylist())
    if unnamed:
        raise ImportFormatError(str(path), f"has {unnamed} rows that name no run")
    return table.set_column(table.column_names.index("run"), "run", table.column("run").cast(files.arrow().string()))


def _wide(table: Any, path: Path) -> Any:
    """A long table as a wide one, steps ascending within a run."""
    pa = files.arrow()
    runs, names = (table.column(name).combine_chunks().dictionary_encode() for name in ("run", "metric"))
    run, name = (np.asarray(column.indices) for column in (runs, names))
    step = _steps(table, path)
    order = np.lexsort((step, run))
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (np.diff(run[order]) != 0) | (np.diff(step[order]) != 0)
    row = np.empty(len(order), dtype=np.int64)
    row[order] = np.cumsum(fresh) - 1
    count = int(fresh.sum())
    cell = row * max(1, len(names.dictionary)) + name
    if len(np.unique(cell)) != len(cell):
        raise ImportFormatError(str(path), "gives a metric of a run twice at one step; a step has one value")
    values = table.column("value").cast(pa.float64()).to_numpy(zero_copy_only=False)
    given = ~table.column("value").is_null().to_numpy(zero_copy_only=False)
    first = order[fresh]
    made = {"run": runs.dictionary.take(pa.array(run[first])), "step": pa.array(step[first])}
    for i, metric in enumerate(names.dictionary.to_pylist()):
        mine = (name == i) & given
        filled, absent = np.zeros(count), np.ones(count, dtype=bool)
        filled[row[mine]], absent[row[mine]] = values[mine], False
        made[metric] = pa.array(filled, mask=absent, from_pandas=False)
    return pa.table(made)


def _steps(table: Any, path: Path) -> Ints:
    column = table.column("step")
    if column.null_count:
        raise ImportFormatError(str(path), f"{column.null_count} rows have no step")
    try:
        steps: Ints = column.cast(files.arrow().int64()).to_numpy()
    except (files.arrow().ArrowInvalid, files.arrow().ArrowNotImplementedError):
        raise ImportFormatError(str(path), "has steps that are no whole numbers") from None
    if len(steps) and steps.min() < 0:
        raise ImportFormatError(str(path), f"has a negative step, {steps.min()}")
    return steps


def _runs_of(table: Any) -> tuple[Ints, tuple[str, ...]]:
    """Rows in an order that keeps each run together, and the runs in order of first appearance."""
    encoded = table.column("run").combine_chunks().dictionary_encode()
    codes = np.asarray(encoded.indices)
    return np.argsort(codes, kind="stable"), tuple(encoded.dictionary.to_pylist())


def _starts(table: Any, order: Ints) -> Ints:
    codes = np.asarray(table.column("run").combine_chunks().dictionary_encode().indices)[order]
    return np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1, [len(codes)]] if len(codes) else [[0]]).astype(
        np.int64
    )


def _require_ascending(path: Path, names: tuple[str, ...], starts: Ints, steps: Ints) -> None:
    if not names:
        raise ImportFormatError(str(path), "holds no rows")
    ahead = np.diff(steps)
    ahead[starts[1:-1] - 1] = 1
    for at in np.flatnonzero(ahead <= 0)[:1]:
        run = names[int(np.searchsorted(starts, at, side="right")) - 1]
        what = f"repeats step {steps[at]}" if ahead[at] == 0 else f"goes back from step {steps[at]} to {steps[at + 1]}"
        raise ImportFormatError(
            str(path),
            f"run {run!r} {what}; a run has one row a step, ascending: keep the last attempt of a resumed run",
        )


def _columns(table: Any, order: Ints, starts: Ints) -> tuple[dict[str, Column], tuple[str, ...]]:
    """Canonical columns; a run whose trainer has several names for a metric gets the closest that it logged."""
    sources: dict[str, list[tuple[int, str]]] = {}
    ignored = []
    for source in table.column_names:
        if source in {*_TEXTS, "step"}:
            continue
        found = _canonical(source) if _is_number(table.schema.field(source).type) else None
        if found is None:
            ignored.append(source)
        else:
            sources.setdefault(found[0], []).append((found[1], source))
    notes = (f"not read, for they are no metrics rlwatch knows: {_some(ignored)}",) if ignored else ()
    columns = {
        name: _closest(
            [_column(table.column(source), order) for _, source in sorted(found, key=lambda f: f[0])], starts
        )
        for name, found in sources.items()
    }
    return columns, notes


def _is_number(kind: Any) -> bool:
    types = files.arrow().types
    return bool(types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind))


def _closest(columns: list[Column], starts: Ints) -> Column:
    """Of each run, the first column in which it measured anything."""
    best = columns[0]
    for column in columns[1:]:
        has = np.add.reduceat(best.measured, starts[:-1]) > 0
        kept = np.repeat(has, np.diff(starts))
        best = Column(np.where(kept, best.values, column.values), np.where(kept, best.measured, column.measured))
    return best


def _canonical(name: str) -> tuple[str, int] | None:
    """The canonical name and how closely this one reads as it."""
    if name.startswith(TRUTH) or metric_of(name) is not None:
        return name, 0
    reading = resolve(name)
    return None if reading is None else (reading.metric.name, reading.closeness)


def _column(column: Any, order: Ints) -> Column:
    absent = column.is_null().to_numpy(zero_copy_only=False)[order]
    kind = files.arrow().float64()
    values = column.cast(kind).to_numpy(zero_copy_only=False).astype(np.float64)[order]
    return Column(np.where(absent, np.nan, values), ~absent)


def _records(path: Path, runs: Path | None) -> Mapping[str, Mapping[str, Any]]:
    """Rows of the ``runs`` table by run, from wherever they are."""
    if runs is None:
        runs = next((file for file in _beside(path) if file.is_file()), None)
    if runs is None:
        return _embedded(path)
    return _read_records(runs)


def _read_records(path: Path) -> Mapping[str, Mapping[str, Any]]:
    table = files.read(path)
    if "run" not in table.column_names:
        raise ImportFormatError(str(path), f"has no column 'run'; its columns are {_some(table.column_names)}")
    rows = {row["run"]: row for row in table.to_pylist()}
    if len(rows) != len(table):
        raise ImportFormatError(str(path), "names a run twice")
    return rows


def _beside(path: Path) -> list[Path]:
    stem = path.name.split(".")[0]
    return [path.with_name(f"{stem}-runs{ending}") for ending in (files.PARQUET, *files.CSV)]


def _embedded(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Records inside a folder: those in the metadata of its files, and those of ``NAME-runs`` beside its shards."""
    paths = sorted(path.glob(f"*{files.PARQUET}")) if path.is_dir() else []
    found = [(files.arrow("pyarrow.parquet").read_schema(file).metadata or {}).get(_RECORD) for file in paths]
    rows: dict[str, Mapping[str, Any]] = {}
    for file in paths:
        if file.stem.endswith("-runs"):
            rows.update(_read_records(file))
    return rows | {row["run"]: row for row in (json.loads(record) for record in found if record)}


def _told(table: Any, first: Ints, what: str, names: tuple[str, ...], known: Mapping[str, Any]) -> tuple[str, ...]:
    """Recipe or family of each run: of its first row, else of ``runs``, else ""."""
    if what not in table.column_names:
        return tuple(str(known.get(name, {}).get(what) or "") for name in names)
    column = table.column(what).combine_chunks().take(files.arrow().array(first))
    return tuple(str(value or "") for value in column.to_pylist())


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more
