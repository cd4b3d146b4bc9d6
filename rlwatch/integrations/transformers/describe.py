"""What a training run calls itself: source, configuration, output directory."""

from __future__ import annotations

import re
from typing import Any

from rlwatch.integrations.vocabulary import vocab_size_of


def source_of(args: Any) -> str:
    """``"trl/grpo"``, ``"trl/rloo"``, ``"trl/online_dpo"``... from the type of the training arguments.

    Subclasses count as the TRL class they extend; what is not TRL's is ``"transformers"``.
    """
    for kind in type(args).__mro__:
        if kind.__module__.startswith("trl.") and kind.__name__.endswith("Config") and kind.__name__[0] != "_":
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__.removesuffix("Config"))
            return f"trl/{name.lower()}"
    return "transformers"


def config_of(args: Any, model: Any = None) -> dict[str, Any]:
    """The training arguments, and which model is trained."""
    config: dict[str, Any] = dict(args.to_dict())
    described = getattr(model, "config", None)
    if described is not None:
        config["model_type"] = getattr(described, "model_type", "")
        config["model_name_or_path"] = getattr(described, "_name_or_path", "")
        config["vocab_size"] = vocab_size_of(model)
    return config


def init_arguments(args: Any, model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`rlwatch.init` for this training run; what the user gave wins."""
    return {
        "source": source_of(args),
        "output_dir": args.output_dir,
        "config": config_of(args, model),
        "rank": args.process_index,
        "world_size": args.world_size,
        **given,
    }
