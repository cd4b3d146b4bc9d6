"""The seam to code that is not ours: a training loop, its values, its model, its backward; our own threads.

What we do there may fail. It is counted, said once and goes no further; a part that goes on failing is switched off.

Who may raise through it: ``KeyboardInterrupt``, ``SystemExit`` and every other exception that is no ``Exception``,
because on a training thread somebody wants to end the process by it; and whatever a *signal handler* raises while we
are at work (a time limit by ``SIGALRM``, a preemption notice), of any type: it is the loop's own. In threads of our
own (:func:`run_forever`) nobody can mean either, and nothing at all passes.
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
"""A tap that failed this often is switched off."""

P = ParamSpec("P")
T = TypeVar("T")


def described(error: BaseException, most: int = 300) -> str:
    """Its type and text, in one cut line; also where the text cannot be had.

    >>> described(KeyError("x"))
    "KeyError: 'x'"
    """
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"[:most]
    except Exception:  # noqa: BLE001  (seam: the __str__ of somebody's exception)
        return f"{kind} (which has no text)"


def passing(error: BaseException | None) -> bool:
    """True if it came about because the machine had no descriptor or memory to give at the moment.

    >>> passing(OSError(EMFILE, "too many open files")), passing(OSError("no such file"))
    (True, False)
    """
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _PASSING):
            return True
        error = error.__cause__ or error.__context__
    return False


_PASSING = {EMFILE, ENFILE, ENOMEM, EAGAIN}


def shown(value: object) -> str:
    """The ``repr`` of somebody's value, of bounded length and effort; its type where it has none."""
    try:
        return _brief.repr(value)
    except Exception:  # noqa: BLE001  (seam: the __repr__ of somebody's value)
        return f"something of type {type(value).__name__} that cannot be shown"


_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxother = 3, 80, 80


def words(value: object) -> str:
    """Somebody's text, as it is if it is one."""
    return value if type(value) is str else shown(value)


def seconds(value: object, otherwise: float) -> float:
    """Somebody's time limit: a number >= 0, else ``otherwise``.

    >>> seconds(2, 10.0), seconds(-1, 10.0), seconds(float("nan"), 10.0), seconds("soon", 10.0)
    (2.0, 0.0, 10.0, 10.0)
    """
    if type(value) not in (int, float) or value != value:  # noqa: PLR0124  (NaN)
        return otherwise
    return min(max(0.0, float(cast("float", value))), threading.TIMEOUT_MAX)


def say(level: int, message: str, *args: object) -> None:
    """Log; what somebody's handler or filter raises goes no further."""
    try:
        logger.log(level, message, *args)
    except Exception as error:
        if by_a_signal(error):
            raise


def by_a_signal(error: BaseException) -> bool:
    """True if a signal handler raised it: then it is the process's own, wherever it happened to arrive."""
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
    """The code it runs, if that is Python."""
    while isinstance(handler, partial):
        handler = handler.func
    if not callable(handler):  # SIG_DFL, SIG_IGN, or None: not installed by Python
        return None
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def call_or(work: Callable[[], T], otherwise: Callable[[Exception], T]) -> T:
    """Answer of ``work()``, which asks a value, a store or a library of somebody's; where that raises, ``otherwise``'s.

    Exceptions of others have no common type. What passes all the same: see the module. ``otherwise`` may raise what the
    caller documents; it must not keep the error: that would keep its frames.
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
    """:func:`call_or` on a thread of ours, where an interrupt or exit can be nobody's wish: only ``passing`` passes."""
    try:
        return work()
    except passing:
        raise
    except BaseException as error:  # noqa: BLE001  (the seam of a thread)
        return otherwise(error)


class Reported:
    """Whatever ends the block is given to ``failed``, and then raised on, unchanged."""

    def __init__(self, failed: Callable[[BaseException], object]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._failed(error)


def raised_by(work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Exception | None:
    """Exception that ``work(*args, **kwargs)`` raised, or None: somebody's code raises what it likes, of any type.

    What passes all the same: see the module. The error keeps its frames: look at it and let it go.
    """
    try:
        work(*args, **kwargs)
    except Exception as error:
        if by_a_signal(error):
            raise
        return error
    return None


class Contained:
    """Work inside may fail: any ``Exception`` is given to ``failed`` and goes no further, nor does one of ``failed``.

    What passes all the same: see the module. ``failed`` must not keep the error: that would keep its frames, and
    with them the tensors of a step.
    """

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        """Nothing to begin."""

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
    """Runs our work inside a training loop: what it raises is counted on the run, warned of once and dropped.

    After :data:`LIMIT` failures a tap is switched off; what it would have done is counted as ``skipped``.

    Parameters
    ----------
    run
        The :class:`rlwatch.run.Run` that counts, which stands floors above this module; None: nobody counts.
    """

    def __init__(self, run: Any = None) -> None:
        self.run = run
        self._failures: dict[str, int] = {}

    def attempt(self, tap: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """``work(*args, **kwargs)``; None if it raised, or if ``tap`` is switched off."""
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
            except (RecursionError, MemoryError):  # no room even to tell
                of_the_process = False
            if of_the_process:
                raise
            return None

    def guard_background(self, tap: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """:meth:`attempt` on a thread of our own, where an interrupt or exit can be nobody's wish: nothing passes."""
        try:
            return self.attempt(tap, work, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001  (the seam of a thread)
            self.failed(tap, error)
            return None

    def hook(self, tap: str, work: Callable[..., object]) -> Callable[..., None]:
        """``work`` as a hook for PyTorch: it sees what the hook is given, and changes nothing, whatever it does."""

        def hooked(*args: Any, **kwargs: Any) -> None:
            self.attempt(tap, work, *args, **kwargs)

        return Tapped(_nothing, hooked)

    def works(self, tap: str) -> bool:
        """True if ``tap`` is still switched on."""
        return self._failures.get(tap, 0) < LIMIT

    @property
    def errors(self) -> int:
        """Failures of all taps so far: what a process without a run tells the one that has it."""
        return sum(self._failures.copy().values())

    def failed(self, tap: str, error: BaseException) -> None:
        """Count a failure of ``tap``, and say so the first time and when that switches it off."""
        failures = self._failures[tap] = self._failures.get(tap, 0) + 1
        self._count("errors")
        if failures == 1:
            why = described(error)  # in words: a handler may keep what it is given
            say(logging.WARNING, "rlwatch could not read %s (training goes on): %s", tap, why)
        if failures == LIMIT:
            say(logging.WARNING, "rlwatch switched its tap of %s off after %d errors", tap, LIMIT)

    def _count(self, counter: str) -> None:
        if self.run is not None:
            self.run.counters.add(counter)


class Tapped:
    """A function of somebody's object, replaced by ours, which is called in its place.

    A copy, by :mod:`copy` or :mod:`pickle`, is the original again, of the copied object where it is a method: what was
    copied from a watched model or trainer is watched by nobody, and records nothing into a run that is another's.
    """

    def __init__(self, original: Callable[..., Any], calls: Callable[..., Any]) -> None:
        update_wrapper(self, original)
        self._original, self._calls = original, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ours."""
        return self._calls(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (self._original,)


def _as_it_is(value: T) -> T:
    return value


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """In the place of a hook, in a copy."""


def copied(what: str, instead: str) -> None:
    """Say, once a process, that a copy of ``what`` records nothing, and what to do ``instead``."""
    if what not in _copied:
        _copied.add(what)
        say(logging.WARNING, "a copy of a %s records nothing, here and in other processes; %s", what, instead)


_copied: set[str] = set()


class HasErrorBoundary(Protocol):
    """An object with a seam."""

    seam: ErrorBoundary


Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """A method of ours, on an object with a seam, that a trainer calls: it returns None where it would raise."""

    @wraps(method)
    def through_the_seam(self: HasErrorBoundary, *args: Any, **kwargs: Any) -> Any:
        return self.seam.attempt(method.__name__, method, self, *args, **kwargs)

    return cast("Method", through_the_seam)


def suppress_errors(
    counter: str,
    otherwise: Callable[[], Any] | None = None,
    *,
    passing: type[Exception] | tuple[type[Exception], ...] = (),
) -> Callable[[Method], Method]:
    """A method that a training loop calls on what has ``counters``, with values of its own that may be anything.

    What cannot be taken is counted as ``counter`` and warned of once; the caller is given ``otherwise()``. Unlike a tap
    it is never switched off: the next value may be better. ``passing`` is an error of set-up, which the method raises.
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
                except (RecursionError, MemoryError):  # no room even to tell
                    of_the_process = False
                if of_the_process:
                    raise
                return otherwise() if otherwise is not None else None

        return cast("Method", unharmed)

    return around


_NOTHING: Any = object()
"""For an argument that was not given."""


def quick_way(quick: Callable[[Any, Mapping[str, Any], float], bool]) -> Callable[[Method], Method]:
    """A method that takes rows, and ``quick`` before it, which takes most of them: True where it did.

    A row at which it raises goes the method's own way, which says what is wrong with it, and so does a call with other
    arguments.
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
                except (RecursionError, MemoryError):  # no room even to ask
                    of_the_process = False
                if of_the_process:
                    raise
            if step is _NOTHING:
                return method(self, **named) if metrics is _NOTHING else method(self, metrics, **named)
            return method(self, step=step) if metrics is _NOTHING else method(self, metrics, step, *more, **named)

        return cast("Method", unharmed)

    return around


def run_forever(work: Callable[[], object], failed: Callable[[BaseException], object], *, pause_s: float = 1.0) -> None:
    """Body of a thread of ours: do ``work`` until it returns; whatever it raises is told to ``failed``, then anew.

    ``SystemExit`` too: no signal reaches a thread that is not the main one, so it is somebody's mistake and would end
    the thread in silence. ``pause_s`` seconds lie between a failure and the next beginning.
    """
    while True:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (the seam of a thread)
            with suppress(BaseException):  # telling of a failure must not be one
                failed(error)
            time.sleep(pause_s)
        else:
            return
