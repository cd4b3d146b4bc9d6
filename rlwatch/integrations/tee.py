"""Mirroring of other trackers (wandb, TensorBoard, MLflow): their hooks, their rows, and the rlwatch runs made of them.

Does not import torch.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from rlwatch.error_boundary import Contained, ErrorBoundary, call_or
from rlwatch.errors import ConfigError
from rlwatch.records import RunState
from rlwatch.run import Run
from rlwatch.run.alerting import alerting_for
from rlwatch.run.identity import RUN_ID_VARIABLE
from rlwatch.run.setup import init, opened

# The user's handle on a mirrored tracker: the recorded runs, and a way to stop.

IDENTITY = ("run_id", "output_dir")
"""Arguments of :func:`rlwatch.init` that identify one run, and so cannot apply to several."""

logger = logging.getLogger("rlwatch")


class Mirror(Protocol):
    """One run of another tracker, and the rlwatch run that receives its rows."""

    run: Run

    def flush(self) -> None:
        """Record rows that were held back until their step was complete."""
        ...


M = TypeVar("M", bound=Mirror)
Describe = Callable[[], Mapping[str, Any]]
"""Function that returns the arguments of :func:`rlwatch.init` which the other tracker knows for its run."""


class Tee(Generic[M]):
    """Handle on a tracker of this process whose runs are mirrored in rlwatch.

    Leaving it as a context manager stops mirroring. Each run of the tracker becomes a run of rlwatch with its first
    row. If one cannot be created, a warning is logged and training continues.

    Parameters
    ----------
    name
        Name of the tracker for messages.
    settings
        Arguments of :func:`rlwatch.init` that override what the tracker knows.
    run
        A run that receives everything; the caller ends it. None: a run for each run of the tracker.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], run: Run | None = None) -> None:
        self.error_boundary = ErrorBoundary(run)
        self.patches = Patches(self.error_boundary)
        self.runs: list[Run] = [] if run is None else [run]
        self._name = name
        self._settings = settings
        self._given = run
        self._mirrors: dict[str, M | None] = {}
        self._ids: dict[str, str] = {}
        self._opening = threading.Lock()
        self._process = os.getpid()

    @property
    def run(self) -> Run | None:
        """Return the newest rlwatch run that records; None before the first row."""
        return self.runs[-1] if self.runs else None

    def untee(self) -> None:
        """Stop mirroring: restore the tracker's functions, and finish the runs created here. Later calls do nothing."""
        self.patches.undo()
        for key in list(self._mirrors):
            self.end(key)
        atexit.unregister(self._flush)

    def mirror(self, key: str, make: Callable[[Run], M], describe: Describe) -> M | None:
        """Return the mirror of the tracker's run ``key``, created if needed; None if that fails, or in a forked child.

        ``make`` creates the mirror from an rlwatch run. ``describe`` returns the tracker's arguments for
        :func:`rlwatch.init`.
        """
        if os.getpid() != self._process:
            return None
        if key not in self._mirrors:
            with self._opening:
                if key not in self._mirrors:
                    self._mirrors[key] = self._open(key, make, describe)
        return self._mirrors[key]

    def existing(self, key: str) -> M | None:
        """Return the mirror of the tracker's run ``key``, or None if none of its rows has been recorded."""
        return self._mirrors.get(key)

    def end(self, key: str, state: RunState = RunState.FINISHED, reason: str = "") -> M | None:
        """End the mirror of the tracker's run ``key``, and return it, or None if there is none.

        Its rlwatch run is finished with ``state`` and ``reason``, unless the caller of the tee provided that run.
        """
        mirror = self._mirrors.pop(key, None)
        if mirror is None:
            return None
        self.error_boundary.attempt("held rows", mirror.flush)
        if self._given is None:
            self.error_boundary.attempt("finish", mirror.run.finish, state, reason)
        return mirror

    def _open(self, key: str, make: Callable[[Run], M], describe: Describe) -> M | None:
        """Open a mirror; errors become one warning, because training is running already."""
        with Contained(partial(self._unrecorded, key)):
            run = self._given or init(**self._arguments(key, describe()))
            mirror = make(run)
            if self._given is None:
                self.runs.append(run)
                self._ids[key] = run.info.run_id
            self.error_boundary.run = run
            atexit.register(self._flush)  # registered after the run's own handler, so that it runs before it
            return mirror
        return None

    def _unrecorded(self, key: str, error: Exception) -> None:
        logger.warning(
            "rlwatch does not record %s run %s (it goes on as without): %s: %s",
            self._name, key, type(error).__name__, error,
        )  # fmt: skip

    def _arguments(self, key: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the arguments: the user's take precedence, but a given identity applies to the first run only."""
        named = self._settings.get("run_id") or os.environ.get(RUN_ID_VARIABLE)
        arguments = {**known, **self._settings}
        if key in self._ids:
            arguments["run_id"] = self._ids[key]
        elif self._ids:
            arguments = {**arguments, **{name: known.get(name) for name in IDENTITY}}
            arguments["run_id"] = known.get("run_id") or (named and f"{named}-{len(self._ids) + 1}")
        elif named or "output_dir" in self._settings:
            arguments["run_id"] = self._settings.get("run_id")
        return arguments

    def _flush(self) -> None:
        for mirror in list(self._mirrors.values()):
            if mirror is not None:
                self.error_boundary.attempt("held rows", mirror.flush)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.untee()


def check_first(newest: Tee[Any] | None, tracker: str, caller: str) -> None:
    """Raise ``ConfigError`` if ``newest`` still mirrors the ``tracker``, because only one mirror may be active.

    ``newest``: handle on the mirror that was made last, or None. ``caller``: the function to name in the message.
    """
    if newest is not None and newest.patches.on:
        raise ConfigError(f"{tracker} is mirrored already; call untee() on what the first {caller} returned")


class Held(deque[tuple[int, dict[str, Any]]]):
    """Queue of parts of rows that wait to be recorded, each with its step. Thread-safe; each part is taken once."""

    def taken(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Remove and yield the waiting parts as (step, values), oldest first."""
        while self:
            try:
                yield self.popleft()
            except IndexError:  # taken by another thread
                return

    def record(self, run: Run) -> None:
        """Record the waiting parts in ``run``, one row for each step."""
        steps: dict[int, dict[str, Any]] = {}
        for step, row in self.taken():
            steps.setdefault(step, {}).update(row)
        for step, row in steps.items():
            run.log(row, step=step)


# Replacing functions of another library, and restoring them.

Look = Callable[..., Any]
"""Type of a hook: ``before(*args, **kwargs)`` gets a function's arguments, ``after(seen, *args, **kwargs)`` also the
result of ``before``.
"""


class Patches:
    """Functions of another library that are replaced by wrappers.

    A wrapper calls the function once, and a hook before or after. Errors of a hook are contained by ``error_boundary``,
    the error boundary. Errors of the function propagate unchanged. ``on`` is False once the functions were restored.
    """

    def __init__(self, error_boundary: ErrorBoundary | None = None) -> None:
        self.on = True
        self._error_boundary = error_boundary or ErrorBoundary()
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def around(self, owner: Any, name: str, *, before: Look | None = None, after: Look | None = None) -> None:
        """Replace ``owner.name`` by a wrapper that calls ``before`` and ``after`` with the arguments of each call.

        ``after`` is not called if the function raised; its first argument is the result of ``before``, None without
        one.
        """
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return original(*args, **kwargs)
            seen = None if before is None else self._error_boundary.attempt(name, before, *args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                self._error_boundary.attempt(name, after, seen, *args, **kwargs)
            return result

        self.replace(owner, name, watched)

    def passing(self, owner: Any, name: str, see: Look) -> None:
        """Replace ``owner.name`` by a wrapper that calls ``see`` with the result of each call."""
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.on:
                self._error_boundary.attempt(name, see, result)
            return result

        self.replace(owner, name, watched)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value`` and remember the old value for :meth:`undo`."""
        self._undo.append((owner, name, getattr(owner, name), value))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all replaced functions, newest first.

        A function that other code has replaced since then stays. If it calls the wrapper, the wrapper only passes the
        call on.
        """
        self.on = False
        while self._undo:
            owner, name, original, replacement = self._undo.pop()
            if getattr(owner, name, None) is replacement:
                setattr(owner, name, original)


# Reading the rows of other trackers: the entries that are numbers, and the step.

LARGEST = 2.0**53
"""Largest magnitude up to which a float represents every integer; larger steps are refused."""
DEEPEST = 16
"""Number of levels of nested dicts that are read inside a row."""


def flatten(row: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each entry of ``row``; entries of inner dicts are named ``outer.inner``, as in wandb.

    An entry that raises when it is read, or that is nested too deeply, is left out. ``prefix`` and ``depth`` are for
    the recursion only.

    >>> dict(flatten({"loss": 1.0, "reward": {"math": 0.5}}))
    {'loss': 1.0, 'reward.math': 0.5}
    """
    for name, value in row.items():
        with Contained(lambda _error: None):
            if not isinstance(value, Mapping):
                yield f"{prefix}{name}", value
            elif depth < DEEPEST:
                yield from list(flatten(value, f"{prefix}{name}.", depth + 1))


def scalars(row: Mapping[str, Any], *, null: float | None = None) -> dict[str, Any]:
    """Return the entries of ``row`` that are a single number: floats, ints, numpy scalars, tensors of one element.

    Tensors are not converted, which would wait for a device. Booleans, text, lists, histograms, images and tables are
    left out. ``None`` becomes ``null``, and is left out if that is None.
    """
    named = ((name, null if value is None else readable(value)) for name, value in flatten(row))
    return {name: value for name, value in named if value is not None}


def readable(value: Any) -> Any:
    """Return ``value`` if it is a single number, or None if it is not or if reading it raises."""
    return call_or(lambda: number(value), lambda _: None)


def number(value: Any) -> Any:
    """Return ``value`` if it is a single number (also a tensor or array of one element), else None.

    Tensors are not converted, which would wait for their device. Booleans and text are not numbers.
    """
    if isinstance(value, bool | str | bytes):
        return None
    if isinstance(value, int | float):
        return value
    if hasattr(value, "detach"):
        return value if value.numel() == 1 else None
    if not hasattr(value, "__float__") or getattr(getattr(value, "dtype", None), "kind", "") == "b":
        return None
    shape = getattr(value, "shape", ())
    if not shape:
        return value
    return value.reshape(()) if math.prod(shape) == 1 else None


def snapshot(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``row`` with copied tensors, because the originals may be overwritten before they are
    recorded.
    """
    kept = {}
    for name, value in row.items():
        with Contained(lambda _error: None):
            kept[name] = value.detach().clone() if hasattr(value, "detach") else value
    return kept


def step_index(value: Any) -> int | None:
    """Return ``value`` as a step, an integer >= 0 (``12.0`` counts), or None for anything else, also for a tensor.

    >>> step_index(12.0), step_index(0.5), step_index(-1), step_index(True)
    (12, None, None, None)
    """
    with Contained(lambda _error: None):
        if isinstance(value, bool) or hasattr(value, "detach") or not hasattr(value, "__float__"):
            return None
        read = float(value)
        return int(value) if 0 <= read < LARGEST and read == int(read) else None
    return None


# Checks at set-up of the settings of a mirrored run, which begins with its first row, when errors must not be raised.


def checked_settings(given: Mapping[str, Any], run: Run | None, caller: str) -> dict[str, Any]:
    """Check the arguments ``given`` to ``caller`` and return them as arguments of :func:`rlwatch.init`, with an opened
    store.

    The runs begin only with their first row, when errors must not be raised. So the store and the alerting are opened
    here.

    Raises
    ------
    ConfigError
        For an unknown argument, one combined with ``run``, or alerting that cannot work.
    StoreError
        If the store cannot be opened.
    """
    if run is not None:
        if given:
            raise ConfigError(
                f"{caller} got run= and {sorted(given)[0]}=; arguments of rlwatch.init are for runs made here"
            )
        return {}
    known = set(inspect.signature(init).parameters)
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"{caller} has no argument {unknown[0]!r}; those of rlwatch.init are: {', '.join(sorted(known))}"
        )
    store = opened(given.get("store"))
    alerting_for(
        config_file=given.get("config_file"),
        webhook_url=given.get("webhook_url"),
        rules=given.get("rules"),
        store=store,
    )
    return {**given, "store": store}
