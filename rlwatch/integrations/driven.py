"""A training whose driver process steers engines elsewhere: its run, its rows and its end.

Trainers with such a driver (SkyRL, AReaL) log from it, and between two steps it is a safe boundary for commands.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from rlwatch.error_boundary import ErrorBoundary, Reported
from rlwatch.errors import ConfigError
from rlwatch.integrations.compat import Needs, installed, lacking, lacking_settings
from rlwatch.integrations.crash import record_crash
from rlwatch.integrations.loggers import TAP, numbers_of
from rlwatch.run.setup import init

logger = logging.getLogger("rlwatch")


def check_trainer(trainer: Any, needs: Needs, settings: Iterable[str], *, of: str, written_for: str) -> None:
    """Raise ``ConfigError`` if ``trainer`` lacks a method in ``needs`` or one of the dotted paths ``settings``.

    ``of``: name of the package, as in ``SkyRL``; ``written_for``: class and version that the adapter was written for.
    """
    reason = lacking(trainer, needs) or lacking_settings(trainer, settings)
    if reason is not None:
        version = installed(of.lower()) or "is not installed"
        raise ConfigError(
            f"this trainer cannot be watched ({of} {version}): {reason}; it was written for {written_for}"
        )


class DrivenTraining:
    """Run of one training that a driver steers: what the driver logs becomes rows, and the end of its loop the end.

    ``trainer`` is the driver's trainer, whose instance is changed. ``arguments`` are those of :func:`rlwatch.init`.
    Raises the errors of :func:`rlwatch.init`, and ``ConfigError`` if the trainer is watched already.
    """

    def __init__(self, trainer: Any, arguments: Mapping[str, Any]) -> None:
        if getattr(trainer, "rlwatch", None) is not None:
            raise ConfigError("this trainer is watched already")
        self.run = init(rank=0, world_size=1, **{"resume": "auto", **arguments})
        self.run.introduce()
        self.error_boundary = ErrorBoundary(self.run)
        self.last: int | None = None
        self._closing: list[Callable[[], None]] = []
        trainer.rlwatch = self

    def record(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the numbers in ``metrics`` as the row of ``step``. Raises nothing."""
        self.error_boundary.attempt(TAP, self._record, metrics, step)

    def after(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        """Wrap ``owner.name``: call ``look`` with its result and arguments afterwards. Its exceptions propagate."""
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.error_boundary.attempt(name, look, result, *args, **kwargs)
            return result

        setattr(owner, name, watched)

    def before(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        """Wrap ``owner.name``: call ``look`` with its arguments first. Its exceptions propagate."""
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.error_boundary.attempt(name, look, *args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, watched)

    def closes(self, close: Callable[[], None]) -> None:
        """Call ``close`` before the run ends, to record what is pending."""
        self._closing.append(close)

    def ends_with(self, trainer: Any, name: str = "train") -> None:
        """Wrap ``trainer.name``, a function or coroutine function: the run ends with it, as crashed if it raises."""
        original = getattr(trainer, name)

        @wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:
            with Reported(self._crashed):
                result = original(*args, **kwargs)
            self._finished()
            return result

        @wraps(original)
        async def train_async(*args: Any, **kwargs: Any) -> Any:
            with Reported(self._crashed):
                result = await original(*args, **kwargs)
            self._finished()
            return result

        setattr(trainer, name, train_async if inspect.iscoroutinefunction(original) else train)

    def _record(self, metrics: Mapping[str, Any], step: int) -> None:
        self.last = int(step)
        self.run.log(numbers_of(metrics), step=self.last)

    def _close(self) -> None:
        for close in self._closing:
            self.error_boundary.attempt("last steps", close)

    def _finished(self) -> None:
        self._close()
        self.error_boundary.attempt("finish", self.run.finish)

    def _crashed(self, error: BaseException) -> None:
        if self.run.active:
            self._close()
            record_crash(self.run, self.error_boundary, error, self.last)
