"""What a verl configuration says about rlwatch: whether it is wanted, how closely to watch, where to record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rlwatch.errors import ConfigError
from rlwatch.integrations.completions import KeepCompletions
from rlwatch.integrations.level import Level

NAME = "rlwatch"
"""The tracking backend, and the optional section ``trainer.rlwatch``."""

OURS = ("level", "text", "completions")
FOR_INIT = ("project", "name", "run_id", "resume", "store", "tags", "output_dir", "config_file", "webhook_url")
"""Arguments of :func:`rlwatch.init` that ``trainer.rlwatch`` may give."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How closely to watch, which text to keep, and the arguments for :func:`rlwatch.init`.

    Without ``text`` (of extreme tokens) and ``completions`` no text leaves the trainer, only measures of it.
    """

    level: Level = Level.FULL
    text: bool = False
    completions: KeepCompletions | None = None
    init: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any] | None, project: str = "", name: str = "") -> Settings:
        """From verl's whole configuration, as plain dictionaries.

        Raises ``ConfigError`` for what is wrong in ``trainer.rlwatch``, naming what it may hold.
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
        level = Level.of(str(given.get("level", Level.FULL)))
        return cls(level, bool(given.get("text", False)), _keep(given.get("completions", False)), init)


def _keep(wish: Any) -> KeepCompletions | None:
    """``true``, ``false``, or a section with the fields of :class:`KeepCompletions`."""
    if not isinstance(wish, Mapping):
        return KeepCompletions.of(wish)
    try:
        return KeepCompletions(**wish)
    except TypeError:
        known = ", ".join(one.name for one in fields(KeepCompletions))
        raise ConfigError(f"trainer.rlwatch.completions may hold: {known}; got {', '.join(map(str, wish))}") from None


def wanted(loggers: object) -> bool:
    """Whether rlwatch is among ``trainer.logger``, a name or a list of names."""
    return loggers == NAME or (not isinstance(loggers, str) and NAME in list(loggers or ()))  # type: ignore[call-overload]


def plain(config: Any) -> dict[str, Any]:
    """An OmegaConf configuration as dictionaries, its references resolved; a dictionary as it is."""
    if config is None or isinstance(config, dict):
        return config or {}
    from omegaconf import OmegaConf

    return dict(OmegaConf.to_container(config, resolve=True))
