"""A single HTTP request with a limit on its whole duration, whose address appears in no log or error."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from types import ModuleType
from typing import TYPE_CHECKING, ParamSpec
from urllib.parse import urlsplit

from rlwatch.error_boundary import Contained, raised_by
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.ports import Delivery
from rlwatch.redaction import Redactor

if TYPE_CHECKING:
    import httpx


LOOPBACK = ("localhost", "127.0.0.1", "::1")


class TransportError(Exception):
    """The HTTP request got no complete answer. The text holds no part of the address."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer; names of ``headers`` are lower-case, ``body`` is limited to the requested size."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class Courier:
    """Sends the HTTP requests of one notification channel.

    Parameters
    ----------
    name
        Name of the channel.
    connect_s, read_s, total_s
        Time limits in seconds: to connect, between two bytes, and for the whole exchange (at most ``read_s`` more where
        the receiver first sends slowly and then hangs). They do not cover the lookup of the host's name by the system.

    Raises
    ------
    ConfigError
        If a limit is not positive.
    MissingExtraError
        If httpx is not installed.
    """

    def __init__(self, name: str, *, connect_s: float = 5.0, read_s: float = 5.0, total_s: float = 10.0) -> None:
        self._httpx = _import_httpx()
        for limit in (connect_s, read_s, total_s):
            if not limit > 0:
                raise ConfigError(f"notifier {name!r}: time limits must be > 0 s, got {limit!r}")
        self._timeout = self._httpx.Timeout(min(read_s, total_s), connect=min(connect_s, total_s))
        self._total_s = total_s
        self._context: ssl.SSLContext | None = None

    def send(
        self,
        url: str,
        content: bytes,
        headers: Mapping[str, str],
        *,
        method: str = "POST",
        verify: bool = True,
        keep: int = 0,
    ) -> Reply:
        """Send one HTTP request and return the answer. Redirects are returned, not followed.

        Raises ``TransportError`` for any failure of the network.

        Parameters
        ----------
        url, content, headers, method
            Address, body, headers and method of the request.
        verify
            Whether the certificate of an https address is verified.
        keep
            Number of bytes of the answer's body to read.
        """
        client = self._client(url, verify=verify)
        watchdog = _Watchdog(self._total_s, client.close)
        try:
            with (
                quiet_http_logs(),
                watchdog,
                client,
                client.stream(method, url, content=content, headers=dict(headers)) as answer,
            ):
                return Reply(answer.status_code, dict(answer.headers), _beginning(answer, keep))
        except (self._httpx.HTTPError, self._httpx.InvalidURL, OSError, RuntimeError) as error:
            late = f"no whole answer within {self._total_s:g} s"
            raise TransportError(late if watchdog.barked else Redactor(urls=[url]).error(error)) from None

    def _client(self, url: str, *, verify: bool) -> httpx.Client:
        """Return a client for one request. Proxies of the environment apply, except to this machine itself."""
        parts = urlsplit(url)
        client: httpx.Client = self._httpx.Client(
            timeout=self._timeout,
            follow_redirects=False,
            trust_env=parts.hostname not in LOOPBACK,
            verify=self._trusted() if verify and parts.scheme == "https" else False,
        )
        return client

    def _trusted(self) -> ssl.SSLContext:
        """Return the trusted certificate authorities, read only once: that takes longer than a request
        on this machine.
        """
        if self._context is None:
            self._context = self._httpx.create_ssl_context()
        return self._context


class _Watchdog:
    """Calls ``close`` after ``limit_s`` seconds.

    httpx limits each read but not their sum, so a receiver that sends slowly could keep the thread for ever.
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
        with Contained(lambda _error: None):  # the request's own thread reports its outcome
            self._close()


def _beginning(answer: httpx.Response, most: int) -> bytes:
    body = b""
    for chunk in answer.iter_bytes() if most else ():
        body += chunk
        if len(body) >= most:
            break
    return body[:most]


def _import_httpx() -> ModuleType:
    try:
        import httpx
    except ImportError:
        raise MissingExtraError("httpx", "alerts", "sending alerts to a webhook") from None
    return httpx


# Libraries that carry alerts write whole addresses and messages to their logs; ours are secrets.

QUIET_LOGGERS = (
    "httpx",
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
    "httpcore.socks",
    "apprise",
)


class _OurDeliveries(logging.Filter):
    """Log filter that drops records of these libraries about rlwatch's own deliveries, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.now = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002  (the interface of logging)
        return not getattr(self.now, "delivering", False)


_our_deliveries = _OurDeliveries()


@contextmanager
def quiet_http_logs() -> Iterator[None]:
    """Return a context in which requests of this thread leave no line in the logs of HTTP libraries. May be nested."""
    for name in QUIET_LOGGERS:
        logging.getLogger(name).addFilter(_our_deliveries)  # a filter is only added once
    before = getattr(_our_deliveries.now, "delivering", False)
    _our_deliveries.now.delivering = True
    try:
        yield
    finally:
        _our_deliveries.now.delivering = before


P = ParamSpec("P")


def raised_quietly(send: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Exception | None:
    """Call ``send(*args, **kwargs)`` of apprise or wandb without lines in their logs; return the exception it raised,
    or None.

    Only the type of the exception (and a server's number) may be shown: its text could hold an address.
    """
    with quiet_http_logs():
        return raised_by(send, *args, **kwargs)


# What an HTTP answer means for a delivery.

RETRYABLE = frozenset({408, 425, 429})
"""HTTP status codes below 500 after which a retry is useful."""


def judge_status(status: int, headers: Mapping[str, str], now: float) -> Delivery:
    """Return the outcome of a delivery by the HTTP status: 2xx is delivered; 408, 425, 429 and 5xx may be retried.

    All else is final. A redirect is not followed: the alert would go to an address that was not configured.

    Parameters
    ----------
    status, headers
        Status and headers of the answer; names of headers in lower case.
    now
        Unix seconds, for a ``Retry-After`` that is a date.
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
        reason=f"HTTP {status}{_standard_phrase(status)}{asked}",
        retryable=status >= 500 or status in RETRYABLE,
        retry_after_s=wait,
    )


def retry_after(value: str, now: float) -> float | None:
    """Return the seconds to wait, from the header ``Retry-After`` as seconds or as an HTTP date; None if it is invalid.

    See RFC 9110, 10.2.3. ``now``: Unix seconds.

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


def _standard_phrase(status: int) -> str:
    """Return the standard text of a status: the receiver's own text could hold anything."""
    try:
        return f" {HTTPStatus(status).phrase}"
    except ValueError:
        return ""
