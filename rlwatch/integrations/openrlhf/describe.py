"""What an OpenRLHF run calls itself: from its arguments, a tree of namespaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlwatch.integrations.openrlhf.settings import Settings
from rlwatch.run.config import REDACTED


def init_arguments(args: Any, settings: Settings) -> dict[str, Any]:
    """Arguments of :func:`rlwatch.init`; what the command line gave rlwatch wins."""
    wandb = getattr(args.logger, "wandb", None)
    known = {
        "project": getattr(wandb, "project", None),
        "name": getattr(wandb, "run_name", None),
        "output_dir": args.ckpt.path,
        "resume": "auto" if args.ckpt.load_enable else "never",
        "config": config_of(args),
        "source": "openrlhf",
        "rank": 0,
        "world_size": 1,
    }
    return {**{name: value for name, value in known.items() if value is not None}, **settings.init}


def config_of(args: Any) -> dict[str, Any]:
    """The arguments as dictionaries. wandb's key is called just ``key``: it is blacked out here."""
    config = _plain(args)
    wandb = config.get("logger", {}).get("wandb", {})
    if wandb.get("key"):
        wandb["key"] = REDACTED
    return dict(config)


def _plain(value: Any) -> Any:
    if hasattr(value, "__dict__") and not callable(value):
        return {name: _plain(inner) for name, inner in vars(value).items()}
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return value
