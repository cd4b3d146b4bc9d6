"""A person pauses real training in the browser, lowers its rate, lets it go on and stops it."""

import re
import time

import pytest
from playwright.sync_api import TimeoutError as NotInTime
from playwright.sync_api import expect
from waiting import until

from rlwatch.control.commands import request
from rlwatch.records import CommandStatus, RunInfo, RunState, StepRecord
from rlwatch.store.url import open_store

pytestmark = [pytest.mark.browser, pytest.mark.torch]


def choose(page, words):
    """From the menu to the dialog. News of the run draw the page anew, which closes a menu: then it is opened again."""
    for _ in range(30):
        page.get_by_role("button", name="Commands", exact=True).click()
        try:
            page.get_by_text(words, exact=True).click(timeout=4000)
        except NotInTime:
            continue
        break
    return page.get_by_role("dialog")


def last_step(store, run_id):
    return store.run(run_id).last_step


@pytest.mark.thorough
def test_live_training_is_paused_lowered_resumed_and_stopped(train, app, page, store_url):
    """Each through its dialog; the page says what the trainer did, and the trainer did it."""
    trainer, store = train("live_trl.py", steps=5), open_store(store_url)
    page.goto(f"{app}/run?run={trainer.run_id}")
    expect(page.locator(".rl-name")).to_contain_text(trainer.name)

    dialog = choose(page, "Pause…")
    dialog.get_by_label("Why").fill("look at the samples")
    dialog.get_by_role("button", name="Send").click()
    expect(page.get_by_test_id("stMain").locator(".rl-why").first).to_contain_text(
        re.compile(r"paused at step \d+ by .*: look at the samples")
    )
    expect(page.get_by_role("button", name="Resume…")).to_be_visible()

    dialog = choose(page, "Lower learning rate…")
    expect(dialog).to_contain_text("current learning rate:")
    dialog.get_by_role("button", name="Send").click()
    expect(page.get_by_text(re.compile(r"learning rate 0.0005 -> 0.00015")).first).to_be_visible()
    stood = {command.finished_step for command in store.commands(trainer.run_id)}
    assert len(stood) == 1
    assert last_step(store, trainer.run_id) <= max(stood)

    page.get_by_role("button", name="Resume…").click()
    page.get_by_role("dialog").get_by_role("button", name="Send").click()
    expect(page.get_by_text(re.compile(r"resumed after")).first).to_be_visible()
    until(lambda: last_step(store, trainer.run_id) > max(stood) + 1, "it trains on")
    rate = store.last_values(trainer.run_id)["learning_rate"][1]

    dialog = choose(page, "Stop…")
    dialog.get_by_text("not saved").click()
    dialog.get_by_label(re.compile("^Type")).press_sequentially(trainer.name)
    dialog.get_by_role("button", name="Send").click()
    until(lambda: store.run(trainer.run_id).state is RunState.FINISHED, "it ends")
    expect(page.locator(".rl-facts").first).to_contain_text("finished")

    assert rate == pytest.approx(1.5e-4)
    assert [(c.kind, c.status) for c in store.commands(trainer.run_id)] == [
        (kind, CommandStatus.DONE) for kind in ("pause", "lower-lr", "resume", "stop")
    ]


def test_a_command_nobody_has_begun_is_taken_back_in_the_browser(app, page, store_url):
    """By its button, which then is gone."""
    store = open_store(store_url)
    writer = store.open_run(RunInfo("waiting", created_at=time.time()))
    writer.write([StepRecord(1, {"loss": 0.5}, time.time(), seq=1)])
    writer.heartbeat(time.time())
    request(store, "waiting", "save-checkpoint")
    page.goto(f"{app}/run?run=waiting")
    page.get_by_role("button", name="Cancel save checkpoint").click()
    until(lambda: store.commands("waiting")[0].status is CommandStatus.CANCELLED, "it is taken back")
    expect(page.get_by_role("button", name="Cancel save checkpoint")).to_have_count(0)
    writer.close()
