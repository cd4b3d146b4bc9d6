"""The Monitor: the same code judges a live run, a tailed log and a replay.

Its reports at a step depend only on the rows and events up to that step, in their order: neither on time nor on how
they were divided into batches. So a replay of the stored rows reports what the live run reported. A resumed run, whose
history is replayed first, reports what an uninterrupted one would have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rlwatch.alerts.engine import AlertEngine
from rlwatch.alerts.rules import Rule, default_rules
from rlwatch.control.commands import ROLLBACK
from rlwatch.control.policy import NamedSetting, RunHealth
from rlwatch.detectors.base import DetectorSet
from rlwatch.detectors.index import NotRun
from rlwatch.detectors.registry import lazy_detectors, made_by, of_plugins
from rlwatch.diagnosis import Diagnosis
from rlwatch.forecast import Forecast
from rlwatch.forecast.forecast import FORECAST
from rlwatch.metrics import RowReader
from rlwatch.monitor.forecasting import (
    Forecasting,
    Forecasts,
    chosen_forecaster,
    forecaster_for,
    switched_off,
)
from rlwatch.monitor.named_settings import NamedSettings
from rlwatch.monitor.step_judge import NOTHING, Arrived, MonitorOutcome, StepJudge, joined
from rlwatch.ports import Detector, History
from rlwatch.records import (
    COMMAND,
    Alert,
    AlertState,
    ByNames,
    ClosedStep,
    Event,
    Finding,
    JudgedRow,
    StepRecord,
    all_finite,
)

logger = logging.getLogger("rlwatch")


_MEMORY = ("forecast_failures", "_attempt", "_gathering", "_judge", "_undone")
AT_ONCE = 256
"""Number of stored steps that are judged in one batch."""


class Monitor:
    """Runs detectors, the forecaster and alert rules over the rows and events of one run.

    Parameters
    ----------
    run_id
        Id of the run, which is part of alert ids, so that two monitors of one run agree on them.
    source
        The trainer (``RunInfo.source``), which decides the meaning of ambiguous metric names.
    detectors
        Returns new detectors; called at each new attempt (process of the run).
    rules
        Alert rules; the defaults if None.
    forecaster
        Returns a new forecaster; called at each new attempt; the shipped one if None.
    history
        Returns the rows and events that an attempt continues; without it, an attempt begins without state.
    explains
        Whether :meth:`diagnosis` will be called: following the run's settings costs a tenth of the judging.
    acts
        Whether something may act on :meth:`health`: judging each row's soundness costs a twentieth of a scan.
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
        explains: bool = True,
        acts: bool = True,
    ) -> None:
        self.run_id = run_id
        self.source = source
        self.forecast_failures = 0
        """Number of forecasters that raised and were not called again."""
        self._make = lazy_detectors if detectors is None else detectors
        self._make_forecaster = forecaster or forecaster_for(wanted=True)
        self.rules = tuple(default_rules() if rules is None else rules)
        self._history = history
        self._explains, self._acts = explains, acts
        self._attempt: int | None = None
        self._early: list[Event] = []
        self._reader = RowReader(source)
        self._gathering = Gathering()
        self._named = NamedSettings()
        self._reset()

    def _reset(self) -> None:
        forecasting = Forecasting(self._make_forecaster, self._forecast_failed)
        alerts = AlertEngine(self.run_id, self.rules)
        detectors = DetectorSet(made_by(self._make))
        self._judge = StepJudge(detectors, forecasting, alerts, explains=self._explains, acts=self._acts)
        self._gathering = Gathering(self._gathering.late)
        self._undone: Undone | None = None

    @property
    def late(self) -> int:
        """Number of rows that came after their step had closed."""
        return self._gathering.late

    @property
    def is_default(self) -> bool:
        """True if only rlwatch's own detectors and forecaster are used, no plugins."""
        ours = self._make is lazy_detectors and self._make_forecaster in (
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
        """Position ``seq`` of the first row of the step that is still open; None if no step is open."""
        return self._gathering.since

    def memory(self) -> dict[str, object]:
        """Return the state of the monitor, for :meth:`remember` of a monitor with the same settings."""
        return {name: getattr(self, name) for name in _MEMORY}

    def remember(self, memory: dict[str, object]) -> None:
        """Restore the state that :meth:`memory` returned. Raises ``KeyError`` if a part is missing."""
        for name in _MEMORY:
            setattr(self, name, memory[name])

    @property
    def waits(self) -> bool:
        """True while events of an attempt (process of the run) wait for the attempt's first row."""
        return bool(self._early)

    @property
    def active(self) -> tuple[Finding, ...]:
        """Findings (detected problems) that hold now."""
        return self._judge.holding

    @property
    def judged_rows(self) -> tuple[JudgedRow, ...]:
        """Newest closed steps, each with whether the run was healthy there; none with ``acts=False``."""
        soundness = self._judge.soundness
        return () if soundness is None else tuple(soundness.rows)

    @property
    def forecast(self) -> Forecast | None:
        """Forecast at the last closed step; None before the first step, and where the forecaster failed."""
        return self._judge.forecasting.newest

    @property
    def firing(self) -> tuple[Alert, ...]:
        """Alerts of the run that fire now."""
        return tuple(alert for alert in self._judge.alerts.active if alert.state is AlertState.FIRING)

    def health(self, *, forecast: bool = True) -> RunHealth:
        """Return the health of the run as of the last judged step: findings, firing alerts, forecast, rows, named
        settings.

        ``forecast`` False leaves the forecast out. No settings are named by a monitor made with ``explains=False``.
        """
        firing, rows = self.firing, self.judged_rows
        named: tuple[NamedSetting, ...] = ()
        if self._explains:
            named = self._named.now(firing, self._judge.lookback, self.source, rows[-1].step if rows else 0)
        return RunHealth(self.active, firing, self.forecast if forecast else None, rows, named)

    def open_alerts(self) -> frozenset[str]:
        """Return the ids of the alerts that are pending or firing now."""
        return self._judge.alerts.open_ids()

    def observe(self, item: StepRecord | Event) -> MonitorOutcome:
        """Judge the next row or event of the run's stream and return findings, alerts and forecasts that follow."""
        return joined(self.observing(item))

    def observing(self, item: StepRecord | Event) -> Generator[MonitorOutcome]:
        """Judge the next row or event and yield outcomes one by one.

        The first row of a new attempt (process of the run) first replays a history that may be long.
        """
        if isinstance(item, Event):
            self._notice(item)
            return
        if item.attempt != self._attempt:
            yield from self._begin_attempt(item)
        yield from self._continued(item)

    def observing_all(self, items: Iterable[StepRecord | Event], *, closes: bool = False) -> Generator[MonitorOutcome]:
        """Judge many rows and events and yield their outcomes; faster than one by one, as forecasts are computed in
        batches.

        For stored rows only: it reads up to :data:`AT_ONCE` steps ahead of the outcomes it yields. ``closes``: no
        further row will come, so the step that is still open is judged, too, as by :meth:`close`.
        """
        views: list[ClosedStep | Arrived] = []
        for item in items:
            if isinstance(item, Event) or item.attempt != self._attempt or self._branches(item):
                yield from self._judge.each_of(views)
                yield from self.observing(item)
                continue
            views += self._gathering.add(item, self._reader)
            if len(views) >= AT_ONCE:
                yield from self._judge.each_of(views)
        if closes:
            views += self._gathering.close(self._reader)
        yield from self._judge.each_of(views)

    def close(self) -> MonitorOutcome:
        """Judge the step that is still open, because no further row will come."""
        return joined(map(self._judge.judge, self._gathering.close(self._reader)))

    def diagnosis(self) -> Diagnosis:
        """Return the likeliest causes of the findings so far on this branch of the run.

        Raises ``ConfigError`` if the monitor was made with ``explains=False``.
        """
        return self._judge.lookback.diagnosis(self.source)

    def not_run(self) -> list[NotRun]:
        """Return the detectors that lacked metrics or failed so far, and the forecaster if it made no forecast, with
        reasons.
        """
        return self._judge.not_run()

    def _notice(self, event: Event) -> None:
        """Take an event; keep it if the first row of its attempt has not come yet."""
        if event.attempt != (self._attempt or 1):
            self._early.append(event)
            return
        self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        self._undone = undone_by(event) or self._undone
        self._judge.notice(event)

    def _begin_attempt(self, record: StepRecord) -> Iterator[MonitorOutcome]:
        """Clear the state and replay the branch that the new attempt continues, before its first row.

        The replay may publish findings again: their ids are the same, so a store keeps one of each.
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
            self._pass_on(past)

    def _continued(self, record: StepRecord) -> Iterator[MonitorOutcome]:
        """Judge a record of the attempt that goes on."""
        if self._branches(record):
            yield from self._begin_branch()
        yield joined(map(self._judge.judge, self._gathering.add(record, self._reader)))

    def _branches(self, record: StepRecord) -> bool:
        """Return whether the record is the first after the steps that a rollback undid."""
        return self._undone is not None and record.step > self._undone.last

    def _begin_branch(self) -> Iterator[MonitorOutcome]:
        """Drop the rows that a rollback undid: reset the state, and replay the rows up to the snapshot.

        Findings and alerts continue until the values recover: restored weights alone are no recovery.
        """
        undone = self._undone
        yield from map(self._judge.judge, self._gathering.close(self._reader))
        own, judge = self.memory() | {"_undone": None}, self._judge
        self._reset()
        try:
            if undone is not None and self._history:
                for past in self._history(undone.attempt + 1, undone.to + 1):
                    for _ in self._relived(past):
                        yield NOTHING
            for step in self._gathering.close(self._reader):
                self._judge.judge(step)
        finally:
            judge.judge_as(self._judge)
            self.remember(own)
            if undone is not None:
                judge.episodes.forget_after(undone.to)

    def _forecast_failed(self, why: str) -> None:
        self.forecast_failures += 1
        if self.forecast_failures == 1:
            logger.warning("%s", why)


class Undone(NamedTuple):
    """A rollback of the weights to a snapshot.

    ``attempt``: process of the run. ``last``: last step that it undid. ``to``: step whose state was restored.
    """

    attempt: int
    last: int
    to: int


def undone_by(event: Event) -> Undone | None:
    """Return the rollback that ``event`` reports; None if it is not an executed rollback."""
    report = event.body.get("report")
    if event.kind != COMMAND or event.step is None or not isinstance(report, Mapping):
        return None
    if ROLLBACK not in (event.body.get("command"), report.get("undid")):
        return None
    to = report.get("to_step")
    return Undone(event.attempt, event.step, to) if isinstance(to, int) else None


# Merging the records of a step into the closed step detectors see.


class Gathering:
    """Merges rows of the same step into closed steps. ``late``: number of rows that came after their
    step had closed.
    """

    def __init__(self, late: int = 0) -> None:
        self.late = late
        self._open: OpenStep | None = None
        self._standstill = Standstill()

    @property
    def since(self) -> int | None:
        """Position ``seq`` of the first row of the step that is still open; None if no step is open."""
        return None if self._open is None else self._open.first_seq

    def add(self, record: StepRecord, reader: RowReader) -> list[ClosedStep | Arrived]:
        """Add a row; return the step that it closes, if any, and the row itself if it must be judged at once.

        Rows with non-finite values, or with a step that does not advance, are judged at once, also if they are late.
        ``reader``: translates metric names.
        """
        if is_forecast(record):
            return []
        views: list[ClosedStep | Arrived] = []
        is_stuck = self._standstill.update(advances=self._open is None or record.step > self._open.step)
        if self._open is not None and record.step > self._open.step:
            views += self.close(reader)
        if self._open is None:
            self._open = OpenStep(record)
        elif record.step == self._open.step:
            self._open.merge(record)
        else:
            self.late += 1
        if is_stuck or has_nonfinite(record):
            views.append(Arrived(self._standstill.counted(arrived(record, reader)), self._open.step))
        return views

    def close(self, reader: RowReader) -> list[ClosedStep]:
        """Close the open step and return it in a list; an empty list if no step is open.

        ``reader``: translates metric names.
        """
        steps, self._open = [] if self._open is None else [self._open.closed(reader)], None
        return steps


class OpenStep:
    """The step that still collects rows; a later value of a metric replaces an earlier one."""

    def __init__(self, record: StepRecord) -> None:
        self.step = record.step
        self.first_seq = record.seq
        self._metrics = record.metrics
        self._last = record

    def merge(self, record: StepRecord) -> None:
        """Add the metrics of another row of this step; a later value of a metric replaces an earlier one."""
        self._metrics = {**self._metrics, **record.metrics}
        self._last = record

    def closed(self, reader: RowReader) -> ClosedStep:
        """Return the merged step as detectors receive it, with canonical names.

        ``reader``: translates metric names.
        """
        return _view(self._last, self._metrics, reader)


def arrived(record: StepRecord, reader: RowReader) -> ClosedStep:
    """Return a single row in the form in which detectors receive a step, with canonical names.

    ``reader``: translates metric names.
    """
    return _view(record, record.metrics, reader)


def has_nonfinite(record: StepRecord) -> bool:
    """Return whether any value of the row is NaN or infinite."""
    return not all_finite(record.metrics.values())


def is_forecast(record: StepRecord) -> bool:
    """Return whether the row contains only a forecast, as in the log of another tracker on a watched run."""
    names = record.metrics
    return bool(names) and next(iter(names)).startswith(FORECAST) and all(name.startswith(FORECAST) for name in names)


def _forecasts_among(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith(FORECAST))


_forecasts = ByNames(_forecasts_among)


def _view(record: StepRecord, metrics: Mapping[str, float], reader: RowReader) -> ClosedStep:
    values, origin = reader.canonicalise(metrics)
    for name in _forecasts.of(values):
        del values[name], origin[name]
    return ClosedStep(record.step, values, origin, record.ts, record.attempt, record.seq)


# Records that keep coming without a new step: no step closes, so the detectors are run on a single record.

STANDSTILL_RECORDS = 50
"""Number of rows without a new step after which the detectors run, each time."""
RECORDS, USUAL = "rlwatch/records", "rlwatch/records_usual"


class Standstill:
    """Counter of the rows since the step last advanced; it also keeps the largest number of rows that an earlier step
    had.

    It shows that a run logs on without its step advancing.

    >>> counter = Standstill()
    >>> [counter.update(advances=i == 0) for i in range(50)].index(True)
    49
    """

    def __init__(self) -> None:
        self._records = 0
        self._usual = 0

    def update(self, *, advances: bool) -> bool:
        """Count the next row; return True at every 50th row of one step, at which detectors must run although no step
        closes.

        ``advances``: whether the row is the first of a new step.
        """
        if advances:
            self._usual = max(self._usual, self._records)
            self._records = 0
        self._records += 1
        return self._records % STANDSTILL_RECORDS == 0

    def counted(self, view: ClosedStep) -> ClosedStep:
        """Return the step ``view`` with two more metrics: the rows since the step last advanced, and the largest number
        that an earlier step had.

        The second is absent until a step has closed.
        """
        counts = {RECORDS: float(self._records)}
        if self._usual:
            counts[USUAL] = float(self._usual)
        return replace(view, metrics={**view.metrics, **counts})
