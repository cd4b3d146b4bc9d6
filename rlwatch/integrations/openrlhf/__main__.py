"""``python -m rlwatch.integrations.openrlhf -m openrlhf.cli.train_ppo_ray ...``: start OpenRLHF with its actors
watched.

Classes decorated by ``ray.remote`` reach Ray's processes by value. The plain classes behind them (``BasePPOTrainer``,
``ActorPPOTrainer``) are imported there, so a process must be prepared before it imports them. Ray runs a
``worker_process_setup_hook`` first. OpenRLHF starts Ray without one, but only if Ray is not running yet.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlwatch.errors import ConfigError, MissingExtraError, RLWatchError
from rlwatch.integrations.openrlhf.compat import READ_INSTEAD, OpenRLHFSettings, parsed, unknown

logger = logging.getLogger("rlwatch")

DEFAULTS = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
"""Environment variables that OpenRLHF 0.11.2 sets in its actors (cli/train_ppo_ray.py), which rlwatch passes to Ray
instead.
"""
PASSED = ("RLWATCH_STORE", "RLWATCH_RUN_ID", "RLWATCH_WEBHOOK_URL", "RLWATCH_WEBHOOK_SECRET")
"""Variables of rlwatch that actors on other nodes need, too."""


def main(arguments: Sequence[str]) -> None:
    """Run a module of OpenRLHF, watched. Exceptions of the module propagate.

    Raises ``ConfigError`` for invalid ``arguments``.
    """
    settings, module, rest = parsed(arguments)
    reason = unknown()
    if reason is None:
        begin_ray(settings)
    else:
        logger.warning("rlwatch records nothing here: %s; %s", reason, READ_INSTEAD)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def begin_ray(settings: OpenRLHFSettings) -> None:
    """Start or join Ray as OpenRLHF would, with a hook that prepares its processes.

    Raises ``ConfigError`` if Ray was started in this process already, and ``MissingExtraError`` if it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "openrlhf", "watching OpenRLHF") from error
    if ray.is_initialized():
        raise ConfigError("Ray is initialised already; start OpenRLHF through rlwatch before anything else does")
    ray.init(runtime_env=runtime_env(settings, os.environ))


def runtime_env(settings: OpenRLHFSettings, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's runtime environment: the variables that OpenRLHF sets for its actors, and rlwatch's set-up hook."""
    variables = {name: environment.get(name, default) for name, default in DEFAULTS.items()}
    variables |= {name: environment[name] for name in PASSED if environment.get(name)}
    return {"env_vars": variables, "worker_process_setup_hook": setup_hook(settings)}


def setup_hook(settings: OpenRLHFSettings) -> Callable[[], None]:
    """Return the function that Ray calls in every process it starts, to prepare it for rlwatch.

    It is pickled by value, so that a node without rlwatch trains unwatched, with a warning.
    """
    plain = settings.plain()

    def watch_this_process() -> None:
        try:
            from rlwatch.integrations.openrlhf.attach import arm

            arm(plain)
        except Exception as error:  # noqa: BLE001  (an error boundary of integrations: an actor must start all the same)
            import logging

            logging.getLogger("rlwatch").warning(
                "rlwatch does not watch this process: %s: %s", type(error).__name__, error
            )

    return watch_this_process


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RLWatchError as error:
        sys.exit(f"rlwatch: {error}")
