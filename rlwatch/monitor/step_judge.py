"""Judge closed steps: run the detectors, the forecaster and the alert rules on them, in order.

A :class:`StepJudge` does not choose the rows: the :class:`~rlwatch.monitor.engine.Monitor` passes those of one attempt,
or of the branch that follows a rollback. :class:`Soundness` judges to which rows it is good to return.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, cast

from rlwatch.alerts.engine import AlertEngine, Transition
from rlwatch.control.policy import ROWS_AFTER, ROWS_KEPT
from rlwatch.detectors.base import DetectorSet, stretches
from rlwatch.detectors.context import noise_of
from rlwatch.detectors.index import NotRun, not_run
from rlwatch.diagnosis import Diagnosis, KnobTracker, diagnose, row_steps
from rlwatch.errors import ConfigError
from rlwatch.forecast import Forecast
from rlwatch.metrics import Family
from rlwatch.monitor.episodes import Episodes
from rlwatch.monitor.forecasting import NAME, Forecasting
from rlwatch.records import LOCALISED, ClosedStep, Event, Finding, ForecastRecord, JudgedRow, Severity
from rlwatch.state import SERIOUS, End, Ending, verdict_of
from rlwatch.stats import median
from rlwatch.wording import number


@dataclass(frozen=True, slots=True)
class MonitorOutcome:
    """Result of judging a row: findings to publish, changes of alerts, and forecasts, in order.

    ``recoveries``: published findings that eased or ended. ``forecasts``: the forecast of each closed step; ``kept``:
    the same as records for the store.
    """

    findings: tuple[Finding, ...] = ()
    transitions: tuple[Transition, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    kept: tuple[ForecastRecord, ...] = ()
    recoveries: tuple[Finding, ...] = ()

    def __add__(self, other: MonitorOutcome) -> MonitorOutcome:
        return joined((self, other))


def joined(outcomes: Iterable[MonitorOutcome]) -> MonitorOutcome:
    """Return one outcome with the parts of all ``outcomes``, in linear time."""
    parts = tuple(outcomes)
    return MonitorOutcome(
        tuple(finding for part in parts for finding in part.findings),
        tuple(transition for part in parts for transition in part.transitions),
        tuple(forecast for part in parts for forecast in part.forecasts),
        tuple(record for part in parts for record in part.kept),
        tuple(finding for part in parts for finding in part.recoveries),
    )


NOTHING = MonitorOutcome()
REMEMBERED = 400
"""Number of published findings, and of events, that a diagnosis considers."""


class Arrived(NamedTuple):
    """A row that is judged before its step closes, with canonical names (``view``), and the step that is open
    (``now``).
    """

    view: ClosedStep
    now: int


class StepJudge:
    """Judges the closed steps of one attempt (process of a run) with detectors, forecaster and alert rules, in order.

    Parameters
    ----------
    detectors, forecasting, alerts
        Fresh instances: all of them keep state.
    explains
        Whether a diagnosis will be requested.
    acts
        Whether something may act on the health of the run.
    """

    def __init__(
        self,
        detectors: DetectorSet,
        forecasting: Forecasting,
        alerts: AlertEngine,
        *,
        explains: bool = True,
        acts: bool = True,
    ) -> None:
        self.detectors = detectors
        self.forecasting = forecasting
        self.alerts = alerts
        self.episodes = Episodes()
        self.soundness = Soundness() if acts else None
        """None where no one will ask for the health of the run."""
        self.lookback = Lookback(explains=explains)
        self.holding: tuple[Finding, ...] = ()
        """The findings that hold now."""
        self._localised = LocalisedSteps()
        self._judged = 0
        """Number of closed steps so far."""

    def judge(self, view: ClosedStep | Arrived) -> MonitorOutcome:
        """Judge ``view``, which is a closed step, or a single row whose step is still open; return the outcome."""
        return self._step(view) if isinstance(view, ClosedStep) else self._arrival(*view)

    def each_of(self, views: list[ClosedStep | Arrived]) -> Iterator[MonitorOutcome]:
        """Judge all ``views``, yield the outcome of each in order, and empty the list at the end.

        Forecasts, and detectors over rows without findings, are computed in batches.
        """
        self.forecasting.ahead([view for view in views if isinstance(view, ClosedStep)])
        for closed, group in groupby(views, lambda view: isinstance(view, ClosedStep)):
            if not closed:
                yield from map(self.judge, group)
                continue
            steps = cast("list[ClosedStep]", list(group))
            for stretch in stretches(steps, self._judged, lambda: self.detectors.longest):
                self.detectors.ahead(stretch)
                yield from map(self._step, stretch)
            self._judged += len(steps)
        views.clear()

    def notice(self, event: Event) -> None:
        """Pass an event of the run to the detectors, the forecaster and the diagnosis."""
        self._localised.note(event)
        self.lookback.events.append(event)
        self.forecasting.notice(event)
        for detector in self.detectors:
            detector.notice(event)

    def judge_as(self, other: StepJudge) -> None:
        """Take over detectors, forecaster and health judge of ``other``, for example after a rollback; open findings
        and alerts continue.
        """
        self.detectors, self.forecasting, self.soundness = other.detectors, other.forecasting, other.soundness

    def not_run(self) -> list[NotRun]:
        """Return the detectors that lacked metrics or failed so far, and the forecaster if it made no forecast, with
        reasons.
        """
        lacking = not_run(self.detectors, self.lookback.measured)
        lacking += [NotRun(name, reason) for name, reason in self.detectors.broken.items()]
        absent = self.forecasting.absent
        return [*lacking, NotRun(NAME, absent)] if absent else lacking

    def _arrival(self, view: ClosedStep, now: int) -> MonitorOutcome:
        """Judge a record while the step ``now`` is open."""
        holding = self._localised.with_culprits([f for detector in self.detectors for f in detector.arrival(view)])
        if not holding:
            return NOTHING
        newest = {(f.detector, f.kind): f for f in (*self.holding, *holding)}
        self.holding = tuple(newest.values())
        return MonitorOutcome(
            self._published(self.episodes.arrival(holding), view)[0],
            tuple(self.alerts.arrival(view.seq, now, holding, ts=view.ts)),
        )

    def _step(self, step: ClosedStep) -> MonitorOutcome:
        self.lookback.add(step)
        holding = self._localised.with_culprits(self.detectors.update(step))
        kept = self.forecasting.step(step, self.episodes.standing(holding))
        forecast = self.forecasting.newest
        holding += self.forecasting.holding(step, holding)
        reported, holding = self.episodes.closed(step, holding)
        self.holding = tuple(holding)
        if self.soundness is not None:
            self.soundness.update(step, holding)
        findings, recoveries = self._published(reported, step)
        return MonitorOutcome(
            findings,
            tuple(self.alerts.step(step.seq, step.step, holding, ts=step.ts, back=self.episodes.reason)),
            () if forecast is None else (forecast,),
            kept,
            recoveries,
        )

    def _published(
        self, findings: Sequence[Finding], step: ClosedStep
    ) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
        """Add attempt and ``seq`` to the findings; return the failures and the recoveries."""
        if not findings:
            return (), ()
        stamped = tuple(replace(finding, attempt=step.attempt, seq=step.seq) for finding in findings)
        failures = tuple(finding for finding in stamped if not finding.stage.better)
        self.lookback.findings.extend(failures)
        return failures, tuple(finding for finding in stamped if finding.stage.better)


class Lookback:
    """Newest findings, events and steps of a run, and its settings: evidence of a diagnosis.

    ``explains``: whether a diagnosis will be requested; otherwise settings are not followed.
    """

    def __init__(self, *, explains: bool = True) -> None:
        self.findings: deque[Finding] = deque(maxlen=REMEMBERED)
        """Published findings."""
        self.events: deque[Event] = deque(maxlen=REMEMBERED)
        self.measured: set[str] = set()
        """Names of all metrics so far."""
        self._steps: deque[int] = deque(maxlen=REMEMBERED)
        self._knobs = KnobTracker() if explains else None
        self._names: dict[str, tuple[str, ...]] | None = None
        """Beginning of the newest row: the next row mostly has the same names."""

    def add(self, step: ClosedStep) -> None:
        """Take the next closed step of the run as evidence of a diagnosis."""
        if self._names is not step.beginning:
            self._names = step.beginning
            self.measured.update(step.metrics)
        self._steps.append(step.step)
        if self._knobs is not None:
            self._knobs.update(step.step, step.metrics)

    def diagnosis(self, source: str) -> Diagnosis:
        """Return the most likely cause of the findings so far; ``source`` is the trainer.

        Raises ``ConfigError`` if this was made with ``explains=False``.
        """
        if self._knobs is None:
            raise ConfigError("this monitor was made with explains=False; make one with explains=True for a diagnosis")
        return diagnose(
            self.findings,
            events=self.events,
            source=source,
            row_steps=row_steps(self._steps),
            measured=self.measured,
            starts={},
            turns=self._knobs.turns,
            first_step=self._knobs.first_step,
        )


# The culprits of a localised step, added to the findings of that step.

LOCALISED_STEPS = 16
"""Number of steps with localised gradients that are kept: a step is judged only when the next begins."""
REPEATED = ("message", "why_not", "verdict", "cause", "cures", "count", "method", "gap", "complete", "culprits")
"""Parts of the event of a localised gradient that a finding repeats."""


class LocalisedSteps:
    """Adds the tokens responsible for a step's gradient to the findings on this gradient."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=LOCALISED_STEPS)

    def note(self, event: Event) -> None:
        """Keep an event, if it reports a localised gradient."""
        if event.kind == LOCALISED:
            self._events.append(event)

    def with_culprits(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings; those on the gradient of a localised step have the responsible tokens added."""
        return [self._with_culprits(finding) for finding in findings] if self._events else list(findings)

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


# Soundness of rows.

REWARD, ENTROPY, MISMATCH = "reward/mean", "policy/entropy", "mismatch/k3"
REWARD_ROWS, MISMATCH_ROWS = ROWS_AFTER, 3
"""Rows whose median counts."""
NEAR_BEST = 0.9
"""Smallest median reward, as a fraction of the best; a noisy reward may be lower by a row's noise."""
LEAST_ENTROPY, MOST_ENTROPY = 0.25, 1.6
"""Limits of the entropy, as multiples of the first row's."""
MOST_MISMATCH = 0.05
"""Limit of the mismatch k3, in nats per token."""


class Soundness:
    """Judges whether a run is healthy at a row, which decides whether a snapshot is good to return to.

    A row is compared with the run's first rows and its best so far, the first row included: a run that its first update
    broke must not be its own baseline (measured: a baseline of rows that were broken already saved 0 of 2 runs, one
    from the first row 2 of 2). A row is sound if the run's state machine (:mod:`rlwatch.state`) reports no failure, the
    median reward is near its best, and entropy and mismatch are within their limits.
    """

    def __init__(self) -> None:
        self._rewards: deque[float] = deque(maxlen=REWARD_ROWS)
        self._mismatches: deque[float] = deque(maxlen=MISMATCH_ROWS)
        self._level: float | None = None
        self._noise = 0.0
        """Median of the newest rewards, and the standard deviation of one."""
        self._best: float | None = None
        self._entropy: float | None = None
        self.rows: deque[JudgedRow] = deque(maxlen=ROWS_KEPT)
        """The newest rows, judged."""

    def update(self, step: ClosedStep, holding: Sequence[Finding]) -> None:
        """Judge whether the run is healthy at the next closed step, given the findings ``holding`` at it, and keep the
        result in ``rows``.
        """
        why_not = self._why_not(step, holding)
        if why_not or REWARD in step.metrics:  # a row without a reward is no evidence that all is well
            entropy = step.metrics.get(ENTROPY)
            ratio = entropy / self._entropy if entropy is not None and self._entropy else None
            level, noise = self._level, self._noise
            self.rows.append(JudgedRow(step.step, why_not, level, noise, ratio, step.metrics.get(REWARD)))

    def _why_not(self, step: ClosedStep, holding: Sequence[Finding]) -> str:
        reasons = [
            self._reward(step),
            self._exploration(step),
            self._engine(step),
        ]  # each keeps state: all must run
        # Without a critical finding no state is serious, whatever else holds.
        critical = any(finding.severity is Severity.CRITICAL for finding in holding)
        verdict = verdict_of(holding, {}, ending=Ending(End.GOES_ON)) if critical else None
        if verdict is not None and verdict.state in SERIOUS:
            return verdict.brief
        return next(filter(None, reasons), "")

    def _reward(self, step: ClosedStep) -> str:
        value = step.metrics.get(REWARD)
        if value is None:
            return ""
        if not math.isfinite(value):
            return "the reward is not finite"
        self._rewards.append(value)
        rewards = list(self._rewards)
        self._level, self._noise = level, noise = median(rewards), noise_of(rewards)
        best = self._best = level if self._best is None else max(self._best, level)
        least = best - max((1.0 - NEAR_BEST) * abs(best), noise)
        return "" if level >= least else f"the reward is {number(level)}, its best {number(best)}"

    def _exploration(self, step: ClosedStep) -> str:
        value = step.metrics.get(ENTROPY)
        if value is None:
            return ""
        if not math.isfinite(value):
            return "the entropy is not finite"
        first = self._entropy = value if self._entropy is None else self._entropy
        if LEAST_ENTROPY * first <= value <= MOST_ENTROPY * first:
            return ""
        return f"the entropy is {number(value)}, {number(first)} at first"

    def _engine(self, step: ClosedStep) -> str:
        value = step.metrics.get(MISMATCH)
        if value is None:
            return ""
        if not math.isfinite(value):
            return "the mismatch is not finite"
        self._mismatches.append(value)
        level = median(list(self._mismatches))
        return "" if level < MOST_MISMATCH else f"the mismatch k3 is {number(level)} nats a token"
