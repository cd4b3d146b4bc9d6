"""Description of a Hugging Face ``Trainer`` for the run's configuration, and checks of methods that rlwatch wraps."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from transformers.integrations import integration_utils
from transformers.trainer_utils import get_last_checkpoint

from rlwatch.error_boundary import ErrorBoundary, Tapped
from rlwatch.integrations.compat import Needs, lacking, vocab_size_of

SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Engines of accelerate under which a rank holds no whole weights or gradients."""
HIDDEN = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Engines whose gradients are not in ``.grad`` when the trainer clips them."""
PARTED = (1, 2)
"""Stages of ZeRO that partition gradients over the ranks and leave the weights whole."""
CLIP: Needs = {"_clip_grad_norm": ("model",)}
ACCELERATOR: Needs = {"clip_grad_norm_": ("parameters", "max_norm")}
LOSS: Needs = {"training_step": ("model", "inputs")}
"""Methods that are wrapped, and the parameters by which each is recognised.

Before transformers 5.3 the training loop clipped through the accelerator, not through a method of the trainer.
"""


def unclippable(trainer: Any) -> str | None:
    """Return the reason why the clipping of ``trainer`` cannot be wrapped, or None if it can."""
    reason = lacking(trainer, CLIP)
    return None if reason is None or lacking(trainer.accelerator, ACCELERATOR) is None else reason


def sharding_engine(trainer: Any) -> str | None:
    """Return the name of the engine that shards the weights or gradients of ``trainer``, or None."""
    kind = trainer.accelerator.distributed_type
    name = str(getattr(kind, "value", kind))
    return name if name in SHARDED else None


def fsdp2(trainer: Any) -> bool:
    """Return True if accelerate shards the model of ``trainer`` by FSDP2."""
    plugin = getattr(getattr(trainer.accelerator, "state", None), "fsdp_plugin", None)
    return getattr(plugin, "fsdp_version", None) == 2


def deepspeed_engine(trainer: Any) -> Any | None:
    """Return the DeepSpeed engine of ``trainer``, or None before training or without DeepSpeed.

    The engine clips and steps as part of accelerate's backward call.
    """
    wrapped = getattr(trainer.accelerator, "deepspeed_engine_wrapped", None)
    return None if wrapped is None else wrapped.engine


def unseen(trainer: Any) -> str | None:
    """Return the reason why gradients that the engine keeps outside ``.grad`` cannot be read.

    The result is None if gradients can be read.
    """
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
    """Register the class ``callback`` as ``report_to="rlwatch"``, unless the name is taken or there is no registry.

    transformers has a dict of its trackers, and no other way to add one. The entry has no other effect: "all" means the
    trackers that transformers finds installed.
    """
    registry = getattr(integration_utils, "INTEGRATION_TO_CALLBACK", None)
    if isinstance(registry, dict):
        registry.setdefault(REPORT_TO, callback)


# Description of a training run: source, configuration, output directory.


def source_of(args: Any) -> str:
    """Return the name of the trainer for the run, such as ``"trl/grpo"`` or ``"trl/rloo"``, from the type of its
    arguments.

    Subclasses count as the TRL class that they extend. Arguments of other classes give ``"transformers"``.
    """
    for kind in type(args).__mro__:
        if kind.__module__.startswith("trl.") and kind.__name__.endswith("Config") and kind.__name__[0] != "_":
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__.removesuffix("Config"))
            return f"trl/{name.lower()}"
    return "transformers"


def config_of(args: Any, model: Any = None) -> dict[str, Any]:
    """Return the training arguments ``args`` as a dict, with the type, name and vocabulary size of ``model``."""
    config: dict[str, Any] = dict(args.to_dict())
    described = getattr(model, "config", None)
    if described is not None:
        config["model_type"] = getattr(described, "model_type", "")
        config["model_name_or_path"] = getattr(described, "_name_or_path", "")
        config["vocab_size"] = vocab_size_of(model)
    return config


def init_arguments(args: Any, model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of :func:`rlwatch.init` for a training with the arguments ``args``.

    Values in ``given`` take precedence.
    """
    return {
        "source": source_of(args),
        "output_dir": args.output_dir,
        "config": config_of(args, model),
        "rank": args.process_index,
        "world_size": args.world_size,
        **given,
    }


# Detection of the checkpoint from which a call of ``trainer.train`` resumes.


class ResumedFrom:
    """Wrapper of ``trainer.train`` that notes its arguments, which callbacks do not get.

    ``checkpoint`` is the directory from which the last call resumed, or None. ``error_boundary`` is the error boundary
    around the code that finds it.
    """

    def __init__(self, trainer: Any, error_boundary: ErrorBoundary) -> None:
        self.checkpoint: Path | None = None
        original = trainer.train
        signature = inspect.signature(original)

        def train(*args: Any, **kwargs: Any) -> Any:
            self.checkpoint = error_boundary.attempt(
                "resume_from_checkpoint", _checkpoint, trainer, signature, args, kwargs
            )
            return original(*args, **kwargs)

        trainer.train = Tapped(original, train)


def _checkpoint(trainer: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> Path | None:
    """Return the directory, resolved as the trainer does: True means the last checkpoint."""
    given = signature.bind(*args, **kwargs).arguments.get("resume_from_checkpoint")
    if given is True:
        given = get_last_checkpoint(trainer.args.output_dir)
    return Path(given) if given else None
