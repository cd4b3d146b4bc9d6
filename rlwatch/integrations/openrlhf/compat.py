"""Which OpenRLHF this is, and whether it has what we wrap."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

KNOWN = ("0.11.",)
"""Versions whose code was read; tests run against 0.11.2."""
DRIVER = "openrlhf.trainer.ppo_trainer"
ACTOR = "openrlhf.trainer.ray.ppo_actor"
"""Modules that hold what we wrap."""
OF_DRIVER: Mapping[str, Sequence[str]] = {
    "__init__": ("strategy",),
    "train_step": ("rollout_samples", "global_step"),
    "ppo_train": (),
    "save_logs_and_checkpoints": ("global_step", "logs_dict", "client_states"),
}
OF_ACTOR: Mapping[str, Sequence[str]] = {
    "__init__": ("strategy", "actor"),
    "ppo_train": ("kl_ctl",),
    "training_step": ("experience",),
}
"""Methods, and the parameters by which we know them."""


def unknown() -> str | None:
    """Why this OpenRLHF cannot be watched; None if it can."""
    installed = openrlhf_version()
    if not installed:
        return "OpenRLHF is not installed"
    return None if installed.startswith(KNOWN) else f"OpenRLHF {installed} is not known (known: 0.11)"


def lacking(kind: Any, needs: Mapping[str, Sequence[str]]) -> str | None:
    """Which of the methods ``needs`` names a class lacks, in words; None if it has all."""
    for method, parameters in needs.items():
        found = vars(kind).get(method)
        if not callable(found):
            return f"{kind.__name__} has no {method}"
        known = inspect.signature(found).parameters
        absent = [name for name in parameters if name not in known]
        if absent:
            return f"{kind.__name__}.{method} has no parameter {absent[0]!r}"
    return None


def openrlhf_version() -> str:
    """The installed version, or ``""``."""
    try:
        return version("openrlhf")
    except PackageNotFoundError:
        return ""
