"""Contract of a store for the data of a run: what is written is read, in order, as snapshots, whatever the values."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlwatch.errors import RunNotFoundError, StoreError
from rlwatch.ports import Storable, Store
from rlwatch.records import (
    APART,
    CULPRITS,
    FAR_OUT,
    NON_FINITE,
    RESPONSES,
    Command,
    CompletionBatch,
    Event,
    Finding,
    RunInfo,
    Severity,
    SpikeBatch,
    Stage,
    StepRecord,
)
from rlwatch.testing.store_run_contract import StoreHooks, alert, fill, message, new_run, steps


def _empty() -> list[Any]:
    return []


_UNSTORABLE: list[Storable] = [
    StepRecord(1, {"kl": cast("float", "high")}),
    StepRecord(1, {"kl": cast("float", None)}),
    StepRecord(1, {"kl": 10**400}),
    StepRecord(cast("int", 1.5), {"kl": 1.0}),
    StepRecord(1 << 63, {"kl": 1.0}),
    Event("note", step=cast("int", "one")),
    Event("note", body={"cycle": (cycle := _empty())}),
    SpikeBatch(1, {"logp": np.zeros(2), "ratio": np.zeros(3)}),
    SpikeBatch(1, {"logp": np.zeros((2, 2))}),
    SpikeBatch(1, {"logp": np.array([object()])}),
]
cycle.append(cycle)


class ReadingContract(StoreHooks):
    """Tests that records, events, series, findings and batches of a run are read as they were written."""

    def test_many_questions_asked_at_once_are_answered_as_ever(self, store: Store) -> None:
        """Check that queries inside the store's ``at_once`` context give the usual results, and that later queries have
        data that were written meanwhile.
        """
        fill(store, steps(1, 2))
        fill(store, steps(7), run_id="other")
        with store.at_once("run"):
            before = ([r.step for r in store.records("run")], store.metric_names("run"), store.last_values("run")["kl"])
            assert [record.step for record in store.records("other")] == [7]
        fill(store, steps(3))

        assert before == ([1, 2], ["kl"], (2, 0.2))
        assert [record.step for record in store.records("run")] == [1, 2, 3]
        with pytest.raises(RunNotFoundError, match="absent"), store.at_once("absent"):
            store.records("absent")

    def test_records_come_back_whole_and_in_order(self, store: Store) -> None:
        """Check that records keep the order of their metrics, rank and attempt, also several records of one step."""
        written = [
            StepRecord(1, {"b": 1.0, "a": 2.0}, ts=1.25, attempt=1, rank=0, seq=1),
            StepRecord(1, {"eval/acc": 0.5}, ts=1.5, attempt=1, rank=3, seq=2),
            StepRecord(0, {}, ts=1.75, attempt=2, rank=0, seq=3),
        ]
        fill(store, written)

        assert self.reopen(store).records("run") == written
        assert list(store.records("run")[0].metrics) == ["b", "a"]

    def test_the_newest_records_come_in_order_of_seq(self, store: Store) -> None:
        """Check that ``last`` counts records after ``after_seq``, and that a larger number returns all of them."""
        fill(store, steps(1, 2, 3, 4))

        assert [r.seq for r in store.records("run", last=2)] == [3, 4]
        assert [r.seq for r in store.records("run", after_seq=3, last=2)] == [4]
        assert (len(store.records("run", last=9)), store.records("run", last=0)) == (4, [])

    def test_records_can_be_followed(self, store: Store) -> None:
        """Check that ``after_seq`` and ``limit`` page through records without gap or repetition."""
        fill(store, steps(*range(7)))

        pages = [store.records("run", after_seq=after, limit=3) for after in (0, 3, 6, 7)]

        assert [[record.seq for record in page] for page in pages] == [[1, 2, 3], [4, 5, 6], [7], []]

    def test_events_share_the_numbers_of_records(self, store: Store) -> None:
        """Check that events and records share one sequence: 0 gets the next number, and the writer knows the last
        one.
        """
        writer = store.open_run(RunInfo("run"))
        writer.write([*steps(1), Event("note", ts=2.0), *steps(2)])
        writer.write([Event("resume", step=2, body={"why": "ckpt"}, attempt=2)])
        writer.close()

        assert writer.last_seq == 4
        assert [record.seq for record in store.records("run")] == [1, 3]
        assert store.events("run") == [
            Event("note", None, {}, 2.0, 1, 2),
            Event("resume", 2, {"why": "ckpt"}, 0.0, 2, 4),
        ]
        assert [event.seq for event in store.events("run", after_seq=2)] == [4]

    def test_a_number_already_taken_is_refused(self, store: Store) -> None:
        """Check that a batch with a used sequence number, of any attempt, is refused as a whole."""
        fill(store, [*steps(1), Event("note")])
        writer = store.open_run(RunInfo("run"))
        for taken in (1, 2):
            with pytest.raises(StoreError, match=f"seq {taken} is not above 3"):
                writer.write([StepRecord(5, {"kl": 1.0}), StepRecord(6, {"kl": 1.0}, seq=taken)])
        writer.write([StepRecord(7, {"kl": 1.0}, seq=3)])
        writer.close()

        assert [record.step for record in store.records("run")] == [1, 7]

    @pytest.mark.parametrize("item", _UNSTORABLE, ids=lambda item: type(item).__name__)
    def test_a_batch_is_written_whole_or_not_at_all(self, store: Store, item: Storable) -> None:
        """Check that an item that cannot be stored is named, that nothing of its batch is stored, and that the writer
        continues.
        """
        writer = store.open_run(RunInfo("run"))
        with pytest.raises(StoreError, match="cannot"):
            writer.write([*steps(1), Event("note"), SpikeBatch(1, {"logp": np.zeros(1)}), item])
        writer.write(steps(2, name="new"))
        writer.close()

        assert [(record.seq, record.step) for record in store.records("run")] == [(1, 2)]
        assert (store.events("run"), store.spikes("run"), store.metric_names("run")) == ([], [], ["new"])

    def test_numpy_numbers_are_numbers(self, store: Store) -> None:
        """Check that numpy numbers are accepted in every field, because trainers pass them."""
        fill(store, [StepRecord(cast("int", np.int64(3)), {"kl": cast("float", np.float32(0.5)), "n": 2})])

        assert [(record.step, record.metrics) for record in store.records("run")] == [(3, {"kl": 0.5, "n": 2.0})]

    def test_an_empty_batch_is_nothing(self, store: Store) -> None:
        """Check that writing an empty batch is not an error and stores nothing."""
        fill(store, [])

        assert store.records("run") == []

    def test_series_follow_one_metric_through_changing_records(self, store: Store) -> None:
        """Check that a series has its metric's rows of all attempts in order of arrival; absent differs from NaN."""
        fill(store, [StepRecord(1, {"a": 1.0, "b": 10.0}), StepRecord(2, {"b": 20.0, "a": math.nan})])
        fill(store, [StepRecord(2, {"c": 5.0}, attempt=2), StepRecord(2, {"a": 2.5}, attempt=2)])

        series = self.reopen(store).series("run", ["a", "b", "absent"])

        assert list(series) == ["a", "b", "absent"]
        np.testing.assert_array_equal(series["a"].values, [1.0, math.nan, 2.5])
        assert (series["a"].steps.tolist(), series["a"].attempts.tolist()) == ([1, 2, 2], [1, 1, 2])
        assert series["a"].seqs.tolist() == [1, 2, 4]
        assert (series["b"].values.tolist(), series["b"].name) == ([10.0, 20.0], "b")
        absent = series["absent"]
        assert [len(column) for column in (absent.steps, absent.values, absent.attempts, absent.seqs)] == [0] * 4
        for one in series.values():
            assert [str(column.dtype) for column in (one.steps, one.values, one.attempts)] == [
                "int64",
                "float64",
                "int64",
            ]

    def test_the_moments_of_records_come_without_their_metrics(self, store: Store) -> None:
        """Check that the times of records come one per record, in order of arrival; NaN stays NaN, an empty run has
        none.
        """
        fill(store, [StepRecord(1, {"a": 1.0}, ts=10.5), StepRecord(2, {}, ts=math.nan)])
        fill(store, [StepRecord(2, {"b": 2.0}, ts=30.0, attempt=2)])

        moments = self.reopen(store).moments("run")

        np.testing.assert_array_equal(moments.values, [10.5, math.nan, 30.0])
        assert (moments.steps.tolist(), moments.attempts.tolist()) == ([1, 2, 2], [1, 1, 2])
        assert moments.seqs.tolist() == [1, 2, 3]

    def test_steps_are_those_of_each_attempt_once_and_ascending(self, store: Store) -> None:
        """Check the steps of each attempt, once and ascending, with shared steps, restarts, and an attempt without
        records.
        """
        fill(store, [StepRecord(10, {"kl": 1.0}), StepRecord(5, {"kl": 1.0}), StepRecord(10, {"entropy": 1.0})])
        fill(store, [Event("note", attempt=2)])
        fill(store, [StepRecord(5, {"kl": 1.0}, attempt=3), StepRecord(20, {"kl": 1.0}, attempt=3)])

        assert store.steps("run") == {1: [5, 10], 3: [5, 20]}

    def test_metric_names_are_all_ever_seen(self, store: Store) -> None:
        """Check that all metric names ever recorded are listed, sorted, whatever text they are."""
        fill(store, [StepRecord(1, {"z": 1.0}), StepRecord(2, {"a/<script>": 1.0, "é" * 200: 1.0, "z": 1.0})])

        assert store.metric_names("run") == sorted(["z", "a/<script>", "é" * 200])

    def test_last_values_are_those_last_recorded(self, store: Store) -> None:
        """Check that the last value of each metric is the last to arrive; a resumed run may log fewer, at a lower
        step.
        """
        fill(store, [StepRecord(9, {"a": 1.0, "b": 1.0}), StepRecord(9, {"c": math.inf})])
        fill(store, [StepRecord(4, {"b": 2.0}, attempt=2)])

        assert store.last_values("run") == {"a": (9, 1.0), "b": (4, 2.0), "c": (9, math.inf)}

    def test_findings_come_back_whole_in_order_of_seq(self, store: Store) -> None:
        """Check that findings come back in order of ``seq``, which may repeat; None, NaN and infinity stay
        different.
        """
        first = Finding(
            "d", "grad_spike", Severity.CRITICAL, 7, 6, "spike <b>", {"norm": 9.0}, "optim/grad_norm", seq=4
        )
        later = Finding("e", "kl_drift", Severity.INFO, 8, 2, "drift", score=math.inf, baseline=None, attempt=2, seq=5)
        again = Finding("f", "nonfinite", Severity.WARNING, 8, 8, "nan", family="Optimisation", score=1.5, seq=5)
        writer = store.open_run(RunInfo("run"))
        writer.write([later, again])
        writer.write([first])
        writer.close()

        assert self.reopen(store).findings("run") == [first, later, again]
        assert writer.last_seq == 0

    def test_recoveries_are_kept_apart_from_findings(self, store: Store) -> None:
        """Check that a finding that eased or ended is listed as a recovery, not as a new finding."""
        began = Finding("d", "reward_drop", Severity.CRITICAL, 7, 6, "it fell", seq=4)
        worse = replace(began, step=8, seq=5, stage=Stage.WORSENED)
        eased = replace(began, step=9, severity=Severity.WARNING, evidence={"level": 0.7}, seq=6, stage=Stage.EASED)
        over = replace(began, step=12, severity=Severity.INFO, seq=9, stage=Stage.RESOLVED)
        writer = store.open_run(RunInfo("run"))
        writer.write([began, eased, worse, over])
        writer.close()

        again = self.reopen(store)
        assert (again.findings("run"), again.recoveries("run")) == ([began, worse], [eased, over])

    def test_spike_batches_come_back_by_step(self, store: Store) -> None:
        """Check that token batches keep their columns and types, and that ``last`` returns the newest written."""
        columns: dict[str, Any] = {
            "token_id": np.array([5, 6], dtype=np.int64),
            "logp": np.array([-0.5, math.nan]),
            "ratio": np.array([1.0, 2.0], dtype=np.float32),
            "text": ["<b>\x00", "日本"],
        }
        late = SpikeBatch(9, columns, "ratio", ts=2.0, attempt=2, rank=1)
        fill(store, [late, SpikeBatch(3, {"logp": np.zeros(1)}), SpikeBatch(5, {})])

        batches = self.reopen(store).spikes("run")

        assert [(batch.step, len(batch)) for batch in batches] == [(3, 1), (5, 0), (9, 2)]
        back = batches[2]
        assert (back.reason, back.ts, back.attempt, back.rank) == ("ratio", 2.0, 2, 1)
        assert (list(back.columns), list(back.columns["text"])) == (list(columns), columns["text"])
        for name in ("token_id", "logp", "ratio"):
            assert cast("np.ndarray", back.columns[name]).dtype == cast("np.ndarray", columns[name]).dtype
            np.testing.assert_array_equal(back.columns[name], columns[name])
        assert [batch.step for batch in store.spikes("run", last=2)] == [3, 5]
        assert store.spikes("run", last=0) == []
        assert [batch.step for batch in store.spikes("run", reason="ratio")] == [9]
        assert [batch.step for batch in store.spikes("run", reason="", last=1)] == [5]
        assert store.spikes("run", reason="none") == []
        assert [batch.reason for batch in store.spikes("run", step=9)] == ["ratio"]
        assert store.spikes("run", step=9, reason="") == store.spikes("run", step=4) == []

    def test_the_worst_spike_rows_of_all_batches_come_first(self, store: Store) -> None:
        """Check that the worst tokens of all batches come first, by gradient contribution if measured; NaN counts as
        worst.
        """
        columns: dict[str, Any] = {
            "contribution": np.array([1.0, -8.0, math.nan]),
            "token_id": np.array([1, 2, 3]),
            "text": ["a", "b", "c"],
        }
        fill(store, [SpikeBatch(1, columns), SpikeBatch(2, {"contribution": np.array([4.0])}, attempt=2, rank=7)])

        top = store.top_spikes("run")

        assert [(row["step"], row["attempt"], row["rank"]) for row in top] == [
            (1, 1, 0),
            (1, 1, 0),
            (2, 2, 7),
            (1, 1, 0),
        ]
        assert [row.get("text") for row in top] == ["c", "b", None, "a"]
        assert math.isnan(top[0]["contribution"])
        assert top[1] == {"step": 1, "attempt": 1, "rank": 0, "contribution": -8.0, "token_id": 2, "text": "b"}
        assert len(store.top_spikes("run", limit=2)) == 2

    def test_whole_responses_are_not_among_the_worst_rows(self, store: Store) -> None:
        """Check that batches of whole responses add no worst tokens, because those are stored as culprits as well."""
        columns = {"contribution": np.array([9.0, 1.0])}
        fill(store, [SpikeBatch(1, columns, RESPONSES), SpikeBatch(1, {"contribution": np.array([9.0])}, CULPRITS)])

        assert [row["contribution"] for row in store.top_spikes("run")] == [9.0]
        assert len(store.spikes("run", reason=RESPONSES)[0]) == 2

    @pytest.mark.parametrize("reason", APART)
    def test_batches_without_tokens_are_read_where_they_are_asked_for(self, store: Store, reason: str) -> None:
        """Check that batches without tokens (one per step) are read only by their reason and add no worst tokens."""
        columns: dict[str, Any] = {"quantity": np.array([2]), "bin": np.array([500]), "count": np.array([7])}
        counted = [SpikeBatch(step, columns, reason) for step in (1, 2)]
        fill(store, [counted[0], SpikeBatch(1, {"logp": np.zeros(1)}, "odd"), counted[1]])

        assert [batch.reason for batch in store.spikes("run", last=1)] == ["odd"]
        assert [batch.reason for batch in store.spikes("run", step=1)] == ["odd"]
        assert [batch.step for batch in store.spikes("run", reason=reason)] == [1, 2]
        assert [batch.step for batch in store.spikes("run", reason=reason, last=1)] == [2]
        assert len(store.top_spikes("run")) == 1

    @pytest.mark.parametrize("reason", [FAR_OUT, NON_FINITE])
    def test_the_screen_of_far_out_tokens_reads_as_one_under_its_old_name_too(self, store: Store, reason: str) -> None:
        """Check that the column ``contribution`` of older runs, an estimate of each token's gradient, is read under its
        present name ``screen``.
        """
        fill(store, [SpikeBatch(1, {"contribution": np.array([2.0]), "logp": np.array([-1.0])}, reason)])

        assert list(store.spikes("run")[0].columns) == ["screen", "logp"]
        assert store.top_spikes("run")[0]["screen"] == 2.0

    def test_completions_come_back_by_step(self, store: Store) -> None:
        """Check that completions keep their text and NaN rewards, and that ``last`` returns the newest written."""
        columns: dict[str, Any] = {
            "prompt": ["2+2=", "1+1="],
            "completion": ["4 <eos>\x00", "zwei 日本 <b>"],
            "reward": np.array([1.0, math.nan]),
            "length": np.array([3, 4], dtype=np.int64),
        }
        fill(store, [CompletionBatch(9, columns, ts=2.0, attempt=2, rank=1), CompletionBatch(3, {"completion": ["a"]})])

        first, second = self.reopen(store).completions("run")

        assert (first.step, len(first), second.step, len(second)) == (3, 1, 9, 2)
        assert (second.ts, second.attempt, second.rank) == (2.0, 2, 1)
        assert {name: list(column) for name, column in second.columns.items() if name != "reward"} == {
            name: list(column) for name, column in columns.items() if name != "reward"
        }
        np.testing.assert_array_equal(second.columns["reward"], columns["reward"])
        assert [batch.step for batch in store.completions("run", last=1)] == [3]

    def test_answers_are_snapshots(self, store: Store) -> None:
        """Check that the store shares no object with its callers: changing an answer changes nothing stored."""
        config, metrics, body, logp = {"lr": [1]}, {"kl": 1.0}, {"list": [1]}, np.zeros(2)
        writer = store.open_run(RunInfo("run", config=config))
        writer.write([StepRecord(1, metrics), Event("note", body=body), SpikeBatch(1, {"logp": logp})])
        config["lr"].append(2)
        metrics["kl"], body["list"][0], logp[0] = 9.0, 9, 9.0
        before = store.records("run")
        cast("dict[str, float]", store.records("run")[0].metrics)["kl"] = 8.0
        store.events("run")[0].body["list"].append(8)
        cast("np.ndarray", store.spikes("run")[0].columns["logp"])[1] = 8.0
        store.series("run", ["kl"])["kl"].values[0] = 8.0
        writer.write(steps(2))

        assert store.run("run").config == {"lr": [1]}
        assert [record.metrics for record in store.records("run")] == [{"kl": 1.0}, {"kl": 0.2}]
        assert store.events("run")[0].body == {"list": [1]}
        assert cast("np.ndarray", store.spikes("run")[0].columns["logp"]).tolist() == [0.0, 0.0]
        assert store.series("run", ["kl"])["kl"].values.tolist() == [1.0, 0.2]
        assert len(before) == 1
        writer.close()

    def test_a_live_run_is_read_while_it_is_written(self, store: Store) -> None:
        """Check that each acknowledged step is visible at once, also to another process that opened the store."""
        writer, other = store.open_run(RunInfo("run")), self.reopen(store)
        seen = []
        for step in range(5):
            writer.write(steps(step))
            seen.append(other.run("run").last_step)
        writer.close()

        assert seen == [0, 1, 2, 3, 4]


# Contract: odd floats, odd text and odd JSON survive, whatever they are.

ODD = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1, 1e-7]
_any_float = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from(ODD)
_names = st.text(min_size=1, max_size=200)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _any_float | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_bodies = st.dictionaries(st.text(max_size=8), _json, max_size=4)
# One store serves all examples of a test (each takes a new run), and several backends inherit the test.
_shared = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _text(value: Any) -> str:
    return json.dumps(value)  # distinguishes NaN from null and -0.0 from 0.0, which == does not


class ValuesContract(StoreHooks):
    """Tests that a store rounds no value, drops none, and confuses none with another."""

    @_shared
    @given(metrics=st.dictionaries(_names, _any_float, max_size=8), step=st.integers(0, 2**63 - 1))
    def test_metric_values_come_back_bit_for_bit(self, store: Store, metrics: dict[str, float], step: int) -> None:
        """Check that metric values come back bit for bit in records, series and last values, under any name."""
        run_id = new_run()
        fill(store, [StepRecord(step, metrics, ts=0.1)], run_id)

        [record] = store.records(run_id)
        assert {name: _bits(value) for name, value in record.metrics.items()} == {
            name: _bits(value) for name, value in metrics.items()
        }
        assert (record.step, record.ts, list(record.metrics)) == (step, 0.1, list(metrics))
        series = store.series(run_id, list(metrics))
        assert {name: _bits(series[name].values[0]) for name in metrics} == {
            name: _bits(value) for name, value in metrics.items()
        }
        assert {name: (at, _bits(value)) for name, (at, value) in store.last_values(run_id).items()} == {
            name: (step, _bits(value)) for name, value in metrics.items()
        }
        assert store.metric_names(run_id) == sorted(metrics)

    @_shared
    @given(body=_bodies)
    def test_json_comes_back_as_it_went_in(self, store: Store, body: dict[str, Any]) -> None:
        """Check that JSON values come back unchanged in configuration, events, findings, commands, alerts and
        messages.
        """
        run_id = new_run()
        writer = store.open_run(RunInfo(run_id, config=body))
        writer.write([Event("note", body=body), Finding("d", "k", Severity.INFO, 1, 1, "m", evidence=body)])
        writer.close()
        store.submit(Command(f"c-{run_id}", run_id, "note", args=body))
        made = alert(f"a-{run_id}", run_id)
        store.put_alerts(
            [type(made)(made.alert_id, run_id, "r", "k", made.severity, made.state, 1, 1, "m", evidence=body)],
            [type(message())(f"m-{run_id}", run_id, made.alert_id, "hook", body)],
        )

        kept = [
            store.run(run_id).config,
            store.events(run_id)[0].body,
            store.findings(run_id)[0].evidence,
            store.commands(run_id)[0].args,
            store.alerts(run_id)[0].evidence,
            store.outbox(run_id)[0].payload,
        ]
        assert [_text(value) for value in kept] == [_text(body)] * len(kept)

    @_shared
    @given(values=st.lists(_any_float, max_size=20), texts=st.data())
    def test_spike_columns_come_back_bit_for_bit(self, store: Store, values: list[float], texts: st.DataObject) -> None:
        """Check that token batches keep floats of any kind and text of any kind."""
        run_id = new_run()
        words = texts.draw(st.lists(st.text(), min_size=len(values), max_size=len(values)))
        fill(store, [SpikeBatch(1, {"logp": np.array(values), "text": words})], run_id)

        [batch] = store.spikes(run_id)
        assert np.asarray(batch.columns["logp"]).tobytes() == np.array(values).tobytes()
        assert list(batch.columns["text"]) == words

    @pytest.mark.parametrize("value", [None, *ODD])
    def test_scores_keep_none_apart_from_nan(self, store: Store, value: float | None) -> None:
        """Check that a missing score and a score of NaN stay different."""
        fill(store, [Finding("d", "k", Severity.INFO, 1, 1, "m", score=value, baseline=value)])

        [finding] = store.findings("run")
        assert (_text(finding.score), _text(finding.baseline)) == (_text(value), _text(value))

    def test_a_time_that_is_not_a_number_stays_one(self, store: Store) -> None:
        """Check that a time of NaN, from a source without a clock, is stored and stays NaN."""
        fill(store, [StepRecord(1, {"kl": 1.0}, ts=math.nan), Event("note", ts=math.nan)])

        assert math.isnan(store.records("run")[0].ts)
        assert math.isnan(store.events("run")[0].ts)

    def test_values_json_does_not_know_come_back_as_the_nearest_it_does(self, store: Store) -> None:
        """Check that values that JSON cannot express are stored as the nearest it can, so that no run is lost for
        one.
        """
        config: dict[Any, Any] = {
            "shape": (1, 2),
            "lr": np.float64(0.5),
            "ids": np.arange(2),
            "dtype": int,
            "on": {"x"},
            3: "three",
        }
        store.open_run(RunInfo("run", config=config)).close()

        assert store.run("run").config == {
            "shape": [1, 2],
            "lr": 0.5,
            "ids": [0, 1],
            "dtype": "<class 'int'>",
            "on": ["x"],
            "3": "three",
        }

    def test_text_no_file_can_hold_is_escaped(self, store: Store) -> None:
        """Check that lone surrogates, from undecodable bytes of a command line, are escaped."""
        run = RunInfo("run", name="seed\udc80", tags=("\udc80",))
        writer = store.open_run(run)
        writer.write([StepRecord(1, {"m\udc80": 1.0}), Event("note\udc80")])
        writer.finish(writer.run.state, "bad \udc80", 1.0)
        writer.close()

        assert (store.run("run").name, store.run("run").state_reason) == ("seed\\udc80", "bad \\udc80")
        assert store.events("run")[0].kind == "note\\udc80"
        assert store.metric_names("run") == ["m\udc80"]
