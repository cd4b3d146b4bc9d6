"""What only a browser can tell of the tokens page: clicks, hovering, text that stays text, a view that keeps still."""

import re

import pytest
from app_world import write_run
from playwright.sync_api import expect
from test_tokens_verdict import spreading
from token_world import HOSTILE, Spiked, counted, write_spikes

pytestmark = pytest.mark.browser


def culprit_rows(page):
    """The rows of the table of culprits."""
    return page.locator("tr.opens", has_text="micro-batch")


def test_a_token_and_its_row_choose_each_other(shared_app, page, shared_store):
    """By click on either; the address keeps the choice, hovering shows the numbers, a reload changes nothing."""
    write_spikes(shared_store, run_id="chosen", spiked=[Spiked(15), Spiked(20, words=HOSTILE, length=120, blamed=12)])
    page.goto(f"{shared_app}/run?run=chosen")
    page.get_by_role("button", name="Tokens", exact=True).click()
    expect(page.locator(".rl-step")).to_contain_text("Step 20")
    expect(page.locator(".token.chosen")).to_have_count(1)
    check_text_is_text(page)

    culprit_rows(page).nth(1).click()
    expect(page).to_have_url(re.compile(r"run=chosen.*step=20.*token=0\.1\.3\.\d+"))
    expect(page.locator(".token.chosen")).to_have_attribute("data-key", page.url.split("token=")[1])

    last = page.locator(".token.culprit").last
    key = last.get_attribute("data-key")
    last.hover()
    expect(page.locator(".tip")).to_contain_text("logp rollout")
    last.click()
    expect(page).to_have_url(re.compile(f"token={re.escape(key)}$"))
    expect(culprit_rows(page).and_(page.locator(".chosen"))).to_contain_text(f"position {key.split('.')[-1]}")
    page.reload()
    expect(page.locator(".token.chosen")).to_have_attribute("data-key", key)

    page.locator("tr.opens", has_text="15").first.click()
    expect(page.locator(".rl-step")).to_contain_text("Step 15")
    assert "token=" not in page.url


def check_text_is_text(page):
    """Scripts, markup, controls, directions: shown, and they do nothing. The page fixture fails on any dialog."""
    expect(page.locator(".rlwatch-response .text")).to_contain_text("<script>alert(1)</script>")
    for place in range(0, page.locator(".token").count(), 20):
        page.locator(".token").nth(place).hover()
    shown = page.locator(".rlwatch-response").inner_text()
    assert page.locator("img[src='x']").count() == 0
    assert "‹U+202E›" in shown
    assert "200 characters" in shown
    assert not set(shown) & set("\u202e\x00\x1b\u200b")


@pytest.mark.thorough
def test_a_huge_response_is_drawn_in_part_and_keeps_still_while_the_run_goes_on(
    shared_app, page, shared_store, messages
):
    """16 384 tokens; new steps arrive, and neither the place nor the choice is lost."""
    write_spikes(shared_store, run_id="huge", spiked=[Spiked(20, length=16384, blamed=8)])
    page.goto(f"{shared_app}/tokens?run=huge")
    expect(page.locator(".token.chosen")).to_be_visible()
    assert page.locator(".token").count() < 2_500
    assert max(messages) < 1_500_000
    page.locator(".rlwatch-response .text").evaluate("text => text.scrollTop = 40")

    write_spikes(shared_store, run_id="huge", spiked=[Spiked(38, attempt=2)], steps=40)

    expect(page.locator("tr.opens", has_text="38").first).to_be_visible()
    expect(page.locator(".rl-step")).to_contain_text("Step 20")
    assert page.locator(".rlwatch-response .text").evaluate("text => text.scrollTop") == 40


def test_quantiles_over_the_steps_are_drawn_and_told_on_hovering(shared_app, page, shared_store):
    """A band for each quantity; on a telephone below each other."""
    write_run(shared_store, "quantiles", metrics=spreading)
    page.goto(f"{shared_app}/tokens?run=quantiles")
    charts = page.locator("canvas")
    expect(charts.first).to_be_visible()
    box = charts.first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.get_by_text("99th percentile").first).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    expect(charts.nth(1)).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_distributions_of_a_live_run_are_maps_that_tell_their_quantiles_and_shares(shared_app, page, shared_store):
    """Hovering tells a step's quantiles and how many tokens lie there; a new step joins; a hole says nothing."""
    write_run(shared_store, "mapped", events=[counted(step) for step in (*range(1, 20), *range(28, 31))])
    page.goto(f"{shared_app}/tokens?run=mapped")
    chart = page.locator(".panel", has_text="entropy").locator(".u-over")
    expect(chart).to_be_visible()

    def point(part):
        box = chart.bounding_box()
        page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] / 2)

    tip = page.locator(".tip").first
    point(0.3)
    expect(tip).to_contain_text("step 9")
    expect(tip).to_contain_text("95th percentile")
    expect(tip).to_contain_text(re.compile(r"\d to [\d.]+≈ [\d.]+ %"))
    point(0.8)
    expect(tip).not_to_contain_text("percentile")

    write_run(shared_store, "mapped", steps=40, events=[counted(step, attempt=2) for step in range(31, 41)])
    point(0.95)
    expect(tip).to_contain_text("step 3")
    expect(tip).to_contain_text("median")
