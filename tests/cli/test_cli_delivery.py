"""Alerts of runs whose trainer is gone are delivered by whatever rlwatch command runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from cli_helpers import Inbox, Invoke, record_run

from rlwatch.cli import ui
from rlwatch.cli.background import deliver_once, delivering
from rlwatch.cli.options import alerting_of, rules_of
from rlwatch.errors import ConfigError, StoreBusyError
from rlwatch.ports import Store
from rlwatch.records import Alert, AlertState, OutboxMessage, OutboxStatus, Severity
from rlwatch.store.url import open_store


def _put(store: Store, number: int = 1) -> None:
    """``number`` firing alerts whose messages wait."""
    record_run(store, "r", state=None)
    alerts = [
        Alert(f"a{n}", "r", f"rule{n}", "kl_drift", Severity.WARNING, AlertState.FIRING, n, n, "m")
        for n in range(number)
    ]
    messages = [
        OutboxMessage(f"m{n}", "r", f"a{n}", "webhook", {"event": "firing", "n": n}, created_at=time.time())
        for n in range(number)
    ]
    store.put_alerts(alerts, messages)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with three messages that wait."""
    opened = open_store(tmp_path / "runs")
    _put(opened, 3)
    return opened


def test_without_a_channel_messages_are_left_to_others(store: Store) -> None:
    """No attempt is counted against them."""
    assert deliver_once(store, alerting_of(None, store)) == ""
    with delivering(store, alerting_of(None, store)):
        pass

    assert [(m.status, m.attempts) for m in store.outbox()] == [(OutboxStatus.PENDING, 0)] * 3


def test_what_is_due_is_delivered_once_and_said(store: Store, inbox: Inbox) -> None:
    """A second round finds nothing."""
    assert deliver_once(store, alerting_of(None, store)) == "3 delivered"
    assert deliver_once(store, alerting_of(None, store)) == ""
    assert sorted(message["n"] for message in inbox.received) == [0, 1, 2]


def test_a_receiver_that_is_gone_is_tried_again_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages stay, with the reason and without the address."""
    monkeypatch.setenv("RLWATCH_WEBHOOK_URL", "http://127.0.0.1:1/T0SECRET")

    assert deliver_once(store, alerting_of(None, store)) == "3 to be tried again"
    assert {message.status for message in store.outbox()} == {OutboxStatus.PENDING}
    assert all(message.last_error and "T0SECRET" not in message.last_error for message in store.outbox())


class BusyStore:
    """A store whose outbox somebody else holds."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def lease_messages(self, *_: object, **__: object) -> list[OutboxMessage]:
        raise StoreBusyError("busy")


def test_a_busy_store_is_no_failure(store: Store, inbox: Inbox) -> None:
    """Whoever holds it is delivering."""
    busy = cast("Store", BusyStore(store))

    assert deliver_once(busy, alerting_of(None, store)) == ""


def test_a_command_that_goes_on_delivers_in_the_background(store: Store, inbox: Inbox) -> None:
    """And lets go at its end."""
    with delivering(store, alerting_of(None, store)):
        assert inbox.arrived.wait(600)

    assert {message.status for message in store.outbox()} == {OutboxStatus.SENT}


def test_the_dashboard_delivers_while_it_is_open(
    store: Store, inbox: Inbox, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a stand-in, which ends when a message has arrived."""
    ended = tmp_path / "ended"
    code = f"import pathlib, time\nwhile not pathlib.Path({str(ended)!r}).exists(): time.sleep(0.05)"
    monkeypatch.setattr(ui, "server_command", lambda script: [sys.executable, "-c", code])
    received = inbox.arrived.set
    monkeypatch.setattr(inbox.arrived, "set", lambda: (received(), ended.touch()))

    result = invoke("ui", "--store", tmp_path / "runs", "--port", ui.free_port("127.0.0.1"))

    assert result.exit_code == 0, result.output
    assert "http://127.0.0.1:" in result.stdout
    assert inbox.received


def test_the_exit_code_of_a_dashboard_that_ends_by_itself_is_passed_on(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash must not look like an end."""
    monkeypatch.setattr(ui, "server_command", lambda script: [sys.executable, "-c", "exit(7)"])

    result = invoke("ui", "--store", tmp_path / "runs", "--port", ui.free_port("127.0.0.1"))

    assert result.exit_code == 7


def test_rules_come_from_the_file_named_or_lying_here(tmp_path: Path) -> None:
    """The tests run in ``tmp_path``; without a file the defaults apply."""
    defaults = {rule.name for rule in rules_of(None)}
    own = 'default_rules = false\n[[rules]]\nname = "{}"\nkinds = ["kl_drift"]\n'
    (tmp_path / "other.toml").write_text(own.format("named"))

    assert "kl" in defaults
    assert [rule.name for rule in rules_of(tmp_path / "other.toml")] == ["named"]
    (tmp_path / "rlwatch.toml").write_text(own.format("here"))
    assert [rule.name for rule in rules_of(None)] == ["here"]


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    """Alerting somebody asked for must work."""
    with pytest.raises(ConfigError, match=r"none\.toml"):
        rules_of(tmp_path / "none.toml")


def test_rules_can_be_read_where_the_secrets_are_not(tmp_path: Path) -> None:
    """Scanning a log sends nothing."""
    (tmp_path / "rlwatch.toml").write_text('[notify.pager]\nkind = "webhook"\nurl = "env:PAGER_URL"\n')

    assert rules_of(None)
