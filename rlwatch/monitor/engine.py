"""The Monitor: the same code judges a live run, a tailed log and a replay.

What it says at a step depends only on the items given up to that step, in their order: not on time, not
on how they were cut into batches. So a replay of the stored rows says what the live run was told, and a
resumed run, whose history is replayed first, what an uninterrupted one would have been told.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from rlwatch.alerts.engine import AlertEngine, Transition
from rlwatch.alerts.rules import Rule, default_rules
from rlwatch.control.commands import ROLLBACK
from rlwatch.detectors.base import DetectorSet, NotRun, not_run
from rlwatch.detectors.registry import default_detectors, of_plugins
from rlwatch.diagnosis import Diagnosis, KnobTracker, diagnose, row_steps
from rlwatch.forecast import Forecast
from rlwatch.forecast.forecast import FORECAST
from rlwatch.metrics import Family, RowReader
from rlwatch.monitor.episodes import Episodes
from rlwatch.monitor.forecasting import (
    NAME,
    Forecasting,
    Forecasts,
    chosen_forecaster,
    forecaster_for,
    switched_off,
)
from rlwatch.monitor.soundness import Soundness
from rlwatch.ports import Detector, History
from rlwatch.records import (
    COMMAND,
    LOCALISED,
    Alert,
    AlertState,
    ClosedStep,
    Event,
    Finding,
    ForecastRecord,
    JudgedRow,
    StepRecord,
)

logger = logging.getLogger("rlwatch")


@dataclass(frozen=True, slots=True)
class MonitorOutcome:
    """Outcome of an item: findings to publish, alert transitions and forecasts, in order.

    ``recoveries``: of findings that were published, that they eased or are over. ``forecasts``: what was said of each
    step that closed; ``kept`` the same as it is stored.
    """

    findings: tuple[Finding, ...] = ()
    transitions: tuple[Transition, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    kept: tuple[ForecastRecord, ...] = ()
    recoveries: tuple[Finding, ...] = ()

    def __add__(self, other: MonitorOutcome) -> MonitorOutcome:
        return joined((self, other))


def joined(outcomes: Iterable[MonitorOutcome]) -> MonitorOutcome:
    """All of them as one; in time that grows with their number, as adding one after another does not."""
    parts = tuple(outcomes)
    return MonitorOutcome(
        tuple(finding for part in parts for finding in part.findings),
        tuple(transition for part in parts for transition in part.transitions),
        tuple(forecast for part in parts for forecast in part.forecasts),
        tuple(record for part in parts for record in part.kept),
        tuple(finding for part in parts for finding in part.recoveries),
    )


NOTHING = MonitorOutcome()
_JUDGING = ("_detectors", "_forecasting", "_soundness")
"""The part of the memory that a roll-back puts back: it judges by the rows of the branch that goes on."""
_MEMORY = (
    "late", "forecast_failures", "_attempt", "_detectors", "_forecasting", "_alerts", "_episodes", "_localised",
    "_open", "_standstill", "_seen", "_holding", "_published_findings", "_events", "_steps", "_knobs", "_soundness",
    "_undone",
)  # fmt: skip
AT_ONCE = 256
"""Steps that are closed before any of them is judged, where all of them are known."""
REMEMBERED = 400
"""Published findings, and events, that a diagnosis looks back on."""


class Monitor:
    """Detectors and alert rules over one run's items.

    Parameters
    ----------
    run_id
        Goes into alert ids, so that two monitors of one run agree on them.
    source
        The trainer (``RunInfo.source``): how ambiguous metric names are read.
    detectors
        Makes the detectors, all fresh; called again at each new attempt.
    rules
        Alert rules; the defaults if None.
    forecaster
        Makes the forecaster, fresh, likewise; the shipped one if None.
    history
        Gives what an attempt continues; without it a new attempt begins with no memory.
    """

    def __init__(
        self,
        *,
        run_id: str = "",
        source: str = "",
        detectors: Callable[[], Sequence[Detector]] | None = None,
        rules: Sequence[Rule] | None = None,
        forecaster: Callable[[], Forecasts] | None = None,
        history: History | None = None,
    ) -> None:
        self.run_id = run_id
        self.source = source
        self._reader = RowReader(source)
        self.late = 0
        self.forecast_failures = 0
        """Forecasters that raised and were not asked again."""
        self._make = detectors or default_detectors
        self._make_forecaster = forecaster or forecaster_for(wanted=True)
        self.rules = tuple(default_rules() if rules is None else rules)
        self._history = history
        self._attempt: int | None = None
        self._early: list[Event] = []
        self._reset()

    def _reset(self) -> None:
        self._detectors = DetectorSet(self._make())
        self._forecasting = Forecasting(self._make_forecaster, self._forecast_failed)
        self._alerts = AlertEngine(self.run_id, self.rules)
        self._episodes = Episodes()
        self._localised = LocalisedSteps()
        self._open: OpenStep | None = None
        self._standstill = Standstill()
        self._seen: set[str] = set()
        self._holding: tuple[Finding, ...] = ()
        self._published_findings: deque[Finding] = deque(maxlen=REMEMBERED)
        self._events: deque[Event] = deque(maxlen=REMEMBERED)
        self._steps: deque[int] = deque(maxlen=REMEMBERED)
        self._knobs = KnobTracker()
        self._soundness = Soundness()
        self._undone: Undone | None = None

    @property
    def is_default(self) -> bool:
        """True where it judges with nothing but rlwatch's own detectors and forecaster."""
        ours = self._make is default_detectors and self._make_forecaster in (
            forecaster_for(wanted=True),
            forecaster_for(wanted=False),
        )
        return ours and not of_plugins() and not chosen_forecaster()

    @property
    def forecasts(self) -> bool:
        """False where forecasting is switched off."""
        return self._make_forecaster is not switched_off

    @property
    def open_since(self) -> int | None:
        """``seq`` of the first record of the step that still gathers records; None if there is none."""
        return None if self._open is None else self._open.first_seq

    def memory(self) -> dict[str, object]:
        """All it knows, for :meth:`remember` of one that was made alike."""
        return {name: getattr(self, name) for name in _MEMORY}

    def remember(self, memory: dict[str, object]) -> None:
        """Know what another knew. Raises ``KeyError`` for what is no such memory."""
        for name in _MEMORY:
            setattr(self, name, memory[name])

    @property
    def waits(self) -> bool:
        """True while events of an attempt wait for its first record."""
        return bool(self._early)

    @property
    def active(self) -> tuple[Finding, ...]:
        """The findings that hold now."""
        return self._holding

    @property
    def judged_rows(self) -> tuple[JudgedRow, ...]:
        """The newest closed steps, and whether the run was sound there."""
        return tuple(self._soundness.rows)

    @property
    def forecast(self) -> Forecast | None:
        """Forecast of the last closed step; None before one, and where the forecaster failed."""
        return self._forecasting.newest

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The alerts that fire now."""
        return tuple(alert for alert in self._alerts.active if alert.state is AlertState.FIRING)

    def open_alerts(self) -> frozenset[str]:
        """Ids of the alerts that are pending or firing now."""
        return self._alerts.open_ids()

    def observe(self, item: StepRecord | Event) -> MonitorOutcome:
        """Take the next item of the run's stream."""
        return joined(self.observing(item))

    def observing(self, item: StepRecord | Event) -> Generator[MonitorOutcome]:
        """The same bit by bit: the first record of a new attempt relives a history that may be long."""
        if isinstance(item, Event):
            self._notice(item)
            return
        if item.attempt != self._attempt:
            yield from self._begin_attempt(item)
        yield from self._continued(item)

    def observing_all(self, items: Iterable[StepRecord | Event]) -> Generator[MonitorOutcome]:
        """Take many items: the same outcomes as one by one, but forecasts are made of many rows at once.

        For rows that are there already: it reads up to ``AT_ONCE`` steps ahead of what it yields.
        """
        views: list[ClosedStep | _Arrived] = []
        for item in items:
            if isinstance(item, Event) or item.attempt != self._attempt or self._branches(item):
                yield from self._judged_together(views)
                yield from self.observing(item)
                continue
            views += self._gathered(item)
            if len(views) >= AT_ONCE:
                yield from self._judged_together(views)
        yield from self._judged_together(views)

    def close(self) -> MonitorOutcome:
        """Close the open step because nothing more will come."""
        return joined(map(self._judged, self._closed()))

    def diagnosis(self) -> Diagnosis:
        """Most likely cause of the findings so far on this branch of the run."""
        return diagnose(
            self._published_findings,
            events=self._events,
            source=self.source,
            row_steps=row_steps(self._steps),
            measured=self._seen,
            starts={},
            turns=self._knobs.turns,
            first_step=self._knobs.first_step,
        )

    def not_run(self) -> list[NotRun]:
        """Detectors that lacked their metrics so far or broke, and the forecaster if it has said nothing yet."""
        lacking = not_run(self._detectors, self._seen)
        lacking += [NotRun(name, reason) for name, reason in self._detectors.broken.items()]
        absent = self._forecasting.absent
        return [*lacking, NotRun(NAME, absent)] if absent else lacking

    def _notice(self, event: Event) -> None:
        """Events of an attempt whose first record is still to come wait for it."""
        if event.attempt != (self._attempt or 1):
            self._early.append(event)
            return
        self._notify_detectors(event)

    def _notify_detectors(self, event: Event) -> None:
        self._undone = undone_by(event) or self._undone
        self._localised.note(event)
        self._events.append(event)
        self._forecasting.notice(event)
        for detector in self._detectors:
            detector.notice(event)

    def _begin_attempt(self, record: StepRecord) -> Iterator[MonitorOutcome]:
        """A new attempt forgets, then relives the branch it continues, before its first record.

        Reliving may publish again: ids are the same, so a store keeps one of each.
        """
        if self._attempt is not None or record.attempt > 1:
            self._reset()
            for past in self._history(record.attempt, record.step) if self._history else ():
                yield from self._relived(past)
        self._attempt = record.attempt
        early, self._early = self._early, []
        for event in early:
            self._notice(event)

    def _relived(self, past: StepRecord | Event) -> Iterator[MonitorOutcome]:
        if isinstance(past, StepRecord):
            yield from self._continued(past)
        else:
            self._notify_detectors(past)

    def _continued(self, record: StepRecord) -> Iterator[MonitorOutcome]:
        """Judge a record of the attempt that goes on."""
        if self._branches(record):
            yield from self._begin_branch()
        yield self._record(record)

    def _branches(self, record: StepRecord) -> bool:
        """Return whether it is the first after the steps that a roll-back undid."""
        return self._undone is not None and record.step > self._undone.last

    def _begin_branch(self) -> Iterator[MonitorOutcome]:
        """Judge what follows a roll-back as if the undone rows had never been: relive those up to the snapshot.

        Findings and alerts go on until the values are back: that the weights were put back is no recovery.
        """
        undone = self._undone
        yield from map(self._judged, self._closed())
        own = self.memory() | {"_undone": None}
        self._reset()
        try:
            if undone is not None and self._history:
                for past in self._history(undone.attempt + 1, undone.to + 1):
                    for _ in self._relived(past):
                        yield NOTHING
            for step in self._closed():
                self._judged(step)
        finally:
            self.remember(own | {name: getattr(self, name) for name in _JUDGING})
            if undone is not None:
                self._episodes.forget_after(undone.to)

    def _record(self, record: StepRecord) -> MonitorOutcome:
        return joined(map(self._judged, self._gathered(record)))

    def _gathered(self, record: StepRecord) -> list[ClosedStep | _Arrived]:
        """Add a record to the open step: the step that it closes, if any, and itself if it does not wait for its own.

        Non-finite values and a standing counter do not wait for a step to close, nor are they missed when late.
        """
        if is_forecast(record):
            return []
        views: list[ClosedStep | _Arrived] = []
        stands = self._standstill.update(advances=self._open is None or record.step > self._open.step)
        if self._open is not None and record.step > self._open.step:
            views += self._closed()
        if self._open is None:
            self._open = OpenStep(record)
        elif record.step == self._open.step:
            self._open.merge(record)
        else:
            self.late += 1
        if stands or has_nonfinite(record):
            views.append(_Arrived(self._standstill.counted(arrived(record, self._reader)), self._open.step))
        return views

    def _arrival(self, view: ClosedStep, now: int) -> MonitorOutcome:
        """Judge a record while the step ``now`` is open."""
        holding = self._localised.with_culprits([f for detector in self._detectors for f in detector.arrival(view)])
        if not holding:
            return NOTHING
        newest = {(f.detector, f.kind): f for f in (*self._holding, *holding)}
        self._holding = tuple(newest.values())
        return MonitorOutcome(
            self._published(self._episodes.arrival(holding), view)[0],
            tuple(self._alerts.arrival(view.seq, now, holding, ts=view.ts)),
        )

    def _closed(self) -> list[ClosedStep]:
        """The open step, if there is one, which gathers no more."""
        steps, self._open = [] if self._open is None else [self._open.closed(self._reader)], None
        return steps

    def _judged_together(self, views: list[ClosedStep | _Arrived]) -> Iterator[MonitorOutcome]:
        """Outcomes of ``views``, which is emptied."""
        self._forecasting.ahead([view for view in views if isinstance(view, ClosedStep)])
        yield from map(self._judged, views)
        views.clear()

    def _judged(self, view: ClosedStep | _Arrived) -> MonitorOutcome:
        return self._step(view) if isinstance(view, ClosedStep) else self._arrival(*view)

    def _step(self, step: ClosedStep) -> MonitorOutcome:
        self._seen.update(step.metrics)
        self._steps.append(step.step)
        self._knobs.update(step.step, step.metrics)
        holding = self._localised.with_culprits(self._detectors.update(step))
        kept = self._forecasting.step(step, self._episodes.standing(holding))
        forecast = self._forecasting.newest
        holding += self._forecasting.holding(step, holding)
        told, holding = self._episodes.closed(step, holding)
        self._holding = tuple(holding)
        self._soundness.update(step, holding)
        findings, recoveries = self._published(told, step)
        return MonitorOutcome(
            findings,
            tuple(self._alerts.step(step.seq, step.step, holding, ts=step.ts, back=self._episodes.reason)),
            () if forecast is None else (forecast,),
            kept,
            recoveries,
        )

    def _forecast_failed(self, why: str) -> None:
        self.forecast_failures += 1
        if self.forecast_failures == 1:
            logger.warning("%s", why)

    def _published(
        self, findings: Sequence[Finding], step: ClosedStep
    ) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
        """Stamp what is told: of failures, and of recoveries."""
        stamped = tuple(replace(finding, attempt=step.attempt, seq=step.seq) for finding in findings)
        failures = tuple(finding for finding in stamped if not finding.stage.better)
        self._published_findings.extend(failures)
        return failures, tuple(finding for finding in stamped if finding.stage.better)


class Undone(NamedTuple):
    """A roll-back: the attempt, the last step that it undid, and the step whose state was put back."""

    attempt: int
    last: int
    to: int


def undone_by(event: Event) -> Undone | None:
    """Return what ``event`` undid, if it is a roll-back that was carried out."""
    report = event.body.get("report")
    if event.kind != COMMAND or event.step is None or not isinstance(report, Mapping):
        return None
    if ROLLBACK not in (event.body.get("command"), report.get("undid")):
        return None
    to = report.get("to_step")
    return Undone(event.attempt, event.step, to) if isinstance(to, int) else None


class _Arrived(NamedTuple):
    """A record that is judged before its step closes, canonically named, and the step that is open."""

    view: ClosedStep
    now: int


# Merging the records of a step into the closed step detectors see.


class OpenStep:
    """The step that still gathers records; a later value of the same name wins."""

    def __init__(self, record: StepRecord) -> None:
        self.step = record.step
        self.first_seq = record.seq
        self._metrics = dict(record.metrics)
        self._last = record

    def merge(self, record: StepRecord) -> None:
        """Add another record of this step."""
        self._metrics.update(record.metrics)
        self._last = record

    def closed(self, reader: RowReader) -> ClosedStep:
        """The step as detectors see it."""
        return _view(self._last, self._metrics, reader)


def arrived(record: StepRecord, reader: RowReader) -> ClosedStep:
    """One record by itself, canonically named."""
    return _view(record, record.metrics, reader)


def has_nonfinite(record: StepRecord) -> bool:
    """True where any value of the record is NaN or infinite."""
    return not all(map(math.isfinite, record.metrics.values()))


def is_forecast(record: StepRecord) -> bool:
    """True of a record that is a forecast alone, as in a log that another tracker kept of a watched run."""
    return bool(record.metrics) and all(name.startswith(FORECAST) for name in record.metrics)


@lru_cache(maxsize=64)
def _forecasts(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith(FORECAST))


def _view(record: StepRecord, metrics: Mapping[str, float], reader: RowReader) -> ClosedStep:
    values, origin = reader.canonicalise(metrics)
    for name in _forecasts(tuple(values)):
        del values[name], origin[name]
    return ClosedStep(record.step, values, origin, record.ts, record.attempt, record.seq)


# Records that come and come while no new step does: nothing closes, so no detector would hear of it.

STANDSTILL_RECORDS = 50
"""Records without a new step after which detectors are asked, and asked again."""
RECORDS, USUAL = "rlwatch/records", "rlwatch/records_usual"


class Standstill:
    """Counts the records since the last new step, and the most an earlier step had.

    >>> counter = Standstill()
    >>> [counter.update(advances=i == 0) for i in range(50)].index(True)
    49
    """

    def __init__(self) -> None:
        self._records = 0
        self._usual = 0

    def update(self, *, advances: bool) -> bool:
        """Take the next record, the first of a new step or not; whether to ask now."""
        if advances:
            self._usual = max(self._usual, self._records)
            self._records = 0
        self._records += 1
        return self._records % STANDSTILL_RECORDS == 0

    def counted(self, view: ClosedStep) -> ClosedStep:
        """``view`` with both counts; the usual one only once a step has closed."""
        counts = {RECORDS: float(self._records)}
        if self._usual:
            counts[USUAL] = float(self._usual)
        return replace(view, metrics={**view.metrics, **counts})


# The culprits of a localised step, put beside what detectors find in it.

LOCALISED_STEPS = 16
"""Localised steps that are kept: a step is judged when the next begins."""
REPEATED = ("message", "why_not", "verdict", "cause", "cures", "count", "method", "gap", "complete", "culprits")
"""Parts of the event that a finding repeats."""


class LocalisedSteps:
    """Adds the culprits of a step to the findings on its gradient."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=LOCALISED_STEPS)

    def note(self, event: Event) -> None:
        """Take notice, if it is a localisation."""
        if event.kind == LOCALISED:
            self._events.append(event)

    def with_culprits(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings, those on the gradient of a localised step with its culprits."""
        return [self._with_culprits(finding) for finding in findings]

    def _with_culprits(self, finding: Finding) -> Finding:
        event = next(
            (e for e in reversed(self._events) if (e.step, e.attempt) == (finding.step, finding.attempt)), None
        )
        if event is None or finding.family != Family.OPTIMISATION.value:
            return finding
        why_not = event.body.get("why_not")
        message_of_event = event.body.get("message") or (f"not localised: {why_not}" if why_not else "")
        localised = {name: event.body[name] for name in REPEATED if name in event.body}
        message = f"{finding.message}; {message_of_event}" if message_of_event else finding.message
        return replace(finding, message=message, evidence={**finding.evidence, "localised": localised})
