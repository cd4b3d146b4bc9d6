"""A live run alerts, a person takes the alert on in the browser, and everybody who looks after the store leaves it be."""

import json
import re
import time

import pytest
from playwright.sync_api import expect
from typer.testing import CliRunner
from waiting import until

from rlwatch.alerts.config import load_config
from rlwatch.clock import ManualClock
from rlwatch.monitor.watchman import Watchman
from rlwatch.records import OutboxStatus
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser

RULES = """
default_rules = false

[notify.hook]
kind = "command"
argv = ["true"]

[notify.pager]
kind = "command"
argv = ["true"]

[[rules]]
name = "non-finite"
kinds = ["nonfinite"]
channels = ["hook"]
repeat_minutes = 60
escalate_after_minutes = 120
escalate_to = ["pager"]
only_live = false
"""
"""Repeats and escalates of a run that is not live, too: the watcher's clock goes on, the run's does not."""


def told(store):
    return [message.payload["event"] for message in store.outbox()]


def listed(store_url):
    """What ``rlwatch alerts list`` says of the one alert: its state, and why it is quiet."""
    from rlwatch.cli.app import app

    result = CliRunner().invoke(app, ["alerts", "list", "--store", store_url, "--format", "json"])
    [row] = json.loads(result.stdout)
    return row["state"], row["quiet"]


@pytest.mark.thorough
def test_an_alert_of_a_live_run_is_taken_on_in_the_browser(train, app, page, store_url, tmp_path, monkeypatch):
    """The row says who, so does the command line; a watcher who reminded before does not any more, nor escalates; the
    end is told.
    """
    file = tmp_path / "rlwatch.toml"
    file.write_text(RULES)
    monkeypatch.setenv("RLWATCH_CONFIG", str(file))
    trainer, store = train("live_loop.py", steps=3), open_store(store_url)
    failing = trainer.log.parent / "fail"
    clock = ManualClock(time.time())
    watcher = Watchman(store, load_config(file, env={}).policy, clock=clock)

    def delivered(count):
        done = [message.status is OutboxStatus.SENT for message in store.outbox()]
        return len(done) >= count and all(done)

    failing.touch()
    until(lambda: delivered(2), "firing, then critical, are told")
    clock.advance(61 * 60.0)
    assert watcher.look() == 1
    until(lambda: delivered(3), "the reminder is told")

    page.goto(f"{app}/alerts")
    page.get_by_role("link", name="acknowledge").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(re.compile(f"browser / {trainer.name}.*critical.*NaN or infinity"))
    dialog.get_by_label("What are you doing about it?").fill("rolled back")
    dialog.get_by_role("button", name="Acknowledge").click()
    expect(page.get_by_text("1 incident firing, 1 acknowledged")).to_be_visible()
    expect(page.get_by_text("acknowledged", exact=True)).to_be_visible()

    assert listed(store_url) == ("firing", "acknowledged by ann: rolled back")
    clock.advance(4 * 3600.0)
    assert watcher.look() == 0
    failing.unlink()
    until(lambda: "resolved" in told(store), "its end is told")
    assert sorted(told(store)) == ["escalated", "firing", "repeated", "resolved"]
    assert trainer.alive()
