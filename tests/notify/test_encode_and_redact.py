"""Valid JSON out, secrets never."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.notify.payload import encode, json_safe, one_line
from rlwatch.records import Severity
from rlwatch.redaction import HIDDEN, Redactor, redact_url

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def strict(body: bytes) -> object:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(body, parse_constant=refuse)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_any_payload_becomes_strict_json_and_the_same_bytes_every_time(payload: dict):
    """Whatever floats are in it."""
    assert isinstance(strict(encode(payload)), dict)
    assert encode(payload) == encode(dict(reversed(payload.items())))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
        (np.float32("inf"), "Infinity"),
        (np.int64(3), 3),
        (np.array([1.0, math.nan]), [1.0, "NaN"]),
        (np.float64(0.5), 0.5),
        (Severity.CRITICAL, "critical"),
        ((1, 2), [1, 2]),
        ({1: None}, {"1": None}),
        (1 + 2j, "(1+2j)"),
    ],
)
def test_what_json_has_no_word_for_gets_one(value: object, expected: object):
    """Numbers of numpy are numbers; the rest is text."""
    safe = json_safe({"v": value})["v"]

    assert safe == expected
    assert type(safe) is type(expected)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://hooks.slack.com/services/T/B/x", "https://hooks.slack.com/[redacted]"),
        ("http://me:pw@h:8080?k=v#f", "http://h:8080/[redacted]"),
        ("http://[::1]:9/x", "http://[::1]:9/[redacted]"),
        ("no address", HIDDEN),
        ("https://h:port/x", HIDDEN),
        ("http://[broken", HIDDEN),
    ],
)
def test_of_an_address_only_scheme_host_and_port_are_shown(url: str, expected: str):
    """What cannot be read is not shown at all."""
    assert redact_url(url) == expected


@given(st.from_regex(r"[A-Za-z0-9]{6,20}", fullmatch=True), st.text())
def test_no_part_of_a_secret_address_survives(token: str, around: str):
    """As a path segment, password, query value or fragment, alone or in the address, quoted or not."""
    for url in (f"https://h.example/a/{token}", f"https://u:{token}@h.example", f"https://h.example/?k={token}"):
        text = Redactor(urls=[url]).text(f"{around} {url} {token} {around}")

        assert token not in text.replace(around, "").replace(HIDDEN, "")


def test_quoted_and_unquoted_forms_are_both_hidden():
    """Libraries show either."""
    redactor = Redactor(urls=["https://h/p%40ss%2Fword"])

    assert redactor.text("p%40ss%2Fword p@ss/word") == f"{HIDDEN} {HIDDEN}"


def test_an_error_keeps_its_type_and_loses_its_secret():
    """Enough to act upon."""
    redactor = Redactor(urls=["https://h/t0k3n"], secrets=["hush"])

    assert redactor.error(OSError("no route to https://h/t0k3n with hush")) == (
        f"OSError: no route to https://h/{HIDDEN} with {HIDDEN}"
    )
    assert redactor.error(TimeoutError()) == "TimeoutError"
    assert "hush" not in repr(redactor)


def test_a_log_line_stays_one_line():
    """Nobody writes a line of their own, or colours, through an alert's text."""
    assert one_line("a\nERROR: fake\x1b[31m\tb ") == "a ERROR: fake [31m b"
