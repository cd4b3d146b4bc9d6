"""Chat and paging services: addresses, what goes over the wire, and what their answers mean."""

from __future__ import annotations

import json
import sys
import threading

import pytest
import requests
from message_examples import MESSAGE, message_with
from service_examples import EXAMPLES, TOKEN, rerouted

from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.notify.registry import build_notifier
from rlwatch.ports import Delivery
from rlwatch.testing.webhook_receiver import Received, WebhookReceiver, WebhookReply


def delivered(kind: str, answer: WebhookReply | None = None, **more: object) -> tuple[Delivery, Received]:
    """What became of the example message, and what arrived."""
    with WebhookReceiver(answer or WebhookReply(200, body=EXAMPLES[kind].yes), any_path=True) as receiver:
        delivery = rerouted(kind, receiver.url, **more).deliver(MESSAGE)
    [request] = receiver.received
    return delivery, request


@pytest.mark.parametrize("kind", [kind for kind, example in EXAMPLES.items() if example.native])
def test_the_address_a_service_gives_is_as_good_as_the_one_of_apprise(kind: str):
    """People paste what they are given."""
    pasted, written = delivered(kind, native=True), delivered(kind)

    assert pasted[0].ok
    assert pasted[1].path.partition("?")[0] == written[1].path.partition("?")[0]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_what_a_person_needs_is_in_the_message(kind: str):
    """Run, step, what, since when, evidence, cause, what to do and the link; as far as there is room."""
    text = json.dumps(delivered(kind)[1].payload, ensure_ascii=False).replace("\u200b", "").replace("\\", "")

    for needed in ("math/seed3", "step 412", "entropy_collapse", "Since: step 398", "m-0123456789"):
        assert needed in text
    for wanted in ("Evidence: entropy = 0.02", "Meaning: ", "Action 1: ", "http://host:8501/run?run=run-1"):
        assert wanted in text


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_message_is_one_request_within_the_room_of_its_service(kind: str):
    """However long it is: no service gets half of it in a second request."""
    with WebhookReceiver(WebhookReply(200, body=EXAMPLES[kind].yes), any_path=True) as receiver:
        delivery = rerouted(kind, receiver.url).deliver(message_with(alert={"message": "é" * 90_000}))

    assert delivery.ok
    assert len(receiver.received) == 1
    assert len(receiver.received[0].body) < 30_000


@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize("address", ["", "https://example.com/hush-hush", "hush-hush", "json://hush-hush", 5, None])
def test_an_address_of_another_service_is_refused_at_set_up_and_not_shown(kind: str, address: object, caplog):
    """With the form it should have."""
    with pytest.raises(ConfigError, match=kind) as error:
        build_notifier(kind, "oncall", {"url": address})

    assert "hush" not in str(error.value) + caplog.text


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        ("telegram", "tgram://123456789:hush-hush-hush"),
        ("telegram", "tgram://123456789:hush-hush-hush/-1001/-1002"),
        ("slack", "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7F/#one/#two"),
    ],
)
def test_one_channel_is_one_receiver(kind: str, address: str):
    """So that a message has one outcome: not delivered to some."""
    with pytest.raises(ConfigError, match="channel of its own"):
        build_notifier(kind, "oncall", {"url": address})


def test_without_apprise_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """The extra's name is in the message."""
    monkeypatch.setitem(sys.modules, "apprise", None)

    with pytest.raises(MissingExtraError, match=r"rlwatch-monitor\[notify\]"):
        build_notifier("slack", "slack", {"url": "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7F"})


YES, NO, LATER = (True, True), (False, False), (False, True)


@pytest.mark.parametrize(
    ("kind", "status", "body", "expected", "words"),
    [
        ("slack", 200, b"ok", YES, "HTTP 200"),
        ("slack", 404, b"no_service", NO, "HTTP 404"),
        ("slack", 200, b'{"ok": false, "error": "channel_not_found"}', NO, "refused: channel_not_found"),
        ("slack", 200, b'{"ok": false, "error": "ratelimited"}', LATER, "refused: ratelimited"),
        ("slack", 200, b'{"ok": false, "error": "xoxb-1234 hush"}', NO, "HTTP 200, refused"),
        ("slack", 200, b"<html>please log in</html>", LATER, "not the answer of the service"),
        ("telegram", 200, b'{"ok": true}', YES, ""),
        ("telegram", 403, b'{"ok": false, "error_code": 403}', NO, "HTTP 403"),
        ("feishu", 200, b'{"code": 0, "msg": "success"}', YES, ""),
        ("feishu", 200, b'{"StatusCode": 0, "StatusMessage": "success"}', YES, ""),
        ("feishu", 200, b'{"code": 19024, "msg": "Key Words Not Found"}', NO, "code 19024"),
        ("feishu", 200, b'{"code": 11232, "msg": "frequency limited"}', LATER, "code 11232"),
        ("lark", 200, b'{"code": 19001}', NO, "code 19001"),
        ("dingtalk", 200, b'{"errcode": 310000, "errmsg": "sign not match"}', NO, "code 310000"),
        ("dingtalk", 200, b'{"errcode": 130101, "errmsg": "send too fast"}', LATER, "code 130101"),
        ("dingtalk", 200, b"[" * 100_000, LATER, "not the answer"),
        ("wecom", 200, b'{"errcode": 93000, "errmsg": "invalid webhook url"}', NO, "code 93000"),
        ("wecom", 200, b'{"errcode": 45009}', LATER, "code 45009"),
        ("wecom", 200, b'{"errcode": "no"}', LATER, "not the answer"),
        ("discord", 204, b"", YES, ""),
        ("teams", 202, b"", YES, ""),
        ("pagerduty", 202, b'{"status": "success"}', YES, ""),
        ("pagerduty", 400, b'{"status": "invalid event"}', NO, "HTTP 400"),
    ],
)
def test_a_service_that_refuses_in_the_body_has_refused(
    kind: str, status: int, body: bytes, expected: tuple[bool, bool], words: str
):
    """Several say HTTP 200 and no: a mere look at the status would lose the alert."""
    delivery, _ = delivered(kind, WebhookReply(status, body=body))

    assert (delivery.ok, delivery.retryable) == expected
    assert words in delivery.reason
    assert "hush" not in delivery.reason


@pytest.mark.parametrize(
    ("kind", "body", "wish"),
    [
        ("telegram", b'{"ok": false, "parameters": {"retry_after": 35}}', 35.0),
        ("discord", b'{"message": "You are being rate limited.", "retry_after": 0.5}', 0.5),
        ("discord", b'{"retry_after": "soon"}', None),
        ("discord", b'{"retry_after": -1}', None),
        ("discord", b'{"retry_after": NaN}', None),
    ],
)
def test_how_long_to_stay_away_is_also_read_from_the_body(kind: str, body: bytes, wish: float | None):
    """And the service is asked once only: apprise itself would try Discord again at once."""
    assert delivered(kind, WebhookReply(429, body=body))[0].retry_after_s == wish


def test_a_pager_is_notified_of_one_incident_and_of_its_end():
    """All messages of a group under one key; it closes when none of it fires."""
    told = []
    with WebhookReceiver(202, any_path=True) as receiver:
        notifier = rerouted("pagerduty", receiver.url)
        for event, firing in (("firing", 1), ("escalated", 2), ("eased", 2), ("resolved", 1), ("resolved", 0)):
            notifier.deliver(message_with(event=event, group={"id": "alert-1", "firing": firing}))
        told = [(r.payload["event_action"], r.payload["dedup_key"]) for r in receiver.received]

    assert told == [("trigger", "alert-1")] * 4 + [("resolve", "alert-1")]


def test_slack_is_not_made_to_call_everybody():
    """What a model wrote calls nobody and links nowhere."""
    said = {"message": "<!channel> @here <https://evil.example|click> &amp;"}
    with WebhookReceiver(WebhookReply(200, body=b"ok"), any_path=True) as receiver:
        rerouted("slack", receiver.url).deliver(message_with(alert=said))

    text = receiver.received[0].body.decode()
    assert "<!channel>" not in text
    assert "<https" not in text
    assert "@here" not in text


def test_other_users_of_requests_are_left_alone():
    """During a delivery of ours, in another thread, and afterwards in this one."""
    with WebhookReceiver(200, any_path=True) as ours, WebhookReceiver(200, any_path=True) as theirs:
        notifier = rerouted("discord", ours.url)
        threads = [threading.Thread(target=requests.post, args=(theirs.url,), kwargs={"data": b"{}"})]
        usual = notifier.plugin.notify
        notifier.plugin.notify = lambda **more: ([t.start() or t.join() for t in threads], usual(**more))
        notifier.deliver(MESSAGE)
        requests.post(theirs.url, data=b"{}", timeout=5.0)

    assert (len(ours.received), len(theirs.received)) == (1, 2)
    assert all("x-rlwatch-delivery" not in request.headers for request in theirs.received)


def test_a_bug_of_apprise_is_an_outcome():
    """And is not repeated: its words could hold the address."""
    notifier = rerouted("slack", "http://127.0.0.1:9")
    notifier.plugin.notify = lambda **_: 1 / 0

    assert notifier.deliver(MESSAGE) == Delivery(False, "apprise raised ZeroDivisionError", retryable=False)


def test_what_apprise_does_not_send_is_not_taken_for_delivered():
    """Nothing went over the wire."""
    notifier = rerouted("slack", "http://127.0.0.1:9")
    notifier.plugin.notify = lambda **_: True

    assert notifier.deliver(MESSAGE) == Delivery(False, "apprise sent nothing", retryable=False)


def test_only_name_and_kind_are_shown():
    """Everything else may be a secret."""
    assert repr(rerouted("slack", "http://127.0.0.1:9")) == "ServiceNotifier(name='slack', kind='slack')"
    assert TOKEN not in repr(vars(rerouted("wecom", "http://127.0.0.1:9"))["_redactor"])
