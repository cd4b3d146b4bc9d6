"""The training configuration as it may be kept: plain JSON, secrets blacked out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlwatch.records import JSON

REDACTED = "<redacted>"
MAX_TEXT = 2000
_SECRET = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|api_?key|access_?key|credentials?|auth)($|[_\-.])", re.IGNORECASE
)
_HARMLESS = re.compile(r"^(pad|bos|eos|unk|mask|sep|cls)_token", re.IGNORECASE)


def recordable(config: Mapping[str, Any]) -> dict[str, JSON]:
    """``config`` as JSON values; what is none becomes its ``repr``, cut at 2000 characters.

    Values under keys that look like secrets (``hub_token``, ``api_key``...) are replaced.

    >>> recordable({"lr": 1e-6, "hub_token": "hf_x"})
    {'lr': 1e-06, 'hub_token': '<redacted>'}
    """
    return {str(key): REDACTED if _is_secret(str(key), value) else _plain(value) for key, value in config.items()}


def _is_secret(key: str, value: Any) -> bool:
    """Numbers and flags are no secrets, however they are called (``max_tokens``, ``pad_token_id``)."""
    return isinstance(value, str | bytes) and bool(_SECRET.search(key)) and not _HARMLESS.match(key)


def _plain(value: Any) -> JSON:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if isinstance(value, Mapping):
        return recordable(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return repr(value)[:MAX_TEXT]
