"""The list of runs by hand: finding runs by their settings, naming, tagging, archiving, deleting with a way back."""

import re
import time

import pytest
from playwright.sync_api import expect

from rlwatch.records import Finding, RunInfo, RunState, Severity, StepRecord
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser


def sweep(store_url, project):
    """Four finished runs: two settings, two seeds."""
    store = open_store(store_url)
    for place, (lr, seed) in enumerate([(3e-5, 1), (3e-5, 2), (1e-6, 1), (1e-6, 2)]):
        config = {"optim": {"lr": lr}, "seed": seed}
        info = RunInfo(f"{project}-{place}", project, f"lr{lr:g}-s{seed}", "trl/grpo", config=config)
        writer = store.open_run(info)
        writer.write([StepRecord(s, {"reward": place + s / 100}, ts=time.time()) for s in range(1, 31)])
        writer.finish(RunState.FINISHED, "", time.time())
        writer.close()
    return store


def settled(page):
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")


def test_runs_are_found_named_tagged_archived_deleted_and_brought_back(shared_app, page, shared_store):
    """What a person does to a sweep on a Monday; a reload shows the same."""
    store = sweep(shared_store, "monday")
    page.goto(f"{shared_app}/?project=monday")
    search = page.get_by_role("textbox", name="Search")
    search.fill("lr=0.00003")
    search.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page).to_have_url(re.compile(r"search=lr"))
    page.reload()
    expect(page.locator("tbody tr")).to_have_count(2)

    page.get_by_role("checkbox", name="Select lr3e-05-s1").check()
    page.get_by_role("button", name="Edit…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox", name="Name").fill("best one")
    tags = dialog.get_by_role("combobox", name="Tags")
    tags.fill("paper")
    tags.press("Enter")
    tags.press("Tab")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("link", name="best one")).to_be_visible()
    expect(page.locator(".tag")).to_have_text("paper")
    assert [(edit.by, edit.name, edit.tagged) for edit in store.edits("monday-0")] == [("ann", "best one", ("paper",))]

    page.get_by_role("button", name="Archive", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    settled(page)
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("Deleted 1 run.")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("link", name="best one")).to_be_visible()


def test_four_runs_are_ticked_sorted_grouped_and_compared(shared_app, page, shared_store):
    """By the head of a column and by keyboard; the address holds all of it."""
    sweep(shared_store, "four")
    page.goto(f"{shared_app}/?project=four")
    expect(page.locator("tbody tr")).to_have_count(4)
    page.get_by_role("button", name="reward").click()
    expect(page.locator("tbody .name").first).to_have_text("lr1e-06-s2")
    expect(page).to_have_url(re.compile("sort=reward"))

    page.goto(f"{shared_app}/?project=four&group=optim.lr")
    group = page.locator("tr.group").first
    expect(page.locator("tbody tr")).to_have_count(2)
    group.focus()
    group.press("Enter")
    expect(page.locator("tr.member")).to_have_count(2)
    expect(page).to_have_url(re.compile("open="))
    page.get_by_role("checkbox", name="Select optim.lr = 3e-05").check()
    page.get_by_role("checkbox", name="Select optim.lr = 1e-06").check()
    page.get_by_role("button", name="Compare 4 runs").click()
    expect(page).to_have_url(re.compile(r"/compare\?runs=.*four-3"))
    expect(page.get_by_text("Settings that differ")).to_be_visible()


def test_the_reason_is_in_sight_on_a_small_screen(shared_app, page, shared_store):
    """Nothing is cut and nothing scrolls sideways; small curves leave first."""
    sweep(shared_store, "small")
    store = open_store(shared_store)
    writer = store.open_run(RunInfo("small-lost", "small", "lost", "trl/grpo"))
    writer.write([StepRecord(s, {"reward": s / 100, "kl": 0.1, "entropy": 1.0}, ts=time.time()) for s in range(1, 31)])
    writer.write([Finding("d", "entropy_collapse", Severity.CRITICAL, 20, 15, "entropy fell from 0.8 to 0.05 nats")])
    writer.close()
    store.close()
    page.set_viewport_size({"width": 1024, "height": 768})
    page.goto(f"{shared_app}/?project=small")
    expect(page.get_by_text("entropy fell").first).to_be_visible()
    settled(page)
    assert page.locator(".rlwatch-table").evaluate("node => node.scrollWidth - node.clientWidth") <= 0


def test_a_phone_gets_cards_that_fit(shared_app, page, shared_store):
    """Nothing is cut and nothing scrolls sideways; a value that no row has takes no place."""
    sweep(shared_store, "phone")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{shared_app}/?project=phone")
    row = page.locator("tbody tr").first
    expect(row).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator(".rlwatch-table").evaluate("node => node.scrollWidth - node.clientWidth") <= 0
    expect(row.locator("td[data-label='reward']")).to_be_visible()
    expect(row.locator("td[data-label='KL']")).to_be_hidden()


def test_a_long_list_is_fetched_where_one_looks_and_let_go_of_elsewhere(shared_app, page, shared_store):
    """Two hundred runs: few are drawn at once, the last one is there when one scrolls to it, and can be ticked and opened."""
    store = open_store(shared_store)
    for place in range(200):
        writer = store.open_run(RunInfo(f"long-{place:03}", "long", f"long-{place:03}", "trl/grpo"))
        writer.write([StepRecord(1, {"reward": place / 100}, ts=time.time())])
        writer.finish(RunState.FINISHED, "", time.time())
        writer.close()
    store.close()
    page.goto(f"{shared_app}/?project=long&sort=reward%2C+highest")
    expect(page.locator("tbody .name").first).to_have_text("long-199")
    settled(page)
    assert page.locator("tbody .name").count() < 200
    page.get_by_test_id("stMain").evaluate("node => node.scrollTo(0, node.scrollHeight)")
    expect(page.get_by_role("link", name="long-000")).to_be_visible()
    assert page.locator("tbody .name").count() < 200
    page.get_by_role("checkbox", name="Select long-000").check()
    expect(page).to_have_url(re.compile("picked=long-000"))
    settled(page)
    expect(page.get_by_role("checkbox", name="Select long-000")).to_be_checked()
    page.get_by_role("link", name="long-000").click()
    expect(page).to_have_url(re.compile(r"/run\?run=long-000"))
