"""``python -m rlwatch.integrations.verl -m verl.trainer.main_ppo ...``: start verl with rlwatch's plugin loaded.

verl 0.9 and later load the plugin themselves. Before, each process needs it loaded. This process loads it here.
Processes of Ray load it by a ``worker_process_setup_hook`` that is passed to every call of ``ray.init``. verl's command
and configuration are unchanged, and ``trainer.logger`` names rlwatch as in any version.
"""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.compat import AfterImport
from rlwatch.integrations.verl import plugin
from rlwatch.integrations.verl.compat import LAUNCH

logger = logging.getLogger("rlwatch")

HOOK = "worker_process_setup_hook"


def main(arguments: Sequence[str]) -> None:
    """Run a module (``-m NAME``) or a script with rlwatch's plugin in all its processes. Its exceptions propagate.

    Raises ``ConfigError`` if ``arguments`` name nothing to run.
    """
    plugin.load()
    AfterImport().register("ray", _wrap_init)
    match list(arguments):
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest] if not script.startswith("-"):
            sys.argv = [script, *rest]
            sys.path.insert(0, str(Path(script).absolute().parent))
            runpy.run_path(script, run_name="__main__")
        case _:
            raise ConfigError(f"which module or script shall run? Usage: {LAUNCH}")


def _wrap_init(ray: ModuleType) -> None:
    starting: Any = ray
    original = starting.init

    @wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "runtime_env": hooked(kwargs.get("runtime_env"))})

    starting.init = init


def hooked(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return Ray's ``runtime_env`` with rlwatch's set-up hook, which calls an existing hook first."""
    given = dict(runtime_env or {})
    return {**given, HOOK: setup_hook(given.get(HOOK))}


def setup_hook(first: Callable[[], Any] | str | None = None) -> Callable[[], None]:
    """Return the function that Ray calls in every process it starts: it calls ``first``, then loads rlwatch's plugin.

    It is pickled by value, so that nodes without rlwatch train as well, with a warning.
    """

    def watch_this_process() -> None:
        from importlib import import_module

        if isinstance(first, str):
            module, _, name = first.rpartition(".")
            getattr(import_module(module), name)()
        elif first is not None:
            first()
        try:
            import_module("rlwatch.integrations.verl.plugin").load()
        except Exception as error:  # noqa: BLE001  (an error boundary of integrations: a worker must start all the same)
            import logging

            logging.getLogger("rlwatch").warning(
                "rlwatch does not watch this process: %s: %s", type(error).__name__, error
            )

    return watch_this_process


if __name__ == "__main__":
    try:
        import_module("rlwatch.integrations.verl.__main__").main(sys.argv[1:])  # not twice, under two names
    except RLWatchError as problem:
        sys.exit(f"rlwatch: {problem}")
