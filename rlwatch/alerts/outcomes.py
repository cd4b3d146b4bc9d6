"""What a try to deliver makes of a message: sent, again later, or given up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlwatch.alerts.backoff import Backoff
from rlwatch.ports import Delivery
from rlwatch.records import OutboxMessage, OutboxStatus

LONGEST_WISH_S = 3600.0
"""The most a receiver can put us off (``Retry-After``)."""

_TELLING_ORDER = {"firing": 0, "escalated": 1, "repeated": 1, "unacknowledged": 1, "resolved": 2}


@dataclass(frozen=True, slots=True)
class Patience:
    """When to try again and when to give up.

    ``backoff(attempts)`` seconds pass between tries. A message is given up when its ``max_attempts``-th try
    fails, or one fails that comes more than ``max_age_s`` after it was written; so a message that nobody
    could deliver over a weekend, because nobody ran, still gets its try. One that nobody tried for ``stale_s``
    is no news any more: who configures a webhook today is not told of last month's crashes.
    """

    backoff: Backoff
    max_attempts: int = 200
    max_age_s: float = 48 * 3600.0
    stale_s: float = 7 * 24 * 3600.0

    def stale(self, message: OutboxMessage, now: float) -> bool:
        """Whether a message nobody tried is too old to be told."""
        return message.attempts == 0 and 0 < message.created_at < now - self.stale_s


def settled(message: OutboxMessage, delivery: Delivery, now: float, patience: Patience) -> OutboxMessage:
    """The message after a try that ended at ``now`` (Unix seconds)."""
    tried = replace(message, attempts=message.attempts + 1)
    if delivery.ok:
        return replace(tried, status=OutboxStatus.SENT, sent_at=now, last_error="")
    given_up = _why_given_up(tried, delivery, now, patience)
    if given_up:
        return replace(tried, status=OutboxStatus.DEAD, last_error=f"{delivery.reason} ({given_up})")
    wait = max(patience.backoff(tried.attempts), min(delivery.retry_after_s or 0.0, LONGEST_WISH_S))
    return replace(tried, next_attempt_at=now + wait, last_error=delivery.reason)


def _why_given_up(tried: OutboxMessage, delivery: Delivery, now: float, patience: Patience) -> str:
    if not delivery.retryable:
        return "trying again would not help"
    if tried.attempts >= patience.max_attempts:
        return f"given up after {tried.attempts} tries"
    age = now - tried.created_at if tried.created_at > 0 else 0.0  # 0: not known
    return f"given up after {age / 3600:.0f} h" if age > patience.max_age_s else ""


def precedes(first: OutboxMessage, second: OutboxMessage) -> bool:
    """Whether ``first`` still has to reach the channel of ``second`` before it: nobody shall read "firing"
    after "resolved".
    """
    return (
        first.status is OutboxStatus.PENDING
        and (first.alert_id, first.channel) == (second.alert_id, second.channel)
        and _place(first) < _place(second)
    )


def is_first_word(message: OutboxMessage) -> bool:
    """Whether nothing can precede it."""
    return _place(message)[0] == 0


def _place(message: OutboxMessage) -> tuple[int, float]:
    return (_TELLING_ORDER.get(str(message.payload.get("event")), 0), message.created_at)
