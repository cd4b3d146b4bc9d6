"""Stages of a step, and a process that hangs in one, seen from its store by another process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from preloaded import Program

import rlwatch
from rlwatch.alerts.rules import SILENT, AlertingConfig, default_rules
from rlwatch.clock import ManualClock
from rlwatch.control.liveness import sign_of, stack_of, stalls_now
from rlwatch.monitor.watchman import Watchman
from rlwatch.records import STAGES, STALL_OVER, STALLED, RunState
from rlwatch.run.stages import (
    MOST_FRAMES,
    MOST_SPANS,
    StageClock,
    StallWatch,
    callers_of,
    seconds_of,
    stacks_of_threads,
)
from rlwatch.store.url import open_store

DEADLINE_S = 120.0


def until(holds, what):
    """What ``holds`` returns once that is true."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} within {DEADLINE_S:g} s")


def stored(place):
    """The one run of the store, once it is there."""
    store = open_store(str(place))
    return store, until(store.runs, "a run")[0]


def stall_in(place):
    store, run = stored(place)
    return store, until(lambda: stalls_now(store.run(run.run_id), store.events(run.run_id)), "a stall")[0]


def environment(place, stall_s="1"):
    return {**os.environ, "RLWATCH_STORE": str(place), "RLWATCH_STALL_S": stall_s, "RLWATCH_SYSTEM": "off"}


# The clock.


def test_a_stage_within_another_stops_the_outer_one():
    """The seconds of all stages add up to the time that passed."""
    clock, begun = StageClock(), time.perf_counter()
    with clock.stage("sampling"):
        with clock.stage("reward"):
            time.sleep(0.02)
            assert [span.stage for span in clock.running()] == ["reward", "sampling"]
        time.sleep(0.01)
    spans = clock.end_step(1)
    passed = time.perf_counter() - begun
    found = seconds_of(spans)

    assert [span.stage for span in spans] == ["sampling", "reward", "sampling"]
    assert found["time/stage/reward"] >= 0.02
    assert found["time/stage/sampling"] >= 0.01
    assert sum(found.values()) <= passed
    assert clock.running() == []
    assert clock.end_step(2) == []


def test_spans_are_bounded_and_no_time_is_lost():
    """Beyond the most that are kept, stages still have their time."""
    clock = StageClock()
    for number in range(2 * MOST_SPANS):
        with clock.stage("sampling" if number % 2 else "reward"):
            pass
    spans = clock.take()

    assert len(spans) in (MOST_SPANS + 1, MOST_SPANS + 2)
    assert sorted({span.stage for span in spans[-2:]}) == ["reward", "sampling"]


def test_a_stage_that_nobody_left_ends_with_the_one_around_it():
    """And one that is left twice is left once."""
    clock = StageClock()
    outer = clock.enter("update")
    inner = clock.enter("sampling")
    clock.leave(outer)
    clock.leave(inner)
    clock.leave(None)

    assert clock.running() == []


def test_stages_of_several_threads_do_not_end_each_other():
    """The training thread is the main one where that is in a stage."""
    clock, entered, go_on = StageClock(), threading.Event(), threading.Event()

    def sample():
        with clock.stage("sampling"):
            entered.set()
            go_on.wait(DEADLINE_S)

    other = threading.Thread(target=sample)
    other.start()
    entered.wait(DEADLINE_S)
    assert (clock.now()[0], clock.thread()) == ("sampling", other.ident)
    with clock.stage("update"):
        assert (clock.now()[0], clock.thread()) == ("update", threading.main_thread().ident)
    go_on.set()
    other.join()

    assert {span.stage for span in clock.take()} == {"sampling", "update"}


COLLECTS = """
import gc, random, sys, threading, time
from rlwatch.run.stages import callers_of

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(1e-5) if random.random() < 0.02 else None

def deep(k):
    return deep(k - 1) if k else 1

def look():
    global deepest
    for _ in range(5_000):
        Cycle(), Cycle(), Cycle()
        deepest = max(deepest, len(callers_of(threading.main_thread().ident, 1_000)))

deepest = 0
gc.set_threshold(20, 2, 2)
looker = threading.Thread(target=look)
looker.start()
while looker.is_alive():
    deep(random.randrange(100))
print(deepest, gc.isenabled())
"""


def test_a_collection_while_the_callers_of_a_thread_are_read_does_not_end_the_process(tmp_path):
    """Its finaliser lets that thread run, and return from the caller that was being read.

    With ``frame.f_back`` in a loop of Python 3.11 this program ends with a segmentation fault at once.
    """
    done = subprocess.run(
        [sys.executable, "-c", COLLECTS], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    deepest, collects = done.stdout.split()
    assert 50 < int(deepest) <= 104
    assert collects == "True"


@pytest.mark.parametrize("collects", [True, False])
def test_callers_are_the_frames_of_the_thread_and_collections_stay_as_they_were(collects):
    """Innermost first; a thread that has ended has none."""
    over, ready = threading.Event(), threading.Event()

    def waits_here():
        ready.set()
        over.wait(DEADLINE_S)

    thread = threading.Thread(target=waits_here)
    thread.start()
    ready.wait(DEADLINE_S)
    (gc.enable if collects else gc.disable)()
    try:
        found = callers_of(thread.ident, 50)
        few = callers_of(thread.ident, 2)
        assert gc.isenabled() == collects
    finally:
        gc.enable()
        over.set()
        thread.join()

    names = [code.co_name for code, _, _ in found]
    assert names[-4:] == ["waits_here", "run", "_bootstrap_inner", "_bootstrap"]
    assert found[-4][1] == waits_here.__code__.co_firstlineno + 2
    assert few == found[:2]
    assert callers_of(thread.ident, 50) == []


def test_stacks_are_bounded_and_those_of_rlwatch_are_left_out():
    """A deep recursion keeps its innermost frames."""

    def deep(n):
        return stacks_of_threads(threading.main_thread().ident) if n == 0 else deep(n - 1)

    with rlwatch.init(store="memory://stacks", system=False):
        stacks = deep(200)

    assert stacks[0]["name"] == "MainThread"
    assert (len(stacks[0]["stack"]), stacks[0]["stack"][0]) == (MOST_FRAMES + 1, "...")
    assert "test_stages.py" in stacks[0]["stack"][-5]
    assert not [one["name"] for one in stacks if one["name"].startswith("rlwatch-")]


def test_a_run_of_rows_alone_records_the_stages_that_its_loop_names():
    """As metrics of the row, and as spans."""
    with rlwatch.init(store="memory://own-stages", run_id="own", system=False) as run:
        for step in (1, 2):
            with run.stage("sampling"):
                time.sleep(0.01)
            with run.stage("update"):
                pass
            run.log({"loss": 0.5}, step=step)
        run.flush()
        store = open_store("memory://own-stages")
        rows, spans = store.records("own"), store.spikes("own", reason=STAGES)

    assert [sorted(row.metrics) for row in rows] == [["loss", "time/stage/sampling", "time/stage/update"]] * 2
    assert rows[0].metrics["time/stage/sampling"] >= 0.01
    assert [list(batch.columns["stage"]) for batch in spans] == [["sampling", "update"]] * 2
    assert (store.spikes("own"), store.top_spikes("own")) == ([], [])


# The watch.


class Told(list):
    def __call__(self, kind, step, body):
        self.append((kind, step, body))


def stall_of(monkeypatch, clock, work):
    """What is told while ``work(told)`` runs in the main thread and another thread looks."""
    monkeypatch.setenv("RLWATCH_STALL_S", "0.5")
    told, over = Told(), threading.Event()
    watch = StallWatch(clock, 3, told)

    def look():
        while not over.wait(0.02):
            watch.look()

    looker = threading.Thread(target=look)
    looker.start()
    try:
        work(told)
    finally:
        over.set()
        looker.join()
    return told


def waits(told):
    until(lambda: told, "a stall")


def spins(told):
    """Threads change at calls and at the ends of loops: in a process that works these are many places."""
    end = time.monotonic() + DEADLINE_S

    def at(depth):
        for _ in range(20_000):
            pass
        if depth:
            at(depth - 1)

    while not told and time.monotonic() < end:
        at(50)


@pytest.mark.parametrize(
    ("stage", "work", "what"),
    [("reward", waits, "starved"), ("sampling", spins, "starved"), ("update", spins, "slow")],
)
def test_starved_and_slow_are_told_apart(monkeypatch, stage, work, what):
    """By the stage, and by whether the stack changes."""
    clock = StageClock()

    def train(told):
        with clock.stage(stage):
            work(told)

    [(kind, step, body), *_] = stall_of(monkeypatch, clock, train)

    assert (kind, step) == (STALLED, None)
    assert (body["stage"], body["what"], body["rank"]) == (stage, what, 3)
    assert what in body["says"]


def test_a_thread_that_waits_in_c_is_wedged_and_is_told_once_and_that_it_is_over(monkeypatch):
    """``Event.wait`` keeps its place."""
    clock, done = StageClock(), threading.Event()

    def train(told):
        with clock.stage("update"):
            done.wait(3.0)
        until(lambda: len(told) > 1, "the end of the stall")

    told = stall_of(monkeypatch, clock, train)

    assert [kind for kind, *_ in told] == [STALLED, STALL_OVER]
    assert told[0][2]["what"] == "wedged"
    assert any("train (" in line for line in told[0][2]["threads"][0]["stack"])


def test_a_process_that_goes_on_and_one_that_is_paused_do_not_stall(monkeypatch):
    """Steps and changes of stage are progress; before either nothing is."""
    clock = StageClock()

    def train(_told):
        time.sleep(0.8)  # models load
        for step in range(8):
            with clock.stage("update"):
                time.sleep(0.1)
            clock.end_step(step)
        for _ in range(8):
            with clock.stage("paused"):
                time.sleep(0.1)

    assert stall_of(monkeypatch, clock, train) == []


# Processes that hang, seen from outside.

LOOP = """
import time, rlwatch
run = rlwatch.init(run_id="loop")
def backward_that_hangs():
    print("hangs", flush=True)
    time.sleep(3600)
api_key = "sk-" + "a1B2" * 12
for step in range(1, 9):
    with run.stage("sampling"):
        pass
    with run.stage("update"):
        if step == 8:
            backward_that_hangs()
    run.log({"loss": 0.5}, step=step)
"""


def test_a_loop_that_hangs_in_its_update_is_named_by_whoever_looks_after_the_store(tmp_path):
    """In the alert, with the stack."""
    with Program(LOOP, having="rlwatch", env=environment(tmp_path), stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == "hangs\n"
        store, stall = stall_in(tmp_path)
        clock = ManualClock(time.time() + 600.0)
        sign = sign_of(store, store.run("loop"), time.time() + 600.0)
        Watchman(store, AlertingConfig(rules=default_rules()), clock=clock).look()
        [alert] = store.alerts("loop")

    assert (stall.step, stall.body["stage"], stall.body["what"]) == (7, "update", "wedged")
    assert stack_of(stall)[-1].startswith("backward_that_hangs (")
    assert sign.stalls == (stall,)
    assert alert.kind == SILENT
    assert "stage update" in alert.message or "was in stage update" in alert.message
    assert alert.evidence["stage"] == "update"
    assert alert.evidence["stalls"][0]["stack"][-1].startswith("backward_that_hangs (")


SECRET = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vX7zB9dF1hJ3k"
HIDES = f"""
import time, rlwatch
run = rlwatch.init(run_id="hides")
run.log({{"loss": 0.5}}, step=1)
work = {{"time": time}}
exec(compile("def waits():\\n    print('hangs', flush=True)\\n    time.sleep(3600)", "/tmp/{SECRET}/loop.py", "exec"), work)
with run.stage("update"):
    work["waits"]()
"""


def test_a_secret_in_the_path_of_a_file_is_not_in_the_stack(tmp_path):
    """As in every event."""
    with Program(HIDES, having="rlwatch", env=environment(tmp_path), stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == "hangs\n"
        _, stall = stall_in(tmp_path)

    assert stack_of(stall)[-1].startswith("waits (")
    assert SECRET not in str(stall.body)


KILLED = """
import time, rlwatch
run = rlwatch.init(run_id="killed")
run.log({"loss": 0.5}, step=1)
with run.stage("checkpoint"):
    print("saves", flush=True)
    time.sleep(3600)
"""


def test_a_process_that_is_killed_in_a_stage_leaves_it_readable(tmp_path):
    """Where the stage lasted for more than a second."""
    with Program(KILLED, having="rlwatch", env=environment(tmp_path, "600"), stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == "saves\n"
        store, run = stored(tmp_path)
        until(lambda: store.run(run.run_id).stage, "the stage")
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
    run = open_store(str(tmp_path)).run("killed")

    assert (run.state, run.stage) == (RunState.RUNNING, "checkpoint")
    assert run.stage_since == pytest.approx(time.time(), abs=DEADLINE_S)


def test_the_next_attempt_begins_in_no_stage(tmp_path):
    """What a dead process did is not what the next one does."""
    with Program(KILLED, having="rlwatch", env=environment(tmp_path, "600"), stdout=subprocess.PIPE) as program:
        program.stdout.readline()
        store, run = stored(tmp_path)
        until(lambda: store.run(run.run_id).stage, "the stage")
    with rlwatch.init(store=str(tmp_path), run_id="killed", system=False):
        run = store.run("killed")

    assert (run.attempt, run.stage, run.stage_since) == (2, "", None)


ENDS = """
import gc, os, threading
from rlwatch.run.stages import callers_of

class Closes:
    def __init__(self):
        self.itself, self.fd = self, os.open(os.devnull, os.O_RDONLY)

    def __del__(self):
        os.close(self.fd)  # another thread may go on, in the middle of a collection

def threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

def garbage():
    while True:
        Closes()

gc.set_threshold(5, 2, 2)
for target in (threads, threads, garbage):
    threading.Thread(target=target, daemon=True).start()
for _ in range(300_000):
    assert callers_of(threading.get_ident(), 1)
print("looked", gc.isenabled(), flush=True)
os._exit(0)
"""


def test_a_look_at_the_stacks_never_hangs_the_process():
    """Finalisers that let other threads go on, and threads that begin and end: that once hung a trainer for good."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)

    assert (done.stdout, done.returncode) == ("looked True\n", 0), done.stderr
