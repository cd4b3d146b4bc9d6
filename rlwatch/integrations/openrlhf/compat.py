"""Whether this OpenRLHF has what we wrap, and the settings we go by."""

from __future__ import annotations

from typing import Any

from rlwatch.integrations.compat import Needs, installed, lacking_settings

DRIVER = "openrlhf.trainer.ppo_trainer"
ACTOR = "openrlhf.trainer.ray.ppo_actor"
"""Modules that hold what we wrap."""
OF_DRIVER: Needs = {
    "__init__": ("strategy",),
    "train_step": ("rollout_samples", "global_step"),
    "ppo_train": (),
    "save_logs_and_checkpoints": ("global_step", "logs_dict", "client_states"),
}
OF_ACTOR: Needs = {
    "__init__": ("strategy", "actor"),
    "ppo_train": ("kl_ctl",),
    "training_step": ("experience",),
}
"""Methods, and the parameters by which we know them."""
ARGUMENTS = (
    "args.logger",
    "args.ckpt.path",
    "args.ckpt.load_enable",
    "args.ckpt.save_steps",
    "args.rollout.n_samples_per_prompt",
    "args.algo.kl",
    "experience_maker.make_experience_batch",
    "kl_ctl.value",
    "wandb_logger",
)
"""What the driver reads of a ``BasePPOTrainer``. Before 0.10 its arguments were one flat list."""
READ_INSTEAD = "its console output can be read: rlwatch watch train.log"


def unknown() -> str | None:
    """Why nothing can be watched here; None if it may be."""
    return None if openrlhf_version() else "OpenRLHF is not installed"


def unreadable(trainer: Any) -> str | None:
    """Why ``trainer`` cannot be recorded; None if it can."""
    reason = lacking_settings(trainer, ARGUMENTS)
    return None if reason is None else f"OpenRLHF {openrlhf_version()}: {reason}"


def openrlhf_version() -> str:
    """The installed version, or ``""``: for messages."""
    return installed("openrlhf")
