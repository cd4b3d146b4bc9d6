"""Who judges and from where: behind the rows, after a death, from a checkpoint; always the same, and told once."""

import pickle
import shutil
import threading
import time
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import RULES, streams, total

import rlwatch
from rlwatch import forecast
from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.rules import AlertingConfig, Rule
from rlwatch.forecast.forecaster import MODEL_VARIABLE, Forecaster
from rlwatch.monitor import Monitor, checkpoint
from rlwatch.monitor.forecasting import OFF, forecaster_for
from rlwatch.monitor.judge import ROWS_AT_ONCE, MonitorSink, SinkProgress, judge_rest, past_of
from rlwatch.ports import Progress
from rlwatch.recorder.judge_thread import (
    AT_ONCE,
    BLOCK,
    FEWEST,
    INBOX,
    WAIT_S,
    Interrupted,
    JudgeThread,
)
from rlwatch.records import (
    FORECAST_SWITCH,
    IMPORTED,
    ORIGIN,
    AlertState,
    Event,
    Finding,
    RunInfo,
    RunState,
    Severity,
    StepRecord,
)
from rlwatch.state import ending_of
from rlwatch.store.url import open_store
from rlwatch.testing.small_batches import small_run
from rlwatch.view import unjudged_from

POLICY = AlertingConfig(rules=(Rule("now", channels=("webhook",)),))


@pytest.fixture(autouse=True)
def own_key(tmp_path, monkeypatch):
    """A state directory of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def sealed(monitor):
    return checkpoint.sealed(monitor, "us", seq=3, attempt=1, step=2)


def sick(steps, *, seq=0, attempt=1, from_step=0, onset=20):
    """A run whose gradient is NaN from ``onset`` on."""
    return [
        StepRecord(
            step,
            {"grad_norm": float("nan") if step >= onset else 1.0, "policy/entropy": 1.0 + 0.01 * (step % 5)},
            ts=float(step),
            attempt=attempt,
            seq=seq + k,
        )
        for k, step in enumerate(range(from_step, from_step + steps), start=1)
    ]


@settings(max_examples=30, deadline=None)
@given(streams(), st.data())
def test_a_monitor_from_a_checkpoint_goes_on_as_the_one_it_was_made_of(items, data):
    """All detectors, the forecaster, alerts and episodes: wherever it is cut."""
    cut = data.draw(st.integers(0, len(items)))
    first, fresh, whole = (Monitor(run_id="run", rules=RULES) for _ in range(3))
    for item in items[:cut]:
        first.observe(item)
        whole.observe(item)

    assert checkpoint.opened(sealed(first), fresh)
    rest = total([fresh.observe(item) for item in items[cut:]]) + fresh.close()
    assert repr(rest) == repr(total([whole.observe(item) for item in items[cut:]]) + whole.close())
    assert (fresh.firing, fresh.active, fresh.diagnosis()) == (whole.firing, whole.active, whole.diagnosis())


def test_a_monitor_of_a_sparse_log_goes_on_with_the_model_of_such_logs(monkeypatch):
    """The forecaster chose it before the checkpoint was made. A model of one's own has no gate."""
    monkeypatch.setenv(MODEL_VARIABLE, str(Path(forecast.__file__).parent / "shipped" / "hazard.json"))
    rows = [
        replace(row, metrics={**row.metrics, "reward": 0.5}) for row in small_run(1003, failure="cut", every=5).rows
    ]
    items = [StepRecord(row.step, row.metrics, ts=float(row.step), seq=seq) for seq, row in enumerate(rows, start=1)]
    first, fresh, whole = (Monitor(run_id="run", rules=RULES) for _ in range(3))
    for item in items[: len(items) // 2]:
        first.observe(item)
        whole.observe(item)

    assert checkpoint.opened(sealed(first), fresh)
    rest, told = (total([each.observe(item) for item in items[len(items) // 2 :]]) for each in (fresh, whole))
    assert any(forecast.p50 is not None for forecast in told.forecasts)
    assert repr(rest) == repr(told)


class Evil:
    def __reduce__(self):
        return (eval, ("open('/tmp/rlwatch-evil', 'w')",))


def test_a_monitor_that_knows_layers_is_kept_as_well():
    """Norms of layers are remembered by a class of a room of its own."""
    monitor = Monitor(run_id="run", rules=RULES)
    for step in range(60):
        norms = {f"grad_layer/model.layers.{layer}": 1.0 + 0.01 * ((step * layer) % 7) for layer in range(6)}
        monitor.observe(StepRecord(step, {"grad_norm": 2.5, **norms}, ts=float(step), seq=step + 1))

    assert checkpoint.opened(sealed(monitor), Monitor(run_id="run", rules=RULES))


def test_only_our_own_seal_opens_a_checkpoint_and_only_what_judges_is_looked_up(tmp_path, monkeypatch):
    """Store directories travel: a stranger's checkpoint is as good as none."""
    monitor = Monitor(run_id="run", rules=RULES)
    kept = sealed(monitor)
    assert checkpoint.opened(kept, Monitor(run_id="run", rules=RULES))
    changed = [
        replace(kept, body=kept.body[:-1] + bytes([kept.body[-1] ^ 1])),
        replace(kept, body=b""),
        replace(kept, step=7),
        replace(kept, seq=7),
        replace(kept, made_by="another"),
    ]
    assert not any(checkpoint.opened(each, Monitor(run_id="run", rules=RULES)) for each in changed)

    evil = zlib.compress(pickle.dumps(Evil()))
    bare = replace(kept, body=evil)
    signed = replace(kept, body=checkpoint.seal(checkpoint.own_key(), bare) + evil)
    assert not checkpoint.opened(signed, Monitor(run_id="run", rules=RULES))

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody-elses"))
    assert not checkpoint.opened(kept, Monitor(run_id="run", rules=RULES))


def test_a_key_that_others_can_read_is_no_key(tmp_path):
    """Then there are no checkpoints; the rows are relived."""
    assert checkpoint.own_key() is not None
    (tmp_path / "state" / "rlwatch" / "checkpoint.key").chmod(0o644)

    assert (checkpoint.own_key(), checkpoint.made_by(Monitor(run_id="run"))) == (None, "")


def test_what_judges_otherwise_names_its_checkpoints_otherwise(monkeypatch):
    """Rules, source, model; detectors of somebody's own are not kept at all."""
    usual = checkpoint.made_by(Monitor(run_id="run"))
    assert usual == checkpoint.made_by(Monitor(run_id="run"))
    others = [Monitor(run_id="run", rules=RULES), Monitor(run_id="run", source="verl"), Monitor(run_id="other")]
    others += [Monitor(run_id="run", forecaster=forecaster_for(wanted=False))]
    assert len({usual, *map(checkpoint.made_by, others)}) == 5
    monkeypatch.setenv("RLWATCH_FORECAST_BUDGET", "1")
    assert checkpoint.made_by(Monitor(run_id="run")) != usual
    assert checkpoint.made_by(Monitor(run_id="run", detectors=list)) == ""


class Counted:
    """A store that says how many rows of it were read again."""

    def __init__(self, store):
        self._store, self.relived = store, 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def branch(self, *args, **kwargs):
        for row in self._store.branch(*args, **kwargs):
            self.relived += 1
            yield row


def judging(store, writer, *, monitor=None, **settings):
    monitor = monitor or Monitor(run_id="run", rules=POLICY.rules, history=past_of(store, "run", lambda: monitor))
    sink = MonitorSink(monitor, writer.run, store, dispatcher=Dispatcher(store, POLICY), keep=writer.write, **settings)

    def note(seq, kept):
        writer.write([], Progress(judged=seq, checkpoint=kept))

    return SinkProgress(monitor, sink, store, "run", judged=note, checkpoint_share=1e9)


def test_a_resume_relives_only_what_came_after_a_checkpoint(tmp_path, monkeypatch):
    """It goes on at once, and says what one that relived everything says; wherever it goes on."""
    store = open_store(tmp_path / "first")
    writer = store.open_run(RunInfo("run"))
    first = judging(store, writer)
    first.begin(0)
    rows = sick(1500, onset=1450)
    for at in range(0, len(rows), 100):
        writer.write(rows[at : at + 100])
        first.take(rows[at : at + 100])
    writer.close()
    store.close()
    for resumed_at in (900, 1100, 1500):
        with monkeypatch.context() as patch:
            by_checkpoint = resumed(tmp_path, resumed_at)
            patch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody-elses"))  # whom no checkpoint is of
            by_reliving = resumed(tmp_path, resumed_at)
        assert by_checkpoint[0] <= 600, resumed_at
        assert by_reliving[0] == resumed_at
        assert by_checkpoint[1:] == by_reliving[1:], resumed_at


def resumed(root, resumed_at):
    """A copy of the run in ``first``, gone on with: rows relived, findings and alerts."""
    place = root / f"resumed{len(list(root.iterdir()))}"
    shutil.copytree(root / "first", place)
    store = Counted(open_store(place))
    writer = store.open_run(RunInfo("run"))
    second = judging(store, writer)
    second.begin(writer.last_seq)
    more = sick(40, seq=writer.last_seq, attempt=2, from_step=resumed_at, onset=resumed_at + 20)
    writer.write(more)
    second.take(more)
    second.close()
    writer.close()
    found = [(f.kind, f.step, f.onset_step, f.attempt) for f in store.findings("run")]
    return store.relived, found, sorted((a.alert_id, a.state) for a in store.alerts("run"))


def dead(root, rows, judged=0):
    """A run whose process stored ``rows``, judged the first of them, and died."""
    store = open_store(root)
    writer = store.open_run(RunInfo("run"))
    by = judging(store, writer)
    by.begin(0)
    if judged:
        writer.write(rows[:judged])
        by.take(rows[:judged])
    writer.write(rows[judged:])
    writer.close()
    return store


@pytest.mark.parametrize("judged", [0, 10, 19, 22, 25])
def test_what_was_stored_and_not_judged_is_told_once_by_whoever_looks(tmp_path, judged):
    """The same findings and ids as the dead process would have told; the last step, too."""
    store = dead(tmp_path / "dead", sick(25), judged)
    told = []
    assert judge_rest(store, "run", POLICY, Dispatcher(store, POLICY), told.append)
    assert not judge_rest(store, "run", POLICY, Dispatcher(store, POLICY), told.append)

    whole = dead(tmp_path / "whole", sick(25), 0)
    judge_rest(whole, "run", POLICY, Dispatcher(whole, POLICY))
    assert [(f.kind, f.seq, f.step) for f in store.findings("run")] == [
        (f.kind, f.seq, f.step) for f in whole.findings("run")
    ]
    assert any(f.kind == "nonfinite" and f.step == 20 for f in store.findings("run"))
    firing = [m for m in store.outbox() if m.payload["event"] == "firing"]
    assert {m.message_id for m in firing} == {m.message_id for m in whole.outbox() if m.payload["event"] == "firing"}
    assert store.judged("run") == (25, 25)
    assert [r.seq for r in store.forecasts("run")] == [r.seq for r in whole.forecasts("run")]


def test_rows_that_wait_are_forecast_together_and_as_if_one_by_one(tmp_path):
    """The forecaster is asked once for many rows; what is stored of them is what it would have been row by row."""
    rows = sick(200, onset=180)

    def asked_for(store, batches):
        calls = []

        class Asked(Forecaster):
            def extend(self, steps):
                calls.append(len(steps))
                return super().extend(steps)

        with closing(store.open_run(RunInfo("run"))) as writer:
            by = judging(store, writer, monitor=Monitor(run_id="run", rules=POLICY.rules, forecaster=Asked))
            by.begin(0)
            for batch in batches:
                writer.write(batch)
                while by.stored():
                    pass
            by.close()
        return len(calls)

    single, together = open_store(tmp_path / "single"), open_store(tmp_path / "together")
    assert asked_for(single, [[row] for row in rows]) == 200
    assert asked_for(together, [rows]) <= 200 // ROWS_AT_ONCE + 2
    assert repr(together.forecasts("run")) == repr(single.forecasts("run"))
    assert repr(together.findings("run")) == repr(single.findings("run"))


@pytest.mark.parametrize("by_the_run", [True, False])
def test_a_run_that_wants_no_forecast_is_given_none_by_whoever_judges_its_rest(tmp_path, by_the_run):
    """Said by the run that was begun so, or by the configuration of who looks."""
    store = open_store(tmp_path)
    config = {ORIGIN: {FORECAST_SWITCH: False}} if by_the_run else {}
    with closing(store.open_run(RunInfo("run", config=config))) as writer:
        writer.write(sick(60))
    policy = replace(POLICY, forecast=by_the_run)
    assert judge_rest(store, "run", policy, Dispatcher(store, policy))

    assert [record.body["absent"] for record in store.forecasts("run")] == [OFF]
    assert any(finding.kind == "nonfinite" for finding in store.findings("run"))


@pytest.mark.parametrize(
    ("pid", "state", "reason", "found", "again"),
    [
        (None, RunState.FINISHED, IMPORTED, True, False),
        (None, RunState.UNFINISHED, "the log stops at step 25 of 100", True, False),
        (None, RunState.FINISHED, IMPORTED, False, True),
        (7, RunState.FINISHED, IMPORTED, True, True),
        (7, RunState.FINISHED, "", True, True),
        (7, RunState.CRASHED, "MemoryError", True, True),
        (7, None, "", True, True),
    ],
)
def test_a_log_that_was_judged_when_it_was_imported_is_not_judged_again(tmp_path, pid, state, reason, found, again):
    """Earlier versions noted no position with an import; a trainer that was killed noted none either, perhaps."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run", pid=pid, host="node" if pid else ""))
    writer.write(sick(25))
    early = Finding("numerics", "nonfinite", Severity.CRITICAL, 1, 1, "found before", seq=1)
    writer.write([early] if found else [])
    if state is not None:
        writer.finish(state, reason, 1.0)
    writer.close()
    run = store.run("run")
    waits = unjudged_from(store, run, ending_of(run, gone=True))

    judged = judge_rest(store, "run", POLICY, Dispatcher(store, POLICY))

    assert judged == again
    assert (waits is not None) == again
    assert bool(store.alerts("run")) == again
    assert store.judged("run") == (25, 25)


def test_nobody_judges_for_a_process_that_lives(tmp_path):
    """Its own judge is on the way."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    writer.write(sick(25))

    assert not judge_rest(store, "run", POLICY, Dispatcher(store, POLICY))
    assert (store.findings("run"), store.judged("run")) == ([], (0, 25))
    writer.close()


def test_the_next_attempt_tells_what_the_last_one_did_not(tmp_path):
    """Also of the branch that it leaves."""
    dead(tmp_path, sick(25), 19)
    with rlwatch.init(store=str(tmp_path), run_id="run") as run:
        for record in sick(5, from_step=10, onset=99):
            run.log(record.metrics, step=record.step)

    store = open_store(tmp_path)
    found = [(f.step, f.severity, f.attempt) for f in store.findings("run") if f.kind == "nonfinite"]
    assert found[0][::2] == (20, 1)
    assert len(set(found)) == len(found)
    [alert] = [alert for alert in store.alerts("run") if alert.kind == "nonfinite"]
    assert (alert.state, alert.onset_step) == (AlertState.RESOLVED, 20)
    assert store.judged("run") == (30, 30)


class Slow:
    """A judging that takes its time, or fails, as told."""

    settled = calm = True

    def __init__(self, rows, *, fails=(), stored=()):
        self.seq, self.rows, self.fails, self.in_store, self.closed = 0, rows, set(fails), list(stored), False
        self.blocks = []
        self.gate = threading.Event()

    def begin(self, up_to):
        self.seq = up_to

    def stored(self):
        more = [row for row in self.in_store if row.seq > self.seq][:AT_ONCE]
        if more:
            self.take(more)
        return bool(more)

    def take(self, rows):
        self.gate.wait(10.0)
        self.blocks.append(len(rows))
        for row in rows:
            self.seq = row.seq
            if row.seq in self.fails:
                raise SystemExit("a detector that ends the process")
            self.rows.append(row.seq)

    def tick(self):
        pass

    def close(self):
        self.closed = True


def ended(thread):
    deadline = time.monotonic() + 30.0
    while not thread.ended and time.monotonic() < deadline:
        time.sleep(0.005)
    return thread.ended


def until(condition):
    """Wait for a condition of another thread."""
    deadline = time.monotonic() + 30.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def test_rows_that_overflow_while_the_judge_looks_into_the_store_are_judged():
    """They are in the store alone, and came after it was read."""
    rows, thread = sick(INBOX + 5), JudgeThread(0, pytest.fail)

    class Overtaken(Slow):
        def stored(self):
            if self.in_store:
                return super().stored()
            self.in_store = rows
            thread.take(rows[1:])
            return False

    slow = Overtaken([])
    slow.gate.set()
    thread.take(rows[:1])
    thread.start(lambda: slow)
    thread.end()
    assert ended(thread)
    assert slow.rows == [row.seq for row in rows]


@pytest.fixture
def quick():
    """A judge's thread that has judged a first row."""
    slow, thread = Slow([]), JudgeThread(0, pytest.fail)
    slow.gate.set()
    thread.start(lambda: slow)
    thread.take(sick(1))
    assert until(lambda: slow.rows == [1])
    yield slow, thread
    thread.end()
    assert ended(thread)


def hand_over(thread, rows):
    """Rows that come one after the other, faster than they would be judged alone."""
    for row in rows:
        thread.take([row])


def test_rows_of_a_fast_run_wait_for_others_and_are_judged_together(quick):
    """All of them, in order, the last as well, for which no others come."""
    slow, thread = quick
    rows = sick(4 * BLOCK + 3, onset=99)[1:]
    hand_over(thread, rows[:2])
    time.sleep(0.05)
    assert slow.blocks == [1]
    hand_over(thread, rows[2:])

    assert until(lambda: slow.rows == [1, *(row.seq for row in rows)])
    assert max(slow.blocks) >= BLOCK


def test_a_row_waits_for_no_other_where_the_run_is_slow(quick):
    """One that comes after a while is judged as it comes."""
    slow, thread = quick
    time.sleep(WAIT_S / FEWEST + 0.05)
    begun = time.monotonic()
    hand_over(thread, sick(2)[1:])

    assert until(lambda: slow.rows == [1, 2])
    assert time.monotonic() - begun < WAIT_S


@pytest.mark.parametrize("why", ["nan", "event", "finding", "asked", "ending"])
def test_rows_wait_no_longer_once_something_is_due(quick, why):
    """A value that is no number, an event, a finding that holds, someone who waits for the result, or the end."""
    slow, thread = quick
    rows = sick(4, onset=3 if why == "nan" else 99)[1:]
    if why == "event":
        rows.append(Event("note", 5, seq=5))
    slow.calm = why != "finding"
    begun = time.monotonic()
    hand_over(thread, rows)
    if why == "asked":
        thread.ask()
    if why == "ending":
        thread.end()

    assert until(lambda: slow.rows == [1, *(row.seq for row in rows)])
    assert time.monotonic() - begun < WAIT_S


def test_rows_that_are_too_many_to_wait_in_memory_come_from_the_store():
    """In order, each once; handing over never waits."""
    judged, problems = [], []
    rows = sick(3 * INBOX)
    slow = Slow(judged, stored=rows)
    thread = JudgeThread(0, problems.append)
    thread.start(lambda: slow)
    for at in range(0, len(rows), 500):
        thread.take(rows[at : at + 500])
        assert thread.waiting <= INBOX
    slow.gate.set()
    thread.end()

    assert ended(thread)
    assert judged == [row.seq for row in rows]
    assert (slow.closed, problems) == (True, [])


def test_a_row_that_cannot_be_judged_is_counted_and_the_others_are_judged():
    """Whatever a detector raises, also what is meant to end a process."""
    judged, problems = [], []
    slow = Slow(judged, fails={3})
    slow.gate.set()
    thread = JudgeThread(0, problems.append)
    thread.start(lambda: slow)
    for row in sick(6):
        thread.take([row])
        time.sleep(0.01)
    thread.end()

    assert ended(thread)
    assert {1, 2, 5, 6} <= set(judged)
    assert 3 not in judged
    assert "SystemExit: a detector that ends the process" in problems[0]


def test_a_judge_that_is_abandoned_stops_in_the_middle(tmp_path):
    """What it did not come to is left to whoever looks next."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    thread = JudgeThread(0, pytest.fail)
    thread.abandon()
    by = judging(store, writer, enough=thread.enough)
    rows = sick(25)
    writer.write(rows)
    with pytest.raises(Interrupted):
        by.take([*rows, Event("note", 30, seq=26)])
    writer.close()

    assert judge_rest(store, "run", POLICY, Dispatcher(store, POLICY))
    assert store.judged("run") == (25, 25)


def test_a_judge_rests_while_the_run_goes_on_and_no_more_once_it_is_ending():
    """It never began, as it sees it: it would rest for as long as the machine has been up."""
    thread = JudgeThread(0, pytest.fail)
    resting = threading.Thread(target=thread.enough, daemon=True)
    resting.start()
    resting.join(0.1)
    assert resting.is_alive()
    thread.hurry()
    resting.join(60.0)
    assert not resting.is_alive()
    assert not thread.enough()


def test_a_judge_that_cannot_be_made_does_not_hold_the_end():
    """Detectors of a user raise when they are made, at the first row: reported once, and the run ends."""
    problems = []
    thread = JudgeThread(0, problems.append)
    thread.start(lambda: 1 / 0)
    thread.take(sick(1))

    assert ended(thread)
    assert "ZeroDivisionError" in problems[0]
