"""What the answers of chat services mean. Some say HTTP 200 and refuse in the body.

Of what a service says only numbers and short words of its own vocabulary are repeated: the rest could hold
anything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeGuard

from rlwatch.notify.answers import judge
from rlwatch.notify.http import Reply
from rlwatch.ports import Delivery
from rlwatch.records import JSON

Reading = Callable[[Reply, float], Delivery]
"""``reading(reply, now)``."""

_WORD = re.compile(r"[a-z]+(_[a-z]+){0,5}")


def by_status(reply: Reply, now: float) -> Delivery:
    """By the status, and how long to stay away also where only the body tells (Discord, Telegram)."""
    delivery = judge(reply.status, reply.headers, now)
    if delivery.ok or delivery.retry_after_s is not None:
        return delivery
    body = _object(reply)
    parameters = body.get("parameters")
    wish = body.get("retry_after", parameters.get("retry_after") if isinstance(parameters, Mapping) else None)
    return replace(delivery, retry_after_s=float(wish)) if _is_time(wish) else delivery


def by_code(*keys: str, later: frozenset[int]) -> Reading:
    """By a number in the body that is 0 for yes; ``later``: those that say "not now"."""

    def reading(reply: Reply, now: float) -> Delivery:
        delivery = by_status(reply, now)
        if not delivery.ok:
            return delivery
        codes = [code for code in map(_object(reply).get, keys) if isinstance(code, int) and not isinstance(code, bool)]
        if not codes:
            return _not_theirs(reply)
        if codes[0] == 0:
            return delivery
        return Delivery(ok=False, reason=f"HTTP {reply.status}, code {codes[0]}", retryable=codes[0] in later)

    return reading


def by_ok(reply: Reply, now: float) -> Delivery:
    """By the body: the text ``ok``, or an object whose ``ok`` is true (Slack, Telegram)."""
    delivery = by_status(reply, now)
    if not delivery.ok or reply.body.strip() == b"ok":
        return delivery
    body = _object(reply)
    if "ok" not in body:
        return _not_theirs(reply)
    if body["ok"] is True:
        return delivery
    word = str(body.get("error", ""))
    why = f": {word}" if _WORD.fullmatch(word) and len(word) <= 40 else ""
    later = word in {"ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable"}
    return Delivery(ok=False, reason=f"HTTP {reply.status}, refused{why}", retryable=later)


def _not_theirs(reply: Reply) -> Delivery:
    """A proxy's page, say: nobody can know whether it arrived, so that it is sent again."""
    return Delivery(ok=False, reason=f"HTTP {reply.status}, but not the answer of the service")


def _object(reply: Reply) -> Mapping[str, JSON]:
    try:
        body = json.loads(reply.body)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _is_time(value: JSON) -> TypeGuard[float]:
    """Whether ``value`` is a length of time in seconds; JSON knows integers that no float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
