"""``rlwatch.toml``: rules, channels, and the addresses of the store and the dashboard.

The file is looked for at the path given, at ``RLWATCH_CONFIG``, in the working directory, and in the store's root, in
this order. Without a file the defaults apply, and nothing beyond the standard library is needed. The environment adds
to either: ``RLWATCH_WEBHOOK_URL`` (and ``RLWATCH_WEBHOOK_SECRET``, which signs) define the channel ``webhook``. The
file names secrets as ``"env:VARIABLE"``; they are read when the notifiers are built and stored nowhere else.

Only the user's own file applies in full (:mod:`rlwatch.trust`): it runs programs, reads the environment, names
addresses and commands runs. A file that came with the data only tunes rules: it cannot hold back critical alerts, is
never an error, and the rest of its contents is listed in ``Config.refused``.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlwatch.alerts.rules import AlertingConfig, Inhibition, Rule, default_rules, unknown_kinds
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.notify.payload import one_line
from rlwatch.notify.registry import build_notifier
from rlwatch.ports import Notifier
from rlwatch.records import JSON, Severity
from rlwatch.redaction import remember
from rlwatch.trust import FILE_NAME, why_not_obeyed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rlwatch.alerts.schema import Parsed

__all__ = ["ChannelConfig", "Config", "build_notifiers", "default_toml", "load_config"]


CONFIG_VARIABLE = "RLWATCH_CONFIG"
URL_VARIABLE = "RLWATCH_WEBHOOK_URL"
SECRET_VARIABLE = "RLWATCH_WEBHOOK_SECRET"  # noqa: S105  (the variable's name)
REFERENCE = "env:"

MOST_BYTES = 65_536
MOST_RULES = 200
"""Largest number of rules in a file that came with the data: every rule costs the trainer time."""
ADDED = ("kinds", "channels")
TAKEN = ("min_severity", "for_steps", "for_critical", "keep_firing_for", "labels", "repeat_minutes")
"""Keys of a default rule that such a file may change: it adds to some and sets others; ``for_critical`` only
downwards."""


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """Configuration of one notification channel: its name, its kind, and the options of that kind.

    ``options`` may name secrets (``"env:..."``) and contain an address: they are never shown.
    """

    name: str
    kind: str
    options: Mapping[str, JSON] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration that applies, from ``rlwatch.toml``, the environment and defaults.

    Parameters
    ----------
    policy
        Alert rules and their settings.
    channels
        Notification channels.
    store_url, dashboard_url
        Addresses of the store and the dashboard, if set.
    path
        File from which it was read; None: no file.
    warnings
        Sentences about settings that are valid but hardly intended.
    actions, rescue
        Tables of the file: commands that alerts may send without a user, and the permission to save failing runs.
    refused
        Settings that a file in the store's directory may not make, in one sentence; empty: none.
    retention
        Kind of data -> seconds for which it is kept.
    map
        Role of a metric, such as ``reward`` -> names that the user's logs have for it.
    """

    policy: AlertingConfig = field(default_factory=AlertingConfig)
    channels: tuple[ChannelConfig, ...] = (ChannelConfig("console", "console"),)
    store_url: str | None = None
    dashboard_url: str = ""
    path: Path | None = None
    warnings: tuple[str, ...] = ()
    actions: tuple[Mapping[str, JSON], ...] = ()
    rescue: tuple[Mapping[str, JSON], ...] = ()
    refused: str = ""
    retention: Mapping[str, float] = field(default_factory=dict)
    map: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Alert rules of this configuration, in order."""
        return self.policy.rules

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the notification channels for which messages can be written."""
        return tuple(channel.name for channel in self.channels)

    def with_webhook(self, url: str, secret: str = "") -> Config:
        """Return a copy with this address for the channel ``webhook``; ``secret``, if given, replaces the file's."""
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
    """Load the configuration that applies here, from a file and the environment.

    Parameters
    ----------
    path
        The file; None: search for it.
    store_root
        Root of the store: the last place to search, where a file is only data.
    webhook_url
        Address of the channel ``webhook``; overrides file and environment.
    env
        The environment; the process's own if None.

    Raises
    ------
    ConfigError
        If a file that is named does not exist, or the user's own is not valid: one message with every problem and its
        key.
    MissingExtraError
        If there is such a file and pydantic is not installed.
    """
    env = os.environ if env is None else env
    file, foreign = _find(path or env.get(CONFIG_VARIABLE) or None, store_root)
    config = Config() if file is None else _tuned_by(file, foreign) if foreign else _read(file)
    url = webhook_url or env.get(URL_VARIABLE, "")
    return config.with_webhook(url, env.get(SECRET_VARIABLE, "")) if url else config


def build_notifiers(
    config: Config, *, console: bool = True, env: Mapping[str, str] | None = None
) -> dict[str, Notifier]:
    """Create the notification channels of a configuration, with secrets from the environment; return name -> channel.

    ``console``: whether to include channels that log to the console.

    Raises
    ------
    ConfigError
        If a variable is not set or a channel refuses its settings.
    MissingExtraError
        If a channel's library is not installed.
    """
    env = os.environ if env is None else env
    return {
        channel.name: build_notifier(channel.kind, channel.name, _resolved(config, channel, env))
        for channel in config.channels
        if console or channel.kind != "console"
    }


def own_file() -> Path | None:
    """Return the absolute path of the user's configuration file, for a process that is started in another directory.

    It is the file in ``RLWATCH_CONFIG``, or ``rlwatch.toml`` in the working directory if it is the user's own; None
    without one.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    here = Path(FILE_NAME)
    if named:
        return Path(named).absolute()
    return here.absolute() if here.is_file() and not why_not_obeyed(here) else None


def _find(named: str | os.PathLike[str] | None, store_root: str | os.PathLike[str] | None) -> tuple[Path | None, str]:
    """Return the file that applies, and why it does not apply in full (empty if it does)."""
    if named is not None:
        if not Path(named).is_file():
            raise ConfigError(f"there is no configuration file {os.fspath(named)!r}; 'rlwatch rules init' writes one")
        return Path(named), ""
    places = [Path(FILE_NAME), *([Path(store_root) / FILE_NAME] if store_root is not None else [])]
    file = next((place for place in places if place.is_file()), None)
    return file, why_not_obeyed(file, store_root) if file is not None else ""


def _read(file: Path) -> Config:
    parsed = _parsed(file, _text(file))
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
        rescue=parsed.rescue,
        retention=parsed.retention,
        map=parsed.map,
    )


def _text(file: Path, most: int = -1) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(most)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or type(error).__name__}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def _raw(file: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{file} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # also of numbers that are too long for an int
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def _parsed(file: Path, text: str) -> Parsed:
    raw = _raw(file, text)
    try:
        from rlwatch.alerts.schema import parse
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "pydantic", "alerts", f"reading {file}") from None
    return parse(str(file), raw)


def _tuned_by(file: Path, foreign: str) -> Config:
    """Return the default rules as tuned by a file that came with the data."""
    try:
        text = _text(file, MOST_BYTES + 1)
    except ConfigError as error:
        return Config(refused=one_line(f"{file} is not used: {error}")[:500])
    return tuned_config(file, text, foreign)


def tuned_config(file: Path, text: str, foreign: str = "it lies in a store") -> Config:
    """Return the default rules as changed by ``text`` of a file that came with the data, which may only tune rules.

    ``foreign``: reason why the file is data, for messages. Other settings in it are listed in ``refused``.
    """
    try:
        if len(text) > MOST_BYTES:
            raise ConfigError(f"{file} is larger than {MOST_BYTES} bytes")
        tables = [table for table in _table_list(_raw(file, text).get("rules")) if isinstance(table, dict)]
        parsed = _parsed(file, text)
    except ConfigError as error:
        return Config(refused=one_line(f"{file} is not used: {error}")[:500])
    usual = {rule.name: rule for rule in default_rules()}
    refused = _beyond_rules(parsed, _raw(file, text))
    rules = dict(usual)
    for rule, given in zip(parsed.policy.rules[:MOST_RULES], tables, strict=False):
        rules[rule.name], ignored = _tuned(usual.get(rule.name), rule, given.keys())
        refused += [f"{key} of rule {rule.name}" for key in ignored]
    if len(tables) > MOST_RULES:
        refused.append(f"rules after the first {MOST_RULES}")
    return Config(policy=AlertingConfig(tuple(rules.values())), path=file, refused=_refusal(file, foreign, refused))


def _table_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _beyond_rules(parsed: Parsed, raw: Mapping[str, object]) -> list[str]:
    """Return the names of the tables in the file other than rules."""
    tables = [f"[notify.{name}]" for name, _, _ in parsed.channels]
    tables += ["[[actions]]"] if parsed.actions else []
    tables += ["[[rescue]]"] if parsed.rescue else []
    tables += [
        f"[{name}]"
        for name in ("store", "dashboard", "retention", "grouping", "quiet_hours", "inhibit", "map")
        if name in raw
    ]
    tables += [] if parsed.policy.forecast else ["forecast = false"]
    return tables + ([] if parsed.default_rules else ["default_rules = false"])


def _tuned(usual: Rule | None, rule: Rule, given: Iterable[str]) -> tuple[Rule, list[str]]:
    """Return the rule that applies, and the refused keys: those that would delay or reduce critical alerts."""
    keys = [key for key in given if key != "name"]
    if usual is None:  # a rule more only adds alerts
        ignored = [key for key in keys if key == "severity" or key.startswith("escalate_")]
        return replace(rule, severity=None, **_NEVER_ESCALATES), ignored
    changed: dict[str, Any] = {key: getattr(rule, key) for key in keys if key in TAKEN}
    for key in (key for key in keys if key in ADDED):
        old = getattr(usual, key)
        changed[key] = () if key == "kinds" and not old else tuple(dict.fromkeys((*old, *getattr(rule, key))))
    waits = [usual.wait(Severity.CRITICAL), changed.get("for_steps", usual.for_steps)]
    changed["for_critical"] = min([*waits, *([rule.for_critical] if rule.for_critical is not None else [])])
    return replace(usual, **changed), [key for key in keys if key not in changed]


_NEVER_ESCALATES: dict[str, Any] = {
    "escalate_after_minutes": 0.0,
    "escalate_after_steps": 0,
    "escalate_to": (),
    "escalate_severity": None,
}


def _refusal(file: Path, foreign: str, refused: list[str]) -> str:
    if not refused:
        return ""
    return one_line(
        f"{file} only tunes rules, because {foreign}; not obeyed: {', '.join(refused)[:300]}. If you trust everyone "
        f"who can write it, name it: --config {file}, {CONFIG_VARIABLE}={file} or config_file="
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
            remember(options[key])
        elif key in ("url", "secret") and isinstance(value, str):
            remember(value)
    return options


# The commented ``rlwatch.toml`` that ``rlwatch rules init`` writes: the default rules, spelt out.

HEAD = """\
# Alert rules and channels of rlwatch. Check this file with: rlwatch rules test
# What it would have sent for a log: rlwatch rules test train.log
# A rule with the name of a default one replaces it; any other is added.
# default_rules = false          # only the rules of this file
# forecast = false               # detectors only: no chances of a failure to come

# [store]
# url = "./rlwatch-runs"

# [retention]                    # what `rlwatch db prune` removes; findings, alerts and metrics stay
# tokens = "30d"
# completions = "90d"
# archived = "365d"              # whole archived runs

# [map]                          # meanings of names in your logs: role = "name"
# reward = "my_score"

# [dashboard]                    # alerts link to it
# url = "http://127.0.0.1:8501"

# A webhook gets signed JSON by POST. Secrets stay in the environment; RLWATCH_WEBHOOK_URL and
# RLWATCH_WEBHOOK_SECRET alone would do, too.
# [notify.webhook]
# url = "env:RLWATCH_WEBHOOK_URL"
# secret = "env:RLWATCH_WEBHOOK_SECRET"
# total_s = 10.0                 # seconds a delivery may take

# [notify.oncall]                # another channel, for rules that name it
# kind = "webhook"
# url = "env:ONCALL_URL"

# Slack, Discord, Teams, Telegram, Feishu, Lark, DingTalk, WeCom, PagerDuty, e-mail (pip install
# 'rlwatch-monitor[notify]'), wandb and programs are channels too: docs/notifiers.md. Try them: rlwatch alerts test
# [notify.slack]
# url = "env:SLACK_URL"

# [notify.pager]                 # gets the message as JSON on its standard input; no shell
# kind = "command"
# argv = ["cat", "-"]
# pass_env = ["PAGER_TOKEN"]     # of the environment it sees only this, PATH, HOME and the like

# Keys of a rule (steps are the trainer's step numbers, not rows and not seconds):
#   kinds, except_kinds, detectors   findings of this rule; none given: all
#   min_severity                     "info", "warning" (default) or "critical"
#   for_steps                        fires after the condition held this many steps
#   for_critical                     the same for critical findings
#   keep_firing_for                  resolves after the condition was gone this many steps
#   severity                         overrides the finding's
#   channels                         channels notified; []: record the alert only
#   labels                           free text for receivers, as in { team = "rl" }
#   repeat_minutes                   repeat interval until resolved or acknowledged; 0: never
#   escalate_after_minutes, escalate_after_steps
#                                    if not acknowledged (rlwatch alerts ack ID) for this long, ...
#   escalate_to, escalate_severity   ... these channels are notified too, at this severity
#   only_live                        repeats and escalates only while the run is live (default true)
"""

QUIET = """
# Alerts that begin together are one message: of a "run", of a "project", or "none" (each its own).
# wait_s: seconds an alert waits for others of its group; 0: those of one step.
[grouping]
by = {by}
wait_s = {wait_s}

# When people sleep, only what is as bad as let_through is published; the rest afterwards, if it still holds.
# [[quiet_hours]]
# from = "22:00"
# to = "07:00"
# time_zone = "Europe/Berlin"
# let_through = "critical"
# days = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]   # on which they begin

# While an alert of "when" fires (at min_severity or worse), those of "mutes" on the same run are kept back, up to
# the severity up_to. They come later if they go on without it, for as many steps as their rule's for_steps or
# keep_firing_for, whichever is more. No mutes: all others. inhibit = [] turns this off.
"""

ACTIONS = """
# Commands that rlwatch may give to a live run by itself. None, unless written here; while dry_run is true only an event
# is recorded. do, args: a command as 'rlwatch command' takes it.
# A reset of the reference upon a collapse is refused: it would make the collapsing policy the anchor.
# [[actions]]
# name = "reset when due"
# kinds = ["kl_saturation", "reset_due"]
# do = "reset-reference"
# args = { optimizer = "keep" }
# min_severity = "warning"
# cooldown_steps = 200
# most = 3            # in the life of a run
# dry_run = true
"""

RESCUE = """
# Save a run automatically: hold, probe, roll back, remove the cause, go on. It needs watch(snapshots=True).
# [[rescue]]
# probe = 2             # batches that judge weights
# scale = 0.1           # of the learning rate after a fall of the reward; mild_scale = 0.3 after a mismatch
# cooldown_steps = 30
# quiet_steps = 50      # after which the rate is raised again
# most = 2              # rescues; the alert after them restores and stops
# skip_nonfinite = false  # from the start, leave out updates whose gradient is NaN or infinite
# dry_run = true
"""


def default_toml() -> str:
    """Return the text of a commented ``rlwatch.toml`` with the default rules. Loading it gives the default rules."""
    usual = AlertingConfig()
    parts = [QUIET.format(by=_toml_text(usual.grouping.by.value), wait_s=_toml_text(usual.grouping.wait_s))]
    parts += [_toml_table("inhibit", inhibition, _LIKE) for inhibition in usual.inhibitions]
    return HEAD + "\n".join([*parts, *(rule_toml(rule) for rule in usual.rules)]) + ACTIONS + RESCUE


def rule_toml(rule: Rule, *, whole: bool = False) -> str:
    """Return a rule as a ``[[rules]]`` table of TOML without default values.

    ``whole``: with every key that default rules set.

    >>> print(rule_toml(Rule("mine", kinds=("kl_drift",), for_steps=5)))
    [[rules]]
    name = "mine"
    kinds = ["kl_drift"]
    for_steps = 5
    <BLANKLINE>
    """
    set_ = [key for key in TAKEN if getattr(rule, key) is not None] if whole else []
    return _toml_table("rules", rule, Rule(rule.name), always=("name", *set_))


_LIKE = Inhibition(("x",))
"""An inhibition that has only defaults, except for the kind that it must name."""


def _toml_table(name: str, thing: DataclassInstance, plain: DataclassInstance, always: Sequence[str] = ()) -> str:
    """Return the table ``[[name]]`` with the fields of ``thing`` that differ from ``plain``."""
    values = {f.name: getattr(thing, f.name) for f in fields(thing)}
    settings = {key: value for key, value in values.items() if key in always or value != getattr(plain, key)}
    return "\n".join([f"[[{name}]]", *(f"{key} = {_toml(value)}" for key, value in settings.items()), ""])


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_text(k)} = {_toml_text(v)}" for k, v in value.items()) + " }"
    return _toml_text(list(value) if isinstance(value, tuple) else value)


def _toml_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # TOML knows no surrogate pairs
