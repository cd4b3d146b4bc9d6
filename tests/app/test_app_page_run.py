"""The page of one run, as Streamlit draws it."""

import json

import pytest
from app_world import (
    NAN,
    WEIRD,
    cells,
    charts,
    danger_run,
    finding,
    healthy,
    html,
    no_traceback,
    run_page,
    tables,
    write_run,
)

from rlwatch.records import Event, RunState


def lines(option):
    return [s for s in option["series"] if s["type"] == "line"]


def test_a_healthy_run_shows_its_charts_by_family(store_dir):
    """Four metrics, four families, in the fixed order."""
    write_run(store_dir)
    page = run_page()
    assert no_traceback(page)
    assert list(charts(page)) == ["chart-REWARD", "chart-EXPLORATION", "chart-TRUST_REGION", "chart-OPTIMISATION"]
    reward = lines(charts(page)["chart-REWARD"])[0]
    assert reward["data"][0] == [1, 0.21]
    assert len(reward["data"]) == 30
    assert "healthy" in html(page)
    assert not page.warning


def test_a_run_in_danger_says_why_and_marks_it(store_dir):
    """In the head, on the chart, in the table."""
    danger_run(store_dir)
    page = run_page()
    assert no_traceback(page)
    assert "entropy collapse from step 12" in html(page)
    marks = lines(charts(page)["chart-EXPLORATION"])[0]["markLine"]["data"]
    assert [mark.get("xAxis") for mark in marks if "xAxis" in mark] == [12, 20]
    assert [mark["yAxis"] for mark in marks if "yAxis" in mark] == [1.0]
    (row,) = tables(page)["findings"]["rows"]
    assert cells(row)[:4] == ["critical", "entropy collapse", "12", "20"]
    assert ["ratio", "NaN"] in row["cells"][4]["lines"]


def test_a_metric_that_is_nan_from_step_one_is_a_chart_of_marks(store_dir):
    """And everything sent to the browser is strict JSON."""
    write_run(store_dir, metrics=lambda step: {**healthy(step), "kl": NAN})
    page = run_page()
    assert no_traceback(page)
    option = charts(page)["chart-TRUST_REGION"]
    json.dumps(option, allow_nan=False)
    (bad,) = [s for s in option["series"] if s["type"] == "scatter"]
    assert bad["data"][0] == [1, 0, "NaN"]
    assert lines(option)[0]["data"] == []


def test_a_weird_name_is_escaped_wherever_html_is_made(store_dir):
    """Name, project and metric."""
    metric = "<img src=x onerror=alert(1)>"
    write_run(store_dir, name=WEIRD, metrics=lambda step: {**healthy(step), metric: float(step)})
    page = run_page()
    assert no_traceback(page)
    assert "<script" not in html(page)
    assert "&lt;script&gt;" in html(page)
    page.button(key="more-SYSTEM-button").click().run()
    assert no_traceback(page)
    assert charts(page)["chart-SYSTEM-more"]["title"][0]["text"] == metric
    assert "<img" not in html(page)


def test_the_range_of_steps_comes_from_the_address(store_dir):
    """And the charts keep to it."""
    write_run(store_dir)
    page = run_page(from_=10, to=20)
    assert page.slider[0].value == (10, 20)
    option = charts(page)["chart-REWARD"]
    assert (option["xAxis"][0]["min"], option["xAxis"][0]["max"]) == (10, 20)
    assert [step for step, _ in lines(option)[0]["data"]] == list(range(10, 21))


def test_moving_the_range_writes_the_address(store_dir):
    """So that a refresh, and a colleague, see the same."""
    write_run(store_dir)
    page = run_page()
    page.slider[0].set_range(5, 25).run()
    assert page.query_params["from"] == "5"
    assert page.query_params["to"] == "25"
    page.slider[0].set_range(0, 30).run()
    assert "from" not in page.query_params
    assert "to" not in page.query_params


def test_a_range_survives_new_steps(store_dir):
    """Live refresh keeps the zoom."""
    write_run(store_dir, steps=25)
    page = run_page(from_=5, to=15)
    write_run(store_dir, steps=60)
    page.run()
    option = charts(page)["chart-REWARD"]
    assert (option["xAxis"][0]["min"], option["xAxis"][0]["max"]) == (5, 15)
    assert page.slider[0].value == (5, 15)


def test_an_open_end_follows_the_run(store_dir):
    """Unless an end was chosen, the newest step is in sight."""
    write_run(store_dir, steps=25)
    page = run_page(from_=5)
    write_run(store_dir, steps=60)
    page.run()
    assert charts(page)["chart-REWARD"]["xAxis"][0]["max"] == 60


def test_attempt_two_dims_what_it_replaced(store_dir):
    """Steps 1 to 30, then again from 1."""
    write_run(store_dir, steps=30)
    write_run(store_dir, steps=10, metrics=lambda step: {"reward": 5.0 + step})
    page = run_page()
    current, replaced = lines(charts(page)["chart-REWARD"])
    assert len(current["data"]) == 10
    assert replaced["lineStyle"]["opacity"] < 1
    assert len(replaced["data"]) == 30


def test_events_are_listed_and_resets_marked(store_dir):
    """A jump in KL has its reason beside it."""
    write_run(store_dir, events=[Event("reference_reset", step=15, body={"optimizer": "keep", "kl": 0.31})])
    page = run_page()
    (row,) = tables(page)["events"]["rows"]
    assert cells(row) == ["15", "reference reset", "optimizer keep · kl 0.31"]
    marks = lines(charts(page)["chart-TRUST_REGION"])[0]["markLine"]["data"]
    assert [(mark["xAxis"], mark["label"]["formatter"]) for mark in marks] == [(15, "⟲")]


def test_a_finished_run_is_still_and_cannot_be_asked(store_dir):
    """No refresh, no button to press."""
    write_run(store_dir, state=RunState.FINISHED)
    page = run_page()
    assert no_traceback(page)
    assert page.button(key="reset-open").disabled
    assert page.toggle(key="live").disabled


@pytest.mark.parametrize("run_id", ["nobody", "../../etc/passwd", "<script>"])
def test_an_unknown_run_is_a_message(store_dir, run_id):
    """Mistyped, deleted or hostile addresses end in words."""
    write_run(store_dir)
    page = run_page(run_id)
    assert no_traceback(page)
    assert page.warning or page.error
    assert not charts(page)


def test_no_run_in_the_address(store_dir):
    """The page says where to choose one."""
    page = run_page("")
    assert no_traceback(page)
    assert page.info


def test_a_run_without_steps(store_dir):
    """It has just begun; one may look at it."""
    write_run(store_dir, steps=0)
    page = run_page()
    assert no_traceback(page)
    assert "No metric" in page.caption[0].value


def test_a_damaged_run_is_a_message(store_dir):
    """Not a traceback."""
    write_run(store_dir)
    for path in (store_dir / "run-1").glob("run.db-*"):
        path.unlink()
    (store_dir / "run-1" / "run.db").write_bytes(b"not a database" * 1000)
    page = run_page()
    assert no_traceback(page)
    assert page.error or page.warning


def test_a_family_opens_its_other_metrics_on_demand(store_dir):
    """They are read only then."""
    write_run(store_dir, metrics=lambda step: {**healthy(step), "rewards/format/mean": step / 30})
    page = run_page()
    assert "chart-REWARD-more" not in charts(page)
    page.button(key="more-REWARD-button").click().run()
    assert charts(page)["chart-REWARD-more"]["title"][0]["text"] == "rewards/format/mean"
    page.button(key="more-REWARD-button").click().run()
    assert "chart-REWARD-more" not in charts(page)


def test_findings_are_listed_newest_first(store_dir):
    """The one to read is on top."""
    found = [finding(kind="a", seq=5, step=5, onset_step=4), finding(kind="b", seq=9, step=9, onset_step=8)]
    write_run(store_dir, findings=found)
    rows = tables(run_page())["findings"]["rows"]
    assert [cells(row)[1] for row in rows] == ["b", "a"]
