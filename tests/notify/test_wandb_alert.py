"""The alert of the wandb run that is live in this process."""

from __future__ import annotations

import logging
import sys
import types

import pytest
from message_examples import MESSAGE, message_with

from rlwatch.notify.wandb_alert import WandbNotifier
from rlwatch.ports import Delivery
from rlwatch.testing.notifier_contract import NotifierContract, assert_no_secret

SECRET = "contract-s3cret-value"


class FakeRun:
    """Takes alerts as wandb does: a title under 64 characters, one of three levels."""

    def __init__(self, error: Exception | None = None) -> None:
        self.alerts, self.error = [], error

    def alert(self, title: str, text: str, level: str, wait_duration: float) -> None:
        if self.error:
            raise self.error
        assert len(title) < 64
        assert level in {"INFO", "WARN", "ERROR"}
        assert wait_duration  # 0 would mean a minute
        self.alerts.append((level, title, text))


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    run = FakeRun()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    return run


class TestWandb(NotifierContract):
    """On a live run."""

    @pytest.fixture
    def notifier(self, live):
        return WandbNotifier()


def test_the_alert_goes_to_the_live_run(live: FakeRun):
    """At the level of its severity; what ends is no error."""
    notifier = WandbNotifier()
    for message in (MESSAGE, message_with(alert={"severity": "warning"}), message_with(event="resolved")):
        assert notifier.deliver(message).ok

    assert [level for level, *_ in live.alerts] == ["ERROR", "WARN", "INFO"]
    assert live.alerts[0][1].startswith("[firing CRITICAL] entropy_collapse at step 412")
    assert "m-0123456789" in live.alerts[0][2]


def test_without_a_live_run_messages_are_left_to_the_process_that_has_one(monkeypatch: pytest.MonkeyPatch):
    """Whether wandb is not imported or its run has ended."""
    for module in (None, types.SimpleNamespace(run=None)):
        monkeypatch.setitem(sys.modules, "wandb", module)

        assert not WandbNotifier().present()
        assert WandbNotifier().deliver(MESSAGE) == Delivery(False, "no wandb run is live in this process")


def test_what_wandb_raises_is_an_outcome_without_its_words(live: FakeRun, caplog: pytest.LogCaptureFixture):
    """They could hold the key."""
    caplog.set_level(logging.DEBUG)
    live.error = RuntimeError(SECRET)
    delivery = WandbNotifier().deliver(MESSAGE)

    assert delivery == Delivery(False, "wandb raised RuntimeError")
    assert_no_secret((SECRET,), repr(delivery), caplog.text)


def test_the_real_run_takes_alerts_under_these_names():
    """Against the signature of the installed wandb."""
    inspect = pytest.importorskip("inspect")
    run = pytest.importorskip("wandb.sdk.wandb_run").Run

    assert {"title", "text", "level", "wait_duration"} <= set(inspect.signature(run.alert).parameters)
