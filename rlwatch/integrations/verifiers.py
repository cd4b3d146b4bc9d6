"""Health of reward functions: how often they fail, how often they give no reward or a constant one, how long they take.

A function is measured while it runs, and its result is passed on unchanged. Exceptions that it catches itself are seen
only if its checks are counted one by one (:func:`count_errors`).
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from rlwatch.error_boundary import ErrorBoundary, Reported
from rlwatch.tensors.mergeable import Max, Mean, Stats

P = ParamSpec("P")
T = TypeVar("T")

ERRORS, TIMEOUTS, ABSENT = "verifier/errors/", "verifier/timeouts/", "verifier/absent/"
CONSTANT, FULL_ON_ERROR = "verifier/constant/", "verifier/full_on_error/"
SECONDS, SECONDS_MAX = "verifier/seconds/", "verifier/seconds_max/"
TAP = "verifiers"


@dataclass(slots=True)
class VerifierCall:
    """One call of a reward function in progress, with the outcome of each counted check inside it (True: it raised)."""

    begun: float = field(default_factory=time.perf_counter)
    raised: list[bool] = field(default_factory=list)
    timeouts: int = 0

    def begin_check(self) -> int:
        """Record that a check begins, and return its index for :meth:`failed`.

        Checks of coroutines may end in any order.
        """
        self.raised.append(False)
        return len(self.raised) - 1

    def failed(self, place: int, error: BaseException) -> None:
        """Record that the check at index ``place`` raised ``error``."""
        if isinstance(error, Exception):
            self.raised[place] = True
            self.timeouts += is_timeout(error)


_CALL: ContextVar[VerifierCall | None] = ContextVar("rlwatch_verifier_call", default=None)


def count_errors(check: Callable[P, T]) -> Callable[P, T]:
    """Count the exceptions of ``check``, a part of a reward function that catches its exceptions.

    A reward function that returns a default where its check fails looks healthy from outside. Decorate the check, not
    the reward function. An exception of the check is counted for the reward function that called it, and raised again.
    If the check is called once for each answer in order, or once for the whole batch, the count also shows which full
    marks were given in spite of an exception. Calls from threads or processes that the reward function starts itself
    are not counted.

    Parameters
    ----------
    check
        A function or coroutine function.

    Returns
    -------
    Callable
        A function with the same arguments, result and exceptions as ``check``.

    >>> @count_errors
    ... def parse(answer):
    ...     return float(answer)
    >>> parse("0.5")
    0.5
    """
    if is_async(check):

        async def counted_async(*args: Any, **kwargs: Any) -> Any:
            call = _CALL.get()
            if call is None:
                return await cast("Any", check)(*args, **kwargs)
            with Reported(functools.partial(call.failed, call.begin_check())):
                return await cast("Any", check)(*args, **kwargs)

        return cast("Callable[P, T]", functools.update_wrapper(counted_async, check))

    @functools.wraps(check)
    def counted(*args: P.args, **kwargs: P.kwargs) -> T:
        call = _CALL.get()
        if call is None:
            return check(*args, **kwargs)
        with Reported(functools.partial(call.failed, call.begin_check())):
            return check(*args, **kwargs)

    return counted


def is_async(function: Callable[..., Any]) -> bool:
    """Return True if calling ``function`` returns a coroutine.

    That holds for a coroutine function, a partial of one, and an object whose ``__call__`` is one.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_timeout(error: BaseException) -> bool:
    """Return True for a ``TimeoutError``, and for errors that libraries name so (``ReadTimeout``,
    ``FunctionTimedOut``).

    >>> is_timeout(TimeoutError()), is_timeout(ValueError("no timeout"))
    (True, False)
    """
    names = [kind.__name__.lower() for kind in type(error).__mro__]
    return any("timeout" in name or "timedout" in name for name in names)


def values_of(result: Any) -> list[float] | None:
    """Return the rewards in ``result`` as numbers, NaN for a missing one.

    The result is None if they cannot be read without side effects. A generator would be consumed, an unknown object may
    run arbitrary code, and reading a tensor on a device would wait for the device.
    """
    if isinstance(result, Tensor | np.ndarray):
        here = not isinstance(result, Tensor) or (result.device.type == "cpu" and not result.is_meta)
        real = here and result.ndim == 1 and (result.dtype != np.object_ if isinstance(result, np.ndarray) else True)
        return [float(value) for value in result.tolist()] if real else None
    if not isinstance(result, list | tuple):
        return None
    values = [_value_of(one) for one in result]
    return None if None in values else cast("list[float]", values)


def _value_of(one: Any) -> float | None:
    if one is None:
        return math.nan
    if isinstance(one, bool | int | float | np.number | np.bool_):
        return float(one)
    if isinstance(one, Tensor) and one.device.type == "cpu" and one.numel() == 1:
        return float(one.detach())
    return None


@dataclass(slots=True)
class VerifierTally:
    """Counts of one reward function since they were last read: calls, checks, errors, rewards, and seconds.

    ``absent`` counts answers without a reward, ``constant`` batches in which all rewards are equal. ``full`` counts
    full marks, and ``full_on_error`` those given although the check raised.
    """

    calls: int = 0
    checks: int = 0
    errors: int = 0
    timeouts: int = 0
    answers: int = 0
    absent: int = 0
    batches: int = 0
    constant: int = 0
    full: int = 0
    full_on_error: int = 0
    seconds: float = 0.0
    seconds_max: float = 0.0

    def stats(self, name: str) -> Stats:
        """Return the counts as statistics of the reward function ``name``, mergeable over micro-batches and ranks."""
        found: Stats = {
            ERRORS + name: _share(self.checks, self.errors),
            TIMEOUTS + name: _share(self.checks, self.timeouts),
            SECONDS + name: _share(self.calls, self.seconds),
            SECONDS_MAX + name: Max(number_tensor(self.calls), number_tensor(self.seconds_max)),
        }
        if self.answers:
            found[ABSENT + name] = _share(self.answers, self.absent)
        if self.batches:
            found[CONSTANT + name] = _share(self.batches, self.constant)
        if self.full:
            found[FULL_ON_ERROR + name] = _share(self.full, self.full_on_error)
        return found


def number_tensor(value: float) -> Tensor:
    """Return a 0-d tensor on the CPU, for statistics of what no device measured."""
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")  # float64 would double all that travels


def _share(count: int, part: float) -> Mean:
    return Mean(number_tensor(count), number_tensor(part))


@dataclass(slots=True)
class _Marks:
    """Smallest and largest reward that a function has given in this process."""

    low: float = math.inf
    high: float = -math.inf

    def take(self, values: Sequence[float]) -> list[bool]:
        """Update the range with a batch of rewards (finite or NaN). Return True for each reward that is a full mark."""
        known = [value for value in values if math.isfinite(value)]
        self.low, self.high = min([self.low, *known]), max([self.high, *known])
        return [value == self.high and (value > self.low or value > 0.0) for value in values]


class VerifierMeter:
    """Meter of the reward functions of one trainer or loop. Functions may run in any thread.

    ``error_boundary`` is the error boundary: errors of the meter itself never reach the reward function or the
    training.
    """

    def __init__(self, error_boundary: ErrorBoundary) -> None:
        self._error_boundary = error_boundary
        self._lock = Lock()
        self._tallies: dict[str, VerifierTally] = {}
        self._marks: dict[str, _Marks] = {}

    def metered(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Return a wrapper around the reward function ``function`` that measures it under ``name``.

        The wrapper has the same arguments, result and exceptions.
        """
        if is_async(function):

            async def metered_async(*args: Any, **kwargs: Any) -> Any:
                call, outer = VerifierCall(), _CALL.get()
                token = _CALL.set(call)
                try:
                    with Reported(functools.partial(self._raised, name, call, outer)):
                        result = await cast("Any", function)(*args, **kwargs)
                finally:
                    _CALL.reset(token)
                self._error_boundary.attempt(TAP, self._returned, name, call, outer, result)
                return result

            return cast("Callable[P, T]", functools.update_wrapper(metered_async, function))

        def metered(*args: P.args, **kwargs: P.kwargs) -> T:
            call, outer = VerifierCall(), _CALL.get()
            token = _CALL.set(call)
            try:
                with Reported(functools.partial(self._raised, name, call, outer)):
                    result = function(*args, **kwargs)
            finally:
                _CALL.reset(token)
            self._error_boundary.attempt(TAP, self._returned, name, call, outer, result)
            return result

        return functools.update_wrapper(metered, function)

    def take(self) -> Stats:
        """Return statistics of all measured calls since the last call of this method."""
        with self._lock:
            tallies, self._tallies = self._tallies, {}
        return {key: stat for name, tally in tallies.items() for key, stat in tally.stats(name).items()}

    def _raised(self, name: str, call: VerifierCall, outer: VerifierCall | None, error: BaseException) -> None:
        if isinstance(error, Exception):
            self._error_boundary.attempt(TAP, self._count_raised, name, call, outer, error)

    def _count_raised(self, name: str, call: VerifierCall, outer: VerifierCall | None, error: Exception) -> None:
        if outer is not None:
            outer.failed(outer.begin_check(), error)
        own = 0 if any(call.raised) else 1  # a check that was counted already raised it
        with self._lock:
            tally = self._timed(name, call)
            tally.checks += max(len(call.raised), 1)
            tally.errors += sum(call.raised) + own
            tally.timeouts += call.timeouts + (own and is_timeout(error))

    def _returned(self, name: str, call: VerifierCall, outer: VerifierCall | None, result: Any) -> None:
        if outer is not None:
            outer.begin_check()
        values = values_of(result)
        with self._lock:
            tally = self._timed(name, call)
            tally.checks += max(len(call.raised), 1)
            tally.errors += sum(call.raised)
            tally.timeouts += call.timeouts
            if values:
                self._count_values(tally, self._marks.setdefault(name, _Marks()), values, call)

    def _timed(self, name: str, call: VerifierCall) -> VerifierTally:
        tally, seconds = self._tallies.setdefault(name, VerifierTally()), time.perf_counter() - call.begun
        tally.calls += 1
        tally.seconds += seconds
        tally.seconds_max = max(tally.seconds_max, seconds)
        return tally

    @staticmethod
    def _count_values(tally: VerifierTally, marks: _Marks, values: Sequence[float], call: VerifierCall) -> None:
        tally.answers += len(values)
        tally.absent += sum(map(math.isnan, values))
        if len(values) > 1:
            tally.batches += 1
            tally.constant += all(value == values[0] for value in values)  # NaN equals nothing: absent, not constant
        full, raised = marks.take(values), _by_answer(call.raised, len(values))
        if raised is not None:
            tally.full += sum(full)
            tally.full_on_error += sum(one and failed for one, failed in zip(full, raised, strict=True))


def _by_answer(raised: Sequence[bool], answers: int) -> Sequence[bool] | None:
    """Return whether the check of each answer raised; None if checks cannot be matched to answers."""
    if len(raised) == answers:
        return raised
    return [raised[0]] * answers if len(raised) == 1 else None
