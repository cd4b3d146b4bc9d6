"""What only a browser can tell of the rollouts page: from a spike to what was written, two steps beside, long text."""

import re

import numpy as np
import pytest
from playwright.sync_api import expect
from rollout_world import batch, write_rollouts
from token_world import Spiked
from waiting import until

pytestmark = pytest.mark.browser


def spiked(step):
    """A localised step of which one culprit lies in a completion that was kept, and the text of its response was."""
    one = Spiked(step, blamed=2)
    culprits, response = one.batches()
    text = batch(step).columns["completion"][5]
    at = text.index("answer")
    culprits.columns.update({
        "text": ["answer", " the"], "before": [text[at - 6 : at], " We"], "after": [text[at + 6 : at + 12], " sum"],
        "text_position": np.array([at, 0]), "prompt": ["Name a prime above 90.", "How many?"], "reward": np.array([1.0, 0.0]),
    })  # fmt: skip
    return [one.event(), culprits, response]


def test_from_a_spike_to_the_rollout_it_was_in_and_back(shared_app, page, shared_store):
    """One press each way; culprits are marked in the text, and text is text. The page fixture fails on any dialog."""
    write_rollouts(shared_store, run_id="spiked", more=spiked(61), hostile=True, long=130_000)
    page.goto(f"{shared_app}/tokens?run=spiked")
    page.get_by_role("button", name="Rollouts", exact=True).click()
    expect(page).to_have_url(re.compile(r"rollouts.*from=61"))
    rows = page.locator("tr.opens", has_text="culprit: token ratio")
    expect(rows.first).to_be_visible()
    rows.first.click()
    expect(page.locator("mark", has_text="answer").first).to_be_visible()
    expect(page).to_have_url(re.compile(r"rollout=1\.61\.0\.5"))
    page.reload()
    expect(page.locator("mark", has_text="answer").first).to_be_visible()

    page.goto(f"{shared_app}/rollouts?run=spiked&rollout=1.61.0.0")
    expect(page.locator(".rl-text").filter(has_text="<script>alert(1)</script>").first).to_be_visible()
    assert page.locator("img[src='x']").count() == 0

    page.get_by_role("button", name="Tokens", exact=True).click()
    expect(page.locator(".rl-step")).to_contain_text("Step 61")


def above(locator):
    """Pixels from the top of the page; 0 of a node that is just being drawn anew."""
    return locator.evaluate("node => node.getBoundingClientRect().y + window.scrollY")


def test_a_step_beside_another_and_a_link_that_restores_it(shared_app, page, shared_store):
    """The prompts of both, what changed first, the answers beside each other; and on a telephone below each other."""
    write_rollouts(shared_store, run_id="beside")
    page.goto(f"{shared_app}/rollouts?run=beside&at=1&beside=51&live=false")
    changed = page.locator("tr.opens", has_text="reward positive → 0")
    expect(changed).to_have_count(2)
    page.locator("tr.opens", has_text="Sort 3, 1, 2.").last.click()
    expect(page).to_have_url(re.compile(r"at=1&beside=51.*which=id3"))
    expect(page.locator(".rl-panel", has_text="Step 51, 2 answers")).to_be_visible()
    left, right = (page.locator(".rl-panel", has_text=f"Step {step}, 2 answers") for step in (1, 51))
    until(lambda: 0 < above(left) == above(right), "both answers beside each other")
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    expect(right).to_be_visible()
    until(lambda: 0 < above(left) < above(right), "the answers below each other")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def said_all(page, messages):
    """Number of messages once the server has said all of the page: nothing more for a second."""
    sent = -1
    while sent < len(messages):
        sent = len(messages)
        page.wait_for_timeout(1000)
    return sent


def test_an_answer_of_32_000_tokens_is_folded_and_opens(shared_app, page, shared_store, messages):
    """130 000 characters: the list stays small, the end is seen, and opening asks the server for nothing."""
    write_rollouts(shared_store, run_id="folded", long=130_000)
    page.goto(f"{shared_app}/rollouts?run=folded&only=flagged&live=false")
    fold = page.locator("details.rl-fold").first
    expect(fold.locator("summary")).to_contain_text("more characters")
    expect(page.locator(".rl-text", has_text="The answer is 3, 2, 1.").first).to_be_visible()
    sent = said_all(page, messages)
    fold.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(fold).to_have_attribute("open", "")
    assert sum(messages[sent:]) < 10_000
    assert max(messages) < 1_000_000
