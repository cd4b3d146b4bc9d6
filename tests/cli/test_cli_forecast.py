"""What scan, watch, import and show say of the forecast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from cli_helpers import Invoke, strict, write_log
from scripted import Oracle

from rlwatch.cli.view_text import forecast_line, newest_row
from rlwatch.forecast import Forecast
from rlwatch.forecast.forecast import record_of
from rlwatch.forecast.gate import NO_SIGNAL
from rlwatch.monitor import forecasting
from rlwatch.records import ClosedStep
from rlwatch.store.url import open_store

OF = "forecast: highest 80% within 50 steps at step 31; alarm from step 31"


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """p50 is the reward."""
    monkeypatch.setattr(forecasting, "default_forecasts", Oracle)


def _log(path: Path, rewards: Sequence[float]) -> Path:
    return write_log(path, [{"step": s, "reward": r, "loss": 0.1} for s, r in enumerate(rewards, 1)])


@pytest.fixture
def alarming(tmp_path: Path) -> Path:
    """Thirty quiet steps, ten in alarm."""
    return _log(tmp_path / "train.log", [0.1] * 30 + [0.8] * 10)


def test_scan_says_the_highest_chance_and_the_first_alarm_before_what_was_found(alarming: Path, invoke: Invoke) -> None:
    """One line where all is asked for; the alarm is among the alarms, and a warning only."""
    lines = invoke("scan", alarming, "-v").stdout.splitlines()

    said = lines.index(OF)
    assert said < lines.index("Findings")
    assert any("crash_forecast" in line and "likely within 50 steps" in line for line in lines[said:])


def test_scan_gives_scripts_each_step(alarming: Path, invoke: Invoke) -> None:
    """Strict JSON, step by step."""
    document = strict(invoke("scan", alarming, "--format", "json").stdout)

    assert [row["alarm"] for row in document["forecast"]] == [False] * 30 + [True] * 10
    assert set(document["forecast"][0]) == {"step", "p20", "p50", "p100", "risk", "alarm", "limit"}
    assert [(a["kind"], a["step"]) for a in document["alarms"]] == [("crash_forecast", 33)]
    assert "forecast" not in {part["name"] for part in document["not_run"]}


def test_scan_says_why_there_is_no_forecast(tmp_path: Path, invoke: Invoke) -> None:
    """Under what could not be judged, not as a number."""
    text = invoke("scan", _log(tmp_path / "short.log", [-1, -1, -1]), "--all").stdout

    assert "forecast: highest" not in text
    assert "check skipped: forecast: no forecast because there were 3 steps" in text


def test_a_watched_log_keeps_its_forecasts(alarming: Path, tmp_path: Path, invoke: Invoke) -> None:
    """As a series of the run, once each, also if the log is watched again after it grew."""
    store = tmp_path / "store"
    first = invoke("watch", alarming, "--once", "--store", store)
    _log(alarming, [0.1] * 30 + [0.8] * 10 + [0.7] * 5)
    second = invoke("watch", alarming, "--once", "--store", store)

    assert OF in first.stdout.splitlines()
    assert OF in second.stdout.splitlines()
    place = open_store(store)
    [run] = place.runs()
    series = place.series(run.run_id, ["forecast/p50", "reward"])
    assert series["forecast/p50"].steps.tolist() == series["reward"].steps.tolist() == list(range(1, 46))
    assert series["forecast/p50"].values.tolist() == series["reward"].values.tolist()


def test_show_has_no_forecast_of_a_run_that_is_over(alarming: Path, tmp_path: Path, invoke: Invoke) -> None:
    """Its forecasts were imported with it, and stay where the record of forecasts reads them."""
    store = tmp_path / "store"
    run = invoke("import", alarming, "--store", store).stdout.strip()

    assert "forecast:" not in invoke("show", run, "--store", store).stdout
    assert strict(invoke("show", run, "--store", store, "--format", "json").stdout)["forecast"] is None
    assert open_store(store).forecasts(run)


def test_the_newest_forecast_tells_scripts_what_it_is_and_why_it_is_no_more() -> None:
    """Its kind and reason beside its numbers."""
    given = Forecast(40, steps_to=12.0, limit="ent_low", error=3.0, checks=9, limits_only=NO_SIGNAL, log="sparse")
    row = newest_row([record_of(given, ClosedStep(40, {}))])

    assert row is not None
    assert (row["kind"], row["reason"], row["p50"], row["error"]) == ("limit", NO_SIGNAL, None, 3.0)
    assert forecast_line([given]) == (
        f"{NO_SIGNAL}; entropy would fall to its limit in about 12 steps on a straight line (9 checked so far: out by 3 steps)"
    )


def test_a_quiet_run_has_no_alarm() -> None:
    """And a run nobody forecast has no line."""
    assert forecast_line([Forecast(40, p50=0.005)]) == "forecast: highest <1% within 50 steps at step 40; no alarm"
    assert forecast_line([Forecast(4, absent="no forecast because")]) == ""


@pytest.mark.parametrize(
    ("alarm", "line"),
    [
        (True, "forecast: a limit is near from step 41; no chance is given because of this"),
        (False, "forecast: no limit came near; no chance is given because of this"),
    ],
)
def test_the_line_of_a_run_watched_by_its_limits_says_so(alarm, line):
    """No chance is made up."""
    why = "no chance is given because of this"
    said = [Forecast(40, risk=0.2, limits_only=why), Forecast(41, risk=1.2, alarm=alarm, limits_only=why)]
    assert forecast_line(said) == line
    assert newest_row([]) is None
