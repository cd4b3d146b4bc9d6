"""The configuration as it may be shown: flat, without secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlwatch.notify.redact import redact_url
from rlwatch.records import JSON
from rlwatch.report.words import cell, cut
from rlwatch.run.config import recordable

LONGEST = 300
"""Characters of a value."""


def shown(config: Mapping[str, JSON]) -> dict[str, str]:
    """Dotted names and values; what is called a secret, or is an address with one in it, is blacked out.

    >>> shown({"optim": {"lr": 1e-6}, "hub_token": "hf_x", "hook": "https://u:pw@h/T0/x"})
    {'hook': 'https://h/[redacted]', 'hub_token': '<redacted>', 'optim.lr': '1e-06'}
    """
    return {name: cut(text, LONGEST) for name, text in sorted(_flat(recordable(config), ""))}


def _flat(table: Mapping[str, JSON], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, _value(name, value)


def _value(name: str, value: JSON) -> str:
    if isinstance(value, str):
        return _address(name, value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(name, item) for item in value) + "]"
    return cell(value)


def _address(name: str, text: str) -> str:
    """Addresses with a user in them, and those of webhooks, hold a secret."""
    secret = "://" in text and ("@" in text or "hook" in name.lower() or "hook" in text.lower())
    return redact_url(text) if secret else text
