"""Labels of runs: when each failed, and how. Made from the rows, read from a file, or from an index of known runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from rlwatch.errors import ConfigError, ImportFormatError
from rlwatch.forecast.evaluation import files
from rlwatch.forecast.evaluation.limits import VERSION, limits
from rlwatch.forecast.evaluation.onsets import Judge, earliest
from rlwatch.forecast.evaluation.run_table import RunTable

COLUMNS = ("run", "onset", "type", "class", "steps", "judged", "version")
_SEVERITIES = {"healthy": "clean", "transient": "ambiguous", "instability": "event", "dead": "event"}


class Outcome(StrEnum):
    """What became of a run: ``EVENT`` failed; ``EARLY`` failed before step 55; ``AMBIGUOUS`` nearly; ``CLEAN`` not.

    ``FAULTY``: had not failed by its last row, though a fault was there to the end.
    """

    EVENT = "event"
    EARLY = "early"
    AMBIGUOUS = "ambiguous"
    FAULTY = "faulty"
    CLEAN = "clean"


@dataclass(frozen=True, slots=True)
class Label:
    """Of one run: first step of its failure (None: none) and its type; ``steps``: last step less first, plus 1.

    ``judged``: the types that could be judged; a run is clean of no other. ``repository``: where a run of others comes
    from, "" where nobody says.
    """

    run: str
    outcome: Outcome
    onset: int | None = None
    type: str = ""
    steps: int = 0
    judged: tuple[str, ...] = ()
    repository: str = ""


@dataclass(frozen=True)
class Labels:
    """Labels of many runs, by one version of the limits ("index" where people said so)."""

    version: str
    labels: tuple[Label, ...]

    def __iter__(self) -> Iterator[Label]:
        """In the order of the table."""
        return iter(self.labels)

    def __len__(self) -> int:
        """How many runs."""
        return len(self.labels)

    @property
    def by_run(self) -> dict[str, Label]:
        """Run -> label."""
        return {label.run: label for label in self.labels}

    def of(self, table: RunTable) -> list[Label]:
        """The label of each run of a table, in its order.

        Raises
        ------
        ConfigError
            If a run has none.
        """
        known = self.by_run
        absent = [run for run in table.runs if run not in known]
        if absent:
            raise ConfigError(f"{len(absent)} runs of the table have no label, the first is {absent[0]!r}")
        return [known[run] for run in table.runs]

    def count(self, outcome: Outcome) -> int:
        """How many runs came out so."""
        return sum(label.outcome is outcome for label in self.labels)

    def columns(self) -> dict[str, list[object]]:
        """As a table: ``run, onset, type, class, steps, judged, version``."""
        rows = [
            (each.run, each.onset, each.type, each.outcome.value, each.steps, " ".join(each.judged), self.version)
            for each in self.labels
        ]
        return {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}

    def write(self, path: Path) -> Path:
        """As CSV or Parquet."""
        return files.write(path, self.columns())


def label_runs(table: RunTable, version: str = VERSION) -> Labels:
    """Labels of all runs of a table.

    Levels and onsets as in ``labels-v1.toml``, classes as in ``labels-v2.toml``, runs that take off as in
    ``labels-v3.toml``. Retrospective: whether a limit stays passed is read from the rows after, so no label may reach a
    forecaster. A limit whose columns a run lacks is not judged; the label says which were.

    Raises
    ------
    ConfigError
        If there is no such version.
    """
    judge = Judge(table, limits(version))
    found: list[dict[str, int]] = [{} for _ in table.runs]
    judged: list[dict[str, None]] = [{} for _ in table.runs]
    touched = [False for _ in table.runs]
    for limit in judge.limits.rows:
        can, often = judge.judged(limit), judge.touched(limit) >= judge.limits.windows.touched
        for i, onset in judge.onset(limit).items():
            found[i][limit.type] = min(onset, found[i].get(limit.type, onset))
        for i in range(len(table.runs)):
            touched[i] |= bool(often[i])
            if can[i]:
                judged[i][limit.type] = None
    faulty = np.isfinite(table.fault) & judge.limits.faulty
    spared = [
        Outcome.AMBIGUOUS if near else Outcome.FAULTY if bad else Outcome.CLEAN
        for near, bad in zip(touched, faulty.tolist(), strict=True)
    ]
    made = (
        replace(
            _came_out(earliest(found[i], judge.limits.types), judge.limits.windows.early, spared[i]),
            run=run,
            steps=int(table.last[i] - table.first[i]) + 1,
            judged=tuple(judged[i]),
        )
        for i, run in enumerate(table.runs)
    )
    return Labels(version, tuple(made))


def _came_out(first: tuple[int, str] | None, early: int, spared: Outcome) -> Label:
    """``spared``: what it is without an onset."""
    if first is None:
        return Label("", spared)
    onset, kind = first
    return Label("", Outcome.EARLY if onset < early else Outcome.EVENT, onset, kind)


def read_labels(path: Path) -> Labels:
    """Labels from a file that :meth:`Labels.write` wrote, or any table with ``run, onset, type, class``.

    Raises
    ------
    ImportFormatError
        If a column is missing, a class is unknown, or a run comes twice.
    """
    rows = _rows(path, ("run", "onset", "class"))
    made = tuple(_read(path, row) for row in rows)
    _require_once(path, [label.run for label in made])
    versions = {str(row.get("version") or "") for row in rows}
    return Labels(versions.pop() if len(versions) == 1 else "", made)


def _read(path: Path, row: Mapping[str, Any]) -> Label:
    try:
        outcome = Outcome(row["class"])
    except ValueError:
        raise ImportFormatError(
            str(path), f"class {row['class']!r} of run {row['run']!r} is none of {_classes()}"
        ) from None
    onset = None if row["onset"] is None else int(row["onset"])
    if (onset is None) == (outcome in {Outcome.EVENT, Outcome.EARLY}):
        raise ImportFormatError(str(path), f"run {row['run']!r} is of class {outcome} and has onset {onset}")
    judged = tuple(str(row.get("judged") or "").split())
    return Label(str(row["run"]), outcome, onset, str(row.get("type") or ""), int(row.get("steps") or 0), judged)


def labels_of_index(path: Path, version: str = VERSION) -> Labels:
    """Labels that people gave: an index with ``run_id`` (or ``run``), ``severity`` and ``onset_step``.

    ``healthy`` is clean, ``transient`` ambiguous, ``instability`` and ``dead`` events from their onset on. The type is
    the severity; ``repo``, where there is such a column, is the repository.

    Raises
    ------
    ImportFormatError
        If a column is missing, a severity is unknown or a run comes twice.
    """
    early = limits(version).windows.early
    made = [_known(path, row, early) for row in _rows(path, ("severity", "onset_step"))]
    _require_once(path, [label.run for label in made])
    return Labels("index", tuple(made))


def _known(path: Path, row: Mapping[str, Any], early: int) -> Label:
    run, severity = str(row.get("run_id") or row.get("run") or ""), row["severity"]
    if severity not in _SEVERITIES:
        raise ImportFormatError(str(path), f"severity {severity!r} of run {run!r} is none of {', '.join(_SEVERITIES)}")
    outcome, repository = Outcome(_SEVERITIES[severity]), str(row.get("repo") or "")
    if outcome is not Outcome.EVENT:
        return Label(run, outcome, repository=repository)
    if row["onset_step"] is None:
        raise ImportFormatError(str(path), f"run {run!r} is of severity {severity} and has no onset_step")
    onset = int(float(row["onset_step"]))
    return Label(run, Outcome.EARLY if onset < early else outcome, onset, severity, repository=repository)


def _rows(path: Path, needed: Sequence[str]) -> list[dict[str, Any]]:
    table = files.read(path)
    absent = [name for name in needed if name not in table.column_names]
    if absent:
        raise ImportFormatError(str(path), f"has no column {absent[0]!r}; it needs {', '.join(needed)}")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _require_once(path: Path, runs: Sequence[str]) -> None:
    seen: set[str] = set()
    for run in runs:
        if run in seen:
            raise ImportFormatError(str(path), f"names the run {run!r} twice; a run has one label")
        seen.add(run)


def _classes() -> str:
    return ", ".join(outcome.value for outcome in Outcome)
