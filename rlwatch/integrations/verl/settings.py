"""Settings of rlwatch in verl's configuration: whether it is on, how closely to watch, where to record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rlwatch.errors import ConfigError
from rlwatch.integrations.canaries import Canaries
from rlwatch.integrations.completions import KeepCompletions
from rlwatch.integrations.level import Level
from rlwatch.integrations.verl.canaries import canaries_of

NAME = "rlwatch"
"""Name of the tracking backend in ``trainer.logger``, and of the optional section ``trainer.rlwatch``."""

OURS = ("level", "text", "completions", "localise", "budget_ms", "snapshots", "canaries")
FOR_INIT = (
    "project", "name", "run_id", "resume", "store", "tags", "output_dir", "config_file", "webhook_url", "forecast"
)  # fmt: skip
"""Arguments of :func:`rlwatch.init` that the section ``trainer.rlwatch`` may give."""


NOT_HERE = ("skip", "keep_inputs")
"""Settings of localisation that do not work in verl: several optimizer steps share a global step, and verl's engine
skips steps itself.
"""
BUDGET_MS = 1000.0
"""Default time that the driver may spend on the tokens of a step, in milliseconds."""
USE = "use actor_rollout_ref.actor.strategy=fsdp2"


def hindrance(strategy: str) -> str | None:
    """Return the reason why gradient spikes cannot be localised under verl's ``strategy``; None if they can."""
    if strategy == "fsdp":
        return f"FSDP1 flattens parameters, so that none can be displaced by itself; {USE}"
    return None if strategy == "fsdp2" else f"{strategy} does not show gradients parameter by parameter; {USE}"


@dataclass(frozen=True, slots=True)
class VerlSettings:
    """Settings of rlwatch in a verl training: level, text to keep, and the arguments for :func:`rlwatch.init`.

    Without ``text`` (of extreme tokens) and ``completions`` no text leaves the trainer, only measures of it.
    ``localise`` has the given fields of :class:`~rlwatch.integrations.localising.Localise`; None: spikes are not
    localised. ``budget_ms`` is the time that the driver may spend on the tokens of a step, in milliseconds; None: no
    limit. ``snapshots`` has the given fields of :class:`~rlwatch.integrations.snapshots.Snapshots`; None: no snapshots
    are kept. ``canaries`` are answers that the reward function scores now and then, if any.
    """

    level: Level = Level.FULL
    text: bool = False
    completions: KeepCompletions | None = None
    localise: Mapping[str, Any] | None = None
    budget_ms: float | None = BUDGET_MS
    snapshots: Mapping[str, Any] | None = None
    canaries: Canaries | None = None
    init: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any] | None, project: str = "", name: str = "") -> VerlSettings:
        """Read the settings from verl's whole configuration, as plain dictionaries.

        ``project`` and ``name`` override those in ``config``. Raises ``ConfigError`` for an invalid entry in
        ``trainer.rlwatch``; the message lists the valid ones.
        """
        trainer = (config or {}).get("trainer") or {}
        given = dict(trainer.get(NAME) or {})
        unknown = sorted(given.keys() - {*OURS, *FOR_INIT})
        if unknown:
            known = ", ".join((*OURS, *FOR_INIT))
            raise ConfigError(f"trainer.rlwatch has no {unknown[0]!r}; it may hold: {known}")
        init: dict[str, Any] = {
            "project": project or trainer.get("project_name") or "default",
            "name": name or trainer.get("experiment_name"),
            "output_dir": trainer.get("default_local_dir"),
            "resume": "never" if trainer.get("resume_mode") == "disable" else "auto",
            "config": config or {},
            "source": "verl",
            "rank": 0,
            "world_size": 1,
        }
        init |= {key: given[key] for key in FOR_INIT if key in given}
        if not isinstance(init.get("forecast"), bool | None):
            raise ConfigError(f"trainer.rlwatch.forecast is true, false or null; got {init['forecast']!r}")
        level = Level.of(str(given.get("level", Level.FULL)))
        text, completions = bool(given.get("text", False)), _keep(given.get("completions", False))
        actor = ((config or {}).get("actor_rollout_ref") or {}).get("actor") or {}
        localise = _localise(given.get("localise"), level, str(actor.get("strategy", "fsdp")))
        snapshots = _snapshots(given.get("snapshots", False), config or {})
        budget = _budget(given.get("budget_ms", BUDGET_MS))
        canaries = canaries_of(given.get("canaries"))
        return cls(level, text, completions, localise, budget, snapshots, canaries, init)


INSTEAD = "use verl's own checkpoints instead (trainer.save_freq)"


def no_snapshots(config: Mapping[str, Any]) -> str | None:
    """Return the reason why a snapshot could not be restored in a training with this ``config``; None if it can."""
    actor = (config.get("actor_rollout_ref") or {}).get("actor") or {}
    strategy = str(actor.get("strategy", "fsdp"))
    trainer = config.get("trainer") or {}
    mode = str((trainer.get("v1") or {}).get("trainer_mode", "sync"))
    if strategy == "megatron":
        return f"Megatron cuts the model and its optimizer over ranks; {INSTEAD}"
    if strategy != "fsdp2":
        return f"{strategy} holds weights and optimizer in a form that rlwatch does not copy; {USE}, or {INSTEAD}"
    if mode != "sync":
        return (
            f"the trainer {mode} goes on sampling while it trains, and what it has sampled with weights that are "
            f"undone cannot be dropped; {INSTEAD}"
        )
    if str((config.get("algorithm") or {}).get("adv_estimator", "gae")) == "gae":
        return f"the critic is trained beside the policy, and is in no snapshot; {INSTEAD}"
    return None


def _snapshots(wish: Any, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Parse ``true``, ``false``, or a section with the fields of ``Snapshots``."""
    if not wish:
        return None
    from rlwatch.integrations.snapshots import Snapshots

    given = {} if wish is True else wish
    known = [one.name for one in fields(Snapshots)]
    if not isinstance(given, Mapping) or not given.keys() <= set(known):
        got = ", ".join(map(str, given)) if isinstance(given, Mapping) else repr(given)
        raise ConfigError(f"trainer.rlwatch.snapshots is true, false, or holds: {', '.join(known)}; got {got}")
    Snapshots(**given)
    reason = no_snapshots(config)
    if reason is not None:
        raise ConfigError(f"trainer.rlwatch.snapshots: {reason}")
    return dict(given)


def _budget(wish: Any) -> float | None:
    if wish is None or (isinstance(wish, int | float) and not isinstance(wish, bool) and wish > 0):
        return None if wish is None else float(wish)
    raise ConfigError(f"trainer.rlwatch.budget_ms is milliseconds above 0, or null for no limit; got {wish!r}")


def _keep(wish: Any) -> KeepCompletions | None:
    """Parse ``true``, ``false``, or a section with the fields of :class:`KeepCompletions`."""
    if not isinstance(wish, Mapping):
        return KeepCompletions.of(wish)
    try:
        return KeepCompletions(**wish)
    except TypeError:
        known = ", ".join(one.name for one in fields(KeepCompletions))
        raise ConfigError(f"trainer.rlwatch.completions may hold: {known}; got {', '.join(map(str, wish))}") from None


def _localise(wish: Any, level: Level, strategy: str) -> Mapping[str, Any] | None:
    """Parse ``true``, ``false``, or a section with the fields of ``Localise``; on by default if it is possible."""
    if wish is None:
        return {} if level.includes(Level.FULL) else None
    if wish is False:
        return None
    fields_given = {} if wish is True else _fields(wish)
    if not level.includes(Level.TOKENS):
        raise ConfigError(f"trainer.rlwatch.localise needs level=tokens or closer, got {level.value!r}")
    reason = hindrance(strategy)
    if reason is not None:
        raise ConfigError(f"trainer.rlwatch.localise: {reason}")
    return fields_given


def _fields(wish: Any) -> Mapping[str, Any]:
    from rlwatch.integrations.localising import Localise

    known = [one.name for one in fields(Localise) if one.name not in NOT_HERE]
    if not isinstance(wish, Mapping) or not wish.keys() <= set(known):
        got = ", ".join(map(str, wish)) if isinstance(wish, Mapping) else repr(wish)
        raise ConfigError(f"trainer.rlwatch.localise is true, false, or holds: {', '.join(known)}; got {got}")
    Localise(**wish)
    return dict(wish)


def wanted(loggers: object) -> bool:
    """Return True if ``"rlwatch"`` is among verl's ``trainer.logger``, a name or a list of names."""
    return loggers == NAME or (not isinstance(loggers, str) and NAME in list(loggers or ()))  # type: ignore[call-overload]


def plain(config: Any) -> dict[str, Any]:
    """Return verl's OmegaConf configuration as dictionaries with resolved references; a dictionary is returned
    unchanged.
    """
    if config is None or isinstance(config, dict):
        return config or {}
    from omegaconf import OmegaConf

    return dict(OmegaConf.to_container(config, resolve=True))
