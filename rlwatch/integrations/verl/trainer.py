"""Hooks on verl's v1 ``PPOTrainer``: three wrappers on the class, the others on the instance within ``fit``.

They do nothing for a trainer that has no ``rlwatch`` among its loggers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import rlwatch
from rlwatch.integrations.compat import lacking
from rlwatch.integrations.verl.compat import REFUSED, TRAINER, in_words, missing_parts
from rlwatch.integrations.verl.endings import fitting
from rlwatch.integrations.verl.heartbeat import IN_PLACE
from rlwatch.integrations.verl.settings import Settings, plain, wanted
from rlwatch.integrations.verl.tracking import Session, session

if TYPE_CHECKING:
    from rlwatch.integrations.verl.driver import Driver

logger = logging.getLogger("rlwatch")

HELD = "rlwatch_driver"
"""Where a trainer holds its driver."""

ENDED_S, CRASHED_S = 30.0, 5.0
"""Longest the end of training, good or bad, waits for statistics."""

Method = Callable[..., Any]


def install(module: ModuleType) -> str:
    """Wrap ``module.PPOTrainer``; returns how that went. A class we cannot wrap is left alone, to log its scalars."""
    cls = module.PPOTrainer
    reason = lacking(cls, TRAINER)
    if reason is not None:
        return REFUSED + reason
    for name, around in {"init": _init, "_load_checkpoint": _load_checkpoint, "fit": _fit}.items():
        if hasattr(cls, name):
            setattr(cls, name, around(getattr(cls, name)))
    missing = missing_parts(cls)
    return in_words(missing) if missing else IN_PLACE


def begin(trainer: Any) -> Driver:
    """The driver of ``trainer``, with its run open. Raises what :func:`rlwatch.init` raises."""
    from rlwatch.integrations.verl.driver import Driver
    from rlwatch.integrations.verl.plugin import acting

    settings = Settings.of(plain(trainer.config))
    missing = missing_parts(trainer)
    if missing:
        logger.warning("%s", in_words(missing))
    driver = Driver(trainer, rlwatch.init(**settings.init), settings)
    setattr(trainer, HELD, driver)
    session.set(Session(driver.run))  # for a trainer that has a fit of its own
    acting("driver")
    return driver


def _init(original: Method) -> Method:
    """The run opens before the models are loaded: what is configured wrongly stops training early."""

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not wanted(self.config.trainer.logger):
            return original(self, *args, **kwargs)
        driver = begin(self)
        with fitting(Session(driver.run), self):
            return original(self, *args, **kwargs)

    return init


def _load_checkpoint(original: Method) -> Method:
    """Called at the end of set-up: the workers are there, and the step to go on from is known."""

    @wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        driver = getattr(self, HELD, None)
        if driver is not None:
            driver.attach()
            driver.seam.attempt("checkpoint", driver.loaded)
        return result

    return load


def _fit(original: Method) -> Method:
    @wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        driver = getattr(self, HELD, None)
        if driver is None:
            return original(self, *args, **kwargs)
        if not driver.attached:  # this verl loads no checkpoint where we could see that its workers are there
            driver.attach()
        _tap(self, driver)
        with fitting(Session(driver.run), self):
            deadline_s = CRASHED_S
            try:
                result = original(self, *args, **kwargs)
                deadline_s = ENDED_S
                return result
            finally:
                driver.seam.attempt("last steps", driver.settle, deadline_s)

    return fit


def _tap(trainer: Any, driver: Driver) -> None:
    """Subclasses override these methods without calling ``super``, so the instance is changed."""
    _hook(trainer, "on_step_end", driver, before=driver.obey)
    _hook(trainer, "_save_checkpoint", driver, after=lambda *_args, **_kwargs: driver.saved())
    _hook(trainer, "_compute_metrics", driver, after=lambda batch, *_args, **_kwargs: driver.measure(batch))


def _hook(
    trainer: Any, name: str, driver: Driver, *, before: Callable[[], None] | None = None, after: Method | None = None
) -> None:
    """Call ``before`` without arguments and ``after`` with the method's own; what they raise ends at the seam."""
    original = getattr(trainer, name, None)
    if original is None:
        return

    @wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            driver.seam.attempt(name, before)
        result = original(*args, **kwargs)
        if after is not None:
            driver.seam.attempt(name, after, *args, **kwargs)
        return result

    setattr(trainer, name, hooked)
