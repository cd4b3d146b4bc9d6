"""Whether a run goes on: its pace, its silences and its pauses, from what it wrote."""

import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.control.liveness import (
    FLOOR_S,
    PAUSE_ALIVE_S,
    TAIL,
    UNKNOWN_S,
    LivenessSigns,
    Pace,
    Pause,
    dead_since,
    last_sign,
    pace_of,
    pause_of,
    reports,
    sign_of,
    silent_for,
    stage_words,
)
from rlwatch.records import Command, CommandStatus, RunInfo, RunState, StepRecord
from rlwatch.store.url import open_store

NOW = 1_000_000.0
RUN = RunInfo("r", created_at=NOW - 9000, last_step=30, last_ts=NOW - 10, heartbeat_at=NOW - 1)


def rows(*parts):
    """Records of (step, ts) or (step, ts, attempt), numbered in order."""
    return [StepRecord(s, {}, ts, a, seq=n) for n, (s, ts, a) in enumerate(((*part, 1)[:3] for part in parts), 1)]


def command(kind, step, at, *, status=CommandStatus.DONE, **args):
    return Command(
        f"{kind}{at}",
        "r",
        kind,
        args,
        requested_by="ann",
        why="look",
        status=status,
        finished_step=step,
        finished_at=at,
    )


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.1, 500.0)), min_size=1, max_size=20))
def test_the_pace_is_the_median_time_of_a_step(gaps):
    """Rows may lie several steps apart; the longest time between two rows is known, too."""
    step, ts, parts = 0, NOW, [(0, NOW)]
    for steps, seconds in gaps:
        step, ts = step + steps, ts + seconds
        parts.append((step, ts))
    pace = pace_of(rows(*parts))

    assert pace.step_s == pytest.approx(median(seconds / steps for steps, seconds in gaps), rel=1e-5)
    assert pace.longest_s == pytest.approx(max(seconds for _, seconds in gaps), rel=1e-5)
    assert (pace.seq, pace.attempt) == (len(parts), 1)


def test_rows_that_do_not_go_on_tell_no_pace():
    """The same step again, a clock set back, another attempt: between these lies no step."""
    assert pace_of(rows((5, NOW), (5, NOW + 9), (6, NOW + 3), (7, NOW + 40, 2))).step_s is None
    assert pace_of([]) == Pace()


@pytest.mark.parametrize(
    ("measured", "step_s"), [((7.0, 9.0, 30.0), 9.0), ((math.nan, 9.0, math.inf), 9.0), ((math.nan,), None), ((), None)]
)
def test_where_the_times_say_nothing_the_trainers_own_count(measured, step_s):
    """Rows imported at once have one time; what is not finite was no step time."""
    records = [StepRecord(n, {"time/step": value}, NOW, seq=n) for n, value in enumerate(measured, 1)]

    assert pace_of(records).step_s == step_s


@pytest.mark.parametrize(
    ("pace", "patience"),
    [
        (Pace(), UNKNOWN_S),
        (Pace(1.0), FLOOR_S),
        (Pace(100.0), 500.0),
        (Pace(100.0, 400.0), 600.0),
        (Pace(1.0, 60.0), FLOOR_S),
        (Pace(None, 4000.0), UNKNOWN_S),
    ],
)
def test_silence_begins_after_five_steps_but_not_for_a_checkpoint(pace, patience):
    """Exactly at the limit it is none yet."""
    assert pace.patience_s == patience
    assert silent_for(replace(RUN, last_ts=NOW - patience), pace, NOW) is None
    assert silent_for(replace(RUN, last_ts=NOW - patience - 0.5), pace, NOW) == patience + 0.5


def test_an_attempt_without_steps_gets_time_to_load():
    """The pace of the attempt before says nothing; its sign of life counts as a step."""
    old, resumed = Pace(1.0, attempt=1), replace(RUN, attempt=2, last_ts=NOW - 5000)

    assert silent_for(replace(resumed, heartbeat_at=NOW - UNKNOWN_S), old, NOW) is None
    assert silent_for(replace(resumed, heartbeat_at=NOW - UNKNOWN_S - 1), old, NOW) == UNKNOWN_S + 1
    assert silent_for(replace(resumed, heartbeat_at=None, created_at=NOW - 700), old, NOW) == 700
    assert silent_for(replace(RUN, attempt=2, last_ts=NOW - 130), replace(old, attempt=2), NOW) == 130


@given(st.lists(st.none() | st.floats(0.0, 400.0), min_size=3, max_size=3), st.sampled_from(RunState))
def test_a_process_reports_by_any_sign_of_the_last_two_minutes(agos, state):
    """A heartbeat, a step, or that it was just made; one that ended reports no more."""
    heartbeat, last, created = (None if ago is None else NOW - ago for ago in agos)
    run = replace(RUN, heartbeat_at=heartbeat, last_ts=last, created_at=created or 0.0, state=state)
    newest = min((ago for ago in agos if ago is not None), default=math.inf)

    assert reports(run, NOW) == (state is RunState.RUNNING and newest <= FLOOR_S)


PAUSED = [command("pause", 30, NOW - 600, minutes=30)]


def test_a_pause_says_who_why_and_until_when():
    """Until it ends by itself."""
    assert pause_of(RUN, PAUSED, NOW) == Pause(30, "ann", "look", NOW + 1200)


@pytest.mark.parametrize(
    ("run", "commands"),
    [
        (RUN, []),
        (RUN, [replace(PAUSED[0], status=CommandStatus.REJECTED)]),
        (RUN, [replace(PAUSED[0], finished_at=None)]),
        (RUN, [*PAUSED, command("resume", 30, NOW - 300)]),
        (RUN, [*PAUSED, command("stop", 30, NOW - 300)]),
        (replace(RUN, last_step=31), PAUSED),
        (replace(RUN, state=RunState.FINISHED), PAUSED),
        (replace(RUN, state=RunState.CRASHED), PAUSED),
        (replace(RUN, heartbeat_at=NOW - PAUSE_ALIVE_S - 1), PAUSED),
        (RUN, [command("pause", 30, NOW - 600 - PAUSE_ALIVE_S, minutes=9)]),
    ],
    ids=[
        "never asked", "refused", "not carried out", "resumed", "stopped",
        "went on", "finished", "crashed", "dead", "over by itself",
    ],
)  # fmt: skip
def test_what_is_no_pause(run, commands):
    """Each by itself ends it; then a silence is a silence again."""
    assert pause_of(run, commands, NOW) is None


def test_a_run_may_be_paused_before_its_first_step():
    """Which it then has not made; the first one ends the pause."""
    before = replace(PAUSED[0], finished_step=None)

    assert pause_of(replace(RUN, last_step=None), [before], NOW) == Pause(0, "ann", "look", NOW + 1200)
    assert pause_of(replace(RUN, last_step=0), [before], NOW) == Pause(0, "ann", "look", NOW + 1200)
    assert pause_of(replace(RUN, last_step=1), [before], NOW) is None


@pytest.mark.parametrize(
    ("run", "commands"),
    [
        (replace(RUN, heartbeat_at=NOW - PAUSE_ALIVE_S), PAUSED),
        (replace(RUN, heartbeat_at=None), PAUSED),
        (RUN, [command("pause", 30, NOW - 540 - PAUSE_ALIVE_S, minutes=9)]),
    ],
    ids=["still alive", "nothing heard yet", "ends this moment"],
)
def test_what_is_a_pause_still(run, commands):
    """Exactly at the limit it has not ended yet."""
    assert pause_of(run, commands, NOW) is not None


def test_the_command_carried_out_last_counts_whatever_their_order():
    """And commands that turn nothing do not end a pause."""
    again = command("pause", 30, NOW - 60, minutes=5)
    commands = [again, command("resume", 30, NOW - 120), *PAUSED, command("lower-lr", 30, NOW - 30, scale=0.5)]

    assert pause_of(RUN, commands, NOW) == Pause(30, "ann", "look", NOW - 60 + 300)


def test_a_pause_of_unsaid_length_lasts_as_long_as_the_default():
    """An hour, as asked for without a number."""
    told = pause_of(RUN, [command("pause", 30, NOW - 60)], NOW)

    assert told is not None
    assert told.until == NOW - 60 + 3600


@pytest.mark.parametrize("state", [None, RunState.FINISHED])
def test_how_a_stored_run_stands(tmp_path, state):
    """Its newest rows give the pace; only one that goes on can be silent."""
    store = open_store(f"memory://{tmp_path}")
    writer = store.open_run(RunInfo("r", created_at=NOW - 9000))
    writer.write([StepRecord(n, {"a": 1.0}, NOW - 5000 + 10 * n, seq=n) for n in range(1, TAIL + 11)])
    if state is not None:
        writer.finish(state, "", NOW - 100)
    told = sign_of(store, replace(store.run("r"), heartbeat_at=NOW - 500), NOW)

    assert told.pace == Pace(10.0, 10.0, TAIL + 10, 1)
    silent = None if state else 5000 - 10.0 * (TAIL + 10)
    assert told == LivenessSigns(told.pace, None, silent, reports=False, dead_since=None if state else NOW - 500)
    writer.close()


def test_signs_of_life_that_are_no_numbers_are_none():
    """A clock that failed: NaN and infinities say nothing of the run."""
    for broken in (None, math.nan, math.inf, -math.inf):
        run = replace(RUN, heartbeat_at=broken, last_ts=NOW - 1000, created_at=NOW - 2000)
        assert last_sign(run) == NOW - 1000
        assert not reports(run, NOW)
        assert reports(replace(run, last_ts=NOW - 5), NOW)
        assert dead_since(run, NOW) is None  # it never gave a heartbeat
        broken_step = replace(RUN, heartbeat_at=NOW - 500, last_ts=broken, created_at=math.nan)
        assert dead_since(broken_step, NOW) == NOW - 500


@pytest.mark.parametrize(
    ("silent", "host", "pid", "dead"),
    [
        (10, "here", "gone", False),
        (20, "here", "gone", True),
        (20, "here", "mine", False),
        (20, "elsewhere", "gone", False),
        (20, "here", None, False),
        (119, "here", "mine", False),
        (121, "here", "mine", True),
        (121, "elsewhere", None, True),
    ],
)
def test_a_process_of_this_machine_that_is_gone_is_dead_after_three_heartbeats(silent, host, pid, dead):
    """Any other after two minutes: it may be busy with something long."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run = RunInfo(
        "r",
        created_at=NOW - 9000,
        heartbeat_at=NOW - silent,
        host=socket.gethostname() if host == "here" else "another-machine",
        pid={"gone": ended.pid, "mine": os.getpid(), None: None}[pid],
    )

    assert dead_since(run, NOW) == (NOW - silent if dead else None)
    assert dead_since(replace(run, state=RunState.FINISHED), NOW) is None


def test_the_stage_of_a_dead_process_lasted_until_its_last_sign_of_life():
    """Not until now."""
    run = RunInfo("r", stage="reward", stage_since=NOW - 700.0, heartbeat_at=NOW - 660.0)

    assert stage_words(run, NOW).replace("\u202f", " ") == "in stage reward for 40 s, at its last sign of life"
    assert stage_words(replace(run, heartbeat_at=NOW - 1.0), NOW).startswith("in stage reward for 1")
    assert stage_words(replace(run, stage=""), NOW) == ""
