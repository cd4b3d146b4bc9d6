"""What a worker answers the driver, as plain data: refusals travel as words, never as exceptions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from rlwatch.errors import RLWatchError
from rlwatch.seam import Contained

REFUSED = "refused"
Reply = Mapping[str, Any]
"""Of one rank: ``{"rank": r, ...}``, or ``{"rank": r, "refused": why}``."""


def answering(method: Callable[..., Mapping[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    """A method of a worker that returns a :data:`Reply` whatever happens in it."""

    @wraps(method)
    def answered(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rank = int(getattr(self, "rank", 0))
        reply: dict[str, Any] = {"rank": rank}
        with Contained(lambda error: reply.update({REFUSED: _why(error, rank)})):
            reply |= method(self, *args, **kwargs) or {}
        return reply

    return answered


def _why(error: Exception, rank: int) -> str:
    known = isinstance(error, RLWatchError)
    return str(error) if known else f"it failed on rank {rank}: {type(error).__name__}: {error}"


def refusal_of(replies: Sequence[Reply]) -> str | None:
    """Why some rank refuses, or None."""
    reasons = dict.fromkeys(str(reply[REFUSED]) for reply in replies if REFUSED in reply)
    return "; ".join(reasons) or None


def accepted(replies: Sequence[Reply]) -> Sequence[Reply]:
    """``replies``, by rank. Raises ``RLWatchError`` with the reason if some rank refuses, or none answered."""
    refusal = refusal_of(replies) if replies else "no worker answered"
    if refusal is not None:
        raise RLWatchError(refusal)
    return sorted(replies, key=lambda reply: int(reply["rank"]))


def joint(prints: Sequence[str]) -> str:
    """One fingerprint of all ranks', in their order."""
    return prints[0] if len(prints) == 1 else hashlib.sha256("".join(prints).encode()).hexdigest()[:12]
