"""Callback of ms-swift, which watches its trainer. A plugin file registers it, and the command line names it::

    # rlwatch_plugin.py
    from rlwatch.integrations.trl.swift import register

    register(project="math")

``swift rlhf --rlhf_type grpo ... --external_plugins rlwatch_plugin.py --callbacks rlwatch``
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import TrainerCallback

from rlwatch.error_boundary import Tapped
from rlwatch.errors import ConfigError
from rlwatch.integrations.compat import installed
from rlwatch.integrations.trl.attach import watch

NAME = "rlwatch"


def register(**arguments: Any) -> None:
    """Register ``--callbacks rlwatch`` of ms-swift, which watches the trainer when training begins.

    Parameters
    ----------
    arguments
        Arguments of :func:`rlwatch.integrations.trl.watch`. Its errors end the training before its first step.

    Raises
    ------
    ConfigError
        If ms-swift is not installed, or has no registry of callbacks (before version 4).
    """
    try:
        import swift
    except ImportError as error:
        raise ConfigError(
            "watching ms-swift needs ms-swift, which is not installed; run: pip install ms-swift"
        ) from error
    registry = getattr(swift, "callbacks_map", None)
    if not isinstance(registry, dict):
        raise ConfigError(
            f"ms-swift {installed('ms-swift')} has no callbacks_map; use --report_to rlwatch with a plugin file that "
            "imports rlwatch.integrations.transformers"
        )
    registry[NAME] = partial(SwiftCallback, arguments=arguments)


class SwiftCallback(TrainerCallback):  # type: ignore[misc]
    """Callback of ms-swift that replaces ``trainer.train`` once: the first call watches the trainer, and then trains.

    ms-swift makes callbacks before its trainer is complete, so that the trainer cannot be watched earlier.
    """

    def __init__(self, args: Any, trainer: Any, arguments: Mapping[str, Any]) -> None:  # noqa: ARG002  (ms-swift's)
        original = trainer.train

        def train(*given: Any, **named: Any) -> Any:
            trainer.train = original
            watch(trainer, **{"source": "ms-swift", **arguments})
            return trainer.train(*given, **named)

        trainer.train = Tapped(original, train)
