"""Notification channels of chat services and pagers: apprise composes each request, and rlwatch's own HTTP code sends
it.

apprise would send with ``requests``. This way a delivery is one request, within our limits, without redirects, and its
answer is known: apprise itself returns only success or failure. Other threads' use of ``requests`` is unchanged.
"""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeGuard
from urllib.parse import unquote

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.notify.http import Courier, Reply, TransportError, judge_status, quiet_http_logs, raised_quietly
from rlwatch.notify.payload import chat_text
from rlwatch.ports import Delivery
from rlwatch.records import JSON, OutboxMessage
from rlwatch.redaction import Redactor

__all__ = ["SERVICES", "Service", "ServiceNotifier", "TransportError"]


MOST_ANSWER_BYTES = 65_536
"""Number of bytes of an answer that are read."""

_DROPPED = frozenset({"content-length", "connection", "accept-encoding", "transfer-encoding", "host"})

_current = threading.local()
_teaching = threading.Lock()


class Outlet:
    """Adapter for ``requests`` that sends the single request of one delivery with rlwatch's own HTTP code.

    Parameters
    ----------
    requests
        The module ``requests``.
    courier
        Sends the request.
    message_id
        Sent along as the header ``X-RLWatch-Delivery``.
    """

    def __init__(self, requests: ModuleType, courier: Courier, message_id: str) -> None:
        self.reply: Reply | None = None
        self.trouble = ""
        """Why there is no reply."""
        self._requests, self._courier, self._message_id = requests, courier, message_id

    @contextmanager
    def open(self) -> Iterator[None]:
        """Return a context in which requests of this thread by ``requests`` are sent through this adapter."""
        _teach(self._requests)
        _current.outlet = self
        try:
            yield
        finally:
            _current.outlet = None

    def send(self, request: Any, *, verify: object = True, **_: object) -> Any:
        """Send the first request of this delivery and return the answer; refuse a second request.

        ``request``: request of the module ``requests``. ``verify``: whether the certificate of an https address is
        verified. Raises ``requests.ConnectionError`` where there is no answer, and for a second request.
        """
        if self.reply is not None or self.trouble:
            raise self._requests.ConnectionError("one request is all there is for one delivery")
        try:
            self.reply = self._exchange(request, verify=verify is not False)
        except TransportError as error:
            self.trouble = str(error)
            raise self._requests.ConnectionError("no answer") from None
        return self._response(request, self.reply)

    def close(self) -> None:
        """Do nothing: no connection is kept open."""

    def _exchange(self, request: Any, *, verify: bool) -> Reply:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        headers |= {"Accept-Encoding": "identity", "X-RLWatch-Delivery": self._message_id}
        body = request.body or b""
        content = body.encode() if isinstance(body, str) else bytes(body)
        return self._courier.send(
            request.url, content, headers, method=request.method, verify=verify, keep=MOST_ANSWER_BYTES
        )

    def _response(self, request: Any, reply: Reply) -> Any:
        response = self._requests.Response()
        response.status_code, response.request, response.url = reply.status, request, request.url
        response.headers.update(reply.headers)
        response.raw = io.BytesIO(reply.body)
        return response


def _teach(requests: ModuleType) -> None:
    """Let sessions ask for the outlet of their thread, once per process."""
    with _teaching:
        session: Any = requests.Session
        usual = session.get_adapter
        if getattr(usual, "knows_outlets", False):
            return

        def get_adapter(self: Any, url: str) -> Any:
            outlet = getattr(_current, "outlet", None)
            return usual(self, url) if outlet is None else outlet

        get_adapter.knows_outlets = True  # type: ignore[attr-defined]
        session.get_adapter = get_adapter


# The meaning of answers of chat services. Some answer HTTP 200 and refuse in the body.
#
# From the answer of a service only numbers and short words of its own vocabulary are repeated: the rest could hold
# anything.

Reading = Callable[[Reply, float], Delivery]
"""``reading(reply, now)``: the outcome of a delivery by the answer of the service."""

_ERROR_WORD = re.compile(r"[a-z]+(_[a-z]+){0,5}")


def by_status(reply: Reply, now: float) -> Delivery:
    """Return the outcome of a delivery by the HTTP status of the answer.

    ``reply``: the answer of the service. Some services (Discord, Telegram) state only in the body how long to wait.
    ``now``: Unix seconds.
    """
    delivery = judge_status(reply.status, reply.headers, now)
    if delivery.ok or delivery.retry_after_s is not None:
        return delivery
    body = _json_object(reply)
    parameters = body.get("parameters")
    wish = body.get("retry_after", parameters.get("retry_after") if isinstance(parameters, Mapping) else None)
    return replace(delivery, retry_after_s=float(wish)) if _is_time(wish) else delivery


def by_code(*keys: str, later: frozenset[int]) -> Reading:
    """Return a function that determines the outcome of a delivery by a number in the body of the answer, 0 on success.

    ``keys``: names under which the body may have the number. ``later``: numbers that allow a retry.
    """

    def reading(reply: Reply, now: float) -> Delivery:
        delivery = by_status(reply, now)
        if not delivery.ok:
            return delivery
        codes = [
            code for code in map(_json_object(reply).get, keys) if isinstance(code, int) and not isinstance(code, bool)
        ]
        if not codes:
            return _not_the_service(reply)
        if codes[0] == 0:
            return delivery
        return Delivery(ok=False, reason=f"HTTP {reply.status}, code {codes[0]}", retryable=codes[0] in later)

    return reading


def by_ok(reply: Reply, now: float) -> Delivery:
    """Return the outcome of a delivery by the body of the answer: the text ``ok``, or an object with ``"ok": true``.

    ``reply``: the answer of the service. For Slack and Telegram. ``now``: Unix seconds.
    """
    delivery = by_status(reply, now)
    if not delivery.ok or reply.body.strip() == b"ok":
        return delivery
    body = _json_object(reply)
    if "ok" not in body:
        return _not_the_service(reply)
    if body["ok"] is True:
        return delivery
    word = str(body.get("error", ""))
    why = f": {word}" if _ERROR_WORD.fullmatch(word) and len(word) <= 40 else ""
    later = word in {"ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable"}
    return Delivery(ok=False, reason=f"HTTP {reply.status}, refused{why}", retryable=later)


def _not_the_service(reply: Reply) -> Delivery:
    """Return a failed delivery for the page of a proxy, for example: it is unknown whether the message arrived."""
    return Delivery(ok=False, reason=f"HTTP {reply.status}, but not the answer of the service")


def _json_object(reply: Reply) -> Mapping[str, JSON]:
    try:
        body = json.loads(reply.body)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _is_time(value: JSON) -> TypeGuard[float]:
    """Return whether ``value`` is a length of time in seconds; JSON has integers that no float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


TYPES = {"info": "info", "warning": "warning", "critical": "failure"}
"""Severity -> apprise's name for it."""


@dataclass(frozen=True, slots=True)
class Service:
    """Description of one chat service or pager.

    Parameters
    ----------
    kind
        Name in ``rlwatch.toml``.
    schemes
        Beginnings of its addresses in apprise's notation.
    reading
        Determines the outcome of a delivery by the answer.
    limit
        Largest length of a message, bytes.
    example
        Example of an address, for error messages.
    native
        Pattern of an address as the service itself gives it, and its translation, where apprise does not know the form.
    receivers
        Returns the number of receivers in an address; only one is allowed, so that a message has one outcome.
    prepare
        Called with the plugin and the message before it is sent.
    """

    kind: str
    schemes: tuple[str, ...]
    reading: Reading
    limit: int
    example: str
    native: tuple[str, str] | None = None
    receivers: Callable[[Any], int] = len
    prepare: Callable[[Any, OutboxMessage], None] = lambda plugin, message: None  # noqa: ARG005


class ServiceNotifier:
    """Notification channel that delivers to one address of one chat service or pager.

    Parameters
    ----------
    url
        Address in apprise's notation (``slack://...``) or as the service gives it (``https://hooks.slack.com/...``).
        Treated as a secret: no part of it is ever shown.
    service
        Description of the service.
    name
        Name of the channel.
    connect_s, read_s, total_s
        Time limits in seconds, as for :class:`rlwatch.notify.http.Courier`.
    clock
        Clock; None: the machine's.

    Raises
    ------
    ConfigError
        If the address is not one of the service.
    MissingExtraError
        If apprise is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        service: Service,
        name: str,
        connect_s: float = 5.0,
        read_s: float = 5.0,
        total_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._service = service
        self.courier = Courier(name, connect_s=connect_s, read_s=read_s, total_s=total_s)
        self._requests = imported("requests")
        self.plugin = plugin_for(service, name, url)
        self._clock = clock or SystemClock()
        self._redactor = Redactor(secrets=parts(url))

    def __repr__(self) -> str:
        return f"ServiceNotifier(name={self.name!r}, kind={self._service.kind!r})"

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Send the message once to the service and return the outcome."""
        outlet = Outlet(self._requests, self.courier, message.message_id)
        error = raised_quietly(self._send, message, outlet)
        if error is not None and outlet.reply is None and not outlet.trouble:
            return Delivery(ok=False, reason=f"apprise raised {type(error).__name__}", retryable=False)
        return self._outcome(outlet)

    def _send(self, message: OutboxMessage, outlet: Outlet) -> None:
        with outlet.open():
            self._service.prepare(self.plugin, message)
            compose(self.plugin, message, self._service.limit)

    def _outcome(self, outlet: Outlet) -> Delivery:
        """Return the outcome by the answer that was received, not by apprise's result."""
        if outlet.reply is None:
            reason = self._redactor.text(outlet.trouble)
            return Delivery(ok=False, reason=reason or "apprise sent nothing", retryable=bool(reason))
        return self._service.reading(outlet.reply, self._clock.now())


def compose(plugin: Any, message: OutboxMessage, limit: int, title: str = "") -> None:
    """Let apprise send the text of ``message`` through its object ``plugin``, in at most ``limit`` bytes of UTF-8.

    ``title``: title of the message, where the service has one.
    """
    payload = message.payload
    alert = payload.get("alert") or {}
    kind = "success" if payload.get("event") == "resolved" else TYPES.get(str(alert.get("severity")), "warning")
    text = chat_text(payload, message.message_id, limit)
    plugin.notify(body=text, title=title, notify_type=kind, body_format="text", overflow="truncate")


def plugin_for(service: Service, name: str, url: str) -> Any:
    """Return apprise's plugin for the address ``url`` of a service, with one receiver.

    ``name``: name of the channel, for messages. Raises ``ConfigError``, which does not show the address.
    """
    apprise = imported("apprise")
    if isinstance(url, str) and service.native:
        pattern, address = service.native
        url = re.sub(pattern, address, url)
    with quiet_http_logs():
        plugin = apprise.Apprise.instantiate(url, suppress_exceptions=True) if isinstance(url, str) and url else None
    spoken = {scheme for key in ("protocol", "secure_protocol") for scheme in _several(getattr(plugin, key, ()))}
    if plugin is None or not spoken & set(service.schemes):
        raise ConfigError(
            f"notifier {name!r}: the address is not one of {service.kind}; it reads {service.example} "
            "(what was given is not shown: it may be a secret)"
        )
    plugin.redirects = plugin.detect_owner = False
    plugin.throttle = lambda *_args, **_kwargs: None  # our outbox waits, in rows
    if service.receivers(plugin) != 1:
        raise ConfigError(
            f"notifier {name!r}: the address names {service.receivers(plugin)} receivers and not one; "
            "each needs a channel of its own"
        )
    return plugin


def parts(url: str) -> list[str]:
    """Return the parts of an address that may be secret: all after ``://``, of at least 4 characters, encoded and
    decoded.
    """
    pieces = re.split(r"[/:@?&=#,]+", url.partition("://")[2])
    return [form for piece in pieces if len(piece) >= 4 for form in {piece, unquote(piece)}]


def imported(module: str) -> ModuleType:
    """Import the module ``module`` (apprise, or ``requests``, on which it depends). Raises ``MissingExtraError``."""
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtraError(module, "notify", "sending alerts to chat services, pagers and by e-mail") from None


def _several(schemes: Any) -> tuple[str, ...]:
    return (schemes,) if isinstance(schemes, str) else tuple(schemes or ())


def _incident(plugin: Any, message: OutboxMessage) -> None:
    """Set PagerDuty's key of the incident: a repeat adds to the incident, the end of the last alert closes it."""
    payload = message.payload
    group = payload.get("group") or {}
    over = payload.get("event") == "resolved" and not group.get("firing")
    plugin.dedup = (message.alert_id or message.message_id)[:255]
    plugin.action = "resolve" if over else "trigger"


_FEISHU = by_code("code", "StatusCode", later=frozenset({9499, 11232, 11233, 99991400}))
_DINGTALK = by_code("errcode", later=frozenset({-1, 130101, 410100}))
_WECOM = by_code("errcode", later=frozenset({-1, 45009, 45033}))

SERVICES = {
    service.kind: service
    for service in (
        Service("slack", ("slack",), by_ok, 3900, "https://hooks.slack.com/services/... or slack://..."),
        Service("discord", ("discord",), by_status, 1900, "https://discord.com/api/webhooks/... or discord://..."),
        Service("teams", ("workflow", "workflows"), by_status, 800, "the address of a workflow or workflows://..."),
        Service(
            "telegram", ("tgram",), by_ok, 3900, "tgram://BOT_TOKEN/CHAT_ID", receivers=lambda bot: len(bot.targets)
        ),
        Service(
            "feishu", ("feishu",), _FEISHU, 15000, "https://open.feishu.cn/open-apis/bot/v2/hook/... or feishu://...",
            (r"^https://open\.feishu\.cn/open-apis/bot/v2/hook/([\w-]+)/?$", r"feishu://\1"),
        ),
        Service("lark", ("lark",), _FEISHU, 15000, "https://open.larksuite.com/open-apis/bot/v2/hook/... or lark://..."),
        Service(
            "dingtalk", ("dingtalk",), _DINGTALK, 15000,
            "https://oapi.dingtalk.com/robot/send?access_token=... or dingtalk://SECRET@TOKEN",
            (r"^https://oapi\.dingtalk\.com/robot/send\?access_token=(\w+)$", r"dingtalk://\1"),
        ),
        Service("wecom", ("wecombot",), _WECOM, 2040, "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=..."),
        Service(
            "pagerduty", ("pagerduty",), by_status, 1000, "pagerduty://INTEGRATION_KEY@API_KEY", prepare=_incident
        ),
    )
}  # fmt: skip
"""Kind -> service. Codes that mean "later" are the rate limits and passing troubles the services document."""

slack, discord, teams, telegram, feishu, lark, dingtalk, wecom, pagerduty = (
    partial(ServiceNotifier, service=service) for service in SERVICES.values()
)
