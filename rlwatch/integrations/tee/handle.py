"""What mirroring another tracker gives the user: the runs recorded, and a way to stop."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import rlwatch
from rlwatch.integrations.tee.patches import Patches
from rlwatch.records import RunState
from rlwatch.run import Run
from rlwatch.run.identity import RUN_ID_VARIABLE
from rlwatch.seam import Contained, Seam

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

    Each run of the other tracker becomes a run of rlwatch with its first row; one that cannot be made is said in one
    warning, and training goes on.

    Parameters
    ----------
    settings
        Arguments of :func:`rlwatch.init` that win over what the other tracker knows.
    run
        A run to record everything into; whoever made it ends it.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], run: Run | None = None) -> None:
        self.seam = Seam(run)
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
        """What mirrors the run ``key``, made if there is none yet; None where it cannot be, or in a forked child."""
        if os.getpid() != self._process:
            return None
        if key not in self._mirrors:
            with self._opening:
                if key not in self._mirrors:
                    self._mirrors[key] = self._open(key, make, describe)
        return self._mirrors[key]

    def existing(self, key: str) -> M | None:
        """What mirrors the run ``key``, if it has begun."""
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
        """The errors of opening end here, said once: this is training already."""
        with Contained(partial(self._unrecorded, key)):
            run = self._given or rlwatch.init(**self._arguments(key, describe()))
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
        """What the user says wins, but an identity the user gave is that of the first run only."""
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
