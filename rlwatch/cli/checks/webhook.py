"""Is alerting configured as it can work, and are the webhooks' receivers there? No address is ever shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlwatch.cli.checks import Check, Level
from rlwatch.errors import ConfigError

if TYPE_CHECKING:
    from rlwatch.alerts.config import ChannelConfig, Config

PING_S = 5.0


def examine(*, ping: bool = False, store_root: Path | None = None) -> list[Check]:
    """The configuration, each webhook it names, and with ``ping`` whether anybody answers there."""
    from rlwatch.alerts.config import load_config

    try:
        config = load_config(store_root=store_root)
    except ConfigError as error:
        return [Check("configuration", Level.FAIL, str(error))]
    where = str(config.path) if config.path else "the defaults (no rlwatch.toml here)"
    checks = [Check("configuration", Level.OK, f"{where}, {len(config.rules)} alert rules")]
    said = [*config.warnings, *([config.refused] if config.refused else [])]
    checks += [Check("configuration", Level.WARN, warning) for warning in said]
    return checks + _channels(config, ping=ping)


def _channels(config: Config, *, ping: bool) -> list[Check]:
    from rlwatch.alerts.config import URL_VARIABLE, build_notifiers

    channels = [channel for channel in config.channels if channel.kind != "console"]
    if not channels:
        return [Check("webhook", Level.OK, f"none ({URL_VARIABLE} is not set): alerts stay in the store")]
    try:
        build_notifiers(config, console=False)
    except ConfigError as error:
        return [Check("channels", Level.FAIL, f"cannot be used: {error}")]
    checks = [_described(channel) for channel in channels]
    return checks + [_ping(channel) for channel in channels if ping and channel.kind == "webhook"]


def _described(channel: ChannelConfig) -> Check:
    from rlwatch.alerts.config import SECRET_VARIABLE
    from rlwatch.redaction import redact_url

    if channel.kind != "webhook":
        return Check(channel.name, Level.OK, f"{channel.kind}; rlwatch alerts test --channel {channel.name} tries it")
    shown = redact_url(_value(channel, "url"))
    if not _value(channel, "secret"):
        unsigned = f"unsigned: set {SECRET_VARIABLE} and receivers can tell our messages from others"
        return Check(channel.name, Level.WARN, f"{shown}, {unsigned}")
    return Check(channel.name, Level.OK, f"{shown}, signed")


def _value(channel: ChannelConfig, key: str) -> str:
    from rlwatch.alerts.config import REFERENCE

    value = str(channel.options.get(key) or "")
    return os.environ.get(value.removeprefix(REFERENCE), "") if value.startswith(REFERENCE) else value


def _ping(channel: ChannelConfig) -> Check:
    """HEAD carries no message; any HTTP answer, be it 405, means that somebody is there."""
    import httpx

    from rlwatch.notify.quiet import quiet_http_logs
    from rlwatch.notify.webhook import LOOPBACK
    from rlwatch.redaction import Redactor

    url, name = _value(channel, "url"), f"{channel.name} ping"
    local = urlsplit(url).hostname in LOOPBACK
    try:
        with quiet_http_logs():
            answer = httpx.head(url, timeout=PING_S, follow_redirects=False, trust_env=not local)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return Check(name, Level.FAIL, f"nobody answers: {Redactor(urls=[url]).error(error)}")
    return Check(name, Level.OK, f"somebody answers (HTTP {answer.status_code} to HEAD)")
