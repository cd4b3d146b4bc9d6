"""The training configuration as it may be kept: plain JSON, secrets blacked out."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rlwatch.records import JSON

REDACTED = "<redacted>"
MAX_TEXT = 2000
_SECRET = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|api_?key|access_?key|credentials?|auth)($|[_\-.])", re.IGNORECASE
)
_JUST_KEY = re.compile(r"(^|\.)key$", re.IGNORECASE)
"""OpenRLHF calls wandb's key ``logger.wandb.key``; ``input_key`` and its like are no secrets."""
_ASSIGNED = re.compile(r"""(\w+)=(['"])(.*?)\2""")
"""``key='abc'`` within the text of an object, which is what wandb keeps of a namespace."""
_HARMLESS = re.compile(r"^(pad|bos|eos|unk|mask|sep|cls)_token", re.IGNORECASE)


def recordable(config: Mapping[str, Any]) -> dict[str, JSON]:
    """``config`` as JSON values; what is none becomes its ``repr``, cut at 2000 characters.

    Values under keys that look like secrets (``hub_token``, ``api_key``...) are replaced, also where an object's text
    assigns to them.

    >>> recordable({"lr": 1e-6, "hub_token": "hf_x"})
    {'lr': 1e-06, 'hub_token': '<redacted>'}
    """
    return {str(key): REDACTED if _is_secret(str(key), value) else _plain(value) for key, value in config.items()}


def _is_secret(key: str, value: Any) -> bool:
    """Numbers and flags are no secrets, however they are called (``max_tokens``, ``pad_token_id``)."""
    return isinstance(value, str | bytes) and _names_a_secret(key)


def _names_a_secret(key: str) -> bool:
    return bool(_SECRET.search(key) or _JUST_KEY.search(key)) and not _HARMLESS.match(key)


def _plain(value: Any) -> JSON:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return recordable(value)
    if isinstance(value, Namespace | SimpleNamespace):
        return recordable(vars(value))
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return _text(repr(value))


def _text(text: str) -> str:
    """Cut, and without what it assigns to names that look like secrets."""
    return _ASSIGNED.sub(_blacked_out, text)[:MAX_TEXT]


def _blacked_out(found: re.Match[str]) -> str:
    return f"{found[1]}={REDACTED}" if _names_a_secret(found[1]) else found[0]
