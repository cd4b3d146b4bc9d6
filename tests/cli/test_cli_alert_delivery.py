"""rlwatch alerts test, dead and retry: the real way through an outbox to a receiver on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cli_helpers import Inbox, Invoke, record_run, strict

from rlwatch.records import OutboxMessage, OutboxStatus
from rlwatch.store.url import open_store
from rlwatch.testing.notifier_contract import closed_port
from rlwatch.testing.webhook_receiver import WebhookReceiver, WebhookReply

SECRET = "T0KEN-in-the-p4th"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A store with a message that was given up, one that waits and one that was sent."""
    store = open_store(tmp_path / "runs")
    record_run(store, "r")
    now = time.time()
    payload = {"event": "firing", "alert": {"kind": "kl_drift\n@everyone"}}
    given_up, waiting, sent = (
        OutboxMessage(f"{name}-0123", "r", f"a-{name}", "webhook", payload, created_at=now - 60.0)
        for name in ("dead", "waits", "sent")
    )
    store.put_alerts([], [given_up, waiting, sent])
    for message in store.lease_messages(now, lease_s=1.0):
        status = {"dead-0123": OutboxStatus.DEAD, "sent-0123": OutboxStatus.SENT}.get(message.message_id)
        store.settle_message(_settled(message, status or OutboxStatus.PENDING, now + 9999.0))
    store.close()
    return tmp_path / "runs"


def _settled(message: OutboxMessage, status: OutboxStatus, due: float) -> OutboxMessage:
    from dataclasses import replace

    return replace(message, status=status, attempts=3, next_attempt_at=due, last_error="HTTP 404 (trying again ...)")


def _statuses(runs: Path) -> dict[str, OutboxStatus]:
    store = open_store(runs)
    found = {message.message_id: message.status for message in store.outbox()}
    store.close()
    return found


def test_a_trial_message_arrives_and_the_answer_is_reported(inbox: Inbox, invoke: Invoke):
    """Before there is any run or store."""
    result = invoke("alerts", "test")

    [payload] = inbox.received
    assert result.exit_code == 0
    assert "webhook" in result.stdout
    assert "HTTP 200" in result.stdout
    assert (payload["event"], payload["alert"]["kind"]) == ("test", "trial")
    assert payload["message_id"] in result.stdout
    assert "this channel works" in payload["text"]


def test_a_trial_is_signed_as_alerts_are(invoke: Invoke):
    """A receiver that checks takes it."""
    with WebhookReceiver(secret="s3cret") as receiver:
        env = {"RLWATCH_WEBHOOK_URL": receiver.url, "RLWATCH_WEBHOOK_SECRET": "s3cret"}

        assert invoke("alerts", "test", env=env).exit_code == 0
    assert receiver.received[0].verified


@pytest.mark.parametrize("status", [401, 404, 429, 500])
def test_what_a_receiver_refuses_is_reported_with_its_answer_and_no_address(status: int, invoke: Invoke):
    """Exit code 1, for scripts."""
    with WebhookReceiver(WebhookReply(status)) as receiver:
        result = invoke("alerts", "test", "--format", "json", env={"RLWATCH_WEBHOOK_URL": receiver.url})

    [row] = strict(result.stdout)
    assert result.exit_code == 1
    assert (row["channel"], row["ok"]) == ("webhook", False)
    assert f"HTTP {status}" in row["reason"]
    assert receiver.url.rpartition("/")[2] not in result.output
    assert len(receiver.received) == 1


def test_every_channel_of_the_file_is_tried_or_the_one_that_is_named(tmp_path: Path, invoke: Invoke):
    """A chat service, a program and one that only the trainer has."""
    Path("rlwatch.toml").write_text(
        f'[notify.page]\nkind = "command"\nargv = ["sh", "-c", "cat > {tmp_path}/got", "{SECRET}"]\n[notify.wandb]\n'
    )
    one = invoke("alerts", "test", "--channel", "page")
    all_of_them = invoke("alerts", "test")

    assert (one.exit_code, all_of_them.exit_code) == (0, 1)
    assert strict((tmp_path / "got").read_text())["event"] == "test"
    assert "only the trainer's own process" in all_of_them.stdout
    assert SECRET not in one.output + all_of_them.output


@pytest.mark.parametrize("more", [[], ["--channel", "nobody"]])
def test_without_such_a_channel_it_says_what_to_do(more: list[str], invoke: Invoke):
    """Exit code 2."""
    result = invoke("alerts", "test", *more)

    assert result.exit_code == 2
    assert "channel" in result.stderr


def test_what_was_given_up_is_listed_with_the_reason(runs: Path, invoke: Invoke):
    """One line each, whatever the alert is called."""
    lines = invoke("alerts", "dead", "--store", runs).stdout.splitlines()
    [row] = strict(invoke("alerts", "dead", "r", "--store", runs, "--format", "json").stdout)

    assert len(lines) == 2
    assert "dead-0123" in lines[1]
    assert "HTTP 404" in lines[1]
    assert (row["message_id"], row["attempts"], row["event"]) == ("dead-0123", 3, "firing")


def test_retrying_all_sends_what_was_given_up_under_the_same_id(runs: Path, inbox: Inbox, invoke: Invoke):
    """And nothing else; then there is no more."""
    result = invoke("alerts", "retry", "--all", "--store", runs)

    assert "1 queued for retry: 1 delivered" in result.stdout
    assert [payload["message_id"] for payload in inbox.received] == ["dead-0123"]
    assert _statuses(runs)["dead-0123"] is OutboxStatus.SENT
    assert invoke("alerts", "dead", "--store", runs).stdout.strip() == "no undelivered messages"
    assert "0 queued for retry" in invoke("alerts", "retry", "--all", "--store", runs).stdout


def test_one_message_can_be_named_also_one_that_waits(runs: Path, inbox: Inbox, invoke: Invoke):
    """By how its id begins."""
    assert "1 delivered" in invoke("alerts", "retry", "waits", "--store", runs).stdout
    assert _statuses(runs) == {
        "dead-0123": OutboxStatus.DEAD,
        "waits-0123": OutboxStatus.SENT,
        "sent-0123": OutboxStatus.SENT,
    }


def test_what_fails_again_is_kept(runs: Path, invoke: Invoke):
    """It waits for its next try; the address is not shown."""
    url = f"http://127.0.0.1:{closed_port()}/{SECRET}"
    result = invoke("alerts", "retry", "dead", "--store", runs, env={"RLWATCH_WEBHOOK_URL": url})

    assert "1 to be tried again" in result.stdout
    assert _statuses(runs)["dead-0123"] is OutboxStatus.PENDING
    assert SECRET not in result.output


def test_a_channel_that_is_not_here_is_left_to_others(runs: Path, invoke: Invoke):
    """And it is said."""
    result = invoke("alerts", "retry", "--all", "--store", runs)

    assert "left to a process that has it: webhook" in result.stdout
    assert _statuses(runs)["dead-0123"] is OutboxStatus.PENDING


@pytest.mark.parametrize("arguments", [[], ["dead", "--all"], ["sent"], ["nothing"]])
def test_what_cannot_be_meant_is_refused(arguments: list[str], runs: Path, invoke: Invoke):
    """Neither or both, one that was delivered, one that is not there."""
    assert invoke("alerts", "retry", *arguments, "--store", runs).exit_code == 2
