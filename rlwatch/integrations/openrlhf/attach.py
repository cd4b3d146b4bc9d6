"""Preparing one of Ray's processes: what OpenRLHF imports there is wrapped as soon as it is imported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from rlwatch.integrations.compat import AfterImport, Needs, lacking
from rlwatch.integrations.openrlhf.compat import (
    ACTOR,
    DRIVER,
    OF_ACTOR,
    OF_DRIVER,
    READ_INSTEAD,
    Settings,
    unknown,
    unreadable,
)
from rlwatch.seam import Seam

logger = logging.getLogger("rlwatch")

Begin = Callable[[Any, Settings], None]
"""Called with each new trainer of a process."""


def arm(plain: Mapping[str, Any]) -> AfterImport:
    """Wrap what this process will import. Imports nothing heavy: most of Ray's processes never do."""
    settings, after = Settings.of(plain), AfterImport()
    reason = unknown()
    if reason is not None:
        logger.warning("rlwatch does not watch this process: %s", reason)
        return after
    after.register(DRIVER, lambda module: _wrap(module, "BasePPOTrainer", OF_DRIVER, _drive, settings))
    after.register(ACTOR, lambda module: _wrap(module, "ActorPPOTrainer", OF_ACTOR, _tap, settings))
    return after


def _drive(trainer: Any, settings: Settings) -> None:
    from rlwatch.integrations.openrlhf.driver import Driver

    reason = unreadable(trainer)
    if reason is not None:
        logger.warning("rlwatch records nothing here: %s; %s", reason, READ_INSTEAD)
        return
    Driver(trainer, settings).attach()


def _tap(trainer: Any, settings: Settings) -> None:
    from rlwatch.integrations.openrlhf.taps import ActorTaps

    Seam().attempt("policy actor", ActorTaps(trainer, settings).attach)


def _wrap(module: ModuleType, name: str, needs: Needs, begin: Begin, settings: Settings) -> None:
    """Let ``begin`` see every instance of a class once it is made."""
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
