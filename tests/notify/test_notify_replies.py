"""What a service's answer means, whatever it says: delivered, later, or never, and no word that could be a secret."""

from __future__ import annotations

import json
import math
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.notify.http import Reply, judge_status, retry_after
from rlwatch.notify.services import by_code, by_ok, by_status
from rlwatch.ports import Delivery

NOW = 1_700_000_000.0
READINGS = {"status": by_status, "code": by_code("code", "errcode", later=frozenset({9, 130101})), "ok": by_ok}
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400)
JSON = st.recursive(
    NUMBERS | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
BODIES = (
    st.fixed_dictionaries(
        {},
        optional={
            "retry_after": JSON,
            "parameters": st.fixed_dictionaries({"retry_after": NUMBERS}) | JSON,
            "code": JSON,
            "errcode": JSON,
            "ok": JSON,
            "error": JSON,
        },
    ).map(lambda body: json.dumps(body).encode())
    | st.binary(max_size=30)
    | st.sampled_from([b"ok", b" ok\n", b"[" * 50_000, b"1" * 5000, b"null", b"true"])
)


def reply(status: int, body: object = b"", **headers: str) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(status, {name.replace("_", "-"): value for name, value in headers.items()}, raw)


@given(st.sampled_from(sorted(READINGS)), st.integers(100, 599), BODIES)
def test_no_answer_raises_and_none_above_299_is_delivered(name: str, status: int, body: bytes) -> None:
    """Whatever a proxy puts in between; a wish is a finite time."""
    said = READINGS[name](Reply(status, {}, body), NOW)

    assert not said.ok or 200 <= status < 300
    assert said.retry_after_s is None or 0 <= said.retry_after_s < math.inf
    assert said.reason.startswith(f"HTTP {status}")
    assert len(said.reason) < 500


@given(st.integers(200, 599), st.text(alphabet="abcdefXYZ0189/:.-", min_size=12, max_size=60))
def test_no_service_can_make_us_repeat_its_words(status: int, secret: str) -> None:
    """Only numbers and short words of a known form are told."""
    word = secret if re.fullmatch(r"[a-z]{1,40}", secret) is None else f"{secret}/"
    body = {"ok": False, "error": word, "description": word, "code": word, "retry_after": word}

    for reading in READINGS.values():
        assert word not in reading(reply(status, body), NOW).reason


@pytest.mark.parametrize(
    ("wish", "waits"),
    [
        (3, 3.0),
        (0.25, 0.25),
        (0, 0.0),
        (-1, None),
        (True, None),
        ("3", None),
        (None, None),
        (math.nan, None),
        (math.inf, None),
        (10**400, None),
    ],
)
def test_the_body_may_ask_for_a_time(wish: object, waits: float | None) -> None:
    """Beside ``parameters`` (Telegram) or by itself (Discord); what is no length of time is no wish."""
    assert by_status(reply(429, {"retry_after": wish}), NOW).retry_after_s == waits
    assert by_status(reply(429, {"parameters": {"retry_after": wish}}), NOW).retry_after_s == waits


def test_the_header_goes_before_the_body() -> None:
    """It is the standard's."""
    assert by_status(reply(429, {"retry_after": 9}, retry_after="4"), NOW).retry_after_s == 4.0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"code": 0}, Delivery(ok=True, reason="HTTP 200")),
        ({"errcode": 0, "errmsg": "ok"}, Delivery(ok=True, reason="HTTP 200")),
        ({"code": 9}, Delivery(ok=False, reason="HTTP 200, code 9")),
        ({"errcode": 310000}, Delivery(ok=False, reason="HTTP 200, code 310000", retryable=False)),
        ({"code": False}, Delivery(ok=False, reason="HTTP 200, but not the answer of the service")),
        ({"code": "0"}, Delivery(ok=False, reason="HTTP 200, but not the answer of the service")),
        ({"code": 0.0}, Delivery(ok=False, reason="HTTP 200, but not the answer of the service")),
        ([0], Delivery(ok=False, reason="HTTP 200, but not the answer of the service")),
    ],
)
def test_only_the_number_0_is_a_yes(body: object, says: Delivery) -> None:
    """What only resembles it is somebody else's page, and is sent again."""
    assert READINGS["code"](reply(200, body), NOW) == says


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"ok", Delivery(ok=True, reason="HTTP 200")),
        ({"ok": True}, Delivery(ok=True, reason="HTTP 200")),
        ({"ok": 1}, Delivery(ok=False, reason="HTTP 200, refused", retryable=False)),
        ({"ok": False, "error": "ratelimited"}, Delivery(ok=False, reason="HTTP 200, refused: ratelimited")),
        (
            {"ok": False, "error": "channel_not_found"},
            Delivery(ok=False, reason="HTTP 200, refused: channel_not_found", retryable=False),
        ),
        ({"error": "ratelimited"}, Delivery(ok=False, reason="HTTP 200, but not the answer of the service")),
        (b"OK", Delivery(ok=False, reason="HTTP 200, but not the answer of the service")),
    ],
)
def test_ok_is_a_word_or_the_value_true(body: object, says: Delivery) -> None:
    """Slack says it in both ways, and refuses with HTTP 200."""
    assert by_ok(reply(200, body), NOW) == says


@pytest.mark.parametrize(
    ("status", "retryable"),
    [
        (199, False),
        (301, False),
        (400, False),
        (404, False),
        (408, True),
        (425, True),
        (429, True),
        (500, True),
        (599, True),
    ],
)
def test_the_status_says_whether_to_try_again(status: int, retryable: bool) -> None:
    """Redirects are not followed: the alert would go to an address nobody configured."""
    said = judge_status(status, {}, NOW)

    assert (said.ok, said.retryable) == (False, retryable)
    assert ("redirects are not followed" in said.reason) == (300 <= status < 400)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
@pytest.mark.parametrize(
    "date", ["Tue, 14 Nov 2023 22:14:20 GMT", "Tue Nov 14 22:14:20 2023", "Tuesday, 14-Nov-23 22:14:20 GMT"]
)
def test_dates_of_all_three_forms_are_times_of_greenwich(monkeypatch: pytest.MonkeyPatch, zone: str, date: str) -> None:
    """RFC 9110, 5.6.7: also the one that names no zone, wherever this machine is."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert retry_after(date, NOW) == 60.0
        assert retry_after(date, NOW + 3600.0) == 0.0
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("value", ["", "soon", "-5", "1.5", "Tue, 99 Nov 2023 22:14:20 GMT", "٣", "nan", "\x00"])
def test_what_is_no_wish_is_none(value: str) -> None:
    """Then our own backoff decides."""
    assert retry_after(value, NOW) is None
