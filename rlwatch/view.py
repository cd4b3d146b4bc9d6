"""The one view of a run: state, headline, cause, advice, findings, forecast, actions, and what could not be judged.

Every interface (terminal, JSON, report, dashboard, alerts) renders a :class:`RunView`, whether the run is stored, live,
or replayed from a log. State and headline come from :mod:`rlwatch.state`. Only the monitor, which diagnoses live runs,
calls :func:`~rlwatch.diagnosis.diagnose` as well: its result depends on the cadence of the log and the beginnings of
attempts, so two callers with different knowledge would disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlwatch.detectors.index import NotRun, not_run
from rlwatch.detectors.registry import registered
from rlwatch.diagnosis import (
    AROUND,
    GAP_METRICS,
    GAP_SHAPE,
    TRACKED,
    Action,
    Cause,
    Confidence,
    Diagnosis,
    KnobChange,
    KnobTracker,
    config_turns,
    diagnose,
    row_steps,
)
from rlwatch.metrics import canonicalise, known, resolve, unread
from rlwatch.ports import Store
from rlwatch.records import (
    CULPRITS,
    JSON,
    SHED,
    SNAPSHOTS,
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
from rlwatch.state import (
    LEAST_STEPS,
    End,
    Ending,
    State,
    Verdict,
    arrival,
    ending_of,
    explained,
    forecast_allowed,
    headline_of,
    starts_of_attempts,
    verdict_of,
)
from rlwatch.wording import one_line, step

if TYPE_CHECKING:
    from rlwatch.forecast import Forecast

CULPRIT_BATCHES = 8
"""Number of localised steps, the newest ones, of which tokens are shown."""


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything that an interface shows about one run.

    Parameters
    ----------
    run_id, name, source
        Id, name and trainer of the run.
    steps
        Attempt (process of the run) -> the steps of its rows.
    metrics
        Canonical names of the logged metrics, sorted.
    unread
        Logged names that rlwatch does not read.
    findings, events, forecasts, alerts, commands
        In order of arrival; a log that was replayed has neither alerts nor commands.
    recoveries
        Findings that eased or ended.
    diagnosis
        Likely causes of the findings, ranked.
    ending
        How the run ended, if it did.
    since_s
        Seconds since its collapse, if the run goes on.
    unjudged_from
        First step whose rows were not searched for failures yet; None: all were.
    culprits
        Tokens that gradient localisation found responsible for spikes, the newest step first.
    not_judged
        Detectors, and the forecaster, that could not run because metrics are missing.
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
    recoveries: tuple[Finding, ...] = ()
    ending: Ending = field(default_factory=Ending)
    since_s: float | None = None
    unjudged_from: int | None = None

    @property
    def verdict(self) -> Verdict:
        """State of the run with its sentence, by its ending and those findings that later attempts did
        not run again.
        """
        return verdict_of(
            self.all_findings,
            self.steps,
            self.metrics,
            self.unread,
            self.ending,
            count=len(set().union(*self.steps.values())),
            since_s=self.since_s,
            unjudged_from=self.unjudged_from,
        )

    @property
    def headline(self) -> str:
        """One sentence about the run: its state, step, what broke, the cause if there is one, and the next action."""
        return headline_of(self.verdict, self.explanation)

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Findings and recoveries together, in order of arrival."""
        return tuple(sorted((*self.findings, *self.recoveries), key=arrival))

    @property
    def explanation(self) -> Diagnosis:
        """Diagnosis that may be shown with the state of the run: see :func:`rlwatch.state.explained`."""
        return explained(self.diagnosis, self.verdict)

    @property
    def cause(self) -> Cause | None:
        """Likeliest cause of the findings, where one is at least plausible and fits the state of the run; else None."""
        return self.explanation.causes[0] if self.explanation.enough else None

    @property
    def sureness(self) -> Confidence | None:
        """Confidence in the likeliest cause; None where no cause is named."""
        return None if self.cause is None else self.cause.sure

    @property
    def onset_step(self) -> int | None:
        """Step at which the likeliest cause began, in retrospect; None where no cause is named."""
        return None if self.cause is None else self.cause.onset_step

    @property
    def advice(self) -> tuple[Action, ...]:
        """Actions against the likeliest cause, in order; empty where no cause is named."""
        return () if self.cause is None else self.cause.actions

    @property
    def shed(self) -> tuple[str, ...]:
        """One sentence for each kind of data of the run that was dropped for lack of space."""
        return shed_lines(self.events)

    @property
    def forecast(self) -> Forecast | None:
        """Newest forecast of a run that goes on and has not failed; else None. A forecast without a number has a
        reason.
        """
        from rlwatch.forecast.forecast import forecast_of

        return forecast_of(self.forecasts[-1]) if self.forecasts and forecast_allowed(self.verdict) else None


def shed_lines(events: Iterable[Event]) -> tuple[str, ...]:
    """Return one sentence for each kind of data that ``events`` report as dropped, with the newest reason.

    >>> body = {"what": "token records", "n": 12031, "first_step": 120, "last_step": 300, "why": "the disk is full"}
    >>> shed_lines([Event("shed", 300, body)])
    ('12,031 token records were shed between step 120 and 300, because the disk is full',)
    """
    sums: dict[str, tuple[int, int, int, str]] = {}
    for event in events:
        if event.kind != SHED:
            continue
        n, first, last = (int(event.body.get(name) or 0) for name in ("n", "first_step", "last_step"))
        what, why = str(event.body.get("what", "records")), str(event.body.get("why", "there was no room"))
        if what in sums:
            n, first, last = n + sums[what][0], min(first, sums[what][1]), max(last, sums[what][2])
        sums[what] = (n, first, last, why)
    return tuple(
        f"{n:,} {what} were shed between step {step(first)} and {step(last)}, because {one_line(why, most=300)}"
        for what, (n, first, last, why) in sums.items()
    )


def view_of_run(store: Store, run: RunInfo, *, gone: bool = False) -> RunView:
    """Read everything that interfaces show about a stored run.

    ``gone``: its recorded state is running, but its process must be dead (no heartbeat). Raises ``StoreError`` if the
    run cannot be read.
    """
    run_id = run.run_id
    names, steps = store.metric_names(run_id), store.steps(run_id)
    metrics = tuple(sorted(known(names, run.source)))
    findings, events = tuple(store.findings(run_id)), tuple(store.events(run_id))
    recoveries = tuple(store.recoveries(run_id))
    culprits = store.spikes(run_id, last=CULPRIT_BATCHES, reason=CULPRITS)
    ending = ending_of(run, gone=gone)
    verdict = verdict_of((*findings, *recoveries), steps, ending=ending)
    read = names_to_read(names, findings, run.source)
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
            knobs=None if read is None else stored_knobs(store, run, read),
        ),
        forecasts=tuple(store.forecasts(run_id)),
        events=events,
        alerts=tuple(store.alerts(run_id)),
        commands=tuple(store.commands(run_id)),
        culprits=tuple(sorted(culprits, key=lambda batch: -batch.step)),
        not_judged=tuple(not_run(registered(), frozenset(metrics))) if metrics else (),
        recoveries=recoveries,
        ending=ending,
        since_s=_seconds_since(store, run, verdict) if verdict.state is State.COLLAPSED and verdict.ongoing else None,
        unjudged_from=unjudged_from(store, run, ending),
    )


def stored_diagnosis(store: Store, run: RunInfo, *, at: int | None = None) -> Diagnosis:
    """Return the likely causes of a stored run's findings that may be shown with its state, as of the step ``at``
    (None: now).

    Raises ``StoreError`` if the run cannot be read.
    """
    return stored_explanation(store, run, at=at)[1]


def stored_explanation(
    store: Store, run: RunInfo, *, at: int | None = None, gone: bool = False
) -> tuple[Verdict, Diagnosis]:
    """Return the state of a stored run and the diagnosis that may be shown with it, faster than the whole view.

    ``at``: as the run was at that step, when it went on; None: as it is now. ``gone``: its process must be dead (no
    heartbeat). Raises ``StoreError`` if the run cannot be read.
    """
    if at is None:
        verdict = stored_verdict(store, run, gone=gone)
    else:
        findings_then = [f for f in (*store.findings(run.run_id), *store.recoveries(run.run_id)) if f.step <= at]
        verdict = verdict_of(findings_then, store.spans(run.run_id), ending=Ending(End.GOES_ON, at))
    findings = store.findings(run.run_id)
    names = store.metric_names(run.run_id)
    read = names_to_read(names, findings, run.source)
    if not findings and read is None:
        return verdict, Diagnosis(why_not="nothing was found", at_step=at)
    diagnosis = diagnosis_of(
        findings,
        store.steps(run.run_id),
        events=store.events(run.run_id),
        source=run.source,
        metrics=known(names, run.source),
        knobs=None if read is None else stored_knobs(store, run, read),
        at=at,
    )
    return verdict, explained(diagnosis, verdict)


def stored_verdict(store: Store, run: RunInfo, *, gone: bool = False) -> Verdict:
    """Return the state of a stored run, faster than the whole view.

    ``gone``: its process must be dead (no heartbeat). Raises ``StoreError`` if the run cannot be read.
    """
    findings = store.findings(run.run_id)
    troubled = failed(findings)
    names = store.metric_names(run.run_id)
    ending = ending_of(run, gone=gone)
    waits = unjudged_from(store, run, ending)
    needed = waits is not None or (findings and (run.attempt > 1 or troubled))
    steps = store.spans(run.run_id) if needed else {}  # ends of each will do
    reported = (*findings, *store.recoveries(run.run_id)) if troubled else findings
    verdict = verdict_of(
        reported,
        steps,
        known(names, run.source),
        unread(names, run.source),
        ending,
        count=_few_steps(store, run.run_id),
        unjudged_from=waits,
    )
    if verdict.state is not State.COLLAPSED or not verdict.ongoing:
        return verdict
    return verdict_of(
        reported,
        steps,
        known(names, run.source),
        unread(names, run.source),
        ending,
        since_s=_seconds_since(store, run, verdict),
        unjudged_from=waits,
    )


WAITING_STEPS, WAITING_S = 10, 5.0
"""Newest steps of a live run that may wait to be judged (its open step, and those that are stored and judged together),
and the seconds before its newest row in which more may.
"""


def unjudged_from(store: Store, run: RunInfo, ending: Ending) -> int | None:
    """Return the first step of a run whose rows wait to be searched for failures; None if none does.

    In a run that goes on the newest steps always wait for a moment. Raises ``StoreError`` if the run cannot be read.
    """
    judged, last = store.judged(run.run_id)
    if judged >= last:
        return None
    if judged == 0 and judged_at_import(store, run):
        return None
    rows = store.records(run.run_id, after_seq=judged, limit=AT_A_LOOK)
    steps = {row.step for row in rows}
    few = len(steps) <= WAITING_STEPS and (len(rows) < AT_A_LOOK or run.last_step in steps)  # all ranks' of one step
    if not rows or (ending.how is End.GOES_ON and (few or (run.last_ts or 0.0) - rows[0].ts <= WAITING_S)):
        return None
    return min(steps)


def judged_at_import(store: Store, run: RunInfo) -> bool:
    """Return whether the rows of a run, which has no position up to which it is judged, were judged by an import.

    Earlier versions stored findings and forecasts of an imported log without that position.
    """
    return run.imported and bool(store.forecasts(run.run_id, last=1) or store.findings(run.run_id))


AT_A_LOOK = 64
"""Rows that are read to see how many wait."""


def _few_steps(store: Store, run_id: str) -> int | None:
    """Return the number of steps of a run that may have too few to be judged; None where it has enough."""
    newest = {record.step for record in store.records(run_id, last=2 * LEAST_STEPS)}
    if len(newest) >= LEAST_STEPS:
        return None
    return len(set().union(*store.steps(run_id).values()))


def _seconds_since(store: Store, run: RunInfo, verdict: Verdict) -> float | None:
    """Return the seconds from the collapse to the last row, by the run's own clock; None where it is not known."""
    moments = store.moments(run.run_id)
    times = [ts for at, ts in zip(moments.steps.tolist(), moments.values.tolist(), strict=True) if at >= verdict.at]
    return max(times) - min(times) if times and min(times) > 0 else None


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
    """Return the likely causes of the ``findings`` of a run.

    Parameters
    ----------
    findings
        Findings of the run.
    steps
        Attempt (process of the run) -> the steps of its rows.
    events
        Events of the run; an event of :data:`rlwatch.records.SNAPSHOTS` makes a rollback possible.
    source
        The trainer.
    metrics
        Canonical names of the logged metrics.
    knobs
        Logged values of settings such as the learning rate, whose changes may be causes; None: not known.
    at
        Step as of which the diagnosis is made; None: the end.
    """
    reached = {attempt: [s for s in own if at is None or s <= at] for attempt, own in steps.items()}
    all_events = tuple(events)
    found = diagnose(
        findings,
        events=all_events,
        source=source,
        at=at,
        row_steps=row_steps(sorted({s for own in reached.values() for s in own})),
        measured=frozenset(metrics),
        starts=starts_of_attempts(reached),
        turns=()
        if knobs is None
        else knobs.turns(starts_of_attempts(reached), source, _until(findings, at), at, whole_gap=not failed(findings)),
    )
    return with_way_back(found, kept=any(event.kind == SNAPSHOTS for event in all_events))


ROLL_BACK, OURS = "roll-back", "rlwatch"
"""The action that goes back, and the option that names our own command for it."""
WAY_BACK = "rlwatch command RUN rollback"


def with_way_back(diagnosis: Diagnosis, *, kept: bool) -> Diagnosis:
    """Return ``diagnosis`` with the command ``rollback`` in its advice where the run keeps snapshots, else without.

    ``kept``: whether it keeps snapshots.
    """

    def fitting(action: Action) -> Action:
        if action.id != ROLL_BACK or OURS not in action.options:
            return action
        options = {name: text for name, text in action.options.items() if name != OURS or kept}
        return replace(action, options=options | ({OURS: WAY_BACK} if kept else {}))

    causes = tuple(replace(cause, actions=tuple(map(fitting, cause.actions))) for cause in diagnosis.causes)
    return diagnosis if causes == diagnosis.causes else replace(diagnosis, causes=causes)


def _until(findings: Sequence[Finding], at: int | None) -> int:
    """Return the last step that matters: a change of a setting after the last finding caused none."""
    last = max((finding.step for finding in findings), default=0)
    return last if at is None else min(at, last)


# The rows that show changes of settings, from a store or a log.

MOST_ROWS = 20_000
"""Largest number of rows that are read: the newest before the last finding."""


@dataclass(frozen=True, slots=True)
class KnobRows:
    """Logged values of settings (learning rate, KL coefficient ...) and the configurations of the attempts.

    ``rows``: (attempt, step) -> logged name -> value, the last one logged. ``configs``: attempt -> configuration.
    """

    rows: Mapping[tuple[int, int], Mapping[str, float]]
    configs: Mapping[int, Mapping[str, JSON]] = field(default_factory=dict)

    def turns(
        self,
        starts: Mapping[int, int],
        source: str,
        until: int,
        at: int | None = None,
        *,
        whole_gap: bool = False,
    ) -> list[KnobChange]:
        """Return the changes of settings up to the step ``until``, and shown causes of a mismatch between trainer and
        engine.

        A mismatch may show its cause only after the last finding, so its rows are read further, but not beyond ``at``.

        Parameters
        ----------
        starts
            Attempt -> its first step; steps that a later attempt ran again do not count.
        source
            The trainer.
        until
            Step of the last finding.
        at
            Step as of which the run is diagnosed; None: the end.
        whole_gap
            Whether to read the gap between trainer and engine to the end, for a run without a finding that dates it.
        """
        tracker, last = KnobTracker(), math.inf if whole_gap else until + AROUND
        last = last if at is None else min(at, last)
        for attempt, step_ in sorted(place for place in self.rows if place[1] <= last)[-MOST_ROWS:]:
            if all(step_ < start for other, start in starts.items() if other > attempt):
                row = canonicalise(dict(sorted(self.rows[attempt, step_].items())), source)[0]
                if step_ <= until:
                    tracker.update(step_, row)
                else:
                    tracker.follow_gap(step_, row)
        return [*tracker.turns, *config_turns(self.configs, starts)]


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether any finding is a warning or critical; only then changes of settings are looked up."""
    return any(finding.severity is not Severity.INFO for finding in findings)


def names_to_read(names: Iterable[str], findings: Iterable[Finding], source: str) -> list[str] | None:
    """Return those of the logged ``names`` whose series a diagnosis of the ``findings`` reads; None if it reads none.

    If the run has failed, these are all. Otherwise they are the metrics of the gap between trainer and rollout engine,
    if its shape is logged.
    """
    if failed(findings):
        return list(names)
    read = {name: reading.metric.name for name in names if (reading := resolve(name, source)) is not None}
    return [name for name, metric in read.items() if metric in GAP_METRICS] if GAP_SHAPE in read.values() else None


def knob_names(names: Iterable[str], source: str) -> list[str]:
    """Return those of the logged ``names`` whose metric is a setting, such as the learning rate. ``source``: the
    trainer.
    """
    read = ((name, resolve(name, source)) for name in names)
    return [name for name, reading in read if reading is not None and reading.metric.name in TRACKED]


def stored_knobs(store: Store, run: RunInfo, names: Iterable[str]) -> KnobRows:
    """Read the logged values of settings of a stored run, and its configurations.

    ``names``: all logged names of the run. Raises ``StoreError``.
    """
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for name, series in store.series(run.run_id, knob_names(names, run.source)).items():
        places = zip(series.attempts.tolist(), series.steps.tolist(), strict=True)
        for place, value in zip(places, series.values.tolist(), strict=True):
            rows.setdefault(place, {})[name] = value
    return KnobRows(rows, store.configs(run.run_id))


def logged_knobs(records: Iterable[StepRecord], names: Iterable[str], source: str) -> KnobRows:
    """Return the logged values of settings in ``records``, the rows of a log. ``names``: all logged names."""
    wanted = knob_names(names, source)
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for record in records:
        found = {name: record.metrics[name] for name in wanted if name in record.metrics}
        if found:
            rows.setdefault((record.attempt, record.step), {}).update(found)
    return KnobRows(rows)
