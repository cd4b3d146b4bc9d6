"""The ``rlwatch`` backend of verl's ``Tracking``: the scalars every verl trainer logs, old and new.

verl has no registry of backends: the name is added to ``Tracking.supported_backend``, and ``__init__`` and
``finish`` (before verl 0.9 ``__del__``) are wrapped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import rlwatch
from rlwatch.integrations.verl.heartbeat import IN_PLACE
from rlwatch.integrations.verl.settings import NAME, Settings, plain, wanted
from rlwatch.integrations.verl.versions import verl_version
from rlwatch.records import RunState
from rlwatch.seam import Contained, Seam, guarded

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")


@dataclass(slots=True)
class Session:
    """One ``fit`` of a trainer: the run its driver opened, or the one its ``Tracking`` opens."""

    run: Run | None = None


session: ContextVar[Session | None] = ContextVar("session", default=None)
"""The ``fit`` that is going on in this thread."""


class Backend:
    """What ``Tracking`` logs to. Numbers are recorded under verl's own names; everything else is left out."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seam = Seam(run)

    @guarded
    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record the numbers among ``data``."""
        self.run.log({name: value for name, value in data.items() if is_number(value)}, step=int(step))

    @guarded
    def finish(self, exit_code: int = 0) -> None:
        """End the run, as crashed if ``exit_code`` is not 0."""
        if exit_code:
            self.run.finish(RunState.CRASHED, f"verl ended with exit code {exit_code}")
        else:
            self.run.finish()


def is_number(value: object) -> bool:
    """Whether ``value`` is one number: Python's, numpy's, or a tensor with a single element."""
    with Contained(lambda _error: None):  # a row may hold anything
        if isinstance(value, str | bytes | bool) or value is None:
            return False
        if getattr(value, "ndim", 0) != 0 and getattr(value, "size", 0) != 1:
            return False
        return hasattr(value, "__float__")
    return False


def install(module: ModuleType) -> str:
    """Add the backend to ``module.Tracking``; returns how that went."""
    tracking = module.Tracking
    if NAME in tracking.supported_backend:
        return IN_PLACE
    _wrap_init(tracking)
    _wrap_finish(tracking, "finish" if hasattr(tracking, "finish") else "__del__")
    tracking.supported_backend.append(NAME)
    return IN_PLACE


def _wrap_init(tracking: Any) -> None:
    original = tracking.__init__

    @wraps(original)
    def __init__(  # noqa: N807
        self: Any, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None
    ) -> None:
        original(self, project_name, experiment_name, default_backend, config)
        if wanted(default_backend):
            self.logger[NAME] = Backend(_opened(project_name, experiment_name, config))

    tracking.__init__ = __init__


def _wrap_finish(tracking: Any, name: str) -> None:
    original = getattr(tracking, name, None)

    def finish(self: Any, exit_code: int = 0) -> None:
        finished = getattr(self, "_finished", False)
        try:
            if original is not None:
                original(self, *([exit_code] if name == "finish" else []))
        finally:
            backend = getattr(self, "logger", {}).get(NAME)
            if backend is not None and not finished:
                backend.finish(exit_code)

    setattr(tracking, name, finish if original is None else wraps(original)(finish))


def _opened(project: str, name: str, config: Any) -> Run:
    """The driver's run; without a driver that knows this trainer, a run of scalars. May raise: this is set-up."""
    current = session.get() or Session()
    if current.run is None or not current.run.active:
        logger.warning(
            "rlwatch records scalars only: this trainer is not the v1 PPOTrainer of verl 0.9 (verl %s)", verl_version()
        )
        current.run = rlwatch.init(**Settings.of(plain(config), project, name).init)
    return current.run
