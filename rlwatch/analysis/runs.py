"""Runs of a store, opened in Python: a table of the runs, and history, findings, spikes, texts and plots of each.

Tables are DataFrames with pyarrow's types (extra ``export``). In them **missing is** ``<NA>`` **and NaN is NaN**, as
+Inf and -Inf are themselves: ``isna()`` is true only where nothing was measured. polars and pyarrow take them without a
copy: ``polars.DataFrame(frame)``, ``pyarrow.table(frame)``.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import filter as matching
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from rlwatch import codec
from rlwatch.analysis.lookup import find_run
from rlwatch.analysis.rows import Row, describe, key_values, last_metrics
from rlwatch.analysis.sending import Progress, Sent, Story, story_of, to_mlflow, to_tensorboard, to_wandb
from rlwatch.columns import ALERTS, EVENTS, FINDINGS, RUNS, Column, columns_seen
from rlwatch.compare import (
    ABSENT,
    Axis,
    SeedGroup,
    compare,
    compare_groups,
    config_diff,
    group_of,
    runs_of_group,
    subject_of_run,
)
from rlwatch.curation.search import matching as matching_runs
from rlwatch.distributions import QUANTITIES, Distributions, distributions
from rlwatch.errors import ConfigError
from rlwatch.export import COLUMNS, TABLES, Table, arrow_table, data_frame, pyarrow, spike_table
from rlwatch.forecast.forecast import FORECAST, forecast_of
from rlwatch.glance import framed, glance
from rlwatch.metrics import canonicalise
from rlwatch.ports import Series, Store
from rlwatch.records import DISTRIBUTIONS, JSON, Alert, Event, Finding, RunInfo, StepRecord
from rlwatch.redaction import recordable
from rlwatch.report.charts import figures, svg_file
from rlwatch.report.gather import (
    Chart,
    TimelineEntry,
    attempt_starts,
    charts,
    counting,
    metrics_to_draw,
    options_of,
    timeline,
)
from rlwatch.rollouts import completion_rows
from rlwatch.store.url import open_store
from rlwatch.view import RunView, view_of_run
from rlwatch.wording import el, meant, nearest, number, step

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa  # type: ignore[import-untyped]

Steps = range | slice | Collection[int]
"""A selection of steps; a slice is half open, as in a list: ``slice(100, 200)`` is 100 to 199."""
PLACE = ("steps", "attempts")
FARTHEST = 2**62
"""A step that no run reaches."""
MOST_CHARTS = 4
"""Number of charts that a notebook shows below a run; :meth:`StoredRun.plot` draws more."""


def open(url: str | os.PathLike[str] | None = None) -> Runs:  # noqa: A001  (rlwatch.open)
    """Open the store at ``url`` and return its runs, newest first, for reading only: no trainer waits for it.

    None: ``RLWATCH_STORE``, else ``[store]`` of ``rlwatch.toml``, else ``./rlwatch-runs``. Raises ``StoreURLError`` if
    ``url`` names no store.

    >>> import rlwatch
    >>> with rlwatch.init(project="docs", name="opened", store="memory://opened") as run:
    ...     run.log({"entropy": 0.9}, step=1)
    ...     run.log({"entropy": float("nan"), "reward": 0.5}, step=2)
    >>> runs = rlwatch.open("memory://opened")
    >>> runs
    <1 run of memory://opened: opened>
    >>> runs["opened"].history(["entropy", "reward"])
       step  attempt  entropy  reward
    0     1        1      0.9    <NA>
    1     2        1      NaN     0.5
    """
    return Runs(open_store(url))


class Runs(Sequence["StoredRun"]):
    """The runs of a store, newest first, as a sequence that is read anew at every access.

    ``runs[0]`` is the newest run. ``runs["math"]`` is the run with that id or name, or the only one whose id or name
    begins so. An unknown name raises ``RunNotFoundError`` with the closest ids; several matches raise ``ConfigError``.
    Usable as a context manager, which closes the store.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    @overload
    def __getitem__(self, which: str | int) -> StoredRun: ...

    @overload
    def __getitem__(self, which: slice) -> list[StoredRun]: ...

    def __getitem__(self, which: str | int | slice) -> StoredRun | list[StoredRun]:
        if isinstance(which, str):
            return StoredRun(self.store, find_run(self.store, which).run_id)
        found = [StoredRun(self.store, run.run_id) for run in self.store.runs()]
        return found[which]

    def __contains__(self, which: object) -> bool:
        return any(which in (run.run_id, run.name) for run in self.store.runs())

    def __len__(self) -> int:
        return len(self.store.runs())

    def __iter__(self) -> Iterator[StoredRun]:
        return iter(self[:])

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = [run.name or run.run_id for run in self.store.runs()]
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"<{len(names)} run{'' if len(names) == 1 else 's'} of {self.store.url}{': ' if names else ''}{shown}>"

    def _repr_html_(self) -> str:
        head = el("tr", *(el("th", name) for name in SHOWN))
        body = [el("tr", *(el("td", _shown(row.get(name))) for name in SHOWN)) for row in self.rows()]
        return framed(el("p", self.store.url, cls="soft"), el("table", el("thead", head), el("tbody", *body)))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export the table of runs to polars, pyarrow and others: ``polars.DataFrame(rlwatch.open())``."""
        rows = self.rows()
        return arrow_table(rows, _columns_of_runs(rows)).__arrow_c_stream__(requested_schema)

    def rows(self, project: str | None = None, *, search: str = "") -> list[Row]:
        """Return the runs as mappings with the columns of :data:`RUNS`, archived runs included.

        ``project``: only its runs. ``search``: only runs that match, as for ``rlwatch runs --search``: ``"lr=3e-5
        tag=paper"``.

        >>> [(row["name"], row["verdict"]) for row in runs.rows(search="lr=2e-6")]
        [('seed-2', 'healthy')]
        """
        now = time.time()
        runs = [run for run in matching_runs(self.store.runs(), search) if project is None or run.project == project]
        return [_flat(describe(self.store, run, now)) for run in runs]

    def table(self, project: str | None = None, *, search: str = "") -> pd.DataFrame:
        """Return the runs as a DataFrame with one row each; arguments as for :meth:`rows`.

        >>> runs.table()[["name", "status", "verdict", "last_step"]]
             name    status       verdict  last_step
        0  seed-1  finished       at risk          5
        1  seed-2  finished       healthy         50
        2  seed-3  finished  collapsed@30         50
        """
        rows = self.rows(project, search=search)
        return data_frame(arrow_table(rows, _columns_of_runs(rows)))

    def compare(self, left: str, right: str, *, by: Literal["step", "tokens", "time"] = "step") -> pd.DataFrame:
        """Compare two groups of seeds: return the metrics that differ, and from which step on, as a DataFrame
        (:data:`SEEDS`).

        The group of a run comes from ``rlwatch.init(group=)``, from a tag ``group:NAME``, or from its name without the
        seed. ``frame.attrs["answer"]`` has the result in a sentence, ``frame.attrs["found"]`` the bands of every
        metric, for charts (:class:`rlwatch.compare.GroupComparison`).

        Parameters
        ----------
        left, right
            Names of the groups.
        by
            Axis on which runs are aligned: optimizer steps, tokens, or seconds.

        Raises
        ------
        ConfigError
            If there is no such group, a group has one run, or no metric or step is common to all.

        >>> import math
        >>> for arm, more in (("old", 0.0), ("new", 0.3)):
        ...     for seed in range(1, 5):
        ...         with rlwatch.init(name=f"{arm}-{seed}", group=arm, store="memory://arms", forecast=False) as run:
        ...             for step in range(60):
        ...                 run.log({"reward": 0.4 + 0.05 * math.sin(seed * step) + more * (step >= 30)}, step=step)
        >>> rlwatch.open("memory://arms").compare("old", "new")[["metric", "answer", "since", "until"]]
                metric   answer  since  until
        0  reward/mean  differs   29.0   <NA>
        """
        known = self.store.runs()
        one, other = (
            SeedGroup(name, tuple(subject_of_run(self.store, run) for run in runs_of_group(known, name)))
            for name in (left, right)
        )
        found = compare_groups(one, other, Axis(by))
        rows = [
            {
                "metric": name,
                "answer": metric.answer.value,
                "since": metric.since,
                "until": metric.until,
                "p": metric.p,
                "p_of_all": found.p_of_all[name],
                "left": metric.bands[0].last,
                "right": metric.bands[1].last,
            }
            for name, metric in found.metrics.items()
        ]
        frame = data_frame(arrow_table(rows, SEEDS))
        frame.attrs["answer"], frame.attrs["found"] = found.answer, found
        return frame

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Run id -> reason, for every run of the store that cannot be read."""
        return self.store.unreadable()

    def close(self) -> None:
        """Close the store; idempotent."""
        self.store.close()


_ROW_ONLY = ("state", "last_values", "deleted_at", "deleted_by")
"""Fields in the row of a run that are no columns of the table."""
SHOWN = ("status", "verdict", "project", "name", "run_id", "last_step", "reward", "entropy", "KL", "grad norm")


def _columns_of_runs(rows: Sequence[Row]) -> Mapping[str, Column]:
    """Columns of a table of runs, also for fields that only a newer rlwatch knows."""
    return columns_seen(RUNS, ({name: row[name] for name in row if name not in _ROW_ONLY} for row in rows))


def _flat(row: Row) -> Row:
    verdict = row["verdict"]
    flat = {name: verdict[name] for name in ("urgency", "level", "judged")}
    flat |= {"verdict": verdict["name"], "says": verdict["text"], "tags": ", ".join(row["tags"])}
    return row | flat | key_values(row["last_values"])


def _shown(value: JSON) -> str:
    return number(value) if isinstance(value, float) else step(value) if isinstance(value, int) else str(value or "-")


METRICS: Mapping[str, Column] = {
    "metric": Column("str", "name as logged"),
    "canonical": Column("str", "name of the metric that it is read as; empty where it is not known"),
    "unit": Column("str", "unit"),
    "step": Column("int", "last step with a value"),
    "value": Column("float", "the value there"),
}
FORECASTS: Mapping[str, Column] = {
    "step": Column("int", "step it was made at"),
    "attempt": Column("int", "process that trained the step"),
    "p20": Column("float", "chance of a failure within 20 steps"),
    "p50": Column("float", "within 50"),
    "p100": Column("float", "within 100"),
    "risk": Column("float", "how far beyond the threshold of the alarm; 1 is at it"),
    "alarm": Column("bool", "whether it is an alarm"),
    "limit": Column("str", "limit most likely to be reached"),
    "steps_to": Column("float", "steps expected until then"),
    "absent": Column("str", "why there is no forecast; empty where there is one"),
}
COMPLETIONS: Mapping[str, Column] = {
    "step": Column("int", "step"),
    "attempt": Column("int", "process"),
    "rank": Column("int", "rank"),
    "prompt": Column("str", "prompt"),
    "completion": Column("str", "completion"),
    "reward": Column("float", "reward"),
    "advantage": Column("float", "advantage"),
    "length": Column("int", "tokens"),
    "group": Column("int", "prompt group: which prompt of the generation"),
    "task": Column("str", "task or data source"),
}
"""Columns that completions always have; further recorded columns follow."""
SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
DISTRIBUTED: Mapping[str, Column] = {
    "step": Column("int", "step"),
    "attempt": Column("int", "process"),
    "quantity": Column("str", "log_ratio, logp_difference (nats, trainer - rollout engine) or entropy (nats)"),
    "tokens": Column("int", "tokens that were counted"),
    "nan": Column("int", "of these NaN"),
    "below": Column("int", "of these -Inf"),
    "above": Column("int", "of these +Inf"),
    **{f"p{100 * share:02.0f}": Column("float", "quantile of the finite values, to within a bin") for share in SHARES},
}
OPTIONS: Mapping[str, Column] = {
    "option": Column("str", "dotted name"),
    "value": Column("str", "value, as text; secrets are blacked out"),
}

PARTINGS: Mapping[str, Column] = {
    "metric": Column("str", "canonical name"),
    "at": Column("float", "first place from which the difference stayed beyond chance: a step, tokens or seconds"),
    "left": Column("float", "value of this run there"),
    "right": Column("float", "value of the other"),
    "times": Column("float", "the difference as a multiple of what separated them before"),
    "together": Column("float", "place before; missing where they were apart from the first rows on"),
    "until": Column("float", "place at which they came together again; missing where they did not"),
}
SEEDS: Mapping[str, Column] = {
    "metric": Column("str", "canonical name"),
    "answer": Column("str", "differs, no difference found, or too few seeds"),
    "since": Column(
        "float", "place from which the groups differ: a step, tokens or seconds; missing where they do not"
    ),
    "until": Column("float", "last place of it; missing where they differ to the end"),
    "p": Column("float", "chance of so large a difference anywhere on the curve, if the groups were alike"),
    "p_of_all": Column("float", "the same, corrected for the number of metrics"),
    "left": Column("float", "median of the seeds of the first group at the last place"),
    "right": Column("float", "median of the second"),
}
SETTINGS: Mapping[str, Column] = {
    "option": Column("str", "dotted name"),
    "left": Column("str", "value of this run as JSON; missing where it has none"),
    "right": Column("str", "value of the other"),
}


class StoredRun:
    """One recorded run of a store. Every call reads the present data: a run that goes on has more at the next call.

    Calls raise ``StoreError`` where the run cannot be read, and ``MissingExtraError`` without pandas and pyarrow.

    Parameters
    ----------
    store, run_id
        The store, and the id of the run in it.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id

    @property
    def info(self) -> RunInfo:
        """Description of the run: name, project, trainer, configuration, tags, state.

        >>> run.info.name, run.info.project, run.info.config["lr"]
        ('seed-1', 'docs', 1e-06)
        """
        return self.store.run(self.run_id)

    def __repr__(self) -> str:
        info = self.info
        return f"<run {info.name or self.run_id}: {describe(self.store, info, time.time())['verdict']['text']}>"

    def _repr_html_(self) -> str:
        view = self.view()
        return framed(glance(view), figures(*self._drawn(view, (), None, MOST_CHARTS)))

    def view(self) -> RunView:
        """Return everything that interfaces show about the run: verdict, cause, advice, findings, forecast, checks
        that lack metrics.

        >>> run.view().verdict.name, runs["seed-3"].view().verdict.name
        ('at risk', 'collapsed@30')
        """
        info = self.info
        gone = describe(self.store, info, time.time())["status"] == "dead"
        return view_of_run(self.store, info, gone=gone)

    def metrics(self) -> pd.DataFrame:
        """Return the metrics of the run: name as logged, canonical name, unit, last step and last value
        (:data:`METRICS`).

        >>> run.metrics()[["metric", "canonical", "step", "value"]]
            metric       canonical  step  value
        0  entropy  policy/entropy     5    NaN
        1   reward     reward/mean     5    1.0
        """
        return self._frame(last_metrics(self.store, self.info), METRICS)

    def history(
        self,
        metrics: str | Iterable[str] | None = None,
        steps: Steps | None = None,
        *,
        attempts: Literal["newest", "all"] = "newest",
        form: Literal["wide", "long"] = "wide",
    ) -> pd.DataFrame:
        """Return the logged values of metrics by step, as a DataFrame.

        Parameters
        ----------
        metrics
            Names as logged, canonical names (``policy/entropy``), or patterns (``actor/*``); None for all metrics. A
            column has the name given here.
        steps
            Only these steps.
        attempts
            ``"newest"``: the branch that counts, without steps that a later process ran again; ``"all"``: every
            process.
        form
            ``"wide"``: ``step``, ``attempt`` and a column for each metric, ``<NA>`` where it was not measured.
            ``"long"``: ``step``, ``attempt``, ``metric``, ``value``, with a row for each measured value.

        Raises
        ------
        ConfigError
            For a metric that the run does not log, with the closest names.

        >>> run.history("reward", steps=slice(2, 4))
           step  attempt  reward
        0     2        1     0.5
        1     3        1    0.75
        >>> run.history(["policy/entropy"], steps=[4, 5], form="long")
           step  attempt          metric  value
        0     4        1  policy/entropy    0.9
        1     5        1  policy/entropy    NaN
        >>> run.history("entrpy")
        Traceback (most recent call last):
        rlwatch.errors.ConfigError: run 'seed-1' logs no metric 'entrpy'; did you mean entropy, policy/entropy?
        """
        names = self._named(metrics)
        series = self._series(names.values(), steps, attempts)
        return data_frame((_wide if form == "wide" else _long)({name: series[own] for name, own in names.items()}))

    def findings(self) -> pd.DataFrame:
        """Return the findings (detected problems) of the run in order, and where each eased or ended
        (:data:`FINDINGS`).

        >>> run.findings()[["step", "kind", "severity", "stage", "metric"]]
           step       kind severity  stage          metric
        0     5  nonfinite  warning  began  policy/entropy
        """
        return data_frame(self.table("findings").arrow())

    def alerts(self) -> pd.DataFrame:
        """Return the alerts of the run, newest first (:data:`ALERTS`).

        >>> run.alerts()[["rule", "severity", "state", "onset_step"]]
                 rule severity    state  onset_step
        0  non-finite  warning  pending           5
        """
        return data_frame(self.table("alerts").arrow())

    def forecasts(self) -> pd.DataFrame:
        """Return the forecasts of the run in order (:data:`FORECASTS`).

        >>> print(run.forecasts()["absent"][0])
        no forecast because it needs the first 40 steps as a baseline, and has 0 (0 rows)
        """
        return data_frame(self.table("forecasts").arrow())

    def events(self) -> pd.DataFrame:
        """Return the events of the run: resets, resumes, exceptions, notes (:data:`EVENTS`).

        >>> len(run.events())
        0
        """
        return data_frame(self.table("events").arrow())

    def spikes(self) -> pd.DataFrame:
        """Return the localised gradient spikes of the run, with a row for each token responsible
        (:data:`rlwatch.export.COLUMNS`).

        >>> run.spikes()[["step", "position", "text", "cause", "advantage", "own_norm"]]
           step  position text        cause  advantage  own_norm
        0     5         7   is  token ratio       <NA>      32.5
        """
        return data_frame(self.table("spikes").arrow())

    def distributions(self, quantity: str | None = None) -> pd.DataFrame:
        """Return quantiles over the tokens of each step whose histogram was stored (:data:`DISTRIBUTED`).

        ``quantity``: ``log_ratio``, ``logp_difference`` or ``entropy``; None: all.
        :func:`rlwatch.distributions.distributions` returns the histograms themselves. Raises ``ConfigError`` for an
        unknown quantity.

        >>> len(run.distributions())
        0
        """
        if quantity is not None and quantity not in QUANTITIES:
            there_are = f"there are {', '.join(QUANTITIES)}{meant(quantity, QUANTITIES)}"
            raise ConfigError(f"there is no quantity {quantity!r} of tokens; {there_are}")
        rows = [row for row in self._distributions().rows() if quantity in (None, row["quantity"])]
        return self._frame(rows, DISTRIBUTED)

    def completions(self, last: int | None = None) -> pd.DataFrame:
        """Return the recorded completions of the run, newest step first; with ``last``, those of that many newest
        batches.

        >>> run.completions()[["step", "prompt", "completion", "reward"]]
           step prompt completion  reward
        0     5   1+1=          2     1.0
        """
        return data_frame(self._completions(last).arrow())

    def table(self, kind: str) -> Table:
        """Return one table of the run, as ``rlwatch export`` writes it; reading its rows needs no further package.

        ``kind``: a name in :data:`rlwatch.export.TABLES`. ``history`` has the rows of every process. Raises
        ``ConfigError`` for another kind.

        >>> list(run.table("history").rows())[-1]
        {'step': 5, 'attempt': 1, 'entropy': nan, 'reward': 1.0}
        """
        if kind not in TABLES:
            there_are = f"there are {', '.join(TABLES)}{meant(kind, TABLES)}"
            raise ConfigError(f"there is no table {kind!r} of a run; {there_are}")
        made: Table = getattr(self, f"_{kind}")()
        return made

    def _history(self) -> Table:
        series = self._series(self.store.metric_names(self.run_id), None, "all")
        places = {"step": Column("int", "step"), "attempt": Column("int", "process")}
        columns = places | {name: Column("float", "as it was logged") for name in series}
        return Table(columns, lambda: _row_by_row(series), lambda: _wide(series))

    def _findings(self) -> Table:
        findings = [*self.store.findings(self.run_id), *self.store.recoveries(self.run_id)]
        findings.sort(key=attrgetter("seq"))
        return _of_records(FINDINGS, findings)

    def _alerts(self) -> Table:
        return _of_records(ALERTS, self.store.alerts(self.run_id))

    def _forecasts(self) -> Table:
        kept = [(one.attempt, forecast_of(one)) for one in self.store.forecasts(self.run_id)]
        rows = [{name: getattr(one, name, None) for name in FORECASTS} | {"attempt": of} for of, one in kept]
        return Table(FORECASTS, lambda: rows)

    def _events(self) -> Table:
        return _of_records(EVENTS, self.store.events(self.run_id))

    def _spikes(self) -> Table:
        return Table(COLUMNS, lambda: spike_table(self.store, self.info))

    def _distributions(self) -> Table:
        found = distributions(self.store.spikes(self.run_id, reason=DISTRIBUTIONS))
        return Table(DISTRIBUTED, lambda: [row for one in found.values() for row in _quantiles(one)])

    def _completions(self, last: int | None = None) -> Table:
        rows = completion_rows(self.store.completions(self.run_id, last=last))
        more = {name: _kind_of(row[name]) for row in rows for name in row.keys() - COMPLETIONS.keys()}
        return Table({**COMPLETIONS, **{name: Column(kind, "") for name, kind in more.items()}}, lambda: rows)

    def config(self, attempt: int | None = None) -> pd.DataFrame:
        """Return the configuration of an attempt (process of the run): dotted ``option``, and ``value`` as text.

        ``attempt`` None: the newest that has one. Raises ``ConfigError`` for an attempt that the run does not have.

        >>> run.config()[:1]
          option  value
        0     lr  1e-06
        """
        given = self.info.config if attempt is None else self.store.configs(self.run_id).get(attempt)
        if given is None:
            raise ConfigError(f"run {self.run_id!r} has no attempt {attempt}")
        return self._frame([{"option": o, "value": value} for o, value in options_of(given).items()], OPTIONS)

    def diff(self, other: StoredRun, *, by: Literal["step", "tokens", "time"] = "step") -> pd.DataFrame:
        """Return the metrics in which this run and ``other`` diverged by more than chance, in order of step
        (:data:`PARTINGS`).

        ``by``: axis on which the runs are aligned: optimizer steps, tokens, or seconds. ``frame.attrs["answer"]`` has
        the result in a sentence. Raises ``ConfigError`` if nothing can be compared.

        >>> runs["seed-2"].diff(runs["seed-3"])[["metric", "at", "left", "right"]]
                metric    at     left  right
        0  reward/mean  30.0  0.49012    0.1
        """
        found = compare(subject_of_run(self.store, self.info), subject_of_run(other.store, other.info), Axis(by))
        if found.problem:
            raise ConfigError(f"{found.problem}; try another by=")
        frame = self._frame([asdict(one) for one in found.partings], PARTINGS)
        frame.attrs["answer"] = found.answer
        return frame

    def compare(self, other: StoredRun, *, by: Literal["step", "tokens", "time"] = "step") -> pd.DataFrame:
        """Compare the group of seeds of this run with that of ``other``, both in this store; see :meth:`Runs.compare`.

        >>> runs["seed-2"].compare(runs["seed-3"])
        Traceback (most recent call last):
        ...
        rlwatch.errors.ConfigError: two groups are needed, got 'seed' twice
        """
        return Runs(self.store).compare(group_of(self.info), group_of(other.info), by=by)

    def config_diff(self, other: StoredRun) -> pd.DataFrame:
        """Return the settings in which the configurations of this run and ``other`` differ (:data:`SETTINGS`), without
        secrets.

        >>> run.config_diff(runs["seed-2"])
          option   left  right
        0     lr  1e-06  2e-06
        """
        rows = [
            {"option": one.name, "left": _setting(one.values[0]), "right": _setting(one.values[1])}
            for one in config_diff([self.info.config, other.info.config])
        ]
        return self._frame(rows, SETTINGS)

    def plot(self, *metrics: str, steps: Steps | None = None) -> Plot:
        """Return charts of ``metrics`` (names as for :meth:`history`) of the run; none: those that a post-mortem draws.

        They are SVG: nothing needs to be installed, and nothing is fetched. ``steps``: only these steps.

        >>> "<svg" in run.plot("reward", "policy/entropy").html
        True
        """
        drawn = self._drawn(self.view(), metrics, steps, None)
        return Plot(framed(figures(*drawn)), svg_file(*drawn))

    def to_tensorboard(self, directory: str | os.PathLike[str], *, progress: Progress = iter) -> Sent:
        """Export the run to TensorBoard: write one event file into ``directory``, and return a summary.

        :mod:`rlwatch.analysis.sending` describes the exported data. ``progress`` wraps the sequence of rows to show
        progress. Raises ``ConfigError`` where the directory has event files already, ``MissingExtraError`` without
        tensorboard.
        """
        return to_tensorboard(self._story(), Path(directory), progress=progress)

    def to_wandb(
        self,
        *,
        project: str = "",
        entity: str | None = None,
        offline: bool = False,
        directory: str | os.PathLike[str] | None = None,
        progress: Progress = iter,
    ) -> Sent:
        """Export the run to wandb as a run with the same id, on the server or ``offline`` in ``directory``; return a
        summary.

        An offline run is uploaded with ``wandb sync``. ``project``, ``entity``: where it is created; empty: rlwatch's
        project and wandb's default. ``progress`` wraps the sequence of rows to show progress. Raises ``ConfigError``
        where the run is there already, ``MissingExtraError`` without wandb, ``RLWatchError`` for an error of wandb.
        """
        where = None if directory is None else Path(directory)
        return to_wandb(
            self._story(), project=project, entity=entity, offline=offline, directory=where, progress=progress
        )

    def to_mlflow(self, uri: str | None = None, *, experiment: str = "", progress: Progress = iter) -> Sent:
        """Export the run to MLflow at the tracking URI ``uri`` (None: MLflow's default), and return a summary.

        ``experiment``: name of the experiment; empty: the run's project. ``progress`` wraps the sequence of rows to
        show progress. Raises ``ConfigError`` where the run is there already, ``MissingExtraError`` without MLflow,
        ``RLWatchError`` for an error of MLflow.
        """
        return to_mlflow(self._story(), uri=uri, experiment=experiment, progress=progress)

    def _story(self) -> Story:
        info = self.info
        starts = {attempt: low for attempt, (low, _) in self.store.spans(self.run_id).items()}
        findings = [*self.store.findings(self.run_id), *self.store.recoveries(self.run_id)]
        findings.sort(key=attrgetter("seq"))
        counted = [f for f in findings if all(f.attempt >= later or f.step < low for later, low in starts.items())]
        verdict = describe(self.store, info, time.time())["verdict"]["text"]
        given = dict(recordable(info.config))
        return story_of(info, list(self._rows()), counted, options=options_of(given), config=given, verdict=verdict)

    def _rows(self) -> Iterator[StepRecord]:
        """Yield the rows that no later attempt replaced, by step; a row without a time gets that of the row before."""
        times = self.store.moments(self.run_id)
        at = dict(
            zip(zip(times.attempts.tolist(), times.steps.tolist(), strict=True), times.values.tolist(), strict=True)
        )
        ts = self.info.created_at
        for row in _row_by_row(self._series(self.store.metric_names(self.run_id), None, "newest")):
            step, attempt = row.pop("step"), row.pop("attempt")
            known = at.get((attempt, step), math.nan)
            ts = known if math.isfinite(known) and known > 0 else ts
            yield StepRecord(step, row, ts, attempt)

    def _drawn(
        self, view: RunView, metrics: Sequence[str], steps: Steps | None, most: int | None
    ) -> tuple[Sequence[Chart], Sequence[TimelineEntry]]:
        names = self.store.metric_names(self.run_id)
        wanted = list(self._named(metrics).values()) if metrics else metrics_to_draw(names, view.source, view.findings)
        series = self._series(wanted[:most], steps, "newest")
        drawn = charts(series, view.source, view.findings, attempt_starts(series.values()))
        moments = timeline(view.diagnosis, view.findings, view.alerts, view.events, view.commands)
        return drawn, moments

    def _frame(self, rows: Sequence[Row], columns: Mapping[str, Column]) -> pd.DataFrame:
        return data_frame(arrow_table(rows, columns))

    def _named(self, metrics: str | Iterable[str] | None) -> dict[str, str]:
        """Return name of the column -> name as logged, for metrics that a user named."""
        logged = self.store.metric_names(self.run_id)
        if metrics is None:
            return {name: name for name in logged if not name.startswith(FORECAST)}
        canonical = canonicalise(dict.fromkeys(logged, 0.0), self.info.source)[1]
        found: dict[str, str] = {}
        for name in [metrics] if isinstance(metrics, str) else metrics:
            if name in logged or name in canonical:
                found[name] = name if name in logged else canonical[name]
                continue
            fits = matching(logged, name)
            if not fits:
                near = nearest(name, [*logged, *canonical], 3, 0.5)
                hint = f"did you mean {', '.join(near)}?" if near else "run.metrics() lists what it logs"
                raise ConfigError(f"run {self.run_id!r} logs no metric {name!r}; {hint}")
            found |= {one: one for one in fits}
        return found

    def _series(self, names: Iterable[str], steps: Steps | None, attempts: str) -> dict[str, Series]:
        starts = {attempt: low for attempt, (low, _) in self.store.spans(self.run_id).items()}
        found = self.store.series(self.run_id, list(dict.fromkeys(names)), steps=_span(steps))
        return {
            name: _kept(one, (counting(one, starts) if attempts == "newest" else _all(one)) & _among(one.steps, steps))
            for name, one in found.items()
        }


@dataclass(frozen=True, slots=True)
class Plot:
    """Charts of a run that notebooks show: ``html`` is a piece of HTML, ``svg`` one picture with all charts."""

    html: str
    svg: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return f"<plot, {len(self.html)} characters of HTML; save(path) writes it>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the charts to ``path`` in the format of its ending: a page (``.html``) or a picture (``.svg``).

        Raises ``ConfigError`` for another ending, and ``OSError`` where the file cannot be written.
        """
        ending = Path(path).suffix.lower()
        if ending in (".html", ".htm"):
            text = f'<!doctype html>\n<meta charset="utf-8">\n{self.html}\n'
        elif ending == ".svg":
            text = f'<?xml version="1.0" encoding="UTF-8"?>\n{self.svg}\n'
        else:
            raise ConfigError(
                f"a plot is written as .html or .svg, got {os.fspath(path)!r}; programs like rsvg-convert and Inkscape "
                "make PNG and PDF of an .svg"
            )
        Path(path).write_text(text, encoding="utf-8")


def _of_records(columns: Mapping[str, Column], records: Sequence[Finding | Alert | Event]) -> Table:
    """Return the table of records; fields that only a newer rlwatch knows have columns, too."""
    rows = [codec.encoded(record) for record in records]
    return Table(columns_seen(columns, rows), lambda: rows)


def _quantiles(one: Distributions) -> Iterator[Row]:
    counted = zip(one.steps.tolist(), one.attempts.tolist(), one.tokens.tolist(), one.broken.tolist(), strict=True)
    for (at, attempt, tokens, broken), levels in zip(counted, one.quantiles(SHARES).tolist(), strict=True):
        yield dict(zip(DISTRIBUTED, (at, attempt, one.quantity, tokens, *broken, *levels), strict=True))


def _setting(value: object) -> str | None:
    return None if value is ABSENT else json.dumps(value)


def _kind_of(value: object) -> str:
    kinds = {bool: "bool", int: "int", float: "float"}
    return kinds.get(type(value), "str")


# Series as tables.


def _all(series: Series) -> NDArray[np.bool_]:
    return np.ones(len(series.steps), dtype=np.bool_)


def _span(steps: Steps | None) -> tuple[int, int] | None:
    """Return the lowest and highest selected step; None if all are selected."""
    if steps is None:
        return None
    if isinstance(steps, slice):
        low = 0 if steps.start is None else steps.start
        return low, FARTHEST if steps.stop is None else steps.stop - 1
    return (min(steps), max(steps)) if steps else (0, -1)


def _among(own: NDArray[np.int64], steps: Steps | None) -> NDArray[np.bool_]:
    """Return a mask (N,) of the selected steps."""
    if steps is None:
        return np.ones(len(own), dtype=np.bool_)
    if not isinstance(steps, slice):
        return np.isin(own, np.fromiter(steps, dtype=np.int64))
    kept = np.ones(len(own), dtype=np.bool_)
    if steps.start is not None:
        kept &= own >= steps.start
    if steps.stop is not None:
        kept &= own < steps.stop
    return kept if steps.step is None else kept & ((own - (steps.start or 0)) % steps.step == 0)


def _kept(series: Series, kept: NDArray[np.bool_]) -> Series:
    parts = {name: getattr(series, name)[kept] for name in ("steps", "values", "attempts", "seqs")}
    return replace(series, **parts)


def _wide(series: Mapping[str, Series]) -> pa.Table:
    """Return a row for each step of each attempt, with the last logged value of each metric there."""
    arrow = pyarrow()
    steps, attempts, metrics = _aligned(series)
    columns: dict[str, Any] = {"step": arrow.array(steps), "attempt": arrow.array(attempts)}
    for name, values, missing in metrics:
        columns[name] = arrow.array(values, mask=missing, from_pandas=False)
    return arrow.table(columns)


def _row_by_row(series: Mapping[str, Series]) -> Iterator[Row]:
    """Yield the rows of :func:`_wide` one by one, without missing values."""
    steps, attempts, metrics = _aligned(series)
    columns = [(name, values.tolist(), missing.tolist()) for name, values, missing in metrics]
    for i, place in enumerate(zip(steps.tolist(), attempts.tolist(), strict=True)):
        known = {name: values[i] for name, values, missing in columns if not missing[i]}
        yield dict(zip(("step", "attempt"), place, strict=True)) | known


_Column = tuple[str, NDArray[np.float64], NDArray[np.bool_]]


def _aligned(series: Mapping[str, Series]) -> tuple[NDArray[np.int64], NDArray[np.int64], Iterator[_Column]]:
    """Return steps and attempts (R,) of all rows, and for each metric its values (R,) and a mask (R,) of gaps."""
    nothing = [np.zeros(0, dtype=np.int64)]
    steps, attempts = (np.concatenate([*nothing, *(getattr(s, of) for s in series.values())]) for of in PLACE)
    first = int(steps.min(initial=0))
    width = int(steps.max(initial=0)) - first + 1
    rows, row_of = np.unique(attempts * width + steps - first, return_inverse=True)

    def metrics() -> Iterator[_Column]:
        begin = 0
        for name, one in series.items():
            where = row_of[begin : begin + len(one.values)]
            begin += len(one.values)
            values, missing = np.zeros(len(rows)), np.ones(len(rows), dtype=np.bool_)
            values[where], missing[where] = one.values, False
            yield name, values, missing

    return rows % width + first, rows // width, metrics()


def _long(series: Mapping[str, Series]) -> pa.Table:
    """Return a row for each value, by attempt and step, in the order of the metrics."""
    arrow = pyarrow()
    attempts, steps, which, values = (
        np.concatenate([empty, *(part for part in parts)])
        for empty, parts in (
            (np.zeros(0, np.int64), [one.attempts for one in series.values()]),
            (np.zeros(0, np.int64), [one.steps for one in series.values()]),
            (np.zeros(0, np.int64), [np.full(len(one.steps), place) for place, one in enumerate(series.values())]),
            (np.zeros(0, np.float64), [one.values for one in series.values()]),
        )
    )
    order = np.lexsort((which, steps, attempts))
    names = np.array([*series, ""], dtype=object)[which[order]]
    return arrow.table(
        {
            "step": arrow.array(steps[order]),
            "attempt": arrow.array(attempts[order]),
            "metric": arrow.array(names, arrow.string()),
            "value": arrow.array(values[order], from_pandas=False),
        }
    )
