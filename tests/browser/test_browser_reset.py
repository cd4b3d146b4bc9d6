"""A person sees a live run in the browser, resets its reference, and sees it done."""

import re

import pytest
from playwright.sync_api import expect
from waiting import until

from rlwatch.records import CommandStatus, RunState
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser


def open_run(page, app, trainer):
    """From the list of runs to the run's page, by its link."""
    page.goto(app)
    page.get_by_role("link", name=trainer.name).click()
    expect(page.locator(".rl-name")).to_contain_text(trainer.name)


def send_reset(page, trainer, why):
    """Through the dialog, typing the name."""
    page.get_by_role("button", name="Reset reference…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("the run is live")
    expect(dialog).to_contain_text("no collapse is firing")
    send = dialog.get_by_role("button", name="Send")
    expect(send).to_be_disabled()
    reason = dialog.get_by_label("Why")
    reason.fill(why)
    reason.press("Tab")  # what was typed is sent when the field is left
    expect(reason).to_have_value(why)
    dialog.get_by_label(re.compile("^Type")).press_sequentially(trainer.name)
    expect(send).to_be_enabled()
    expect(reason).to_have_value(why)
    send.click()
    expect(dialog).to_be_hidden()


def kl_by_step(store, run_id):
    series = store.series(run_id, ["policy/kl_ref_k3"])["policy/kl_ref_k3"]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def reset_and_see(page, app, trainer, store_url):
    """The whole way; returns the settled command and KL by step, as stored."""
    open_run(page, app, trainer)
    send_reset(page, trainer, "KL saturated, says the test")
    expect(page.get_by_text(re.compile(r"done at step \d+"))).to_be_visible()
    store = open_store(store_url)
    (command,) = store.commands(trainer.run_id)
    after = (command.finished_step or 0) + 1
    until(lambda: after in kl_by_step(store, trainer.run_id), f"step {after} is stored")
    event = next(e for e in store.events(trainer.run_id) if e.kind == "reference_reset")

    assert (command.status, command.why) == (CommandStatus.DONE, "KL saturated, says the test")
    assert event.step == command.finished_step
    assert trainer.alive()
    assert store.run(trainer.run_id).state is RunState.RUNNING
    return command, kl_by_step(store, trainer.run_id)


def test_the_reference_of_a_live_loop_is_reset_from_the_browser(train, app, page, store_url):
    """A loop of one's own: queued, claimed, done, with the row to see."""
    trainer = train("live_loop.py", steps=20)
    command, kl = reset_and_see(page, app, trainer, store_url)
    assert kl[command.finished_step] > 0.02
    assert kl[command.finished_step + 1] < 0.01
    expect(page.get_by_text(command.result)).to_be_visible()


@pytest.mark.torch
@pytest.mark.thorough
def test_the_reference_of_a_live_trl_training_is_reset_from_the_browser(train, app, page, store_url):
    """Real GRPO training: KL to the reference is zero at the next step, in the store."""
    trainer = train("live_trl.py", steps=25)
    command, kl = reset_and_see(page, app, trainer, store_url)
    assert kl[command.finished_step] > 1e-4
    assert abs(kl[command.finished_step + 1]) < 1e-6
    expect(page.get_by_text("reference reset", exact=True).first).to_be_visible()
