"""Is there a webhook, and is its receiver there? The address itself is never shown."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from rlwatch.cli.checks import Check, Level
from rlwatch.errors import ConfigError

URL_VARIABLE = "RLWATCH_WEBHOOK_URL"
SECRET_VARIABLE = "RLWATCH_WEBHOOK_SECRET"  # noqa: S105  (the variable's name)
PING_S = 5.0


def examine(*, ping: bool = False) -> list[Check]:
    """Whether a webhook is configured and usable, and with ``ping`` whether anybody answers there."""
    url = os.environ.get(URL_VARIABLE, "")
    if not url:
        return [Check("webhook", Level.OK, f"none ({URL_VARIABLE} is not set): alerts stay in the store")]
    configured = _configured(url)
    if configured.level is Level.FAIL or not ping:
        return [configured]
    return [configured, _ping(url)]


def _configured(url: str) -> Check:
    from rlwatch.notify.redact import redact_url
    from rlwatch.notify.webhook import WebhookNotifier

    try:
        WebhookNotifier(url)
    except ConfigError as error:
        return Check("webhook", Level.FAIL, f"{URL_VARIABLE} cannot be used: {error}")
    if not os.environ.get(SECRET_VARIABLE):
        unsigned = f"unsigned: set {SECRET_VARIABLE} and receivers can tell our messages from others"
        return Check("webhook", Level.WARN, f"{redact_url(url)}, {unsigned}")
    return Check("webhook", Level.OK, f"{redact_url(url)}, signed")


def _ping(url: str) -> Check:
    """HEAD carries no message; any HTTP answer, be it 405, means that somebody is there."""
    import httpx

    from rlwatch.notify.quiet import quiet_http_logs
    from rlwatch.notify.redact import Redactor
    from rlwatch.notify.webhook import LOOPBACK

    local = urlsplit(url).hostname in LOOPBACK
    try:
        with quiet_http_logs():
            answer = httpx.head(url, timeout=PING_S, follow_redirects=False, trust_env=not local)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        reason = Redactor(urls=[url]).error(error)
        return Check("webhook ping", Level.FAIL, f"nobody answers: {reason}")
    return Check("webhook ping", Level.OK, f"somebody answers (HTTP {answer.status_code} to HEAD)")
