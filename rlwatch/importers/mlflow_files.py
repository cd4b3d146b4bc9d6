"""Reading of MLflow's file store: ``mlruns/EXPERIMENT/RUN/metrics/NAME``, with lines ``milliseconds value step``.

The path may be ``mlruns``, an experiment or a run. Each MLflow run becomes a run here, with its settings
(``params/NAME``); deleted runs are left out. A metric's name may have slashes, which are directories. NaN and the
infinities are written as such. Lines of MLflow before 1.0 have no step, which MLflow reads as 0. "Lines" are numbers of
values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import About, DirectoryImporter, ImportedRow, LogReading, number, step_of
from rlwatch.importers.databases import rows_of_steps, unique_name
from rlwatch.importers.lines import MOST_RUNS, shown
from rlwatch.records import JSON

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
        """Yield the rows of every run at ``path``, one run after another. Raises ``ImportFormatError`` if there are too
        many runs.
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
