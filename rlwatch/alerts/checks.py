"""Checks of a rule's values; each raises ``ConfigError`` with the rule, the key and the value got."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rlwatch.errors import ConfigError
from rlwatch.records import Severity

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def rule_name(value: object) -> None:
    """A name that can be part of an alert's identity and of a TOML key."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(
            "a rule's name is made of letters, digits, '_', '.' and '-' and begins with a letter or digit: "
            f"got {value!r}"
        )


def names(rule: str, key: str, value: object) -> tuple[str, ...]:
    """A sequence of non-empty names."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"rule {rule!r}: {key} must be a list of names, got {value!r}")
    found = tuple(value)
    for name in found:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"rule {rule!r}: {key} must hold non-empty names, got {name!r}")
    return found


def severity(rule: str, key: str, value: object) -> Severity | None:
    """A severity, or None for keys that need not be set."""
    if value is None and key != "min_severity":
        return None
    try:
        return Severity(str(value))
    except ValueError:
        raise ConfigError(f"rule {rule!r}: {key} must be info, warning or critical, got {value!r}") from None


def steps(rule: str, key: str, value: object) -> None:
    """A whole number of steps >= 0, or for ``for_critical`` None."""
    if value is None and key == "for_critical":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"rule {rule!r}: {key} must be a number of steps >= 0, got {value!r}")


def minutes(rule: str, key: str, value: object) -> float:
    """A time in minutes >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"rule {rule!r}: {key} must be a number of minutes >= 0, got {value!r}")
    return float(value)


def flag(rule: str, key: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"rule {rule!r}: {key} must be true or false, got {value!r}")


def escalation(rule: str, after: float, to: tuple[str, ...], level: Severity | None) -> None:
    """When to escalate and what then: one is nothing without the other."""
    if after and not to and level is None:
        raise ConfigError(
            f"rule {rule!r}: it escalates, but to nobody and to no severity: set escalate_to or escalate_severity"
        )
    if (to or level is not None) and not after:
        raise ConfigError(
            f"rule {rule!r}: it says how to escalate, not when: set escalate_after_minutes or escalate_after_steps"
        )


def patience(rule: str, for_steps: int, for_critical: int | None) -> None:
    """Critical findings do not wait longer than others."""
    if for_critical is not None and for_critical > for_steps:
        raise ConfigError(f"rule {rule!r}: for_critical must not exceed for_steps ({for_steps}), got {for_critical!r}")


def labels(rule: str, value: object) -> dict[str, str]:
    """A table of text to text."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"rule {rule!r}: labels must be a table of text, got {value!r}")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ConfigError(f"rule {rule!r}: labels must be text to text, got {key!r}: {text!r}")
    return dict(value)
