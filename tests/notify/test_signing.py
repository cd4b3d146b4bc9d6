"""Signatures: genuine and recent, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.notify.webhook import TOLERANCE_S, sign, verify_signature

BODY = b'{"event":"firing"}'


def test_the_signature_is_a_published_construction():
    """HMAC-SHA256 over 'timestamp.body', computed elsewhere with openssl."""
    assert sign("s3cret", 1700000000, BODY) == (
        "sha256=7968948c97e4cc94cd4e1989daa839863ea993006a7ec58d3511c11c6181ca77"
    )


@given(st.text(min_size=1), st.binary(), st.integers(0, 2**40))
def test_what_is_signed_verifies(secret: str, body: bytes, now: int):
    """Any secret, any body."""
    assert verify_signature(secret, str(now), body, sign(secret, now, body), now=float(now))


@given(st.binary(), st.binary())
def test_another_body_does_not(body: bytes, other: bytes):
    """A changed byte, an added byte."""
    assert verify_signature("s", 5, other, sign("s", 5, body), now=5.0) == (body == other)


def test_a_digit_cannot_move_from_the_time_to_the_body():
    """The full stop keeps them apart."""
    assert not verify_signature("s", "12", b"3", sign("s", "1", b"23"), now=12.0)


@pytest.mark.parametrize(
    ("age", "expected"), [(0.0, True), (TOLERANCE_S, True), (-TOLERANCE_S, True), (301.0, False), (-301.0, False)]
)
def test_it_must_be_recent_in_either_direction(age: float, expected: bool):
    """Neither old nor from the future; the boundary counts."""
    assert verify_signature("s", 1000, BODY, sign("s", 1000, BODY), now=1000.0 + age) == expected


@pytest.mark.parametrize("timestamp", ["", "nan", "inf", "soon", "1e400", "٣"])
def test_a_time_that_is_none_is_refused_though_signed(timestamp: str):
    """Even by someone who knows the secret: NaN compares with nothing."""
    assert not verify_signature("s", timestamp, BODY, sign("s", timestamp, BODY), now=1000.0)


@pytest.mark.parametrize("signature", ["", "sha256=", "sha1=abc", "ü", "\ud800", sign("other", 1000, BODY)])
def test_no_stranger_passes_or_raises(signature: str):
    """Whatever is in the header."""
    assert not verify_signature("s", 1000, BODY, signature, now=1000.0)


def test_an_empty_secret_verifies_nothing():
    """A receiver whose secret is not set must not accept everybody's."""
    assert not verify_signature("", 1000, BODY, sign("", 1000, BODY), now=1000.0)
