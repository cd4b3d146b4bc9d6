"""Contract: odd floats, odd text and odd JSON survive, whatever they are."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlwatch.ports import Store
from rlwatch.records import Command, Event, Finding, RunInfo, Severity, SpikeBatch, StepRecord
from rlwatch.testing.store_hooks import StoreHooks, alert, fill, message, new_run

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
    return json.dumps(value)  # tells NaN from null and -0.0 from 0.0, which == does not


class ValuesContract(StoreHooks):
    """Nothing is rounded, dropped, or taken for something else."""

    @_shared
    @given(metrics=st.dictionaries(_names, _any_float, max_size=8), step=st.integers(0, 2**63 - 1))
    def test_metric_values_come_back_bit_for_bit(self, store: Store, metrics: dict[str, float], step: int) -> None:
        """In records, series and last values; any name."""
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
        """In configuration, events, findings, commands, alerts and messages."""
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
        """Floats of any kind and text of any kind, side by side."""
        run_id = new_run()
        words = texts.draw(st.lists(st.text(), min_size=len(values), max_size=len(values)))
        fill(store, [SpikeBatch(1, {"logp": np.array(values), "text": words})], run_id)

        [batch] = store.spikes(run_id)
        assert np.asarray(batch.columns["logp"]).tobytes() == np.array(values).tobytes()
        assert list(batch.columns["text"]) == words

    @pytest.mark.parametrize("value", [None, *ODD])
    def test_scores_keep_none_apart_from_nan(self, store: Store, value: float | None) -> None:
        """Not judged, and judged to be not a number, are different things."""
        fill(store, [Finding("d", "k", Severity.INFO, 1, 1, "m", score=value, baseline=value)])

        [finding] = store.findings("run")
        assert (_text(finding.score), _text(finding.baseline)) == (_text(value), _text(value))

    def test_a_time_that_is_not_a_number_stays_one(self, store: Store) -> None:
        """A source without clock must not stop the batch."""
        fill(store, [StepRecord(1, {"kl": 1.0}, ts=math.nan), Event("note", ts=math.nan)])

        assert math.isnan(store.records("run")[0].ts)
        assert math.isnan(store.events("run")[0].ts)

    def test_values_json_does_not_know_come_back_as_the_nearest_it_does(self, store: Store) -> None:
        """Configurations hold anything; losing the run over one is not an option."""
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
        """Undecodable bytes of a command line arrive as lone surrogates."""
        run = RunInfo("run", name="seed\udc80", tags=("\udc80",))
        writer = store.open_run(run)
        writer.write([StepRecord(1, {"m\udc80": 1.0}), Event("note\udc80")])
        writer.finish(writer.run.state, "bad \udc80", 1.0)
        writer.close()

        assert (store.run("run").name, store.run("run").state_reason) == ("seed\\udc80", "bad \\udc80")
        assert store.events("run")[0].kind == "note\\udc80"
        assert store.metric_names("run") == ["m\udc80"]
