"""Collects what a post-mortem tells: of a run in a store, or of a log that was replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlwatch.detectors.registry import REGISTRY
from rlwatch.diagnosis import diagnose
from rlwatch.metrics import known
from rlwatch.ports import Series, Store
from rlwatch.records import CULPRITS, JSON, RunInfo, SpikeBatch
from rlwatch.redaction import recordable
from rlwatch.report.charting import attempt_starts, charts, wanted
from rlwatch.report.facts import Facts
from rlwatch.report.timeline import timeline
from rlwatch.report.words import cell, cut, moment, step, words

if TYPE_CHECKING:
    from rlwatch.importers.base import ImportedRun
    from rlwatch.scanner import Report

MOST_CULPRITS = 40
"""Tokens shown: the newest localised steps first."""
MOST_BATCHES = 8
ALTERNATIVES = 3
"""Ways to feed a detector that are named."""
LONGEST = 300
"""Characters of a value of the configuration."""


def facts_of_run(store: Store, run_id: str, *, now: float, status: str = "") -> Facts:
    """The story of a run in a store. ``now``: Unix seconds; ``status``: how the run is, where the caller knows better.

    Raises ``StoreError`` if the store cannot be read or has no such run.
    """
    run = store.run(run_id)
    names = store.metric_names(run_id)
    findings, events = store.findings(run_id), store.events(run_id)
    alerts, commands = store.alerts(run_id), store.commands(run_id)
    metrics = known(names, run.source)
    said = diagnose(findings, events=events, source=run.source, measured=metrics)
    series = store.series(run_id, wanted(names, run.source, findings))
    rows = timeline(said, findings, alerts, events, commands)
    return Facts(
        title=run.name or run.run_id,
        status=status or run.state.value,
        head=_head(run, len(names)),
        diagnosis=said,
        timeline=rows,
        charts=charts(series, run.source, findings, attempt_starts(series.values())),
        culprits=_culprits(store.spikes(run_id, last=MOST_BATCHES, reason=CULPRITS)),
        findings=tuple(findings),
        alerts=tuple(sorted(alerts, key=lambda alert: (alert.onset_step, alert.kind))),
        commands=tuple(sorted(commands, key=lambda command: command.created_at)),
        events=tuple(events),
        config=shown(run.config),
        missing=missing(metrics),
        made_at=moment(now),
    )


def facts_of_report(report: Report, imported: ImportedRun, *, now: float) -> Facts:
    """The story of a log, from its replay."""
    source = imported.source
    names = sorted({name for record in imported.records for name in record.metrics})
    series = _series(imported, wanted(names, source, report.findings))
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
    return Facts(
        title=report.run or report.source,
        status="no critical alarm" if report.ok else "critical alarm",
        head={label: text for label, text in head.items() if text},
        diagnosis=report.diagnosis,
        timeline=timeline(report.diagnosis, report.findings, (), (), ()),
        charts=charts(series, source, report.findings, attempt_starts(series.values())),
        findings=report.findings,
        missing=missing(report.metrics),
        made_at=moment(now),
    )


def missing(metrics: Sequence[str] | set[str]) -> tuple[str, ...]:
    """Detectors that lack their metrics, and what they would need; none of a run that has not begun."""
    have = set(metrics)
    return tuple(
        f"{detector.name.replace('_', ' ')}: needs {_alternatives(detector.requires)}"
        for detector in REGISTRY
        if have and not any(all(_has(have, name) for name in needed) for needed in detector.requires)
    )


def _alternatives(requires: Sequence[Sequence[str]]) -> str:
    """The first few."""
    shown = " or ".join(" + ".join(needed) for needed in requires[:ALTERNATIVES])
    left = len(requires) - ALTERNATIVES
    return f"{shown}, or one of {left} others" if left > 1 else " or ".join(" + ".join(n) for n in requires)


def _has(have: set[str], name: str) -> bool:
    """A name that ends in a slash stands for any metric of that open family."""
    return name in have or (name.endswith("/") and any(metric.startswith(name) for metric in have))


def _head(run: RunInfo, metrics: int) -> dict[str, str]:
    head = {
        "run": run.run_id,
        "project": run.project,
        "trainer": run.source,
        "last step": step(run.last_step),
        "attempts": str(run.attempt),
        "started": moment(run.created_at),
        "last record": moment(run.last_ts),
        "why ended": run.state_reason,
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
    """The configuration with dotted names, once more without secrets: an older version may have recorded it.

    >>> shown({"optim": {"lr": 1e-6}, "hub_token": "hf_x", "hook": "https://u:pw@h/hooks/x"})
    {'hook': 'https://h/[redacted]', 'hub_token': '[redacted]', 'optim.lr': '1e-06'}
    """
    return {name: cut(text, LONGEST) for name, text in sorted(_flat(recordable(config), ""))}


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
