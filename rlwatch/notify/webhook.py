"""A notification channel that sends signed JSON over HTTP POST to one address.

Headers of a delivery::

    Content-Type: application/json
    X-RLWatch-Event: firing | escalated | eased | repeated | unacknowledged | resolved | test
    X-RLWatch-Delivery: <message id>       the same at every retry: a receiver may drop what it has seen
    X-RLWatch-Timestamp: <Unix seconds>
    X-RLWatch-Signature: sha256=<hex>      with a secret only; see rlwatch.notify.webhook

The body is the payload of :mod:`rlwatch.alerts.messages` with the message's id as ``message_id``; its shape is
``rlwatch/notify/alert.schema.json`` (:mod:`rlwatch.notify.payload`). Any 2xx answer means delivered; the answer's body
is not read.
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import ConfigError
from rlwatch.notify.http import LOOPBACK, Courier, TransportError, judge_status
from rlwatch.notify.payload import encode
from rlwatch.ports import Delivery
from rlwatch.records import OutboxMessage
from rlwatch.redaction import Redactor, redact_url

__all__ = ["LOOPBACK", "WebhookNotifier", "verify_signature"]


class WebhookNotifier:
    """Notification channel that sends each message as signed JSON over HTTP POST to one address.

    Parameters
    ----------
    url
        ``https://...`` or ``http://...``. Treated as a secret: only scheme and host are ever shown.
    secret
        Key that signs the deliveries; without one they are not signed.
    name
        Name of the channel.
    connect_s, read_s, total_s
        Time limits in seconds: to connect, between two bytes, and for the whole delivery (at most ``read_s`` more where
        the receiver first sends slowly and then hangs).
    clock
        Clock; None: the machine's.

    Raises
    ------
    ConfigError
        If the address is not an HTTP address or a limit is not positive.
    MissingExtraError
        If httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: str | None = None,
        name: str = "webhook",
        connect_s: float = 5.0,
        read_s: float = 5.0,
        total_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._url, self._secret = _checked_url(name, url), secret or ""
        self._courier = Courier(name, connect_s=connect_s, read_s=read_s, total_s=total_s)
        self._clock = clock or SystemClock()
        self._redactor = Redactor(secrets=[self._secret])

    def __repr__(self) -> str:
        return f"WebhookNotifier(name={self.name!r}, url={redact_url(self._url)!r}, signed={bool(self._secret)})"

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Send the message once with HTTP POST and return the outcome. Failures of the network are returned, never
        raised.

        The time limits do not cover the lookup of the host's name by the system.
        """
        body = encode({**message.payload, "message_id": message.message_id})
        try:
            reply = self._courier.send(self._url, body, self._headers(message, body))
        except TransportError as error:
            return Delivery(ok=False, reason=self._redactor.text(str(error)))
        return judge_status(reply.status, reply.headers, self._clock.now())

    def _headers(self, message: OutboxMessage, body: bytes) -> dict[str, str]:
        timestamp = str(int(self._clock.now()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "rlwatch",
            "X-RLWatch-Event": str(message.payload.get("event", "")),
            "X-RLWatch-Delivery": message.message_id,
            "X-RLWatch-Timestamp": timestamp,
        }
        if self._secret:
            headers["X-RLWatch-Signature"] = sign(self._secret, timestamp, body)
        return headers


def _checked_url(name: str, url: str) -> str:
    if not isinstance(url, str):
        raise ConfigError(f"notifier {name!r}: the address must be text, got {type(url).__name__}")
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine or any(c.isspace() for c in url):
        got = f"the scheme {url.split(':', 1)[0]!r}" if "://" in url else "something else"
        raise ConfigError(
            f"notifier {name!r}: the address must begin with https:// or http:// and name a host; "
            f"got {got} (the rest is not shown: it may be a secret)"
        )
    return url


# Signatures of webhook deliveries: what the sender writes and what a receiver checks.
#
# ``X-RLWatch-Signature: sha256=<hex>`` is the HMAC-SHA256, under the shared secret, of the bytes of
# ``X-RLWatch-Timestamp``, a full stop, and the body as sent. Covering the time makes a recorded delivery useless for a
# replay.

SCHEME = "sha256="
TOLERANCE_S = 300.0
"""Largest difference, in seconds, between a delivery's time stamp and the receiver's clock."""


def sign(secret: str, timestamp: str | int, body: bytes) -> str:
    """Return the value of the header ``X-RLWatch-Signature`` for a webhook message.

    It is ``sha256=`` and the HMAC-SHA256, under ``secret``, of the value of ``X-RLWatch-Timestamp``, a full stop, and
    the body.
    """
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
    """Return whether a webhook message comes from a sender who knows ``secret`` and is not older than ``tolerance_s``
    seconds.

    For receivers of webhooks. Never raises, whatever the data. Compares in constant time.

    Parameters
    ----------
    secret
        The shared key.
    timestamp, signature
        Values of the headers ``X-RLWatch-Timestamp`` and ``X-RLWatch-Signature`` as received.
    body
        Bytes of the body before any parsing.
    now
        Unix seconds.
    tolerance_s
        Largest difference between ``timestamp`` and ``now``.

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
