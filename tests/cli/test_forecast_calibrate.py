"""``rlwatch forecast calibrate``, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import Invoke, strict
from forecast_models import small_model
from forecast_runs import steady

import rlwatch
from rlwatch.forecast import forecaster
from rlwatch.forecast.forecast import Forecast, record_of
from rlwatch.records import ClosedStep, ForecastAnswer, RunInfo, RunState, StepRecord
from rlwatch.store.url import open_store


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model written by hand in place of the shipped one."""
    monkeypatch.setattr(forecaster, "_shipped", small_model)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Two healthy runs of 1,200 steps, logged every fourth, and a short one."""
    url = str(tmp_path / "store")
    for name, length in (("a", 1200), ("b", 1200), ("short", 100)):
        run = rlwatch.init(store=url, run_id=name)
        for step, row in steady(length, every=4, seed=len(name)).items():
            run.log(row, step=step)
        run.finish()
    return url


def test_healthy_runs_give_a_threshold_and_how_to_use_it(invoke: Invoke, store: str) -> None:
    """With what it is based on."""
    result = invoke("forecast", "calibrate", "--store", store, "--run", "a", "--run", "b")

    assert result.exit_code == 0, result.output
    text = result.stdout.replace("\n", " ")
    assert "false alarms in 23" in text
    assert "healthy steps of 2 runs" in text
    assert "RLWATCH_FORECAST_THRESHOLD=0." in text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--run", "short"), "healthy steps are too few"),
        (("--run", "nobody"), "there is no run 'nobody' that has ended"),
    ],
)
def test_what_it_cannot_be_made_from_is_said(invoke: Invoke, store: str, given: tuple[str, ...], told: str) -> None:
    """One clear error."""
    result = invoke("forecast", "calibrate", "--store", store, *given)

    assert result.exit_code == 2
    assert told in result.stderr.replace("\n", " ")


def test_the_budget_is_that_of_the_forecaster_unless_another_is_asked_for(invoke: Invoke, store: str) -> None:
    """So that a threshold of one's own keeps what the shipped one is meant to keep."""
    asked = ("forecast", "calibrate", "--store", store, "--run", "a", "--run", "b")

    assert invoke(*asked).stdout == invoke(*asked, "--budget", forecaster.BUDGET).stdout
    assert invoke(*asked).stdout != invoke(*asked, "--budget", "2").stdout


def test_what_people_said_of_forecasts_counts(invoke: Invoke, store: str) -> None:
    """Of a run of which a forecast was judged right only what came a hundred steps before is healthy."""
    target = open_store(store)
    target.answer_forecast(ForecastAnswer("a", 700, right=True, by="ann"))
    target.answer_forecast(ForecastAnswer("b", 300, right=False, by="ann"))
    told = invoke("forecast", "calibrate", "--store", store, "--run", "a", "--run", "b").output.replace("\n", " ")

    assert "a: only steps before 600 count: a forecast was judged right" in told
    assert "1 judged wrong: counted as false" in told
    assert "1790 healthy steps are too few" in told or "too few" in told


def test_past_forecasts_are_listed_and_judged(invoke: Invoke, store: str) -> None:
    """In words and as JSON; the answer is kept with who gave it."""
    target = open_store(store)
    writer = target.open_run(RunInfo("f", name="failing", source="trl/grpo"))
    writer.write([StepRecord(s, {"kl": 9.0 if s >= 200 else 0.01, "entropy": 1.0}) for s in range(1, 300)])
    writer.write(
        [
            record_of(Forecast(s, p50=0.9, risk=1.5, alarm=True, limit="ref_kl"), ClosedStep(s, {}, {}, seq=s))
            for s in range(170, 190)
        ]
    )
    writer.finish(RunState.FINISHED, "", 1.0)
    writer.close()

    said = invoke(
        "forecast", "judge", "failing", "175", "--right", "--why", "it blew up", "--by", "ann", "--store", store
    )
    assert said.stdout.strip() == "f: the forecast at step 170 was right, by ann"
    text = invoke("forecast", "record", "failing", "--store", store).stdout
    assert "came true (ref_kl at" in text
    assert "1 came true in 1 run with forecasts" in text
    [past] = strict(invoke("forecast", "record", "f", "--format", "json", "--store", store).stdout)["past"]
    assert (past["step"], past["last"], past["right"], past["answer"]["by"]) == (170, 189, True, "ann")
    wrong = invoke("forecast", "judge", "failing", "90", "--wrong", "--store", store)
    assert wrong.exit_code == 2
    assert "at these steps it was: 170" in wrong.stderr.replace("\n", " ")
