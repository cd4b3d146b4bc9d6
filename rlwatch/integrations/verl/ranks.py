"""Calls from verl's driver to its workers, with a time limit, and their answers as plain data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from rlwatch.error_boundary import Contained
from rlwatch.errors import RLWatchError

# Answers of a worker to the driver, as plain data: refusals are sent as text, never as exceptions.

REFUSED = "refused"
Reply = Mapping[str, Any]
"""Answer of one rank: ``{"rank": r, ...}``, or ``{"rank": r, "refused": reason}``."""


def answering(method: Callable[..., Mapping[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    """Wrap a method of a worker so that it returns a :data:`Reply` and never raises; errors become refusals."""

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
    """Return the reasons of the ranks that refuse in ``replies``, as one text, or None if all accept."""
    reasons = dict.fromkeys(str(reply[REFUSED]) for reply in replies if REFUSED in reply)
    return "; ".join(reasons) or None


def accepted(replies: Sequence[Reply]) -> Sequence[Reply]:
    """Return ``replies`` ordered by rank.

    Raises ``RLWatchError`` with the reason if a rank refuses, or if no worker answered.
    """
    refusal = refusal_of(replies) if replies else "no worker answered"
    if refusal is not None:
        raise RLWatchError(refusal)
    return sorted(replies, key=lambda reply: int(reply["rank"]))


def joint(prints: Sequence[str]) -> str:
    """Return one fingerprint from ``prints``, the fingerprints of all ranks in their order."""
    return prints[0] if len(prints) == 1 else hashlib.sha256("".join(prints).encode()).hexdigest()[:12]


TIMEOUT_S = 300.0
"""Longest time that the driver waits for all workers to answer, in seconds."""
LIMITS_S = {"collect": 30.0, "save_reference": 1800.0, "restore_reference": 1800.0}
"""Call -> its own time limit in seconds: calls that are answered at once, and calls that write or read a whole
model.
"""

Answers = Callable[[], Sequence[Reply]]


class Workers:
    """The actor's worker group.

    A call goes to all ranks, and calls are answered in the order in which they were made.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def ask(self, method: str, *args: Any) -> Answers:
        """Call ``rlwatch_<method>`` on every rank without waiting. Return a function that waits for the answers.

        Raises ``RLWatchError`` if the workers have no such method, because rlwatch is not installed where they were
        created. The returned function raises ``RLWatchError`` if they do not answer in time.
        """
        remote = getattr(self._group, f"rlwatch_{method}", None)
        if remote is None:
            raise RLWatchError(
                "the workers do not know rlwatch: install it in the environment of every node (rlwatch doctor)"
            )
        pending = remote(*args)
        return lambda: _got(pending, LIMITS_S.get(method, TIMEOUT_S))

    def call(self, method: str, *args: Any) -> Sequence[Reply]:
        """Call ``rlwatch_<method>`` on every rank, wait, and return the answers.

        Raises ``RLWatchError`` as :meth:`ask` does.
        """
        return self.ask(method, *args)()


def _got(pending: Any, limit_s: float) -> Sequence[Reply]:
    import ray

    try:
        return list(ray.get(pending, timeout=limit_s))
    except ray.exceptions.GetTimeoutError:
        raise RLWatchError(f"the workers did not answer within {limit_s:g} s") from None
    except ray.exceptions.RayError as error:
        raise RLWatchError(f"the workers could not answer: {type(error).__name__}: {str(error)[:300]}") from None
