"""The life of a run in the hands of a loop: before the first log, between calls, and when the end is slow."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlwatch
from rlwatch.control.policy import RunHealth
from rlwatch.recorder.losses import Counters
from rlwatch.records import RunInfo, RunState, SpikeBatch
from rlwatch.redaction import recordable
from rlwatch.run.identity import new_run_id
from rlwatch.run.run import Run, RunEngine
from rlwatch.store import check_run_id
from rlwatch.store.url import open_store


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "runs")


class SlowWriter:
    """Takes ``needs`` seconds to stop, of a clock the test owns."""

    def __init__(self, needs, monkeypatch):
        self.needs, self.asked, self._now = needs, [], 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self._now)

    judged_all = True

    def stop(self, deadline_s, ending):
        self.asked.append(deadline_s)
        self._now += min(self.needs, deadline_s)
        if self.needs <= deadline_s:
            ending()
        return self.needs <= deadline_s


class Delivery:
    """Remembers how long it was given."""

    def __init__(self):
        self.given = []

    def stop(self, deadline_s):
        self.given.append(deadline_s)


def ending(needs, monkeypatch):
    """A run whose writer needs so long, with what its end calls."""
    run, finished = Run(RunInfo("r"), Counters()), []
    writer, delivery = SlowWriter(needs, monkeypatch), Delivery()
    run.attach(RunEngine([], writer, None, lambda state, reason: finished.append((state, reason)), delivery))
    return run, writer, delivery, finished


def test_what_the_writer_leaves_of_the_deadline_is_for_the_delivery(monkeypatch):
    """Records first, alerts with the rest: together they take no longer than asked."""
    run, writer, delivery, finished = ending(3.0, monkeypatch)

    assert run.finish(reason="done", deadline_s=10.0) is True
    assert (writer.asked, delivery.given) == ([10.0], [7.0])
    assert finished == [(RunState.FINISHED, "done")]
    assert not run.active


def test_a_writer_that_misses_the_deadline_leaves_the_run_unfinished_and_says_so(monkeypatch, caplog):
    """The file may be in use: it is not touched. The delivery is asked to end at once."""
    run, _, delivery, finished = ending(60.0, monkeypatch)

    assert run.finish(deadline_s=2.5) is False
    assert (finished, delivery.given, run.counters["errors"]) == ([], [0.0], 1)
    assert "were not stored within 2.5 s" in caplog.text


def test_an_ending_process_gives_the_run_five_seconds(monkeypatch):
    """Job schedulers kill after a while."""
    run, writer, _, finished = ending(1.0, monkeypatch)
    run.end("crashed", "killed by SIGTERM")
    run.end("finished", "the process exited")

    assert writer.asked == [5.0]
    assert finished == [(RunState.CRASHED, "killed by SIGTERM")]


def test_a_run_in_a_forked_child_does_nothing(monkeypatch):
    """Its parent owns the files."""
    run, writer, delivery, finished = ending(0.0, monkeypatch)
    run.forked()
    run.log({"kl": 1.0}, step=1)
    run.event("note")

    assert (run.active, run.commands(), run.flush(), run.finish()) == (False, [], True, True)
    assert (writer.asked, delivery.given, finished) == ([], [], [])


def test_a_receiver_that_never_answers_does_not_hold_the_end(store):
    """A webhook host that takes the connection and is silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run = rlwatch.init(store=store, webhook_url=f"http://127.0.0.1:{silent.getsockname()[1]}/hook")
        for step in range(4):
            run.log({"loss": float("nan"), "grad_norm": float("nan")}, step=step)
        run.flush()
        run.finish(deadline_s=0.5)

    assert open_store(store).run(run.info.run_id).state is RunState.FINISHED
    assert [m.channel for m in open_store(store).outbox(run.info.run_id)] == ["webhook"]


def test_before_anything_was_judged_a_run_is_healthy(store):
    """No findings, nothing collapsing; the same object a loop may always ask."""
    with rlwatch.init(store=store) as run:
        assert run.health() == RunHealth()
        assert (run.health().findings, run.health().collapsing) == ((), ())
        assert run.commands() == []


def test_events_may_come_before_the_first_record_and_keep_their_place(store):
    """One order for both; a body is kept, a step is optional."""
    with rlwatch.init(store=store) as run:
        run.event("note", text="warm-up")
        run.log({"kl": 0.1}, step=0)
        run.event("reference_reset", step=0, optimizer="clear", kl={"before": 0.4})
        run.log({"kl": 0.2}, step=1)

    opened = open_store(store)
    events = opened.events(run.info.run_id)
    assert [(e.kind, e.step, e.body, e.seq, e.attempt) for e in events] == [
        ("note", None, {"text": "warm-up"}, 1, 1),
        ("reference_reset", 0, {"optimizer": "clear", "kl": {"before": 0.4}}, 3, 1),
    ]
    assert [r.seq for r in opened.records(run.info.run_id)] == [2, 4]


def test_an_exception_leaves_an_event_before_the_end(store):
    """With its words, in the stream and on the run."""
    run = rlwatch.init(store=store)
    with pytest.raises(RuntimeError), run:
        raise RuntimeError("out of memory")

    (event,) = open_store(store).events(run.info.run_id)
    ended = open_store(store).run(run.info.run_id)
    assert (event.kind, event.body) == ("exception", {"error": "RuntimeError: out of memory"})
    assert (ended.state, ended.state_reason) == (RunState.CRASHED, "RuntimeError: out of memory")


def test_spikes_come_back_from_the_store_as_they_were_logged(store):
    """Types, NaN and text; stamped with the attempt that logged them."""
    columns = {
        "sequence": np.array([3, 4], dtype=np.int64),
        "logp": np.array([-0.5, np.nan]),
        "ratio": np.array([1.0, np.inf], dtype=np.float32),
        "text": ["<b>", "日本"],
    }
    rlwatch.init(store=store, run_id="r").finish()
    with rlwatch.init(store=store, run_id="r") as run:
        run.log_spikes(SpikeBatch(5, columns, reason="ratio above 10", ts=3.0))

    (batch,) = open_store(store).spikes("r")
    assert (batch.step, batch.reason, batch.ts, batch.attempt, batch.rank) == (5, "ratio above 10", 3.0, 2, 0)
    assert list(batch.columns) == list(columns)
    assert list(batch.columns.pop("text")) == columns["text"]
    for name, column in batch.columns.items():
        assert column.dtype == columns[name].dtype
        np.testing.assert_array_equal(column, columns[name])


def test_what_no_store_can_hold_is_counted_and_takes_nothing_with_it(store):
    """Columns of two lengths, a step beyond 64 bits: all around them is stored. What holds itself is named."""
    circle = []
    circle.append(circle)
    with rlwatch.init(store=store) as run:
        run.log({"kl": 0.1}, step=1)
        run.log_spikes(SpikeBatch(1, {"logp": np.zeros(2), "ratio": np.zeros(3)}))
        run.event("note", body=circle)
        run.log({"kl": 0.2}, step=2)
        run.log({"kl": 0.3}, step=1 << 63)
        run.flush()
        run.log({"kl": 0.4}, step=4)

    opened = open_store(store)
    assert opened.series(run.info.run_id, ["kl"])["kl"].values.tolist() == [0.1, 0.2, 0.4]
    assert opened.spikes(run.info.run_id) == []
    assert [event.body for event in opened.events(run.info.run_id)] == [{"body": ["<list that contains itself>"]}]
    assert (run.counters["dropped"], run.counters["bad_records"]) == (1, 1)
    assert opened.last_values(run.info.run_id)["rlwatch/dropped"] == (4, 1.0)


@pytest.mark.parametrize("state", ["finished", "crashed", RunState.CRASHED])
def test_a_run_may_be_finished_by_name(store, state):
    """As text or as the state itself, with the reason."""
    run = rlwatch.init(store=store)
    run.finish(state=state, reason="why")

    ended = open_store(store).run(run.info.run_id)
    assert (ended.state, ended.state_reason) == (RunState(state), "why")


@given(st.text(max_size=150))
def test_a_new_run_id_is_a_name_any_store_takes(project):
    """Whatever the project is called."""
    run_id = new_run_id(project)

    assert check_run_id(run_id) == run_id


def test_new_runs_of_one_second_differ():
    """Sixty-five thousand endings."""
    assert len({new_run_id("math") for _ in range(20)}) > 15


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({"a": {"api_key": "x", "n": (1, 2)}}, {"a": {"api_key": "[redacted]", "n": [1, 2]}}),
        ({"x": "y" * 3000}, {"x": "y" * 2000}),
        ({"auth": 7, "max_tokens": 5, "pad_token": "<pad>"}, {"auth": 7, "max_tokens": 5, "pad_token": "<pad>"}),
        (
            {"AUTH": b"x", "db.password": "x", "my-secret": ""},
            dict.fromkeys(("AUTH", "db.password", "my-secret"), "[redacted]"),
        ),
        ({"tokenizer": "qwen", "author": "ada"}, {"tokenizer": "qwen", "author": "ada"}),
        ({1: None, "f": float}, {"1": None, "f": "<class 'float'>"}),
    ],
)
def test_a_configuration_is_kept_as_plain_values_without_secrets(value, kept):
    """Nested, cut at two thousand characters, and only text can be a secret."""
    assert recordable(value) == kept


TRAINER = """
import sys
import rlwatch

run = rlwatch.init(store=sys.argv[1], run_id="run", detectors=list, forecast=False)
for step in range(200):
    run.log({"kl": step / 7, "loss": 1.0}, step=step)
    if step == 100:
        print(run.flush(60.0), flush=True)
        sys.stdin.readline()
print(flush=True)
sys.stdin.readline()
assert run.finish(deadline_s=60.0)
"""


@pytest.mark.parametrize("spoil", [lambda path: os.truncate(path, 0), Path.unlink], ids=["truncated", "removed"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_journal_that_another_process_spoils_costs_training_nothing(tmp_path, spoil, killed):
    """A mapped file would kill it with SIGBUS; here a new file is begun, and what is logged then survives a kill."""
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "True\n"
        (first,) = (tmp_path / "run").glob("run.journal-[0-9]*")
        spoil(first)
        until = time.monotonic() + 60.0
        while not [file for file in (tmp_path / "run").glob("run.journal-[0-9]*") if file != first]:
            assert time.monotonic() < until
            time.sleep(0.01)
        print(file=trainer.stdin, flush=True)
        assert trainer.stdout.readline() == "\n"
        if killed:
            trainer.kill()
        trainer.communicate("\n" * (not killed), timeout=120)

    assert trainer.returncode == (-signal.SIGKILL if killed else 0)
    rows = open_store(tmp_path).records("run")
    assert [(row.step, row.metrics["kl"]) for row in rows] == [(step, step / 7) for step in range(200)]
