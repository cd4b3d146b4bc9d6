"""Signatures of webhook deliveries: what the sender writes and what a receiver checks.

``X-RLWatch-Signature: sha256=<hex>`` is the HMAC-SHA256, under the shared secret, of the bytes of
``X-RLWatch-Timestamp``, a full stop, and the body as sent. Covering the time makes an old delivery useless
to whoever recorded it.
"""

from __future__ import annotations

import hashlib
import hmac

SCHEME = "sha256="
TOLERANCE_S = 300.0
"""How far a delivery's time stamp may be from the receiver's clock."""


def sign(secret: str, timestamp: str | int, body: bytes) -> str:
    """The value of ``X-RLWatch-Signature``."""
    signed = f"{timestamp}.".encode() + body
    return SCHEME + hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()


def verify_signature(
    secret: str,
    timestamp: str | int,
    body: bytes,
    signature: str,
    *,
    now: float,
    tolerance_s: float = TOLERANCE_S,
) -> bool:
    """Whether a delivery comes from someone who knows ``secret`` and is not older than ``tolerance_s``.

    For receivers. Give the header values as received and the body's bytes before any parsing; never raises
    for what a stranger may have sent. Compares in constant time.

    >>> body = b'{"event":"firing"}'
    >>> verify_signature("s3cret", "1000", body, sign("s3cret", 1000, body), now=1200.0)
    True
    >>> verify_signature("s3cret", "1000", body, sign("s3cret", 1000, body), now=1301.0)
    False
    """
    if not secret:
        return False
    expected = sign(secret, timestamp, body).encode()
    genuine = hmac.compare_digest(expected, signature.encode("utf-8", errors="replace"))
    return genuine and _recent(timestamp, now, tolerance_s)


def _recent(timestamp: str | int, now: float, tolerance_s: float) -> bool:
    try:
        sent = float(timestamp)
    except (ValueError, OverflowError):
        return False
    return abs(now - sent) <= tolerance_s
