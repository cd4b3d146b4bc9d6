"""Tables of many runs: held in memory, read from Parquet and CSV files, joined, and written.

Files need pyarrow (the extra ``forecast``), which is imported when one is read.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlwatch.errors import ConfigError, ImportFormatError, MissingExtraError
from rlwatch.metrics import metric_of, resolve

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TRUTH = "truth/"
"""Prefix of hidden columns, which labels may read and forecasters may not."""
HEALTHY = "healthy"
"""Family of the runs without a fault, or with one that is harmless or ends in time."""


@dataclass(frozen=True)
class MetricColumn:
    """One metric over all rows of a table: ``values`` is NaN for a logged NaN and where nothing was measured."""

    values: Floats
    measured: Bools


@dataclass(frozen=True)
class RunTable:
    """Rows of many runs, run after run, steps ascending.

    ``runs``, ``recipes``, ``families``, ``pairs``: one entry a run. ``pairs``: the run of which a run is the faultless
    twin, or "". ``faults``: the step at which the fault of a run that was made to fail began, None (or no entry at all)
    if unknown. ``at_once``: True if the fault is of a kind that does not come gradually (no entry: unknown).
    ``starts``: the first row of each run and, last, the number of rows. ``step``: of each row. ``columns``: by
    canonical name, and hidden ``truth/`` ones.
    """

    runs: tuple[str, ...]
    recipes: tuple[str, ...]
    families: tuple[str, ...]
    pairs: tuple[str, ...]
    starts: Ints
    step: Ints
    columns: Mapping[str, MetricColumn]
    notes: tuple[str, ...] = field(default=())
    faults: tuple[int | None, ...] = field(default=())
    at_once: tuple[bool, ...] = field(default=())

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.step)

    @cached_property
    def place(self) -> dict[str, int]:
        """Index of each run in ``runs``, by name."""
        return {run: i for i, run in enumerate(self.runs)}

    @cached_property
    def run_of(self) -> Ints:
        """Index of the run of each row."""
        return np.repeat(np.arange(len(self.runs)), np.diff(self.starts))

    @cached_property
    def first(self) -> Ints:
        """First step of each run."""
        return self.step[self.starts[:-1]]

    @cached_property
    def last(self) -> Ints:
        """Last step of each run."""
        return self.step[self.starts[1:] - 1]

    @cached_property
    def span(self) -> Ints:
        """Steps that each row covers: those since the previous row of its run (1 for the first)."""
        span = np.diff(self.step, prepend=0)
        span[self.starts[:-1]] = 1
        return span

    @cached_property
    def stride(self) -> int:
        """Number larger than the distance of any two steps of a run, with room for windows that reach beyond it."""
        return int(self.step.max(initial=0)) + 100_000

    @cached_property
    def key(self) -> Ints:
        """Sort key of each row, run * stride + step, ascending, for searching rows by run and step."""
        return self.run_of * self.stride + self.step

    def find(self, runs: Ints, steps: Ints) -> Ints:
        """Return for each pair of ``runs`` (indices) and ``steps`` the first row at or after the step, or else the
        next run's first.
        """
        before, after = runs * self.stride, (runs + 1) * self.stride - 1
        found: Ints = np.searchsorted(self.key, np.clip(before + steps, before, after)).astype(np.int64)
        return found

    def rows(self, i: int) -> slice:
        """Return the rows of the run with index ``i``."""
        return slice(int(self.starts[i]), int(self.starts[i + 1]))

    @cached_property
    def fault(self) -> Floats:
        """Step of each run from which a fault was permanently there; infinite if none is known."""
        known = zip(self.faults or (None,) * len(self.runs), self.families, strict=True)
        return np.array([np.inf if step is None or family == HEALTHY else step for step, family in known], dtype=float)

    @property
    def sound_until(self) -> Floats:
        """Step of each run's fault, before which it is healthy; minus infinity if no fault is known."""
        return np.where(np.isfinite(self.fault), self.fault, -np.inf)

    @property
    def visible(self) -> list[str]:
        """Names of the columns that are not hidden."""
        return [name for name in self.columns if not name.startswith(TRUTH)]

    def stream(self, i: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the measured, visible metrics of each row of run ``i``: all that a forecaster may use."""
        rows = self.rows(i)
        names = self.visible
        values = [self.columns[name].values[rows].tolist() for name in names]
        there = [self.columns[name].measured[rows].tolist() for name in names]
        for at, step in enumerate(self.step[rows].tolist()):
            yield step, {n: v[at] for n, v, m in zip(names, values, there, strict=True) if m[at]}

    def only(self, places: Sequence[int]) -> RunTable:
        """Return a table of the runs with the indices ``places``, in that order."""
        rows = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in places] or [np.zeros(0, int)])
        lengths = [int(self.starts[i + 1] - self.starts[i]) for i in places]

        def of(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(names[i] for i in places)

        columns = {name: MetricColumn(c.values[rows], c.measured[rows]) for name, c in self.columns.items()}
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        names_of = (of(self.runs), of(self.recipes), of(self.families), of(self.pairs))
        faults = tuple(self.faults[i] for i in places) if self.faults else ()
        at_once = tuple(self.at_once[i] for i in places) if self.at_once else ()
        return RunTable(*names_of, starts, self.step[rows], columns, self.notes, faults, at_once)


# Tables on disk: Parquet or CSV, in and out. Needs pyarrow (the extra ``forecast``), imported when it is used.

CSV = (".csv", ".csv.gz")
PARQUET = ".parquet"


def arrow(part: str = "pyarrow") -> Any:
    """Return the module ``part`` of pyarrow.

    Raises
    ------
    MissingExtraError
        If pyarrow is not installed.
    """
    try:
        return import_module(part)
    except ImportError:
        raise MissingExtraError("pyarrow", "forecast", "reading tables of runs") from None


def is_csv(path: Path) -> bool:
    """Return whether ``path`` has the name of a CSV file."""
    return path.name.endswith(CSV)


def read_file(path: Path) -> Any:
    """Return an Arrow table from a Parquet file, a CSV (also ``.csv.gz``), or a folder of Parquet files, in order of
    name.

    In a CSV an empty cell is not measured; ``nan``, ``inf`` and ``-inf`` are values.

    Raises
    ------
    ImportFormatError
        If ``path`` is none of these, or cannot be read.
    """
    pa = arrow()
    try:
        if path.is_dir():
            return _read_folder(path)
        if is_csv(path):
            return _read_csv(path)
        return arrow("pyarrow.parquet").read_table(path)
    except pa.ArrowInvalid as error:
        hint = "a table is Parquet (.parquet), CSV (.csv, .csv.gz) or a folder of Parquet files"
        raise ImportFormatError(str(path), f"cannot be read as a table: {_first_line(error)}; {hint}") from error


def _read_folder(path: Path) -> Any:
    pa, parquet = arrow(), arrow("pyarrow.parquet")
    files = [file for file in sorted(path.glob(f"*{PARQUET}")) if not file.stem.endswith("-runs")]
    if not files:
        raise ImportFormatError(str(path), f"holds no {PARQUET} file; give a folder with one file a run, or one file")
    tables = [parquet.read_table(file).replace_schema_metadata(None) for file in files]
    return pa.concat_tables(tables, promote_options="permissive")


def _read_csv(path: Path) -> Any:
    csv = arrow("pyarrow.csv")
    texts = {name: arrow().string() for name in ("run", "run_id", "recipe", "family", "metric", "pair", "config")}
    options = csv.ConvertOptions(null_values=[""], strings_can_be_null=False, column_types=texts)
    if path.name.endswith(".gz"):
        with gzip.open(path, "rb") as file:
            return csv.read_csv(file, convert_options=options)
    return csv.read_csv(path, convert_options=options)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def write_file(path: Path, columns: Mapping[str, Sequence[object]]) -> Path:
    """Write columns as CSV or Parquet, by the name of ``path``, to a temporary file that then replaces ``path``.

    Raises
    ------
    ImportFormatError
        If the name ends in neither ``.csv`` nor ``.parquet``.
    """
    table = arrow().table(dict(columns))
    if path.suffix not in {".csv", PARQUET}:
        raise ImportFormatError(str(path), "give a name that ends in .csv or .parquet")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.suffix == ".csv":
            arrow("pyarrow.csv").write_csv(table, temporary)
        else:
            arrow("pyarrow.parquet").write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)  # noqa: PTH105  (atomic on one file system)
    finally:
        temporary.unlink(missing_ok=True)
    return path


# Run tables from files: checked, run after run, names made canonical.

_TEXTS = ("run", "recipe", "family")
_RUN_NAMES = ("run", "run_id")
_RECORD = b"rlwatch.run"
"""Where a Parquet file of one run keeps its row of the ``runs`` table."""


def read_runs(path: Path, runs: Path | None = None) -> RunTable:
    """Read the rows of runs from Parquet or CSV, wide (a column a metric) or long (``run, step, metric, value``).

    Names of trainers are read as canonical ones (:mod:`rlwatch.metrics`); unknown and textual columns are left out.

    Parameters
    ----------
    path
        A file, or a folder of Parquet files: one for each run, or shards with many, each with its ``NAME-runs``.
    runs
        The ``runs`` table (``run, recipe, family, pair, fault_step, at_once``); None: ``NAME-runs`` in the folder of
        ``path``, if there is one, or those in the folder ``path``.

    Raises
    ------
    ImportFormatError
        If a column is missing, a step is repeated or goes back, or a run of ``runs`` comes twice.
    """
    table = read_file(path)
    table = _named(table, path)
    if {"metric", "value"} <= set(table.column_names):
        table = _wide(table, path)
    order, names = _runs_of(table)
    steps = _steps(table, path)[order]
    starts = _starts(table, order)
    _require_ascending(path, names, starts, steps)
    columns, notes = _columns(table, order, starts)
    known = _records(path, runs)
    names_of = [_column_or_record(table, order[starts[:-1]], what, names, known) for what in ("recipe", "family")]
    pairs = tuple(str(known.get(name, {}).get("pair") or "") for name in names)
    faults = tuple(_whole(known.get(name, {}).get("fault_step")) for name in names)
    at_once = tuple(bool(known.get(name, {}).get("at_once")) for name in names)
    return RunTable(names, names_of[0], names_of[1], pairs, starts, steps, columns, notes, faults, at_once)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _named(table: Any, path: Path) -> Any:
    """With the column of runs called ``run``; a table without one is one run, named by its file."""
    found = next((name for name in _RUN_NAMES if name in table.column_names), None)
    if "step" not in table.column_names:
        raise ImportFormatError(str(path), f"has no column 'step'; its columns are {_some(table.column_names)}")
    if found is None:
        name = path.name.split(".")[0]
        return table.append_column("run", arrow().array([name] * len(table), arrow().string()))
    table = table.rename_columns(["run" if name == found else name for name in table.column_names])
    unnamed = sum(not name for name in table.column("run").to_pylist())
    if unnamed:
        raise ImportFormatError(str(path), f"has {unnamed} rows that name no run")
    return table.set_column(table.column_names.index("run"), "run", table.column("run").cast(arrow().string()))


def _wide(table: Any, path: Path) -> Any:
    """A long table as a wide one, steps ascending within a run."""
    pa = arrow()
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
        steps: Ints = column.cast(arrow().int64()).to_numpy()
    except (arrow().ArrowInvalid, arrow().ArrowNotImplementedError):
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


def _columns(table: Any, order: Ints, starts: Ints) -> tuple[dict[str, MetricColumn], tuple[str, ...]]:
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
    types = arrow().types
    return bool(types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind))


def _closest(columns: list[MetricColumn], starts: Ints) -> MetricColumn:
    """Of each run, the first column in which it measured anything."""
    best = columns[0]
    for column in columns[1:]:
        has = np.add.reduceat(best.measured, starts[:-1]) > 0
        kept = np.repeat(has, np.diff(starts))
        best = MetricColumn(np.where(kept, best.values, column.values), np.where(kept, best.measured, column.measured))
    return best


def _canonical(name: str) -> tuple[str, int] | None:
    """The canonical name and how closely this one reads as it."""
    if name.startswith(TRUTH) or metric_of(name) is not None:
        return name, 0
    reading = resolve(name)
    return None if reading is None else (reading.metric.name, reading.closeness)


def _column(column: Any, order: Ints) -> MetricColumn:
    absent = column.is_null().to_numpy(zero_copy_only=False)[order]
    kind = arrow().float64()
    values = column.cast(kind).to_numpy(zero_copy_only=False).astype(np.float64)[order]
    return MetricColumn(np.where(absent, np.nan, values), ~absent)


def _records(path: Path, runs: Path | None) -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of the ``runs`` table by run, from its file or the data files."""
    if runs is None:
        runs = next((file for file in _runs_files(path) if file.is_file()), None)
    if runs is None:
        return _embedded(path)
    return _read_records(runs)


def _read_records(path: Path) -> Mapping[str, Mapping[str, Any]]:
    table = read_file(path)
    if "run" not in table.column_names:
        raise ImportFormatError(str(path), f"has no column 'run'; its columns are {_some(table.column_names)}")
    rows = {row["run"]: row for row in table.to_pylist()}
    if len(rows) != len(table):
        raise ImportFormatError(str(path), "names a run twice")
    return rows


def _runs_files(path: Path) -> list[Path]:
    stem = path.name.split(".")[0]
    return [path.with_name(f"{stem}-runs{ending}") for ending in (PARQUET, *CSV)]


def _embedded(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return records inside a folder: from the metadata of its files, and from the ``NAME-runs`` of its shards."""
    paths = sorted(path.glob(f"*{PARQUET}")) if path.is_dir() else []
    found = [(arrow("pyarrow.parquet").read_schema(file).metadata or {}).get(_RECORD) for file in paths]
    rows: dict[str, Mapping[str, Any]] = {}
    for file in paths:
        if file.stem.endswith("-runs"):
            rows.update(_read_records(file))
    return rows | {row["run"]: row for row in (json.loads(record) for record in found if record)}


def _column_or_record(
    table: Any, first: Ints, what: str, names: tuple[str, ...], known: Mapping[str, Any]
) -> tuple[str, ...]:
    """Recipe or family of each run: of its first row, else of ``runs``, else ""."""
    if what not in table.column_names:
        return tuple(str(known.get(name, {}).get(what) or "") for name in names)
    column = table.column(what).combine_chunks().take(arrow().array(first))
    return tuple(str(value or "") for value in column.to_pylist())


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


# Run tables from what is in memory, and from several tables.

Rows = Mapping[int, Mapping[str, float]]
"""Rows of a run: canonical metrics by step."""


def table_of_rows(runs: Mapping[str, Rows], *, recipe: str = "own", family: str = "own") -> RunTable:
    """Return a table of ``runs``, given as their rows by step; runs without rows are left out.

    ``recipe`` and ``family`` are those of all the runs.

    Raises
    ------
    ConfigError
        If no run has a row.
    """
    kept = {run: rows for run, rows in runs.items() if rows}
    if not kept:
        raise ConfigError("there are no rows in any of these runs")
    flat = [(step, rows[step]) for rows in kept.values() for step in sorted(rows)]
    names = dict.fromkeys(name for _, metrics in flat for name in metrics)
    columns = {
        name: MetricColumn(
            np.array([metrics.get(name, math.nan) for _, metrics in flat], dtype=float),
            np.array([name in metrics for _, metrics in flat]),
        )
        for name in names
    }
    starts = np.cumsum([0, *(len(rows) for rows in kept.values())])
    count = len(kept)
    names_of = (tuple(kept), (recipe,) * count, (family,) * count, ("",) * count)
    return RunTable(*names_of, starts, np.array([step for step, _ in flat], dtype=np.int64), columns)


def joined_tables(tables: Sequence[RunTable]) -> RunTable:
    """Return one table of the runs of several tables; a metric that a table lacks counts as not measured there.

    Raises
    ------
    ConfigError
        If two tables have a run of the same name.
    """
    runs = tuple(run for table in tables for run in table.runs)
    if len(set(runs)) != len(runs):
        twice = next(run for i, run in enumerate(runs) if run in runs[:i])
        raise ConfigError(f"run {twice!r} is in two of these tables; give each run once")
    names = dict.fromkeys(name for table in tables for name in table.columns)
    starts, at = [np.zeros(1, dtype=np.int64)], 0
    for table in tables:
        starts.append(table.starts[1:] + at)
        at += len(table)
    return RunTable(
        runs,
        tuple(each for table in tables for each in table.recipes),
        tuple(each for table in tables for each in table.families),
        tuple(each for table in tables for each in table.pairs),
        np.concatenate(starts),
        np.concatenate([table.step for table in tables]),
        {name: _joined([table.columns.get(name) or _absent(len(table)) for table in tables]) for name in names},
        tuple(note for table in tables for note in table.notes),
        tuple(each for table in tables for each in (table.faults or (None,) * len(table.runs))),
        tuple(each for table in tables for each in (table.at_once or (False,) * len(table.runs))),
    )


def _joined(columns: Sequence[MetricColumn]) -> MetricColumn:
    return MetricColumn(np.concatenate([c.values for c in columns]), np.concatenate([c.measured for c in columns]))


def _absent(rows: int) -> MetricColumn:
    return MetricColumn(np.full(rows, math.nan), np.zeros(rows, dtype=bool))
