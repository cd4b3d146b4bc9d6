"""Replay of a log: the findings, alerts and forecasts that rlwatch would have reported, and when, had it watched the
run.

The report on step s uses only data up to s: the log passes through the same :class:`~rlwatch.monitor.Monitor` as a live
run, row by row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import Any, Self, TypeAlias, cast

from rlwatch import codec
from rlwatch.alerts.engine import AlertEvent
from rlwatch.alerts.rules import Rule
from rlwatch.detectors.index import NotRun
from rlwatch.diagnosis import Diagnosis, row_steps
from rlwatch.errors import ImportFormatError
from rlwatch.forecast.forecast import forecast_of
from rlwatch.glance import framed, glance
from rlwatch.importers.base import ImportedRun
from rlwatch.importers.data_frame import is_data
from rlwatch.importers.lines import shown
from rlwatch.importers.naming import Naming, naming_of
from rlwatch.importers.registry import read_data, read_log
from rlwatch.metrics import canonicalise, known, resolve, shadowed, unjudged, unread
from rlwatch.monitor.engine import Monitor
from rlwatch.monitor.forecasting import Forecasts
from rlwatch.monitor.step_judge import MonitorOutcome, joined
from rlwatch.ports import Detector
from rlwatch.records import JSON, Alert, Event, Finding, ForecastRecord, Severity, StepRecord
from rlwatch.state import End, Ending
from rlwatch.view import RunView, diagnosis_of, logged_knobs, names_to_read
from rlwatch.wording import step

FORECAST = ("step", "p20", "p50", "p100", "risk", "alarm", "limit")
"""Fields of a step's forecast in a report."""
Progress = Callable[[Sequence[StepRecord]], Iterable[StepRecord]]
"""Wraps the sequence of rows to show how far the replay has come."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alert that would have been sent during a replay: when it fired, or when it got worse.

    ``step``: step at which it was raised. ``kind`` and ``severity``: those of the finding. ``reason``: its message.
    ``rule``: alert rule that fired. ``onset_step``: step at which the problem began, in retrospect.
    """

    step: int
    kind: str
    severity: Severity
    reason: str
    rule: str = ""
    onset_step: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a replay of one run from a log.

    Parameters
    ----------
    source, format, run
        Path of the log, name of its format, and name of the run in it.
    steps
        Number of distinct steps.
    view
        The run as every interface shows it.
    alarms
        Alerts that would have been sent.
    skipped
        Lines of the log that could not be read: reason and count.
    notes
        Remarks of the importer.
    rows
        Number of rows of a line log, with an example line.
    guessed
        Logged name -> metric as which it was read by a guess, because no trainer is known to use the name.
    unknown
        Logged names that are not read.
    unjudged
        Logged name of a known trainer that no detector uses -> the reason.
    firing
        Alerts that still fire at the end of the log.
    """

    source: str
    format: str
    run: str
    steps: int
    view: RunView
    alarms: tuple[Alarm, ...] = ()
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rows: str = ""
    guessed: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    unjudged: dict[str, str] = field(default_factory=dict)
    firing: tuple[Alert, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether the run is healthy enough: nothing is or was critical
        (``view.verdict.exit_code`` is not 1).
        """
        return self.view.verdict.exit_code != 1

    @property
    def metrics(self) -> tuple[str, ...]:
        """Canonical names of the logged metrics."""
        return self.view.metrics

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings (detected problems) in order of arrival."""
        return self.view.findings

    @property
    def diagnosis(self) -> Diagnosis:
        """Likely causes of the findings, ranked; empty where the state of the run does not justify naming one."""
        return self.view.explanation

    @property
    def forecasts(self) -> tuple[ForecastRecord, ...]:
        """All forecasts in order of arrival; if there are none, ``not_run`` has the reason."""
        return self.view.forecasts

    @property
    def not_run(self) -> tuple[NotRun, ...]:
        """Detectors, and the forecaster, that could not run because the log lacks their metrics."""
        return self.view.not_judged

    @property
    def forecast(self) -> list[dict[str, JSON]]:
        """Forecasts that have a number, one dict for each step: ``step``, ``p20``, ``p50``, ``p100``, ``risk``,
        ``alarm``, ``limit``.

        ``p50``: chance of a failure within 50 steps.
        """
        forecasts = [forecast_of(record) for record in self.forecasts]
        return [{name: getattr(one, name) for name in FORECAST} for one in forecasts if not one.absent]

    def _repr_html_(self) -> str:
        return framed(glance(self.view))

    def to_dict(self) -> dict[str, JSON]:
        """Return the report as plain lists, dicts and numbers; NaN and infinities remain floats."""
        return {
            "source": self.source,
            "format": self.format,
            "run": self.run,
            "steps": self.steps,
            "metrics": self.metrics,
            "findings": tuple(map(codec.encoded, self.findings)),
            "recoveries": tuple(map(codec.encoded, self.view.recoveries)),
            "alarms": tuple(map(asdict, self.alarms)),
            "forecast": self.forecast,
            "not_run": tuple(map(asdict, self.not_run)),
            "headline": self.view.headline,
            "verdict": self.view.verdict.to_dict(),
            "diagnosis": self.diagnosis.to_dict(),
            "skipped": self.skipped,
            "notes": self.notes,
            "guessed": dict(self.guessed),
            "unknown": self.unknown,
            "unjudged": dict(self.unjudged),
        }


LogInput: TypeAlias = (
    str | os.PathLike[str] | Iterable[StepRecord | Event] | Mapping[str, object] | Sequence[Mapping[str, object]] | Any
)
"""A path, records and events, columns, rows, or a table of pandas, polars or pyarrow."""


def scan(
    log: LogInput,
    *,
    run: str | None = None,
    format: str | None = None,  # noqa: A002  (the word users know)
    map: Mapping[str, str] | None = None,  # noqa: A002  (the word of the command and of the configuration)
    source: str = "",
    rules: Sequence[Rule] | None = None,
    detectors: Callable[[], Sequence[Detector]] | None = None,
    forecaster: Callable[[], Forecasts] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Replay one log through the detectors, the forecaster and the alert rules, and return a report.

    Parameters
    ----------
    log
        A path (its format is detected); a DataFrame or another table of pandas, polars or pyarrow, a mapping of columns
        or a list of rows, with a column ``step`` (without one, rows are numbered); or records and events in order of
        arrival. :mod:`rlwatch.importers.data_frame` describes missing values and NaN in a table.
    run
        Name of the run in a log with several runs.
    format
        Name of the importer; None: detect the format.
    map
        Role of a metric, or its canonical name -> its name in the log.
    source
        The trainer, where the log does not show it.
    rules, detectors, forecaster
        Used instead of the default alert rules, detectors and forecaster.
    progress
        Wraps the sequence of rows, to show how far the replay has come.

    Raises
    ------
    ImportFormatError
        If the log cannot be read, holds no run or several (then the message names them).
    ConfigError
        For an unknown role in ``map``.

    >>> from rlwatch.records import StepRecord
    >>> scan([StepRecord(s, {"entropy": 0.5, "grad_norm": 1.0}) for s in range(40)]).ok
    True
    >>> scan({"step": range(40), "entropy": [0.5] * 39 + [float("nan")]}).findings[0].kind
    'nonfinite'
    """
    naming = naming_of([f"{role}={name}" for role, name in (map or {}).items()])
    imported, events = _run_in(log, run, format, naming, source)
    return replay(
        imported,
        events=events,
        source=source,
        rules=rules,
        detectors=detectors,
        forecaster=forecaster,
        progress=progress,
    )


def _run_in(
    log: object, run: str | None, read_as: str | None, naming: Naming, source: str
) -> tuple[ImportedRun, Sequence[Event]]:
    """Return the one run in a file, a table or a sequence of records, and its events."""
    if isinstance(log, str | os.PathLike):
        return _only(read_log(log, run=run, format=read_as, naming=naming), os.fspath(log)), ()
    if is_data(log):
        return _only(read_data(log, run=run, naming=naming), f"a {type(log).__name__}"), ()
    records, events = _sequenced(cast("Iterable[StepRecord | Event]", log))
    if naming.metrics:
        records = [replace(record, metrics=naming.renamed(record.metrics)) for record in records]
    return ImportedRun(name="", source=source, format="records", path="records", records=records), events


def scan_all(path: str | os.PathLike[str], **options: object) -> list[Report]:
    """Replay every run of the log at ``path`` and return their reports.

    ``options`` are those of :func:`replay`. Raises ``ImportFormatError`` if the log cannot be read.
    """
    return [replay(imported, **options) for imported in read_log(path)]  # type: ignore[arg-type]


def replay(
    imported: ImportedRun,
    *,
    events: Sequence[Event] = (),
    source: str = "",
    rules: Sequence[Rule] | None = None,
    detectors: Callable[[], Sequence[Detector]] | None = None,
    forecaster: Callable[[], Forecasts] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Pass an imported run row by row through a :class:`~rlwatch.monitor.Monitor` and return the report.

    Parameters
    ----------
    imported
        The run as an importer returned it.
    events
        Events of the run; each is replayed before the first row with a higher ``seq``.
    source
        The trainer; empty: the importer's.
    rules, detectors, forecaster, progress
        As for :func:`scan`.
    """
    trainer = source or imported.source
    written = _written(imported.records)
    left_out = shadowed(written, trainer)
    records = _without(left_out, imported.records)
    monitor = Monitor(
        run_id=imported.name or imported.path,
        source=trainer,
        rules=rules,
        detectors=detectors,
        forecaster=forecaster,
        history=lambda attempt, before: branch(records, attempt, before),
        explains=False,
        acts=False,
    )
    arriving = _arriving(progress(records) if progress else records, events)
    outcome = joined(monitor.observing_all(arriving, closes=True))
    names = NamesRead.of(written, left_out, records, trainer)
    return Report(
        source=imported.path,
        format=imported.format,
        run=imported.name,
        steps=len({record.step for record in records}),
        view=_view(imported, records, monitor, outcome, events=events, names=names),
        alarms=tuple(_alarms(outcome)),
        skipped=tuple(f"{left.reason}: {left.count}" for left in imported.skipped),
        notes=imported.notes,
        rows=rows_read(imported),
        guessed=names.guessed,
        unknown=tuple(name for name, reason in names.unread.items() if not reason),
        unjudged={name: reason for name, reason in names.unread.items() if reason},
        firing=monitor.firing,
    )


@dataclass(frozen=True, slots=True)
class NamesRead:
    """The names of metrics in a log and the metrics as which they were read.

    Parameters
    ----------
    names
        All names in the log, sorted.
    metrics
        Canonical names of the metrics that were recognised, sorted.
    guessed
        Name in the log -> metric as which it was read by a guess.
    unread
        Name in the log that was not read -> the reason; empty for an unknown name.
    """

    names: list[str]
    metrics: tuple[str, ...]
    guessed: dict[str, str]
    unread: dict[str, str]

    @classmethod
    def of(cls, written: Sequence[str], left_out: Set[str], records: Sequence[StepRecord], trainer: str) -> Self:
        """Read the names ``written`` in a log of ``trainer``, in the order in which they first appear.

        ``left_out``: those that a closer name replaces. ``records``: the rows that are judged, without these.
        """
        names = sorted(written)
        metrics = tuple(sorted(known(names, trainer)))
        last = _last([name for name in written if name not in left_out], records)
        _, origin = canonicalise(last, trainer)
        readings = {name: resolve(name, trainer) for name in origin.values()}
        guessed = {
            name: metric for metric, name in origin.items() if (read := readings[name]) is not None and read.guess
        }
        reasons = {name: unjudged(name, whole="reward/mean" in metrics) for name in unread(names, trainer)}
        return cls(names, metrics, guessed, reasons)


def _view(
    imported: ImportedRun,
    records: Sequence[StepRecord],
    monitor: Monitor,
    outcome: MonitorOutcome,
    *,
    events: Sequence[Event],
    names: NamesRead,
) -> RunView:
    """Return the view of a log that was judged."""
    findings, steps = _unique(outcome.findings), _steps(records)
    read = names_to_read(names.names, findings, monitor.source)
    return RunView(
        run_id=monitor.run_id,
        name=imported.name,
        source=monitor.source,
        steps=steps,
        metrics=names.metrics,
        unread=tuple(names.unread),
        findings=findings,
        diagnosis=diagnosis_of(
            findings,
            steps,
            events=events,
            source=monitor.source,
            metrics=names.metrics,
            knobs=None if read is None else logged_knobs(records, read, monitor.source),
        ),
        forecasts=tuple({(f.seq, f.step, f.attempt): f for f in outcome.kept}.values()),
        events=tuple(events),
        not_judged=tuple(monitor.not_run()),
        recoveries=_unique(outcome.recoveries),
        ending=ending_of_log(imported),
    )


def rows_read(imported: ImportedRun) -> str:
    """Return a sentence with the number of rows of a line log and one of its lines; empty for logs of other formats."""
    if imported.example is None:
        return ""
    line, text = imported.example
    return f"{len(imported.records):,} rows; a line that is one, or ends one (line {line:,}): {shown(text.strip())}"


def _arriving(records: Iterable[StepRecord], events: Sequence[Event]) -> Iterator[StepRecord | Event]:
    """Yield the rows in order, each after the events before it."""
    waiting = sorted(events, key=lambda event: -event.seq)
    for record in records:
        while waiting and waiting[-1].seq < record.seq:
            yield waiting.pop()
        yield record


def _written(records: Iterable[StepRecord]) -> list[str]:
    """Return all names of metrics in the rows, in the order in which they first appear."""
    names, before = dict[str, None](), list[str]()
    for record in records:
        row = list(record.metrics)
        if row != before:
            names |= dict.fromkeys(row)
            before = row
    return list(names)


def _last(names: Sequence[str], records: Sequence[StepRecord]) -> dict[str, float]:
    """Return the last value of each of the metrics ``names`` in the rows, in their order."""
    found, missing = dict[str, float](), set(names)
    for record in reversed(records):
        if not missing:
            break
        row = record.metrics
        found |= {name: row[name] for name in missing & row.keys()}
        missing -= row.keys()
    return {name: found[name] for name in names}


def ending_of_log(imported: ImportedRun) -> Ending:
    """Return how a log ends: unfinished if its trainer was to run for more than two further rows."""
    steps = sorted({record.step for record in imported.records})
    planned = imported.config.get("max_steps")
    if len(steps) < 2 or isinstance(planned, bool) or not isinstance(planned, int):
        return Ending(at=max(steps, default=None))
    if planned - steps[-1] <= 2 * row_steps(steps):
        return Ending(at=steps[-1])
    return Ending(End.STOPPED, steps[-1], f"the log stops at step {step(steps[-1])} of {step(planned)}")


def _without(left_out: Set[str], records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the records without the metrics ``left_out``."""
    if not left_out:
        return records
    return [
        replace(record, metrics={name: value for name, value in record.metrics.items() if name not in left_out})
        for record in records
    ]


def branch(records: Sequence[StepRecord], attempt: int, before_step: int) -> Iterator[StepRecord | Event]:
    """Yield the earlier rows of a log that ``attempt`` continues, which starts at ``before_step``.

    A log may contain several attempts (processes of a resumed run). Rows that a later attempt repeated are left out.
    """
    first: dict[int, int] = {}
    for record in takewhile(lambda r: r.attempt < attempt, records):
        first[record.attempt] = min(record.step, first.get(record.attempt, record.step))
    bounds: dict[int, int] = {}
    for number in sorted(first, reverse=True):
        bounds[number] = before_step
        before_step = min(before_step, first[number])
    earlier = takewhile(lambda r: r.attempt < attempt, records)
    return (r for r in earlier if r.step < bounds[r.attempt])


def _steps(records: Sequence[StepRecord]) -> dict[int, list[int]]:
    """Return attempt -> its distinct steps, ascending, as a store does."""
    steps: dict[int, set[int]] = {}
    for record in records:
        steps.setdefault(record.attempt, set()).add(record.step)
    return {attempt: sorted(own) for attempt, own in sorted(steps.items())}


def _alarms(outcome: MonitorOutcome) -> Iterator[Alarm]:
    seen: set[tuple[str, str]] = set()
    for transition in outcome.transitions:
        alert = transition.alert
        key = (alert.alert_id, transition.reason.value)
        alarming = transition.event in (AlertEvent.FIRING, AlertEvent.ESCALATED)
        if transition.notify and alarming and key not in seen:
            seen.add(key)
            yield Alarm(alert.step, alert.kind, alert.severity, alert.message, alert.rule, alert.onset_step)


def _unique(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return one of each finding: replaying a branch publishes its findings again."""
    return tuple({(f.seq, f.detector, f.kind, f.severity, f.stage): f for f in findings}.values())


def _sequenced(log: Iterable[StepRecord | Event]) -> tuple[list[StepRecord], list[Event]]:
    """Separate records and events, numbered in order of arrival unless they have numbers already."""
    items = list(log)
    if not any(item.seq for item in items):
        items = [replace(item, seq=number) for number, item in enumerate(items, 1)]
    records = [item for item in items if isinstance(item, StepRecord)]
    return records, [item for item in items if isinstance(item, Event)]


def _only(runs: Sequence[ImportedRun], path: str) -> ImportedRun:
    if len(runs) != 1:
        names = ", ".join(repr(run.name) for run in runs[:10])
        raise ImportFormatError(path, f"holds {len(runs)} runs; name one with run= (--run): {names or 'none'}")
    return runs[0]
