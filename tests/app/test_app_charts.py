"""Chart options: what is drawn, where, in which ink."""

import json

import numpy as np
import pytest
from app_world import alert, finding
from rlwatch_app import marks
from rlwatch_app.charts import COLUMNS, DARK, LIGHT, Plot, family_option, height, points
from rlwatch_app.health import VERMILLION
from rlwatch_app.thinning import Branches, Curve, thin

from rlwatch.records import AlertState, Event


def plot(values, **more):
    steps = np.arange(len(values))
    lines = Branches(thin(steps, np.asarray(values, dtype=float), 240), more.pop("replaced", ()))
    return Plot(more.pop("title", "policy/entropy"), "nats/token", lines, "Exploration", **more)


def option(*plots, marked=(), window=(0, 10), ink=LIGHT):
    return family_option(plots, marked, window, ink)


def line(one, place=0):
    return next(s for s in one["series"] if s["type"] == "line" and s["xAxisIndex"] == place)


@pytest.mark.parametrize("values", [[], [1.0], [np.nan] * 4, [1.0, np.nan, np.inf, -np.inf, 2.0], list(range(50))])
def test_an_option_is_strict_json(values):
    """No NaN reaches the browser, whatever was measured."""
    json.dumps(option(plot(values)), allow_nan=False)


def test_each_panel_has_its_own_axes_and_they_share_the_window():
    """Small multiples: same steps under one another."""
    one = option(*(plot([1, 2, 3], title=f"m{i}") for i in range(5)), window=(3, 9))
    assert [t["text"] for t in one["title"]] == ["m0", "m1", "m2", "m3", "m4"]
    assert {(x["min"], x["max"]) for x in one["xAxis"]} == {(3, 9)}
    assert [x["gridIndex"] for x in one["xAxis"]] == [0, 1, 2, 3, 4]
    assert one["axisPointer"]["link"] == [{"xAxisIndex": "all"}]


def test_a_window_of_one_step_still_has_a_width():
    """The first step of a run."""
    x = option(plot([1.0]), window=(4, 4))["xAxis"][0]
    assert x["max"] > x["min"]


def test_panels_do_not_overlap():
    """Three to a row, rows below one another."""
    one = option(*(plot([1, 2]) for _ in range(COLUMNS + 1)))
    lefts = [float(grid["left"].rstrip("%")) for grid in one["grid"]]
    widths = [float(grid["width"].rstrip("%")) for grid in one["grid"]]
    assert all(lefts[i] + widths[i] < lefts[i + 1] for i in range(COLUMNS - 1))
    assert one["grid"][COLUMNS]["top"] > one["grid"][0]["top"] + one["grid"][0]["height"]
    assert height(COLUMNS + 1) >= one["grid"][COLUMNS]["top"] + one["grid"][COLUMNS]["height"]


def test_nan_is_a_red_tick_on_the_axis_with_its_word():
    """Never a gap that looks like nothing."""
    bad = next(s for s in option(plot([1.0, np.nan, np.inf, 2.0]))["series"] if s["type"] == "scatter")
    assert bad["data"] == [[1, 0, "NaN"], [2, 0, "Inf"]]
    assert bad["itemStyle"]["color"] == VERMILLION
    assert bad["encode"]["tooltip"] == [2]


def test_bad_values_of_a_replaced_attempt_are_marked_too():
    """The NaN that killed attempt 1 is still to be seen in attempt 2."""
    old = Curve(np.array([1]), np.array([1.0]), np.array([False]), ((2, "NaN"),))
    bad = [s for s in option(plot([1.0, 2.0], replaced=(old,)))["series"] if s["type"] == "scatter"]
    assert bad[0]["data"] == [[2, 0, "NaN"]]


def test_the_line_breaks_at_a_bad_value():
    """A pair without a value between its neighbours."""
    assert points(thin(np.arange(3), np.array([1.0, np.nan, 2.0]), 9)) == [[0, 1.0], [2, None], [2, 2.0]]


def test_replaced_attempts_are_dimmed_and_silent():
    """They are there, and do not compete."""
    old = thin(np.arange(3), np.array([1.0, 2.0, 3.0]), 9)
    _, dimmed = [s for s in option(plot([1, 2, 3], replaced=(old,)))["series"] if s["type"] == "line"]
    assert dimmed["lineStyle"]["opacity"] < 1
    assert dimmed["tooltip"] == {"show": False}


def test_a_lone_point_is_visible():
    """A line of one point is nothing."""
    assert line(option(plot([1.0])))["showSymbol"]
    assert not line(option(plot([1.0] * 9)))["showSymbol"]


def test_baseline_and_band_are_drawn_where_known():
    """The run's own healthy level."""
    drawn = line(option(plot([1, 2, 3], baseline=1.5, band=(1.0, 2.0))))
    assert drawn["markLine"]["data"][0]["yAxis"] == 1.5
    assert drawn["markArea"]["data"] == [[{"yAxis": 1.0}, {"yAxis": 2.0}]]
    assert "markArea" not in line(option(plot([1, 2, 3], baseline=np.nan)))


def test_a_spike_of_three_decades_gets_a_log_axis():
    """So that what came before it is still to be seen; the title says so."""
    one = option(plot([1.0] * 20 + [5000.0]), plot([-1.0] + [1.0] * 20 + [5000.0]))
    assert [axis.get("type") for axis in one["yAxis"][::2]] == ["log", "value"]
    assert "log" in one["title"][0]["subtext"]


def test_ink_follows_the_theme():
    """Lines read on light and dark."""
    assert line(option(plot([1, 2]), ink=DARK))["lineStyle"]["color"] == DARK.line
    assert line(option(plot([1, 2]), ink=LIGHT))["lineStyle"]["color"] == LIGHT.line


def test_an_alarm_marks_its_onset_dashed_and_itself_solid():
    """When it began, looking back; when it was seen."""
    began, seen = marks.marks_of_run([alert()], [finding()], [], {1: 1})
    assert (began.step, began.dashed, seen.step, seen.dashed) == (12, True, 20, False)
    assert (seen.shape, seen.families) == ("■", {"Exploration"})


def test_an_alarm_concerns_the_family_of_its_metric_too():
    """A NaN is an optimiser's finding, in whatever metric it shows."""
    found = marks.marks_of_run(
        [alert(kind="nonfinite")], [finding(kind="nonfinite", family="Optimisation")], [], {1: 1}
    )
    assert found[0].families == {"Optimisation", "Exploration"}


def test_a_resolved_alert_is_marked_where_it_was_seen_not_where_it_ended():
    """Its row keeps the step it ended at; the finding the step it was seen at."""
    over = alert(state=AlertState.RESOLVED, step=90, resolved_step=90)
    assert [m.step for m in marks.marks_of_run([over], [finding()], [], {1: 1})] == [12, 20]


def test_alerts_that_were_not_published_are_not_marked():
    """Gone before they fired."""
    gone = alert(state=AlertState.RESOLVED, fired_at=None)
    pending = alert(state=AlertState.PENDING, fired_at=None)
    assert marks.marks_of_run([gone, pending], [], [], {1: 1}) == []


def test_resets_and_resumes_are_marked():
    """Without them a jump looks like news."""
    reset = Event("reference_reset", step=40)
    found = marks.marks_of_run([], [], [reset, Event("note", step=5), Event("signal")], {1: 1, 2: 30})
    assert [(m.step, m.shape) for m in found] == [(30, "↻"), (40, "⟲")]


def test_commands_that_bend_the_curves_are_marked():
    """A rate that fell, a weight that changed, a stretch without steps; what resumed is an event of its own."""
    told = [Event("command", step=s, body={"command": kind}) for s, kind in enumerate(
        ["lower-lr", "set-kl-coef", "pause", "save-checkpoint", "resume"])]  # fmt: skip
    assert [(m.step, m.shape, m.text) for m in marks.marks_of_run([], [], told, {1: 1})] == [
        (0, "↓", "lower learning rate"),
        (1, "β", "set KL coefficient"),
        (2, "‖", "pause"),
        (3, "⤓", "save checkpoint"),
    ]


def test_marks_outside_the_window_are_not_drawn_and_others_families_are_faint():
    """Lines of an alarm run through every chart, loud only in its own family."""
    marked = [marks.Mark(5, "■", VERMILLION, "x", frozenset({"Reward"})), marks.Mark(50, "■", VERMILLION, "y")]
    data = line(option(plot([1, 2, 3]), marked=marked))["markLine"]["data"]
    assert [m["xAxis"] for m in data] == [5]
    assert data[0]["lineStyle"]["opacity"] < 0.5
    assert not data[0]["label"]["show"]
