"""The one view of a run: verdict, cause, advice, findings, forecast, what was done and what could not be judged.

Every face (terminal, JSON, report, dashboard, alerts) renders a :class:`RunView`, whether the run is stored, live, or a
log that was replayed: all of them say the same of it. Outside the monitor, which diagnoses while a run goes on, nobody
else calls :func:`~rlwatch.diagnosis.diagnose`: its answer depends on how coarsely the run was logged and where its
attempts began, so that two callers who knew different things would disagree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlwatch.detectors.base import NotRun, not_run
from rlwatch.detectors.registry import REGISTRY
from rlwatch.diagnosis import (
    TRACKED,
    Action,
    Cause,
    Diagnosis,
    KnobTracker,
    Sureness,
    Turn,
    config_turns,
    diagnose,
    row_steps,
)
from rlwatch.diagnosis.signs import on_branch
from rlwatch.metrics import canonicalise, foremost, known, resolve, unread
from rlwatch.ports import Store
from rlwatch.records import (
    CULPRITS,
    JSON,
    Alert,
    Command,
    Event,
    Finding,
    ForecastRecord,
    RunInfo,
    Severity,
    SpikeBatch,
    StepRecord,
)
from rlwatch.wording import one_line, step, words

if TYPE_CHECKING:
    from rlwatch.forecast import Forecast

NAMED = 3
"""Kinds of findings that a verdict names."""
NAMES_TOLD = 6
"""Names that nothing reads, of which a verdict tells."""
MATTERS: Mapping[str, frozenset[str]] = {
    "reward": frozenset({"reward/mean"}),
    "entropy": frozenset({"policy/entropy"}),
    "KL": frozenset({"policy/kl_ref", "policy/kl_ref_k1", "policy/kl_ref_k2", "policy/kl_ref_k3", "policy/kl_old"}),
}
"""Facts without any of which a failure of training cannot be seen, and the metrics that tell them."""
LONGEST = 300
"""Characters of names in a verdict: a log may call its metrics anything."""
CULPRIT_BATCHES = 8
"""The newest localised steps of which tokens are shown."""
LEVELS: Mapping[Severity | None, str] = {
    Severity.CRITICAL: "CRITICAL",
    Severity.WARNING: "WARNING",
    Severity.INFO: "OK",
    None: "OK",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of a run in one line.

    ``level``: the worst severity observed and not run again since; None: nothing. ``missing``: what matters and nothing
    tells (see :data:`MATTERS`).
    """

    level: Severity | None
    text: str
    missing: tuple[str, ...] = ()

    @property
    def judged(self) -> bool:
        """False where nothing that matters is told: then that nothing was found says nothing."""
        return len(self.missing) < len(MATTERS)

    @property
    def bad(self) -> bool:
        """Worse than a remark."""
        return self.level in (Severity.WARNING, Severity.CRITICAL)

    def to_dict(self) -> dict[str, JSON]:
        """Plain values."""
        level = None if self.level is None else self.level.value
        return {"level": level, "text": self.text, "judged": self.judged, "missing": list(self.missing)}


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as every face shows it.

    Parameters
    ----------
    steps
        Attempt -> the steps it has records of.
    metrics
        Canonical names of what it logs, sorted.
    unread
        Names of what it logs that are no metric of ours.
    findings, events, forecasts, alerts, commands
        In order of arrival; a log that was replayed has neither alerts nor commands.
    culprits
        Tokens that localisation blames, the newest step first.
    not_judged
        Detectors, and the forecaster, that lacked their metrics.
    """

    run_id: str
    name: str = ""
    source: str = ""
    steps: Mapping[int, Sequence[int]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    forecasts: tuple[ForecastRecord, ...] = ()
    events: tuple[Event, ...] = ()
    alerts: tuple[Alert, ...] = ()
    commands: tuple[Command, ...] = ()
    culprits: tuple[SpikeBatch, ...] = ()
    not_judged: tuple[NotRun, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst that was found on the branch that counts, by kind and onset."""
        return verdict_of(self.findings, self.steps, self.metrics, self.unread)

    @property
    def cause(self) -> Cause | None:
        """The likeliest cause, where one is at least plausible."""
        return self.diagnosis.causes[0] if self.diagnosis.enough else None

    @property
    def sureness(self) -> Sureness | None:
        """Sureness of the cause."""
        return None if self.cause is None else self.cause.sure

    @property
    def onset_step(self) -> int | None:
        """The step at which the cause began, looking back."""
        return None if self.cause is None else self.cause.onset_step

    @property
    def advice(self) -> tuple[Action, ...]:
        """Actions against the cause, in order."""
        return () if self.cause is None else self.cause.actions

    @property
    def forecast(self) -> Forecast | None:
        """The newest; it may be without a number, and then says why."""
        from rlwatch.forecast.forecast import forecast_of

        return forecast_of(self.forecasts[-1]) if self.forecasts else None


def view_of_run(store: Store, run: RunInfo) -> RunView:
    """A stored run. Raises ``StoreError`` where it cannot be read."""
    run_id = run.run_id
    names, steps = store.metric_names(run_id), store.steps(run_id)
    metrics = tuple(sorted(known(names, run.source)))
    findings, events = tuple(store.findings(run_id)), tuple(store.events(run_id))
    culprits = store.spikes(run_id, last=CULPRIT_BATCHES, reason=CULPRITS)
    return RunView(
        run_id=run_id,
        name=run.name,
        source=run.source,
        steps=steps,
        metrics=metrics,
        unread=tuple(unread(names, run.source)),
        findings=findings,
        diagnosis=diagnosis_of(
            findings,
            steps,
            events=events,
            source=run.source,
            metrics=metrics,
            knobs=stored_knobs(store, run, names) if failed(findings) else None,
        ),
        forecasts=tuple(store.forecasts(run_id)),
        events=events,
        alerts=tuple(store.alerts(run_id)),
        commands=tuple(store.commands(run_id)),
        culprits=tuple(sorted(culprits, key=lambda batch: -batch.step)),
        not_judged=tuple(not_run(REGISTRY, frozenset(metrics))) if metrics else (),
    )


def stored_diagnosis(store: Store, run: RunInfo, *, at: int | None = None) -> Diagnosis:
    """Diagnose the findings of a stored run, up to the step ``at``. Raises ``StoreError``."""
    findings = store.findings(run.run_id)
    if not findings:
        return Diagnosis(why_not="nothing was found", at_step=at)
    names = store.metric_names(run.run_id)
    return diagnosis_of(
        findings,
        store.steps(run.run_id),
        events=store.events(run.run_id),
        source=run.source,
        metrics=known(names, run.source),
        knobs=stored_knobs(store, run, names) if failed(findings) else None,
        at=at,
    )


def stored_verdict(store: Store, run: RunInfo) -> Verdict:
    """The verdict on a stored run, without the rest of its view. Raises ``StoreError``."""
    findings = store.findings(run.run_id)
    again = findings and run.attempt > 1
    names = store.metric_names(run.run_id)
    steps = store.steps(run.run_id) if again else {}
    return verdict_of(findings, steps, known(names, run.source), unread(names, run.source))


def diagnosis_of(
    findings: Sequence[Finding],
    steps: Mapping[int, Sequence[int]],
    *,
    events: Iterable[Event] = (),
    source: str = "",
    metrics: Iterable[str] = (),
    knobs: KnobRows | None = None,
    at: int | None = None,
) -> Diagnosis:
    """Diagnose ``findings`` of a run that has records of ``steps`` (by attempt), and of its ``knobs`` what is known."""
    reached = {attempt: [s for s in own if at is None or s <= at] for attempt, own in steps.items()}
    return diagnose(
        findings,
        events=events,
        source=source,
        at=at,
        row_steps=row_steps(sorted({s for own in reached.values() for s in own})),
        measured=frozenset(metrics),
        starts=_starts(reached),
        turns=() if knobs is None else knobs.turns(_starts(reached), source, _until(findings, at)),
    )


def _until(findings: Sequence[Finding], at: int | None) -> int:
    """The last step that matters: what was done after the last finding has caused none."""
    last = max((finding.step for finding in findings), default=0)
    return last if at is None else min(at, last)


# The rows that tell of knobs, of a store and of a log alike.

MOST_ROWS = 20_000
"""Rows looked at: the newest before the last finding."""


@dataclass(frozen=True, slots=True)
class KnobRows:
    """Rows as they were logged, of the metrics that tell of knobs, and the configurations of the attempts.

    ``rows``: (attempt, step) -> source name -> value, the last one logged.
    """

    rows: Mapping[tuple[int, int], Mapping[str, float]]
    configs: Mapping[int, Mapping[str, JSON]] = field(default_factory=dict)

    def turns(self, starts: Mapping[int, int], source: str, until: int) -> list[Turn]:
        """Knobs that were turned on the branch that counts, up to the step ``until``."""
        tracker = KnobTracker()
        for attempt, step_ in sorted(place for place in self.rows if place[1] <= until)[-MOST_ROWS:]:
            if all(step_ < start for other, start in starts.items() if other > attempt):
                row = dict(sorted(self.rows[attempt, step_].items()))
                tracker.update(step_, canonicalise(row, source)[0])
        return [*tracker.turns, *config_turns(self.configs, starts)]


def failed(findings: Iterable[Finding]) -> bool:
    """True where more than remarks was found: then knobs are asked for."""
    return any(finding.severity is not Severity.INFO for finding in findings)


def knob_names(names: Iterable[str], source: str) -> list[str]:
    """Those of ``names`` (as logged) that tell of knobs."""
    read = ((name, resolve(name, source)) for name in names)
    return [name for name, reading in read if reading is not None and reading.metric.name in TRACKED]


def stored_knobs(store: Store, run: RunInfo, names: Iterable[str]) -> KnobRows:
    """Rows of a stored run, which logs ``names``, that tell of its knobs. Raises ``StoreError``."""
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for name, series in store.series(run.run_id, knob_names(names, run.source)).items():
        places = zip(series.attempts.tolist(), series.steps.tolist(), strict=True)
        for place, value in zip(places, series.values.tolist(), strict=True):
            rows.setdefault(place, {})[name] = value
    return KnobRows(rows, store.configs(run.run_id))


def logged_knobs(records: Iterable[StepRecord], names: Iterable[str], source: str) -> KnobRows:
    """The same of a log that was read."""
    wanted = knob_names(names, source)
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for record in records:
        found = {name: record.metrics[name] for name in wanted if name in record.metrics}
        if found:
            rows.setdefault((record.attempt, record.step), {}).update(found)
    return KnobRows(rows)


def verdict_of(
    findings: Iterable[Finding],
    steps: Mapping[int, Sequence[int]],
    metrics: Collection[str] = (),
    unread_names: Collection[str] = (),
) -> Verdict:
    """The worst of ``findings``, each kind with its first onset; what a later attempt ran again no longer counts.

    ``metrics`` and ``unread_names``: what the run logs, known and not. Where none of the known ones matters the verdict
    is that nothing was judged, not that nothing was found.

    >>> verdict_of([Finding("d", "kl_drift", Severity.WARNING, 40, 31, "")], {1: range(50)}).text
    'WARNING: drift from the reference from step 31'
    """
    judged = list(findings)
    held = on_branch(judged, _starts(steps))
    level = max((finding.severity for finding in held), key=lambda severity: severity.rank, default=None)
    onsets: dict[str, int] = {}
    for finding in sorted(held, key=lambda finding: finding.onset_step):
        if finding.severity is level:
            onsets.setdefault(finding.kind, finding.onset_step)
    undone = "" if len(held) == len(judged) else "; what was found in steps that were run again is left out"
    missing = _missing(metrics) if metrics or unread_names else ()
    if level in (None, Severity.INFO):
        if len(missing) == len(MATTERS):
            return Verdict(level, f"NOT JUDGED: {_gap(missing, unread_names)}", missing)
        remarks = f"; remarks: {_named(onsets)}" if onsets else ""
        return Verdict(level, f"{LEVELS[level]}: no failure was found{remarks}{undone}", missing)
    beside = f"; beyond that not judged: {_gap(missing, unread_names)}" if len(missing) == len(MATTERS) else ""
    return Verdict(level, f"{LEVELS[level]}: {_named(onsets)}{undone}{beside}", missing)


def _missing(metrics: Collection[str]) -> tuple[str, ...]:
    return tuple(fact for fact, telling in MATTERS.items() if telling.isdisjoint(metrics))


def _gap(missing: Sequence[str], unread_names: Collection[str]) -> str:
    """Facts that are not known, and the names that may be them."""
    names = foremost(unread_names)
    more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
    told = f"; unknown names: {one_line(', '.join(names[:NAMES_TOLD]), LONGEST)}{more}" if names else ""
    return f"no {', '.join(missing[:-1])} or {missing[-1]} is known{told}"


def _named(onsets: Mapping[str, int]) -> str:
    more = len(onsets) - NAMED
    parts = [f"{words(kind)} from step {step(onset)}" for kind, onset in list(onsets.items())[:NAMED]]
    return ", ".join(parts) + (f", and {more} more" if more > 0 else "")


def _starts(steps: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """The first step of each attempt."""
    return {attempt: min(own) for attempt, own in steps.items() if own}
