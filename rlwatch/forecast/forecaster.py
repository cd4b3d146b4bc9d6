"""The forecaster of one run: features, probabilities, thresholds, alarms and reasons."""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from rlwatch.error_boundary import Reported
from rlwatch.errors import ConfigError
from rlwatch.forecast.features import (
    BROKEN,
    FAR_AHEAD,
    FEATURES,
    LIMIT_FEATURES,
    LIMITS_V1,
    ChangeLimit,
    Features,
    FeatureStream,
    Ints,
    LimitProgress,
    nearest,
)
from rlwatch.forecast.forecast import Forecast, ForecastReason
from rlwatch.forecast.gate import Evidence, caveat, chosen_evidence, class_of, opens, why_closed
from rlwatch.forecast.model import Chances, Model, Outline, load, reasons, shipped_model, shipped_outline
from rlwatch.forecast.signals import SIGNALS, Floats, SignalNames
from rlwatch.records import ClosedStep, Event
from rlwatch.stats import median

BUDGET = "0.5"
"""Accepted false alarm episodes in 1000 healthy steps; at this budget few sound runs of 500 steps have one."""
SMOOTHED, SMOOTHED_STEPS = 3, 10
"""Most rows whose median is compared with the threshold, so that one odd row is no alarm, and most steps they may
span. In a log with a row every 20 steps, each already a mean, two more rows would delay an alarm by 40 steps.
"""
SPARSE = 4.0
"""Steps from row to row from which a log is forecast by the model of sparse logs, if there is one."""
UNSURE, STRICTER = 0.3, 1.8
"""Spread of the reward's rows, in spreads of the rewards, above which an alarm needs a higher probability, and the
largest factor on its odds. The spread is that of eleven responses in a step: hard data then move reward, entropy and
lengths together for some rows, which only failures do in large batches. The model of sparse logs was trained on hard
data.
"""
MODEL_VARIABLE = "RLWATCH_FORECAST_MODEL"
"""Environment variable with the path of a model to use in place of the shipped one."""
BUDGET_VARIABLE = "RLWATCH_FORECAST_BUDGET"
"""Environment variable with a budget to use in place of :data:`BUDGET`."""
THRESHOLD_VARIABLE = "RLWATCH_FORECAST_THRESHOLD"
"""Environment variable with a custom alarm threshold on p50."""
WORTH_REPORTING = 0.25
"""Risk below which limit and reasons are not computed, since nothing is abnormal and they double the cost."""


class Forecaster:
    """Forecasts one run from its closed steps, in order.

    Two layers share the budget of false alarms: the model (many signals together, long before a limit) and the progress
    to the nearest limit (one signal alone, for failures that the model has never seen). A run that logs too little for
    the model has only the second. The detectors report a single NaN; several within 25 steps may become a loop.

    Parameters
    ----------
    model
        A model of :func:`rlwatch.forecast.load`; None: the shipped one.
    budget
        Accepted false alarm episodes in 1000 healthy steps, one of those named in the model's file.
    own
        Threshold on p50 in place of the model's: a level that the user's own healthy runs have shown to be harmless
        (``rlwatch forecast calibrate``). It cannot go below the model's threshold for twice :data:`BUDGET`.
    gate
        Owner of the runs on which the shipped model must have shown skill on this kind of log
        (:mod:`rlwatch.forecast.gate`) for probabilities and alarms; other logs get the time to a limit only. None: no
        gate. Monitors of runs set it.

    Raises
    ------
    ConfigError
        If the shipped model's file is damaged, or the model has no thresholds for that budget.
    """

    def __init__(
        self,
        model: Model | None = None,
        *,
        budget: str = BUDGET,
        own: float | None = None,
        gate: Evidence | None = None,
    ) -> None:
        self.outline: Outline = model or _shipped()
        """The model, or the outline of the shipped one, whose heads are read for the first probability."""
        self._sparse = False
        self._budget = budget
        known = self._in_use.profiles[0].thresholds
        if budget not in known:
            budgets = ", ".join(sorted(known, key=float))
            raise ConfigError(f"the model has no threshold for a budget of {budget!r}; it has {budgets}")
        self._own = own
        self._places = _places(self._in_use)
        self._stream = FeatureStream()
        self._chances: deque[float] = deque(maxlen=SMOOTHED)
        self._reached: deque[float] = deque(maxlen=SMOOTHED)
        self._paced = False
        self._terms: Terms | None = None
        self._source: tuple[str | None, ...] = ()
        self._gate, self._open, self._log = gate, True, ""
        self._lines = StraightLines()
        self._taken: deque[tuple[ClosedStep, Features | None]] = deque()
        """Rows whose features are computed, but not their forecasts, because the model could not be read, and"""
        self._unreturned: deque[tuple[ClosedStep, Forecast]] = deque()
        """forecasts that the same call had made before."""

    @property
    def model(self) -> Model:
        """The model in use; for a sparse log, from the first forecast on, the model of sparse logs."""
        used = self._in_use
        if isinstance(used, Model):
            return used
        whole = _shipped_model()
        return whole.sparse if self._sparse and whole.sparse is not None else whole

    @property
    def _in_use(self) -> Outline:
        return self.outline.sparse if self._sparse and self.outline.sparse is not None else self.outline

    def notice(self, event: Event) -> None:
        """Forget the KL to the reference model if ``event`` is a reset of that model; other events are ignored."""
        if event.kind == "reference_reset":
            self._stream.forget_reference()

    def update(self, step: ClosedStep) -> Forecast:
        """Add a closed step of the run and return the forecast made at that step."""
        return self.extend([step])[0]

    def extend(self, steps: Sequence[ClosedStep]) -> list[Forecast]:
        """Add several closed steps and return the forecast at each; several times faster than one by one.

        If the model's file cannot be read, its error is raised, and the same steps may be given again, at once or one
        by one.
        """
        found: list[Forecast] = []
        while self._unreturned and len(found) < len(steps) and self._unreturned[0][0] is steps[len(found)]:
            found.append(self._unreturned.popleft()[1])
        with Reported(lambda _: self._unreturned.extend(zip(steps, found, strict=False))):
            while len(found) < len(steps):  # one by one until the baseline is complete
                count = 1 if self._stream.history.baseline is None else len(steps) - len(found)
                found += self._extend(steps[len(found) : len(found) + count])
        return found

    def _extend(self, steps: Sequence[ClosedStep]) -> list[Forecast]:
        features = self._features_of(steps)
        known = [each for each in features if each is not None]
        if not known:
            return [Forecast(step.step, absent=f"no forecast because {self._stream.waiting()}") for step in steps]
        if not self._paced:
            steps_so_far = self._stream.history.steps
            self._sparse = self.outline.sparse is not None and cadence(steps_so_far) >= SPARSE
            self._places = _places(self._in_use)
            rows = rows_judged(steps_so_far)
            self._paced, self._chances, self._reached = True, deque(maxlen=rows), deque(maxlen=rows)
        held = [self._held_to(each) for each in known]
        whole = [i for i, each in enumerate(held) if not (each.absent or each.limits_only)]
        chances = dict[int, tuple[Floats, Chances]]()
        if whole:
            with Reported(lambda _: self._taken.extendleft(reversed([*zip(steps, features, strict=True)]))):
                model = self.model
            for i in whole:
                known[i].shape()
            x = _stacked([known[i] for i in whole]).take(self._places, axis=1)
            chances = dict(zip(whole, zip(x, model.chances_of(x), strict=True), strict=True))
        lines = [] if self._open else StraightLines.of(_stacked(known))
        return [self._forecast(each, held[i], chances.get(i), lines[i : i + 1]) for i, each in enumerate(known)]

    def _features_of(self, steps: Sequence[ClosedStep]) -> list[Features | None]:
        """Return the features of the rows ``steps``; those that were taken before an error are not taken again."""
        known: list[Features | None] = []
        while self._taken and len(known) < len(steps) and self._taken[0][0] is steps[len(known)]:
            known.append(self._taken.popleft()[1])
        rest = steps[len(known) :]
        if not rest:
            return known
        return known + self._stream.without_shapes([step.step for step in rest], [step.metrics for step in rest])

    def _held_to(self, features: Features) -> Terms:
        """Return the thresholds for the logged signals, known once the baseline is; again when more are logged."""
        read = features.read
        new = self._terms is None or read.source != self._source
        if self._terms is None or (new and (self._terms.absent or self._gate)):
            self._terms = self._terms_for(frozenset(_names(read)))
            self._source = read.source
        return self._terms

    def _terms_for(self, signals: frozenset[str]) -> Terms:
        history = self._stream.history
        self._log = class_of(signals, cadence(history.steps), history.scatter())
        self._open = self._gate is None or opens(self._log, self._gate)
        found = terms(self._in_use, signals, self._budget, self._own)
        if self._open:
            return found
        why = why_closed(self._log)
        return replace(found, absent=found.absent and why, limits_only=why)

    @property
    def judged(self) -> float:
        """Median of the last few p50, which is compared with the threshold; 0 before there is a forecast."""
        return statistics.median(self._chances) if self._chances else 0.0

    def _limit(self, features: Features, held: Terms) -> tuple[LimitProgress | None, float, str]:
        """Return the nearest limit, the risk by the last rows' progress to it, and its type if they are beyond it."""
        close = nearest(features.reaches)
        self._reached.append(close.share if close else 0.0)
        share = median(self._reached)
        return close, share / held.static, close.limit.type if close is not None and share >= 1.0 else ""

    def _forecast(
        self,
        features: Features,
        held: Terms,
        model: tuple[Floats, Chances] | None,
        lines: Sequence[tuple[list[float], list[float]]],
    ) -> Forecast:
        """Return the forecast; ``model``: features and probabilities, where the run logs enough for them.

        ``lines``: the row's straight lines to the limits, where only these are given.
        """
        if held.absent:
            return Forecast(features.step, absent=held.absent, log=self._log)
        if not self._open:
            self._lines.update(features.step, *lines[0])
            return self._by_line(features, held)
        if model is None:
            return self._by_limit(features, held)
        x, chances = model
        close, by_limit, passed = self._limit(features, held)
        self._chances.append(chances.p50)
        by_model = self.judged / (held.model if self._sparse else held.threshold(features.unsure))
        risk = max(by_model, by_limit)
        limit, steps_to, why = "", chances.steps_to, tuple[ForecastReason, ...]()
        if risk >= WORTH_REPORTING and close is not None and by_limit > by_model:
            limit, steps_to, why = _of(close, features.read)
        elif risk >= WORTH_REPORTING:
            limit = self.model.limit(x) or (close.limit.type if close is not None else "")
            if self._gate and recedes(limit, features.values):
                limit = ""
            broken = {BROKEN: features.read.broken} if features.read.broken else {}
            why = reasons(self.model.why(x), _names(features.read) | broken)
        return Forecast(
            step=features.step,
            p20=chances.p20,
            p50=chances.p50,
            p100=chances.p100,
            risk=risk,
            alarm=risk >= 1.0,
            limit=limit,
            steps_to=steps_to,
            why=why,
            lean=held.lean,
            log=self._log,
            passed=passed,
            caveat=caveat(self._log) if self._gate else "",
        )

    def _by_line(self, features: Features, held: Terms) -> Forecast:
        """Return the time to the nearest limit on a straight line, for a kind of log without proven skill."""
        close, _, passed = self._limit(features, held)
        found = Forecast(features.step, limits_only=held.limits_only, log=self._log, passed=passed)
        if close is None or passed:
            return found
        limit, steps_to, why = _of(close, features.read)
        error, checks = self._lines.error(close.limit)
        if not steps_to or falsified(steps_to, error, checks):
            return found
        return replace(found, limit=limit, steps_to=steps_to, why=why, error=error, checks=checks)

    def _by_limit(self, features: Features, held: Terms) -> Forecast:
        """Return the forecast of a run that logs too little for the model: only its progress to the nearest limit."""
        close, risk, passed = self._limit(features, held)
        limit, steps_to, why = _of(close, features.read) if close is not None else ("", None, ())
        return Forecast(
            features.step,
            risk=risk,
            alarm=risk >= 1.0,
            limit=limit,
            steps_to=steps_to,
            why=why,
            limits_only=held.limits_only,
            log=self._log,
            passed=passed,
        )


def _stacked(features: Sequence[Features]) -> Floats:
    """Return the features of several rows as one array, (rows, features)."""
    return features[0].values[None] if len(features) == 1 else np.stack([each.values for each in features])


def _places(model: Outline) -> list[int]:
    """Return the indices of the model's features in the vector of all."""
    return [FEATURES.index(name) for name in model.features]


def _names(read: SignalNames) -> dict[str, str]:
    """Return the metric from which each signal of a run is read."""
    return {signal.name: metric for signal, metric in zip(SIGNALS, read.source, strict=True) if metric is not None}


def _of(close: LimitProgress, read: SignalNames) -> tuple[str, float | None, tuple[ForecastReason, ...]]:
    """Return type, time and metric of the nearest limit; no time where the signal does not move towards it."""
    signal = close.limit.signal
    ahead = close.steps if close.steps < FAR_AHEAD else None
    return close.limit.type, ahead, (ForecastReason(_names(read).get(signal, signal), 1.0),)


def cadence(steps: Ints | Floats) -> float:
    """Return the median number of steps between consecutive rows; 1 for a single row."""
    return float(median(np.diff(steps).tolist())) if len(steps) > 1 else 1.0


def rows_judged(steps: Ints | Floats) -> int:
    """Return the number of rows whose median p50 is compared with the threshold, for a log with rows at ``steps``."""
    return min(SMOOTHED, 1 + int(SMOOTHED_STEPS // cadence(steps)))


@cache
def _shipped() -> Outline:
    return shipped_outline()


@cache
def _shipped_model() -> Model:
    return shipped_model()


def smoothed_chances(rows: Mapping[int, Mapping[str, float]], model: Model | None = None) -> list[tuple[int, float]]:
    """Return (step, smoothed p50) at each step of an ended run that has a forecast, as the threshold is applied to it.

    ``rows``: canonical metrics by step; ``model``: None for the shipped one.
    """
    forecaster = Forecaster(model)
    forecasts = ((forecaster.update(ClosedStep(step, rows[step])), forecaster.judged) for step in sorted(rows))
    return [(forecast.step, judged) for forecast, judged in forecasts if forecast.p50 is not None]


def default_forecaster() -> Forecaster:
    """Return a new forecaster with the model named by :data:`MODEL_VARIABLE`, or the shipped one, which is gated.

    Raises
    ------
    ConfigError
        If that model cannot be used, or a variable has an invalid value.
    """
    path = os.environ.get(MODEL_VARIABLE, "")
    budget, own = os.environ.get(BUDGET_VARIABLE, "") or BUDGET, os.environ.get(THRESHOLD_VARIABLE, "")
    model = _loaded(path) if path else None
    gate = chosen_evidence() if model is None else None  # a custom model was judged on custom runs
    return Forecaster(model, budget=budget, own=_chance(own) if own else None, gate=gate)


def _chance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"{THRESHOLD_VARIABLE} is {text!r}; it must be a chance in (0, 1], as `calibrate` prints it")
    return value


@cache
def _loaded(path: str) -> Model:
    return load(path)


# Thresholds for a run, once its logged signals are known; or the reason why there are none.

FLOOR_BUDGET = "1"
"""Budget whose threshold is the lower bound of a custom threshold."""
ENOUGH = 0.2
"""Least share of the model's gain that the logged signals must cover for the run to get probabilities."""
LEAN = 0.45
"""Share of the model's gain below which an alarm of the model alone is a remark, since on public logs with few signals
it is wrong more often than on the runs its thresholds come from.
"""
LIMITED = frozenset(limit.signal for limit in LIMITS_V1)
"""Names of the signals that have a limit."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Alarm thresholds for one run. ``model``: least p50 that is an alarm; ``static``: least share of the way to a
    limit that is one.

    ``own``: True if ``model`` comes from the user's own runs, whose batches are as small as this run's.
    ``limits_only``: reason that there is no probability. ``lean``: the log has few of the model's inputs. ``absent``:
    reason that there is no forecast at all ("" otherwise).
    """

    model: float
    static: float
    own: bool = False
    limits_only: str = ""
    lean: bool = False
    absent: str = ""

    def threshold(self, unsure: float) -> float:
        """Return the least p50 that is an alarm when the reward's rows have the spread ``unsure`` (NaN: unknown).

        It is higher for noisy rewards. The spread is in spreads of the rewards.
        """
        if self.own or not unsure > UNSURE:
            return self.model
        odds = self.model * min(unsure / UNSURE, STRICTER)
        return odds / (1.0 - self.model + odds)


def terms(model: Outline, signals: frozenset[str], budget: str, own: float | None = None) -> Terms:
    """Return the alarm thresholds for a run that logs ``signals``.

    ``budget``: accepted false alarm episodes in 1000 healthy steps, one of those in the model's file; ``own``: a custom
    threshold, as for :class:`rlwatch.forecast.Forecaster`.
    """
    known = model.known(signals)
    short = "" if known >= ENOUGH else _short(model, signals, known)
    if short and not signals & LIMITED:
        return Terms(1.0, 1.0, absent=f"no forecast {short}")
    profile = model.profile(signals)
    threshold = profile.thresholds[budget]
    if own is not None:
        threshold = max(own, profile.thresholds.get(FLOOR_BUDGET, threshold))
    limits_only = f"no chance is given {short}" if short else ""
    return Terms(threshold, profile.static[budget], own=own is not None, limits_only=limits_only, lean=known < LEAN)


def _short(model: Outline, signals: frozenset[str], known: float) -> str:
    """Return the missing metrics, those with the largest gain first."""
    missing = sorted(set(model.gains) - signals, key=lambda s: -model.gains[s])
    wanted = ", ".join(s.metrics[0] for s in SIGNALS if s.name in missing[:4])
    return f"because this run logs {known:.0%} of what the model goes by; it would need {wanted}"


# Straight lines to the limits of a run, and their errors in steps on this run so far.

CHECKED_AFTER = 20
"""Steps after which a straight line is compared with the course that the run took."""
ROWS, CHECKS = 64, 20
"""Most rows whose lines are stored, and most of the newest checks that count."""
LEAST = 3
"""Checks from which a line is hidden if earlier lines erred by more than the time it gives."""
_FIRST = -1 - len(LIMIT_FEATURES)


class StraightLines:
    """Straight lines to the limits, each compared with the run :data:`CHECKED_AFTER` steps later; one for each row and
    limit.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[int, list[float], list[float]]] = deque(maxlen=ROWS)
        self._out: list[deque[float]] = [deque(maxlen=CHECKS) for _ in LIMITS_V1]

    @staticmethod
    def of(values: Floats) -> list[tuple[list[float], list[float]]]:
        """Return for each row of the features ``values``, (rows, features), its shares of the way to each limit, and
        their change per step on a straight line.
        """
        pairs = values[:, _FIRST:-1]
        if len(pairs) == 1:
            row: list[float] = pairs[0].tolist()
            ways = list(zip(row[::2], row[1::2], strict=True))
            return [(row[::2], [(1.0 - share) / to if 0.0 < to < FAR_AHEAD else 0.0 for share, to in ways])]
        shares, steps = pairs[:, ::2], pairs[:, 1::2]
        with np.errstate(all="ignore"):
            paces = np.where((steps > 0.0) & (steps < FAR_AHEAD), (1.0 - shares) / steps, 0.0)
        return list(zip(shares.tolist(), paces.tolist(), strict=True))

    def update(self, step: int, share: list[float], pace: list[float]) -> None:
        """Take the row at ``step``, with what :meth:`of` returned for it, and check the lines that are due."""
        rows, before = self._rows, None
        while rows and rows[-1][0] >= step:
            rows.pop()  # steps that are run again
        while rows and rows[0][0] <= step - CHECKED_AFTER:
            before = rows.popleft()
        if before is not None:
            self._check(step, share, *before)
        rows.append((step, share, pace))

    def _check(self, step: int, share: list[float], before: int, at: list[float], pace: list[float]) -> None:
        """Compare the newest line that is due with the run."""
        for i, speed in enumerate(pace):
            if speed > 0.0:
                out = abs(at[i] + speed * (step - before) - share[i])
                if math.isfinite(out):
                    self._out[i].append(out / speed)

    def error(self, limit: ChangeLimit) -> tuple[float | None, int]:
        """Return the median error in steps of earlier lines to ``limit`` (None without any), and the
        number of checks.
        """
        places = [i for i, each in enumerate(LIMITS_V1) if each == limit]
        out = self._out[places[0]] if places else ()
        return (float(median(list(out))), len(out)) if out else (None, 0)


def falsified(steps_to: float, error: float | None, checks: int) -> bool:
    """Return True if the median error of earlier straight lines exceeds ``steps_to``, the time that a new one gives."""
    return error is not None and checks >= LEAST and error > max(steps_to, CHECKED_AFTER / 2)


def recedes(type_: str, values: Floats) -> bool:
    """Return True if no signal in the features ``values`` has moved to its limit of the type ``type_``."""
    shares = [
        share for share, limit in zip(values[_FIRST:-1:2].tolist(), LIMITS_V1, strict=True) if limit.type == type_
    ]
    known = [share for share in shares if math.isfinite(share)]
    return bool(known) and max(known) <= 0.0
