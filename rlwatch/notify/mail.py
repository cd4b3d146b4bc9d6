"""A notification channel that sends alerts by e-mail, through apprise."""

from __future__ import annotations

import smtplib
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rlwatch.error_boundary import Reported
from rlwatch.errors import ConfigError
from rlwatch.notify.http import raised_quietly
from rlwatch.notify.payload import headline
from rlwatch.notify.services import Service, by_status, compose, imported, plugin_for
from rlwatch.ports import Delivery
from rlwatch.records import OutboxMessage

EMAIL = Service(
    "email",
    ("mailto", "mailtos"),
    by_status,
    20_000,
    "mailtos://USER:PASSWORD@HOST?smtp=SERVER&from=ADDRESS&to=ADDRESS",
    receivers=lambda _: 1,
)

_now = threading.local()


class EmailNotifier:
    """Notification channel that sends one e-mail for each message, to all receivers of the address.

    The headers ``X-RLWatch-Delivery`` and ``Message-ID`` are the same at every try: most mail programs show two such
    mails as one. It sends plain text only, and draws no random number of the process.

    Parameters
    ----------
    url
        Address in apprise's notation. Treated as a secret: no part of it is ever shown.
    name
        Name of the channel.
    total_s
        Limit in seconds on the whole delivery, also on each answer of the server.

    Raises
    ------
    ConfigError
        If the address is not one of an e-mail or the limit is not positive.
    MissingExtraError
        If apprise is not installed.
    """

    def __init__(self, url: str, *, name: str = "email", total_s: float = 20.0) -> None:
        if not total_s > 0:
            raise ConfigError(f"notifier {name!r}: time limits must be > 0 s, got {total_s!r}")
        self.name = name
        self.plugin = plugin_for(EMAIL, name, url)
        self.plugin.socket_connect_timeout = total_s
        self.plugin.resolve_format = lambda *_args, **_kwargs: imported("apprise").NotifyFormat.TEXT
        self._total_s = total_s
        self._sending: threading.Thread | None = None
        _report_smtp_errors(imported("apprise.plugins.email.base"))

    @property
    def busy(self) -> bool:
        """True while an attempt to deliver still waits for a mail server, also one that was given up."""
        return self._sending is not None and self._sending.is_alive()

    def __repr__(self) -> str:
        return f"EmailNotifier(name={self.name!r})"

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Send the message once by e-mail and return the outcome.

        A server that does not answer within the limit is left to a thread of its own.
        """
        if self.busy:
            return Delivery(ok=False, reason="the server still holds the try before")
        outcome: list[Delivery] = []
        self._sending = threading.Thread(
            target=lambda: outcome.append(self._sent(message)), name="rlwatch-email", daemon=True
        )
        self._sending.start()
        self._sending.join(self._total_s)
        return outcome[0] if outcome else Delivery(ok=False, reason=f"no whole answer within {self._total_s:g} s")

    def _sent(self, message: OutboxMessage) -> Delivery:
        heard: list[BaseException | Mapping[str, Any]] = []
        _now.heard, _now.message_id = heard, message.message_id
        self.plugin.headers["X-RLWatch-Delivery"] = message.message_id
        try:
            error = raised_quietly(compose, self.plugin, message, EMAIL.limit, title=headline(message.payload)[:200])
        finally:
            _now.heard = None
        if error is not None:
            heard.append(error)
        return next((judged for judged in map(_judged, heard) if not judged.ok), _judged(None)) if heard else SENT


SENT = Delivery(ok=True, reason="the mail server took it")


def _judged(heard: BaseException | Mapping[str, Any] | None) -> Delivery:
    """Of an error only its type and the server's number are shown: 4xx may pass, 5xx is final (RFC 5321, 4.2.1)."""
    codes = _codes(heard)
    if codes:
        return Delivery(ok=False, reason=f"SMTP {codes[0]}", retryable=any(code < 500 for code in codes))
    final = isinstance(heard, smtplib.SMTPNotSupportedError | UnicodeError)
    return Delivery(ok=False, reason=f"the mail server did not take it: {type(heard).__name__}", retryable=not final)


def _codes(heard: BaseException | Mapping[str, Any] | None) -> list[int]:
    if isinstance(heard, smtplib.SMTPResponseException):
        return [heard.smtp_code] if heard.smtp_code > 0 else []
    refused = heard.recipients if isinstance(heard, smtplib.SMTPRecipientsRefused) else heard
    return [int(code) for code, _ in refused.values()] if isinstance(refused, Mapping) else []


def _report_smtp_errors(base: Any) -> None:
    """Make apprise's SMTP report errors to this thread: apprise itself returns only success. Once per process."""
    usual = base.AppriseSMTPController
    if getattr(usual, "overheard", False):
        return

    class Overheard(usual):  # type: ignore[misc,valid-type]
        overheard = True

        def __enter__(self) -> Any:
            return _reporting(super().__enter__)

        def sendmail(self, from_addr: str, to_addrs: list[str], message: str) -> bool:
            if getattr(_now, "heard", None) is None:
                return bool(super().sendmail(from_addr, to_addrs, message))
            with suppress(OSError, smtplib.SMTPException, RuntimeError):
                refused = _reporting(lambda: self._socket.sendmail(from_addr, to_addrs, message))
                if refused:
                    _now.heard.append(refused)
                return not refused
            return False

    base.AppriseSMTPController, base.make_msgid = Overheard, _our_id(base.make_msgid)


def _our_id(usual: Callable[..., str]) -> Callable[..., str]:
    """Return a maker of message ids: the usual ids are drawn from ``random``, which belongs to the trainer."""

    def made(*args: Any, **kwargs: Any) -> str:
        delivering = getattr(_now, "heard", None) is not None
        return f"<{_now.message_id}@rlwatch>" if delivering else usual(*args, **kwargs)

    return made


def _reporting(do: Callable[[], Any]) -> Any:
    with Reported(_collect):
        return do()


def _collect(error: BaseException) -> None:
    if isinstance(error, Exception) and getattr(_now, "heard", None) is not None:
        _now.heard.append(error)
