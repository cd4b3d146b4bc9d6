"""``rlwatch forecast calibrate``, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import Invoke
from forecast_models import small_model
from forecast_runs import steady

import rlwatch
from rlwatch.forecast import forecaster


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
