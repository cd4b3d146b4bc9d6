"""How long to wait before the next try, in seconds; counted from rows, so it survives the process."""

from __future__ import annotations

import random
from collections.abc import Callable

from rlwatch.errors import MissingExtraError

Backoff = Callable[[int], float]
"""``backoff(attempts)``: seconds to wait after so many failed tries (>= 1)."""


def exponential(*, first_s: float = 5.0, longest_s: float = 900.0, jitter_s: float = 5.0) -> Backoff:
    """``first_s * 2**(attempts - 1)``, at most ``longest_s``, plus a random part below ``jitter_s`` so that
    many senders do not return at once.

    Raises
    ------
    MissingExtraError
        If tenacity is not installed.
    """
    try:
        import tenacity
    except ImportError:
        raise MissingExtraError("tenacity", "alerts", "delivering alerts again after a failure") from None
    wait = tenacity.wait_exponential(multiplier=first_s, max=longest_s)
    chance = random.Random()  # not the process's: the trainer may draw from that

    def backoff(attempts: int) -> float:
        state = tenacity.RetryCallState(retry_object=None, fn=None, args=(), kwargs={})  # type: ignore[arg-type]
        state.attempt_number = attempts
        return float(wait(state)) + chance.uniform(0.0, jitter_s)

    return backoff
