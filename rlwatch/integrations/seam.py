"""The seam to somebody else's training loop: nothing of ours may raise through it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")

LIMIT = 3
"""A tap that failed this often is switched off."""

P = ParamSpec("P")
T = TypeVar("T")


class Contained:
    """Work inside may fail: any ``Exception`` is given to ``failed`` and goes no further.

    ``KeyboardInterrupt`` and ``SystemExit`` pass. ``failed`` must not keep the error: that would keep its frames, and
    with them the tensors of a step.
    """

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failed(error)
        return True


class Seam:
    """Runs our work inside a training loop: what it raises is counted on the run, warned of once and dropped.

    After :data:`LIMIT` failures a tap is switched off. ``KeyboardInterrupt`` and ``SystemExit`` pass.
    """

    def __init__(self, run: Run | None = None) -> None:
        self.run = run
        self._failures: Counter[str] = Counter()

    def attempt(self, tap: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """``work(*args, **kwargs)``; None if it raised, or if ``tap`` is switched off."""
        if not self.works(tap):
            return None
        with Contained(partial(self._failed, tap)):
            return work(*args, **kwargs)
        return None

    def works(self, tap: str) -> bool:
        """Whether ``tap`` is still switched on."""
        return self._failures[tap] < LIMIT

    @property
    def errors(self) -> int:
        """Failures of all taps so far: what a process without a run tells the one that has it."""
        return self._failures.total()

    def _failed(self, tap: str, error: Exception) -> None:
        self._failures[tap] += 1
        if self.run is not None:
            self.run.counters.add("errors")
        if self._failures[tap] == 1:
            why = f"{type(error).__name__}: {error}"  # in words: a handler may keep what it is given
            logger.warning("rlwatch could not read %s (training goes on): %s", tap, why)
        elif not self.works(tap):
            logger.warning("rlwatch switched its tap of %s off after %d errors", tap, LIMIT)


class Guarded(Protocol):
    """What has a seam."""

    seam: Seam


Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """A method of ours, on an object with a seam, that a trainer calls: it returns None where it would raise."""

    @wraps(method)
    def through_the_seam(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        return self.seam.attempt(method.__name__, method, self, *args, **kwargs)

    return cast("Method", through_the_seam)
