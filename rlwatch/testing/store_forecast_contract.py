"""Contract: forecasts are kept beside what was measured, once each, and never come back as measurements."""

from __future__ import annotations

from typing import cast

import pytest

from rlwatch.errors import StoreError
from rlwatch.ports import Store
from rlwatch.records import ForecastRecord, RunInfo, StepRecord
from rlwatch.testing.store_hooks import StoreHooks, fill, steps


def forecast(step: int, p50: float, seq: int, attempt: int = 1) -> ForecastRecord:
    """A forecast of the record ``seq``."""
    body = {"alarm": p50 > 0.5, "limit": "reward", "why": [["mismatch/k3", 0.5]]}
    return ForecastRecord(step, {"forecast/p50": p50}, body, ts=1.5, attempt=attempt, seq=seq)


class ForecastContract(StoreHooks):
    """What was forecast, step by step."""

    def test_forecasts_come_back_whole_and_in_order(self, store: Store) -> None:
        """All of them, or the newest; also one without a number."""
        absent = ForecastRecord(3, {}, {"absent": "needs 40 steps; at 3"}, seq=3)
        written = [forecast(1, 0.1, 1), forecast(2, 0.7, 2), absent]
        fill(store, [*steps(1, 2, 3), *written])

        assert self.reopen(store).forecasts("run") == written
        assert store.forecasts("run", last=2) == written[1:]

    def test_forecasts_are_series_of_the_run(self, store: Store) -> None:
        """With the steps and numbers of the records they are of, beside one that was measured."""
        fill(store, [StepRecord(7, {"kl": 1.0}), StepRecord(9, {"kl": 2.0}), forecast(7, 0.1, 1), forecast(9, 0.7, 2)])

        series = store.series("run", ["forecast/p50", "kl"])
        told, measured = series["forecast/p50"], series["kl"]
        assert (told.steps.tolist(), told.values.tolist(), told.seqs.tolist()) == ([7, 9], [0.1, 0.7], [1, 2])
        assert measured.values.tolist() == [1.0, 2.0]
        assert store.metric_names("run") == ["forecast/p50", "kl"]
        assert store.last_values("run") == {"forecast/p50": (9, 0.7), "kl": (9, 2.0)}

    def test_forecasts_are_no_records(self, store: Store) -> None:
        """They take no number and are no part of a branch: a replay sees what was measured, nothing else."""
        fill(store, [*steps(1), forecast(1, 0.7, 1), *steps(2)])

        assert [(record.step, record.seq) for record in store.records("run")] == [(1, 1), (2, 2)]
        assert list(store.branch("run", 2, 9)) == store.records("run")
        assert store.run("run").last_step == 2

    def test_a_forecast_is_kept_once(self, store: Store) -> None:
        """A resumed run relives its past and says it again, perhaps in a newer program's words."""
        fill(store, [*steps(1), forecast(1, 0.7, 1)])
        fill(store, [forecast(1, 0.2, 1), *steps(2), forecast(2, 0.3, 2, attempt=2)])

        assert [(f.step, f.attempt, f.metrics["forecast/p50"]) for f in store.forecasts("run")] == [
            (1, 1, 0.7),
            (2, 2, 0.3),
        ]

    def test_a_forecast_that_cannot_be_stored_takes_nothing_with_it_by_half(self, store: Store) -> None:
        """A batch is whole or nothing, as for records."""
        fill(store)
        writer = store.open_run(RunInfo("run"))
        with pytest.raises(StoreError, match="forecast/p50"):
            writer.write([*steps(1), ForecastRecord(1, {"forecast/p50": cast("float", "high")}, seq=1)])
        writer.close()

        assert (store.records("run"), store.forecasts("run")) == ([], [])

    def test_a_run_without_forecasts_has_none(self, store: Store) -> None:
        """Not even an empty metric."""
        fill(store, steps(1))

        assert store.forecasts("run") == []
        assert len(store.series("run", ["forecast/p50"])["forecast/p50"].steps) == 0
