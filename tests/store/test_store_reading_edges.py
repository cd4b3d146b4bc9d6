"""Reading back what is awkward: many restarts, late rows, metric sets that change, columns of every type."""

import math
from itertools import count

import numpy as np
import pytest

from rlwatch.errors import StoreError, UnstorableError
from rlwatch.records import Event, RunInfo, RunState, SpikeBatch, StepRecord
from rlwatch.store.memory import forget
from rlwatch.store.sqlite import schema
from rlwatch.store.sqlite.rows import TOP_ROWS
from rlwatch.store.sqlite.schema import Migration
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import alert, command, fill, message, steps

_names = count()


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    name = f"edges-{next(_names)}"
    yield open_store(f"memory://{name}" if request.param == "memory" else tmp_path / "runs")
    forget(name)


def told(store, attempt, before):
    """attempt.step of the records of a branch, and the kinds of its events."""
    return [
        f"{item.attempt}.{item.step}" if isinstance(item, StepRecord) else item.kind
        for item in store.branch("run", attempt, before)
    ]


def test_a_branch_over_four_attempts_is_cut_by_every_one_of_them(store):
    """The third went back to before the second began: nothing is left of that."""
    for attempt, numbers in enumerate([range(10), range(5, 9), range(3, 8)], start=1):
        fill(store, steps(*numbers, attempt=attempt))

    assert told(store, 4, 6) == ["1.0", "1.1", "1.2", "3.3", "3.4", "3.5"]
    assert told(store, 4, 100) == ["1.0", "1.1", "1.2", "3.3", "3.4", "3.5", "3.6", "3.7"]
    assert told(store, 3, 3) == ["1.0", "1.1", "1.2"]
    assert told(store, 3, 7) == ["1.0", "1.1", "1.2", "1.3", "1.4", "2.5", "2.6"]
    assert told(store, 2, 0) == []


def test_a_late_row_is_part_of_a_branch_in_the_place_it_arrived(store):
    """An evaluation of step 1 that ended after step 3, and one that the next attempt had already begun without."""
    fill(store, [*steps(0, 1, 2, 3), StepRecord(1, {"eval/acc": 0.5}), *steps(4)])
    fill(store, [*steps(3, attempt=2), StepRecord(2, {"eval/acc": 0.6}, attempt=1), *steps(4, attempt=2)])

    assert told(store, 2, 3) == ["1.0", "1.1", "1.2", "1.1", "1.2"]
    assert told(store, 3, 4) == ["1.0", "1.1", "1.2", "1.1", "2.3", "1.2"]
    assert [item.seq for item in store.branch("run", 3, 4)] == [1, 2, 3, 5, 7, 8]


def test_a_late_row_of_an_earlier_step_moves_the_bound_of_the_attempt_before(store):
    """An attempt continues from the lowest step it ever wrote."""
    fill(store, steps(0, 1, 2, 3, 4))
    fill(store, steps(4, 5, 2, attempt=2))

    assert told(store, 3, 6) == ["1.0", "1.1", "2.4", "2.5", "2.2"]


def test_events_without_records_carry_an_attempt_into_a_branch(store):
    """A process that died before its first step still said something."""
    fill(store, [Event("begun"), *steps(0, 1, 2)])
    fill(store, [Event("resume", step=2, attempt=2), Event("exception", attempt=2)])

    assert told(store, 3, 2) == ["begun", "1.0", "1.1", "exception"]
    assert told(store, 3, 3) == ["begun", "1.0", "1.1", "1.2", "resume", "exception"]


def test_all_ranks_of_a_step_are_in_a_branch(store):
    """Several records share a step."""
    fill(store, [StepRecord(1, {"kl": 1.0}, rank=0), StepRecord(1, {"kl": 2.0}, rank=1), StepRecord(2, {"kl": 3.0})])

    assert [(r.rank, r.metrics["kl"]) for r in store.branch("run", 2, 2)] == [(0, 1.0), (1, 2.0)]


def test_a_series_runs_through_every_metric_set_in_order_of_arrival(store):
    """The same names in another order, with others, alone; steps back and forth."""
    fill(
        store,
        [
            StepRecord(1, {"a": 1.0, "b": 10.0, "c": 100.0}),
            StepRecord(3, {"c": 300.0, "a": 3.0}),
            StepRecord(2, {"a": 2.0}),
            Event("note"),
            StepRecord(4, {"b": 40.0, "a": -math.inf, "c": 400.0}),
            StepRecord(3, {"c": math.nan, "a": 3.5}),
        ],
    )

    series = store.series("run", ["c", "a", "b"])

    assert list(series) == ["c", "a", "b"]
    assert (series["a"].steps.tolist(), series["a"].values.tolist()) == (
        [1, 3, 2, 4, 3],
        [1.0, 3.0, 2.0, -math.inf, 3.5],
    )
    assert series["a"].seqs.tolist() == [1, 2, 3, 5, 6]
    assert (series["b"].values.tolist(), series["b"].seqs.tolist()) == ([10.0, 40.0], [1, 5])
    np.testing.assert_array_equal(series["c"].values, [100.0, 300.0, 400.0, math.nan])


def test_the_last_value_is_the_last_to_arrive_of_any_set(store):
    """A lower step that came later, a NaN that came last."""
    fill(
        store,
        [StepRecord(9, {"a": 9.0, "b": 9.0}), StepRecord(3, {"b": 3.0}), StepRecord(5, {"a": math.nan, "c": 0.0})],
    )

    last = store.last_values("run")

    assert (last["b"], last["c"]) == ((3, 3.0), (5, 0.0))
    assert (last["a"][0], math.isnan(last["a"][1])) == (5, True)
    assert set(last) == {"a", "b", "c"}


def test_series_records_and_branches_outlive_a_migration(tmp_path, monkeypatch):
    """A column more on the run and an index on the records change no answer, before and after the writer's turn."""
    store = open_store(tmp_path)
    fill(store, [StepRecord(s, {"a": float(s), "b": -float(s)}) for s in range(4)], finish=True)
    before = store.series("run", ["b"])["b"].values.tolist()

    def add(db):
        db.execute("ALTER TABLE run ADD COLUMN colour TEXT DEFAULT 'red'")
        db.execute("CREATE INDEX record_by_step ON record (step)")

    monkeypatch.setattr(schema, "RUN_TABLES", (*schema.RUN_TABLES, Migration("colour", add)))
    assert store.series("run", ["b"])["b"].values.tolist() == before
    fill(store, [StepRecord(2, {"b": 7.0, "a": 8.0}, attempt=2)])

    assert store.series("run", ["b"])["b"].values.tolist() == [*before, 7.0]
    assert store.series("run", ["b"])["b"].seqs.tolist() == [1, 2, 3, 4, 5]
    assert told(store, 2, 2) == ["1.0", "1.1"]
    assert (store.run("run").attempt, store.run("run").last_step) == (2, 2)


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "<i2", ">i4", "<u4", "<i8", "<u8", "<f2", ">f4", "<f8", ">f8"])
def test_spike_columns_of_every_numeric_type_come_back_from_a_store(store, dtype):
    """Value for value, in this machine's byte order; as text too in the searchable rows."""
    column = np.array([0, 1, 1], dtype=dtype)
    fill(store, [SpikeBatch(1, {"x": column, "contribution": np.array([1.0, 3.0, 2.0])})])

    back = store.spikes("run")[0].columns["x"]

    assert back.dtype == np.dtype(dtype).newbyteorder("<")
    assert back.tolist() == column.tolist()
    assert [row["x"] for row in store.top_spikes("run")] == [1, 1, 0]
    back[0] = 1  # a copy: the store's own bytes are not handed out


def test_extreme_floats_in_spikes_keep_their_bits(store):
    """Negative zero, the smallest and the largest, NaN and both infinities."""
    values = np.array([-0.0, 5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf])
    small = np.array([-0.0, 1e-45, 3.4e38, math.nan, math.inf, -math.inf], dtype=np.float32)
    fill(store, [SpikeBatch(1, {"logp": values, "entropy": small})])

    columns = store.spikes("run")[0].columns
    assert columns["logp"].tobytes() == values.tobytes()
    assert columns["entropy"].tobytes() == small.tobytes()


def test_fifty_rows_of_a_batch_stay_searchable(store):
    """The worst ones; the batch itself is whole."""
    fill(store, [SpikeBatch(1, {"contribution": np.arange(60.0)}), SpikeBatch(2, {"contribution": np.array([30.5])})])

    top = store.top_spikes("run", limit=200)

    assert TOP_ROWS == 50
    assert [row["contribution"] for row in top] == [*map(float, range(59, 30, -1)), 30.5, *map(float, range(30, 9, -1))]
    assert [len(batch) for batch in store.spikes("run")] == [60, 1]
    assert len(store.top_spikes("run")) == 50


@pytest.mark.parametrize(
    "columns",
    [
        {"logp": np.zeros(2), "text": ["a"]},
        {"logp": np.array([1 + 2j])},
        {"text": ["a", 1]},
        {"logp": np.array(["2026-01-01"], dtype="datetime64[D]")},
        {"logp": np.float64(1.0)},
    ],
)
def test_columns_that_are_none_are_refused_by_name(store, columns):
    """The writer goes on."""
    writer = store.open_run(RunInfo("run"))
    with pytest.raises(UnstorableError, match=r"SpikeBatch of step 4.*column '(text|logp)'"):
        writer.write([SpikeBatch(4, columns)])
    writer.write(steps(5))
    writer.close()

    assert (store.spikes("run"), store.last_values("run")["kl"]) == ([], (5, 0.5))


def test_a_resumed_run_keeps_what_the_new_process_does_not_say(store):
    """Project and birth for ever; name, source, configuration and tags until somebody says otherwise."""
    first = RunInfo(
        "run",
        project="math",
        name="seed 3",
        source="verl",
        created_at=5.0,
        config={"lr": 1},
        tags=("a",),
        host="n1",
        pid=1,
    )
    store.open_run(first).close()
    store.open_run(RunInfo("run", project="other", created_at=9.0, host="n2", pid=2)).close()
    kept = store.run("run")
    store.open_run(RunInfo("run", name="seed 4", config={"lr": 2}, tags=("b",), source="trl/grpo")).close()
    said = store.run("run")

    assert (kept.project, kept.created_at, kept.name, kept.source) == ("math", 5.0, "seed 3", "verl")
    assert (kept.config, kept.tags, kept.attempt, kept.host, kept.pid) == ({"lr": 1}, ("a",), 2, "n2", 2)
    assert (said.project, said.created_at, said.name, said.source) == ("math", 5.0, "seed 4", "trl/grpo")
    assert (said.config, said.tags, said.attempt, said.host, said.pid) == ({"lr": 2}, ("b",), 3, "", None)


def test_a_resumed_run_is_running_again_without_its_old_reason(store):
    """The end of the first attempt is not the end of the run."""
    writer = store.open_run(RunInfo("run"))
    writer.finish(RunState.CRASHED, "CUDA error", 50.0)
    writer.close()
    ended = store.run("run")
    again = store.open_run(RunInfo("run"))

    assert (ended.state, ended.state_reason, ended.heartbeat_at) == (RunState.CRASHED, "CUDA error", 50.0)
    assert (store.run("run").state, store.run("run").state_reason) == (RunState.RUNNING, "")
    assert (again.run.attempt, again.run.state) == (2, RunState.RUNNING)
    again.close()


def test_numbers_go_on_after_a_last_event(store):
    """Records and events are counted together, over attempts too."""
    fill(store, [*steps(1), Event("note"), Event("note")])
    writer = store.open_run(RunInfo("run"))
    begun = writer.last_seq
    writer.write(steps(2, attempt=2))
    writer.close()

    assert (begun, [r.seq for r in store.records("run")]) == (3, [1, 4])
    assert store.records("run", limit=0) == []


@pytest.mark.parametrize(("expires_at", "claimed"), [(0.0, True), (100.0, False), (100.1, True), (99.9, False)])
def test_a_command_may_be_claimed_until_it_expires(store, expires_at, claimed):
    """At its last moment it is over; zero is never."""
    fill(store)
    store.submit(command(expires_at=expires_at))

    assert [c.command_id for c in store.claim("run", 100.0)] == (["c1"] if claimed else [])
    assert [c.status.value for c in store.commands("run")] == ["claimed" if claimed else "expired"]
    assert store.commands("run")[0].claimed_at == (100.0 if claimed else None)


def test_a_batch_with_one_unstorable_item_names_it_and_leaves_no_metric_set(store):
    """Another name for the same numbers may come later."""
    writer = store.open_run(RunInfo("run"))
    with pytest.raises(StoreError, match=r"StepRecord of step 2: metric 'b' must be a number, got 'high' \(str\)"):
        writer.write([StepRecord(1, {"a": 1.0}), StepRecord(2, {"a": 1.0, "b": "high"})])
    writer.write([StepRecord(3, {"z": 3.0}), StepRecord(4, {"a": 4.0})])
    writer.close()

    assert store.metric_names("run") == ["a", "z"]
    assert {name: s.values.tolist() for name, s in store.series("run", ["a", "b", "z"]).items()} == {
        "a": [4.0],
        "b": [],
        "z": [3.0],
    }


@pytest.mark.parametrize("other", ["old_logp", "rollout_logp"])
def test_a_spike_is_far_by_the_difference_of_log_probs_not_by_their_size(store, other):
    """Both unlikely is nothing; three nats apart is."""
    fill(store, [SpikeBatch(1, {"logp": np.array([-9.0, -1.0, -1.0]), other: np.array([-9.0, -4.0, math.nan])})])

    assert [row["logp"] for row in store.top_spikes("run")] == [-1.0, -1.0, -9.0]
    assert [math.isnan(row[other]) for row in store.top_spikes("run")] == [True, False, False]


def test_ten_messages_are_leased_at_a_time_and_only_once_they_are_due(store):
    """Due at their very moment; a lease that ends now is over."""
    fill(store)
    store.put_alerts([alert()], [message(f"m{n:02}", due=50.0) for n in range(12)])

    early = store.lease_messages(49.9, lease_s=5.0)
    first = store.lease_messages(50.0, lease_s=5.0)
    second = store.lease_messages(54.9, lease_s=5.0)
    again = store.lease_messages(55.0, lease_s=5.0)

    assert (early, len(first), len(second), len(again)) == ([], 10, 2, 10)
    assert {m.message_id for m in first} == {m.message_id for m in again}
    assert {m.lease_until for m in again} == {60.0}


def test_a_lease_is_limited_over_all_runs_together(store):
    """Ten of two runs, not ten of each; the first run is not served alone."""
    for run_id in ("one", "two"):
        fill(store, run_id=run_id)
        store.put_alerts([alert(f"a-{run_id}", run_id)], [message(f"{run_id}-{n}", run_id) for n in range(6)])

    first, rest = store.lease_messages(1.0, lease_s=5.0), store.lease_messages(1.0, lease_s=5.0)

    assert (len(first), len(rest)) == (10, 2)
    assert len({m.message_id for m in [*first, *rest]}) == 12


@pytest.mark.parametrize(("given", "begun"), [(0, 1), (1, 1), (5, 5)])
def test_the_first_attempt_is_at_least_one(store, given, begun):
    """A copy of a run from elsewhere may begin later."""
    writer = store.open_run(RunInfo("run", attempt=given))
    writer.close()

    assert (writer.run.attempt, store.run("run").attempt) == (begun, begun)


def test_steps_may_be_as_large_as_64_bits_hold(store):
    """Of records, events and spikes; one more is refused."""
    last = (1 << 63) - 1
    fill(store, [StepRecord(last, {"kl": 1.0}), Event("note", step=last), SpikeBatch(last, {"logp": np.zeros(1)})])
    writer = store.open_run(RunInfo("run"))
    with pytest.raises(UnstorableError, match="does not fit in 64 bits"):
        writer.write([Event("note", step=last + 1)])
    writer.close()

    assert (store.last_values("run"), store.run("run").last_step) == ({"kl": (last, 1.0)}, last)
    assert (store.events("run")[0].step, store.spikes("run")[0].step) == (last, last)


def test_a_hundred_thousand_metrics_and_ten_megabytes_of_configuration_are_kept(store):
    """Slowly, but whole; a list of the runs does not carry the settings along in a file of its own."""
    names, config = [f"layer/{k}/grad_norm" for k in range(100_000)], {"text": "x" * 10_000_000}
    writer = store.open_run(RunInfo("run", config=config))
    writer.write([StepRecord(k, dict.fromkeys(names, float(k))) for k in range(2)])
    writer.close()

    assert [run.config for run in store.runs()] == [config]
    assert store.series("run", names[-1:])[names[-1]].values.tolist() == [0.0, 1.0]
    assert len(store.last_values("run")) == 100_000
