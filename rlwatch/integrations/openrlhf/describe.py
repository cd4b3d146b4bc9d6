"""What an OpenRLHF run calls itself: from its arguments, a tree of namespaces."""

from __future__ import annotations

from typing import Any

from rlwatch.integrations.openrlhf.settings import Settings
from rlwatch.redaction import recordable


def init_arguments(args: Any, settings: Settings) -> dict[str, Any]:
    """Arguments of :func:`rlwatch.init`; what the command line gave rlwatch wins."""
    wandb = getattr(args.logger, "wandb", None)
    known = {
        "project": getattr(wandb, "project", None),
        "name": getattr(wandb, "run_name", None),
        "output_dir": args.ckpt.path,
        "resume": "auto" if args.ckpt.load_enable else "never",
        "config": recordable(vars(args)),
        "source": "openrlhf",
        "rank": 0,
        "world_size": 1,
    }
    return {**{name: value for name, value in known.items() if value is not None}, **settings.init}
