"""Signed JSON over HTTP POST, to one address.

Headers of a delivery::

    Content-Type: application/json
    X-RLWatch-Event: firing | escalated | resolved
    X-RLWatch-Delivery: <message id>       the same at every retry: a receiver may drop what it has seen
    X-RLWatch-Timestamp: <Unix seconds>
    X-RLWatch-Signature: sha256=<hex>      with a secret only; see rlwatch.notify.signing

The body is the payload of :mod:`rlwatch.alerts.messages`. Any 2xx answer means delivered; the answer's body
is not read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.notify.answers import judge
from rlwatch.notify.encode import encode
from rlwatch.notify.quiet import quiet_http_logs
from rlwatch.notify.redact import Redactor, redact_url
from rlwatch.notify.signing import sign, verify_signature
from rlwatch.ports import Delivery
from rlwatch.records import OutboxMessage

if TYPE_CHECKING:
    import httpx

__all__ = ["WebhookNotifier", "verify_signature"]

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class WebhookNotifier:
    """Delivers to one address.

    Parameters
    ----------
    url
        ``https://...`` or ``http://...``. Treated as a secret: only scheme and host are ever shown.
    secret
        Signs the deliveries; without one they are not signed.
    name
        The channel.
    connect_s, read_s, total_s
        Time limits in seconds: to connect, between two bytes, and for the whole delivery (at most ``read_s``
        more where the receiver first drips and then hangs).

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
        self._httpx = _import_httpx()
        self._url, self._secret = _checked_url(name, url), secret or ""
        for limit in (connect_s, read_s, total_s):
            if not limit > 0:
                raise ConfigError(f"notifier {name!r}: time limits must be > 0 s, got {limit!r}")
        self._timeout = self._httpx.Timeout(min(read_s, total_s), connect=min(connect_s, total_s))
        self._total_s = total_s
        self._clock = clock or SystemClock()
        self._redactor = Redactor(urls=[url], secrets=[self._secret])

    def __repr__(self) -> str:
        return f"WebhookNotifier(name={self.name!r}, url={redact_url(self._url)!r}, signed={bool(self._secret)})"

    def deliver(self, message: OutboxMessage) -> Delivery:
        """POST once. What the network does comes back as a ``Delivery``, never as an exception.

        Looking up the host's name is the system's business and not covered by the time limits.
        """
        body = encode(message.payload)
        client = self._client()
        watchdog = _Watchdog(self._total_s, client.close)
        try:
            with quiet_http_logs(), watchdog, client:
                return self._post(client, body, self._headers(message, body))
        except (self._httpx.HTTPError, self._httpx.InvalidURL, OSError, RuntimeError) as error:
            late = f"no whole answer within {self._total_s:g} s"
            return Delivery(ok=False, reason=late if watchdog.barked else self._redactor.error(error))

    def _post(self, client: httpx.Client, body: bytes, headers: dict[str, str]) -> Delivery:
        with client.stream("POST", self._url, content=body, headers=headers) as response:
            return judge(response.status_code, response.headers, self._clock.now())

    def _client(self) -> httpx.Client:
        """A client for one delivery. Proxies of the environment apply, except to this machine itself."""
        local = urlsplit(self._url).hostname in LOOPBACK
        client: httpx.Client = self._httpx.Client(timeout=self._timeout, follow_redirects=False, trust_env=not local)
        return client

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


class _Watchdog:
    """Calls ``close`` after ``limit_s``: httpx limits each read but not their sum, so a receiver that drips
    could hold us for ever.
    """

    def __init__(self, limit_s: float, close: Callable[[], None]) -> None:
        self.barked = False
        self._close = close
        self._timer = threading.Timer(limit_s, self._bark)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _bark(self) -> None:
        self.barked = True
        self._close()


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


def _import_httpx() -> ModuleType:
    try:
        import httpx
    except ImportError:
        raise MissingExtraError("httpx", "alerts", "sending alerts to a webhook") from None
    return httpx
