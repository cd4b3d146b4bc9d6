"""Description of a ``Trainer``, and checks of the methods that the taps need."""

from __future__ import annotations

import re
from typing import Any

from transformers.integrations import integration_utils

from rlwatch.integrations.compat import Needs, lacking, vocab_size_of

SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Engines of accelerate that keep no whole weight or gradient on a rank."""
HIDDEN = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Engines whose gradients are not in ``.grad`` when the trainer clips them."""
PARTED = (1, 2)
"""Stages of ZeRO that part gradients over the ranks and leave the weights whole."""
CLIP: Needs = {"_clip_grad_norm": ("model",)}
ACCELERATOR: Needs = {"clip_grad_norm_": ("parameters", "max_norm")}
LOSS: Needs = {"training_step": ("model", "inputs")}
"""Methods, and the parameters by which we know them. Before transformers 5.3 the loop clipped through the accelerator,
without a method of its own."""


def unclippable(trainer: Any) -> str | None:
    """Explain why the clipping of ``trainer`` cannot be tapped; None if it can."""
    reason = lacking(trainer, CLIP)
    return None if reason is None or lacking(trainer.accelerator, ACCELERATOR) is None else reason


def sharding_engine(trainer: Any) -> str | None:
    """Return the engine that shards this trainer's weights or gradients, or None."""
    kind = trainer.accelerator.distributed_type
    name = str(getattr(kind, "value", kind))
    return name if name in SHARDED else None


def fsdp2(trainer: Any) -> bool:
    """Return whether accelerate shards this trainer by FSDP2."""
    plugin = getattr(getattr(trainer.accelerator, "state", None), "fsdp_plugin", None)
    return getattr(plugin, "fsdp_version", None) == 2


def deepspeed_engine(trainer: Any) -> Any | None:
    """DeepSpeed's engine, which clips and steps as part of accelerate's backward; None before training, and without."""
    wrapped = getattr(trainer.accelerator, "deepspeed_engine_wrapped", None)
    return None if wrapped is None else wrapped.engine


def unseen(trainer: Any) -> str | None:
    """Return why gradients that an engine keeps outside ``.grad`` cannot be read; None if they can."""
    name = sharding_engine(trainer)
    if name not in HIDDEN:
        return None
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None) if name == "DEEPSPEED" else None
    if plugin is None:
        return f"gradients cannot be seen under {name}"
    stage, config = int(plugin.zero_stage), plugin.deepspeed_config
    if stage not in PARTED:
        return f"gradients are seen under ZeRO-1 and -2 of DeepSpeed, not under stage {stage}"
    if trainer.args.fp16 or config.get("fp16", {}).get("enabled") is True:
        return "gradients are not looked at under DeepSpeed's loss scale of float16"
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    if offload.get("device", "none") != "none":
        return "gradients that DeepSpeed offloads with its optimizer cannot be seen"
    return None


REPORT_TO = "rlwatch"


def offer(callback: type) -> None:
    """Register ``callback`` as ``report_to="rlwatch"``; does nothing if the name is taken or there is no registry.

    transformers has a dict of its trackers, and no other way to add one. The entry has no other effect: "all" means the
    trackers that transformers finds installed.
    """
    registry = getattr(integration_utils, "INTEGRATION_TO_CALLBACK", None)
    if isinstance(registry, dict):
        registry.setdefault(REPORT_TO, callback)


# Description of a training run: source, configuration, output directory.


def source_of(args: Any) -> str:
    """Return ``"trl/grpo"``, ``"trl/rloo"``, ``"trl/online_dpo"``... from the type of the training arguments.

    Subclasses count as the TRL class they extend; what is not TRL's is ``"transformers"``.
    """
    for kind in type(args).__mro__:
        if kind.__module__.startswith("trl.") and kind.__name__.endswith("Config") and kind.__name__[0] != "_":
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__.removesuffix("Config"))
            return f"trl/{name.lower()}"
    return "transformers"


def config_of(args: Any, model: Any = None) -> dict[str, Any]:
    """Return the training arguments, and which model is trained."""
    config: dict[str, Any] = dict(args.to_dict())
    described = getattr(model, "config", None)
    if described is not None:
        config["model_type"] = getattr(described, "model_type", "")
        config["model_name_or_path"] = getattr(described, "_name_or_path", "")
        config["vocab_size"] = vocab_size_of(model)
    return config


def init_arguments(args: Any, model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of :func:`rlwatch.init` for this training run; what the user gave wins."""
    return {
        "source": source_of(args),
        "output_dir": args.output_dir,
        "config": config_of(args, model),
        "rank": args.process_index,
        "world_size": args.world_size,
        **given,
    }
