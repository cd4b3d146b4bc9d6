"""The driver's way to its workers: remote calls with a time limit, over Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlwatch.errors import RLWatchError
from rlwatch.integrations.verl.replies import Reply

TIMEOUT_S = 300.0
"""Longest the driver waits for all workers to answer."""
LIMITS_S = {"collect": 30.0, "save_reference": 1800.0, "restore_reference": 1800.0}
"""The same where they answer at once, and where they write or read a whole model."""

Answers = Callable[[], Sequence[Reply]]


class Workers:
    """The actor's worker group. Calls go to all ranks, and are answered in the order they were made."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def ask(self, method: str, *args: Any) -> Answers:
        """Call ``rlwatch_<method>`` on every rank without waiting; the result waits for the answers.

        Raises ``RLWatchError`` if the workers have no such method: rlwatch is not installed where they were made.
        """
        remote = getattr(self._group, f"rlwatch_{method}", None)
        if remote is None:
            raise RLWatchError(
                "the workers do not know rlwatch: install it in the environment of every node (rlwatch doctor)"
            )
        pending = remote(*args)
        return lambda: _got(pending, LIMITS_S.get(method, TIMEOUT_S))

    def call(self, method: str, *args: Any) -> Sequence[Reply]:
        """Call and wait."""
        return self.ask(method, *args)()


def _got(pending: Any, limit_s: float) -> Sequence[Reply]:
    import ray

    try:
        return list(ray.get(pending, timeout=limit_s))
    except ray.exceptions.GetTimeoutError:
        raise RLWatchError(f"the workers did not answer within {limit_s:g} s") from None
    except ray.exceptions.RayError as error:
        raise RLWatchError(f"the workers could not answer: {type(error).__name__}: {str(error)[:300]}") from None
