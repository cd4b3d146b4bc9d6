"""Exit, SIGTERM, SIGKILL, fork, an exception nobody caught: what a run survives without being asked to."""

import os
import signal
import subprocess
import textwrap

import pytest
from preloaded import Program, run_program

from rlwatch.control.liveness import dead_since
from rlwatch.records import SHED, RunState
from rlwatch.state import State
from rlwatch.store.url import open_store
from rlwatch.view import view_of_run


def child(tmp_path, body, **pipes):
    """A script that has a run, does ``body`` and prints READY when asked to wait."""
    script = f"""
        import os, signal, sys, time
        import rlwatch
        run = rlwatch.init(store={str(tmp_path)!r}, run_id="child")
        for step in range(50):
            run.log({{"entropy": 0.5, "grad_norm": 1.0}}, step=step)
        {textwrap.indent(textwrap.dedent(body), " " * 8).strip()}
    """
    return Program(textwrap.dedent(script), having="rlwatch", stdout=subprocess.PIPE, **pipes)


def end_of(tmp_path):
    store = open_store(str(tmp_path))
    info = store.run("child")
    return info.state, info.state_reason, len(store.records("child"))


@pytest.mark.parametrize(
    ("body", "state", "reason"),
    [
        ("pass", RunState.FINISHED, "the process exited"),
        ("sys.exit(0)", RunState.FINISHED, "the process exited"),
        ("raise ValueError('boom')", RunState.CRASHED, "ValueError: boom"),
    ],
)
def test_a_run_nobody_finished_is_finished_at_exit(tmp_path, body, state, reason):
    """With everything that was logged."""
    child(tmp_path, body).wait(600)

    assert end_of(tmp_path) == (state, reason, 50)


def test_sigterm_flushes_and_then_kills_as_the_sender_expects(tmp_path):
    """A preempted job keeps its records and its exit status."""
    process = child(tmp_path, "print('READY', flush=True); time.sleep(3600)")
    assert process.stdout.readline() == "READY\n"
    process.send_signal(signal.SIGTERM)

    assert process.wait(600) == -signal.SIGTERM
    assert end_of(tmp_path) == (RunState.CRASHED, "killed by SIGTERM", 50)


def test_somebody_elses_sigterm_handler_is_left_alone(tmp_path):
    """The trainer's own wins."""
    body = """
        handler = lambda *a: os._exit(7)
        signal.signal(signal.SIGTERM, handler)
        second = rlwatch.init(store="memory://x")
        assert signal.getsignal(signal.SIGTERM) is handler
        print('READY', flush=True)
        time.sleep(3600)
    """
    process = child(tmp_path, body)
    assert process.stdout.readline() == "READY\n"
    process.send_signal(signal.SIGTERM)

    assert process.wait(600) == 7


def test_sigkill_loses_nothing_that_had_its_tenth_of_a_second(tmp_path):
    """What was flushed is there; the run can be resumed."""
    process = child(tmp_path, "run.flush(); print('READY', flush=True); time.sleep(3600)")
    assert process.stdout.readline() == "READY\n"
    process.kill()
    process.wait(600)

    state, _, rows = end_of(tmp_path)
    assert (state, rows) == (RunState.RUNNING, 50)
    again = child(tmp_path, "pass")
    again.wait(600)
    assert [r.attempt for r in open_store(str(tmp_path)).records("child")] == [1] * 50 + [2] * 50


def test_a_forked_child_is_inert_and_the_parent_goes_on(tmp_path):
    """Data-loader workers must neither write the run nor keep its lock."""
    body = """
        pid = os.fork()
        if pid == 0:
            run.log({"entropy": 9.9}, step=999)
            run.finish()
            os._exit(0 if not run.active else 1)
        assert os.waitpid(pid, 0)[1] == 0
        run.log({"entropy": 0.5}, step=50)
        if os.fork() == 0:
            time.sleep(2)   # outlives the parent: the lock must not
            os._exit(0)
        run.finish()
        other = rlwatch.init(store=run_store, run_id="child")
        other.finish()
        print("AGAIN", other.info.attempt, flush=True)
    """.replace("run_store", repr(str(tmp_path)))
    process = child(tmp_path, body)
    out, _ = process.communicate(timeout=300)

    assert process.returncode == 0
    assert out.strip() == "AGAIN 2"
    assert [r.step for r in open_store(str(tmp_path)).records("child")] == list(range(51))


@pytest.mark.parametrize("end", ["run.finish()", "pass", "raise ValueError('theirs')"])
def test_a_run_that_ends_in_good_order_on_a_full_disk_says_what_is_lost_and_is_not_taken_for_killed(tmp_path, end):
    """No file may grow: the end, and how many rows of which steps are lost, go into room taken at the beginning."""
    body = f"""
        import resource
        run.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        for step in range(50, 900):
            run.log({{f"m/{{k}}": step + k / 10 for k in range(60)}}, step=step)
        {end}
    """
    process = child(tmp_path, body, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=300)
    state, reason, _ = end_of(tmp_path)

    assert process.returncode == int("raise" in end)
    assert (state, "theirs" in reason) == ((RunState.CRASHED, True) if "raise" in end else (RunState.FINISHED, False))
    store = open_store(str(tmp_path))
    steps = [record.step for record in store.records("child")]
    assert steps == list(range(len(steps)))
    lost = 900 - len(steps)
    assert lost > 0
    assert said.count(f"ends without {lost:,} rows of steps {len(steps)}-899, which are lost") == 1
    (told,) = [event for event in store.events("child") if event.kind == SHED]
    assert (told.body["n"], told.body["first_step"], told.body["last_step"]) == (lost, len(steps), 899)
    assert sorted(path.name for path in (tmp_path / "child").glob("run.journal*")) == []


def test_what_a_forked_child_logs_is_said_to_be_lost_once_and_counted(tmp_path):
    """By every call that records; a child that logs nothing, and a run of the child's own, say nothing."""
    body = """
        import logging
        said = []
        class Kept(logging.Handler):
            def emit(self, record):
                said.append(record.getMessage())
        logging.getLogger("rlwatch").addHandler(Kept())
        def in_child(work):
            pid = os.fork()
            if pid == 0:
                try:
                    work()
                except BaseException as error:
                    print(repr(error), flush=True)
                    os._exit(1)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        def logs():
            for step in range(3):
                run.log({"entropy": 9.9}, step=step)
            run.event("note", 1)
            assert run.counters["forked"] == 4, run.counters.snapshot()
            assert len(said) == 1 and "what a forked child logs is lost" in said[0], said
        def silent():
            run.finish()
            assert run.counters["forked"] == 0 and not said
        def begins():
            with rlwatch.init(store="memory://own") as own:
                own.log({"entropy": 1.0}, step=1)
            assert own.counters.snapshot() == {} and not said
        for work in (logs, silent, begins):
            in_child(work)
        assert run.counters["forked"] == 0
        run.finish()
        run.log({"entropy": 1.0}, step=60)
        in_child(lambda: run.log({"entropy": 1.0}, step=61))
        assert run.counters["forked"] == 0 and not said, said
        print("ALL", flush=True)
    """
    process = child(tmp_path, body)
    out, _ = process.communicate(timeout=300)

    assert (process.returncode, out.strip()) == (0, "ALL")


def test_a_run_in_a_thread_installs_no_signal_handler(tmp_path):
    """Only the main thread may."""
    body = """
        import threading
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        worker = threading.Thread(target=lambda: rlwatch.init(store="memory://t").finish())
        worker.start(); worker.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    """
    assert child(tmp_path, body).wait(600) == 0


def test_the_exit_has_a_deadline(tmp_path):
    """A store that hangs does not hold the exit."""
    body = """
        run._engine.writer._sinks[0].write = lambda batch: time.sleep(3600)
        run.log({"entropy": 0.5}, step=51)
        print(run.finish(deadline_s=0.5), flush=True)
        os._exit(0)
    """
    out, _ = child(tmp_path, body).communicate(timeout=300)

    assert out.strip() == "False"


@pytest.mark.parametrize(
    ("ending", "state", "reason"),
    [
        ("run.finish(reason='all steps done', deadline_s=0.5)", RunState.FINISHED, "all steps done"),
        ("run.end('crashed', 'ValueError: boom', deadline_s=0.5)", RunState.CRASHED, "ValueError: boom"),
    ],
)
def test_a_run_that_ended_behind_a_slow_writer_is_not_called_killed(tmp_path, ending, state, reason):
    """The process is gone before its writer came to the end: what was logged is there, and how it was ended."""
    body = f"""
        run.flush()
        run._engine.writer._sinks[0].write = lambda batch, numbers=(): time.sleep(3600)
        run.log({{"entropy": 0.5}}, step=51)
        {ending}
        os._exit(0)
    """
    child(tmp_path, body).wait(600)

    assert end_of(tmp_path) == (state, reason, 51)
    store = open_store(str(tmp_path))
    run = store.run("child")
    assert dead_since(run, run.heartbeat_at + 3600.0) is None
    assert view_of_run(store, run).verdict.state is (State.KILLED if state is RunState.CRASHED else State.NOT_JUDGED)


def test_os_fork_is_available():
    """These tests mean nothing elsewhere."""
    assert hasattr(os, "fork")


TOOK_OVER = """
import os, signal, sys, time
import rlwatch
from rlwatch.run import run as process_ends
process_ends.SIGNAL_S = 0.2
run = rlwatch.init(store=sys.argv[1], run_id="r")
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("saved"))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1.5)
print(heard)
"""
HANGS = """
import ctypes, sys, threading
import rlwatch
from rlwatch.run import run as process_ends
process_ends.SIGNAL_S = 0.2
run = rlwatch.init(store=sys.argv[1], run_id="r")
stuck = threading.Thread(target=threading.Event().wait, daemon=True)
stuck.start()
print("up", flush=True)
ctypes.CDLL(None).pthread_join(ctypes.c_ulong(stuck.ident), None)  # not broken by signals: no handler ever runs
"""


def test_a_main_thread_that_never_comes_back_to_python_is_ended_all_the_same(tmp_path):
    """A collective that hangs: without rlwatch the signal would have ended it at once."""
    with Program(HANGS, tmp_path, having="rlwatch", stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(600) == -signal.SIGTERM


def test_a_handler_that_the_program_installs_later_is_the_last_word(tmp_path):
    """A trainer that saves at SIGTERM and goes on is not ended by us."""
    done = run_program(TOOK_OVER, tmp_path, having="rlwatch")

    assert (done.returncode, done.stdout.strip()) == (0, "['saved']"), done.stderr


TOOK_OVER_FOR_A_MOMENT = """
import os, signal, sys, time
import rlwatch
from rlwatch.run import run as process_ends
process_ends.SIGNAL_S = 0.5
run = rlwatch.init(store=sys.argv[1], run_id="r")
heard = []
before = signal.signal(signal.SIGTERM, lambda *_: heard.append("saved"))
os.kill(os.getpid(), signal.SIGTERM)
while not heard:
    pass
signal.signal(signal.SIGTERM, before)
end = time.monotonic() + 2.0
while time.monotonic() < end:
    time.sleep(0.01)
print(heard)
"""


def test_a_handler_that_was_there_for_the_signal_alone_is_the_last_word_too(tmp_path):
    """It had gone by the time that the signal's number was read."""
    done = run_program(TOOK_OVER_FOR_A_MOMENT, tmp_path, having="rlwatch")

    assert (done.returncode, done.stdout.strip()) == (0, "['saved']"), done.stderr


ENDS_A_CHILD = """
import ctypes, os, signal, sys
import rlwatch
from rlwatch.run import run as process_ends
process_ends.SIGNAL_S = 0.2
run = rlwatch.init(store=sys.argv[1], run_id="r")
told, tells = os.pipe()
child = os.fork()
if child == 0:
    os.write(tells, b"1")
    while True:
        signal.pause()
os.read(told, 1)
os.kill(child, signal.SIGTERM)
ctypes.CDLL(None).usleep(2_000_000)  # a long call of the main thread, as a kernel or a collective is
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_ended_ends_no_training(tmp_path):
    """A worker of a loader or of a pool: its SIGTERM is its own, and it dies of it at once."""
    done = run_program(ENDS_A_CHILD, tmp_path, having="rlwatch")

    assert (done.returncode, done.stdout.strip()) == (0, str(int(signal.SIGTERM))), done.stderr
    assert open_store(str(tmp_path)).run("r").state is RunState.FINISHED
