"""Content of a post-mortem, collected from a stored run or a replayed log: head, timeline, charts, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlwatch.columns import ALERTS, FINDINGS, FINDINGS_SHOWN, Column, Format, heads, text_of
from rlwatch.detectors.index import lacks_metrics
from rlwatch.detectors.registry import registered
from rlwatch.diagnosis import Diagnosis
from rlwatch.metrics import resolve, unit_of
from rlwatch.ports import Series, Store
from rlwatch.records import (
    JSON,
    LOCALISED,
    SHED,
    STALLED,
    Alert,
    Command,
    Event,
    Finding,
    RunInfo,
    Severity,
    SpikeBatch,
)
from rlwatch.redaction import recordable
from rlwatch.rollouts import Row, best_and_worst, completion_rows, flags, reward_parts
from rlwatch.step_notes import StepNote, step_notes
from rlwatch.view import shed_lines, view_of_run
from rlwatch.wording import cell, cut, moment, number, one_line, percent, step, words

if TYPE_CHECKING:
    from rlwatch.importers.base import ImportedRun
    from rlwatch.scanner import Report


BUCKETS = 260
"""Number of step ranges of which the smallest and the largest value are drawn: as many as a picture has columns."""


@dataclass(frozen=True, slots=True)
class ReportCurve:
    """The values of one metric to draw, thinned to the extremes of each step range.

    ``steps`` and ``values`` (N,): finite values in order of step. ``bad``: pairs of a step with a non-finite value, and
    that value's name. ``replaced``: number of values that a later attempt replaced.
    """

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    bad: tuple[tuple[int, str], ...] = ()
    replaced: int = 0

    def __bool__(self) -> bool:
        return bool(self.steps or self.bad)


def curve(series: Series, starts: Mapping[int, int]) -> ReportCurve:
    """Return the curve to draw of a series, without values of steps that a later attempt ran again.

    ``starts``: attempt (process of the run) -> its first step.
    """
    kept = counting(series, starts)
    steps, values = series.steps[kept], series.values[kept]
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    finite = np.isfinite(values)
    shown = _extremes(steps[finite], values[finite])
    return ReportCurve(
        tuple(steps[finite][shown].tolist()),
        tuple(values[finite][shown].tolist()),
        _bad(steps[~finite], values[~finite]),
        int((~kept).sum()),
    )


def counting(series: Series, starts: Mapping[int, int]) -> NDArray[np.bool_]:
    """Return a boolean mask (N,) of the values of a series whose steps no later attempt ran again.

    ``starts``: attempt (process of the run) -> its first step.
    """
    kept = np.ones(len(series.steps), dtype=np.bool_)
    for later, first in starts.items():
        kept &= (series.attempts >= later) | (series.steps < first)
    return kept


def _extremes(steps: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices of the first, the last, and the extreme values of every step range."""
    if len(steps) <= 2 * BUCKETS:
        return np.arange(len(steps))
    edges = np.linspace(steps[0], steps[-1], BUCKETS + 1)[1:-1]
    firsts = np.unique(np.concatenate(([0], np.searchsorted(steps, edges))))
    parts = np.split(values, firsts[1:])
    low = [int(first + part.argmin()) for first, part in zip(firsts, parts, strict=True) if len(part)]
    high = [int(first + part.argmax()) for first, part in zip(firsts, parts, strict=True) if len(part)]
    return np.unique(np.array([0, len(steps) - 1, *low, *high]))


def _bad(steps: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[tuple[int, str], ...]:
    """Return the first non-finite value of each kind in each of ``BUCKETS`` step ranges."""
    found: dict[tuple[int, str], int] = {}
    width = max(1, (int(steps[-1]) - int(steps[0])) // BUCKETS) if len(steps) else 1
    for at, value in zip(steps.tolist(), values.tolist(), strict=True):
        found.setdefault((at // width, number(value)), at)
    return tuple(sorted((at, word) for (_, word), at in found.items()))


# The content of a post-mortem, apart from its layout.


@dataclass(frozen=True, slots=True)
class Chart:
    """One metric that a post-mortem draws.

    ``name``: canonical name. ``unit``: its unit. ``known_as``: the trainer's name, if it differs. ``curve``: its
    values. ``baseline``: level of the healthy run, if known.
    """

    name: str
    unit: str
    known_as: str
    curve: ReportCurve
    baseline: float | None = None


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One row in the timeline of a post-mortem.

    ``level`` is a severity or empty. ``number`` marks the entry in the charts (0: not drawn).
    """

    step: int
    text: str
    level: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The content of a run's post-mortem, apart from its layout.

    Parameters
    ----------
    title, status, headline, verdict
        Name, status, one-sentence summary and detailed verdict.
    head
        Label -> text, in the order to show them.
    diagnosis
        Likely causes and actions.
    timeline, charts
        Events in order of step, and the metrics to draw.
    culprits
        Tokens found responsible for gradient spikes, as rows.
    completions
        The best and the worst recorded completions, in order of reward.
    findings, alerts, commands, events
        All records of the run.
    config
        Dotted option -> text, without secrets.
    missing
        Detectors that could not run, each with the metrics it needs.
    made_at
        Date and time of the post-mortem.
    """

    title: str
    status: str
    headline: str = ""
    verdict: str = ""
    head: Mapping[str, str] = field(default_factory=dict)
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    timeline: tuple[TimelineEntry, ...] = ()
    charts: tuple[Chart, ...] = ()
    culprits: tuple[Mapping[str, JSON], ...] = ()
    completions: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()
    alerts: tuple[Alert, ...] = ()
    commands: tuple[Command, ...] = ()
    events: tuple[Event, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    made_at: str = ""


# Which metrics a post-mortem draws: those its findings speak of first, then these.

MOST_CHARTS = 9
"""Largest number of charts."""
USUAL = (
    "reward/mean",
    "policy/entropy",
    "policy/kl_ref",
    "policy/kl_ref_k3",
    "optim/grad_norm",
    "mismatch/k3",
    "mismatch/logp_absdiff",
    "len/mean",
    "len/clipped",
    "ratio/clipfrac",
    "reward/zero_std_frac",
    "optim/lr",
)
"""Metrics that are drawn for any run, in this order."""


def metrics_to_draw(names: Sequence[str], source: str, findings: Sequence[Finding]) -> list[str]:
    """Return the logged names of the metrics to draw: those in which findings were made, and the usual ones.

    For each canonical metric only the closest logged name is drawn. ``names``: all logged names. ``source``: the
    trainer.
    """
    best: dict[str, str] = {}
    for name in sorted(names, key=lambda name: _distance(name, source)):
        reading = resolve(name, source)
        best.setdefault(reading.metric.name if reading is not None else name, name)
    spoken = [
        finding.metric for finding in sorted(findings, key=lambda f: (-f.severity.rank, f.onset_step)) if finding.metric
    ]
    usual = [name for name in USUAL if name in best]
    order = dict.fromkeys([*usual[:1], *(name for name in spoken if name in best), *usual])
    return [best[name] for name in list(order)[:MOST_CHARTS]]


def charts(
    series: Mapping[str, Series], source: str, findings: Iterable[Finding], starts: Mapping[int, int]
) -> tuple[Chart, ...]:
    """Return the charts of ``series`` (logged name -> values) that have values, in the given order.

    Parameters
    ----------
    series
        Logged name -> its values.
    source
        The trainer.
    findings
        Findings, which know the level of the healthy run.
    starts
        Attempt (process of the run) -> its first step.
    """
    levels = {f.metric: f.baseline for f in findings if f.metric and f.baseline is not None}
    drawn = []
    for name, one in series.items():
        reading = resolve(name, source)
        canonical = reading.metric.name if reading is not None else name
        known_as = "" if name == canonical else name
        drawn.append(Chart(canonical, unit_of(canonical), known_as, curve(one, starts), levels.get(canonical)))
    return tuple(chart for chart in drawn if chart.curve)


def attempt_starts(series: Iterable[Series]) -> dict[int, int]:
    """Return attempt (process of the run) -> its first step, over all ``series``."""
    starts: dict[int, int] = {}
    for one in series:
        for attempt in sorted(set(one.attempts.tolist())):
            first = int(one.steps[one.attempts == attempt].min())
            starts[attempt] = min(first, starts.get(attempt, first))
    return starts


def _distance(name: str, source: str) -> tuple[int, str]:
    reading = resolve(name, source)
    return (reading.closeness if reading is not None else 9, name)


# What happened when: onsets, alarms, events and commands in one order, the likeliest cause's signs numbered.

MOST_MOMENTS = 60
"""Largest number of entries in a timeline: those of the likeliest cause, then the first ones."""
LONGEST_MOMENT = 220
EVENT_TEXTS = {
    "reference_reset": "the reference was reset",
    "reference_restored": "the reference was restored from a checkpoint",
    "resume": "the run was resumed",
    "step_skipped": "the update of a culprit batch was skipped",
    "signal": "the process received a signal",
}


def timeline(
    diagnosis: Diagnosis,
    findings: Sequence[Finding],
    alerts: Sequence[Alert],
    events: Sequence[Event],
    commands: Sequence[Command],
    *,
    recoveries: Sequence[Finding] = (),
    notes: Sequence[StepNote] = (),
) -> tuple[TimelineEntry, ...]:
    """Return the timeline of a run in order of step: findings, alarms, recoveries from critical findings, events,
    commands and notes.

    The findings behind the likeliest cause are numbered.

    Parameters
    ----------
    diagnosis
        Likely causes.
    findings, alerts, events, commands
        Records of the run.
    recoveries
        Findings that eased or ended.
    notes
        Notes of users.
    """
    signs = [e for e in diagnosis.causes[0].evidence if e.severity is not None] if diagnosis.causes else []
    numbered = [
        TimelineEntry(e.step, f"{words(e.kind)}: {e.message or e.text}", e.severity.value if e.severity else "", number)
        for number, e in enumerate(signs, 1)
    ]
    numbered_already = {(sign.kind, sign.step) for sign in signs}
    others = [
        TimelineEntry(f.onset_step, f"{words(f.kind)}: {f.message}", f.severity.value)
        for f in _once(findings)
        if (f.kind, f.onset_step) not in numbered_already and f.severity.rank > 0
    ]
    alarms = [
        TimelineEntry(a.step, f"alarm: {words(a.kind)}", a.severity.value) for a in alerts if a.fired_at is not None
    ]
    ordered = [_command(command) for command in commands if command.finished_step is not None]
    critical = {(f.detector, f.kind) for f in findings if f.severity is Severity.CRITICAL}
    better = [
        TimelineEntry(f.step, f"{words(f.kind)}: {f.message}") for f in recoveries if (f.detector, f.kind) in critical
    ]
    written = [TimelineEntry(note.step, f"note by {note.by}: {note.text}") for note in notes]
    rest = [*written, *alarms, *better, *filter(None, map(_happened, events)), *ordered, *others]
    kept = [*numbered, *sorted(rest, key=_order)[: MOST_MOMENTS - len(numbered)]]
    return tuple(
        TimelineEntry(m.step, cut(m.text, LONGEST_MOMENT), m.level, m.number) for m in sorted(kept, key=_order)
    )


def _order(moment: TimelineEntry) -> tuple[int, bool, int, str]:
    return (moment.step, moment.number == 0, moment.number, moment.text)


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """Return one finding for each kind and onset, the most severe."""
    worst: dict[tuple[str, int], Finding] = {}
    for finding in findings:
        known = worst.get((finding.kind, finding.onset_step))
        if known is None or finding.severity.rank > known.severity.rank:
            worst[finding.kind, finding.onset_step] = finding
    return list(worst.values())


def _happened(event: Event) -> TimelineEntry | None:
    if event.step is None:
        return None
    if event.kind == LOCALISED:
        message = event.body.get("message") or event.body.get("why_not")
        return TimelineEntry(event.step, f"gradient localised: {message}") if message else None
    if event.kind == SHED:
        return TimelineEntry(event.step, shed_lines([event])[0])
    if event.kind == STALLED:
        return TimelineEntry(event.step, f"stalled: {event.body.get('says', '')}", "warning")
    if event.kind == "exception":
        return TimelineEntry(event.step, f"training ended: {event.body.get('error', 'an exception')}", "critical")
    return TimelineEntry(event.step, EVENT_TEXTS[event.kind]) if event.kind in EVENT_TEXTS else None


def _command(command: Command) -> TimelineEntry:
    by = f" by {command.requested_by}" if command.requested_by else ""
    why = f" ({command.why})" if command.why else ""
    return TimelineEntry(command.finished_step or 0, f"command {command.kind}{by}: {command.status.value}{why}")


# Collects the content of a post-mortem, from a run in a store or from a replayed log.

MOST_CULPRITS = 40
"""Largest number of tokens that are shown: the newest localised steps first."""
MOST_COMPLETIONS = 4
"""Largest number of the best completions that are shown, and of the worst."""
ALTERNATIVES = 3
"""Largest number of alternative sets of metrics that are named for a detector."""
LONGEST_OPTION = 300
"""Largest number of characters of a value of the configuration."""


def facts_of_run(store: Store, run_id: str, *, now: float, status: str = "") -> RunSummary:
    """Collect the content of the post-mortem of a stored run.

    ``now``: Unix seconds. ``status``: status of the run, where the caller knows more than the stored state. Raises
    ``StoreError`` if the store cannot be read or has no such run.
    """
    run = store.run(run_id)
    names = store.metric_names(run_id)
    view = view_of_run(store, run)
    series = store.series(run_id, metrics_to_draw(names, run.source, view.findings))
    rows = timeline(
        view.explanation, view.findings, view.alerts, view.events, view.commands, recoveries=view.recoveries,
        notes=step_notes(store, run_id),
    )  # fmt: skip
    return RunSummary(
        title=run.name or run.run_id,
        status=status or run.state.value,
        head=_head(run, len(names)),
        headline=view.headline,
        verdict=view.verdict.text,
        diagnosis=view.explanation,
        timeline=rows,
        charts=charts(series, run.source, view.findings, attempt_starts(series.values())),
        culprits=_culprits(view.culprits),
        completions=tuple(best_and_worst(completion_rows(store.completions(run_id)), MOST_COMPLETIONS)),
        findings=view.findings,
        alerts=tuple(sorted(view.alerts, key=lambda alert: (alert.onset_step, alert.kind))),
        commands=tuple(sorted(view.commands, key=lambda command: command.created_at)),
        events=view.events,
        config=shown(run.config),
        missing=missing(view.metrics),
        made_at=moment(now),
    )


def facts_of_report(report: Report, imported: ImportedRun, *, now: float) -> RunSummary:
    """Collect the content of the post-mortem of a log from its replay.

    ``report``: result of the replay. ``imported``: the run as it was read. ``now``: Unix seconds.
    """
    source = imported.source
    names = sorted({name for record in imported.records for name in record.metrics})
    series = _series(imported, metrics_to_draw(names, source, report.findings))
    alarms = ", ".join(dict.fromkeys(f"{words(alarm.kind)} at step {step(alarm.step)}" for alarm in report.alarms))
    head = {
        "log": report.source,
        "run": report.run,
        "format": report.format,
        "trainer": source,
        "steps": step(report.steps),
        "metrics": f"{len(names)} ({len(report.metrics)} known)",
        "alarms": alarms or "none",
        "notes": "; ".join((*report.notes, *report.skipped)),
    }
    return RunSummary(
        title=report.run or report.source,
        status=report.view.verdict.name,
        head={label: text for label, text in head.items() if text},
        headline=report.view.headline,
        verdict=report.view.verdict.text,
        diagnosis=report.view.explanation,
        timeline=timeline(report.diagnosis, report.findings, (), (), (), recoveries=report.view.recoveries),
        charts=charts(series, source, report.findings, attempt_starts(series.values())),
        findings=report.findings,
        missing=missing(report.metrics),
        made_at=moment(now),
    )


def missing(metrics: Sequence[str] | set[str]) -> tuple[str, ...]:
    """Return a text for each detector that cannot run because metrics are missing; empty for a run without metrics.

    ``metrics``: canonical names of the logged metrics.
    """
    have = set(metrics)
    return tuple(
        f"{detector.name.replace('_', ' ')}: needs {_alternatives(detector.requires)}"
        for detector in registered()
        if have and lacks_metrics(detector, have)
    )


def _alternatives(requires: Sequence[Sequence[str]]) -> str:
    """Return a text with the first few sets of metrics that would be enough."""
    shown = " or ".join(" + ".join(needed) for needed in requires[:ALTERNATIVES])
    left = len(requires) - ALTERNATIVES
    return f"{shown}, or one of {left} others" if left > 1 else " or ".join(" + ".join(n) for n in requires)


def _head(run: RunInfo, metrics: int) -> dict[str, str]:
    head = {
        "run": run.run_id,
        "project": run.project,
        "trainer": run.source,
        "last step": step(run.last_step),
        "attempts": str(run.attempt),
        "started": moment(run.created_at),
        "last record": moment(run.last_ts),
        "end reason": run.state_reason,
        "host": run.host,
        "tags": ", ".join(run.tags),
        "metrics": str(metrics),
    }
    return {label: text for label, text in head.items() if text and text != "-"}


def _culprits(batches: Sequence[SpikeBatch]) -> tuple[Mapping[str, object], ...]:
    rows: list[Mapping[str, object]] = []
    for batch in sorted(batches, key=lambda batch: -batch.step):
        columns = {name: list(column) for name, column in batch.columns.items()}
        rows += [
            {"step": batch.step, **{n: _plain(column[i]) for n, column in columns.items()}} for i in range(len(batch))
        ]
    return tuple(rows[:MOST_CULPRITS])


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _series(imported: ImportedRun, names: Sequence[str]) -> dict[str, Series]:
    found = {}
    for name in names:
        rows = [(r.step, r.metrics[name], r.attempt, r.seq) for r in imported.records if name in r.metrics]
        steps, values, attempts, seqs = zip(*rows, strict=True) if rows else ((), (), (), ())
        found[name] = Series(
            name,
            np.array(steps, dtype=np.int64),
            np.array(values, dtype=np.float64),
            np.array(attempts, dtype=np.int64),
            np.array(seqs, dtype=np.int64),
        )
    return found


def shown(config: Mapping[str, JSON]) -> dict[str, str]:
    """Return the configuration as dotted option -> shortened text, without secrets.

    Secrets are removed once more because an older version may have recorded them.

    >>> shown({"optim": {"lr": 1e-6}, "hub_token": "hf_x", "hook": "https://u:pw@h/hooks/x"})
    {'hook': 'https://h/[redacted]', 'hub_token': '[redacted]', 'optim.lr': '1e-06'}
    """
    return {name: cut(text, LONGEST_OPTION) for name, text in options_of(config).items()}


def options_of(config: Mapping[str, JSON]) -> dict[str, str]:
    """Return the configuration as dotted option -> text of any length, sorted by name, without secrets."""
    return dict(sorted(_flat(recordable(config), "")))


def _flat(table: Mapping[str, JSON], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, _value(value)


def _value(value: JSON) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return cell(value)


# The tables of a post-mortem, as plain rows: HTML and Markdown show the same.

MOST_ROWS = 80
LONGEST_CELL = 300


@dataclass(frozen=True, slots=True)
class ReportTable:
    """One table of a post-mortem.

    ``headers``: titles; one that starts with ``>`` is of numbers. ``rows``: texts. ``left_out``: number of rows that
    are not shown. ``folded``: whether it is collapsed at first. ``note``: remark below it.
    """

    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    left_out: int = 0
    folded: bool = False
    note: str = ""


def _table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, folded: bool = False, note: str = ""
) -> ReportTable:
    shown = tuple(tuple(cut(text, LONGEST_CELL) for text in row) for row in rows[:MOST_ROWS])
    return ReportTable(tuple(headers), shown, max(0, len(rows) - MOST_ROWS), folded, note)


def findings_table(facts: RunSummary) -> ReportTable:
    """Return the table of a run's findings (detected problems), newest first."""
    rows = [_cells(FINDINGS, FINDINGS_SHOWN, finding) for finding in reversed(facts.findings)]
    return _table(heads(FINDINGS, FINDINGS_SHOWN), rows, folded=len(rows) > 12)


def alerts_table(facts: RunSummary) -> ReportTable:
    """Return the table of a run's alerts, in order of onset."""
    rows = [_cells(ALERTS, ALERTS_SHOWN, alert) for alert in facts.alerts]
    return _table(heads(ALERTS, ALERTS_SHOWN), rows)


ALERTS_SHOWN = ("severity", "kind", "state", "onset_step", "resolved_step", "message")
"""Columns of the table of alerts."""


def _cells(columns: Mapping[str, Column], names: Sequence[str], record: Finding | Alert) -> list[str]:
    values = {name: getattr(record, name) for name in names}
    return [words(values[n]) if columns[n].format is Format.KIND else text_of(columns[n], values[n]) for n in names]


def commands_table(facts: RunSummary) -> ReportTable:
    """Return the table of users' commands to a run, oldest first."""
    rows = [
        (moment(c.created_at), words(c.kind), c.status.value, step(c.finished_step), c.requested_by, c.why, c.result)
        for c in facts.commands
    ]
    return _table(("when", "command", "status", ">at step", "by", "why", "result"), rows)


CULPRIT_COLUMNS = {
    "step": ">step",
    "text": "token",
    "token_id": ">id",
    "share": ">share",
    "contribution": ">contribution",
    "cause": "cause",
    "why": "why",
    "advantage": ">advantage",
    "logp": ">log-prob",
    "rollout_logp": ">rollout log-prob",
    "entropy": ">entropy",
    "sequence": ">response",
    "position": ">position",
}


def culprits_table(facts: RunSummary) -> ReportTable:
    """Return the table of tokens found responsible for gradient spikes, newest step first."""
    columns = [name for name in CULPRIT_COLUMNS if any(name in row for row in facts.culprits)]
    rows = [[_quoted(row, name) for name in columns] for row in facts.culprits]
    note = "Share of the gradient norm of the step. Text is model output, shown verbatim."
    return _table([CULPRIT_COLUMNS[name] for name in columns], rows, note=note if rows else "")


def completions_table(facts: RunSummary) -> ReportTable:
    """Return the table of the best and the worst completions that were recorded, the best first."""
    rows = [
        (
            step(row["step"]),
            cell(row.get("reward")),
            " ".join(f"{name} {number(given)}" for name, given in reward_parts(row).items()),
            cell(row.get("length")),
            ", ".join(flags(row)),
            one_line(row.get("prompt", ""), MOST_TEXT),
            _ends(str(row.get("completion", ""))),
        )
        for row in facts.completions
    ]
    note = "Recorded completions, by reward. Text is model output, shown verbatim."
    headers = (">step", ">reward", "by reward function", ">tokens", "odd", "prompt", "completion")
    return _table(headers, rows, note=note if rows else "")


MOST_TEXT = 120
"""Number of characters of a prompt, and of the beginning and of the end of a completion."""


def _ends(text: str) -> str:
    """Return a text on one line, cut in the middle: its end holds the answer."""
    whole = " ".join(text.split())
    return whole if len(whole) <= 2 * MOST_TEXT else f"{whole[:MOST_TEXT]} … {whole[-MOST_TEXT:]}"


def _quoted(row: Mapping[str, JSON], name: str) -> str:
    value = row.get(name)
    if name == "text" and value is not None:
        return f"“{cut(str(value), 60)}”"
    if name == "share" and isinstance(value, float):
        return percent(value)
    return cell(value)


def config_table(facts: RunSummary) -> ReportTable:
    """Return the table of a run's configuration: dotted option and value, without secrets, at most 400 rows."""
    rows = list(facts.config.items())
    return ReportTable(("option", "value"), tuple(rows[:400]), max(0, len(rows) - 400), folded=True)


TABLES: Mapping[str, Callable[[RunSummary], ReportTable]] = {
    "Culprit tokens": culprits_table,
    "Best and worst completions": completions_table,
    "Findings": findings_table,
    "Alerts": alerts_table,
    "Commands": commands_table,
    "Configuration": config_table,
}
