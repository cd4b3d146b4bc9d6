"""What an HTTP answer means for a delivery."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from rlwatch.ports import Delivery

RETRYABLE = frozenset({408, 425, 429})
"""Answers below 500 that say "later", not "no"."""


def judge(status: int, headers: Mapping[str, str], now: float) -> Delivery:
    """2xx is delivered; 408, 425, 429 and 5xx may be tried again; all else will not get better.

    A redirect is not followed: the alert would go to an address nobody configured.
    """
    if 200 <= status < 300:
        return Delivery(ok=True, reason=f"HTTP {status}")
    if 300 <= status < 400:
        return Delivery(
            ok=False, reason=f"HTTP {status}: redirects are not followed, configure the new address", retryable=False
        )
    wait = retry_after(headers.get("retry-after", ""), now)
    asked = "" if wait is None else f", Retry-After {wait:.0f} s"
    return Delivery(
        ok=False,
        reason=f"HTTP {status}{_phrase(status)}{asked}",
        retryable=status >= 500 or status in RETRYABLE,
        retry_after_s=wait,
    )


def retry_after(value: str, now: float) -> float | None:
    """Seconds to stay away, from ``Retry-After`` as seconds or as an HTTP date (RFC 9110, 10.2.3).

    >>> retry_after("120", now=0.0), retry_after("soon", now=0.0)
    (120.0, None)
    """
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        then = parsedate_to_datetime(value)
        zoned = then if then.tzinfo else then.replace(tzinfo=UTC)  # HTTP knows no other zone; asctime() names none
        return max(0.0, zoned.timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None


def _phrase(status: int) -> str:
    """The standard words only: the receiver's own could hold anything."""
    try:
        return f" {HTTPStatus(status).phrase}"
    except ValueError:
        return ""
