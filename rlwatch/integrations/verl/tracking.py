"""The ``rlwatch`` backend of verl's ``Tracking``: the scalars every verl trainer logs, old and new.

verl has no registry of backends: the name is added to ``Tracking.supported_backend``, and ``__init__`` and
``finish`` (before verl 0.9 ``__del__``) are wrapped.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import rlwatch
from rlwatch.integrations.compat import lacking
from rlwatch.integrations.verl.compat import TRACKING, V1, scalars_only, verl_version
from rlwatch.integrations.verl.heartbeat import IN_PLACE
from rlwatch.integrations.verl.settings import NAME, Settings, plain, wanted
from rlwatch.records import RunState
from rlwatch.seam import Contained, Seam, guarded

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")


@dataclass(slots=True)
class Session:
    """One ``fit`` of a trainer: the run its driver opened, or the one its ``Tracking`` opens."""

    run: Run | None = None

    def finish(self) -> None:
        """End the run in good order, if there is one that has not ended."""
        if self.run is not None and self.run.active:
            Backend(self.run).finish()


session: ContextVar[Session | None] = ContextVar("session", default=None)
"""The ``fit`` that is going on in this thread."""


class Backend:
    """What ``Tracking`` logs to. Numbers are recorded under verl's own names; everything else is left out."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seam = Seam(run)
        self._made_in = threading.get_ident()

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

    @guarded
    def collected(self) -> None:
        """End the run of a ``Tracking`` that is collected: in any thread, also in one that ending the run waits for."""
        if threading.get_ident() == self._made_in:
            self.finish()
        else:
            threading.Thread(target=self.finish, name="rlwatch-end").start()


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
    known = getattr(tracking, "supported_backend", ())  # where there is no such list, verl refuses no name
    if NAME in known:
        return IN_PLACE
    reason = lacking(tracking, TRACKING)
    if reason is not None:
        return f"rlwatch is no logger of this verl: {reason}"
    _wrap_init(tracking)
    _wrap_finish(tracking, "finish" if hasattr(tracking, "finish") else "__del__")
    tracking.supported_backend = [*known, NAME]
    return IN_PLACE


def _wrap_init(tracking: Any) -> None:
    original = tracking.__init__
    signature = inspect.signature(original)

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        project, name, loggers, config = (given.arguments[parameter] for parameter in TRACKING["__init__"])
        if wanted(loggers):
            self.logger[NAME] = Backend(_opened(project, name, config))

    tracking.__init__ = __init__


def _wrap_finish(tracking: Any, name: str) -> None:
    original = getattr(tracking, name, None)

    def finish(self: Any, *args: Any, **kwargs: Any) -> Any:
        finished = getattr(self, "_finished", False)
        try:
            return None if original is None else original(self, *args, **kwargs)
        finally:
            backend = getattr(self, "logger", {}).get(NAME)
            if backend is not None and not finished:
                if name == "__del__":
                    backend.collected()
                else:
                    backend.finish(kwargs.get("exit_code", next(iter(args), 0)))

    setattr(tracking, name, finish if original is None else wraps(original)(finish))


def _opened(project: str, name: str, config: Any) -> Run:
    """The driver's run; without a driver that knows this trainer, a run of scalars. May raise: this is set-up."""
    from rlwatch.integrations.verl.plugin import hook

    current = session.get() or Session()
    if current.run is None or not current.run.active:
        logger.warning(
            "of verl %s rlwatch records what the trainer logs and how training ends, but no tokens, gradients or "
            "commands: %s",
            verl_version() or "?", scalars_only(hook(V1)),
        )  # fmt: skip
        current.run = rlwatch.init(**Settings.of(plain(config), project, name).init)
    return current.run
