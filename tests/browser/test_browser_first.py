"""The first picture of a page: drawn before Streamlit's script has run, usable, and taken over with what was chosen."""

import re

import pytest
from playwright.sync_api import expect
from test_browser_charts import drag, view
from test_browser_pages import write
from waiting import until

from rlwatch.records import RunState

pytestmark = pytest.mark.browser

WEIRD = '<script>alert("x")</script><img src=x onerror=alert(1)>'


def test_charts_are_drawn_and_zoomed_before_streamlit_and_stay_when_it_takes_them_over(early, shared_app, shared_store):
    """The same element of the page, the same range, which is then in the address as well."""
    page, let_go = early
    write(shared_store, "early", name=WEIRD, steps=range(1, 201), end=RunState.FINISHED)
    page.goto(f"{shared_app}/run?run=early", wait_until="commit")
    expect(page.locator("#rl-first .head")).to_contain_text(WEIRD)
    expect(page.locator("#rl-first .u-over").first).to_be_visible()
    page.locator(".board").first.evaluate("node => { node.kept = true; }")

    drag(page, page.locator("#rl-first .u-over").first, 0.25, 0.75)
    shown = view(page)
    assert shown == view(page, 1)
    assert shown[0] > 30
    let_go()

    expect(page.locator("#rl-first")).to_have_count(0)
    expect(page).to_have_url(re.compile(rf"from={shown[0]:g}&to={shown[1]:g}"))
    expect(page.get_by_role("button", name="Report")).to_be_visible()
    assert page.locator(".board").first.evaluate("node => node.kept")
    assert page.locator(".board").count() == 2
    assert view(page) == shown


def test_rows_of_the_list_are_links_before_streamlit_and_ticks_are_kept(early, shared_app, shared_store):
    """A tick reaches the server once there is a session; then there is one table, not two."""
    page, let_go = early
    for i in range(2):
        write(shared_store, f"listed-{i}", name=WEIRD, steps=range(1, 20), end=RunState.FINISHED)
    page.goto(shared_app, wait_until="commit")
    row = page.locator("#rl-first tr[data-id=listed-1]")
    expect(row.locator("a.link")).to_have_attribute("href", "run?run=listed-1")
    row.locator("input[type=checkbox]").check()
    let_go()

    expect(page.locator("#rl-first")).to_have_count(0)
    expect(page).to_have_url(re.compile("picked=listed-1"))
    expect(page.locator("tr[data-id=listed-1] input[type=checkbox]")).to_be_checked()

    page.unroute_all()
    page.goto(shared_app, wait_until="commit")
    page.locator("tr[data-id=listed-1] a.link").click()
    expect(page).to_have_url(re.compile("run=listed-1"))


def test_a_first_picture_that_cannot_be_drawn_gives_way_to_the_page(early, shared_app, shared_store):
    """What was drawn of it covers nothing."""
    page, let_go = early
    write(shared_store, "unlucky", steps=range(1, 50), end=RunState.FINISHED)
    page.route("**/first/run/*", lambda route: route.fulfill(json={"title": "first", "boards": {"board-strip": None}}))
    page.goto(f"{shared_app}/run?run=unlucky", wait_until="commit")
    expect(page.locator("html")).to_have_attribute("data-rl-first", "none")
    let_go()

    expect(page.get_by_role("button", name="Report")).to_be_visible()
    expect(page.locator("#rl-first")).to_have_count(0)


def test_charts_of_a_server_that_takes_long_are_whole_when_it_answers(early, shared_app, shared_store):
    """Those of the first picture have been dropped by then: they follow the size of the window no more."""
    page, let_go = early
    write(shared_store, "late", steps=range(1, 201), end=RunState.FINISHED)
    page.clock.install()
    page.goto(f"{shared_app}/run?run=late", wait_until="commit")
    expect(page.locator("#rl-first .u-over").first).to_be_visible()
    page.clock.fast_forward(31_000)
    expect(page.locator("#rl-first")).to_have_count(0)
    let_go()

    expect(page.get_by_role("button", name="Report")).to_be_visible()
    chart = page.locator(".board .u-over").first
    expect(chart).to_be_visible()
    wide = chart.bounding_box()["width"]
    page.set_viewport_size({"width": 1000, "height": 1000})
    until(lambda: chart.bounding_box()["width"] < 0.8 * wide, "the charts followed the size of the window", 60)
