"""``rlwatch.toml``: rules, channels, where the store and the dashboard are.

Looked for at the path given, else in the working directory, else in the store's root. Without a file the
defaults apply, and nothing beyond the standard library is needed. The environment adds to either:
``RLWATCH_WEBHOOK_URL`` (and ``RLWATCH_WEBHOOK_SECRET``, which signs) make the channel ``webhook``. The file
names secrets as ``"env:VARIABLE"``; they are read when the notifiers are built and kept nowhere else.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlwatch.alerts.kinds import unknown_kinds
from rlwatch.alerts.policy import Policy
from rlwatch.alerts.rules import Rule, default_rules
from rlwatch.alerts.template import default_toml
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.notify.registry import build_notifier
from rlwatch.ports import Notifier
from rlwatch.records import JSON

__all__ = ["ChannelConfig", "Config", "build_notifiers", "default_toml", "load_config"]

FILE_NAME = "rlwatch.toml"
URL_VARIABLE = "RLWATCH_WEBHOOK_URL"
SECRET_VARIABLE = "RLWATCH_WEBHOOK_SECRET"  # noqa: S105  (the variable's name)
REFERENCE = "env:"


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """One channel. ``options`` may name secrets (``"env:..."``) and hold an address: they are never shown."""

    name: str
    kind: str
    options: Mapping[str, JSON] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Config:
    """What applies. ``warnings``: sentences about what is allowed but cannot be meant; ``actions``: as in the file."""

    policy: Policy = field(default_factory=Policy)
    channels: tuple[ChannelConfig, ...] = (ChannelConfig("console", "console"),)
    store_url: str | None = None
    dashboard_url: str = ""
    path: Path | None = None
    warnings: tuple[str, ...] = ()
    actions: tuple[Mapping[str, JSON], ...] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that apply."""
        return self.policy.rules

    @property
    def channel_names(self) -> tuple[str, ...]:
        """The channels messages can be written for."""
        return tuple(channel.name for channel in self.channels)

    def with_webhook(self, url: str, secret: str = "") -> Config:
        """The same, but the channel ``webhook`` goes to this address; ``secret`` if given replaces the file's."""
        old = next((c.options for c in self.channels if c.name == "webhook" and c.kind == "webhook"), {})
        options = {**old, "url": url} | ({"secret": secret} if secret else {})
        others = tuple(channel for channel in self.channels if channel.name != "webhook")
        return replace(self, channels=(*others, ChannelConfig("webhook", "webhook", options)))


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    store_root: str | os.PathLike[str] | None = None,
    webhook_url: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Config:
    """The configuration that applies here.

    Parameters
    ----------
    path
        The file; None: look for it.
    store_root
        The second place to look.
    webhook_url
        Where the channel ``webhook`` goes, whatever the file and the environment say.
    env
        The environment; the process's own if None.

    Raises
    ------
    ConfigError
        If ``path`` is given and not there, or a file does not say what it could: all that is wrong with it
        at once, each with its key.
    MissingExtraError
        If there is a file and pydantic is not installed.
    """
    env = os.environ if env is None else env
    file = _find(path, store_root)
    config = Config() if file is None else _read(file)
    url = webhook_url or env.get(URL_VARIABLE, "")
    return config.with_webhook(url, env.get(SECRET_VARIABLE, "")) if url else config


def build_notifiers(
    config: Config, *, console: bool = True, env: Mapping[str, str] | None = None
) -> dict[str, Notifier]:
    """Channel -> notifier, secrets read from the environment; without the console's if not ``console``.

    Raises
    ------
    ConfigError
        If a variable is not set or a notifier refuses its settings.
    MissingExtraError
        If a notifier's library is not installed.
    """
    env = os.environ if env is None else env
    return {
        channel.name: build_notifier(channel.kind, channel.name, _resolved(config, channel, env))
        for channel in config.channels
        if console or channel.kind != "console"
    }


def _find(path: str | os.PathLike[str] | None, store_root: str | os.PathLike[str] | None) -> Path | None:
    if path is not None:
        if not Path(path).is_file():
            raise ConfigError(f"there is no configuration file {os.fspath(path)!r}; 'rlwatch rules init' writes one")
        return Path(path)
    places: Sequence[Path] = [Path(FILE_NAME), *([Path(store_root) / FILE_NAME] if store_root is not None else [])]
    return next((place for place in places if place.is_file()), None)


def _read(file: Path) -> Config:
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or type(error).__name__}") from None
    try:
        from rlwatch.alerts.schema import parse
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "pydantic", "alerts", f"reading {file}") from None
    parsed = parse(str(file), raw)
    named = {rule.name: rule for rule in parsed.policy.rules}
    kept = [named.pop(rule.name, rule) for rule in default_rules()] if parsed.default_rules else []
    rules = (*kept, *named.values())
    channels = {"console": ChannelConfig("console", "console")}
    channels |= {name: ChannelConfig(name, kind, options) for name, kind, options in parsed.channels}
    problems = unknown_kinds(rules, parsed.policy.inhibitions, parsed.actions)
    return Config(
        policy=replace(parsed.policy, rules=rules),
        channels=tuple(channels.values()),
        store_url=parsed.store_url,
        dashboard_url=parsed.dashboard_url,
        path=file,
        warnings=tuple(f"{file}: {problem}" for problem in problems),
        actions=parsed.actions,
    )


def _resolved(config: Config, channel: ChannelConfig, env: Mapping[str, str]) -> dict[str, JSON]:
    options = dict(channel.options)
    for key, value in options.items():
        if isinstance(value, str) and value.startswith(REFERENCE):
            variable = value.removeprefix(REFERENCE)
            if not env.get(variable):
                where = config.path or "the configuration"
                raise ConfigError(
                    f"{where}: notify.{channel.name}.{key} is in the environment variable {variable!r}, "
                    "which is not set"
                )
            options[key] = env[variable]
    return options
