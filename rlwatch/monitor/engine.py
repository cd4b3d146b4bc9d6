"""The Monitor: the same code judges a live run, a tailed log and a replay.

What it says at a step depends only on the items given up to that step, in their order: not on time, not
on how they were cut into batches. So a replay of the stored rows says what the live run was told, and a
resumed run, whose history is replayed first, what an uninterrupted one would have been told.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rlwatch.alerts.engine import AlertEngine, Transition
from rlwatch.alerts.rules import Rule, default_rules
from rlwatch.detectors.registry import default_detectors
from rlwatch.diagnosis import Diagnosis, diagnose, row_steps
from rlwatch.forecast import Forecast
from rlwatch.monitor.blame import Blame
from rlwatch.monitor.episodes import Episodes
from rlwatch.monitor.forecasting import NAME, Forecasting, Forecasts, default_forecasts
from rlwatch.monitor.standstill import Standstill
from rlwatch.monitor.steps import OpenStep, arrived, has_nonfinite, is_forecast
from rlwatch.ports import Detector, History
from rlwatch.records import Alert, AlertState, ClosedStep, Event, Finding, ForecastRecord, StepRecord

logger = logging.getLogger("rlwatch")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an item brought about: findings to publish, alert transitions and forecasts, in order.

    ``forecasts``: what was said of each step that closed; ``kept`` the same as it is stored.
    """

    findings: tuple[Finding, ...] = ()
    transitions: tuple[Transition, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    kept: tuple[ForecastRecord, ...] = ()

    def __add__(self, other: Outcome) -> Outcome:
        return joined((self, other))


def joined(outcomes: Iterable[Outcome]) -> Outcome:
    """All of them as one; in time that grows with their number, as adding one after another does not."""
    parts = tuple(outcomes)
    return Outcome(
        tuple(finding for part in parts for finding in part.findings),
        tuple(transition for part in parts for transition in part.transitions),
        tuple(forecast for part in parts for forecast in part.forecasts),
        tuple(record for part in parts for record in part.kept),
    )


@dataclass(frozen=True, slots=True)
class NotRun:
    """A part that could not do its work, and why."""

    name: str
    reason: str


NOTHING = Outcome()
_MEMORY = (
    "late", "forecast_failures", "_attempt", "_detectors", "_forecasting", "_alerts", "_episodes", "_blame", "_open",
    "_standstill", "_seen", "_holding", "_told", "_events", "_steps",
)  # fmt: skip
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
        self.late = 0
        self.forecast_failures = 0
        """Forecasters that raised and were not asked again."""
        self._make = detectors or default_detectors
        self._make_forecaster = forecaster or default_forecasts
        self.rules = tuple(default_rules() if rules is None else rules)
        self._history = history
        self._attempt: int | None = None
        self._early: list[Event] = []
        self._reset()

    def _reset(self) -> None:
        self._detectors = list(self._make())
        self._forecasting = Forecasting(self._make_forecaster, self._forecast_failed)
        self._alerts = AlertEngine(self.run_id, self.rules)
        self._episodes = Episodes()
        self._blame = Blame()
        self._open: OpenStep | None = None
        self._standstill = Standstill()
        self._seen: set[str] = set()
        self._holding: tuple[Finding, ...] = ()
        self._told: deque[Finding] = deque(maxlen=REMEMBERED)
        self._events: deque[Event] = deque(maxlen=REMEMBERED)
        self._steps: deque[int] = deque(maxlen=REMEMBERED)

    @property
    def is_default(self) -> bool:
        """Whether it judges with nothing but rlwatch's own detectors and forecaster."""
        return self._make is default_detectors and self._make_forecaster is default_forecasts

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
        """Whether events of an attempt were taken whose first record is still to come."""
        return bool(self._early)

    @property
    def active(self) -> tuple[Finding, ...]:
        """The findings that hold now."""
        return self._holding

    @property
    def forecast(self) -> Forecast | None:
        """What was forecast at the last closed step; None before one, and where the forecaster failed."""
        return self._forecasting.newest

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The alerts that fire now."""
        return tuple(alert for alert in self._alerts.active if alert.state is AlertState.FIRING)

    def open_alerts(self) -> frozenset[str]:
        """Ids of the alerts that are pending or firing now."""
        return self._alerts.open_ids()

    def observe(self, item: StepRecord | Event) -> Outcome:
        """Take the next item of the run's stream."""
        return joined(self.observing(item))

    def observing(self, item: StepRecord | Event) -> Generator[Outcome]:
        """The same bit by bit: the first record of a new attempt relives a history that may be long."""
        if isinstance(item, Event):
            self._notice(item)
            return
        if item.attempt != self._attempt:
            yield from self._begin_attempt(item)
        yield self._record(item)

    def close(self) -> Outcome:
        """Close the open step because nothing more will come."""
        return self._close()

    def diagnosis(self) -> Diagnosis:
        """What most likely caused what was found so far on this branch of the run."""
        return diagnose(
            self._told,
            events=self._events,
            source=self.source,
            row_steps=row_steps(self._steps),
            measured=self._seen,
            starts={},
        )

    def not_run(self) -> list[NotRun]:
        """Detectors that lacked their metrics so far, and the forecaster if it has said nothing yet."""
        lacking = [NotRun(d.name, reason) for d in self._detectors if (reason := self._lacks(d))]
        absent = self._forecasting.absent
        return [*lacking, NotRun(NAME, absent)] if absent else lacking

    def _notice(self, event: Event) -> None:
        """Events of an attempt whose first record is still to come wait for it."""
        if event.attempt != (self._attempt or 1):
            self._early.append(event)
            return
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self._blame.note(event)
        self._events.append(event)
        self._forecasting.notice(event)
        for detector in self._detectors:
            detector.notice(event)

    def _begin_attempt(self, record: StepRecord) -> Iterator[Outcome]:
        """A new attempt forgets, then relives the branch it continues, before its first record.

        Reliving may publish again: ids are the same, so a store keeps one of each.
        """
        if self._attempt is not None or record.attempt > 1:
            self._reset()
            for past in self._history(record.attempt, record.step) if self._history else ():
                yield self._relive(past)
        self._attempt = record.attempt
        early, self._early = self._early, []
        for event in early:
            self._notice(event)

    def _relive(self, past: StepRecord | Event) -> Outcome:
        if isinstance(past, StepRecord):
            return self._record(past)
        self._tell(past)
        return NOTHING

    def _record(self, record: StepRecord) -> Outcome:
        if is_forecast(record):
            return NOTHING
        outcome = NOTHING
        stands = self._standstill.update(advances=self._open is None or record.step > self._open.step)
        if self._open is not None and record.step > self._open.step:
            outcome = self._close()
        if self._open is None:
            self._open = OpenStep(record)
        elif record.step == self._open.step:
            self._open.merge(record)
        else:
            self.late += 1
        if stands or has_nonfinite(record):
            outcome += self._arrival(record, self._open.step)
        return outcome

    def _arrival(self, record: StepRecord, now: int) -> Outcome:
        """Non-finite values and a standing counter do not wait for a step to close, nor are they missed when late."""
        view = self._standstill.told(arrived(record, self.source))
        holding = self._blame.told([f for detector in self._detectors for f in detector.arrival(view)])
        if not holding:
            return NOTHING
        newest = {(f.detector, f.kind): f for f in (*self._holding, *holding)}
        self._holding = tuple(newest.values())
        return Outcome(
            self._published(self._episodes.arrival(holding), view),
            tuple(self._alerts.arrival(view.seq, now, holding, ts=view.ts)),
        )

    def _close(self) -> Outcome:
        if self._open is None:
            return NOTHING
        step = self._open.closed(self.source)
        self._open = None
        self._seen.update(step.metrics)
        self._steps.append(step.step)
        holding = self._blame.told([finding for detector in self._detectors for finding in detector.update(step)])
        kept = self._forecasting.step(step)
        forecast = self._forecasting.newest
        holding += self._forecasting.holding(step, holding)
        self._holding = tuple(holding)
        return Outcome(
            self._published(self._episodes.closed(holding), step),
            tuple(self._alerts.step(step.seq, step.step, holding, ts=step.ts)),
            () if forecast is None else (forecast,),
            kept,
        )

    def _forecast_failed(self, why: str) -> None:
        self.forecast_failures += 1
        if self.forecast_failures == 1:
            logger.warning("%s", why)

    def _published(self, findings: Sequence[Finding], step: ClosedStep) -> tuple[Finding, ...]:
        stamped = tuple(replace(finding, attempt=step.attempt, seq=step.seq) for finding in findings)
        self._told.extend(stamped)
        return stamped

    def _lacks(self, detector: Detector) -> str | None:
        if any(all(map(self._was_seen, needed)) for needed in detector.requires):
            return None
        alternatives = " or ".join(" + ".join(needed) for needed in detector.requires)
        return f"needs {alternatives}, which this run has not logged"

    def _was_seen(self, needed: str) -> bool:
        """A name that ends in a slash stands for any metric of that open family."""
        return needed in self._seen or (needed.endswith("/") and any(name.startswith(needed) for name in self._seen))
