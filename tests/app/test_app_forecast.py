"""The forecast in the app: how likely, when, why, and honest words where there is none."""

from dataclasses import replace

import numpy as np
import pytest
from app_world import alert, cells, html, no_traceback, panels, put_alerts, run_page, runs_page, tables, write_run
from rlwatch_app import format as fmt
from rlwatch_app import run_forecast
from rlwatch_app.charts import DARK, LIGHT
from rlwatch_app.fleet_rows import FleetView
from rlwatch_app.health import AMBER
from rlwatch_app.marks import marks_of_run
from rlwatch_app.queries import RunForecasts
from rlwatch_app.run_charts import all_panels
from rlwatch_app.thinning import Branches, thin

from rlwatch.forecast import Forecast, ForecastReason
from rlwatch.forecast.forecast import record_of
from rlwatch.records import ClosedStep, Severity

WHY = (ForecastReason("mismatch/k3", 0.42), ForecastReason("policy/<b>entropy</b>", 0.17))


def forecast(step=30, p50=0.72, **more):
    fields = {"p20": p50 / 2, "p100": min(1.0, p50 * 1.2), "risk": p50 / 0.5, "alarm": p50 >= 0.5, "limit": "ref_kl"}
    return Forecast(step, p50=p50, **{**fields, "steps_to": 35.0, "why": WHY, **more})


def record(said):
    return record_of(said, ClosedStep(said.step, {}, {}, seq=said.step))


def trace(values):
    return Branches(thin(np.arange(len(values)), np.asarray(values, dtype=float), 240))


def told(newest, highest=(0.83, 412), values=(0.1, 0.7)):
    return RunForecasts(
        newest, highest, dict.fromkeys(("forecast/p20", "forecast/p50", "forecast/p100"), trace(values))
    )


def test_an_alarm_says_how_likely_which_limit_when_and_the_highest():
    """In the words of the alert, with the shape of a warning."""
    text = str(run_forecast.forecast_facts(told(forecast())))

    assert "▲" in text
    assert "72%" in text
    assert "KL to the reference would reach its limit in about 35 steps" in text
    assert "83% at step 412" in text


def test_a_quiet_run_has_no_limit_in_sight():
    """And no shape of alarm."""
    text = str(run_forecast.forecast_facts(told(forecast(p50=0.004, limit="", steps_to=None))))

    assert "▲" not in text
    assert "<1%".replace("<", "&lt;") in text
    assert "no limit" not in text


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("no forecast because it needs 40 steps; at 23", "No forecast yet: it needs 40 steps; at 23"),
        ("it needs 40 steps", "No forecast yet: it needs 40 steps"),
        ("", "No forecast yet."),
    ],
)
def test_where_there_is_none_the_reason_is_said(absent, words):
    """The forecaster's own."""
    assert run_forecast.absent_words(Forecast(23, absent=absent)) == words


def by_limits(alarm):
    why = "no chance is given because this run logs 30% of what the model goes by; it would need mismatch/k3"
    more = {"limit": "ref_kl", "steps_to": 12.0} if alarm else {}
    return Forecast(30, risk=1.2 if alarm else 0.1, alarm=alarm, limits_only=why, **more)


def test_where_only_limits_are_watched_that_is_said():
    """Which one is near, or none; and what a chance would need."""
    near, far = (str(run_forecast.forecast_facts(RunForecasts(by_limits(alarm), None, {}))) for alarm in (True, False))

    assert "▲" in near
    assert "KL to the reference would reach its limit in about 12 steps" in near
    assert "no limit near" in far
    assert "Limits alone are watched: this run logs 30% of what the model goes by; it would need mismatch/k3" in far


def test_what_drives_it_is_bars_and_names_are_text():
    """The strongest first; no name becomes HTML."""
    text = str(run_forecast.driver_bars(forecast(), LIGHT))

    assert text.index("mismatch/k3") < text.index("entropy")
    assert "<b>" not in text
    assert f"width:42.0%;background:{AMBER}" in text
    assert "no dominant metric" in str(run_forecast.driver_bars(forecast(why=()), DARK))


def drawn(values, ink=LIGHT):
    traces = {f"forecast/{name}": trace(values) for name in ("p20", "p50", "p100", "risk")}
    return run_forecast.forecast_panels(traces, ink)


def test_the_chances_are_nested_areas_from_0_to_100_and_the_risk_has_its_threshold():
    """One look tells how likely; the line is the chance that the alarm goes by."""
    chance, risk = drawn([0.01, 0.02, 0.6])

    assert [line.name for line in chance.lines] == ["within 50 steps", "within 100 steps", "within 20 steps"]
    assert all(line.fill for line in chance.lines)
    assert chance.range == (0, 100)
    assert [level for level, _ in risk.rules] == [1.0]
    assert risk.range[1] >= 1.1


def test_a_run_without_chances_has_the_chart_of_its_risk():
    """One panel, with the threshold."""
    (risk,) = run_forecast.forecast_panels({"forecast/risk": trace([0.1, 0.4, 1.3])}, LIGHT)

    assert (risk.title, [level for level, _ in risk.rules]) == ("Risk", [1.0])
    assert risk.range[1] == pytest.approx(1.43)


@pytest.mark.parametrize("values", [[0.5], [0.001] * 50 + [0.9], list(np.linspace(0, 1, 10_000))])
def test_a_chart_of_any_length_is_small(values):
    """One step, or ten thousand: at most two points for each of 240 places."""
    assert all(len(line.curve) <= 482 for panel in drawn(values, DARK) for line in panel.lines)


def test_the_first_alarm_is_marked_on_every_chart():
    """A forecast concerns no family alone; that it got worse since is not where it began."""
    [mark] = marks_of_run([alert(kind="crash_forecast", severity=Severity.CRITICAL)], [], [], {1: 1})

    assert (mark.step, mark.shape, mark.colour, mark.families) == (12, "▲", AMBER, frozenset())
    assert mark.text == "failure forecast"


def test_the_forecast_has_a_panel_of_its_own():
    """Its metrics are not among the charts of the families."""
    names = ["reward", "forecast/p50", "forecast/risk"]
    assert [panel.name for panel in all_panels(names, "trl/grpo")] == ["reward"]


def test_a_chance_is_never_more_certain_than_it_can_be():
    """Hardly any is not none."""
    assert [fmt.chance(c).replace(fmt.THIN, " ") for c in (0.0, 0.5, 1.0, None)] == ["<1%", "50%", ">99%", "-"]


def test_the_run_page_shows_the_forecast(store_dir):
    """A line, a chart, the reasons."""
    said = [forecast(step, 0.1 if step < 20 else 0.72) for step in range(5, 31)]
    write_run(store_dir, findings=[record(one) for one in said])
    page = run_page()

    assert no_traceback(page)
    assert "What drives it" in html(page)
    assert "72%" in html(page)
    line = panels(page)["Chance of a failure"]["lines"][0]
    assert (line["x"][0], line["y"][0]) == (5, 10)


def test_the_run_page_says_why_there_is_no_forecast_yet(store_dir):
    """And draws no empty chart; of a run nobody tried to forecast it says nothing."""
    write_run(store_dir, findings=[record(Forecast(23, absent="no forecast because it needs 40 steps; at 23"))])
    write_run(store_dir, "old")
    page, old = run_page(), run_page("old")

    assert "No forecast yet: it needs 40 steps; at 23" in html(page)
    assert "Chance of a failure" not in panels(page)
    assert ">Forecast<" not in html(old)
    assert no_traceback(page)
    assert no_traceback(old)


def test_the_run_page_of_a_run_watched_by_its_limits_shows_the_risk(store_dir):
    """And the list says that one is near."""
    said = [replace(by_limits(alarm=step > 20), step=step) for step in range(5, 31)]
    write_run(store_dir, "a", name="a", findings=[record(one) for one in said])
    put_alerts(store_dir, [])
    page = run_page("a")

    assert no_traceback(page)
    assert "Limits alone are watched" in html(page)
    line = panels(page)["Risk"]["lines"][0]
    assert (line["x"][0], line["y"][0]) == (5, 0.1)
    place = [column.label for column in FleetView().heads()].index("risk, 50 steps")
    cell = tables(runs_page())["runs"]["rows"][0]["cells"][place]
    assert (cell["text"], cell["shape"]) == ("near a limit", "▲")


def test_the_list_of_runs_has_the_risk(store_dir):
    """With the shape of a warning where it is an alarm; a dash where there is none."""
    write_run(store_dir, "a", name="a", findings=[record(forecast())])
    write_run(store_dir, "b", name="b", findings=[record(forecast(p50=0.02))])
    write_run(store_dir, "c", name="c")
    put_alerts(store_dir, [])
    page = runs_page()
    place = [column.label for column in FleetView().heads()].index("risk, 50 steps")
    rows = {row["id"]: row["cells"][place] for row in tables(page)["runs"]["rows"]}

    assert {run: cell["text"] for run, cell in rows.items()} == {"a": "72%", "b": "2%", "c": "-"}
    assert {run: cell.get("shape", "") for run, cell in rows.items()} == {"a": "▲", "b": "", "c": ""}
    assert all(cells(row) for row in tables(page)["runs"]["rows"])
