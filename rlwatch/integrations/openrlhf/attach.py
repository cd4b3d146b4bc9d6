"""Preparation of one of Ray's processes: classes of OpenRLHF are wrapped as soon as the process imports them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.integrations.compat import AfterImport, Needs, lacking
from rlwatch.integrations.openrlhf.compat import (
    ACTOR,
    DRIVER,
    OF_ACTOR,
    OF_DRIVER,
    READ_INSTEAD,
    OpenRLHFSettings,
    unknown,
    unreadable,
)

logger = logging.getLogger("rlwatch")

Begin = Callable[[Any, OpenRLHFSettings], None]
"""Function that is called with each new trainer of a process."""


def arm(plain: Mapping[str, Any], *, drive: Begin | None = None, tap: Begin | None = None) -> AfterImport:
    """Register wrappers for the classes that this process will import.

    No large module is imported, because most of Ray's processes never need one. ``plain`` are rlwatch's settings.
    ``drive`` and ``tap`` are called with each new trainer and each new policy actor, instead of rlwatch's own
    functions. Returns the import hook.
    """
    settings, after = OpenRLHFSettings.of(plain), AfterImport()
    reason = unknown()
    if reason is not None:
        logger.warning("rlwatch does not watch this process: %s", reason)
        return after
    after.register(DRIVER, lambda module: _wrap(module, "BasePPOTrainer", OF_DRIVER, drive or drive_trainer, settings))
    after.register(ACTOR, lambda module: _wrap(module, "ActorPPOTrainer", OF_ACTOR, tap or tap_actor, settings))
    return after


def drive_trainer(trainer: Any, settings: OpenRLHFSettings) -> None:
    """Watch a new ``trainer``. If it lacks what rlwatch reads, it is left alone with a warning.

    Raises what :class:`~rlwatch.integrations.openrlhf.driver.OpenRLHFDriver` raises.
    """
    from rlwatch.integrations.openrlhf.driver import OpenRLHFDriver

    reason = unreadable(trainer)
    if reason is not None:
        logger.warning("rlwatch records nothing here: %s; %s", reason, READ_INSTEAD)
        return
    OpenRLHFDriver(trainer, settings).attach()


def tap_actor(trainer: Any, settings: OpenRLHFSettings) -> None:
    """Install the hooks that measure a new policy actor's ``trainer``."""
    from rlwatch.integrations.openrlhf.taps import ActorTaps

    ErrorBoundary().attempt("policy actor", ActorTaps(trainer, settings).attach)


def _wrap(module: ModuleType, name: str, needs: Needs, begin: Begin, settings: OpenRLHFSettings) -> None:
    """Wrap the constructor of a class, so that ``begin`` is called with every new instance."""
    kind = getattr(module, name, None)
    reason = f"{module.__name__} has no {name}" if kind is None else lacking(kind, needs)
    if kind is None or reason is not None:
        logger.warning("rlwatch records nothing of this process: %s", reason)
        return
    original = kind.__init__

    @wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        begin(self, settings)

    kind.__init__ = made
