"""What the command line says about rlwatch: how closely to watch, and where to record."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rlwatch.errors import ConfigError
from rlwatch.integrations.level import Level

PREFIX = "--rlwatch."
FOR_INIT = ("project", "name", "run_id", "store", "config_file", "webhook_url")
"""Arguments of :func:`rlwatch.init` that may be given."""
USAGE = "python -m rlwatch.integrations.openrlhf [--rlwatch.project NAME ...] -m openrlhf.cli.train_ppo_ray ..."


@dataclass(frozen=True, slots=True)
class Settings:
    """How closely to watch, whether extreme tokens keep their text, and arguments for :func:`rlwatch.init`."""

    level: str = Level.FULL
    text: bool = False
    init: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As it travels to other processes."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """What :meth:`plain` made."""
        return cls(**plain)

    def includes(self, level: Level) -> bool:
        """Whether what ``level`` adds is watched."""
        return Level.of(self.level).includes(level)


def parsed(arguments: Sequence[str]) -> tuple[Settings, str, list[str]]:
    """The settings, the module to run and its own arguments.

    Raises ``ConfigError`` for what is wrong, with the usage.
    """
    if "-m" not in arguments:
        raise ConfigError(f"which module shall run? Usage: {USAGE}")
    at = list(arguments).index("-m")
    if at + 1 == len(arguments):
        raise ConfigError(f"-m needs the name of a module. Usage: {USAGE}")
    given = _read(arguments[:at])
    level = Level.of(given.level)
    init = {name: getattr(given, name) for name in FOR_INIT if getattr(given, name) is not None}
    return Settings(level.value, given.text, init), arguments[at + 1], list(arguments[at + 2 :])


class _Parser(ArgumentParser):
    """Its errors are ours."""

    def error(self, message: str) -> Any:
        """Raise instead of leaving."""
        raise ConfigError(f"{message}. Usage: {USAGE}")


def _read(arguments: Sequence[str]) -> Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"{PREFIX}level", dest="level", default=Level.FULL.value)
    parser.add_argument(f"{PREFIX}text", dest="text", action="store_true")
    for name in FOR_INIT:
        parser.add_argument(f"{PREFIX}{name}", dest=name)
    return parser.parse_args(list(arguments))
