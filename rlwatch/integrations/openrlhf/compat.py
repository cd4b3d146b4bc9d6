"""Settings of rlwatch on OpenRLHF's command line, and checks of the parts of OpenRLHF that it needs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rlwatch.errors import ConfigError
from rlwatch.integrations.compat import Needs, installed, lacking_settings
from rlwatch.integrations.level import Level

DRIVER = "openrlhf.trainer.ppo_trainer"
ACTOR = "openrlhf.trainer.ray.ppo_actor"
"""Modules of OpenRLHF with the wrapped classes."""
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
"""Methods that are wrapped, and the parameters that they must have."""
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
"""Attributes of a ``BasePPOTrainer`` that rlwatch reads. Before 0.10 OpenRLHF's arguments were one flat list."""
READ_INSTEAD = "its console output can be read: rlwatch watch train.log"


def unknown() -> str | None:
    """Return the reason why nothing can be watched here; None if OpenRLHF is installed."""
    return None if openrlhf_version() else "OpenRLHF is not installed"


def unreadable(trainer: Any) -> str | None:
    """Return the reason why ``trainer`` cannot be recorded; None if it can."""
    reason = lacking_settings(trainer, ARGUMENTS)
    return None if reason is None else f"OpenRLHF {openrlhf_version()}: {reason}"


def openrlhf_version() -> str:
    """Return the installed version of OpenRLHF, or ``""``; for messages only."""
    return installed("openrlhf")


# The command line: how closely to watch, and where to record.

PREFIX = "--rlwatch."
FOR_INIT = ("project", "name", "run_id", "store", "config_file", "webhook_url")
"""String arguments of :func:`rlwatch.init` that may be given, in addition to ``forecast``."""
USAGE = "python -m rlwatch.integrations.openrlhf [--rlwatch.project NAME ...] -m openrlhf.cli.train_ppo_ray ..."


@dataclass(frozen=True, slots=True)
class OpenRLHFSettings:
    """Settings of rlwatch in an OpenRLHF training: level of detail, whether to keep text of extreme tokens, arguments
    for :func:`rlwatch.init`.
    """

    level: str = Level.FULL
    text: bool = False
    init: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the settings as a plain dictionary, to send them to other processes."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """Return the settings that :meth:`plain` converted."""
        return cls(**plain)

    def includes(self, level: Level) -> bool:
        """Return True if the level of these settings measures everything that the level ``level`` measures."""
        return Level.of(self.level).includes(level)


def parsed(arguments: Sequence[str]) -> tuple[OpenRLHFSettings, str, list[str]]:
    """Return rlwatch's settings, the module to run and that module's arguments, from the command line ``arguments``.

    Raises ``ConfigError``, with the usage, for invalid arguments.
    """
    if "-m" not in arguments:
        raise ConfigError(f"which module shall run? Usage: {USAGE}")
    at = list(arguments).index("-m")
    if at + 1 == len(arguments):
        raise ConfigError(f"-m needs the name of a module. Usage: {USAGE}")
    given = _read(arguments[:at])
    level = Level.of(given.level)
    init = {name: value for name in (*FOR_INIT, "forecast") if (value := getattr(given, name)) is not None}
    return OpenRLHFSettings(level.value, given.text, init), arguments[at + 1], list(arguments[at + 2 :])


class _Parser(ArgumentParser):
    """Parser whose errors are ``ConfigError``."""

    def error(self, message: str) -> Any:
        """Raise instead of leaving."""
        raise ConfigError(f"{message}. Usage: {USAGE}")


def _read(arguments: Sequence[str]) -> Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"{PREFIX}level", dest="level", default=Level.FULL.value)
    parser.add_argument(f"{PREFIX}text", dest="text", action="store_true")
    parser.add_argument(f"{PREFIX}forecast", dest="forecast", choices=["true", "false"])
    for name in FOR_INIT:
        parser.add_argument(f"{PREFIX}{name}", dest=name)
    given = parser.parse_args(list(arguments))
    if given.forecast is not None:
        given.forecast = given.forecast == "true"
    return given
