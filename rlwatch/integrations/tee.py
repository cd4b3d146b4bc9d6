"""Mirrors of other trackers: reading their rows, opening runs for them, undoing. Imports no torch."""

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

# A mirrored tracker as its user holds it: the runs recorded, and a way to stop.

IDENTITY = ("run_id", "output_dir")
"""Arguments that name one run."""

logger = logging.getLogger("rlwatch")


class Mirror(Protocol):
    """One run of the other tracker, and ours that mirrors it."""

    run: Run

    def flush(self) -> None:
        """Record what was held back."""
        ...


M = TypeVar("M", bound=Mirror)
Describe = Callable[[], Mapping[str, Any]]
"""Arguments of :func:`rlwatch.init` by which the other tracker knows its run."""


class Tee(Generic[M]):
    """Another tracker of this process, mirrored. Usable as a context manager: leaving it stops mirroring.

    Each run of the other tracker becomes a run of rlwatch with its first row; one that cannot be made is one
    warning, and training goes on.

    Parameters
    ----------
    settings
        Arguments of :func:`rlwatch.init` that win over what the other tracker knows.
    run
        A run to record everything into; whoever made it ends it.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], run: Run | None = None) -> None:
        self.seam = ErrorBoundary(run)
        self.patches = Patches(self.seam)
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
        """The newest run recorded; None before the first row."""
        return self.runs[-1] if self.runs else None

    def untee(self) -> None:
        """Stop mirroring: the other tracker is as it was, and the runs made here are finished. Idempotent."""
        self.patches.undo()
        for key in list(self._mirrors):
            self.end(key)
        atexit.unregister(self._flush)

    def mirror(self, key: str, make: Callable[[Run], M], describe: Describe) -> M | None:
        """Mirror of the run ``key``, made if there is none yet; None where it cannot be, or in a forked child."""
        if os.getpid() != self._process:
            return None
        if key not in self._mirrors:
            with self._opening:
                if key not in self._mirrors:
                    self._mirrors[key] = self._open(key, make, describe)
        return self._mirrors[key]

    def existing(self, key: str) -> M | None:
        """Mirror of the run ``key``, if it has begun."""
        return self._mirrors.get(key)

    def end(self, key: str, state: RunState = RunState.FINISHED, reason: str = "") -> M | None:
        """The other tracker's run ended: so does ours, unless it was given. Returns what mirrored it."""
        mirror = self._mirrors.pop(key, None)
        if mirror is None:
            return None
        self.seam.attempt("held rows", mirror.flush)
        if self._given is None:
            self.seam.attempt("finish", mirror.run.finish, state, reason)
        return mirror

    def _open(self, key: str, make: Callable[[Run], M], describe: Describe) -> M | None:
        """Contain the errors of opening, with one warning: this is training already."""
        with Contained(partial(self._unrecorded, key)):
            run = self._given or init(**self._arguments(key, describe()))
            mirror = make(run)
            if self._given is None:
                self.runs.append(run)
                self._ids[key] = run.info.run_id
            self.seam.run = run
            atexit.register(self._flush)  # after the run's own, so that it comes before: what is held is recorded first
            return mirror
        return None

    def _unrecorded(self, key: str, error: Exception) -> None:
        logger.warning(
            "rlwatch does not record %s run %s (it goes on as without): %s: %s",
            self._name, key, type(error).__name__, error,
        )  # fmt: skip

    def _arguments(self, key: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """Merge: the user's arguments win, but an identity the user gave is that of the first run only."""
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
                self.seam.attempt("held rows", mirror.flush)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.untee()


def check_first(newest: Tee[Any] | None, tracker: str, caller: str) -> None:
    """Raises ``ConfigError`` where the ``newest`` mirror of ``tracker`` is on still."""
    if newest is not None and newest.patches.on:
        raise ConfigError(f"{tracker} is mirrored already; call untee() on what the first {caller} returned")


class Held(deque[tuple[int, dict[str, Any]]]):
    """Parts of rows that wait for their record, each with its step; taken once each, whatever thread logs."""

    def taken(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Take what waits, oldest first."""
        while self:
            try:
                yield self.popleft()
            except IndexError:  # another thread was quicker
                return

    def record(self, run: Run) -> None:
        """Take what waits and record it, a row for each step."""
        steps: dict[int, dict[str, Any]] = {}
        for step, row in self.taken():
            steps.setdefault(step, {}).update(row)
        for step, row in steps.items():
            run.log(row, step=step)


# Replacing functions of another library, and putting them back.

Look = Callable[..., Any]
"""``before(*args, **kwargs)`` sees what a function is given; ``after(seen, *args, **kwargs)`` what it returned, too."""


class Patches:
    """Functions replaced by ones that call them once, unchanged, and look before or after.

    What a look raises ends at ``seam``; what the function raises passes as it is.
    """

    def __init__(self, seam: ErrorBoundary | None = None) -> None:
        self.on = True
        self._seam = seam or ErrorBoundary()
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def around(self, owner: Any, name: str, *, before: Look | None = None, after: Look | None = None) -> None:
        """Let ``before`` see the arguments of ``owner.name``, and ``after`` them too, unless the function raised."""
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return original(*args, **kwargs)
            seen = None if before is None else self._seam.attempt(name, before, *args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                self._seam.attempt(name, after, seen, *args, **kwargs)
            return result

        self.replace(owner, name, watched)

    def passing(self, owner: Any, name: str, see: Look) -> None:
        """Let ``see`` see what ``owner.name`` returns."""
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.on:
                self._seam.attempt(name, see, result)
            return result

        self.replace(owner, name, watched)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, remembering what it was."""
        self._undo.append((owner, name, getattr(owner, name), value))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, newest first.

        What somebody replaced after us stays; it calls ours, which only pass on from now on.
        """
        self.on = False
        while self._undo:
            owner, name, original, replacement = self._undo.pop()
            if getattr(owner, name, None) is replacement:
                setattr(owner, name, original)


# Reading the rows other trackers are given: which entries are numbers, and which is the step.

LARGEST = 2.0**53
"""Beyond it a float no longer tells one integer from the next."""
DEEPEST = 16
"""Levels of dicts inside a row that are read."""


def flatten(row: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The entries of ``row``; those of a dict inside it are named ``outer.inner``, as wandb names them.

    A row may hold anything: an entry that raises when it is looked at, or that lies deeper than any name, is left out.

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
    """The entries of ``row`` that are one number: floats, ints, numpy scalars, tensors of one element.

    Nothing waits for a device: a tensor stays one. Flags, text, lists, histograms, images and tables are left out.
    ``None`` reads as ``null``, and is left out if that is None.
    """
    named = ((name, null if value is None else readable(value)) for name, value in flatten(row))
    return {name: value for name, value in named if value is not None}


def readable(value: Any) -> Any:
    """:func:`number`; None also for what raises when it is looked at: a row may hold anything."""
    return call_or(lambda: number(value), lambda _: None)


def number(value: Any) -> Any:
    """``value`` if it is one number, else None."""
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
    """``row`` as it is now: its tensors may be overwritten before they are recorded."""
    kept = {}
    for name, value in row.items():
        with Contained(lambda _error: None):
            kept[name] = value.detach().clone() if hasattr(value, "detach") else value
    return kept


def step_index(value: Any) -> int | None:
    """``value`` as a step: an integer >= 0, also as ``12.0``. None for anything else; a device is not asked.

    >>> step_index(12.0), step_index(0.5), step_index(-1), step_index(True)
    (12, None, None, None)
    """
    with Contained(lambda _error: None):
        if isinstance(value, bool) or hasattr(value, "detach") or not hasattr(value, "__float__"):
            return None
        read = float(value)
        return int(value) if 0 <= read < LARGEST and read == int(read) else None
    return None


# Checking at set-up what a mirrored run will need at its first row, when nothing may be raised any more.


def checked_settings(given: Mapping[str, Any], run: Run | None, caller: str) -> dict[str, Any]:
    """Arguments of :func:`rlwatch.init` for the runs of ``caller``: its store opened, its alerting tried.

    Raises
    ------
    ConfigError
        For an unknown argument, one beside ``run``, or alerting that cannot work.
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
