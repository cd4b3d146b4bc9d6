"""One word for a run: what it follows from."""

from dataclasses import replace

import pytest
from app_world import alert
from rlwatch_app.health import LOOKS, Word, firing, judge

from rlwatch.control.liveness import Pace
from rlwatch.records import AlertState, RunInfo, RunState, Severity
from rlwatch.view import Verdict
from rlwatch.view import Word as Became

NOW = 1_000_000.0
LIVE = RunInfo("r", created_at=NOW - 5000, last_step=30, last_ts=NOW - 10)


def word(run, alerts=(), step_s=10.0):
    return judge(run, alerts, NOW, Pace(step_s)).word


def test_a_live_run_without_alarms_is_healthy():
    """And nobody needs to look."""
    health = judge(LIVE, [], NOW, Pace(10.0))
    assert (health.word, health.needs_you, health.why) == (Word.HEALTHY, False, "")


@pytest.mark.parametrize(
    ("severity", "expected"),
    [(Severity.INFO, Word.HEALTHY), (Severity.WARNING, Word.WATCH), (Severity.CRITICAL, Word.DANGER)],
)
def test_the_worst_firing_alert_decides(severity, expected):
    """Info is worth saying, not worth a colour."""
    health = judge(LIVE, [alert(severity=severity), alert(kind="x", severity=Severity.INFO)], NOW, Pace(10.0))
    assert health.word is expected
    assert health.needs_you is (expected is not Word.HEALTHY)


@pytest.mark.parametrize("state", [AlertState.PENDING, AlertState.RESOLVED])
def test_alerts_that_do_not_fire_do_not_count(state):
    """Pending ones may vanish, resolved ones are over."""
    assert word(LIVE, [alert(state=state)]) is Word.HEALTHY


def test_why_says_what_since_when_and_for_how_long():
    """The answer in one phrase."""
    assert judge(LIVE, [alert()], NOW, Pace(10.0)).why == "entropy collapse since step 12 (18 steps)"


def test_what_else_fires_is_counted():
    """One line a run, and no false calm."""
    alerts = [alert(), alert(kind="reward_drop", severity=Severity.WARNING), alert(kind="x", state=AlertState.RESOLVED)]
    assert judge(LIVE, alerts, NOW, Pace(10.0)).why == "entropy collapse since step 12 (18 steps), and 1 more"


def test_among_equals_the_first_to_begin_is_the_reason():
    """It is nearer to the cause."""
    early, late = alert(kind="mismatch_growth", onset_step=5), alert(onset_step=12)
    assert firing([late, early]) is early


@pytest.mark.parametrize(
    ("became", "expected"),
    [
        (Became.HEALTHY, Word.FINISHED),
        (Became.NOT_JUDGED, Word.FINISHED),
        (Became.RECOVERED, Word.RECOVERED),
        (Became.DAMAGED, Word.DAMAGED),
        (Became.COLLAPSED, Word.COLLAPSED),
        (Became.DEAD, Word.LEARNT_NOTHING),
    ],
)
def test_a_run_that_ended_is_called_by_what_became_of_it(became, expected):
    """An imported collapse is no grey tick; one that ended well is finished, and why that is known, as its writer says."""
    over = replace(LIVE, state=RunState.FINISHED, state_reason="imported from a log")
    verdict = Verdict(Severity.CRITICAL, f"{became.value}: entropy collapse from step 12", word=became, at=12)

    health = judge(over, [], NOW, Pace(10.0), verdict=verdict)

    well = expected is Word.FINISHED
    assert (health.word, health.needs_you) == (expected, False)
    assert health.why == (f"{verdict.text}; imported from a log" if well else "entropy collapse from step 12")
    assert (health.look == LOOKS[Word.FINISHED]) is well


def test_silence_for_five_of_its_own_steps_is_stale():
    """Relative to the run's own pace."""
    slow = replace(LIVE, last_ts=NOW - 450)
    assert word(slow, step_s=100.0) is Word.HEALTHY
    assert word(replace(slow, last_ts=NOW - 510), step_s=100.0) is Word.STALE


def test_quick_steps_do_not_make_a_short_pause_stale():
    """A checkpoint or an evaluation takes seconds."""
    assert word(replace(LIVE, last_ts=NOW - 119), step_s=0.05) is Word.HEALTHY
    assert word(replace(LIVE, last_ts=NOW - 121), step_s=0.05) is Word.STALE


def test_a_run_without_steps_gets_time_to_load():
    """Its pace is not known yet."""
    starting = RunInfo("r", created_at=NOW - 300)
    assert word(starting, step_s=None) is Word.HEALTHY
    assert word(replace(starting, created_at=NOW - 700), step_s=None) is Word.STALE


def test_silence_does_not_hide_the_alarm_before_it():
    """A run that went silent in danger says both."""
    health = judge(replace(LIVE, last_ts=NOW - 2460), [alert()], NOW, Pace(38.0))
    assert health.word is Word.STALE
    assert "no step for 41" in health.why
    assert "before that entropy collapse since step 12" in health.why


def test_the_writers_last_word_wins():
    """Crashed and finished are facts, whatever fires."""
    assert word(replace(LIVE, state=RunState.CRASHED), [alert()]) is Word.CRASHED
    assert word(replace(LIVE, state=RunState.FINISHED), [alert()]) is Word.FINISHED


def test_an_old_crash_asks_for_nobody():
    """A list that always cries is not read."""
    crashed = replace(LIVE, state=RunState.CRASHED, state_reason="RuntimeError: boom")
    old = replace(crashed, created_at=NOW - 9e5, last_ts=NOW - 2 * 86400)
    assert judge(crashed, [], NOW).needs_you
    assert not judge(old, [], NOW).needs_you
    assert judge(old, [], NOW).why == "RuntimeError: boom"


def test_those_who_need_a_person_come_first():
    """Sorting by urgency, not by word alone."""
    danger = judge(LIVE, [alert()], NOW, Pace(10.0))
    healthy = judge(LIVE, [], NOW, Pace(10.0))
    old_crash = judge(replace(LIVE, state=RunState.CRASHED, created_at=0.0, last_ts=NOW - 9e5), [], NOW)
    assert sorted([old_crash, healthy, danger], key=lambda h: h.order)[0] is danger


def test_every_word_has_a_shape_of_its_own():
    """Colour is never the only sign."""
    assert set(LOOKS) == set(Word)
    assert len({look.shape for look in LOOKS.values()}) == len(Word)


def test_a_run_whose_process_is_gone_is_dead_and_not_silent():
    """Whatever its pace; somebody should look, unless that was long ago."""
    dead = judge(replace(LIVE, last_ts=NOW - 130, heartbeat_at=NOW - 130), [alert()], NOW, Pace(100.0))
    old = judge(replace(LIVE, created_at=NOW - 1e6, last_ts=NOW - 9e5, heartbeat_at=NOW - 9e5), [], NOW, Pace(1.0))

    assert (dead.word, dead.needs_you) == (Word.DEAD, True)
    assert dead.why.startswith("no sign of its process for 2")
    assert "before that entropy collapse" in dead.why
    assert (old.word, old.needs_you) == (Word.DEAD, False)
