"""Plugin for verl's entry point group ``verl.plugins``, loaded in every process that imports verl.

Before verl 0.9 rlwatch's launcher loads it. It registers wrappers that are installed when verl's modules are imported;
it imports nothing of verl itself. Every wrapper does nothing until ``rlwatch`` is among ``trainer.logger`` (in the
driver) or the driver has attached (in workers).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType

from rlwatch import __version__
from rlwatch.error_boundary import Contained
from rlwatch.integrations.compat import AfterImport
from rlwatch.integrations.verl import heartbeat
from rlwatch.integrations.verl.compat import verl_version

logger = logging.getLogger("rlwatch")

HOOKS = {
    "verl.utils.tracking": "rlwatch.integrations.verl.attach:install_tracking",
    "verl.trainer.ppo.ray_trainer": "rlwatch.integrations.verl.attach:install_legacy",
    "verl.trainer.ppo.v1.trainer_base": "rlwatch.integrations.verl.attach:install_trainer",
    "verl.workers.engine_workers": "rlwatch.integrations.verl.attach:install_worker",
}
"""Module of verl -> rlwatch's function that receives the module after its import, and wraps parts of it."""


def load(hooks: Mapping[str, str] = HOOKS) -> None:
    """Register the functions in ``hooks`` (module of verl -> function), to be called when the module is imported.

    Raises nothing.
    """
    if heartbeat.current is not None:
        return
    heartbeat.current = beat = heartbeat.begin(__version__, verl_version())
    watcher = AfterImport()
    for module_name, installer in hooks.items():
        beat.hooks[module_name] = heartbeat.WAITING
        watcher.register(module_name, _installer(module_name, installer))
    beat.write()


def _installer(module_name: str, installer: str) -> Callable[[ModuleType], None]:
    def install(module: ModuleType) -> None:
        with Contained(failed):  # verl must be importable whatever we do
            place, _, function = installer.partition(":")
            heartbeat.hooked(module_name, getattr(import_module(place), function)(module))

    def failed(error: Exception) -> None:
        heartbeat.hooked(module_name, f"{type(error).__name__}: {error}")
        logger.warning("rlwatch could not hook into %s: %s: %s", module_name, type(error).__name__, error)

    return install


def _not_loaded(error: Exception) -> None:
    logger.warning("rlwatch could not be loaded into verl: %s: %s", type(error).__name__, error)


with Contained(_not_loaded):
    if "verl" in sys.modules:  # its entry points are loaded while it is imported; others may look at this module too
        load()
