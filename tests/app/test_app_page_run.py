"""The page of one run, as Streamlit draws it."""

import json

import pytest
from app_world import (
    NAN,
    WEIRD,
    board,
    cells,
    danger_run,
    finding,
    healthy,
    html,
    no_traceback,
    panels,
    run_page,
    tables,
    write_run,
)
from streamlit.testing.v1 import AppTest

from rlwatch.records import Event, RunState


def drawn(panel, place=0):
    line = panel["lines"][place]
    return list(zip(line["x"], line["y"], strict=True))


def test_a_healthy_run_shows_its_charts_by_family(store_dir):
    """Four metrics, four families, in the fixed order."""
    write_run(store_dir)
    page = run_page()
    assert no_traceback(page)
    titles = [section["title"] for section in board(page)["sections"]]
    assert titles == ["Reward", "Exploration", "Trust region", "Optimisation"]
    assert drawn(panels(page)["reward/mean"])[0] == (1, 0.21)
    assert len(drawn(panels(page)["reward/mean"])) == 30
    assert "healthy" in html(page)
    assert not page.warning


def test_a_page_that_is_drawn_whole_is_drawn_once_however_far_the_run_has_come_since(store_dir):
    """A head that began it anew for each look behind the run's pace would keep the commands from ever being reached."""

    def script():
        import streamlit as st
        from rlwatch_app.run_page import page

        st.session_state["drawn"] = st.session_state.get("drawn", 0) + 1
        page(lambda run_id, step: None)

    write_run(store_dir)
    page = AppTest.from_function(script, default_timeout=120)
    page.query_params["run"] = "run-1"
    page.run()
    write_run(store_dir, steps=300)
    page.run()
    assert no_traceback(page)
    assert page.slider[0].max == 300
    assert page.session_state["drawn"] == 2


def test_the_strip_holds_what_tells_most_on_one_axis(store_dir):
    """As far as the run has it, in the fixed order, each with its last value."""
    write_run(store_dir, metrics=lambda step: {**healthy(step), "mismatch/kl": 0.1, "forecast/risk": 0.2})
    strip = board(run_page(), "board-strip")
    assert [panel["title"] for panel in strip["strip"]] == [
        "risk", "reward", "entropy", "KL", "grad norm", "mismatch"]  # fmt: skip
    assert strip["strip"][1]["last"] == "0.5"
    assert strip["window"] == [1, 30]


def test_a_run_in_danger_says_why_and_marks_it(store_dir):
    """In the headline, above the strip with its text, in the table; a single reason is not repeated in the head."""
    danger_run(store_dir)
    page = run_page()
    assert no_traceback(page)
    assert "Collapsed at step 12: entropy fell" in html(page)
    assert ">Why<" not in html(page)
    onset, alarm = board(page, "board-strip")["marks"]
    assert (onset["x"], onset["dashed"], alarm["x"], alarm["shape"]) == (12, True, 20, "■")
    assert "entropy fell from 1 to 0.1 nats/token" in alarm["more"]
    assert panels(page)["policy/entropy"]["rules"] == [[1, "baseline"]]
    (row,) = tables(page)["findings"]["rows"]
    assert cells(row)[:4] == ["critical", "entropy collapse", "12", "20"]
    assert ["ratio", "NaN"] in row["cells"][4]["lines"]


def test_a_spike_and_a_finding_without_an_alert_are_marked(store_dir):
    """The one leads to its tokens, the other opens its text."""
    spike = Event("gradient_localised", step=15)
    write_run(store_dir, events=[spike], findings=[finding(kind="grad_spike", step=9, message="norm 30")])
    marks = [mark for mark in board(run_page(), "board-strip")["marks"] if mark["shape"]]
    assert [(mark["step"], mark["go"] and mark["go"]["to"]) for mark in marks] == [(9, None), (15, "tokens")]
    assert marks[0]["more"] == "norm 30"


def test_a_metric_that_is_nan_from_step_one_is_a_chart_of_marks(store_dir):
    """And everything sent to the browser is strict JSON."""
    write_run(store_dir, metrics=lambda step: {**healthy(step), "kl": NAN})
    page = run_page()
    assert no_traceback(page)
    panel = panels(page)["policy/kl_ref"]
    json.dumps(board(page), allow_nan=False)
    assert panel["bad"][0] == [1, "NaN", ""]
    assert drawn(panel) == []
    assert next(one for one in board(page, "board-strip")["strip"] if one["title"] == "KL")["last"] == "NaN"


def test_an_unknown_metric_that_broke_is_not_behind_a_click(store_dir):
    """Among a hundred others."""
    many = {f"mine/{i}": float(i) for i in range(100)}
    write_run(store_dir, metrics=lambda step: {**many, "mine/7": NAN if step == 12 else 1.0, "reward": step})
    page = run_page()
    assert panels(page)["mine/7"]["bad"] == [[12, "NaN", ""]]
    assert board(page)["sections"][-1]["more"] == 99


def test_every_metric_is_found_by_its_name(store_dir):
    """Whether the table knows it or not."""
    write_run(store_dir, metrics=lambda step: {**healthy(step), "mine/very odd name": float(step)})
    page = run_page(q="ODD very")
    assert list(panels(page)) == ["mine/very odd name"]
    assert board(page)["sections"][0]["title"] == "1 of 5 metrics match"


def test_pinned_metrics_come_first(store_dir):
    """As the address says; a name the run does not have is left out."""
    write_run(store_dir)
    first = board(run_page(pin=["kl", "nothing"]))["sections"][0]
    assert (first["title"], [panel["name"] for panel in first["panels"]]) == ("Pinned", ["kl"])
    assert first["panels"][0]["pinned"]


def test_three_outliers_do_not_flatten_the_reward(store_dir):
    """They stand at the edge with their values; without clipping the axis goes down to them."""
    write_run(store_dir, steps=200, metrics=lambda step: {"reward": -90.0 if step in (50, 90, 130) else step / 200})
    clipped, whole = panels(run_page())["reward/mean"], panels(run_page(clip="false"))["reward/mean"]
    assert clipped["range"][0] > -1
    assert [point[:2] for point in clipped["beyond"]] == [[50, -90], [90, -90], [130, -90]]
    smoothed = panels(run_page(smooth="EMA 0.9"))["reward/mean"]
    assert (smoothed["beyond"], min(smoothed["lines"][1]["y"]) >= 0) == (clipped["beyond"], True)
    assert whole["range"][0] < -90
    assert whole["beyond"] == []


def test_an_axis_does_not_leave_the_range_of_its_metric(store_dir):
    """No entropy below 0, no fraction above 1."""
    write_run(store_dir, metrics=lambda step: {"entropy": 1e-3 * (step % 2), "frac_reward_zero_std": step / 30})
    page = run_page()
    assert panels(page)["policy/entropy"]["range"][0] == 0
    assert panels(page)["reward/zero_std_frac"]["range"][1] == 1


def test_a_smoothed_line_stands_over_the_pale_measured_one(store_dir):
    """Chosen in the address."""
    write_run(store_dir, metrics=lambda step: {"reward": float(step % 2)})
    raw, smooth = panels(run_page(smooth="mean of 10"))["reward/mean"]["lines"]
    assert raw["alpha"] < 1
    assert smooth["y"][-1] == 0.5
    assert (raw["y"][-1], raw["x"]) == (0, smooth["x"])


def test_the_axis_may_be_time_or_tokens(store_dir):
    """Hours and millions of tokens; where the run tells no tokens the page says so and shows steps."""
    write_run(store_dir, steps=30, step_s=3600.0)
    page = run_page(axis="time")
    assert board(page)["axis"] == "time"
    assert panels(page)["reward/mean"]["lines"][0]["x"][-1] == pytest.approx(29)
    without = run_page(axis="tokens")
    assert board(without)["axis"] == "step"
    assert "did not log tokens" in without.caption[0].value


def test_a_log_axis_on_demand(store_dir):
    """Of a metric of both signs on both sides."""
    write_run(store_dir, metrics=lambda step: {"reward": step - 15.0, "kl": 10.0**-step})
    page = run_page(log="true")
    assert [panels(page)[name]["scale"] for name in ("reward/mean", "policy/kl_ref")] == [
        "log scale, both ways", "log scale"]  # fmt: skip


def test_a_weird_name_is_escaped_wherever_html_is_made(store_dir):
    """Name, project and metric."""
    metric = "<img src=x onerror=alert(1)>"
    write_run(store_dir, name=WEIRD, metrics=lambda step: {**healthy(step), metric: float(step)})
    page = run_page(open="SYSTEM")
    assert no_traceback(page)
    assert "<script" not in html(page)
    assert "&lt;script&gt;" in html(page)
    assert metric in panels(page)
    assert "<img" not in html(page)


def test_the_range_of_steps_comes_from_the_address(store_dir):
    """And the charts keep to it."""
    write_run(store_dir)
    page = run_page(from_=10, to=20)
    assert page.slider[0].value == (10, 20)
    assert board(page)["window"] == [10, 20]
    assert [step for step, _ in drawn(panels(page)["reward/mean"])] == list(range(10, 21))


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
    assert board(page)["window"] == [5, 15]
    assert page.slider[0].value == (5, 15)


def test_an_open_end_follows_the_run(store_dir):
    """Unless an end was chosen, the newest step is in sight."""
    write_run(store_dir, steps=25)
    page = run_page(from_=5)
    write_run(store_dir, steps=60)
    page.run()
    assert board(page)["window"] == [5, 60]


def test_attempt_two_dims_what_it_replaced(store_dir):
    """Steps 1 to 30, then again from 1."""
    write_run(store_dir, steps=30)
    write_run(store_dir, steps=10, metrics=lambda step: {"reward": 5.0 + step})
    current, replaced = panels(run_page())["reward/mean"]["lines"]
    assert len(current["x"]) == 10
    assert replaced["alpha"] < 1
    assert len(replaced["x"]) == 30


def test_events_are_listed_and_resets_marked(store_dir):
    """A jump in KL has its reason beside it."""
    write_run(store_dir, events=[Event("reference_reset", step=15, body={"optimizer": "keep", "kl": 0.31})])
    page = run_page()
    (row,) = tables(page)["events"]["rows"]
    assert cells(row) == ["15", "reference reset", "optimizer keep · kl 0.31"]
    (mark,) = board(page)["marks"]
    assert (mark["step"], mark["shape"], mark["more"]) == (15, "⟲", "optimizer keep · kl 0.31")


def test_a_finished_run_is_still_and_cannot_be_asked(store_dir):
    """No refresh, no button to press."""
    write_run(store_dir, state=RunState.FINISHED)
    page = run_page()
    assert no_traceback(page)
    assert page.button(key="reset-open").disabled
    assert not page.toggle


@pytest.mark.parametrize("run_id", ["nobody", "../../etc/passwd", "<script>"])
def test_an_unknown_run_is_a_message(store_dir, run_id):
    """Mistyped, deleted or hostile addresses end in words."""
    write_run(store_dir)
    page = run_page(run_id)
    assert no_traceback(page)
    assert page.warning or page.error
    assert not panels(page)


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
    """As the address says."""
    write_run(store_dir, metrics=lambda step: {**healthy(step), "rewards/format/mean": step / 30})
    assert "rewards/format/mean" not in panels(run_page())
    page = run_page(open="REWARD")
    assert "rewards/format/mean" in panels(page)
    assert board(page)["sections"][0]["open"]


def test_settings_and_the_last_words_of_a_failed_trainer_are_beside_the_charts(store_dir):
    """As far as they are recorded."""
    failed = Event("exception", step=30, body={"error": "oom", "traceback": "Traceback: CUDA out of memory"})
    write_run(store_dir, state=RunState.CRASHED, events=[failed])
    page = run_page()
    assert "No settings logged" in html(page)
    assert "Traceback: CUDA out of memory" in page.code[-1].value


def test_findings_are_listed_newest_first(store_dir):
    """The one to read is on top."""
    found = [finding(kind="a", seq=5, step=5, onset_step=4), finding(kind="b", seq=9, step=9, onset_step=8)]
    write_run(store_dir, findings=found)
    rows = tables(run_page())["findings"]["rows"]
    assert [cells(row)[1] for row in rows] == ["b", "a"]
