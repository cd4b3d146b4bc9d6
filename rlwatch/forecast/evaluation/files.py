"""Tables on disk: Parquet or CSV, in and out. Needs pyarrow (the extra ``forecast``), imported when it is used."""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rlwatch.errors import ImportFormatError, MissingExtraError

CSV = (".csv", ".csv.gz")
PARQUET = ".parquet"


def arrow(part: str = "pyarrow") -> Any:
    """pyarrow, or one error that says what to install.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    """
    try:
        return import_module(part)
    except ImportError:
        raise MissingExtraError("pyarrow", "forecast", "reading tables of runs") from None


def is_csv(path: Path) -> bool:
    """By its name."""
    return path.name.endswith(CSV)


def read(path: Path) -> Any:
    """An Arrow table: a Parquet file, a CSV (also ``.csv.gz``), or a folder of Parquet files, read in order of name.

    In a CSV an empty cell is not measured; ``nan``, ``inf`` and ``-inf`` are values.

    Raises
    ------
    ImportFormatError
        If it is neither, or cannot be read.
    """
    pa = arrow()
    try:
        if path.is_dir():
            return _folder(path)
        if is_csv(path):
            return _read_csv(path)
        return arrow("pyarrow.parquet").read_table(path)
    except pa.ArrowInvalid as error:
        hint = "a table is Parquet (.parquet), CSV (.csv, .csv.gz) or a folder of Parquet files"
        raise ImportFormatError(str(path), f"cannot be read as a table: {_first_line(error)}; {hint}") from error


def _folder(path: Path) -> Any:
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


def write(path: Path, columns: Mapping[str, Sequence[object]]) -> Path:
    """Columns as CSV or Parquet, by the name of ``path``; written beside and then put in its place.

    Raises
    ------
    ImportFormatError
        If the name ends in neither ``.csv`` nor ``.parquet``.
    """
    table = arrow().table(dict(columns))
    if path.suffix not in {".csv", PARQUET}:
        raise ImportFormatError(str(path), "give a name that ends in .csv or .parquet")
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.suffix == ".csv":
            arrow("pyarrow.csv").write_csv(table, beside)
        else:
            arrow("pyarrow.parquet").write_table(table, beside, compression="zstd")
        os.replace(beside, path)  # noqa: PTH105  (atomic on one file system)
    finally:
        beside.unlink(missing_ok=True)
    return path
