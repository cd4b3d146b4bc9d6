"""One word for a run: what it follows from."""

from dataclasses import replace

import pytest
from app_world import alert
from rlwatch_app.health import FINISHED, LOOKS, Word, firing, judge

from rlwatch.control.liveness import Pace
from rlwatch.records import Finding, RunInfo, RunState, Severity
from rlwatch.state import State, Verdict, ending_of, verdict_of

NOW = 1_000_000.0
LIVE = RunInfo("r", created_at=NOW - 5000, last_step=30, last_ts=NOW - 10)


def found(kind="entropy_collapse", severity=Severity.CRITICAL, onset=12):
    return Finding("d", kind, severity, onset + 8, onset, "")


def verdict(run, *findings):
    return verdict_of(findings, {1: (1, 30)}, ending=ending_of(run))


def word(run, findings=(), step_s=10.0):
    return judge(run, verdict(run, *findings), NOW, Pace(step_s)).word


def test_a_live_run_without_findings_is_healthy():
    """And nobody needs to look."""
    health = judge(LIVE, verdict(LIVE), NOW, Pace(10.0))
    assert (health.word, health.needs_you, health.why) == (Word.HEALTHY, False, "")


@pytest.mark.parametrize(
    ("findings", "expected", "why"),
    [
        ([found(severity=Severity.INFO)], Word.HEALTHY, ""),
        ([found(severity=Severity.WARNING)], Word.AT_RISK, "entropy fell from step 12"),
        ([found()], Word.COLLAPSED, "entropy fell; still running"),
        ([found("grad_spike")], Word.FAILING, "the gradient norm spiked from step 12"),
    ],
)
def test_the_state_of_the_run_is_its_word_and_its_reason(findings, expected, why):
    """The one that ``show`` and JSON give; info is worth saying, not worth a colour."""
    told = verdict(LIVE, *findings)
    health = judge(LIVE, told, NOW, Pace(10.0))
    assert (health.word, health.why) == (expected, why)
    assert health.word.value == told.state.value
    assert health.needs_you is (expected is not Word.HEALTHY)


def test_among_equals_the_first_to_begin_is_the_reason():
    """It is nearer to the cause."""
    early, late = alert(kind="mismatch_growth", onset_step=5), alert(onset_step=12)
    assert firing([late, early]) is early


@pytest.mark.parametrize("state", State)
def test_a_run_that_ended_has_the_word_of_its_state(state):
    """An imported collapse is no grey tick; one that ended well is no live one."""
    over = replace(LIVE, state=RunState.FINISHED, created_at=0.0, last_ts=NOW - 9e5)
    health = judge(over, Verdict(None, "", state=state, brief=f"{state.value}: why"), NOW, Pace(10.0))

    assert (health.word.value, health.needs_you, health.ended) == (state.value, False, True)
    assert health.look is (FINISHED if state is State.HEALTHY else LOOKS[health.word])
    assert health.why == ("" if state is State.HEALTHY else "why")


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


def test_silence_does_not_hide_what_was_before_it():
    """A run that went silent at risk says both; one that has failed stays failed."""
    silent = replace(LIVE, last_ts=NOW - 2460)
    health = judge(silent, verdict(silent, found(severity=Severity.WARNING)), NOW, Pace(38.0))
    assert health.word is Word.STALE
    assert "no step for 41" in health.why
    assert "before that entropy fell from step 12" in health.why
    lost = judge(silent, verdict(silent, found()), NOW, Pace(38.0))
    assert (lost.word, "no step for 41" in lost.why) == (Word.COLLAPSED, True)


def test_an_old_crash_asks_for_nobody():
    """A list that always cries is not read."""
    crashed = replace(LIVE, state=RunState.CRASHED, state_reason="RuntimeError: boom")
    old = replace(crashed, created_at=NOW - 9e5, last_ts=NOW - 2 * 86400)
    assert judge(crashed, verdict(crashed), NOW).needs_you
    assert not judge(old, verdict(old), NOW).needs_you
    assert judge(old, verdict(old), NOW).why.startswith("RuntimeError: boom")


def test_those_who_need_a_person_come_first():
    """Sorting by urgency, not by word alone."""
    failing = judge(LIVE, verdict(LIVE, found()), NOW, Pace(10.0))
    healthy = judge(LIVE, verdict(LIVE), NOW, Pace(10.0))
    old = replace(LIVE, state=RunState.CRASHED, created_at=0.0, last_ts=NOW - 9e5)
    assert sorted([judge(old, verdict(old), NOW), healthy, failing], key=lambda h: h.order)[0] is failing


def test_every_word_has_a_shape_of_its_own():
    """Colour is never the only sign."""
    assert set(LOOKS) == set(Word)
    assert len({look.shape for look in (*LOOKS.values(), FINISHED)}) == len(Word) + 1


def test_a_run_whose_process_is_gone_was_killed_and_is_not_silent():
    """Whatever its pace; somebody should look, unless that was long ago."""
    recent = replace(LIVE, last_ts=NOW - 130, heartbeat_at=NOW - 130)
    past = replace(LIVE, created_at=NOW - 1e6, last_ts=NOW - 9e5, heartbeat_at=NOW - 9e5)

    for run, needed in ((recent, True), (past, False)):
        health = judge(run, verdict_of((), {1: (1, 30)}, ending=ending_of(run, gone=True)), NOW, Pace(100.0))
        assert (health.word, health.needs_you, health.ended) == (Word.KILLED, needed, True)
        assert health.why.startswith("its process no longer responds")
