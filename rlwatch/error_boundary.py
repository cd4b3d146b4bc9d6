"""Boundary around rlwatch's own work inside other code: a training loop, its values, model and backward; and our
threads.

An error there is counted, logged once and not raised; a part that keeps failing is switched off. A *tap* is a named
part of rlwatch that reads values of a live trainer.

Some exceptions pass. ``KeyboardInterrupt``, ``SystemExit`` and all others that are no ``Exception`` pass, because on a
training thread they are meant to end the process. Any exception of a *signal handler* that runs during our work (a time
limit by ``SIGALRM``, a preemption notice) passes, because it belongs to the training loop. In our own threads
(:func:`run_forever`) nothing passes.
"""

from __future__ import annotations

import logging
import reprlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from errno import EAGAIN, EMFILE, ENFILE, ENOMEM
from functools import partial, update_wrapper, wraps
from types import CodeType, TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

logger = logging.getLogger("rlwatch")

LIMIT = 3
"""Number of failures after which a tap (a part of rlwatch that reads a live trainer) is switched off."""

P = ParamSpec("P")
T = TypeVar("T")


def described(error: BaseException, most: int = 300) -> str:
    """Return type and text of an error in one line of at most ``most`` characters, even if its ``__str__`` raises.

    >>> described(KeyError("x"))
    "KeyError: 'x'"
    """
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"[:most]
    except Exception:  # noqa: BLE001  (boundary: the __str__ of a foreign exception)
        return f"{kind} (which has no text)"


def passing(error: BaseException | None) -> bool:
    """Return whether ``error``, or an error that caused it, is a temporary lack of file descriptors or memory.

    >>> passing(OSError(EMFILE, "too many open files")), passing(OSError("no such file"))
    (True, False)
    """
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _PASSING):
            return True
        error = error.__cause__ or error.__context__
    return False


_PASSING = {EMFILE, ENFILE, ENOMEM, EAGAIN}
PASSING_TRIES = 200
"""Number of steps at which a part may fail to load for such a lack before it is given up."""


def shown(value: object) -> str:
    """Return the ``repr`` of a value from foreign code, bounded in length and effort; a text with its type if ``repr``
    raises.
    """
    try:
        return _brief.repr(value)
    except Exception:  # noqa: BLE001  (boundary: the __repr__ of a foreign value)
        return f"something of type {type(value).__name__} that cannot be shown"


_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxother = 3, 80, 80


def words(value: object) -> str:
    """Return a value from foreign code as text: a string unchanged, anything else as its bounded ``repr``."""
    return value if type(value) is str else shown(value)


def seconds(value: object, otherwise: float) -> float:
    """Return the time limit ``value`` in seconds, at least 0, that a caller gave; ``otherwise`` if it is no number or
    NaN.

    >>> seconds(2, 10.0), seconds(-1, 10.0), seconds(float("nan"), 10.0), seconds("soon", 10.0)
    (2.0, 0.0, 10.0, 10.0)
    """
    if type(value) not in (int, float) or value != value:  # noqa: PLR0124  (NaN)
        return otherwise
    return min(max(0.0, float(cast("float", value))), threading.TIMEOUT_MAX)


def log_message(level: int, message: str, *args: object) -> None:
    """Log ``message % args`` at ``level`` (as in :mod:`logging`) on rlwatch's logger; errors of log handlers are
    suppressed.

    Exceptions of a signal handler pass.
    """
    try:
        logger.log(level, message, *args)
    except Exception as error:
        if by_a_signal(error):
            raise


def by_a_signal(error: BaseException) -> bool:
    """Return whether a signal handler of the process raised ``error``: such an exception must reach
    the training loop.
    """
    if threading.current_thread() is not threading.main_thread():
        return False  # Python runs handlers in the main thread only
    handlers = [_code_of(signal.getsignal(number)) for number in signal.valid_signals()]
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """Return the code object of a signal handler; None if it is not Python code."""
    while isinstance(handler, partial):
        handler = handler.func
    if not callable(handler):  # SIG_DFL, SIG_IGN, or None: not installed by Python
        return None
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def call_or(work: Callable[[], T], otherwise: Callable[[Exception], T]) -> T:
    """Return ``work()``; if it raises an ``Exception``, return ``otherwise(error)``.

    For work with foreign values, stores and libraries, whose exceptions have no common type. The module describes the
    exceptions that pass. ``otherwise`` may raise what the caller documents. It must not keep the error, which holds
    references to the local variables of all its frames.
    """
    try:
        return work()
    except Exception as error:
        if by_a_signal(error):
            raise
        return otherwise(error)


def sheltered(
    work: Callable[[], T],
    otherwise: Callable[[BaseException], T],
    *,
    passing: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> T:
    """Return ``work()``; if it raises anything, ``otherwise(error)``. For our own threads, where no interrupt is
    intended.

    Only exceptions of the types ``passing`` are raised; unlike :func:`call_or` it catches every ``BaseException``.
    """
    try:
        return work()
    except passing:
        raise
    except BaseException as error:  # noqa: BLE001  (the boundary of a thread)
        return otherwise(error)


class Reported:
    """Context manager that passes any exception of its block to ``failed`` and lets it propagate unchanged."""

    def __init__(self, failed: Callable[[BaseException], object]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        """Do nothing: only the end of the block matters."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._failed(error)


def raised_by(work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Exception | None:
    """Return the exception that ``work(*args, **kwargs)`` raised, or None; the result of ``work`` is dropped.

    The module describes the exceptions that pass. The error holds references to the local variables of its frames: do
    not keep it.
    """
    try:
        work(*args, **kwargs)
    except Exception as error:
        if by_a_signal(error):
            raise
        return error
    return None


class Contained:
    """Context manager that suppresses any ``Exception`` of its block and passes it to ``failed``.

    Errors of ``failed`` are suppressed too. The module describes the exceptions that pass. ``failed`` must not keep the
    error, which holds references to its frames and with them to the tensors of a step.
    """

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        """Do nothing: only the end of the block matters."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or by_a_signal(error):
            return False
        try:
            self._failed(error)
        except Exception as worse:
            if by_a_signal(worse):
                raise
        return True


class ErrorBoundary:
    """Boundary for rlwatch's work inside a training loop: errors are counted on the run, logged once and dropped.

    After :data:`LIMIT` failures a tap (a named part that reads the live trainer) is switched off. Its further calls are
    counted as ``skipped``.

    Parameters
    ----------
    run
        The :class:`rlwatch.run.Run` whose counters ``errors`` and ``skipped`` are raised; None: failures are not
        counted there. (The class is layers above this module.)
    """

    def __init__(self, run: Any = None) -> None:
        self.run = run
        self._failures: dict[str, int] = {}

    def attempt(self, tap: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return ``work(*args, **kwargs)``; None if it raised, or if the tap of that name is switched off.

        ``tap``: name of the part of rlwatch that does the work. Failures are counted for each name.
        """
        # Written out, not by Contained: at the end of the stack (RecursionError) no function of ours can be called.
        try:
            if self._failures.get(tap, 0) >= LIMIT:
                self._count("skipped")
                return None
            return work(*args, **kwargs)
        except Exception as error:
            try:
                of_the_process = by_a_signal(error)
                if not of_the_process:
                    self.failed(tap, error)
            except (RecursionError, MemoryError):  # no room even to log it
                of_the_process = False
            if of_the_process:
                raise
            return None

    def guard_background(self, tap: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return ``work(*args, **kwargs)`` like :meth:`attempt`, but on a thread of rlwatch, where no exception at all
        passes.
        """
        try:
            return self.attempt(tap, work, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001  (the boundary of a thread)
            self.failed(tap, error)
            return None

    def hook(self, tap: str, work: Callable[..., object]) -> Callable[..., None]:
        """Return ``work`` wrapped as a PyTorch hook: it receives the hook's arguments, and always returns None.

        Its errors are handled by :meth:`attempt` under the name ``tap``. A copied model has an empty hook instead.
        """

        def hooked(*args: Any, **kwargs: Any) -> None:
            self.attempt(tap, work, *args, **kwargs)

        return Tapped(_nothing, hooked)

    def works(self, tap: str) -> bool:
        """Return whether the tap of that name is still switched on: it has failed fewer than :data:`LIMIT` times."""
        return self._failures.get(tap, 0) < LIMIT

    @property
    def errors(self) -> int:
        """Number of failures of all taps in this process so far. A rank without a run reports it to the rank that has
        the run.
        """
        return sum(self._failures.copy().values())

    def failed(self, tap: str, error: BaseException) -> None:
        """Count a failure of the named tap; log its first failure, and the one that switches the tap off."""
        failures = self._failures[tap] = self._failures.get(tap, 0) + 1
        self._count("errors")
        if failures == 1:
            why = described(error)  # as text: a log handler may keep its arguments
            log_message(logging.WARNING, "rlwatch could not read %s (training goes on): %s", tap, why)
        if failures == LIMIT:
            log_message(logging.WARNING, "rlwatch switched its tap of %s off after %d errors", tap, LIMIT)

    def _count(self, counter: str) -> None:
        if self.run is not None:
            self.run.counters.add(counter)


class Tapped:
    """A function of rlwatch that replaces a function of a foreign object, such as a trainer's method.

    A copy by :mod:`copy` or :mod:`pickle` is the original function again, bound to the copied object if it is a method.
    So a copy of a watched model or trainer is not watched, and records nothing into the run.

    Parameters
    ----------
    original
        The function that is replaced, and that a copy contains.
    calls
        The function that is called instead.
    """

    def __init__(self, original: Callable[..., Any], calls: Callable[..., Any]) -> None:
        update_wrapper(self, original)
        self._original, self._calls = original, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement with these arguments and return its result."""
        return self._calls(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (self._original,)


def _as_it_is(value: T) -> T:
    return value


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing: replaces a hook in a copy of a model."""


def copied(what: str, instead: str) -> None:
    """Log a warning, once in a process, that a copy of a ``what`` (model, trainer) records nothing.

    ``instead``: advice on what to do, as the end of the sentence.
    """
    if what not in _copied:
        _copied.add(what)
        log_message(logging.WARNING, "a copy of a %s records nothing, here and in other processes; %s", what, instead)


_copied: set[str] = set()


class HasErrorBoundary(Protocol):
    """Any object that has an :class:`ErrorBoundary` as its attribute ``error_boundary``."""

    error_boundary: ErrorBoundary


Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """Wrap a method that a trainer calls: it returns None instead of raising an error into the training.

    The object must have an :class:`ErrorBoundary` as ``error_boundary``. Failures are counted under the name of the
    method.
    """

    @wraps(method)
    def through_the_seam(self: HasErrorBoundary, *args: Any, **kwargs: Any) -> Any:
        return self.error_boundary.attempt(method.__name__, method, self, *args, **kwargs)

    return cast("Method", through_the_seam)


def suppress_errors(
    counter: str,
    otherwise: Callable[[], Any] | None = None,
    *,
    passing: type[Exception] | tuple[type[Exception], ...] = (),
) -> Callable[[Method], Method]:
    """Return a decorator for a method that a training loop calls with arbitrary values, so that errors do not reach the
    loop.

    A call that raises is counted in ``self.counters``, logged once, and returns ``otherwise()``. Unlike a tap, the
    method is never switched off: the next value may be valid.

    Parameters
    ----------
    counter
        Name of the counter that is raised.
    otherwise
        Returns the result of a failed call; None: the result is None.
    passing
        Types of errors that the method raises all the same: those of set-up.
    """

    def around(method: Method) -> Method:
        @wraps(method)
        def unharmed(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except passing:
                raise
            except Exception as error:
                try:
                    of_the_process = by_a_signal(error)
                    if not of_the_process:
                        what = f"run.{method.__name__} could not take what it was given: {described(error)}"
                        self.counters.warn(counter, what)
                except (RecursionError, MemoryError):  # no room even to log it
                    of_the_process = False
                if of_the_process:
                    raise
                return otherwise() if otherwise is not None else None

        return cast("Method", unharmed)

    return around


_NOTHING: Any = object()
"""Marks an argument that was not given."""


def quick_way(quick: Callable[[Any, Mapping[str, Any], float], bool]) -> Callable[[Method], Method]:
    """Return a decorator for a method that logs a row (``metrics``, ``step``): it tries the faster function ``quick``
    first.

    ``quick(self, metrics, step)`` returns True if it took the row. If it returns False or raises, or if the call has
    other arguments, the method itself is called, which reports errors.
    """

    def around(method: Method) -> Method:
        @wraps(method)
        def unharmed(self: Any, metrics: Any = _NOTHING, step: Any = _NOTHING, *more: Any, **named: Any) -> Any:
            try:
                if not more and not named and quick(self, metrics, step):
                    return None
            except Exception as error:
                try:
                    of_the_process = by_a_signal(error)
                except (RecursionError, MemoryError):  # no room even to check
                    of_the_process = False
                if of_the_process:
                    raise
            if step is _NOTHING:
                return method(self, **named) if metrics is _NOTHING else method(self, metrics, **named)
            return method(self, step=step) if metrics is _NOTHING else method(self, metrics, step, *more, **named)

        return cast("Method", unharmed)

    return around


def run_forever(work: Callable[[], object], failed: Callable[[BaseException], object], *, pause_s: float = 1.0) -> None:
    """Run ``work`` on a thread of rlwatch until it returns; after an exception, call ``failed(error)`` and start again.

    ``SystemExit`` is handled like an error: no signal reaches a thread other than the main one, so it is a mistake and
    would end the thread silently.

    Parameters
    ----------
    work
        The work of the thread.
    failed
        Receives each exception; its own errors are suppressed.
    pause_s
        Seconds between a failure and the next start.
    """
    while True:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (the boundary of a thread)
            with suppress(BaseException):  # reporting a failure must not fail
                failed(error)
            time.sleep(pause_s)
        else:
            return
