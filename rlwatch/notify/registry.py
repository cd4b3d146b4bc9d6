"""The kinds of notifier there are, by the word that names them in ``rlwatch.toml``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from rlwatch.errors import ConfigError
from rlwatch.ports import Notifier
from rlwatch.records import JSON

HOMES = {
    "console": "rlwatch.notify.console:ConsoleNotifier",
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


def build_notifier(kind: str, name: str, options: Mapping[str, JSON] | None = None) -> Notifier:
    """A notifier of this kind as channel ``name``.

    Raises
    ------
    ConfigError
        If there is no such kind, or it refuses its settings (whose values are not shown).
    """
    if kind not in HOMES:
        raise ConfigError(f"notifier {name!r}: there is no kind {kind!r}; there are {', '.join(sorted(HOMES))}")
    try:
        return _factory(kind)(name=name, **(options or {}))
    except TypeError:
        raise ConfigError(
            f"notifier {name!r} of kind {kind!r}: wrong or missing settings, got {sorted(options or {})}"
        ) from None


def _factory(kind: str) -> Callable[..., Notifier]:
    module, _, attribute = HOMES[kind].partition(":")
    return cast("Callable[..., Notifier]", getattr(import_module(module), attribute))
