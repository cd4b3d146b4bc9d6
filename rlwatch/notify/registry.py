"""The kinds of notification channels, by the name that ``rlwatch.toml`` uses for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from rlwatch.error_boundary import call_or
from rlwatch.errors import ConfigError
from rlwatch.notify.payload import one_line
from rlwatch.plugins import usable
from rlwatch.ports import Delivery, Notifier
from rlwatch.records import JSON, OutboxMessage

HOMES = {
    "console": "rlwatch.notify.registry:ConsoleNotifier",
    "webhook": "rlwatch.notify.webhook:WebhookNotifier",
    "slack": "rlwatch.notify.services:slack",
    "discord": "rlwatch.notify.services:discord",
    "teams": "rlwatch.notify.services:teams",
    "telegram": "rlwatch.notify.services:telegram",
    "feishu": "rlwatch.notify.services:feishu",
    "lark": "rlwatch.notify.services:lark",
    "dingtalk": "rlwatch.notify.services:dingtalk",
    "wecom": "rlwatch.notify.services:wecom",
    "pagerduty": "rlwatch.notify.services:pagerduty",
    "email": "rlwatch.notify.mail:EmailNotifier",
    "wandb": "rlwatch.notify.wandb_alert:WandbNotifier",
    "command": "rlwatch.notify.command:CommandNotifier",
}
"""Kind -> ``module:class``, imported when first needed. Classes take ``name=`` and their settings."""
DOOR = "rlwatch.notifiers"


def build_notifier(kind: str, name: str, options: Mapping[str, JSON] | None = None) -> Notifier:
    """Create a notification channel of the given ``kind``, called ``name``, with its settings ``options``.

    Raises
    ------
    ConfigError
        If there is no such kind, or it refuses its settings (whose values are not shown).
    """
    if kind not in notifier_kinds():
        raise ConfigError(
            f"notifier {name!r}: there is no kind {kind!r}; there are {', '.join(sorted(notifier_kinds()))}"
        )
    settings = dict(options or {})
    others = usable(DOOR, HOMES)
    if kind in others:
        return call_or(
            lambda: cast("Notifier", others[kind](name=name, **settings.pop("options", {}), **settings)),
            lambda error: _refused(name, kind, error),
        )
    try:
        return _factory(kind)(name=name, **settings)
    except TypeError:
        raise ConfigError(
            f"notifier {name!r} of kind {kind!r}: wrong or missing settings, got {sorted(options or {})}"
        ) from None


def notifier_kinds() -> frozenset[str]:
    """Return the names of all kinds of notification channels, with those of plugins."""
    return frozenset((*HOMES, *usable(DOOR, HOMES)))


def _refused(name: str, kind: str, error: Exception) -> Notifier:
    """Raise ``ConfigError`` with only the type of the plugin's exception, because its text may hold a setting."""
    raise ConfigError(f"notifier {name!r}: the plugin's kind {kind!r} refuses its settings ({type(error).__name__})")


def _factory(kind: str) -> Callable[..., Notifier]:
    module, _, attribute = HOMES[kind].partition(":")
    return cast("Callable[..., Notifier]", getattr(import_module(module), attribute))


# Alerts on this process's own log.

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


class ConsoleNotifier:
    """Notification channel that writes one line to the logger ``rlwatch``.

    Messages about an alert that ended, and info, are INFO; critical ones are ERROR; others WARNING.

    Parameters
    ----------
    name
        Name of the channel.
    """

    def __init__(self, *, name: str = "console") -> None:
        self.name = name
        self._logger = logging.getLogger("rlwatch")

    def __repr__(self) -> str:
        return f"ConsoleNotifier(name={self.name!r})"

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Log the text of the message as one line; the outcome is always success."""
        payload = message.payload
        alert = payload.get("alert") or {}
        resolved = payload.get("event") == "resolved"
        level = logging.INFO if resolved else LEVELS.get(alert.get("severity", ""), logging.WARNING)
        self._logger.log(level, "%s", one_line(str(payload.get("text", ""))), extra={"message_id": message.message_id})
        return Delivery(ok=True, reason="logged")
