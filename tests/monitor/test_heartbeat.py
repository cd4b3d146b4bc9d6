"""A run that fell silent or died, judged from its store by somebody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.alerts.rules import AlertingConfig, Rule, default_rules
from rlwatch.clock import ManualClock
from rlwatch.control.liveness import FLOOR_S, UNKNOWN_S, Pace, pace_of, reports, sign_of, silent_for
from rlwatch.errors import StoreBusyError
from rlwatch.monitor.watchman import OVER_S, Watchman, WatchmanThread, duration
from rlwatch.records import Command, CommandStatus, RunInfo, RunState, StepRecord
from rlwatch.store.memory import forget
from rlwatch.store.url import open_store

START = 1_000_000.0
STEP_S = 40.0
"""Five steps are 200 s: above the floor."""


class Ward:
    """A run in a memory store that steps every 40 s, and a watchman who looks after it."""

    def __init__(self, name: str, *rules: Rule) -> None:
        forget(name)
        self.clock = ManualClock(START)
        self.store = open_store(f"memory://{name}", clock=self.clock)
        self.policy = AlertingConfig(rules=tuple(replace(r, channels=("hook",)) for r in rules or default_rules()))
        self.watchman = Watchman(self.store, self.policy, clock=self.clock)
        self.writer = self.store.open_run(RunInfo("run", project="math", created_at=START))
        self.step = 0

    def steps(self, number: int, every_s: float = STEP_S) -> Ward:
        for _ in range(number):
            self.clock.advance(every_s)
            self.step += 1
            record = StepRecord(self.step, {"kl": 0.1}, ts=self.clock.now(), attempt=self.writer.run.attempt)
            self.writer.write([record])
            self.writer.heartbeat(self.clock.now())
        return self

    def later(self, seconds: float, *, beats: bool = True) -> Ward:
        self.clock.advance(seconds)
        if beats:
            self.writer.heartbeat(self.clock.now())
        self.watchman.look()
        return self

    def resumes(self) -> Ward:
        self.writer.close()
        self.writer = self.store.open_run(RunInfo("run"))
        return self

    def alerts(self) -> list[tuple[str, str, str]]:
        return [(a.kind, a.state.value, a.severity.value) for a in self.store.alerts("run")]

    def told(self) -> list[str]:
        return [f"{m.payload['event']} {m.payload['alert']['kind']}" for m in self.store.outbox("run")]


@pytest.fixture
def ward(request: pytest.FixtureRequest) -> Ward:
    """Ten steps old."""
    return Ward(request.node.name).steps(10)


def test_a_run_that_steps_is_left_alone(ward: Ward):
    """And one that is a little late."""
    for _ in range(5):
        ward.steps(1).later(4.9 * STEP_S)

    assert (ward.alerts(), ward.told()) == ([], [])


def test_a_run_whose_process_hangs_is_told_once_and_resolved_when_it_speaks(ward: Ward):
    """No step for five of its own steps, while its writer beats."""
    ward.later(5.1 * STEP_S).later(10.0).later(10.0)
    assert ward.alerts() == [("run_silent", "firing", "warning")]
    [alert] = ward.store.alerts("run")
    assert (
        alert.message
        == "no step for 3.4 min (usually 40 s); its process lives: it hangs, or does something that " + ("takes long")
    )
    ward.steps(1).later(1.0)

    assert ward.alerts() == [("run_silent", "resolved", "warning")]
    assert ward.told() == ["firing run_silent", "resolved run_silent"]
    assert ward.store.alerts("run")[0].reason == "the run reports again: step 11, attempt 1"


def test_a_run_whose_process_is_gone_is_critical(ward: Ward):
    """Killed, or its machine is gone: no word from anybody, and no row says so."""
    ward.later(5.1 * STEP_S, beats=False)

    assert ward.alerts() == [("run_silent", "firing", "critical")]
    assert "no sign of its process for 3.4 min: it was killed, or its machine is gone" in ward.store.alerts()[0].message


def test_a_hanging_process_that_dies_escalates(ward: Ward):
    """The same episode, worse."""
    ward.later(5.1 * STEP_S).later(300.0, beats=False)

    assert ward.alerts() == [("run_silent", "firing", "critical")]
    assert ward.told() == ["firing run_silent", "escalated run_silent"]


def test_a_run_that_ended_with_an_error_is_told_with_its_last_words(ward: Ward):
    """They are in the store; its own process told nobody."""
    ward.writer.finish(RunState.CRASHED, "OutOfMemoryError: CUDA", ward.clock.now())
    ward.watchman.look()

    assert ward.alerts() == [("run_crashed", "firing", "critical")]
    assert "OutOfMemoryError: CUDA" in ward.store.outbox()[0].payload["text"]
    assert ward.store.outbox()[0].payload["advice"]["actions"]


def test_a_crash_after_a_silence_is_the_last_word(ward: Ward):
    """The silence is over: it is known how it ended."""
    ward.later(5.1 * STEP_S)
    ward.writer.finish(RunState.CRASHED, "", ward.clock.now())
    ward.watchman.look()

    assert ward.alerts() == [("run_crashed", "firing", "critical"), ("run_silent", "resolved", "warning")]


def test_a_crashed_run_that_is_resumed_is_resolved_by_its_first_step(ward: Ward):
    """Not by its start: loading is no step. Its next crash is another alert."""
    ward.writer.finish(RunState.CRASHED, "", ward.clock.now())
    ward.watchman.look()
    ward.resumes().later(5.1 * STEP_S)
    assert ward.alerts()[0] == ("run_crashed", "firing", "critical")
    ward.steps(1).later(1.0)
    assert ward.alerts() == [("run_crashed", "resolved", "critical")]
    ward.writer.finish(RunState.CRASHED, "", ward.clock.now())
    ward.watchman.look()

    assert ward.alerts() == [("run_crashed", "firing", "critical"), ("run_crashed", "resolved", "critical")]


def test_a_silent_run_that_finishes_is_resolved(ward: Ward):
    """In good order after all."""
    ward.later(5.1 * STEP_S)
    ward.writer.finish(RunState.FINISHED, "done", ward.clock.now())
    ward.watchman.look()

    assert ward.alerts() == [("run_silent", "resolved", "warning")]


def test_a_paused_run_is_not_silent(ward: Ward):
    """Somebody wanted it so."""
    ward.store.submit(Command("c", "run", "pause", {"minutes": 60.0}))
    ward.store.claim("run", ward.clock.now())
    ward.store.settle("run", "c", CommandStatus.DONE, ward.clock.now(), step=10, result="")

    assert ward.later(30 * 60.0).alerts() == []


def test_two_watchmen_raise_one_alert(ward: Ward):
    """A watcher and a dashboard, at different moments."""
    other = Watchman(ward.store, ward.policy, clock=ward.clock)
    ward.later(5.1 * STEP_S)
    ward.clock.advance(5.0)
    other.look()

    assert ward.told() == ["firing run_silent"]
    assert len(ward.alerts()) == 1


def test_what_was_silent_for_a_day_when_somebody_first_looks_is_history(request: pytest.FixtureRequest):
    """A store full of old runs tells nobody anything."""
    ward = Ward(request.node.name).steps(10).later(25 * 3600.0, beats=False)

    assert ward.alerts() == []


def test_without_a_heartbeat_rule_there_is_no_heartbeat_alert(request: pytest.FixtureRequest):
    """Rules decide; a rule may also hear of crashes only, or tell nobody."""
    assert Ward(request.node.name, Rule("all")).steps(10).later(900.0).alerts() == []
    crashes = Ward(request.node.name, Rule("heartbeat", kinds=("run_crashed",))).steps(10).later(900.0)
    crashes.writer.finish(RunState.CRASHED, "", crashes.clock.now())
    crashes.watchman.look()
    assert [kind for kind, *_ in crashes.alerts()] == ["run_crashed"]
    bad = Rule("heartbeat", kinds=("run_silent",), min_severity="critical")
    assert Ward(request.node.name, bad).steps(10).later(900.0).alerts() == []


def test_the_watchman_also_tells_what_a_dead_trainer_could_not(ward: Ward):
    """Its alert was put down, its message not yet written."""
    from dispatch_examples import alert

    ward.store.put_alerts([replace(alert("kl_drift"), rule="kl", fired_at=ward.clock.now())], [])
    ward.watchman.look()

    assert ward.told() == ["firing kl_drift"]


def test_a_run_that_cannot_be_looked_after_does_not_keep_the_others_waiting(ward: Ward):
    """Counted, said once."""
    ward.store.open_run(RunInfo("other", created_at=START)).close()
    alerts = ward.store.alerts

    def busy(run_id: str | None = None):
        if run_id == "other":
            raise StoreBusyError("locked")
        return alerts(run_id)

    ward.store.alerts = busy
    ward.later(5.1 * STEP_S)

    assert ward.alerts() == [("run_silent", "firing", "warning")]
    assert ward.watchman.failures == 1


def test_old_runs_are_not_looked_at(ward: Ward):
    """A store of hundreds costs nothing."""
    ward.clock.advance(OVER_S + 1.0)
    ward.store.alerts = None

    assert ward.watchman.look() == 0


def test_the_thread_looks_until_it_is_stopped():
    """And ends at once."""
    from threading import Event

    looked = Event()

    class Counting:
        def look(self) -> int:
            looked.set()
            return 0

    thread = WatchmanThread(Counting(), every_s=3600.0)
    thread.start()
    assert looked.wait(10.0)
    assert thread.stop()


LIVE = RunInfo("r", created_at=START - 5000, last_step=30, last_ts=START, heartbeat_at=START, attempt=1)


@given(st.floats(0.001, 1e5), st.floats(0.001, 1e6), st.floats(0, 1e7))
def test_silence_is_five_steps_but_no_less_than_two_minutes_nor_its_usual_pauses(step_s, longest_s, quiet):
    """The one definition."""
    pace = Pace(step_s, longest_s, seq=30, attempt=1)
    expected = quiet > max(FLOOR_S, 5 * step_s, 1.5 * longest_s)

    assert (silent_for(LIVE, pace, START + quiet) is not None) == expected or abs(quiet - pace.patience_s) < 1e-3


def test_evaluations_that_a_run_makes_now_and_then_are_no_silence(ward: Ward):
    """The longest of its newest pauses counts one and a half times."""
    ward.steps(1, every_s=1000.0).steps(20).later(1400.0)
    assert ward.alerts() == []

    assert ward.later(200.0).alerts() == [("run_silent", "firing", "warning")]


def test_a_resumed_run_gets_time_to_load():
    """Its last row is of yesterday; its process is new."""
    resumed = replace(LIVE, attempt=2, last_ts=START - 9e4, heartbeat_at=START)
    pace = Pace(10.0, 10.0, seq=30, attempt=1)

    assert silent_for(resumed, pace, START + UNKNOWN_S - 1) is None
    assert silent_for(resumed, pace, START + UNKNOWN_S + 1) == UNKNOWN_S + 1
    assert silent_for(replace(resumed, attempt=1), pace, START) == 9e4


def test_a_run_without_steps_beats():
    """While models load."""
    loading = RunInfo("r", created_at=START - 3600, heartbeat_at=START)

    assert silent_for(loading, Pace(), START + 5) is None
    assert silent_for(loading, Pace(), START + 700) == 700
    assert (reports(loading, START + 5), reports(loading, START + 700)) == (True, False)


def test_pace_is_per_step_from_the_newest_rows_of_one_attempt():
    """Rows without a time, the same step twice and the hours between attempts do not count."""
    times = [(1, 0.0, 1), (1, 1.0, 1), (11, 51.0, 1), (21, 101.0, 1), (22, 9000.0, 2), (32, 9060.0, 2)]
    rows = [StepRecord(step, {}, ts=ts, attempt=attempt, seq=i) for i, (step, ts, attempt) in enumerate(times, 1)]

    assert pace_of(rows) == Pace(5.0, 60.0, seq=6, attempt=2)
    assert pace_of(rows[:1]) == Pace(None, None, seq=1, attempt=1)
    assert pace_of([]) == Pace()
    assert pace_of([StepRecord(1, {"step_time": 7.0}, seq=1)], "trl/grpo").step_s == 7.0


def test_a_run_that_ended_is_not_silent(ward: Ward):
    """Its writer said how."""
    ward.writer.finish(RunState.FINISHED, "", ward.clock.now())

    assert sign_of(ward.store, ward.store.run("run"), ward.clock.now() + 1e6).silent_s is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.25, "0.25 s"), (38.4, "38 s"), (119.6, "120 s"), (204, "3.4 min"), (2460, "41 min"), (12600, "3.5 h")],
)
def test_durations_are_said_in_one_unit(seconds: float, said: str):
    """Two digits are enough."""
    assert duration(seconds) == said
