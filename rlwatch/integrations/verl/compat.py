"""Checks that the installed verl has the parts that rlwatch needs, in its classes and sources, never by version number.

Imports neither torch nor verl. ``docs/verl.md`` has a table of the measurements possible with each release; ``make
nightly`` checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlwatch.integrations.compat import Needs, installed, lacking

LAUNCH = "python -m rlwatch.integrations.verl -m verl.trainer.main_ppo ..."
"""Command that starts a verl which loads no plugins."""
V1 = "verl.trainer.ppo.v1.trainer_base"
"""Module of the trainer that is instrumented."""

TRACKING: Needs = {"__init__": ("project_name", "experiment_name", "default_backend", "config")}
TRAINER: Needs = {"init": (), "fit": ()}
"""Methods of ``PPOTrainer`` without which only the scalars that it logs are recorded."""
PARTS: Mapping[str, Needs] = {
    "the tokens of a step's batch": {"_compute_metrics": ("batch",)},
    "commands": {"on_step_end": ()},
    "what a checkpoint keeps (reset references, settings)": {"_load_checkpoint": (), "_save_checkpoint": ()},
}
"""Part of the recording -> the methods of ``PPOTrainer`` that it needs."""
STEPS: Needs = {"optimizer_step": ()}
PASSES: Needs = {"forward_step": ("loss_function", "forward_only")}
"""Methods of an actor's engine that are needed to read gradients, and to repeat its loss passes."""


def verl_version() -> str:
    """Return the installed version of verl, or ``""``; for messages only."""
    return installed("verl")


def missing_parts(trainer: Any) -> dict[str, str]:
    """Return the parts that cannot be recorded of ``trainer`` (a ``PPOTrainer``, class or instance), with the
    reasons.
    """
    reasons = {part: lacking(trainer, needs) for part, needs in PARTS.items()}
    return {part: reason for part, reason in reasons.items() if reason is not None}


def policy_losses() -> MutableMapping[str, Callable[..., Any]]:
    """Return verl's registry of policy losses by name; empty if verl has none."""
    try:
        registry = getattr(import_module("verl.trainer.ppo.core_algos"), "POLICY_LOSS_REGISTRY", None)
    except ImportError:
        return {}
    return registry if isinstance(registry, MutableMapping) else {}


def missing_of_actor(actor: Any, registry: Mapping[str, Any]) -> dict[str, str]:
    """Return the measurements that are not possible on ``actor`` (a ``TrainingWorker``), with the reasons.

    ``registry`` is verl's registry of policy losses.
    """
    missing = {}
    if not registry:
        missing["ratios and clip fractions of the update"] = "there is no registry of policy losses"
    if not callable(getattr(actor, "loss_fn", None)):
        missing["raw loss"] = f"{type(actor).__name__} has no loss_fn"
    reason = lacking(actor.engine, STEPS)
    if reason is not None:
        missing["gradients"] = reason
    return missing


def loads_plugins() -> bool:
    """Return True if the installed verl loads plugins by their entry points, as 0.9 and later do.

    No module of verl is imported.
    """
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        return False
    here = Path(spec.origin).parent
    sources = (here / "__init__.py", here / "utils" / "plugins.py")
    return any("verl.plugins" in source.read_text(encoding="utf-8") for source in sources if source.is_file())


def scalars_only(how: str | None, v1: str = V1) -> str:
    """Return the reason why only a trainer's scalars are recorded.

    ``how`` is the state of the hook on the v1 trainer (None: unhooked); ``v1`` is the module of that trainer.
    """
    if how is not None and how.startswith(REFUSED):
        return how.removeprefix(REFUSED)
    try:
        there = find_spec(v1) is not None
    except ImportError:
        there = False
    if not there:
        return "this verl has no v1 trainer; verl 0.9 and later do"
    return "this trainer is no v1 PPOTrainer (trainer.use_v1=true selects it)"


REFUSED = "scalars only: "
"""Prefix of the state of the hook on a trainer that lacks a required part; the reason follows."""


def in_words(missing: Mapping[str, str]) -> str:
    """Return one line of text with the parts that are not recorded; ``missing`` maps each part to the reason."""
    parts = "; ".join(f"not {part}: {reason}" for part, reason in missing.items())
    installed_here = verl_version() or "?"
    return f"of verl {installed_here} rlwatch does not record everything ({parts}); all the rest is, see docs/verl.md"
