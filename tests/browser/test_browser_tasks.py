"""A person's first minute: which run is in danger, from there to what may be done, two tabs, and back.

The sixteen tasks with their presses are in test_browser_sixteen.py. The other tasks stand where their pages are tested: from a spike to its rollout and a step beside one fifty later
(rollouts), four runs and their settings, seeds as a band, a post-mortem (compare), a reset (reset), pause and a lower
rate of real training (commands), acknowledging, silencing, judging a forecast, a rule and its webhook (pages), a link
that restores everything (charts), search to deletion (fleet), quantiles (tokens).
"""

import re
import time

import pytest
from playwright.sync_api import expect
from test_browser_charts import strip, view
from test_browser_commands import choose
from test_browser_fleet import settled
from test_browser_pages import write

from rlwatch.records import Alert, AlertState, CommandStatus, Event, Finding, RunState, Severity
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser


def firing(run_id, kind, severity, onset):
    """An alert that began at a step, and the finding behind it."""
    alert = Alert(f"{run_id}-{kind}", run_id, kind, kind, severity, AlertState.FIRING, onset, onset + 10, "it fell",
                  fired_at=time.time())  # fmt: skip
    return {"alerts": [alert], "findings": [Finding("d", kind, severity, onset + 10, onset, "it fell")]}


def test_the_run_in_danger_is_first_with_why_and_a_click_tells_what_to_do(shared_app, page, shared_store):
    """Before one that is watched, one that is well and one that is over; then cause, cure and the command."""
    write(shared_store, "calm", name="danger-calm", steps=range(1, 101))
    write(shared_store, "done", name="danger-done", steps=range(1, 101), end=RunState.FINISHED)
    drifts = firing("drifts", "kl_drift", Severity.WARNING, 60)
    write(shared_store, "drifts", name="danger-drifts", steps=range(1, 101), **drifts)
    lost = firing("lost", "entropy_collapse", Severity.CRITICAL, 70)
    write(shared_store, "lost", name="danger-lost", steps=range(1, 101), **lost)
    page.goto(f"{shared_app}/?search=danger-")
    expect(page.get_by_text("2 runs need attention")).to_be_visible()
    rows = page.locator("tbody tr")
    expect(rows.locator(".name")).to_have_text(["danger-lost", "danger-drifts", "danger-calm", "danger-done"])
    expect(rows.first).to_contain_text("collapsed@70")
    expect(rows.first).to_contain_text("entropy fell; still running")
    settled(page)
    rows.first.get_by_role("link").click()
    expect(page.locator(".rl-verdict")).to_contain_text("Collapsed at step 70: entropy fell; still running")
    expect(page.locator(".rl-why", has_text="Likely")).to_contain_text("step 70")
    expect(page.locator(".rl-why", has_text="Do")).to_contain_text(re.compile(r"1 .*2 .*3 "))
    page.get_by_role("button", name="Reset reference…").click()
    expect(page.get_by_role("dialog")).to_contain_text("a reset now would make the collapsing policy the anchor")


def test_two_tabs_see_the_same_run_each_in_its_own_way(shared_app, page, shared_store):
    """What is asked in one is seen in the other, which keeps its range; neither changes the address of the other."""
    write(shared_store, "tabs", steps=range(1, 201))
    page.goto(f"{shared_app}/run?run=tabs&from=50&to=150")
    strip(page)
    shown = view(page)
    other = page.context.new_page()
    other.goto(f"{shared_app}/run?run=tabs&smooth=EMA+0.9")
    strip(other)
    dialog = choose(other, "Save checkpoint…")
    dialog.get_by_role("button", name="Send").click()
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Cancel save checkpoint")).to_be_visible()
    assert view(page) == shown
    assert view(other) != shown
    assert "from=" not in other.url
    assert "smooth=" not in page.url
    page.get_by_role("button", name="Cancel save checkpoint").click()
    expect(other.get_by_role("button", name="Cancel save checkpoint")).to_have_count(0)
    [command] = open_store(shared_store).commands("tabs")
    assert command.status is CommandStatus.CANCELLED
    other.close()


@pytest.mark.thorough
def test_back_leads_through_the_pages_as_they_were(shared_app, page, shared_store):
    """From the list that was searched to a run, its range, its tokens, and all the way back; and forward again."""
    write(shared_store, "way", name="wayfarer", steps=range(1, 201), findings=[Event("gradient_localised", step=40)])
    write(shared_store, "stays", name="stay-at-home")  # a list of one run has no search
    page.goto(f"{shared_app}/?search=wayfarer")
    page.get_by_role("link", name="wayfarer").click()
    expect(page).to_have_url(re.compile(r"/run\?run=way"))
    strip(page)
    settled(page)
    page.get_by_role("button", name="Tokens", exact=True).click()
    expect(page.locator(".rl-step")).to_contain_text("Step 40")
    page.go_back()
    expect(page.locator(".rl-facts").first).to_contain_text("step 200")
    strip(page)
    page.go_back()
    expect(page.get_by_role("textbox", name="Search")).to_have_value("wayfarer")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.go_forward()
    expect(page.locator(".rl-facts").first).to_contain_text("step 200")
