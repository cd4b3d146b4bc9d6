"""What only a browser can tell of a run's charts: drag, hover, what outlives a refresh, a reload and a way back."""

import json
import math
import re
import time

import pytest
from playwright.sync_api import expect
from test_browser_pages import write

from rlwatch.records import Alert, AlertState, Event, RunState, Severity

pytestmark = pytest.mark.browser

FADED = """async (seconds) => {
  const end = performance.now() + 1000 * seconds;
  let lowest = 1, samples = 0;
  while (performance.now() < end) {
    for (const node of document.querySelectorAll('[data-testid="stElementContainer"]'))
      if (node.offsetHeight) lowest = Math.min(lowest, Number(getComputedStyle(node).opacity));
    samples += 1;
    await new Promise((done) => setTimeout(done, 50));
  }
  return [lowest, samples];
}"""
"""The lowest opacity of any part of the page, looked at 20 times a second."""


def strip(page):
    """The first chart of the strip, once it is drawn."""
    chart = page.locator(".u-over").first
    expect(chart).to_be_visible()
    return chart


def at(chart, part):
    """Where a part of the chart's width lies on the page."""
    box = chart.bounding_box()
    return box["x"] + part * box["width"], box["y"] + box["height"] / 2


def drag(page, chart, begin, end):
    """A range of the chart."""
    page.mouse.move(*at(chart, begin))
    page.mouse.down()
    page.mouse.move(*at(chart, end), steps=4)
    page.mouse.up()


def view(page, board=0):
    """The range that a board shows."""
    return json.loads(page.locator(".board").nth(board).get_attribute("data-view"))


def test_zoom_and_hover_outlive_the_refresh_of_a_live_run_and_nothing_fades(app, page, train):
    """New steps come in, tooltip and range stay, no part of the page turns pale; a double click shows all again."""
    trainer = train("live_loop.py", steps=40)
    page.goto(f"{app}/run?run={trainer.run_id}")
    chart = strip(page)
    drag(page, chart, 0.25, 0.75)
    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    shown, step = view(page), page.get_by_test_id("stMain").locator(".rl-facts").first.inner_text()
    assert view(page, 1) == shown
    page.mouse.move(*at(chart, 0.5))
    expect(page.locator(".tip").first).to_contain_text("reward")

    lowest, samples = page.evaluate(FADED, 8)

    assert samples > 10
    assert lowest == 1
    assert page.get_by_test_id("stMain").locator(".rl-facts").first.inner_text() != step
    assert view(page) == shown
    expect(page.locator(".tip").first).to_be_visible()
    page.mouse.dblclick(*at(chart, 0.5))
    expect(page).not_to_have_url(re.compile("from="))
    expect(page.locator(".board").first).not_to_have_attribute("data-view", json.dumps(shown, separators=(",", ":")))


def test_a_link_restores_everything_and_back_goes_back(shared_app, page, shared_store):
    """Range, smoothing, place, search, pins and opened families; also after a reload."""
    steps = range(1, 201)
    write(shared_store, "linked", steps=steps, metrics={"mine/odd": 1.0, "rewards/format/mean": 2.0})
    page.goto(f"{shared_app}/run?run=linked&from=50&to=150&at=100&pin=kl&smooth=EMA+0.9&open=REWARD&log=true")

    def as_linked():
        expect(page.locator(".tip").first).to_contain_text("step 100")
        expect(page.locator("h3").first).to_have_text("Pinned")
        assert page.locator("figure").first.get_attribute("data-metric") == "kl"
        expect(page.get_by_role("button", name=re.compile("^hide 1"))).to_be_visible()
        assert page.get_by_role("slider").nth(0).input_value() == "50"
        expect(page.get_by_label("Log")).to_be_checked()

    as_linked()
    page.reload()
    as_linked()
    page.get_by_role("button", name="Unpin policy/kl_ref").first.click()
    expect(page.locator("h3").first).to_have_text("Reward")
    page.go_back()
    expect(page.locator("h3").first).to_have_text("Pinned")


def test_a_metric_is_searched_for_and_pinned_for_the_next_run_of_the_project(shared_app, page, joined, shared_store):
    """In the address of this one, in the store for the next and for others."""
    for run in ("first", "second"):
        write(shared_store, run, metrics={f"mine/odd{i}": float(i) for i in range(20)})
    page.goto(f"{shared_app}/run?run=first")
    page.get_by_placeholder("Search metrics").fill("odd13")
    page.keyboard.press("Enter")
    expect(page.locator("h3").first).to_have_text("1 of 22 metrics match")
    page.get_by_role("button", name="Pin mine/odd13").click()
    expect(page).to_have_url(re.compile("pin=mine%2Fodd13"))
    theirs = joined(shared_app, "viewer", "bob")
    theirs.goto(f"{shared_app}/run?run=second")
    expect(theirs.locator("h3").first).to_have_text("Pinned")
    expect(theirs.locator("figure").first).to_have_attribute("data-metric", "mine/odd13")


def test_pinned_charts_are_combined_widened_dragged_and_kept(shared_app, page, shared_store):
    """From the menu and by the mouse; a reload shows the same, so does the next run of the project, and on a phone all
    are as wide as it.
    """
    for run in ("laid", "later"):
        write(shared_store, run, steps=range(1, 101), metrics={"entropy": 1.0, "grad_norm": 2.0})
    page.goto(f"{shared_app}/run?run=laid&live=false&pin=reward&pin=kl&pin=entropy")
    first = page.locator("figure").first
    expect(first).to_have_attribute("data-pin", "reward")
    page.get_by_role("button", name="More of reward/mean").first.click()
    page.get_by_role("button", name="On one chart with kl").click()
    expect(first).to_have_attribute("data-pin", "reward + kl")
    expect(first.locator(".legend")).to_contain_text("policy/kl_ref")
    page.get_by_role("button", name="More of reward/mean and policy/kl_ref").click()
    page.get_by_role("button", name="Wider").click()
    expect(first).to_have_attribute("data-pin", "reward + kl @2")
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
    first.evaluate("node => node.scrollIntoView({ block: 'center' })")
    page.locator("figcaption").nth(1).drag_to(first.locator("figcaption"))
    expect(first).to_have_attribute("data-pin", "entropy")
    page.reload()
    expect(first).to_have_attribute("data-pin", "entropy")
    page.goto(f"{shared_app}/run?run=later&live=false")
    expect(page.locator("figure").nth(1)).to_have_attribute("data-pin", "reward + kl @2")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function(
        "() => [0, 1].every((at) => Array.from(document.querySelectorAll('.st-key-board-all *'))"
        ".map((node) => node.shadowRoot).filter(Boolean).flatMap((root) => [...root.querySelectorAll('figure')])"
        "[at]?.offsetWidth > 300)"
    )


def test_marks_lead_to_what_they_mark_and_a_nan_is_told(shared_app, page, shared_store):
    """An alarm to its text, a spike to its tokens; the tooltip says NaN and Inf where they were."""
    alert = Alert("m1", "marked", "entropy", "entropy_collapse", Severity.CRITICAL, AlertState.FIRING, 150, 160,
                  "entropy fell to 0.1", fired_at=time.time())  # fmt: skip
    write(shared_store, "marked", steps=range(1, 100), alerts=[alert], findings=[Event("gradient_localised", step=40)])
    write(shared_store, "marked", steps=[100], metrics={"kl": math.nan, "reward": math.inf})
    write(shared_store, "marked", steps=range(101, 201))
    page.goto(f"{shared_app}/run?run=marked&at=100")
    expect(page.locator(".tip").first).to_contain_text("NaN")
    expect(page.locator(".tip").first).to_contain_text("Inf")
    page.get_by_role("button", name=re.compile("entropy collapse .alarm.")).click()
    expect(page.get_by_role("dialog")).to_contain_text("entropy fell to 0.1; began at step 150")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.get_by_role("button", name=re.compile("spike")).click()
    expect(page).to_have_url(re.compile(r"/tokens\?run=marked&step=40"))


def test_runs_beside_each_other_keep_their_range_and_place(shared_app, page, shared_store):
    """Dragged in one chart, kept by all through another look and a reload; every run is told at the place."""
    for run in ("one", "two"):
        write(shared_store, run, steps=range(1, 201))
    page.goto(f"{shared_app}/compare?runs=one&runs=two")
    chart = strip(page)
    drag(page, chart, 0.25, 0.75)
    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    shown = view(page)
    assert 40 < shown[0] < shown[1] < 160
    page.mouse.click(*at(chart, 0.5))
    expect(page).to_have_url(re.compile(r"at=\d+"))
    page.reload()
    for run in ("one", "two"):
        expect(page.locator(".tip")).to_contain_text(run)
    assert view(page) == shown
    page.mouse.dblclick(*at(strip(page), 0.2))
    expect(page).not_to_have_url(re.compile("from="))


def test_a_zoom_is_not_lost_if_new_lines_arrive_during_the_drag(shared_app, page, shared_store):
    """Means of a long run arrive while the mouse is down: the chart is drawn anew once it is let go."""
    write(shared_store, "dragged", steps=range(1, 5001), end=RunState.FINISHED)
    held = []

    def hold(route):
        held.append(route)

    page.route(re.compile(r"/series\?.*mean=true"), hold)
    page.goto(f"{shared_app}/run?run=dragged")
    chart = strip(page)
    page.wait_for_timeout(500)  # the means are asked for when the browser has nothing else to do
    page.mouse.move(*at(chart, 0.25))
    page.mouse.down()
    page.mouse.move(*at(chart, 0.5), steps=3)
    assert held
    with page.expect_response(re.compile(r"/series\?.*mean=true")):
        for route in held:
            route.continue_()
    page.wait_for_timeout(300)
    page.mouse.move(*at(chart, 0.75), steps=3)
    page.mouse.up()

    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    low, high = view(page)
    assert (low / 5000, high / 5000) == pytest.approx((0.25, 0.75), abs=0.02)


def test_a_zoom_into_a_short_run_asks_for_no_rows(shared_app, page, shared_store):
    """The browser has all of them, and makes the means of any range by itself."""
    write(shared_store, "short", steps=range(1, 1501), end=RunState.FINISHED)
    asked = []
    page.goto(f"{shared_app}/run?run=short")
    chart = strip(page)
    page.on("request", lambda request: asked.append(request.url) if "/series" in request.url else None)

    drag(page, chart, 0.25, 0.75)

    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    page.wait_for_timeout(500)
    assert asked == []
