"""Four runs of a sweep side by side: what parted them, their settings, seeds as one band; and a report of the dead one."""

import math
import re
import time

import numpy as np
import pytest
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from playwright.sync_api import expect

from rlwatch.records import Finding, RunInfo, RunState, Severity, StepRecord
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser

STEPS, PARTED = 300, 200
RUNS = "&".join(f"runs=sweep-{place}" for place in range(4))


def sweep(store_url):
    """Two settings with two seeds each; the last run's gradient norm leaves those of the others, and it collapses."""
    store = open_store(store_url)
    for place, (lr, seed) in enumerate([(1e-6, 1), (1e-6, 2), (3e-6, 1), (3e-6, 2)]):
        draws = np.random.default_rng(place)
        bad = place == 3
        config = {"optim": {"lr": lr}, "seed": seed, "beta": 0.04}
        writer = store.open_run(RunInfo(f"sweep-{place}", "sweep", f"lr{lr:g}-s{seed}", "trl/grpo", config=config))
        rows = [
            {
                "reward": 0.2 + 0.5 * (1 - math.exp(-step / 100)) + 0.02 * draws.normal(),
                "grad_norm": (9.0 if bad and step >= PARTED else 1.0) * math.exp(0.2 * draws.normal()),
                "entropy": 0.05 if bad and step >= PARTED + 20 else 1.0 - step / 1000 + 0.02 * draws.normal(),
            }
            for step in range(1, STEPS + 1)
        ]
        writer.write([StepRecord(step, row, ts=time.time()) for step, row in enumerate(rows, 1)])
        if bad:
            fell = Finding("d", "entropy_collapse", Severity.CRITICAL, 240, 220, "entropy fell from 0.8 to 0.05")
            writer.write([fell])
        writer.finish(RunState.CRASHED if bad else RunState.FINISHED, "", time.time())
        writer.close()
    return store


@pytest.fixture(scope="module")
def swept(shared_store):
    """The sweep, written once for all tests."""
    return sweep(shared_store)


def lines(page):
    """The legend: a chip for each line of a chart."""
    return page.locator(".chip")


def test_four_runs_are_compared_with_the_settings_in_which_they_differ(shared_app, page, swept):
    """What parted first and where; only settings that differ; every run told in the tooltip."""
    page.goto(f"{shared_app}/compare?{RUNS}")
    expect(lines(page)).to_have_count(4)
    expect(page.get_by_text(re.compile("optim/grad_norm diverged first, at step 20"))).to_be_visible()
    settings = page.get_by_role("table").last
    for name in ("optim.lr", "seed"):
        expect(settings.get_by_role("cell", name=name, exact=True)).to_be_visible()
    expect(settings.get_by_role("cell", name="beta", exact=True)).to_have_count(0)
    chart = page.locator(".u-over").first
    chart.scroll_into_view_if_needed()
    chart.hover()
    for name in ("lr1e-06-s1", "lr3e-06-s2"):
        expect(page.locator(".tip")).to_contain_text(name)


def test_seeds_are_one_mean_in_its_band(shared_app, page, swept):
    """By a setting, and by the name without its number, both in the address."""
    page.goto(f"{shared_app}/compare?{RUNS}&group=optim.lr&metrics=reward/mean")
    expect(lines(page)).to_have_count(2)
    expect(lines(page).first).to_contain_text(re.compile(r"\(2 runs\)mean ± std"))
    page.locator(".u-over").first.hover()
    expect(page.locator(".tip")).to_contain_text("optim.lr")


DRAWN = """() => {
  const roots = [...document.querySelectorAll("*")].map((node) => node.shadowRoot).filter(Boolean);
  return roots.flatMap((root) => [...root.querySelectorAll("figure")]).map((node) => node.dataset.drawn);
}"""
"""The names of the lines in each chart."""


def test_a_run_is_hidden_shown_alone_and_taken_as_the_level_of_the_others_by_the_browser_alone(shared_app, page, swept):
    """Each is one step back, asks the script nothing, and is there after a reload."""
    sent = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda frame: sent.append(len(frame))))
    page.goto(f"{shared_app}/compare?{RUNS}&metrics=reward/mean")
    expect(lines(page)).to_have_count(4)
    expect(page.locator(".u-over").first).to_be_visible()
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
    before, length = len(sent), page.evaluate("history.length")

    page.get_by_role("button", name=re.compile("^Hide lr1e-06-s1")).click()
    assert page.evaluate(DRAWN) == ["1 2 3"]
    page.get_by_role("button", name=re.compile("^Show only lr3e-06-s1")).click()
    assert page.evaluate(DRAWN) == ["2"]
    page.get_by_role("button", name="Show all runs").click()
    page.get_by_label("Baseline").select_option("1")
    assert page.evaluate(DRAWN) == ["0 2 3"]
    page.get_by_label("Log").check()
    assert (len(sent) - before, page.evaluate("history.length") - length) == (0, 5)

    assert page.locator(".pictures circle").count() == 4
    assert page.locator(".pictures path").count() == 4

    page.reload()
    expect(page.locator(".u-over").first).to_be_visible()
    expect(page.get_by_label("Baseline")).to_have_value("1")
    assert page.evaluate(DRAWN) == ["0 2 3"]
    for _ in range(3):
        page.go_back()
    expect(page.get_by_label("Baseline")).to_have_value("")
    assert page.evaluate(DRAWN) == ["2"]


def test_a_chart_is_saved_as_a_picture_a_drawing_and_a_table_and_fills_the_screen(shared_app, page, swept):
    """From its menu, by keyboard as by mouse."""
    page.goto(f"{shared_app}/compare?{RUNS}&metrics=reward/mean")
    expect(page.locator(".u-over").first).to_be_visible()
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
    contents = {}
    for kind in ("PNG", "SVG", "CSV"):
        page.get_by_role("button", name="More of reward/mean").click()
        with page.expect_download() as saved:
            page.get_by_role("button", name=f"Save as {kind}").click()
        contents[saved.value.suggested_filename] = saved.value.path().read_bytes()
    assert sorted(contents) == ["reward_mean.csv", "reward_mean.png", "reward_mean.svg"]
    assert contents["reward_mean.png"].startswith(b"\x89PNG")
    assert contents["reward_mean.svg"].count(b"<path") == 4
    head, first, *_ = contents["reward_mean.csv"].decode().split("\r\n")
    assert (len(head.split(",")), first.split(",")[0]) == (5, "1")
    page.keyboard.press("j")
    page.keyboard.press("f")
    expect(page.locator("figure:fullscreen")).to_be_visible()
    page.keyboard.press("f")
    expect(page.locator("figure:fullscreen")).to_have_count(0)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("full screen")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_have_count(0)


def downloaded(page, tries=4):
    """The report; a click that falls into a run of the script is made again, as a person would."""
    for last in [False] * (tries - 1) + [True]:
        try:
            with page.expect_download(timeout=120_000 if last else 15_000) as saved:
                page.get_by_role("button", name="Report").click()
            return saved.value
        except PlaywrightTimeout:
            if last:
                raise
    return None


def test_a_post_mortem_is_one_file_with_the_cause(shared_app, page, swept):
    """From the page of a run that died; the same as `rlwatch report`."""
    page.goto(f"{shared_app}/run?run=sweep-3")
    expect(page.locator(".rl-verdict")).to_contain_text("Collapsed at step 220")
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
    saved = downloaded(page)
    report = saved.path().read_text(encoding="utf-8")
    assert saved.suggested_filename == "sweep-3-report.html"
    assert "Collapsed at step 220" in report
    assert "http://" not in re.sub(r'(xmlns|href)="[^"]*"', "", report)
