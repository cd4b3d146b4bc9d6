"""The forecast of a run, step by step: computed, stored, and reported as a finding if it is an alarm.

A forecaster that fails disturbs nothing else: the failure is counted and logged once, and the forecaster is not called
again in this attempt (process of the run).
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, cast

from rlwatch.detectors.base import CARRY_ROWS, rounded
from rlwatch.error_boundary import PASSING_TRIES, described, passing, raised_by
from rlwatch.forecast import Forecast
from rlwatch.forecast.forecast import FORECAST, PASSED, alarm_message, record_of
from rlwatch.metrics import Family
from rlwatch.plugins import usable
from rlwatch.records import CRASH_FORECAST, ClosedStep, Event, Finding, ForecastRecord, Severity
from rlwatch.wording import words

logger = logging.getLogger("rlwatch")

OF_THE_REFERENCE = frozenset({"silent_reference_reset", "lost_reference_reset"})
"""Findings about the reference model or a resume: the forecast must not depend on whether the process restarted."""
NAME = "forecast"
"""Name of the forecaster in the list of detectors."""
CERTAIN, CERTAIN_ROWS = 0.8, 5
"""A forecast is critical only after so many forecasts in a row give a failure within 20 steps this probability, and
only while a detector on training warns, too: a forecast alone must not page a person.
"""


class Forecasts(Protocol):
    """Interface of a forecaster of one run: made anew for each attempt (process), causal, deterministic."""

    def update(self, step: ClosedStep) -> Forecast:
        """Take the next closed step of the run; return the forecast at this step."""
        ...

    def notice(self, event: Event) -> None:
        """Take an event of the run, such as ``reference_reset``."""
        ...


class Forecasting:
    """Runs the forecaster of one attempt (process of a run), and keeps its newest forecast.

    ``make``: makes the forecaster. ``failed``: called with a message when it raises.
    """

    def __init__(self, make: Callable[[], Forecasts], failed: Callable[[str], None]) -> None:
        self.newest: Forecast | None = None
        self._make, self._failed = make, failed
        self._forecaster: Forecasts | None = None
        self._off = OFF if make is switched_off else ""
        self._loads = 0
        self._ever = False
        self._absent_before = ""
        self._failure = ""
        self._since: int | None = None
        self._certain = 0
        self._blank_rows = 0
        self._held: Finding | None = None
        self._next: deque[tuple[ClosedStep, Forecast]] = deque()
        self._missed: deque[Event | tuple[ClosedStep, tuple[Finding, ...]]] = deque()
        """What came while files or memory that the forecaster needs were not available, for it to take first."""

    @property
    def absent(self) -> str:
        """Reason why there has been no forecast so far; empty once there was one."""
        if self._off:
            return self._off
        if self._ever:
            return ""
        if self._missed:
            return "the files or the memory that forecasts need were not available yet"
        return self.newest.absent if self.newest is not None else "no step has closed yet"

    def notice(self, event: Event) -> None:
        """Pass an event of the run on to the forecaster."""
        if self._missed or self._loads_later():
            self._missed.append(event)
        else:
            self._guarded(lambda forecaster: forecaster.notice(event))

    def ahead(self, steps: Sequence[ClosedStep]) -> None:
        """Compute the forecasts of ``steps`` in a batch, if the forecaster can; :meth:`step` then returns each."""
        self._next.clear()
        if not steps or self._missed or self._loads_later() or self._off:
            return

        def asked() -> None:
            together = getattr(self._forecaster, "extend", None)
            if together is not None:
                self._next.extend(zip(steps, together(steps), strict=True))

        raised_by(asked)  # an error is raised again, and handled, at the step that causes it

    def step(self, step: ClosedStep, standing: Sequence[Finding] = ()) -> tuple[ForecastRecord, ...]:
        """Compute the forecast at a closed step; return the records to store.

        A reason for no forecast is stored only once. ``standing``: findings of open episodes: a failure that has
        already happened is not forecast. While file descriptors or memory that the forecaster needs are lacking, there
        is no record; the next step's are preceded by those of the steps without.
        """
        self._missed.append((step, tuple(standing)))
        records: list[ForecastRecord] = []
        while self._missed:
            one = self._missed[0]
            made = self._noticed(one) if isinstance(one, Event) else self._stepped(*one)
            if made is None:
                self.newest = None
                break
            records += made
            self._missed.popleft()
        return tuple(records)

    def _noticed(self, event: Event) -> tuple[ForecastRecord, ...] | None:
        if self._loads_later():
            return None
        self._guarded(lambda forecaster: forecaster.notice(event))
        return ()

    def _stepped(self, step: ClosedStep, standing: Sequence[Finding]) -> tuple[ForecastRecord, ...] | None:
        """Return the records of one step; None if files or memory that the forecaster needs are not available now."""
        forecasts: list[Forecast] = []
        made = self._next.popleft()[1] if self._next and self._next[0][0] is step else None
        if self._loads_later() or not self._guarded(
            lambda forecaster: forecasts.append(_sound(made or forecaster.update(step)))
        ):
            return None
        self._failure = _failure(standing, self._failure)
        self.newest = _unless_over(forecasts[0], self._failure) if forecasts else None
        kept = self.newest or Forecast(step.step, absent=self._off)
        reason_for_none = "" if kept.metrics else kept.reason
        before, self._absent_before = self._absent_before, reason_for_none
        self._ever = self._ever or not kept.absent
        return () if reason_for_none and reason_for_none == before else (record_of(kept, step),)

    def holding(self, step: ClosedStep, others: Sequence[Finding]) -> list[Finding]:
        """Return the finding that reports the newest forecast, while it is an alarm; else an empty list.

        ``others``: findings that hold at the same step. At a row without a forecast the last finding still holds, for
        at most ``CARRY_ROWS`` rows. While another critical finding holds there is none: a failure that has already
        happened is not forecast.
        """
        forecast = self.newest
        if any(map(_critical, others)):
            self._held = None
        elif forecast is not None and forecast.absent:
            self._blank_rows += 1
            carried = self._held if self._blank_rows <= CARRY_ROWS else None
            self._held = carried and replace(carried, step=step.step, attempt=step.attempt, seq=step.seq)
        else:
            self._blank_rows = 0
            alarms = forecast is not None and forecast.alarm
            self._held = self._judged(forecast, step, others) if forecast is not None and alarms else None
        if self._held is None:
            self._since, self._certain = None, 0
            return []
        return [self._held]

    def _judged(self, forecast: Forecast, step: ClosedStep, others: Sequence[Finding]) -> Finding:
        self._since = step.step if self._since is None else min(self._since, step.step)
        self._certain = self._certain + 1 if (forecast.p20 or 0.0) >= CERTAIN else 0
        sure = self._certain >= CERTAIN_ROWS and any(map(_warns, others))
        return Finding(
            detector=NAME,
            kind=CRASH_FORECAST,
            severity=Severity.CRITICAL if sure else self._usual(forecast, others),
            step=step.step,
            onset_step=self._since,
            message=alarm_message(forecast),
            evidence=_evidence(forecast),
            metric=forecast.why[0].metric if forecast.why else "",
            family=Family.SYSTEM.value,
            score=None if forecast.risk is None else max(forecast.risk, 1.0),
            attempt=step.attempt,
            seq=step.seq,
        )

    @staticmethod
    def _usual(forecast: Forecast, others: Sequence[Finding]) -> Severity:
        """Return the severity of an alarm: info for a log with few metrics while no detector on training warns."""
        return Severity.INFO if forecast.lean and not any(map(_warns, others)) else Severity.WARNING

    def _loads_later(self) -> bool:
        """Return whether files or memory that the forecaster needs are not available now; make it if they are."""
        if self._off or self._forecaster is not None:
            return False
        error = raised_by(self._made)
        return error is not None and self._may_pass(error)

    def _made(self) -> None:
        self._forecaster = self._make()

    def _guarded(self, call: Callable[[Forecasts], None]) -> bool:
        """Call the forecaster; catch every error it raises, since its input may be anything.

        Returns False if the call is to be made again, because a file or memory was not available now.
        """
        if self._off or self._forecaster is None:
            return True
        error = raised_by(call, self._forecaster)
        return error is None or not self._may_pass(error)

    def _may_pass(self, error: BaseException) -> bool:
        """Return True if the error is a lack of files or memory, and a later step tries again; else end it."""
        self._loads += 1
        if passing(error) and self._loads <= PASSING_TRIES:
            return True
        self._end(error)
        return False

    def _end(self, error: BaseException) -> None:
        self._off = f"no forecast because the forecaster failed: {described(error)}"
        self._failed(self._off)


class NoForecasts:
    """Forecaster that gives, at every step, only the reason ``why`` there is no forecast."""

    def __init__(self, why: str) -> None:
        self._why = why

    def update(self, step: ClosedStep) -> Forecast:
        """Return a forecast that has only the reason why there is none."""
        return Forecast(step.step, absent=self._why)

    def notice(self, event: Event) -> None:
        """Do nothing: events do not change the reason."""


CHOSEN = "RLWATCH_FORECASTER"
"""Environment variable that names the plugin's forecaster to use instead of the shipped one."""


def chosen_forecaster() -> str:
    """Return the name of the plugin's forecaster in ``RLWATCH_FORECASTER``; empty: the shipped one is used."""
    return os.environ.get(CHOSEN, "")


def default_forecasts() -> Forecasts:
    """Return a new forecaster: the shipped one, or that of the plugin named in ``RLWATCH_FORECASTER``.

    Raises ``ConfigError`` if the model cannot be used.
    """
    from rlwatch.forecast.forecaster import default_forecaster

    chosen = chosen_forecaster()
    if chosen:
        known = usable("rlwatch.forecasters")
        if chosen not in known:
            return NoForecasts(f"no forecast because no plugin has a forecaster {chosen!r} ({CHOSEN}) that works")
        return cast("Forecasts", known[chosen]())
    try:
        return default_forecaster()
    except FileNotFoundError:
        return NoForecasts("no forecast because this installation of rlwatch holds no forecasting model")


OFF = "no forecast because forecasting is switched off (forecast=False, or forecast = false in rlwatch.toml)"


def switched_off() -> Forecasts:
    """Return a forecaster that gives only the reason that forecasting is switched off."""
    return NoForecasts(OFF)


def forecaster_for(*, wanted: bool) -> Callable[[], Forecasts]:
    """Return the function that makes a run's forecaster; ``wanted``: whether to forecast at all."""
    return default_forecasts if wanted else switched_off


def _failure(standing: Sequence[Finding], before: str) -> str:
    """Return kind and onset of the present failure as first reported; empty if there is none."""
    failures = [(finding.onset_step, finding.kind) for finding in standing if _critical(finding)]
    if not failures:
        return ""
    onset, kind = min(failures)
    return before or f"{words(kind)} since step {onset}"


def _unless_over(forecast: Forecast, failure: str) -> Forecast:
    """Return the forecast, or, once a failure has happened, one with the reason that there is none."""
    if failure:
        why = f"no forecast because the failure is there: {failure}"
    elif forecast.passed:
        why = f"no forecast because the run is beyond a limit: {PASSED.get(forecast.passed, forecast.passed)}"
    else:
        return forecast
    return Forecast(forecast.step, absent=why, log=forecast.log, passed=forecast.passed, over=True)


def _sound(forecast: Forecast) -> Forecast:
    """Return the forecast if its probabilities are in [0, 1]. Raises ``ValueError`` otherwise."""
    for name in ("p20", "p50", "p100"):
        chance = getattr(forecast, name)
        if chance is not None and not 0.0 <= chance <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {chance!r}")
    for name in ("risk", "steps_to", "error"):
        number = getattr(forecast, name)
        if number is not None and not (math.isfinite(number) and number >= 0.0):
            raise ValueError(f"{name} must be a finite number >= 0, got {number!r}")
    return forecast


def _critical(finding: Finding) -> bool:
    """Return whether ``finding`` is critical and about the training of the policy."""
    return finding.severity is Severity.CRITICAL and _of_training(finding)


def _warns(finding: Finding) -> bool:
    """Return whether ``finding`` is about the training of the policy, and at least a warning."""
    return finding.severity is not Severity.INFO and _of_training(finding)


def _of_training(finding: Finding) -> bool:
    """Return whether ``finding`` is about the policy: not about time, logging, or a reset or lost reference."""
    return finding.family != Family.SYSTEM.value and finding.kind not in OF_THE_REFERENCE


def _evidence(forecast: Forecast) -> dict[str, object]:
    numbers = {name.removeprefix(FORECAST): value for name, value in forecast.metrics.items()}
    why = [{"metric": reason.metric, "share": round(reason.share, 4)} for reason in forecast.why]
    return {**rounded(numbers), "limit": forecast.limit, "why": why}
