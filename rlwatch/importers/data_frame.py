"""Reading of tables: in memory (pandas, polars, pyarrow, columns, lists of rows), and of Parquet files.

A table has a row for each step, or (with columns ``metric`` and ``value``) a row for each value. A column ``run_id`` or
``run`` separates several runs. ``attempt`` is not read as a metric: an attempt begins where steps go back, as in any
log.

**NaN and missing.** If the type of a column distinguishes them (polars, pyarrow, Arrow and nullable types of pandas,
lists, mappings), NaN is NaN and null is not measured. A float column of numpy in pandas has NaN for both: it is judged
like a ``null`` of a JSON log, and is NaN if there is evidence (see :mod:`~rlwatch.importers.own_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import STEP_FIELDS, FormatMatch, ImportedRow
from rlwatch.importers.json_document import JsonDocumentReading
from rlwatch.importers.lines import unpacked
from rlwatch.importers.own_rows import step_field

_RUN = ("run_id", "run")
_LONG = ("metric", "value")
_ABSENT = object()


def is_table(data: object) -> bool:
    """Return True for a table of pandas, polars or pyarrow."""
    return _names(data) is not None


def is_data(data: object) -> bool:
    """Return True for a table, a mapping of columns, or a list of rows."""
    rows = isinstance(data, list | tuple) and bool(data) and isinstance(data[0], Mapping)
    return rows or isinstance(data, Mapping) or is_table(data)


def plain(data: Any) -> Any:
    """Return ``data`` with arrays, ranges and mappings converted to lists and dicts, as JSON would have them.

    >>> plain({"step": range(2), "loss": (0.5, None)})
    {'step': [0, 1], 'loss': [0.5, None]}
    """
    if isinstance(data, Mapping):
        return {str(name): plain(value) for name, value in data.items()}
    if isinstance(data, list | tuple | range):
        return [plain(value) for value in data]
    tolist = getattr(data, "tolist", None) or getattr(data, "to_list", None)
    return tolist() if callable(tolist) else data


def tables_of(frame: Any, path: str) -> dict[str, list[dict[str, object]]]:
    """Return the rows of the table ``frame`` by run (``""`` if no column names runs), without cells that were not
    measured.

    ``path`` names the data in error messages. Raises ``ImportFormatError`` if columns have the same name.
    """
    names = _names(frame) or []
    if len(set(names)) < len(names):
        raise ImportFormatError(path, "has several columns of one name; name each differently")
    columns = {name: _cells(frame, name) for name in names if name != "attempt"}
    if step_field(columns, STEP_FIELDS) is None:
        columns |= _index(frame)
    run = next((name for name in _RUN if name in columns), None)
    of = columns.pop(run) if run else [""] * len(frame)
    rows = [
        {name: value for name, value in zip(columns, cells, strict=True) if value is not _ABSENT}
        for cells in zip(*columns.values(), strict=True)
    ]
    found: dict[str, list[dict[str, object]]] = {}
    for name, row in zip(of, rows, strict=True):
        found.setdefault("" if name is _ABSENT else str(name), []).append(row)
    return {name: _wide(own) for name, own in found.items()} if set(_LONG) <= columns.keys() else found


def _names(data: object) -> list[str] | None:
    """Return the names of the columns of a table; None for anything else."""
    names = getattr(data, "column_names", None)  # pyarrow, whose ``columns`` are the values
    if names is None and not isinstance(data, Mapping) and hasattr(data, "__getitem__"):
        names = getattr(data, "columns", None)
    return None if names is None else [str(name) for name in names]


def _cells(frame: Any, name: str) -> list[object]:
    """Return the cells of a column: ``_ABSENT`` for missing ones, None for those that may be missing or NaN."""
    column = frame[name]
    listed = getattr(column, "to_pylist", None) or getattr(column, "to_list", None) or column.tolist
    kind = getattr(column, "dtype", None)
    either = getattr(kind, "kind", "") == "f" and type(kind).__module__.startswith("numpy")
    return [_cell(value, either=either) for value in listed()]


def _cell(value: object, *, either: bool) -> object:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return _ABSENT
    return None if either and isinstance(value, float) and math.isnan(value) else value


def _index(frame: Any) -> dict[str, list[object]]:
    """Return the index of a pandas frame if it has a name for steps; empty otherwise."""
    index = getattr(frame, "index", None)
    name = getattr(index, "name", None)
    found = step_field({name: 0}, STEP_FIELDS) if isinstance(name, str) else None
    return {} if found is None or index is None else {found: list(index.tolist())}


def _wide(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Join rows of values into rows of steps; a row begins where the step changes or a metric repeats."""
    wide: list[dict[str, object]] = []
    for row in rows:
        head = {name: value for name, value in row.items() if name not in _LONG}
        metric = str(row.get("metric"))
        if not wide or metric in wide[-1] or any(wide[-1].get(name, _ABSENT) != head[name] for name in head):
            wide.append(dict(head))
        if "value" in row:
            wide[-1][metric] = row["value"]
    return wide


# Reading of Parquet files: a row for each step or for each value, as :mod:`~rlwatch.importers.data_frame` reads
# tables.

_MAGIC = b"PAR1"
MOST_CELLS = 50_000_000
"""Largest number of cells in a table, which is read as a whole."""


class ParquetReading(JsonDocumentReading):
    """Reader of a Parquet file as a whole, because its columns lie one after another."""

    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Yield the rows of the table in the file at ``path``; a column may assign them to several runs.

        Raises ``ImportFormatError`` if pyarrow is missing, or if the file is damaged or too large.
        """
        try:
            parquet = import_module("pyarrow.parquet")
        except ImportError:
            problem = "is a Parquet file: pip install 'rlwatch-monitor[export]', or export the metrics to a CSV"
            raise ImportFormatError(str(path), problem) from None
        with unpacked(path) as file:
            table = self._table_of(parquet, file)
        yield from self.rows_in(tables_of(table, self.path))

    def _table_of(self, parquet: Any, file: Path) -> Any:
        try:
            about = parquet.read_metadata(file)
            cells = about.num_rows * about.num_columns
            if cells > MOST_CELLS:
                raise ImportFormatError(self.path, f"holds {cells:,} cells; at most {MOST_CELLS:,} are read of a table")
            return parquet.read_table(file)
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise ImportFormatError(self.path, f"is a damaged or half-written Parquet file ({error})") from error


class ParquetTable:
    """Importer of a table of metrics in a Parquet file."""

    name: ClassVar[str] = "parquet"
    expects: ClassVar[str] = "Parquet file"
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> FormatMatch:  # noqa: ARG002
        """Return a high confidence if ``head`` begins with the bytes of every Parquet file, else 0."""
        found = head.startswith(_MAGIC)
        return FormatMatch(0.99 if found else 0.0, f"{'found a' if found else 'no'} {self.expects}")

    def reading(self, path: str) -> ParquetReading:
        """Return a new reader of the file at ``path``."""
        return ParquetReading(path)
