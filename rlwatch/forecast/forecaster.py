"""The forecaster of one run: features, chances, alarm, and why."""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from functools import cache

from rlwatch.errors import ConfigError
from rlwatch.forecast.artefact import load, shipped
from rlwatch.forecast.features import FEATURES, Features, FeatureStream
from rlwatch.forecast.forecast import Forecast, Reason
from rlwatch.forecast.limits import FAR_AHEAD, LIMITS_V1, Reach, nearest
from rlwatch.forecast.model import Chances, Model, Profile, reasons
from rlwatch.forecast.signals import SIGNALS
from rlwatch.records import ClosedStep, Event

BUDGET = "1"
"""False alarm episodes in 1000 healthy steps that are put up with."""
FLOOR = "2"
"""Budget whose threshold one of one's own does not go below."""
SMOOTHED = 3
"""Rows whose median is judged: one odd row is no alarm."""
MODEL_VARIABLE = "RLWATCH_FORECAST_MODEL"
"""Environment variable with the path of a model to use instead of the shipped one."""
BUDGET_VARIABLE = "RLWATCH_FORECAST_BUDGET"
"""Environment variable with another budget than :data:`BUDGET`."""
THRESHOLD_VARIABLE = "RLWATCH_FORECAST_THRESHOLD"
"""Environment variable with a threshold of one's own."""
ENOUGH = 0.2
"""Share of what the model learnt that a run must be able to tell to be given chances."""
LEAN = 0.45
"""Below this share a run is held to half the budget, and an alarm of the model alone is a remark: on public logs of few
averages it is wrong more often than on the runs its thresholds come from."""
WORTH_TELLING = 0.25
"""Risk below which no limit and no reason is looked for: nothing stands out, and looking costs as much again."""
LIMITED = frozenset(limit.signal for limit in LIMITS_V1)
"""Signals that have a limit."""


class Forecaster:
    """Forecasts one run from its closed steps, in order.

    Two layers share the budget of false alarms: the model (many signals together, long before a limit) and the way to
    the nearest limit (one signal alone, also of failures the model has never seen). A run that logs too little for the
    model has the second alone. Hard facts, such as NaN, are the detectors' work.

    Parameters
    ----------
    model
        A model of :func:`rlwatch.forecast.load`; the one that comes with rlwatch if None.
    budget
        Which of its thresholds: false alarm episodes in 1000 healthy steps, as the model's file names them.
    own
        Threshold on p50 instead of the model's: what one's own healthy runs have shown to be harmless
        (``rlwatch forecast calibrate``). Below the model's threshold for twice the budget it is not followed.

    Raises
    ------
    ConfigError
        If the shipped model's file is damaged, or the model has no thresholds for that budget.
    """

    def __init__(self, model: Model | None = None, *, budget: str = BUDGET, own: float | None = None) -> None:
        self._model = model or _shipped()
        self._budget = budget
        known = self._model.profiles[0].thresholds
        if budget not in known:
            budgets = ", ".join(sorted(known, key=float))
            raise ConfigError(f"the model has no threshold for a budget of {budget!r}; it has {budgets}")
        self._own = own
        self._places = [FEATURES.index(name) for name in self._model.features]
        self._stream = FeatureStream()
        self._chances: deque[float] = deque(maxlen=SMOOTHED)
        self._reached: deque[float] = deque(maxlen=SMOOTHED)
        self._profile: Profile | None = None
        self._absent = self._limits_only = ""
        self._lean = False

    def notice(self, event: Event) -> None:
        """A reset of the reference is no change of the policy."""
        if event.kind == "reference_reset":
            self._stream.forget_reference()

    def update(self, step: ClosedStep) -> Forecast:
        """What the run's steps so far say of its next ones."""
        features = self._stream.update(step.step, step.metrics)
        if features is None:
            return Forecast(step.step, absent=f"no forecast because {self._stream.waiting()}")
        profile = self._profile or self._choose()
        if profile is None:
            return Forecast(step.step, absent=self._absent)
        return self._forecast(features, profile)

    @property
    def judged(self) -> float:
        """Median of the last few p50: what is held against the threshold; 0 before there is a forecast."""
        return statistics.median(self._chances) if self._chances else 0.0

    def threshold(self, profile: Profile) -> float:
        """Least p50 that is an alarm, for a run that logs these signals."""
        if self._own is None:
            return profile.thresholds[self._budget]
        return max(self._own, profile.thresholds.get(FLOOR, profile.thresholds[self._budget]))

    def _choose(self) -> Profile | None:
        """Once the baseline is known: the thresholds for what this run logs, or why there are none."""
        names = self._names()
        signals = frozenset(names)
        known = self._model.known(signals)
        if known < ENOUGH:
            missing = sorted(set(self._model.gains) - signals, key=lambda s: -self._model.gains[s])
            wanted = ", ".join(s.metrics[0] for s in SIGNALS if s.name in missing[:4])
            short = f"because this run logs {known:.0%} of what the model goes by; it would need {wanted}"
            if not signals & LIMITED:
                self._absent = f"no forecast {short}"
                return None
            self._limits_only = f"no chance is given {short}"
        if known < LEAN:
            self._lean = True
            self._budget = stricter(self._budget, self._model.profiles[0].thresholds)
        self._profile = self._model.profile(signals)
        return self._profile

    def _names(self) -> dict[str, str]:
        """Metric that each signal of this run is read from."""
        pairs = zip(SIGNALS, self._stream.history.source, strict=True)
        return {signal.name: metric for signal, metric in pairs if metric is not None}

    def _forecast(self, features: Features, profile: Profile) -> Forecast:
        close = nearest(features.reaches)
        self._reached.append(close.share if close else 0.0)
        by_limit = statistics.median(self._reached) / profile.static[self._budget]
        if self._limits_only:
            return self._by_limit(features.step, by_limit, close)
        x = features.values[self._places].tolist()
        chances = self._model.chances(x)
        self._chances.append(chances.p50)
        by_model = self.judged / self.threshold(profile)
        risk = max(by_model, by_limit)
        limit, steps_to, why = self._told(x, chances, close, risk, alone=by_limit > by_model)
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
            lean=self._lean,
        )

    def _by_limit(self, step: int, risk: float, close: Reach | None) -> Forecast:
        """What a run is told that logs too little for the model."""
        if close is None:
            return Forecast(step, risk=risk, alarm=risk >= 1.0, limits_only=self._limits_only)
        limit, steps_to, why = self._of(close)
        return Forecast(
            step, risk=risk, alarm=risk >= 1.0, limit=limit, steps_to=steps_to, why=why, limits_only=self._limits_only
        )

    def _of(self, close: Reach) -> tuple[str, float | None, tuple[Reason, ...]]:
        """Which limit, when, and its metric; no time where the signal does not move towards it."""
        signal = close.limit.signal
        ahead = close.steps if close.steps < FAR_AHEAD else None
        return close.limit.type, ahead, (Reason(self._names().get(signal, signal), 1.0),)

    def _told(
        self, x: list[float], chances: Chances, close: Reach | None, risk: float, *, alone: bool
    ) -> tuple[str, float | None, tuple[Reason, ...]]:
        """Which limit, when, and what speaks for it, where there is a risk to speak of.

        ``alone``: the nearest limit says more than the model.
        """
        if risk < WORTH_TELLING:
            return "", chances.steps_to, ()
        if close is not None and alone:
            return self._of(close)
        limit = self._model.limit(x) or (close.limit.type if close is not None else "")
        return limit, chances.steps_to, reasons(self._model.why(x), self._names())


def stricter(budget: str, known: Collection[str]) -> str:
    """The largest of the ``known`` budgets that is at most half of ``budget``; that itself where there is none.

    >>> stricter("1", ["0.25", "0.5", "1"]), stricter("0.25", ["0.25", "1"])
    ('0.5', '0.25')
    """
    return max((each for each in known if float(each) <= float(budget) / 2), key=float, default=budget)


@cache
def _shipped() -> Model:
    return shipped()


def smoothed_chances(rows: Mapping[int, Mapping[str, float]], model: Model | None = None) -> list[tuple[int, float]]:
    """(step, p50 as it is judged) of a run that is over. ``rows``: step -> canonical metrics."""
    forecaster = Forecaster(model)
    told = ((forecaster.update(ClosedStep(step, rows[step])), forecaster.judged) for step in sorted(rows))
    return [(forecast.step, judged) for forecast, judged in told if forecast.p50 is not None]


def default_forecaster() -> Forecaster:
    """A fresh forecaster with the model that :data:`MODEL_VARIABLE` names, or the shipped one.

    Raises
    ------
    ConfigError
        If that model cannot be used.
    """
    path = os.environ.get(MODEL_VARIABLE, "")
    budget, own = os.environ.get(BUDGET_VARIABLE, "") or BUDGET, os.environ.get(THRESHOLD_VARIABLE, "")
    return Forecaster(_loaded(path) if path else None, budget=budget, own=_chance(own) if own else None)


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
