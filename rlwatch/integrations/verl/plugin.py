"""What verl's entry point group ``verl.plugins`` loads, in every process that imports verl; the launcher, before 0.9.

It registers names and puts wrappers in place, lazily: nothing of verl is imported here. Every wrapper does nothing
until ``rlwatch`` is among ``trainer.logger`` (driver) or the driver has said so (workers).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from rlwatch import __version__
from rlwatch.integrations.afterimport import AfterImport
from rlwatch.integrations.verl.compat import verl_version
from rlwatch.integrations.verl.heartbeat import WAITING, Heartbeat, begin
from rlwatch.seam import Contained

logger = logging.getLogger("rlwatch")

HOOKS = {
    "verl.utils.tracking": "rlwatch.integrations.verl.tracking",
    "verl.trainer.ppo.ray_trainer": "rlwatch.integrations.verl.legacy",
    "verl.trainer.ppo.v1.trainer_base": "rlwatch.integrations.verl.trainer",
    "verl.workers.engine_workers": "rlwatch.integrations.verl.worker",
}
"""Module of verl -> the module of ours whose ``install`` changes it."""

beat: Heartbeat | None = None
"""This process's heartbeat."""


def load() -> None:
    """Wait for the modules of verl to be imported. Raises nothing."""
    global beat
    if beat is not None:
        return
    beat = begin(__version__, verl_version())
    watcher = AfterImport()
    for theirs, ours in HOOKS.items():
        beat.hooks[theirs] = WAITING
        watcher.register(theirs, _installer(theirs, ours))
    beat.write()


def _installer(theirs: str, ours: str) -> Callable[[ModuleType], None]:
    def install(module: ModuleType) -> None:
        with Contained(failed):  # verl must be importable whatever we do
            _note(theirs, import_module(ours).install(module))

    def failed(error: Exception) -> None:
        _note(theirs, f"{type(error).__name__}: {error}")
        logger.warning("rlwatch could not hook into %s: %s: %s", theirs, type(error).__name__, error)

    return install


def acting(role: str) -> None:
    """From now on this process is watched, as ``driver`` or ``worker``."""
    if beat is not None:
        beat.act(role)


def failing(error: str) -> None:
    """Remember ``error`` as the last one of this process."""
    if beat is not None:
        beat.fail(error)


def hook(theirs: str) -> str | None:
    """How our hook on the module ``theirs`` is; None where the plugin was not loaded."""
    return None if beat is None else beat.hooks.get(theirs)


def _note(theirs: str, how: str) -> None:
    if beat is not None:
        beat.note(theirs, how)


def _not_loaded(error: Exception) -> None:
    logger.warning("rlwatch could not be loaded into verl: %s: %s", type(error).__name__, error)


with Contained(_not_loaded):
    if "verl" in sys.modules:  # its entry points are loaded while it is imported; others may look at this module too
        load()
