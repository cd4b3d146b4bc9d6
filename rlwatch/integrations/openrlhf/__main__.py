"""``python -m rlwatch.integrations.openrlhf -m openrlhf.cli.train_ppo_ray ...``: OpenRLHF as ever, its actors watched.

Classes decorated by ``ray.remote`` reach Ray's processes by value, the plain ones behind them
(``BasePPOTrainer``, ``ActorPPOTrainer``) by import: so a process must be prepared before it imports them. Ray runs a
``worker_process_setup_hook`` first; OpenRLHF starts Ray without one, but only if it is not running yet.
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
"""What OpenRLHF 0.11.2 sets in its actors (cli/train_ppo_ray.py), which Ray then gets from us instead."""
PASSED = ("RLWATCH_STORE", "RLWATCH_RUN_ID", "RLWATCH_WEBHOOK_URL", "RLWATCH_WEBHOOK_SECRET")
"""Variables of ours that actors on other nodes need too."""


def main(arguments: Sequence[str]) -> None:
    """Run a module of OpenRLHF, watched. What the module raises passes."""
    settings, module, rest = parsed(arguments)
    reason = unknown()
    if reason is None:
        begin_ray(settings)
    else:
        logger.warning("rlwatch records nothing here: %s; %s", reason, READ_INSTEAD)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def begin_ray(settings: OpenRLHFSettings) -> None:
    """Start or join Ray as OpenRLHF would, with the hook.

    Raises ``ConfigError`` if Ray has been started in this process already.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "openrlhf", "watching OpenRLHF") from error
    if ray.is_initialized():
        raise ConfigError("Ray is initialised already; start OpenRLHF through rlwatch before anything else does")
    ray.init(runtime_env=runtime_env(settings, os.environ))


def runtime_env(settings: OpenRLHFSettings, environment: Mapping[str, str]) -> dict[str, Any]:
    """OpenRLHF's own environment for its actors, and the hook."""
    variables = {name: environment.get(name, default) for name, default in DEFAULTS.items()}
    variables |= {name: environment[name] for name in PASSED if environment.get(name)}
    return {"env_vars": variables, "worker_process_setup_hook": setup_hook(settings)}


def setup_hook(settings: OpenRLHFSettings) -> Callable[[], None]:
    """Function Ray calls in every process it starts. It travels by value: a node without rlwatch trains unwatched."""
    plain = settings.plain()

    def watch_this_process() -> None:
        try:
            from rlwatch.integrations.openrlhf.attach import arm

            arm(plain)
        except Exception as error:  # noqa: BLE001  (a seam of integrations: an actor must start all the same)
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
