"""The sixteen things that people do at a dashboard, each from the list of runs, with the presses that it takes at most.

Typing is no press; a choice in a list counts two. A reset that a trainer carries out is in the tests of the reset, a
rule and its trial in those of the pages: here only the way to them is counted.
"""

import re
from pathlib import Path

import pytest
from contact_sheet import alive, make
from playwright.sync_api import expect
from waiting import until

from rlwatch.step_notes import step_notes
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser

COUNTING = """addEventListener("pointerdown", (event) => {
  if (event.isTrusted) sessionStorage.presses = Number(sessionStorage.presses ?? 0) + 1;
}, true);"""


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    """The runs of the contact sheet."""
    where = tmp_path_factory.mktemp("sixteen") / "store"
    make(where)
    return str(where)


@pytest.fixture
def runs(shared_app, page):
    """The list of runs, whose presses are counted from now on."""
    page.add_init_script(COUNTING)
    page.goto(shared_app)
    expect(page.get_by_role("link", name="math-7b-s3")).to_be_visible()
    settled(page)
    return page


def settled(page):
    """Wait until the page has taken over its first picture, under which a press is tried again, and has nothing to do."""
    expect(page.locator("html")).to_have_attribute("data-rl-first", re.compile("over|none"))
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")


def presses(page):
    """How often the mouse was pressed in this tab."""
    return page.evaluate("Number(sessionStorage.presses ?? 0)")


def searching(page):
    """Press / until the search has the focus: the page's keys may load after its rows. What is typed next is all of it."""

    def focused():
        if page.evaluate("document.activeElement.tagName") != "INPUT":
            page.keyboard.press("/")
            page.wait_for_timeout(300)
        return page.evaluate("document.activeElement.tagName") == "INPUT"

    until(focused, "the search with the focus")
    page.keyboard.press("Control+A")


def opened(page, name="math-7b-s3"):
    """The page of a run, opened from the list: one press."""
    page.get_by_role("link", name=name).click()
    expect(page.locator("figure").first).to_be_visible()
    settled(page)
    return page


def test_1_and_2_the_run_in_danger_and_when_it_began(runs):
    """At a glance: first in the list, with the step, and the reason in the same row."""
    first = runs.locator("tbody tr").first
    expect(first).to_contain_text("collapsed@220")
    expect(first).to_contain_text("entropy fell")
    assert presses(runs) == 0


def test_3_why_and_which_tokens(runs):
    """The likely cause on the run's page; the tokens of a spike from its run."""
    opened(runs)
    expect(runs.locator(".rl-why", has_text="Likely")).to_contain_text("step 220")
    assert presses(runs) == 1
    runs.go_back()
    settled(runs)
    opened(runs, "spiked")
    runs.get_by_role("button", name="Tokens", exact=True).click()
    expect(runs.locator(".rl-step")).to_contain_text("Step 80")
    assert presses(runs) == 3


def test_4_completions_before_and_after_beside_each_other(runs):
    """From the run's page: two steps are compared without a further press."""
    opened(runs, "seed3")
    runs.get_by_role("link", name="Rollouts").first.click()
    expect(runs.get_by_text("Compared with step")).to_be_visible()
    expect(runs.locator("tr.opens", has_text="reward").first).to_be_visible()
    assert presses(runs) == 2


def test_5_two_runs_on_one_axis_and_what_differs_in_their_settings(runs):
    """Two boxes and a button; the charts come before the tables."""
    for name in ("sweep-lr1e-06-s0", "sweep-lr3e-06-s0"):
        runs.get_by_role("checkbox", name=f"Select {name}").click()
        settled(runs)
    runs.get_by_role("button", name="Compare 2 runs").click()
    chart, table = runs.locator("figure").first, runs.get_by_text("Settings that differ")
    expect(chart).to_be_visible()
    expect(table).to_be_visible()
    assert chart.bounding_box()["y"] < 800 < table.bounding_box()["y"]
    assert presses(runs) == 3


def test_6_seeds_with_mean_and_spread(runs):
    """A search, one box for all of a group, a button, and a choice."""
    runs.get_by_role("textbox", name="Search").fill("sweep")
    runs.keyboard.press("Enter")
    expect(runs.locator("tbody tr")).to_have_count(4)
    settled(runs)
    for place in range(4):
        runs.locator("tbody input").nth(place).click()
        settled(runs)
    runs.get_by_role("button", name="Compare 4 runs").click()
    expect(runs.locator("figure").first).to_be_visible()
    settled(runs)
    runs.get_by_role("combobox", name="Group by").click()
    runs.get_by_role("option", name="optim.lr").click()
    expect(runs.locator(".chip").first).to_contain_text("mean ± std")
    assert presses(runs) <= 12


def test_7_smoothed_logarithmic_and_by_time_without_a_round_trip(runs):
    """Two choices and a box, all by the browser."""
    opened(runs)
    sent, before = [], presses(runs)
    runs.on("websocket", lambda socket: socket.on("framesent", sent.append))
    runs.get_by_label("Smooth").select_option("EMA 0.9")
    runs.get_by_label("Axis").select_option("time")
    runs.get_by_label("Log").click()
    expect(runs).to_have_url(re.compile(r"smooth=EMA.*log=true|log=true.*smooth=EMA"))
    assert sent == []
    assert presses(runs) - before + 2 * 2 <= 5


def test_8_charts_are_pinned_arranged_and_kept(runs):
    """A star each, two presses to move one, four to keep them by name."""
    opened(runs)
    for name in ("reward/mean", "policy/entropy"):
        runs.get_by_role("button", name=f"Pin {name}").last.click()
        expect(runs.get_by_role("button", name=f"Unpin {name}").first).to_be_visible()
        settled(runs)
    before = presses(runs)
    runs.get_by_role("button", name="More of policy/entropy").first.click()
    runs.get_by_role("button", name="Move back").click()
    expect(runs.locator("figure").first).to_have_attribute("data-metric", "entropy")
    settled(runs)
    runs.get_by_role("button", name="Layouts").click()
    runs.get_by_label("Name").fill("mine")
    runs.keyboard.press("Enter")
    settled(runs)
    runs.get_by_role("button", name="Save the pinned charts").click()
    expect(runs.get_by_role("button", name="mine · 2 charts")).to_be_visible()
    assert presses(runs) - before <= 4


def test_9_a_metric_by_words(runs):
    """By keyboard alone: / and its name in words."""
    opened(runs)
    before = presses(runs)
    searching(runs)
    runs.keyboard.type("response length")
    runs.keyboard.press("Enter")
    expect(runs.locator("h3", has_text="match")).to_be_visible()
    expect(runs.locator('figure[data-metric="completions/mean_length"]').first).to_be_visible()
    assert presses(runs) == before


def test_10_a_note_at_a_step(runs, shared_store):
    """A press on the step, the form, and its button."""
    opened(runs)
    before, known = presses(runs), len(step_notes(open_store(shared_store), "danger"))
    runs.locator(".u-over").first.click(position={"x": 200, "y": 20})
    expect(runs).to_have_url(re.compile(r"at=\d+"))
    settled(runs)
    runs.get_by_role("button", name="Notes").click()
    runs.get_by_label("Note", exact=True).fill("the judge was swapped")
    runs.get_by_role("button", name="Add note").click()
    expect(runs.get_by_text("the judge was swapped").first).to_be_visible()
    until(lambda: len(step_notes(open_store(shared_store), "danger")) == known + 1, "the note in the store")
    assert presses(runs) - before == 3


def test_11_acknowledged_and_snoozed(runs, shared_store):
    """On the run's page by one press; a snooze from the incident."""
    opened(runs)
    runs.get_by_role("button", name="Acknowledge").click()
    expect(runs.get_by_text("Acknowledged by ann")).to_be_visible()
    assert presses(runs) == 2
    runs.get_by_role("link", name="Incidents").click()
    runs.get_by_text("entropy collapse").first.click()
    dialog = runs.get_by_role("dialog")
    expect(dialog).to_be_visible()
    settled(runs)
    dialog.get_by_text("Snooze", exact=True).first.click()
    settled(runs)
    dialog.get_by_role("button", name="Snooze").last.click()
    expect(runs.get_by_text("Snoozed by ann")).to_be_visible()
    assert presses(runs) == 6
    assert open_store(shared_store).silences()


def test_12_the_rules(runs):
    """One press to all rules; what a changed one would have fired is tested in the pages."""
    runs.get_by_role("link", name="Rules").click()
    expect(runs.get_by_role("combobox", name="Rule")).to_be_visible()
    assert presses(runs) == 1


def test_13_the_way_to_a_reset(runs, shared_store):
    """Two presses to the form, with what it needs and whether that is so now."""
    alive(Path(shared_store))
    opened(runs)
    runs.get_by_role("button", name="Reset reference…").click()
    expect(runs.get_by_role("dialog")).to_contain_text("the run logs KL to a reference")
    assert presses(runs) == 2


def test_14_where_the_time_goes(runs):
    """Seconds a step on top; the stages behind one press."""
    opened(runs)
    expect(runs.locator(".rl-facts").first).to_contain_text("/step")
    runs.get_by_text("Stages of the newest steps").click()
    expect(runs.get_by_text("weight sync").first).to_be_visible()
    assert presses(runs) == 2


def test_15_runs_by_a_setting_and_a_report(runs):
    """A search by keyboard, the run, and the file."""
    searching(runs)
    runs.keyboard.type("lr=3e-6 max_steps=1000 math")
    runs.keyboard.press("Enter")
    expect(runs.locator("tbody tr")).to_have_count(1)
    settled(runs)
    opened(runs)
    with runs.expect_download() as saved:
        runs.get_by_role("button", name="Report").click()
    assert "Collapsed at step 220" in saved.value.path().read_text(encoding="utf-8")
    assert presses(runs) == 2


def test_16_a_phone_shows_the_verdict_first(shared_app, page):
    """Headline, since when and the buttons above the first chart, without a press."""
    page.add_init_script(COUNTING)
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{shared_app}/run?run=danger")
    verdict, chart = page.locator(".rl-verdict").first, page.locator(".u-over").first
    expect(verdict).to_contain_text("Collapsed at step 220")
    expect(chart).to_be_visible()
    settled(page)
    assert verdict.bounding_box()["y"] < chart.bounding_box()["y"] < 844
    assert presses(page) == 0
