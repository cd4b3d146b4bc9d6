"""The Monitor inside a live run: what it stores, what it queues, what it does not say twice."""

from datetime import time

import pytest
from scripted import Oracle, Threshold, records

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.rules import AlertGrouping, AlertingConfig, QuietHours, Rule
from rlwatch.clock import ManualClock
from rlwatch.errors import StoreBusyError
from rlwatch.monitor import Monitor
from rlwatch.monitor.judge import MonitorSink
from rlwatch.records import Alert, AlertState, OutboxStatus, RunInfo, Severity
from rlwatch.store.url import open_store

RULE = Rule("r", channels=("webhook",), keep_firing_for=3)


class Watched:
    """A run in a memory store with a sink over it, resumable."""

    def __init__(self, name, **policy):
        self.store = open_store(f"memory://{name}", clock=ManualClock())
        self.clock, self.policy = ManualClock(), AlertingConfig(rules=(RULE,), **policy)
        self.writer, self.sink, self.said, self.woken, self.health = None, None, [], [], []

    forecaster = None

    def begin(self):
        if self.writer is not None:
            self.writer.close()
        self.writer = self.store.open_run(RunInfo("run"))
        monitor = Monitor(
            run_id="run",
            detectors=lambda: [Threshold()],
            rules=[RULE],
            forecaster=self.forecaster,
            history=lambda attempt, before: self.store.branch("run", attempt, before),
        )
        self.sink = MonitorSink(
            monitor,
            self.writer.run,
            self.store,
            keep=self.writer.write,
            dispatcher=Dispatcher(self.store, self.policy, clock=self.clock),
            clock=self.clock,
            publish=self.health.append,
            announce=self.said.append,
            wake=lambda: self.woken.append(True),
        )
        return self

    def log(self, *values, start=0):
        batch = records(*values, start=start, attempt=self.writer.run.attempt, seq=self.writer.last_seq)
        self.writer.write(batch)
        self.sink.write(batch)
        return self

    def findings(self):
        return [(f.severity.value, f.step) for f in self.store.findings("run")]

    def alerts(self):
        return [(a.state, a.severity.value) for a in self.store.alerts("run")]

    def outbox(self):
        return [(m.payload["event"], m.status) for m in self.store.outbox("run")]


@pytest.fixture
def watched(request):
    return Watched(request.node.name).begin()


def test_findings_alerts_and_messages_are_stored_and_the_deliverer_woken(watched):
    """All that a crash needs to outlive the process."""
    watched.log(0, 2, 20, 0)

    assert watched.findings() == [("warning", 1), ("critical", 2)]
    assert watched.alerts() == [(AlertState.FIRING, "critical")]
    assert watched.outbox() == [("firing", OutboxStatus.PENDING), ("escalated", OutboxStatus.PENDING)]
    assert watched.woken == [True]


def test_health_is_published_after_every_batch(watched):
    """What vetoes a reset is never older than the last step judged."""
    watched.log(0, 20).log(0, start=2)

    assert [len(health.findings) for health in watched.health] == [0, 1]


def test_health_knows_alerts_that_outlive_their_finding(watched):
    """``keep_firing_for`` keeps the veto, too."""
    watched.log(0, 20, 0, 0)

    assert watched.health[-1].findings == ()
    assert [alert.kind for alert in watched.health[-1].alerts] == ["high"]


def test_the_last_step_is_judged_at_the_end(watched):
    """Nothing comes after it."""
    watched.log(0, 20)
    assert watched.findings() == []
    watched.sink.close()

    assert watched.findings() == [("critical", 1)]


def test_a_busy_store_is_tried_again(watched):
    """The app may hold the lock for a moment."""
    publish, busy = watched.store.publish, [True]

    def sometimes(run_id, alerts, compose):
        if busy:
            busy.pop()
            raise StoreBusyError("locked")
        return publish(run_id, alerts, compose)

    watched.store.publish = sometimes
    watched.log(0, 20, 0, 0, 0, 0, 0)
    assert watched.alerts() == []
    watched.sink.tick()

    assert watched.alerts() == [(AlertState.RESOLVED, "critical")]
    assert [event for event, _ in watched.outbox()] == ["firing", "resolved"]


def test_a_look_now_and_then_tells_what_time_alone_makes_due(request):
    """The night ends; nothing of the run changes."""
    night = QuietHours(time(0), time(6), let_through="critical")
    watched = Watched(request.node.name, quiet_hours=(night,))
    watched.clock = ManualClock(5 * 3600.0)
    watched.begin().log(0, 2, 2)
    assert (watched.alerts(), watched.outbox()) == ([(AlertState.FIRING, "warning")], [])

    watched.clock.advance(3600.0)
    watched.sink.tick()

    assert watched.outbox() == [("firing", OutboxStatus.PENDING)]
    assert watched.woken == [True]


def test_at_the_end_nothing_waits_for_its_group(request):
    """Nobody may be there to say it later."""
    watched = Watched(request.node.name, grouping=AlertGrouping(wait_s=60.0))
    watched.clock = ManualClock(1.0)
    watched.begin().log(0, 20)
    assert watched.outbox() == []
    watched.sink.close()

    assert watched.outbox() == [("firing", OutboxStatus.PENDING)]


def test_a_resumed_run_does_not_say_again_what_is_stored(watched):
    """It relives its history; people have read that."""
    watched.log(0, 2, 20, 0)
    said = len(watched.said)

    watched.begin().log(0, 0, start=4)

    assert watched.findings() == [("warning", 1), ("critical", 2)]
    watched.log(0, 0, start=6)
    assert len(watched.outbox()) == 3  # the alert that fired before the resume resolves after it
    assert [t.alert.state for outcome in watched.said[said:] for t in outcome.transitions] == [AlertState.RESOLVED]


def test_what_a_dead_process_stored_but_never_judged_is_said_by_the_next(watched):
    """It died between the row and the verdict."""
    watched.writer.write(records(0, 20, 0))

    watched.begin().log(0, start=3)

    assert watched.findings() == [("critical", 1)]
    assert watched.outbox()[0][0] == "firing"


def test_alerts_of_an_abandoned_branch_are_resolved_and_receivers_told(watched):
    """The crash at step 2 was undone by resuming from step 1."""
    watched.log(0, 0, 20, 20)
    watched.begin().log(0, 0, 0, start=1)

    (alert,) = watched.store.alerts("run")
    assert alert.state is AlertState.RESOLVED
    assert "attempt 2 resumed from before it" in alert.reason
    assert [event for event, _ in watched.outbox()] == ["firing", "resolved"]


def test_the_crash_of_the_attempt_before_is_over_at_the_first_step_of_the_next(watched):
    """What it kept back waits from there on."""
    watched.log(0, 0, 0)
    gone = Alert("gone", "run", "r", "run_crashed", Severity.CRITICAL, AlertState.FIRING, 2, 2, "died", fired_at=1.0)
    watched.store.put_alerts([gone], [])
    watched.begin().log(0, start=3)

    [over] = [alert for alert in watched.store.alerts("run") if alert.kind == "run_crashed"]
    assert (over.state, over.resolved_step) == (AlertState.RESOLVED, 3)


class Forecast(Watched):
    """The same with a forecaster that says what the reward says."""

    forecaster = Oracle

    def forecast(self):
        series = self.store.series("run", ["forecast/p50"])["forecast/p50"]
        rows = zip(series.steps, series.values, series.attempts, series.seqs, strict=True)
        return [(int(step), float(value), int(attempt), int(seq)) for step, value, attempt, seq in rows]


def test_forecasts_are_a_series_of_the_run(request):
    """Each under the number of the record it is of; the last with the end."""
    watched = Forecast(request.node.name).begin().log(0.1, 0.2, 0.3)
    assert watched.forecast() == [(0, 0.1, 1, 1), (1, 0.2, 1, 2)]
    watched.sink.close()

    assert watched.forecast() == [(0, 0.1, 1, 1), (1, 0.2, 1, 2), (2, 0.3, 1, 3)]
    assert [record.step for record in watched.store.records("run")] == [0, 1, 2]
    assert watched.health[-1].forecast.p50 == 0.2


def test_a_resumed_run_writes_no_forecast_twice(request):
    """It relives its history to know where it stands; the branch it left keeps what was said of it."""
    watched = Forecast(request.node.name).begin().log(0.1, 0.2, 0.3)
    watched.sink.close()
    watched.begin().log(0.4, 0.45, start=2)
    watched.sink.close()

    assert watched.forecast() == [
        (0, 0.1, 1, 1),
        (1, 0.2, 1, 2),
        (2, 0.3, 1, 3),
        (2, 0.4, 2, 4),
        (3, 0.45, 2, 5),
    ]


def test_a_step_whose_process_died_before_its_forecast_gets_it_from_the_next(request):
    """It was stored and never judged."""
    watched = Forecast(request.node.name).begin().log(0.1, 0.2)
    watched.begin().log(0.3, start=2)
    watched.sink.close()

    assert [row[:2] for row in watched.forecast()] == [(0, 0.1), (1, 0.2), (2, 0.3)]
