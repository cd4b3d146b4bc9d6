"""Labels of runs: the step and the type of each run's failure, from its rows, a file, or an index made by people.

Versioned tables of limits (``labels-v3.toml``, which extends ``labels-v2.toml``, and so on) define a failure. Labels
are retrospective: a limit counts as passed only if it stays passed in later rows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rlwatch.errors import ConfigError, ImportFormatError
from rlwatch.forecast import tables
from rlwatch.forecast.tables import Bools, Floats, Ints, RunTable

# The versioned tables of limits (``labels-v3.toml``, which extends ``labels-v2.toml``, and so on), read once.

VERSION = "labels-v3"
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Windows:
    """Lengths of the windows of a label table, in steps; ``baseline``: first and last step; ``share`` in [0, 1]."""

    median: int
    baseline: tuple[int, int]
    sustained: int
    share: float
    least: int
    monitored: int
    early: int
    touched: int


@dataclass(frozen=True, slots=True)
class TakingOff:
    """Condition under which a run takes off: the level of ``metric`` is ``times`` its level ``within`` steps before,
    plus ``plus``.

    Baselines of the limits of ``types`` are at least the level of their metrics at that time.
    """

    types: tuple[str, ...]
    metric: str
    within: int
    times: float
    plus: float


@dataclass(frozen=True, slots=True)
class LabelLimit:
    """One limit of a label table; ``kind``: "bound" (level against ``side``), "drop" (from the best so far) or
    "broken".
    """

    type: str
    metrics: tuple[str, ...]
    kind: str = "bound"
    side: str = "above"
    level: float | None = None
    times: float | None = None
    plus: float | None = None
    unless: tuple[str, float] | None = None
    stand_in: str = ""
    fall: float = 0.0
    best_from: int = 0
    skipped: str = ""
    skips: int = 0

    @property
    def relative(self) -> bool:
        """True if the limit is relative to the run's own baseline."""
        return self.kind == "bound" and (self.times is not None or self.plus is not None)


@dataclass(frozen=True, slots=True)
class LabelLimits:
    """One version of the table of limits that define a failure; ties are broken in the order of ``rows``.

    ``faulty``: True if a run with a fault that had not failed by its last row has a class of its own; ``taking_off``:
    None if baselines are not raised.
    """

    version: str
    windows: Windows
    rows: tuple[LabelLimit, ...]
    faulty: bool = False
    taking_off: TakingOff | None = None

    @property
    def types(self) -> tuple[str, ...]:
        """Types of failure, in the order in which ties are broken."""
        return tuple(dict.fromkeys(row.type for row in self.rows))


@lru_cache
def limits_of(version: str = VERSION) -> LabelLimits:
    """Return the table of limits of the given ``version``.

    Raises
    ------
    ConfigError
        If there is no such version.
    """
    return parse_limits(_document(version))


def _document(version: str) -> dict[str, Any]:
    """Return the document of a version, merged into the one it extends."""
    path = _HERE / f"{version}.toml"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in _HERE.glob("labels-*.toml")))
        raise ConfigError(f"there are no labels {version!r}; there are {there}")
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return _document(found["extends"]) | found if "extends" in found else found


def parse_limits(table: Mapping[str, Any]) -> LabelLimits:
    """Return the table of limits from its parsed TOML document."""
    windows = dict(table["windows"])
    windows["baseline"] = tuple(windows["baseline"])
    rows = tuple(_limit(row) for row in table["limit"])
    rise = table.get("taking_off")
    taking_off = None if rise is None else TakingOff(**rise | {"types": tuple(rise["types"])})
    return LabelLimits(
        table["version"], Windows(**windows), rows, faulty=bool(table.get("faulty")), taking_off=taking_off
    )


def _limit(row: Mapping[str, Any]) -> LabelLimit:
    unless = row.get("unless")
    given = {name: value for name, value in row.items() if name not in {"metrics", "unless"}}
    guard = None if unless is None else (str(unless["metric"]), float(unless["level"]))
    return LabelLimit(metrics=tuple(row["metrics"]), unless=guard, **given)


COLUMNS = ("run", "onset", "type", "class", "steps", "judged", "version")
_SEVERITIES = {"healthy": "clean", "transient": "ambiguous", "instability": "event", "crash": "event", "dead": "event"}


class RunOutcome(StrEnum):
    """Outcome of a run: ``EVENT`` failed; ``EARLY`` failed before step 55; ``AMBIGUOUS`` nearly failed; ``CLEAN`` did
    not fail.

    ``FAULTY``: had not failed by its last row, though a fault was there to the end.
    """

    EVENT = "event"
    EARLY = "early"
    AMBIGUOUS = "ambiguous"
    FAULTY = "faulty"
    CLEAN = "clean"


@dataclass(frozen=True, slots=True)
class Label:
    """Label of one run: outcome, first step of its failure (None: no failure), type of failure, and its length in
    ``steps``.

    ``judged``: the types of failure that could be judged. ``repository``: origin of a third-party run, "" if unknown.
    """

    run: str
    outcome: RunOutcome
    onset: int | None = None
    type: str = ""
    steps: int = 0
    judged: tuple[str, ...] = ()
    repository: str = ""


@dataclass(frozen=True)
class Labels:
    """Labels of many runs, by one version of the limits ("index": given by people)."""

    version: str
    labels: tuple[Label, ...]

    def __iter__(self) -> Iterator[Label]:
        """In the order of the table."""
        return iter(self.labels)

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.labels)

    @property
    def by_run(self) -> dict[str, Label]:
        """Labels by the name of their run."""
        return {label.run: label for label in self.labels}

    def of(self, table: RunTable) -> list[Label]:
        """Return the label of each run of ``table``, in its order.

        Raises
        ------
        ConfigError
            If a run has no label.
        """
        known = self.by_run
        absent = [run for run in table.runs if run not in known]
        if absent:
            raise ConfigError(f"{len(absent)} runs of the table have no label, the first is {absent[0]!r}")
        return [known[run] for run in table.runs]

    def count(self, outcome: RunOutcome) -> int:
        """Return the number of runs with the given ``outcome``."""
        return sum(label.outcome is outcome for label in self.labels)

    def columns(self) -> dict[str, list[object]]:
        """Return the labels as columns ``run, onset, type, class, steps, judged, version``."""
        rows = [
            (each.run, each.onset, each.type, each.outcome.value, each.steps, " ".join(each.judged), self.version)
            for each in self.labels
        ]
        return {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}

    def write(self, path: Path) -> Path:
        """Write the labels to ``path`` as CSV or Parquet; return the path."""
        return tables.write_file(path, self.columns())


def label_runs(table: RunTable, version: str = VERSION) -> Labels:
    """Label all runs of a table by a version of the limits.

    Levels and onsets are defined in ``labels-v1.toml``, classes in ``labels-v2.toml``, and runs that take off in
    ``labels-v3.toml``. A limit counts as passed only if later rows stay beyond it, so no label may reach a forecaster.
    A limit whose columns a run lacks is not judged; the label lists those that were.

    Raises
    ------
    ConfigError
        If there is no such version.
    """
    judge = OnsetFinder(table, limits_of(version))
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
        RunOutcome.AMBIGUOUS if near else RunOutcome.FAULTY if bad else RunOutcome.CLEAN
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


def _came_out(first: tuple[int, str] | None, early: int, spared: RunOutcome) -> Label:
    """Return the label; ``spared``: its outcome without an onset."""
    if first is None:
        return Label("", spared)
    onset, kind = first
    return Label("", RunOutcome.EARLY if onset < early else RunOutcome.EVENT, onset, kind)


def read_labels(path: Path) -> Labels:
    """Read labels from a file written by :meth:`Labels.write`, or any table with columns ``run, onset, type, class``.

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
        outcome = RunOutcome(row["class"])
    except ValueError:
        raise ImportFormatError(
            str(path), f"class {row['class']!r} of run {row['run']!r} is none of {_classes()}"
        ) from None
    onset = None if row["onset"] is None else int(row["onset"])
    if (onset is None) == (outcome in {RunOutcome.EVENT, RunOutcome.EARLY}):
        raise ImportFormatError(str(path), f"run {row['run']!r} is of class {outcome} and has onset {onset}")
    judged = tuple(str(row.get("judged") or "").split())
    return Label(str(row["run"]), outcome, onset, str(row.get("type") or ""), int(row.get("steps") or 0), judged)


def labels_of_index(path: Path, version: str = VERSION) -> Labels:
    """Read labels that people assigned: an index with ``run_id`` (or ``run``), ``severity`` and ``onset_step``.

    ``healthy`` is read as clean, ``transient`` as ambiguous, ``instability`` and ``dead`` as events from their onset
    on. The type is the severity; ``repo``, if there is such a column, is the repository.

    Raises
    ------
    ImportFormatError
        If a column is missing, a severity is unknown or a run comes twice.
    """
    early = limits_of(version).windows.early
    made = [_known(path, row, early) for row in _rows(path, ("severity", "onset_step"))]
    _require_once(path, [label.run for label in made])
    return Labels("index", tuple(made))


def _known(path: Path, row: Mapping[str, Any], early: int) -> Label:
    run, severity = str(row.get("run_id") or row.get("run") or ""), row["severity"]
    if severity not in _SEVERITIES:
        raise ImportFormatError(str(path), f"severity {severity!r} of run {run!r} is none of {', '.join(_SEVERITIES)}")
    outcome, repository = RunOutcome(_SEVERITIES[severity]), str(row.get("repo") or "")
    if outcome is not RunOutcome.EVENT:
        return Label(run, outcome, repository=repository)
    if row["onset_step"] is None:
        raise ImportFormatError(str(path), f"run {run!r} is of severity {severity} and has no onset_step")
    onset = int(float(row["onset_step"]))
    return Label(run, RunOutcome.EARLY if onset < early else outcome, onset, severity, repository=repository)


def _rows(path: Path, needed: Sequence[str]) -> list[dict[str, Any]]:
    table = tables.read_file(path)
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
    return ", ".join(outcome.value for outcome in RunOutcome)


# Where each limit is passed, over all rows of a table at once; retrospective: "sustained" reads the rows after.
#
# Everything is counted in steps: windows hold as many rows as there are.


@dataclass
class OnsetFinder:
    """Finds the steps at which runs of one table pass limits of one version; levels and baselines are cached."""

    table: RunTable
    limits: LabelLimits
    _levels: dict[str, Floats] = field(default_factory=dict)

    def metric_of(self, limit: LabelLimit) -> str | None:
        """Return the first of the limit's metrics that the table has; None without one, or if other needed columns are
        missing.
        """
        needed = [limit.unless[0]] if limit.unless else []
        if any(name not in self.table.columns for name in needed):
            return None
        return next((name for name in limit.metrics if name in self.table.columns), None)

    def level(self, metric: str) -> Floats:
        """Return the level of ``metric`` at each row: the median over the last steps, or the previous level if none
        was measured.
        """
        if metric not in self._levels:
            self._levels[metric] = level(self.table, metric, self.limits.windows.median)
        return self._levels[metric]

    def baseline(self, metric: str) -> Floats:
        """Return for each run the median of ``metric`` over the steps of the baseline; NaN without a row there."""
        first, last = self.limits.windows.baseline
        values = self.table.columns[metric].values
        inside = (self.table.step >= first) & (self.table.step <= last) & ~np.isnan(values)
        found = np.full(len(self.table.runs), np.nan)
        for i in range(len(found)):
            rows = self.table.rows(i)
            kept = values[rows][inside[rows]]
            found[i] = np.median(kept) if len(kept) else np.nan
        return found

    def judged(self, limit: LabelLimit) -> Bools:
        """Return for each run True if ``limit`` can be judged: its metric was measured, and its baseline if one is
        needed.
        """
        metric = self.metric_of(limit)
        if metric is None:
            return np.zeros(len(self.table.runs), dtype=bool)
        there = self._measured(metric) & (self._measured(limit.unless[0]) if limit.unless else True)
        if not limit.relative:
            return there
        base = self.baseline(metric)
        alone = limit.level is None and limit.plus is None  # then a baseline of 0 gives no limit
        usable = (base > 0) if alone else ~np.isnan(base)
        return there & usable & np.isfinite(base)

    def _measured(self, metric: str) -> Bools:
        return np.add.reduceat(self.table.columns[metric].measured, self.table.starts[:-1]) > 0

    def passed(self, limit: LabelLimit) -> Bools:
        """Return for each row of the table True if ``limit`` is passed there."""
        metric = self.metric_of(limit)
        if metric is None:
            return np.zeros(len(self.table), dtype=bool)
        kinds = {"bound": self._beyond, "drop": self._dropped, "broken": self._broken}
        return kinds[limit.kind](limit, metric) & self.judged(limit)[self.table.run_of]

    def _beyond(self, limit: LabelLimit, metric: str) -> Bools:
        now = self.level(metric)
        base = self._raised(limit, self.baseline(metric)[self.table.run_of], now)
        passed = np.ones(len(now), dtype=bool)
        for bound in bounds(limit, base):
            passed &= now >= bound if limit.side == "above" else now <= bound
        if limit.unless:
            passed &= self.level(limit.unless[0]) < limit.unless[1]
        return passed & (self.table.step >= self.limits.windows.monitored) if limit.relative else passed

    def _raised(self, limit: LabelLimit, base: Floats, now: Floats) -> Floats:
        """Return the baselines of all rows, raised to the level of earlier rows at which the run was taking off."""
        rise = self.limits.taking_off
        if rise is None or limit.type not in rise.types or rise.metric not in self.table.columns:
            return base
        gauge = self.level(rise.metric)
        before = gauge[earlier(self.table, rise.within)]
        since = self.table.step - self.table.first[self.table.run_of]
        rising = (gauge >= rise.times * before) & (gauge >= before + rise.plus) & (since >= rise.within)
        return np.maximum(base, running(self.table, np.where(rising & ~np.isnan(now), now, -np.inf)))

    def _dropped(self, limit: LabelLimit, metric: str) -> Bools:
        now = self.level(metric)
        best = best_so_far(self.table, now, limit.best_from)
        return (now <= float(limit.times or 0.0) * best) & (best - now >= limit.fall)

    def _broken(self, limit: LabelLimit, metric: str) -> Bools:
        broken = (self.table.columns[metric].values > 0) & self.table.columns[metric].measured
        skips = self.table.columns.get(limit.skipped)
        if skips is None:
            return broken
        skipped = skips.values >= 0.5
        return (broken & ~skipped) | (streak(self.table, skipped) >= limit.skips)

    def onset(self, limit: LabelLimit) -> dict[int, int]:
        """Return, by index of the run, the first step from which ``limit`` stays passed; runs without
        one are left out.
        """
        passed = self.passed(limit)
        kept = passed if limit.kind == "broken" else sustained(self.table, passed, self.limits)
        rows = np.flatnonzero(kept)
        runs, at = np.unique(self.table.run_of[rows], return_index=True)
        return {int(run): int(self.table.step[rows[i]]) for run, i in zip(runs, at, strict=True)}

    def touched(self, limit: LabelLimit) -> Floats:
        """Return for each run the number of steps with ``limit`` passed (rows times the run's usual steps a row)."""
        count = np.add.reduceat(self.passed(limit).astype(np.float64), self.table.starts[:-1])
        return count * cadence(self.table)


def bounds(limit: LabelLimit, base: Floats) -> list[Floats]:
    """Return the bounds that ``limit`` sets for the level of its metric, given the runs' baselines ``base``."""
    level = [] if limit.level is None else [np.full_like(base, limit.level)]
    times = [] if limit.times is None else [limit.times * base]
    plus = [] if limit.plus is None else [base + limit.plus]
    return level + times + plus


def cadence(table: RunTable) -> Floats:
    """Return for each run of ``table`` the median number of steps between consecutive rows; 1 for a run of one row."""
    spans = [table.span[table.rows(i)][1:] for i in range(len(table.runs))]
    return np.array([float(np.median(span)) if len(span) else 1.0 for span in spans])


def level(table: RunTable, metric: str, window: int) -> Floats:
    """Return for each row the median of ``metric``, without NaN, over the last ``window`` steps including its own."""
    values = table.columns[metric].values
    lags = np.full((len(values), window), np.nan)
    for back in range(min(window, len(values))):
        near = np.zeros(len(values), dtype=bool)
        near[back:] = (table.step[back:] - table.step[: len(values) - back] < window) & (
            table.run_of[back:] == table.run_of[: len(values) - back]
        )
        lags[near, back] = values[np.flatnonzero(near) - back]
    ordered = np.sort(lags, axis=1)  # NaN last
    count = window - np.isnan(ordered).sum(axis=1)
    rows = np.arange(len(values))
    low, high = ordered[rows, np.maximum(count - 1, 0) // 2], ordered[rows, np.minimum(count // 2, window - 1)]
    with np.errstate(invalid="ignore"):  # of two infinities
        middle = np.where(low == high, low, low + (high - low) / 2.0)
    return carried(table, np.where(count > 0, middle, np.nan))


def carried(table: RunTable, values: Floats) -> Floats:
    """Return ``values`` with each NaN replaced by the last earlier value of its run."""
    there = np.where(np.isnan(values), -1, np.arange(len(values)))
    last = np.maximum.accumulate(there)
    known = last >= table.starts[:-1][table.run_of]
    return np.where(known, values[np.maximum(last, 0)], np.nan)


def best_so_far(table: RunTable, values: Floats, since: int) -> Floats:
    """Return for each row the maximum of ``values`` so far in its run, over rows from step ``since`` on; 0 before."""
    return running(table, np.where((table.step >= since) & ~np.isnan(values), values, 0.0))


def running(table: RunTable, values: Floats) -> Floats:
    """Return for each row the maximum of ``values`` so far in its run."""
    best = [np.maximum.accumulate(values[table.rows(i)]) for i in range(len(table.runs))]
    return np.concatenate(best) if best else values


def earlier(table: RunTable, steps: int) -> Ints:
    """Return for each row the index of the last row of its run at least ``steps`` before; the run's first row if none
    is.
    """
    return np.maximum(np.searchsorted(table.key, table.key - steps, side="right") - 1, table.starts[table.run_of])


def streak(table: RunTable, flags: Bools) -> Ints:
    """Return for each row the steps since the first row of its unbroken series of rows with ``flags`` set; 0 outside
    one.
    """
    fresh = np.ones(len(flags), dtype=bool)
    fresh[1:] = ~flags[:-1] | (table.run_of[1:] != table.run_of[:-1])
    began = np.maximum.accumulate(np.where(fresh, np.arange(len(flags)), 0))
    return np.where(flags, table.step - table.step[began] + 1, 0)


def sustained(table: RunTable, passed: Bools, limits: LabelLimits) -> Bools:
    """Return a mask of the rows at which ``passed`` holds and continues for the required share of the next steps."""
    windows = limits.windows
    key = table.key
    counts = np.concatenate([[0], np.cumsum(passed)])
    here, end = np.arange(len(key)), np.searchsorted(key, key + windows.sustained)
    share = (counts[end] - counts[here]) / np.maximum(end - here, 1)
    left = table.last[table.run_of] - table.step + 1
    kept: Bools = passed & (share >= windows.share) & (left >= windows.least)
    return kept


def earliest(found: Mapping[str, int], order: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the earliest onset in ``found`` and its type; None if it is empty. ``order``: types, by which ties are
    broken.
    """
    if not found:
        return None
    first = min(found.values())
    return first, next(name for name in order if found.get(name) == first)
