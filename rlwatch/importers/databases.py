"""Reading of the logs that trackers keep on disk: SQLite databases of trackio and MLflow, and MLflow's files.

A log holds many runs, each with its configuration. It is opened read only, also while a trainer writes to it. In place
of line numbers, rows of a database have the number of the row.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import (
    About,
    DirectoryImporter,
    FormatMatch,
    ImportedRow,
    LogReading,
    metrics_of,
    number,
    step_of,
)
from rlwatch.importers.lines import MOST_RUNS, shown, unpacked
from rlwatch.importers.own_rows import flattened
from rlwatch.records import JSON

_MAGIC = b"SQLite format 3\x00"
PATIENCE_S = 10.0
"""Seconds to wait for a trainer that writes."""
_TRACKIO = "SELECT id, run_id, run_name, step, timestamp, metrics FROM metrics ORDER BY run_id, id"
_TRACKIO_CONFIGS = "SELECT run_id, run_name, config FROM configs"
_OLD_TRACKIO = "SELECT id, run_name, run_name, step, timestamp, metrics FROM metrics ORDER BY run_name, id"
_OLD_TRACKIO_CONFIGS = "SELECT run_name, run_name, config FROM configs"
"""Queries for databases of trackio before runs had ids."""
_MLFLOW = (
    "SELECT m.run_uuid, r.name, m.step, m.timestamp, m.key, m.value, m.is_nan FROM metrics m "
    "JOIN runs r ON r.run_uuid = m.run_uuid WHERE r.lifecycle_stage = 'active' "
    "ORDER BY r.start_time, m.run_uuid, m.step, m.timestamp"
)
_OWN_HINT = "is a run of rlwatch itself: see `rlwatch runs --store DIR`, with the directory of its runs"


class DatabaseReading(LogReading):
    """Reader of the SQLite database of a tracker."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._configs: dict[str, dict[str, JSON]] = {}
        self._names: dict[str, str] = {}

    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Yield the rows of every run in the database at ``path``, one run after another.

        Raises ``ImportFormatError`` if it cannot be read, or is a database of another program.
        """
        try:
            with unpacked(path) as file, closing(opened(file)) as database:
                columns = {name for (name,) in database.execute("SELECT name FROM pragma_table_info('metrics')")}
                if {"key", "value", "run_uuid", "step"} <= columns:
                    yield from self._mlflow(database)
                elif {"run_name", "step", "metrics"} <= columns:
                    new = "run_id" in columns
                    queries = (_TRACKIO, _TRACKIO_CONFIGS) if new else (_OLD_TRACKIO, _OLD_TRACKIO_CONFIGS)
                    yield from self._trackio(database, *queries)
                else:
                    raise ImportFormatError(self.path, _other(database))
        except (sqlite3.Error, OverflowError) as error:
            raise ImportFormatError(self.path, f"is an SQLite database that cannot be read ({error})") from error

    def about(self, run: str) -> About:
        """Return the settings of the run called ``run``."""
        configs = (self._configs.get(run_id, {}) for run_id, name in self._names.items() if name == run)
        return About(config=next(configs, {}))

    def _trackio(self, database: sqlite3.Connection, rows: str, configs: str) -> Iterator[ImportedRow]:
        self.recognised = True
        for run_id, _, config in _rows_of(database, configs):
            found = _parsed(config)
            self._configs[run_id] = {name: value for name, value in found.items() if not name.startswith("_")}
        for row, run_id, name, step, at, metrics_json in database.execute(rows):
            entry = _parsed(metrics_json)
            if not entry:
                self.skips.add("metrics that are no JSON object, or an empty one", row)
            metrics = metrics_of(flattened(entry), self.skips, row)
            if metrics:
                yield ImportedRow(int(step), metrics, row, self._named(run_id, name), _moment(at))

    def _mlflow(self, database: sqlite3.Connection) -> Iterator[ImportedRow]:
        self.recognised = True
        for run_id, name, value in _rows_of(database, "SELECT run_uuid, key, value FROM params"):
            self._configs.setdefault(run_id, {})[name] = value
        number = 0
        for (run_id, name), values in groupby(database.execute(_MLFLOW), key=lambda row: row[:2]):
            plain = ((step, at / 1000, key, _value(value, nan=bool(nan))) for _, _, step, at, key, value, nan in values)
            for row in rows_of_steps(plain, self._named(run_id, name), number):
                number = row.line
                yield row

    def _named(self, run_id: str, name: str | None) -> str:
        """Return the name of a run, with the beginning of its id if another run has that name."""
        if run_id not in self._names:
            self._names[run_id] = unique_name(name or run_id, run_id, self._names.values())
        return self._names[run_id]


def unique_name(name: str, run_id: str, taken: Collection[str]) -> str:
    """Return ``name``, the name of a run, with the beginning of ``run_id`` appended if the name is in ``taken``."""
    return f"{name}-{run_id[:8]}" if name in taken else name


def rows_of_steps(values: Iterable[tuple[int, float, str, float]], run: str, number: int = 0) -> Iterator[ImportedRow]:
    """Yield the rows of a run from ``values``: (step, Unix time in seconds, metric, value), sorted by step.

    A metric that was logged again at a step begins another row. ``number`` is the number of values that came before,
    for the line numbers of rows.
    """
    for step, those in groupby(values, key=lambda value: value[0]):
        metrics: dict[str, float] = {}
        at = 0.0
        for _, moment, metric, value in those:
            number += 1
            if metric in metrics:
                yield ImportedRow(int(step), metrics, number - 1, run, at)
                metrics = {}
            metrics[metric], at = value, moment
        yield ImportedRow(int(step), metrics, number, run, at)


def opened(path: Path) -> sqlite3.Connection:
    """Return a read-only connection to the SQLite database at ``path``."""
    return sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True, timeout=PATIENCE_S)


def _parsed(text: str | bytes) -> dict[str, JSON]:
    """Return the JSON object in ``text``; an empty one for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows_of(database: sqlite3.Connection, query: str) -> list[tuple[str, str, str]]:
    """Return the rows of a query; none if its table is missing."""
    try:
        return list(database.execute(query))
    except sqlite3.OperationalError:
        return []


def _other(database: sqlite3.Connection) -> str:
    tables = [str(name) for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if {"run", "attempt", "metric_set"} <= set(tables):
        return _OWN_HINT
    listed = ", ".join(tables[:8]) or "none"
    return f"is an SQLite database of neither trackio nor MLflow (tables: {listed}); export the metrics to a CSV"


def _value(value: float, *, nan: bool) -> float:
    """Decode a value of MLflow, which stores NaN as a flag and infinities as the largest float."""
    if nan:
        return math.nan
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else float(value)


def _moment(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


class RunDatabase:
    """Importer of the SQLite database of trackio or MLflow."""

    name: ClassVar[str] = "sqlite"
    expects: ClassVar[str] = "SQLite database of trackio or MLflow"
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    table: ClassVar[bool] = False

    def sniff(self, head: bytes, path: Path) -> FormatMatch:  # noqa: ARG002
        """Return a high confidence if ``head`` begins with the bytes of every SQLite file, else 0."""
        found = head.startswith(_MAGIC)
        return FormatMatch(0.99 if found else 0.0, f"{'found an' if found else 'no'} {self.expects}")

    def reading(self, path: str) -> DatabaseReading:
        """Return a new reader of the database at ``path``."""
        return DatabaseReading(path)


# Reading of MLflow's file store: ``mlruns/EXPERIMENT/RUN/metrics/NAME``, with lines ``milliseconds value step``.
#
# The path may be ``mlruns``, an experiment or a run. Each MLflow run becomes a run here, with its settings
# (``params/NAME``); deleted runs are left out. A metric's name may have slashes, which are directories. NaN and the
# infinities are written as such. Lines of MLflow before 1.0 have no step, which MLflow reads as 0. "Lines" are numbers
# of values.

_DEPTHS = ("*", "*/*")
_ABOUT, _METRICS, _PARAMS = "meta.yaml", "metrics", "params"
_NAME = re.compile(r"^run_name: *(['\"]?)(.*?)\1 *$", re.MULTILINE)
_DELETED = re.compile(r"^lifecycle_stage: *['\"]?deleted", re.MULTILINE)
_TAG_OF_NAME = "tags/mlflow.runName"


def runs_of_mlflow(directory: Path) -> list[Path]:
    """Return the directories of the runs in ``directory``: a file store, an experiment of it, or a run itself; else
    none.
    """
    if _is_run(directory):
        return [directory]
    return next((runs for pattern in _DEPTHS if (runs := list(filter(_is_run, sorted(directory.glob(pattern)))))), [])


def _is_run(path: Path) -> bool:
    return (path / _ABOUT).is_file() and (path / _METRICS).is_dir()


class MlflowReading(LogReading):
    """Reader of a file store of MLflow, of one of its experiments or of a run."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._configs: dict[str, dict[str, JSON]] = {}

    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Yield the rows of every run at ``path``, one run after another.

        Raises ``ImportFormatError`` if there are too many runs.
        """
        runs = [run for run in runs_of_mlflow(path) if not _DELETED.search(_text(run / _ABOUT))]
        if len(runs) > MOST_RUNS:
            raise ImportFormatError(self.path, f"holds more than {MOST_RUNS:,} runs; give one of its directories")
        for run in runs:
            name = unique_name(_name(run), run.name, self._configs)
            self._configs[name] = {str(key): value for key, value in _files(run / _PARAMS)}
            self.recognised = True
            yield from rows_of_steps(iter(sorted(self._values(run), key=lambda value: value[:2])), name)

    def about(self, run: str) -> About:
        """Return the settings of the run called ``run``."""
        return About(config=self._configs.get(run, {}))

    def _values(self, run: Path) -> Iterator[tuple[int, float, str, float]]:
        for name, text in _files(run / _METRICS):
            for line, entry in enumerate(text.splitlines(), 1):
                moment, value, step = [*entry.split(" "), "0", "0"][:3] if " " in entry else ("", "", "")
                read = number(value)
                try:
                    at = float(moment) / 1000
                    place = step_of(step)
                except ValueError:
                    read = None
                if read is None:
                    self.skips.add(f"{shown(name)}: a line that is no 'milliseconds value step'", line)
                else:
                    yield place, at, name, read


def _name(run: Path) -> str:
    """Return the name that MLflow shows: from the run's metadata, or from a tag before 2.0; else the run's id."""
    found = _NAME.search(_text(run / _ABOUT))
    return (found[2] if found else "") or _text(run / _TAG_OF_NAME).strip() or run.name


def _files(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file below ``directory``."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(directory).as_posix(), _text(path)


def _text(path: Path) -> str:
    """Return the text of a file; empty if it is missing. Raises ``ImportFormatError`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ImportFormatError(str(path), f"cannot be read: {error.strerror or error}") from error


class MlflowFiles(DirectoryImporter):
    """Importer of a file store of MLflow."""

    name: ClassVar[str] = "mlflow-files"
    expects: ClassVar[str] = "directory of MLflow's file store (mlruns)"

    def reading(self, path: str) -> MlflowReading:
        """Return a new reader of the directory ``path``."""
        return MlflowReading(path)

    def files(self, directory: Path) -> Iterator[Path]:
        """Return the metric files of every run in ``directory``, which change with every write."""
        return (file for run in runs_of_mlflow(directory) for file in (run / _METRICS).rglob("*"))
