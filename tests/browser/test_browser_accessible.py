"""Every page for people who see or move otherwise: axe finds nothing, and what the keyboard reaches shows that it did."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from test_browser_pages import write

from rlwatch.records import RunState

pytestmark = pytest.mark.browser

PAGES = (
    "/", "/run?run=ill", "/run?run=well&axis=time&smooth=EMA+0.9", "/compare?runs=ill&runs=well", "/tokens?run=ill",
    "/rollouts?run=ill", "/alerts", "/rules", "/forecasts",
)  # fmt: skip
SIZES = {"wide": {"width": 1500, "height": 1000}, "phone": {"width": 390, "height": 844}}
UNSEEN = """() => {
  let node = document.activeElement;
  while (node?.shadowRoot?.activeElement) node = node.shadowRoot.activeElement;
  if (!node || node === document.body) return "";
  const drawn = (one) => {
    const look = getComputedStyle(one), ring = look.outlineStyle !== "none" && parseFloat(look.outlineWidth) > 0;
    return ring || look.boxShadow !== "none" || one.matches(":focus-within:not(:focus)") && parseFloat(look.borderTopWidth) > 0;
  };
  let one = node;
  for (let i = 0; i < 5 && one; i++, one = one.parentElement) if (drawn(one)) return "";
  return node.outerHTML.slice(0, 200);
}"""
"""What has the focus without an outline, a shadow or a border that shows it; empty where it shows."""
STOPS = 30
"""Presses of the tab key on a page."""


def opened(page, address):
    """The page, once it is drawn."""
    page.goto(address)
    drawn(page)


def drawn(page):
    """Wait until all of it is there, in its size."""
    expect(page.locator(".rl-who")).to_be_visible()
    if any(name in page.url for name in ("/run?", "/compare", "/tokens")):
        expect(page.locator(".u-over").first).to_be_visible()
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize(("scheme", "begins"), [("light", "wide"), ("dark", "phone")])
def test_axe_finds_nothing_on_any_page(shared_app, page, filled, scheme, begins):
    """Contrast, names and structure, wide and on a phone, in both themes; a page opened in one size changes to the other."""
    page.emulate_media(color_scheme=scheme)
    sizes = sorted(SIZES, key=lambda size: size != begins)
    found = {}
    for address in PAGES:
        page.set_viewport_size(SIZES[begins])
        opened(page, f"{shared_app}{address}")
        for size in sizes:
            page.set_viewport_size(SIZES[size])
            drawn(page)
            for wrong in Axe().run(page).response["violations"]:
                found[f"{size} {address}: {wrong['help']}"] = [node["html"][:200] for node in wrong["nodes"][:3]]
    assert found == {}


def test_what_the_keyboard_reaches_shows_that_it_has_the_focus(shared_app, page, filled):
    """On the page of a run, the list and the incidents, stop by stop."""
    unseen = []
    for address in ("/run?run=ill", "/", "/alerts"):
        opened(page, f"{shared_app}{address}")
        for _ in range(STOPS):
            page.keyboard.press("Tab")
            unseen.append((address, page.evaluate(UNSEEN)))
    assert [one for one in unseen if one[1]] == []


def test_on_a_phone_the_strip_is_above_the_fold_and_nothing_is_wider_than_the_screen(shared_app, page, filled):
    """Before controls and drawer, which follow it."""
    page.set_viewport_size({"width": 390, "height": 844})
    opened(page, f"{shared_app}/run?run=ill")
    strip, drawer = page.locator(".st-key-board-strip").bounding_box(), page.locator(".st-key-drawer").bounding_box()
    assert strip["y"] < 844 / 2
    assert strip["y"] + strip["height"] < page.locator(".st-key-controls").bounding_box()["y"] < drawer["y"]
    assert drawer["y"] < page.locator(".st-key-board-all").bounding_box()["y"]
    for address in PAGES:
        opened(page, f"{shared_app}{address}")
        assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth") <= 390, address


def test_on_a_phone_families_open_at_a_tap_and_stay_so_through_a_search(shared_app, page, shared_store):
    """A list of names first; on a desk nothing is folded."""
    more = {"entropy": 1.0, "grad_norm": 1.0, "mismatch/k3": 0.1, "completions/mean_length": 9.0}
    write(shared_store, "families", steps=range(1, 101), metrics=more, end=RunState.FINISHED)
    page.set_viewport_size({"width": 390, "height": 844})
    opened(page, f"{shared_app}/run?run=families")
    below = page.locator(".st-key-board-all")
    heads, charts = below.get_by_role("button", expanded=False), below.locator("figure.panel")
    expect(below.get_by_role("button", name="Reward", exact=True)).to_have_attribute("aria-expanded", "false")
    expect(charts).to_have_count(0)
    many = heads.count()
    below.get_by_role("button", name="Reward", exact=True).click()
    expect(charts.first).to_be_visible()
    expect(heads).to_have_count(many - 1)
    page.get_by_role("textbox", name="Search metrics").fill("entropy")
    page.keyboard.press("Enter")
    expect(below.get_by_role("heading", name=re.compile("metrics match"))).to_be_visible()
    expect(charts.first).to_contain_text("entropy")
    page.get_by_role("textbox", name="Search metrics").fill("")
    page.keyboard.press("Enter")
    expect(below.get_by_role("button", name="Reward", exact=True)).to_have_attribute("aria-expanded", "true")
    page.set_viewport_size({"width": 1500, "height": 1000})
    expect(below.get_by_role("button", name="Reward", exact=True)).to_have_count(0)
    expect(below.get_by_role("heading", name="Reward")).to_be_visible()
    expect(charts.nth(2)).to_be_visible()
