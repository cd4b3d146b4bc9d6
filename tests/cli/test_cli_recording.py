"""A growing log on its way into a store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

import pytest
from cli_helpers import NOW
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlwatch.cli.watch_log import HEARTBEAT_S, LogRecording
from rlwatch.clock import ManualClock
from rlwatch.errors import RunLockedError
from rlwatch.monitor import MonitorOutcome
from rlwatch.ports import Store
from rlwatch.records import RunInfo, RunState, StepRecord
from rlwatch.store.url import open_store

INFO = RunInfo("r", source="trl", created_at=NOW)
_names = count()


def _fresh() -> Store:
    """A store of its own for each example."""
    return open_store(f"memory://recording-{next(_names)}", clock=ManualClock(NOW))


def _records(steps: Sequence[int], *, nan_from: int = 10**9, attempt: int = 1, first_seq: int = 1) -> list[StepRecord]:
    """One record a step, which breaks at ``nan_from``."""
    return [
        StepRecord(
            step,
            {"entropy": 1.0 if step < nan_from else math.nan, "grad_norm": 1.0 if step < nan_from else math.nan},
            attempt=attempt,
            seq=first_seq + index,
        )
        for index, step in enumerate(steps)
    ]


def _said(store: Store) -> list[Any]:
    """What is left in the store of all that was said."""
    findings = [(f.kind, f.severity, f.step, f.seq, f.attempt) for f in store.findings("r")]
    return [findings, sorted((a.alert_id, a.state, a.step) for a in store.alerts("r"))]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 50), max_size=6).map(sorted), nan_from=st.integers(30, 60))
def test_what_is_said_does_not_depend_on_how_the_log_was_cut(cuts: list[int], nan_from: int) -> None:
    """Read in one piece or in several."""
    records = _records(range(50), nan_from=nan_from)
    whole, pieces = _fresh(), _fresh()
    for store, edges in ((whole, [0, 50]), (pieces, [0, *cuts, 50])):
        recording = LogRecording(store, INFO, on_outcome=_ignore, clock=ManualClock(NOW))
        for start, end in pairwise(edges):
            recording.take(records[start:end])
        recording.finish("")

    assert _said(pieces) == _said(whole)
    assert repr(pieces.records("r")) == repr(whole.records("r")) == repr(records)


def test_layer_norms_of_a_log_bring_the_layer_metrics_with_them() -> None:
    """Learnt anew when the trainer started again in the middle of it."""
    store = _fresh()
    recording = LogRecording(store, INFO, on_outcome=_ignore, clock=ManualClock(NOW))
    recording.take(
        [
            StepRecord(step, {"grad_layer/a": 3.0, "grad_layer/b": 4.0, "grad_layer/c": 0.0}, attempt=attempt, seq=seq)
            for seq, (attempt, step) in enumerate([*((1, s) for s in range(30)), *((2, s) for s in range(30, 40))], 1)
        ]
    )
    recording.finish("")

    assert store.series("r", ["layers/max_share"])["layers/max_share"].values.tolist() == [0.64] * 40
    assert "layers/participation" in store.records("r")[-1].metrics


def _ignore(outcome: MonitorOutcome) -> None:
    """Nobody listens."""


@pytest.mark.parametrize("stopped_at", [1, 20, 41, 45])
def test_a_watch_that_was_killed_and_begun_again_misses_nothing(stopped_at: int) -> None:
    """The second one reads the log from its beginning, as a new process does."""
    records = _records(range(1, 51), nan_from=40)
    store, uninterrupted = _fresh(), _fresh()
    first = LogRecording(store, INFO, on_outcome=_ignore, clock=ManualClock(NOW))
    first.take(records[:stopped_at])
    first.writer.close()  # as a killed process leaves it: no step is closed, nothing finished
    second = LogRecording(store, INFO, on_outcome=_ignore, clock=ManualClock(NOW))
    second.take(records)
    second.finish("")
    one = LogRecording(uninterrupted, INFO, on_outcome=_ignore, clock=ManualClock(NOW))
    one.take(records)
    one.finish("")

    assert second.records == 50 - stopped_at
    assert [(r.seq, r.step) for r in store.records("r")] == [(step, step) for step in range(1, 51)]
    kinds = [(f.kind, f.severity, f.step, f.seq) for f in store.findings("r")]
    assert kinds == [(f.kind, f.severity, f.step, f.seq) for f in uninterrupted.findings("r")]
    assert {alert.alert_id for alert in store.alerts()} == {alert.alert_id for alert in uninterrupted.alerts()}


def test_a_watch_begun_again_tells_only_what_is_new() -> None:
    """Though it relives what came before."""
    store, told = _fresh(), list[MonitorOutcome]()
    records = _records(range(1, 61), nan_from=40)
    first = LogRecording(store, INFO, on_outcome=_ignore, clock=ManualClock(NOW))
    first.take(records[:50])
    first.finish("")

    second = LogRecording(store, INFO, on_outcome=told.append, clock=ManualClock(NOW))
    second.take(records)
    second.finish("")

    assert [finding for outcome in told for finding in outcome.findings] == []
    assert [t.alert.state for outcome in told for t in outcome.transitions if t.notify] == []
    assert len(store.findings("r")) == 1


def test_a_trainer_that_resumes_within_the_log_is_the_next_attempt() -> None:
    """What it continues is its history; its own steps are judged anew."""
    store = _fresh()
    recording = LogRecording(store, INFO, on_outcome=_ignore, clock=ManualClock(NOW))

    recording.take([*_records(range(40)), *_records(range(30, 60), attempt=2, first_seq=41)])
    recording.finish("")

    assert recording.run.attempt == 2
    assert [record.attempt for record in store.records("r")] == [1] * 40 + [2] * 30
    assert [item.step for item in store.branch("r", 2, 30)] == list(range(30))


def test_attempts_of_the_log_follow_those_of_earlier_watches() -> None:
    """The store counts watches and trainers alike."""
    store = _fresh()
    first = LogRecording(store, INFO, on_outcome=_ignore, clock=ManualClock(NOW))
    first.take(_records(range(10)))
    first.finish("")
    second = LogRecording(store, INFO, on_outcome=_ignore, clock=ManualClock(NOW))
    second.take([*_records(range(20)), *_records(range(15, 25), attempt=2, first_seq=21)])
    second.finish("")

    assert [record.attempt for record in store.records("r")] == [1] * 10 + [2] * 10 + [3] * 10


def test_findings_and_alerts_are_reported_in_order_as_they_come() -> None:
    """The step that breaks is told when its record arrives."""
    told: list[MonitorOutcome] = []
    recording = LogRecording(_fresh(), INFO, on_outcome=told.append, clock=ManualClock(NOW))
    records = _records(range(50), nan_from=40)

    recording.take(records[:40])
    assert told == []
    recording.take(records[40:41])

    assert [finding.kind for outcome in told for finding in outcome.findings] == ["nonfinite"]
    assert [t.alert.step for outcome in told for t in outcome.transitions if t.notify] == [40]
    recording.finish("")


def test_a_quiet_log_still_has_a_heartbeat() -> None:
    """Every few seconds: the run is not stale while somebody watches."""
    store, clock = _fresh(), ManualClock(NOW)
    recording = LogRecording(store, INFO, on_outcome=_ignore, clock=clock)
    recording.take(_records(range(3)))
    beats = []
    for _ in range(6):
        recording.tick()
        beats.append(store.run("r").heartbeat_at)
        clock.advance(HEARTBEAT_S / 2)

    assert beats == [NOW, NOW, NOW + 5, NOW + 5, NOW + 10, NOW + 10]
    recording.finish("over")
    assert (store.run("r").state, store.run("r").state_reason) == (RunState.FINISHED, "over")


def test_a_log_is_recorded_by_one_watch_at_a_time() -> None:
    """The second is told so at once."""
    store = _fresh()
    recording = LogRecording(store, INFO, on_outcome=_ignore)

    with pytest.raises(RunLockedError):
        LogRecording(store, INFO, on_outcome=_ignore)

    recording.finish("")
    LogRecording(store, INFO, on_outcome=_ignore).finish("")
