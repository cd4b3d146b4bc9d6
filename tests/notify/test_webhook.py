"""The webhook notifier: what goes over the wire, and what is refused before anything does."""

from __future__ import annotations

import json
import logging
import math
import sys

import pytest

from rlwatch.clock import ManualClock
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.notify.http import judge_status, retry_after
from rlwatch.notify.webhook import WebhookNotifier, verify_signature
from rlwatch.testing.notifier_contract import a_message
from rlwatch.testing.webhook_receiver import WebhookReceiver, WebhookReply

URL = "https://hooks.example.com/services/T000/B000/hush-hush"


def test_the_request_is_signed_json_with_event_time_and_id():
    """Everything a receiver needs to trust and to route it."""
    clock = ManualClock(1_700_000_000.9)
    with WebhookReceiver(secret="s3cret", clock=clock) as receiver:
        WebhookNotifier(receiver.url, secret="s3cret", clock=clock).deliver(a_message("id-1", value=1.5))
        request = receiver.received[0]

    assert request.verified is True
    assert request.payload == {**a_message("id-1", value=1.5).payload, "message_id": "id-1"}
    assert (request.message_id, request.event) == ("id-1", "firing")
    assert request.headers["x-rlwatch-timestamp"] == "1700000000"
    assert request.headers["x-rlwatch-signature"].startswith("sha256=")
    assert request.headers["content-type"] == "application/json"


def test_without_a_secret_there_is_no_signature():
    """An empty signature would look like one."""
    with WebhookReceiver() as receiver:
        WebhookNotifier(receiver.url).deliver(a_message())

    assert "x-rlwatch-signature" not in receiver.received[0].headers


def test_a_receiver_with_another_secret_refuses_and_that_is_final():
    """401: trying again does not help."""
    with WebhookReceiver(secret="other") as receiver:
        delivery = WebhookNotifier(receiver.url, secret="s3cret").deliver(a_message())

    assert (delivery.ok, delivery.retryable, delivery.reason) == (False, False, "HTTP 401 Unauthorized")


def test_a_delivery_signed_long_ago_is_refused():
    """Replaying a recorded request does not work."""
    with WebhookReceiver(secret="s3cret", clock=ManualClock(2_000.0)) as receiver:
        late = WebhookNotifier(receiver.url, secret="s3cret", clock=ManualClock(1_000.0)).deliver(a_message())

    assert not late.ok


def test_nan_and_infinity_arrive_as_words_in_valid_json():
    """Strict parsers read it."""
    with WebhookReceiver() as receiver:
        WebhookNotifier(receiver.url).deliver(a_message(v=[math.nan, math.inf, -math.inf]))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(receiver.received[0].body, parse_constant=refuse)["v"] == ["NaN", "Infinity", "-Infinity"]


def test_retry_after_reaches_the_one_who_retries():
    """In seconds, and in the reason for people."""
    with WebhookReceiver(WebhookReply(429, {"Retry-After": "30"})) as receiver:
        delivery = WebhookNotifier(receiver.url).deliver(a_message())

    assert (delivery.retryable, delivery.retry_after_s) == (True, 30.0)
    assert delivery.reason == "HTTP 429 Too Many Requests, Retry-After 30 s"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0.0),
        (" 7 ", 7.0),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("", None),
        ("-3", None),
        ("soon", None),
        ("٣", None),
        ("9" * 400, 999_999_999.0),
    ],
)
def test_retry_after_is_read_as_the_standard_says(value: str, expected: float | None):
    """Seconds or a date; anything else is no wish at all."""
    assert retry_after(value, now=100.0) == expected


def test_an_unheard_of_status_is_still_judged():
    """No words for it, but a class."""
    assert (judge_status(599, {}, 0.0).retryable, judge_status(499, {}, 0.0).retryable) == (True, False)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h/hush-hush",
        "file:///hush-hush",
        "hush-hush",
        "",
        "https://",
        "http:///hush-hush",
        "https://h:99999/hush-hush",
        "https://h:0/hush-hush",
        "https://h /hush-hush",
        "https://[::1/hush-hush",
        "javascript://hush-hush",
    ],
)
def test_what_is_no_http_address_is_refused_at_construction_and_not_shown(url: str):
    """At set-up, where somebody looks; the rest of it could be a secret."""
    with pytest.raises(ConfigError, match="https:// or http://") as error:
        WebhookNotifier(url)

    assert "hush" not in str(error.value)


@pytest.mark.parametrize("limits", [{"total_s": 0.0}, {"read_s": -1.0}, {"connect_s": math.nan}])
def test_time_limits_must_be_positive(limits: dict):
    """None of them may mean 'for ever'."""
    with pytest.raises(ConfigError, match="limits"):
        WebhookNotifier(URL, **limits)


def test_without_httpx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """The extra's name is in the message."""
    monkeypatch.setitem(sys.modules, "httpx", None)

    with pytest.raises(MissingExtraError, match=r"rlwatch-monitor\[alerts\]"):
        WebhookNotifier(URL)


def test_only_scheme_and_host_are_ever_shown():
    """The path of such an address is its password."""
    shown = repr(WebhookNotifier(URL, secret="s3cret"))

    assert shown == "WebhookNotifier(name='webhook', url='https://hooks.example.com/[redacted]', signed=True)"


def test_the_http_library_still_logs_other_peoples_requests(caplog: pytest.LogCaptureFixture):
    """We silence ours, not theirs."""
    import httpx

    caplog.set_level(logging.INFO, logger="httpx")  # other libraries of the process may have raised it
    with WebhookReceiver() as receiver:
        WebhookNotifier(receiver.url).deliver(a_message())
        assert "HTTP Request" not in caplog.text

        httpx.post(receiver.url, content=b"{}", trust_env=False)

    assert "HTTP Request" in caplog.text


def test_the_public_check_is_the_one_receivers_import():
    """From the notifier's own module."""
    assert verify_signature.__module__ == "rlwatch.notify.webhook"
