"""Tools that an agent calls: how often they fail and how, and how long they take.

A tool is measured while it runs, and its result is passed on as it is.
"""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ParamSpec, TypeVar, cast

from rlwatch.error_boundary import ErrorBoundary, Reported
from rlwatch.integrations.verifiers import is_async, is_timeout, number_tensor
from rlwatch.tensors.mergeable import Max, Mean, Stats, Total

P = ParamSpec("P")
T = TypeVar("T")

CALLS, ERRORS, TIMEOUTS = "tool/calls/", "tool/errors/", "tool/timeouts/"
SECONDS, SECONDS_MAX, KINDS = "tool/seconds/", "tool/seconds_max/", "tool/error_kinds/"
TAP = "tools"
MOST_KINDS = 8
"""Kinds of errors of one tool that are counted apart."""
REPORTED = "reported"
"""Kind of an error that the tool's result reports."""


@dataclass(slots=True)
class ToolTally:
    """Counts of the calls of one tool (function that an agent calls), by outcome, with their total and longest time in
    seconds.
    """

    calls: int = 0
    timeouts: int = 0
    seconds: float = 0.0
    seconds_max: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)

    def stats(self, name: str) -> Stats:
        """Return the counts as statistics of the tool ``name``, which can be merged with those of other micro-batches
        and ranks.
        """
        calls = number_tensor(self.calls)
        found: Stats = {
            CALLS + name: Total(calls, calls),
            ERRORS + name: Mean(calls, number_tensor(self.errors.total())),
            TIMEOUTS + name: Mean(calls, number_tensor(self.timeouts)),
            SECONDS + name: Mean(calls, number_tensor(self.seconds)),
            SECONDS_MAX + name: Max(calls, number_tensor(self.seconds_max)),
        }
        kinds = {f"{KINDS}{name}.{kind}": number for kind, number in self.errors.most_common(MOST_KINDS)}
        return found | {key: Mean(calls, number_tensor(number)) for key, number in kinds.items()}


class ToolMeter:
    """Meter of the tools (functions that an agent calls) of one loop, which may run in any thread or as coroutines.

    ``error_boundary`` contains errors of the meter itself, so that they reach neither the tool nor the training.
    """

    def __init__(self, error_boundary: ErrorBoundary) -> None:
        self._error_boundary = error_boundary
        self._lock = Lock()
        self._tallies: dict[str, ToolTally] = {}

    def metered(self, name: str, tool: Callable[P, T], failed: Callable[[T], bool] | None = None) -> Callable[P, T]:
        """Return a wrapper around ``tool`` that counts and times its calls under ``name``.

        The wrapper has the same arguments, result and exceptions. ``failed`` returns whether a result reports an error;
        None: only exceptions count.
        """
        if is_async(tool):

            async def metered_async(*args: Any, **kwargs: Any) -> Any:
                begun = time.perf_counter()
                with Reported(functools.partial(self._raised, name, begun)):
                    result = await cast("Any", tool)(*args, **kwargs)
                self._error_boundary.attempt(TAP, self._returned, name, begun, result, failed)
                return result

            return cast("Callable[P, T]", functools.update_wrapper(metered_async, tool))

        def metered(*args: P.args, **kwargs: P.kwargs) -> T:
            begun = time.perf_counter()
            with Reported(functools.partial(self._raised, name, begun)):
                result = tool(*args, **kwargs)
            self._error_boundary.attempt(TAP, self._returned, name, begun, result, failed)
            return result

        return functools.update_wrapper(metered, tool)

    def take(self) -> Stats:
        """Return statistics of all measured calls of tools since the last call of this method."""
        with self._lock:
            tallies, self._tallies = self._tallies, {}
        return {key: stat for name, tally in tallies.items() for key, stat in tally.stats(name).items()}

    def _raised(self, name: str, begun: float, error: BaseException) -> None:
        if isinstance(error, Exception):
            count = functools.partial(self._count, name, begun, type(error).__name__, timeout=is_timeout(error))
            self._error_boundary.attempt(TAP, count)

    def _returned(self, name: str, begun: float, result: Any, failed: Callable[[Any], bool] | None) -> None:
        wrong = failed is not None and bool(failed(result))
        self._count(name, begun, REPORTED if wrong else None, timeout=False)

    def _count(self, name: str, begun: float, kind: str | None, *, timeout: bool) -> None:
        seconds = time.perf_counter() - begun
        with self._lock:
            tally = self._tallies.setdefault(name, ToolTally())
            tally.calls += 1
            tally.seconds += seconds
            tally.seconds_max = max(tally.seconds_max, seconds)
            tally.timeouts += timeout
            if kind is not None:
                tally.errors[re.sub(r"[^\w.-]", "_", kind)] += 1
