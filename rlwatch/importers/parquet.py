"""Reading of Parquet files: a row for each step or for each value, as :mod:`~rlwatch.importers.data_frame` reads
tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import FormatMatch, ImportedRow
from rlwatch.importers.data_frame import tables_of
from rlwatch.importers.json_document import JsonDocumentReading
from rlwatch.importers.lines import unpacked

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
