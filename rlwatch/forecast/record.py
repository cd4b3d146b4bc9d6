"""The record of past forecasts: each alarm with its outcome and lead time, and how often probabilities were right.

An alarm came true if a failure (an onset by the newest labels) began at or after its first row and within
:data:`HORIZON` steps of its last one. A user's answer ("was this right?") takes precedence over that.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import numpy as np

from rlwatch.errors import ConfigError
from rlwatch.forecast.forecast import Forecast, forecast_of
from rlwatch.forecast.labels import label_runs
from rlwatch.forecast.tables import table_of_rows
from rlwatch.forecast.thresholds import NEAR, QUIET_STEPS
from rlwatch.metrics import RowReader
from rlwatch.ports import RunReader, Store
from rlwatch.records import AuditEntry, ForecastAnswer, RunInfo, RunState, StepRecord

HORIZON = 50
"""Steps within which a failure is forecast by p50, the probability that raises alarms."""
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0)
"""Bounds of the bins of the reliability curve."""


class Came(StrEnum):
    """Outcomes of a past forecast."""

    TRUE = "came true"
    FALSE = "did not come true"
    MISSED = "missed"
    """A failure began without an earlier alarm."""
    AFTERWARDS = "after the failure"
    """The alarm was raised after the failure had begun, so it was no forecast."""
    OPEN = "open"
    """The run goes on and its horizon is not over."""
    CUT_SHORT = "cut short"
    """The run ended before its horizon was over."""


@dataclass(frozen=True, slots=True)
class Past:
    """One past alarm, from its first row ``step`` to its ``last``; or a missed failure (``step``: its onset).

    ``p50``: the highest probability during the alarm (None: only limits were watched). ``onset``, ``type``: of the
    run's failure, if it failed; ``lead``: steps from the first row of the alarm to the onset.
    """

    run_id: str
    step: int
    last: int
    came: Came
    p50: float | None = None
    limit: str = ""
    attempt: int = 1
    onset: int | None = None
    type: str = ""
    answer: ForecastAnswer | None = None

    @property
    def lead(self) -> int | None:
        """Steps of warning that a true alarm gave before the failure; None for any other outcome."""
        return self.onset - self.step if self.came is Came.TRUE and self.onset is not None else None

    @property
    def right(self) -> bool | None:
        """True if the forecast was right, False if it was wrong, None while unknown; a user's answer
        takes precedence.
        """
        if self.answer is not None:
            return self.answer.right
        return {Came.TRUE: True, Came.FALSE: False}.get(self.came)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Past forecasts of one run: alarms and misses, and for each step with a probability True if a failure followed."""

    run_id: str
    past: tuple[Past, ...] = ()
    predicted: tuple[float, ...] = ()
    came: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Bin:
    """Steps with a predicted probability in [``low``, ``high``): its mean, and the observed share followed by a
    failure.
    """

    low: float
    high: float
    steps: int
    runs: int
    said: float
    came: float


@dataclass(frozen=True, slots=True)
class Record:
    """Past forecasts of many runs. ``runs``: number of runs with a forecast."""

    past: tuple[Past, ...] = ()
    curve: tuple[Bin, ...] = ()
    runs: int = 0
    steps: int = 0
    leads: tuple[int, ...] = field(default=())

    def count(self, came: Came) -> int:
        """Return the number of alarms and misses with the outcome ``came``."""
        return sum(past.came is came for past in self.past)


def rows_of(store: RunReader, run: RunInfo) -> dict[int, dict[str, float]]:
    """Return the canonical metrics of a run by step, following its last attempt. May raise ``StoreError``.

    Steps of earlier attempts are used only up to the point from which a later one continued.
    """
    rows, reader = dict[int, dict[str, float]](), RowReader(run.source)
    if run.last_step is None:
        return rows
    for item in store.branch(run.run_id, run.attempt + 1, run.last_step + 1):
        if isinstance(item, StepRecord):
            rows.setdefault(item.step, {}).update(reader.canonicalise(item.metrics)[0])
    return rows


def record_of_run(store: Store, run: RunInfo) -> RunRecord | None:
    """Return the record of one run's past forecasts, with users' answers; None without a forecast. May raise
    ``StoreError``.
    """
    starts = {attempt: min(steps) for attempt, steps in store.steps(run.run_id).items() if steps}
    forecasts = [
        (kept.attempt, forecast_of(kept))
        for kept in store.forecasts(run.run_id)
        if all(kept.step < start for attempt, start in starts.items() if attempt > kept.attempt)
    ]
    given = [(attempt, each) for attempt, each in forecasts if not each.absent]
    if not given:
        return None
    [label] = label_runs(table_of_rows({run.run_id: rows_of(store, run)}))
    last = max(run.last_step or 0, *(each.step for _, each in given))
    alarms = [(attempt, each) for attempt, each in given if each.alarm or (each.risk or 0.0) >= 1.0]
    answers = {(a.attempt, a.step): a for a in store.forecast_answers(run.run_id)}
    past = []
    for episode in _episodes(alarms):
        (attempt, first), ended = episode[0], episode[-1][1].step
        came = _came(first.step, ended, label.onset, last, goes_on=run.state is RunState.RUNNING)
        highest = max((each.p50 for _, each in episode if each.p50 is not None), default=None)
        answer = next((answers[key] for a, each in episode if (key := (a, each.step)) in answers), None)
        past.append(
            Past(run.run_id, first.step, ended, came, highest, first.limit, attempt, label.onset, label.type, answer)
        )
    seen = any(0 < (label.onset or 0) - each.step <= HORIZON for _, each in given)
    if label.onset is not None and seen and not any(each.step <= label.onset for each in past):
        attempt = given[-1][0]
        answer = answers.get((attempt, label.onset))
        missed = Past(
            run.run_id, label.onset, label.onset, Came.MISSED, None, "", attempt, label.onset, label.type, answer
        )
        past.append(missed)
    predicted = [
        (each.p50, each.step) for _, each in given if each.p50 is not None and each.step < (label.onset or math.inf)
    ]
    known = [(p, label.onset is not None and label.onset - at <= HORIZON, at) for p, at in predicted]
    counted = [(p, followed) for p, followed, at in known if followed or at + HORIZON <= last]
    return RunRecord(run.run_id, tuple(past), tuple(p for p, _ in counted), tuple(followed for _, followed in counted))


def _episodes(alarms: Sequence[tuple[int, Forecast]]) -> list[list[tuple[int, Forecast]]]:
    found: list[list[tuple[int, Forecast]]] = []
    for each in alarms:
        if found and 0 <= each[1].step - found[-1][-1][1].step <= QUIET_STEPS:
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _came(first: int, ended: int, onset: int | None, last: int, *, goes_on: bool) -> Came:
    if onset is not None and onset < first:
        return Came.AFTERWARDS
    if onset is not None and onset - ended <= HORIZON:
        return Came.TRUE
    if last >= ended + HORIZON:
        return Came.FALSE
    return Came.OPEN if goes_on else Came.CUT_SHORT


def gathered(records: Iterable[RunRecord]) -> Record:
    """Merge the forecast records of several runs into one; alarms keep the order of their runs."""
    known = list(records)
    past = tuple(each for record in known for each in record.past)
    leads = tuple(sorted(each.lead for each in past if each.lead is not None))
    return Record(past, tuple(curve(known)), len(known), sum(len(record.predicted) for record in known), leads)


def curve(records: Sequence[RunRecord]) -> list[Bin]:
    """Return the reliability curve: for each bin of probabilities its steps, and how often a failure followed."""
    predicted = np.array([p for record in records for p in record.predicted])
    came = np.array([followed for record in records for followed in record.came], dtype=bool)
    whose = np.array([number for number, record in enumerate(records) for _ in record.predicted], dtype=np.int64)
    found = []
    for low, high in pairwise(EDGES):
        below = (predicted < high) | ((high == EDGES[-1]) & (predicted <= high))
        inside = (predicted >= low) & below if len(predicted) else predicted > 1
        if inside.any():
            runs = len(set(whose[inside].tolist()))
            found.append(
                Bin(low, high, int(inside.sum()), runs, float(predicted[inside].mean()), float(came[inside].mean()))
            )
    return found


def find_past(record: RunRecord | None, step: int) -> Past:
    """Return the alarm or missed failure of a run at ``step``. Raises ``ConfigError`` if there is none."""
    past = () if record is None else record.past
    found = [each for each in past if each.step <= step <= each.last]
    if not found:
        listed = ", ".join(str(each.step) for each in past) or "there is none"
        raise ConfigError(f"nothing was forecast or missed at step {step}; at these steps it was: {listed}")
    return found[-1]


def answer(store: Store, past: Past, *, right: bool, by: str, why: str = "", now: float) -> ForecastAnswer:
    """Store a user's answer that a past forecast was right or wrong, and return it. Raises ``ConfigError`` if ``by``
    is empty.

    ``by``: name of the user; ``why``: their reason; ``now``: time of the answer in Unix seconds.
    """
    if not by.strip():
        raise ConfigError(f"an answer needs a name, got {by!r}; give yours with --by")
    given = ForecastAnswer(past.run_id, past.step, right, by.strip(), why.strip(), now, past.attempt)
    store.answer_forecast(given)
    words = f"{'right' if right else 'wrong'} at step {past.step}" + (f": {given.why}" if given.why else "")
    store.put_entry(AuditEntry(uuid.uuid4().hex, now, given.by, "answer-forecast", words, past.run_id))
    return given


def healthy_until(answers: Iterable[ForecastAnswer]) -> Mapping[str, int]:
    """Return, by run, the first step that is no longer healthy according to users' answers that a forecast was right.

    As for labels, the last :data:`~rlwatch.forecast.thresholds.NEAR` steps before it count as part of the failure.
    """
    found: dict[str, int] = {}
    for answer in answers:
        if answer.right:
            found[answer.run_id] = min(answer.step - NEAR, found.get(answer.run_id, answer.step))
    return found
